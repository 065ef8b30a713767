"""A pull whose source fails: at most one other is asked, in what is left of the time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from trunkline.core.transfer import Grant, PullEnd, Reason, keys_digest
from trunkline.kv.client import Puller
from trunkline.kv.judge import PullHost
from trunkline.kv.orders import Pulled, PullOrder
from trunkline.kv.pulls import Cancel, PullRequest, PullResult
from trunkline.ports.clock import Clock
from trunkline.worker.blocks import Terms
from trunkline.worker.link import Link
from trunkline.worker.pulls import PullCall, Pulls, PullTerms
from worker_tenants import BLOCK, EPOCHS, NS, SUBJECTS, Store, ticket, tokens

PROMPT = tokens(4 * BLOCK + 6)
KEY = bytes(32)
ORDER = PullOrder(grant="", host="h", port=1, local="", source="s1")
TERMS = Terms(ticket=ticket())
Step = Callable[["Bench", Cancel], tuple[PullEnd, Reason | None, int]]


def ends(end: PullEnd, reason: Reason | None, blocks: int = 0, takes_ms: float = 5.0) -> Step:
    def step(bench: Bench, cancel: Cancel) -> tuple[PullEnd, Reason | None, int]:
        bench.store.boot_ms += takes_ms
        return end, reason, blocks

    return step


def fails(reason: Reason, takes_ms: float = 5.0) -> Step:
    return ends(PullEnd.REJECTED, reason, takes_ms=takes_ms)


PUBLISHED = ends(PullEnd.PUBLISHED, None, 4)


@dataclass
class Bench:
    """Pulls whose every source does what the test says. A pull may take 100 ms, of its clock."""

    steps: list[Step]
    link: Link = field(default_factory=lambda: Link(0.001))
    asked: list[PullRequest] = field(default_factory=list[PullRequest])
    coming: list[int] = field(default_factory=list[int])
    """How many blocks others were made to wait for, at each ask."""

    def __post_init__(self) -> None:
        self.store = Store(host=32)
        self.store.lease()
        self.pulls = Pulls(
            self.store.behind,
            cast("Puller", self),
            transfer_key=KEY,
            clock=cast("Clock", self.store),
            link=self.link,
            host=PullHost(self.store.fence),
            terms=PullTerms(
                block_tokens=BLOCK,
                token_bytes=1,
                setup_ms=1.0,
                patience_ms=100.0,
                saved_ms=lambda first, last: 1e9,
            ),
        )

    def pull(self, request: PullRequest, cancel: Cancel) -> PullResult:
        """As a puller does, in a thread of its own."""
        self.asked.append(request)
        self.coming.append(len(self.pulls._coming))
        end, reason, blocks = self.steps[len(self.asked) - 1](self, cancel)
        return PullResult(
            end=end, reason=reason, blocks=blocks, bytes=0, ms=0.0, setup_ms=0.0, verify_ms=0.0
        )

    def close(self) -> None:
        pass

    def grant(self, source: str, **changes: Any) -> str:
        names = self.store.cache.sketch(PROMPT, "salt", TERMS).hashes[:4]
        grant = Grant(
            source=source,
            source_incarnation="1",
            destination="d",
            destination_incarnation="2",
            ns=NS,
            subjects=SUBJECTS,
            epochs=EPOCHS,
            rev=9,
            layout=bytes(16),
            first_block=0,
            block_count=4,
            keys=keys_digest(b"".join(names)),
            max_bytes=1 << 20,
            deadline_ms=9_000,
            nonce=bytes(16),
        )
        return replace(grant, **changes).signed(KEY)

    def fetched(self, first: PullOrder = ORDER, **other: Any) -> Pulled:
        """What becomes of a pull from `s1`, or else `s2`."""
        second = replace(ORDER, source="s2", grant=self.grant("s2"))
        order = replace(first, grant=self.grant("s1"), other=replace(second, **other))

        async def scenario() -> Pulled:
            call = PullCall(order)
            await self.pulls.fetch(call, self.store.cache, PROMPT, "salt", TERMS)
            assert call.pulled is not None
            return call.pulled

        pulled = asyncio.run(asyncio.wait_for(scenario(), 5))
        self.pulls.close()
        assert (self.pulls.open_count, self.pulls._coming) == (0, {})
        return pulled

    @property
    def sources(self) -> list[str]:
        return [request.source.worker for request in self.asked]


OF_SOURCE = [reason for reason in Reason if reason.is_of_source]


@pytest.mark.parametrize("reason", OF_SOURCE)
def test_where_the_source_fails_the_other_is_asked_and_both_ends_are_told(reason: Reason) -> None:
    bench = Bench([fails(reason, takes_ms=7.0), PUBLISHED])
    pulled = bench.fetched()
    assert bench.sources == ["s1", "s2"]
    told = json.loads(pulled.told())
    assert (told["end"], told["reason"], told["blocks"], told["ms"]) == ("published", None, 4, 5.0)
    assert told["first"] == {"reason": reason.value, "ms": 7.0}
    assert bench.pulls.ended == {(PullEnd.REJECTED, reason): 1, (PullEnd.PUBLISHED, None): 1}


def test_where_both_fail_nobody_else_is_asked() -> None:
    bench = Bench([fails(Reason.MISS), fails(Reason.LOST), PUBLISHED])
    pulled = bench.fetched()
    assert bench.sources == ["s1", "s2"]
    assert (pulled.end, pulled.reason) == (PullEnd.REJECTED, Reason.LOST)
    assert pulled.first is not None
    assert pulled.first.reason is Reason.MISS


@pytest.mark.parametrize("reason", [reason for reason in Reason if not reason.is_of_source])
def test_what_would_end_alike_elsewhere_is_not_asked_for_there(reason: Reason) -> None:
    bench = Bench([fails(reason)])
    pulled = bench.fetched()
    assert (bench.sources, pulled.reason, pulled.first) == (["s1"], reason, None)
    assert "first" not in json.loads(pulled.told())


def test_of_what_came_in_part_the_rest_is_computed() -> None:
    bench = Bench([ends(PullEnd.PUBLISHED, Reason.DIGEST, 2)])
    pulled = bench.fetched()
    assert (bench.sources, pulled.blocks) == (["s1"], 2)


def test_the_other_source_has_what_is_left_of_the_time() -> None:
    bench = Bench([fails(Reason.LOST, takes_ms=60.0), PUBLISHED])
    bench.fetched()
    first, second = bench.asked
    assert first.deadline == second.deadline == 1_100.0


@pytest.mark.parametrize("takes_ms", [100.0, 250.0])
def test_after_the_deadline_no_other_source_is_asked(takes_ms: float) -> None:
    bench = Bench([fails(Reason.TIMEOUT, takes_ms=takes_ms)])
    assert bench.fetched().reason is Reason.TIMEOUT
    assert bench.sources == ["s1"]


def test_where_the_link_is_taken_until_the_deadline_the_other_source_is_not_asked() -> None:
    def fail(bench: Bench, cancel: Cancel) -> tuple[PullEnd, Reason | None, int]:
        bench.store.boot_ms += 5.0
        assert bench.link.book(200_000, bench.store.now()) is not None
        return PullEnd.REJECTED, Reason.LOST, 0

    bench = Bench([fail])
    pulled = bench.fetched()
    assert (bench.sources, pulled.reason) == (["s1"], Reason.BUSY)
    assert pulled.first is not None


def test_an_order_whose_address_is_of_no_use_still_has_the_other() -> None:
    bench = Bench([PUBLISHED])
    pulled = bench.fetched(replace(ORDER, fault=Reason.CONNECT))
    assert bench.sources == ["s2"]
    assert pulled.first is not None
    assert pulled.first.reason is Reason.CONNECT


def test_another_order_that_is_of_no_use_costs_nothing() -> None:
    bench = Bench([fails(Reason.MISS)])
    pulled = bench.fetched(grant="rubbish")
    assert (bench.sources, pulled.reason) == (["s1"], Reason.GRANT)


def test_a_client_that_leaves_while_the_first_fails_is_not_served_from_the_other() -> None:
    def fail(bench: Bench, cancel: Cancel) -> tuple[PullEnd, Reason | None, int]:
        cancel.cancel()
        return PullEnd.REJECTED, Reason.LOST, 0

    bench = Bench([fail])
    pulled = bench.fetched()
    assert (bench.sources, pulled.first) == (["s1"], None)
    assert bench.pulls.ended == {(PullEnd.REJECTED, Reason.LOST): 1}


def test_a_client_that_leaves_during_the_second_try_ends_it() -> None:
    def leave(bench: Bench, cancel: Cancel) -> tuple[PullEnd, Reason | None, int]:
        cancel.cancel()
        return PullEnd.CANCELLED, Reason.CLIENT, 0

    bench = Bench([fails(Reason.LOST), leave])
    pulled = bench.fetched()
    assert (bench.sources, pulled.end) == (["s1", "s2"], PullEnd.CANCELLED)


def test_what_is_revoked_between_the_two_is_not_asked_for_again() -> None:
    def revoke(bench: Bench, cancel: Cancel) -> tuple[PullEnd, Reason | None, int]:
        bench.store.lease(10, **{SUBJECTS[2]: EPOCHS[2] + 1})
        return PullEnd.REJECTED, Reason.LOST, 0

    bench = Bench([revoke])
    pulled = bench.fetched()
    assert (bench.sources, pulled.reason) == (["s1"], Reason.EPOCH)


def test_others_wait_for_both_tries_and_the_link_is_free_after_them() -> None:
    bench = Bench([fails(Reason.LOST), fails(Reason.MISS)], link=Link(1.0))
    bench.fetched()
    assert bench.coming == [4, 4]
    assert bench.link.free_at <= bench.store.now()
