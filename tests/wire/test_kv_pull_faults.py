"""Everything that can go wrong in a pull, at every chunk: nothing unverified is ever visible.

After each pull `Ends.check` sees that what is found is right, that nothing is staged any more, and
that the pull ended in one way.
"""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest
from faulty_source import Planted, serving
from pull_desk import PATIENT, STALL_MS, Ends, running

from kv_desk import LAYOUT
from trunkline.core.records import Instant
from trunkline.core.transfer import PullEnd, Reason
from trunkline.kv.pulls import PullResult

BLOCKS = 3
CHUNKS_A_BLOCK = 4
BOUNDARIES = range(BLOCKS * CHUNKS_A_BLOCK)
TRANSPORTS = pytest.mark.parametrize("is_local", [False, True], ids=["tcp", "shared-memory"])

AT_A_CHUNK = {
    Planted.FLIP: Reason.DIGEST,
    Planted.MIX: Reason.DIGEST,
    Planted.TRUNCATE: Reason.LOST,
    Planted.CLOSE: Reason.LOST,
    Planted.STALL: Reason.TIMEOUT,
    Planted.DRIP: Reason.TIMEOUT,
    Planted.DUPLICATE: Reason.PROTOCOL,
    Planted.OUT_OF_ORDER: Reason.PROTOCOL,
    Planted.SHORT_CHUNK: Reason.LENGTH,
    Planted.LONG_CHUNK: Reason.LENGTH,
    Planted.EMPTY_CHUNK: Reason.LENGTH,
    Planted.RUBBISH: Reason.PROTOCOL,
    Planted.OTHER_KIND: Reason.PROTOCOL,
    Planted.STOP: Reason.EPOCH,
}
BEFORE_ANY_CHUNK = {
    Planted.WRONG_REVISION: Reason.LAYOUT,
    Planted.WRONG_LENGTH: Reason.LENGTH,
    Planted.EMPTY_BLOCK: Reason.LENGTH,
    Planted.TOO_FEW_DIGESTS: Reason.LENGTH,
    Planted.TOO_MANY_BLOCKS: Reason.PROTOCOL,
    Planted.FEWER_WITHOUT_REASON: Reason.PROTOCOL,
    Planted.FORGED_MANIFEST: Reason.PROTOCOL,
    Planted.OTHER_GRANTS_MANIFEST: Reason.PROTOCOL,
    Planted.HUGE_MESSAGE: Reason.PROTOCOL,
    Planted.ENDLESS_MESSAGE: Reason.TIMEOUT,
    Planted.NO_MESSAGE: Reason.PROTOCOL,
    Planted.OTHER_LIFE: Reason.INCARNATION,
    Planted.OTHER_KEY: Reason.PROTOCOL,
    Planted.REFUSES_AS_WE: Reason.PROTOCOL,
    Planted.REFUSES_EARLY: Reason.PROTOCOL,
}


def pulled(planted: Planted, at: int = 0, *, is_local: bool = False) -> PullResult:
    ends = Ends(block_count=BLOCKS, is_local=is_local)
    with serving(ends, planted, at) as faulty:
        result = ends.pull(ends.request(faulty.source))
    assert ends.source.store.figures().pinned_bytes == 0
    return result


@TRANSPORTS
@pytest.mark.parametrize("planted", AT_A_CHUNK, ids=lambda planted: planted.value)
def test_a_fault_at_any_chunk_leaves_the_verified_whole_blocks_before_it_and_no_more(
    planted: Planted, is_local: bool
) -> None:
    for at in BOUNDARIES:
        result = pulled(planted, at, is_local=is_local)
        assert result.reason is AT_A_CHUNK[planted]
        # It ends at this chunk and not behind it; before the first one there is none to repeat.
        right_chunks = at or int(planted is Planted.DUPLICATE)
        assert result.bytes == right_chunks * LAYOUT.chunk_bytes
        whole = at // CHUNKS_A_BLOCK
        if planted is Planted.STOP:
            whole = 0  # what is revoked is not kept, verified or not
        assert result.blocks == whole
        assert result.end is (PullEnd.PUBLISHED if whole else PullEnd.REJECTED)


@TRANSPORTS
@pytest.mark.parametrize("planted", BEFORE_ANY_CHUNK, ids=lambda planted: planted.value)
def test_a_source_that_is_wrong_about_itself_or_its_blocks_gets_nothing_in(
    planted: Planted, is_local: bool
) -> None:
    result = pulled(planted, is_local=is_local)
    assert (result.end, result.reason) == (PullEnd.REJECTED, BEFORE_ANY_CHUNK[planted])
    assert (result.blocks, result.bytes) == (0, 0)


@TRANSPORTS
def test_the_faulty_source_serves_well_where_nothing_is_planted(is_local: bool) -> None:
    """Otherwise the tests above could pass for the wrong reason."""
    result = pulled(Planted.NOTHING, is_local=is_local)
    assert (result.end, result.reason, result.blocks) == (PullEnd.PUBLISHED, None, BLOCKS)


def test_a_slot_that_is_none_is_not_read() -> None:
    result = pulled(Planted.WRONG_SLOT, 5, is_local=True)
    assert (result.reason, result.blocks) == (Reason.PROTOCOL, 1)


def test_d28_a_peer_that_says_nothing_costs_the_time_for_a_greeting() -> None:
    ends = Ends()
    ends.clock.ms = 0.0
    with serving(ends, Planted.SILENT) as faulty:
        request = ends.request(faulty.source, deadline=Instant(2 * STALL_MS))
        result = ends.pull(request)
    assert (result.end, result.reason) == (PullEnd.REJECTED, Reason.TIMEOUT)


def test_d11_d25_a_deadline_before_the_time_for_a_chunk_ends_the_pull_too() -> None:
    ends = Ends()
    with serving(ends, Planted.STALL, 6) as faulty:
        near = Instant(ends.clock.ms + STALL_MS / 2)
        result = ends.pull(replace(ends.request(faulty.source), deadline=near))
    assert (result.reason, result.blocks) == (Reason.TIMEOUT, 1)
    assert ends.puller.figures.overdue_pulls == 0


def test_nobody_there_is_said_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        nobody = ("127.0.0.1", listener.getsockname()[1])
    ends = Ends()
    result = ends.pull(ends.request(ends.at(nobody)))
    assert (result.end, result.reason) == (PullEnd.REJECTED, Reason.CONNECT)


def test_a_refusal_is_heard_however_long_the_source_took_to_find_it() -> None:
    with running(Ends(pull_options=PATIENT)) as ends:

        def take_long(_asked: int) -> None:
            ends.clock.ms += STALL_MS + 1

        ends.source_host.reason = Reason.BUSY
        ends.source_host.at_ask = take_long
        result = ends.pull()
        assert (result.end, result.reason) == (PullEnd.REJECTED, Reason.BUSY)
        ends.settled()
