"""Ten thousand pulls that come to nothing, in every way, and nothing of them is left."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from pull_desk import SERVER, STALL_MS, Ends, open_files, running, wait_until

from trunkline.core.transfer import PullEnd, Reason
from trunkline.kv.pulls import Cancel
from trunkline.kv.staging import Staging

TOTAL = 10_000
ONE_BY_ONE = replace(SERVER, batch_bytes=1)
ENDS: list[tuple[PullEnd, Reason]] = [
    (PullEnd.CANCELLED, Reason.CLIENT),
    (PullEnd.REJECTED, Reason.EPOCH),
    (PullEnd.CANCELLED, Reason.GIVEN_UP),
    (PullEnd.REJECTED, Reason.LEASE),
    (PullEnd.REJECTED, Reason.TIMEOUT),
    (PullEnd.REJECTED, Reason.GRANT),
    (PullEnd.REJECTED, Reason.STAGING_FULL),
    (PullEnd.REJECTED, Reason.MISS),
]


@pytest.mark.slow
@pytest.mark.parametrize("is_local", [False, True], ids=["tcp", "shared-memory"])
def test_aborted_pulls_leak_nothing(is_local: bool) -> None:
    ends = Ends(is_local=is_local, block_count=2, server_options=ONE_BY_ONE)
    with running(ends):
        ends.puller.pull(ends.request())  # opens what stays open
        _quieten(ends)
        ends.destination.store.condemn(lambda owner: True)
        while ends.destination.store.erase(100):
            pass
        before = ends.destination.store.figures()
        threads, files = threading.active_count(), open_files()
        seen: Counter[tuple[PullEnd, Reason | None]] = Counter()
        for number in range(TOTAL // 2):
            seen[_abort(ends, ENDS[number % len(ENDS)], number)] += 1
        assert sum(seen.values()) == TOTAL // 2
        assert set(seen) == set(ENDS)
        after = ends.destination.store.figures()
        assert ends.destination.hits(ends.places, ends.whose) == 0
        assert (after.staged_bytes, after.quarantined_bytes) == (0, 0)
        assert (after.host_bytes, after.free_bytes) == (before.host_bytes, before.free_bytes)
        assert after.void_tokens == before.void_tokens == 0
        ends.settled()
        assert ends.source.store.figures().void_tokens == 0
        figures = ends.puller.figures
        assert (figures.open_pulls, figures.overdue_pulls) == (0, 0)
        wait_until(lambda: threading.active_count() <= threads and open_files() <= files)


def _abort(
    ends: Ends, wanted: tuple[PullEnd, Reason], number: int
) -> tuple[PullEnd, Reason | None]:
    """One pull that ends like that, at a chunk that differs from time to time."""
    at = 2 + number % 3
    cancel = Cancel()
    request = ends.request()
    held: list[Staging] = []

    def at_chunk(act: Callable[[], object]) -> Callable[[int], object]:
        return lambda asked: act() if asked == at else None

    match wanted[1]:
        case Reason.CLIENT:
            ends.host.at_ask = at_chunk(cancel.cancel)
        case Reason.EPOCH:
            ends.host.at_ask = at_chunk(lambda: setattr(ends.host, "reason", Reason.EPOCH))
        case Reason.LEASE:
            there = ends.source_host
            there.at_ask = at_chunk(lambda: setattr(there, "reason", Reason.LEASE))
        case Reason.GIVEN_UP:
            request = replace(request, should_give_up=lambda blocks, paced_ms: paced_ms is not None)
        case Reason.TIMEOUT:
            late_ms = ends.clock.ms + 2 * STALL_MS
            ends.host.at_ask = at_chunk(lambda: setattr(ends.clock, "ms", late_ms))
        case Reason.GRANT:
            request = ends.request(grant=ends.grant(deadline_ms=1))
        case Reason.STAGING_FULL:
            held = [ends.destination.stage(ends.places, ends.whose) for _ in range(4)]
        case _:
            places = (replace(ends.places[0], key=bytes(32)),)
            request = ends.request(grant=ends.grant(places), places=places)
    result = ends.puller.pull(request, cancel)
    for staging in held:
        assert ends.destination.store.abandon(staging.token)
    _quieten(ends)
    return result.end, result.reason


def _quieten(ends: Ends) -> None:
    """Both hosts have nothing against anything, and count anew."""
    wait_until(lambda: ends.server.figures.open_pulls == 0)
    for host in (ends.host, ends.source_host):
        host.at_ask, host.reason, host.asked = None, None, 0
