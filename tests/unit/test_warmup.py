"""Warming up: what counts as hot, who is kept out for it, and for how long at the most."""

from __future__ import annotations

import asyncio
import json
from array import array
from dataclasses import replace

import pytest
from picker_bench import derive

from hand_clock import HandClock
from trunkline.core.decision import Exclusion
from trunkline.core.directory import Directory
from trunkline.core.fleet import Fleet, WorkerState
from trunkline.core.links import LinkProfile, Links
from trunkline.core.records import BootInstant, Instant, WorkerId
from trunkline.errors import WorkerLost
from trunkline.gateway.contracts import OPEN_GRANT
from trunkline.gateway.errands import Errands
from trunkline.gateway.hot import LEAST_COUNT, MAX_HOT, MOST_TOKENS, WARMED, HotPrompts
from trunkline.gateway.namespaces import Namespaces
from trunkline.gateway.pulls import PullDesk
from trunkline.gateway.warmup import Warmer, WarmerParts
from trunkline.observe import EventLog
from trunkline.ports.worker import Endpoint, PullAddress, Target

BLOCK = 16
T0 = Instant(1_000.0)


class Agent:
    takes_tickets = True
    has_salt_regions = False

    def __init__(self, name: str) -> None:
        self.pull: PullAddress | None = PullAddress(
            worker=name, incarnation="life", host="127.0.0.1", port=9, local="",
            layout=b"l" * 16, block_bytes=1_024,
        )  # fmt: skip


class Bench:
    """A warmer over a real fleet and directory; its posts are kept, and answered at once."""

    def __init__(self) -> None:
        self.clock = HandClock()
        self.fleet = Fleet(virtual_nodes=8, now=T0)
        self.directory = Directory(max_blocks=10_000)
        self.namespaces = Namespaces(derive, self.directory, draw=bytes)
        links = Links(LinkProfile(), bytes_per_token=1_000)
        self.desk = PullDesk(
            links,
            transfer_key=b"k" * 32,
            clock=self.clock,
            draw=bytes,
            on_missing=lambda worker, name: None,
        )
        self.agents: dict[WorkerId, Agent] = {}
        self.posts: list[tuple[str, dict[str, str]]] = []
        self.is_failing = False
        self.warmer = Warmer(
            WarmerParts(
                desk=self.desk,
                namespaces=self.namespaces,
                directory=self.directory,
                fleet=self.fleet,
                target_of=self._target,
                errands=Errands(
                    namespaces=self.namespaces, served_model=lambda: "m", post=self._post
                ),
                clock=self.clock,
                log=EventLog("test-warmup"),
            )
        )

    def join(self, name: str) -> WorkerState:
        worker = WorkerId(name)
        slot = self.directory.join(worker, block_tokens=BLOCK)
        state = WorkerState(worker=worker, slot=slot, block_tokens=BLOCK)
        self.fleet.add(state)
        self.agents[worker] = Agent(name)
        return state

    def heat(self, first: int = 0, times: int = 5, tokens: int = 2_048) -> array[int]:
        prompt = array("I", range(first, first + tokens + 100))
        keys = self.namespaces.keys(OPEN_GRANT, prompt, BLOCK)
        assert keys is not None
        for _ in range(times):
            self.desk.hot.note(OPEN_GRANT, keys.private, prompt, tokens, self.clock.now())
        return prompt

    def hold(self, worker: str, prompt: array[int]) -> None:
        keys = self.namespaces.keys(OPEN_GRANT, prompt, BLOCK)
        assert keys is not None
        now = self.clock.now()
        self.directory.predict(WorkerId(worker), keys.private, now=now, ttl_ms=1e9)

    def excluded(self) -> dict[WorkerId, Exclusion]:
        return self.fleet.usable(BootInstant(0.0))[1]

    def _target(self, worker: WorkerId) -> Target | None:
        endpoint = Endpoint(host="127.0.0.1", port=1, host_header=worker)
        return Target(worker=worker, endpoint=endpoint, agent=self.agents[worker])

    async def _post(
        self,
        endpoint: Endpoint,
        path: str,
        body: bytes,
        *,
        timeout_ms: float,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> tuple[int, bytes]:
        self.posts.append((endpoint.host_header, dict(headers)))
        if self.is_failing:
            raise WorkerLost("gone")
        assert json.loads(body)["max_tokens"] == 1
        return 200, b"{}"


def test_what_is_asked_for_most_and_saves_most_is_hottest() -> None:
    bench = Bench()
    bench.heat(0, times=9, tokens=2_048)
    bench.heat(50_000, times=4, tokens=8_192)
    bench.heat(90_000, times=int(LEAST_COUNT) - 1)
    hottest = bench.desk.hot.hottest(bench.clock.now(), BLOCK)
    assert [len(one.tokens) for one in hottest] == [8_192, 2_048]
    assert bench.desk.hot.hottest(bench.clock.now(), 32) == []


def test_turns_of_one_session_count_together_and_heat_fades() -> None:
    bench = Bench()
    prompt = array("I", range(9_000))
    keys = bench.namespaces.keys(OPEN_GRANT, prompt, BLOCK)
    assert keys is not None
    for reused in (1_024, 1_500, 1_900, 2_040):
        bench.desk.hot.note(OPEN_GRANT, keys.private, prompt, reused, bench.clock.now())
    assert len(bench.desk.hot) == 1
    assert len(bench.desk.hot.hottest(bench.clock.now(), BLOCK)) == 1
    assert bench.desk.hot.hottest(Instant(bench.clock.now() + 120_000.0), BLOCK) == []


def test_beginnings_are_bounded_in_number_and_in_length() -> None:
    hot = HotPrompts()
    bench = Bench()
    for number in range(MAX_HOT + 20):
        prompt = array("I", range(number * 40_000, number * 40_000 + 20_000))
        keys = bench.namespaces.keys(OPEN_GRANT, prompt, BLOCK)
        assert keys is not None
        for _ in range(4):
            hot.note(OPEN_GRANT, keys.private, prompt, 20_000, T0)
    assert len(hot) == MAX_HOT
    hottest = hot.hottest(T0, BLOCK)
    assert len(hottest) == WARMED
    assert {len(one.tokens) for one in hottest} == {MOST_TOKENS}


def test_what_nobody_may_reuse_is_never_kept() -> None:
    bench = Bench()
    prompt = array("I", range(4_000))
    keys = bench.namespaces.keys(OPEN_GRANT, prompt, BLOCK)
    assert keys is not None
    bench.desk.hot.note(replace(OPEN_GRANT, scope=None), keys.private, prompt, 4_000, T0)
    bench.desk.hot.note(OPEN_GRANT, keys.private, prompt, 1_000, T0)
    assert len(bench.desk.hot) == 0


def test_a_newcomer_is_kept_out_until_it_has_pulled_what_is_hot() -> None:
    bench = Bench()
    bench.join("w0")
    bench.hold("w0", bench.heat())
    assert bench.warmer.look() == [], "nobody else could serve"
    came = bench.join("w1")
    keys = bench.namespaces.keys(OPEN_GRANT, bench.heat(), BLOCK)
    assert keys is not None
    assert bench.warmer.look() == [came]
    assert bench.excluded() == {WorkerId("w1"): Exclusion.WARMING}
    assert bench.warmer.look() == [], "once"
    asyncio.run(bench.warmer._warm_up(came))
    assert bench.excluded() == {}


def test_newcomers_serve_at_once_where_nothing_is_hot_or_all_are_new() -> None:
    bench = Bench()
    bench.join("w0")
    bench.warmer.look()
    bench.join("w1")
    assert bench.warmer.look() == [], "nothing is hot"
    bench.heat()
    fresh = Bench()
    fresh.join("w0")
    fresh.join("w1")
    fresh.heat()
    assert fresh.warmer.look() == [], "all of them are new"


def test_a_worker_that_warms_is_chosen_where_nobody_else_can_be() -> None:
    bench = Bench()
    bench.join("w0")
    bench.warmer.look()
    bench.heat()
    bench.join("w1")
    bench.warmer.look()
    bench.fleet.update(WorkerId("w0"), is_healthy=False)
    usable, excluded = bench.fleet.usable(BootInstant(0.0))
    assert [state.worker for state in usable] == ["w1"]
    assert excluded == {WorkerId("w0"): Exclusion.UNHEALTHY}


@pytest.mark.parametrize("trouble", ["failing", "retired"])
def test_whatever_goes_wrong_the_newcomer_serves(trouble: str) -> None:
    bench = Bench()
    bench.join("w0")
    bench.warmer.look()
    prompt = bench.heat()
    came = bench.join("w1")
    bench.warmer.look()
    if trouble == "failing":
        bench.is_failing = True
    else:
        keys = bench.namespaces.keys(OPEN_GRANT, prompt, BLOCK)
        assert keys is not None
        bench.namespaces._kept.pop("default", (OPEN_GRANT.domain, "", BLOCK))
    asyncio.run(bench.warmer._warm_up(came))
    assert bench.excluded() == {}
    assert bench.warmer.warmed == 0
    if trouble == "retired":
        assert bench.posts == [], "nothing is asked for in the name of what was revoked"
