"""Workers as the membership sees them: discovery, health, restarts, heartbeats, breakers.

The fleet and the directory are real, on a real loop; the workers are tables of answers.
"""

from __future__ import annotations

import asyncio
import functools
from array import array
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from trunkline.adapters.clock import SystemClock
from trunkline.config import BreakerConfig, HealthConfig, RoutingConfig
from trunkline.control.discovery import FleetModel
from trunkline.control.membership import Membership
from trunkline.control.parts import HELD_SLACK_BLOCKS, MemberParts
from trunkline.control.views import Heartbeat, Mode, WorkerSpec
from trunkline.core.actions import Action, FeedFailed
from trunkline.core.decision import Exclusion
from trunkline.core.directory import Directory
from trunkline.core.events import BlocksStored, EventBatch
from trunkline.core.feed import WorkerFeed
from trunkline.core.fleet import Fleet, WorkerState
from trunkline.core.identity import ModelIdentity, Scope, ScopeKind, derive_namespace
from trunkline.core.keys import chain
from trunkline.core.records import BlockKey, Tier, WorkerId
from trunkline.errors import ConfigError, WorkerLost, WorkerTimeout
from trunkline.observe import EventLog
from trunkline.ports.worker import AttemptEnd, Endpoint, EventSource, Target

TEST_S = 10.0
W0 = WorkerId("w0:1")
GOOD = {"/v1/models": b'{"data":[{"id":"m"}]}', "/health": b""}


def metrics(block_tokens: int = 16, memory: float = 0.1, waiting: int = 0) -> bytes:
    return (
        f'vllm:cache_config_info{{block_size="{block_tokens}",num_gpu_blocks="100"}} 1\n'
        f"vllm:num_requests_running 1\nvllm:num_requests_waiting {waiting}\n"
        f"vllm:kv_cache_usage_perc {memory}\n"
    ).encode()


class Answers:
    """What one worker answers; a missing path is a 404."""

    def __init__(self, **more: bytes) -> None:
        self.pages: dict[str, bytes] = {**GOOD, **{f"/{n}": body for n, body in more.items()}}
        self.failure: Callable[[], Exception] | None = None
        self.asked: list[str] = []
        self.sources: list[EventSource] = []

    def answer(self, path: str) -> tuple[int, bytes]:
        self.asked.append(path)
        if self.failure is not None:
            raise self.failure()
        page = self.pages.get(path)
        return (404, b"") if page is None else (200, page)


def refused() -> Exception:
    error = WorkerLost("refused")
    error.__cause__ = ConnectionRefusedError()
    return error


class Lines(EventLog):
    """Remembers the events that were logged."""

    def __init__(self) -> None:
        super().__init__("test")
        self.events: list[tuple[str, dict[str, object]]] = []

    def _write(self, level: int, event: str, fields: dict[str, object], cause: Any) -> None:
        self.events.append((event, fields))

    def count(self, event: str) -> int:
        return sum(name == event for name, _ in self.events)


class Table:
    """The data plane's targets."""

    def __init__(self) -> None:
        self.targets: dict[WorkerId, Target] = {}

    def add_target(self, target: Target) -> None:
        self.targets[target.worker] = target

    def remove_target(self, worker: WorkerId) -> None:
        self.targets.pop(worker, None)


class Bench:
    """A membership whose workers answer from tables."""

    def __init__(self, **breaker: Any) -> None:
        self.clock = SystemClock()
        self.directory = Directory(max_blocks=10_000)
        self.fleet = Fleet(virtual_nodes=8, now=self.clock.now())
        self.table = Table()
        self.log = Lines()
        self.answers: dict[int, Answers] = {}
        self.feed_actions: dict[WorkerId, Callable[[Action], None]] = {}
        self.feed_error: Exception | None = None
        self.make_feed_error: Exception | None = None
        self.feeds: dict[WorkerId, WorkerFeed] = {}
        self.followed: list[EventSource] = []
        self.parts = MemberParts(
            fleet=self.fleet,
            directory=self.directory,
            targets=self.table,
            clock=self.clock,
            fetch=self.fetch,
            make_feed=self.make_feed,
            run_feed=self.run_feed,
            find_sources=lambda body, host: self.answers[int(body)].sources,
            model=FleetModel(),
            health=HealthConfig(health_check_interval_secs=0.05, load_interval_secs=0.05),
            breaker=BreakerConfig(**breaker),
            routing=RoutingConfig(),
            default_block_tokens=16,
            log=self.log,
        )
        self.membership = Membership(self.parts, heartbeat_ttl_ms=100.0)

    async def fetch(
        self, endpoint: Endpoint, method: str, path: str, *, timeout_ms: float
    ) -> tuple[int, bytes]:
        await asyncio.sleep(0)
        return self.answers[endpoint.port].answer(path)

    def make_feed(self, worker: WorkerId, source: EventSource) -> WorkerFeed:
        if self.make_feed_error is not None:
            error, self.make_feed_error = self.make_feed_error, None
            raise error
        feed = self.feeds[worker] = WorkerFeed(worker, self.directory, rank=source.rank)
        return feed

    async def run_feed(
        self, source: EventSource, feed: WorkerFeed, on_action: Callable[[Action], None]
    ) -> None:
        self.feed_actions[feed.worker] = on_action
        self.followed.append(source)
        if self.feed_error is not None:
            error, self.feed_error = self.feed_error, None
            raise error
        await asyncio.Event().wait()

    def add(self, port: int = 1, answers: Answers | None = None, **spec: Any) -> Answers:
        """Add `w<port - 1>`."""
        self.answers[port] = answers or Answers(metrics=metrics())
        self.membership.add(named(port, **spec))
        return self.answers[port]

    def state(self, worker: WorkerId = W0) -> WorkerState:
        found = self.fleet.get(worker)
        assert found is not None
        return found

    async def joined(self, port: int = 1, answers: Answers | None = None, **spec: Any) -> Answers:
        made = self.add(port, answers, **spec)
        await until(lambda: self.fleet.get(WorkerId(f"w{port - 1}:{port}")) is not None)
        return made

    def mode(self, name: str = "w0:1") -> Mode:
        view = self.membership.view(name)
        assert view is not None
        return view.mode

    def beat(self, counter: int, **more: Any) -> str | None:
        fields: dict[str, Any] = {
            "name": "w0:1", "boot_nonce": "a", "counter": counter, "checkpoints": frozenset(),
            "is_complete": True, "memory_ratio": 0.1, "load_ratio": 0.1, "block_tokens": 16,
        }  # fmt: skip
        return self.membership.heartbeat(Heartbeat(**{**fields, **more}))


def named(port: int, **more: Any) -> WorkerSpec:
    endpoint = Endpoint(host=f"w{port - 1}", port=port, host_header=f"w{port - 1}:{port}")
    return WorkerSpec(name=endpoint.host_header, endpoint=endpoint, **more)


def bench_test(test: Callable[[Bench], Awaitable[None]]) -> Callable[[], None]:
    """Run a coroutine with a bench whose membership is open, under a deadline."""

    @functools.wraps(test)
    def run() -> None:
        async def scenario() -> None:
            bench = Bench()
            async with asyncio.timeout(TEST_S), bench.membership:
                await test(bench)

        asyncio.run(scenario())

    del run.__wrapped__
    return run


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0.005)


def some_chain(blocks: int = 20, block_tokens: int = 16) -> Any:
    namespace = derive_namespace(
        b"k" * 32,
        Scope(kind=ScopeKind.TENANT, org="o", tenant="t"),
        ModelIdentity(model_id="m", block_tokens=block_tokens),
    )
    return chain(namespace, array("I", range(blocks * block_tokens)))


def stored_batch(seq: int, keys: Any, count: int, first: int = 0) -> EventBatch:
    """Blocks that are there, each a prompt of its own."""
    events = tuple(
        BlocksStored(
            hashes=array("Q", [number]),
            parent=None,
            tokens=array("I", [number] * 16),
            block_tokens=16,
            tier=Tier.DEVICE,
            salt=keys.namespace.salt,
        )
        for number in range(first, first + count)
    )
    return EventBatch(seq=seq, events=events, fingerprint=seq)


# -- joining ---------------------------------------------------------------------------------------


@bench_test
async def test_a_worker_joins_with_what_it_says_of_itself(bench: Bench) -> None:
    await bench.joined(answers=Answers(metrics=metrics(block_tokens=32)))
    view = bench.membership.view("w0:1")
    assert view is not None
    assert (view.mode, view.model_id, view.block_tokens) == (Mode.APPROXIMATE, "m", 32)
    assert view.capacity_blocks == 100
    assert bench.table.targets[W0].predicted_ttl_ms == RoutingConfig().approximate_ttl_ms
    assert bench.membership.served_models() == ["m"]


@bench_test
async def test_c10_adding_the_same_worker_again_keeps_counter_breaker_and_index(
    bench: Bench,
) -> None:
    await bench.joined()
    state, slot = bench.state(), bench.directory.slot(W0)
    state.queue.start(1, 5.0, bench.clock.now())
    bench.directory.predict(W0, some_chain(), now=bench.clock.now(), ttl_ms=60_000.0)
    for _ in range(20):
        bench.membership.add(named(1))
        await asyncio.sleep(0.005)
    assert bench.state() is state
    assert bench.directory.slot(W0) == slot
    assert bench.state().queue.in_flight_count == 1
    assert bench.directory.predicted_count(W0) == 20
    assert bench.log.count("worker.joined") == 1


@bench_test
async def test_another_spec_of_the_same_name_replaces_the_worker(bench: Bench) -> None:
    await bench.joined()
    before = bench.state()
    bench.membership.add(named(1, block_tokens=64))
    await until(lambda: (s := bench.fleet.get(W0)) is not None and s is not before)
    assert bench.state().block_tokens == 64


@bench_test
async def test_a_worker_that_is_not_there_is_shown_with_the_reason_and_tried_again(
    bench: Bench,
) -> None:
    answers = Answers()
    answers.failure = refused
    bench.add(answers=answers)
    await until(lambda: bench.log.count("worker.unreachable"))
    view = bench.membership.view("w0:1")
    assert view is not None
    assert (view.mode, view.reason, view.ranks) == (Mode.CONNECTING, "refused", ())
    answers.failure = None
    await until(lambda: bench.fleet.get(W0))


@bench_test
async def test_a_worker_above_the_bound_is_refused(bench: Bench) -> None:
    from trunkline.control import membership

    bench.add()
    for number in range(membership.MAX_WORKERS - 1):
        bench.membership._members[f"other{number}"] = bench.membership._members["w0:1"]
    with pytest.raises(ConfigError, match="no more are taken"):
        bench.membership.add(named(2))
    bench.membership._members = {"w0:1": bench.membership._members["w0:1"]}


def test_an_error_inside_an_open_membership_goes_through_as_it_is() -> None:
    async def scenario() -> None:
        bench = Bench()
        async with bench.membership:
            await bench.joined()
            raise ConfigError("a taken port")

    with pytest.raises(ConfigError, match="a taken port"):
        asyncio.run(scenario())


@bench_test
async def test_removing_a_worker_forgets_it_everywhere_and_its_lease_too(bench: Bench) -> None:
    await bench.joined()
    assert bench.beat(7) is None
    assert bench.membership.remove("w0:1")
    assert not bench.membership.remove("w0:1")
    assert (bench.fleet.states(), bench.table.targets) == ([], {})
    assert not bench.directory.knows(W0)
    await bench.joined()
    assert bench.beat(1) is None, "a heartbeat after removal starts afresh"


@bench_test
async def test_c90_random_orders_of_adding_and_removing_end_as_the_source_says(
    bench: Bench,
) -> None:
    import random

    dice, wanted = random.Random(9), set[int]()
    for port in range(1, 9):
        bench.answers[port] = Answers(metrics=metrics())
    for step in range(1_000):
        port = dice.randrange(1, 9)
        if dice.random() < 0.5:
            bench.membership.add(named(port))
            wanted.add(port)
        else:
            bench.membership.remove(named(port).name)
            wanted.discard(port)
        if step % 50 == 0:
            await asyncio.sleep(0)
    names = {named(port).name for port in wanted}
    await until(lambda: {state.worker for state in bench.fleet.states()} == names)
    assert set(bench.table.targets) == names
    assert {view.name for view in bench.membership.views()} == names


# -- one worker's trouble is nobody else's ---------------------------------------------------------


@bench_test
async def test_a_worker_whose_answers_break_us_is_shown_tried_again_and_harms_nobody(
    bench: Bench,
) -> None:
    await bench.joined(2)
    other, answers = bench.state(WorkerId("w1:2")), Answers(metrics=metrics())
    answers.failure = functools.partial(RecursionError, "deep")
    bench.add(answers=answers)
    await until(lambda: bench.log.count("worker.join_failed"))
    view = bench.membership.view("w0:1")
    assert view is not None
    assert (view.mode, view.ranks) == (Mode.CONNECTING, ())
    assert view.reason == "cannot be joined: RecursionError"
    answers.failure = None
    await until(lambda: bench.fleet.get(W0))
    assert bench.state(WorkerId("w1:2")) is other


@bench_test
async def test_a_join_that_fails_half_way_leaves_nothing_behind(bench: Bench) -> None:
    bench.make_feed_error = ValueError("a bug")
    bench.add(answers=with_events(0, 1))
    await until(lambda: bench.log.count("worker.join_failed"))
    assert (bench.fleet.states(), bench.table.targets) == ([], {})
    assert not bench.directory.knows(WorkerId("w0:1@0"))
    await until(lambda: len(bench.fleet.states()) == 2)


@bench_test
async def test_a_cache_of_impossible_size_is_an_unknown_one(bench: Bench) -> None:
    for port, sizes in enumerate(
        [
            'block_size="70000",num_gpu_blocks="10"',
            f'block_size="16",num_gpu_blocks="{"9" * 5_000}"',
            'block_size="16",num_gpu_blocks="18446744073709551616"',
        ],
        start=1,
    ):
        page = f"vllm:cache_config_info{{{sizes}}} 1\n".encode()
        await bench.joined(port, Answers(metrics=page))
    shown = [(view.block_tokens, view.capacity_blocks) for view in bench.membership.views()]
    assert shown == [(16, 10), (16, None), (16, None)]


@bench_test
async def test_a_worker_fills_no_more_of_the_directory_than_twice_what_it_can_hold(
    bench: Bench,
) -> None:
    bench.directory = bench.parts.directory = Directory(max_blocks=10_000)
    bench.directory.admit_namespace(some_chain().namespace)
    await bench.joined(answers=with_events(0))
    feed, limit = bench.feeds[W0], 2 * 100 + HELD_SLACK_BLOCKS
    feed.live(stored_batch(0, some_chain(), limit), bench.clock.now())
    assert bench.directory.held_count(W0) == limit
    feed.live(stored_batch(1, some_chain(), 1, first=limit), bench.clock.now())
    assert bench.directory.held_count(W0) == limit


# -- one fleet, one model --------------------------------------------------------------------------


@bench_test
async def test_the_first_worker_decides_the_model_and_one_of_another_is_shown_and_left_out(
    bench: Bench,
) -> None:
    await bench.joined()
    stranger = Answers(metrics=metrics())
    stranger.pages["/v1/models"] = b'{"data":[{"id":"n"}]}'
    bench.add(2, stranger)
    await until(lambda: bench.log.count("worker.other_model"))
    view = bench.membership.view("w1:2")
    assert view is not None
    assert (view.reason, view.ranks) == ("serves n; this gateway serves m", ())
    assert bench.membership.served_models() == ["m"]
    stranger.pages["/v1/models"] = b'{"data":[{"id":"n"},{"id":"m"}]}'
    await until(lambda: bench.fleet.get(WorkerId("w1:2")))


@bench_test
async def test_a_worker_that_comes_back_with_another_model_leaves_the_fleet(bench: Bench) -> None:
    answers = await bench.joined()
    answers.pages |= {"/v1/models": b'{"data":[{"id":"n"}]}', "/metrics": metrics(64)}
    await until(lambda: not bench.fleet.states())
    assert not bench.directory.knows(W0)


@bench_test
async def test_a_name_from_the_settings_is_the_model_before_any_worker_joins(bench: Bench) -> None:
    bench.parts.model = FleetModel("alias")
    assert bench.membership.served_models() == ["alias"]
    bench.add()
    await until(lambda: bench.log.count("worker.other_model"))
    assert bench.fleet.states() == []


@bench_test
async def test_a_worker_that_serves_another_model_than_it_was_added_for_is_left_out(
    bench: Bench,
) -> None:
    bench.add(model_id="wanted")
    await until(lambda: bench.log.count("worker.other_model"))
    view = bench.membership.view("w0:1")
    assert view is not None
    assert view.reason == "serves m; it was added for wanted"
    assert bench.membership.served_models() == []


@bench_test
async def test_adapters_that_a_worker_loads_later_are_known_and_unloaded_ones_no_longer(
    bench: Bench,
) -> None:
    assert bench.membership.knows_model("anything"), "nothing is known yet"
    answers = await bench.joined()
    assert bench.membership.knows_model("m")
    assert not bench.membership.knows_model("adapter")
    answers.pages["/v1/models"] = b'{"data":[{"id":"m"},{"id":"adapter"}]}'
    await until(lambda: bench.membership.knows_model("adapter"))
    answers.pages["/v1/models"] = b'{"data":[{"id":"m"}]}'
    await until(lambda: not bench.membership.knows_model("adapter"))
    assert bench.log.count("worker.joined") == 1


@bench_test
async def test_a_worker_that_changes_its_model_as_it_runs_leaves_the_fleet(bench: Bench) -> None:
    answers = await bench.joined()
    answers.pages["/v1/models"] = b"nonsense"
    seen = answers.asked.count("/v1/models")
    await until(lambda: answers.asked.count("/v1/models") > seen + 1)
    assert bench.membership.knows_model("m")
    assert bench.fleet.get(W0)
    answers.pages["/v1/models"] = b'{"data":[{"id":"n"}]}'
    await until(lambda: not bench.fleet.states())


@bench_test
async def test_the_context_of_the_fleet_is_that_of_its_smallest_worker(bench: Bench) -> None:
    assert bench.membership.max_model_len(1_000) == 1_000
    for port, tokens in [(1, b"4096"), (2, b"512"), (3, b"-7")]:
        answers = Answers()
        answers.pages["/v1/models"] = b'{"data":[{"id":"m","max_model_len":' + tokens + b"}]}"
        await bench.joined(port, answers)
    views = [view.max_model_len for view in bench.membership.views()]
    assert views == [4_096, 512, None]
    assert bench.membership.max_model_len(1_000) == 512
    bench.membership.remove("w1:2")
    assert bench.membership.max_model_len(1_000) == 1_000


# -- load ------------------------------------------------------------------------------------------


@bench_test
async def test_c11_a_worker_without_any_load_endpoint_is_degraded_and_warned_of_once(
    bench: Bench,
) -> None:
    answers = await bench.joined(answers=Answers())
    await until(lambda: answers.asked.count("/get_loads") > 3)
    view = bench.membership.view("w0:1")
    assert view is not None
    assert view.degraded == ("load",)
    assert bench.log.count("worker.load_unknown") == 1
    answers.pages["/load"] = b'{"server_load": 2}'
    await until(lambda: (v := bench.membership.view("w0:1")) is not None and not v.degraded)


@bench_test
async def test_c11_a_worker_with_only_load_is_read_there_and_not_degraded(bench: Bench) -> None:
    answers = await bench.joined(answers=Answers(load=b'{"server_load": 2}'))
    await until(lambda: answers.asked.count("/load") > 3)
    assert answers.asked.count("/get_loads") == 0
    assert answers.asked.count("/metrics") == 2, "once to join and once to learn that it is no use"
    view = bench.membership.view("w0:1")
    assert view is not None
    assert view.degraded == ()
    assert bench.log.count("worker.load_unknown") == 0


@bench_test
async def test_other_gateways_work_counts_until_the_worker_no_longer_tells_of_it(
    bench: Bench,
) -> None:
    answers = await bench.joined(answers=Answers(metrics=metrics(waiting=9)))
    bench.state().queue.start(1, 50.0, bench.clock.now())
    bench.state().queue.end(1, bench.clock.now())
    await until(lambda: bench.state().queue.foreign_ms > 0)
    answers.failure = functools.partial(WorkerTimeout, "slow")
    await until(lambda: bench.state().queue.foreign_ms == 0)


@bench_test
async def test_memory_above_the_watermark_keeps_new_prefixes_away_until_it_falls(
    bench: Bench,
) -> None:
    answers = await bench.joined(answers=Answers(metrics=metrics(memory=0.99)))
    await until(lambda: bench.state().is_full)
    answers.pages["/metrics"] = metrics(memory=0.5)
    await until(lambda: not bench.state().is_full)


@bench_test
async def test_c20_a_worker_that_sleeps_holds_nothing(bench: Bench) -> None:
    answers = await bench.joined()
    bench.directory.predict(W0, some_chain(), now=bench.clock.now(), ttl_ms=60_000.0)
    answers.pages["/metrics"] += b'vllm:engine_sleep_state{sleep_state="awake"} 0\n'
    await until(lambda: bench.directory.predicted_count(W0) == 0)


@bench_test
async def test_c20_an_idle_worker_without_memory_in_use_keeps_its_cache(bench: Bench) -> None:
    """Engines count blocks of running requests alone: cached ones are free, and usage is 0."""
    answers = await bench.joined()
    bench.directory.predict(W0, some_chain(), now=bench.clock.now(), ttl_ms=60_000.0)
    answers.pages["/metrics"] = metrics(memory=0.0)
    seen = answers.asked.count("/metrics")
    await until(lambda: answers.asked.count("/metrics") > seen + 2)
    assert bench.directory.predicted_count(W0) == 20


@bench_test
async def test_c20_entries_of_a_worker_without_news_expire_by_themselves(bench: Bench) -> None:
    await bench.joined()
    now = bench.clock.now()
    bench.directory.predict(W0, some_chain(), now=now, ttl_ms=100.0)
    bench.directory.expire(type(now)(now + 100.0))
    assert bench.directory.predicted_count(W0) == 0


@bench_test
async def test_a_full_worker_that_no_longer_tells_of_its_memory_is_not_held_for_full(
    bench: Bench,
) -> None:
    answers = await bench.joined(answers=Answers(metrics=metrics(memory=0.99)))
    await until(lambda: bench.state().is_full)
    del answers.pages["/metrics"]
    answers.pages["/load"] = b'{"server_load": 2}'
    await until(lambda: not bench.state().is_full)
    assert bench.log.count("worker.joined") == 1


@bench_test
async def test_other_gateways_work_is_forgotten_when_the_worker_tells_only_of_its_load(
    bench: Bench,
) -> None:
    answers = await bench.joined(answers=Answers(metrics=metrics(waiting=9)))
    bench.state().queue.start(1, 50.0, bench.clock.now())
    bench.state().queue.end(1, bench.clock.now())
    await until(lambda: bench.state().queue.foreign_ms > 0)
    del answers.pages["/metrics"]
    answers.pages["/load"] = b'{"server_load": 2}'
    await until(lambda: bench.state().queue.foreign_ms == 0)


# -- health and restarts ---------------------------------------------------------------------------


@bench_test
async def test_three_failed_probes_take_a_worker_out_and_two_good_ones_bring_it_back_empty(
    bench: Bench,
) -> None:
    answers = await bench.joined()
    bench.directory.predict(W0, some_chain(), now=bench.clock.now(), ttl_ms=60_000.0)
    first_life = bench.directory.incarnation(W0)
    answers.failure = functools.partial(WorkerTimeout, "slow")
    await until(lambda: not bench.state().is_healthy)
    _, excluded = bench.fleet.usable(bench.clock.boot())
    assert excluded == {W0: Exclusion.UNHEALTHY}
    assert bench.log.count("worker.unhealthy") == 1
    answers.failure = None
    await until(lambda: bench.state().is_healthy)
    assert bench.directory.incarnation(W0) > first_life
    assert bench.directory.predicted_count(W0) == 0
    view = bench.membership.view("w0:1")
    assert view is not None
    assert view.reason == "the worker announces no events", "an old trouble is not shown"


@bench_test
async def test_a_single_refused_connection_means_a_new_life_though_health_never_failed(
    bench: Bench,
) -> None:
    """A worker that restarts faster than three probes has lost its cache all the same."""
    answers = await bench.joined()
    bench.directory.predict(W0, some_chain(), now=bench.clock.now(), ttl_ms=60_000.0)
    answers.failure = refused
    seen = len(answers.asked)
    await until(lambda: len(answers.asked) > seen)
    answers.failure = None
    await until(lambda: bench.log.count("worker.joined") == 2)
    assert bench.log.count("worker.unhealthy") == 0
    assert bench.directory.predicted_count(W0) == 0


@bench_test
async def test_a_single_slow_answer_means_nothing(bench: Bench) -> None:
    answers = await bench.joined()
    answers.failure = functools.partial(WorkerTimeout, "slow")
    seen = len(answers.asked)
    await until(lambda: len(answers.asked) > seen)
    answers.failure = None
    await until(lambda: answers.asked.count("/health") > 5)
    assert bench.log.count("worker.joined") == 1


@bench_test
async def test_what_is_in_flight_stays_counted_through_a_new_life(bench: Bench) -> None:
    answers = await bench.joined()
    old = bench.state()
    old.queue.start(1, 5.0, bench.clock.now())
    answers.pages["/metrics"] = metrics(block_tokens=64)
    await until(lambda: bench.state() is not old)
    assert bench.state().queue.in_flight_count == 1
    assert old.queue.end(1, bench.clock.now())
    assert bench.state().queue.in_flight_count == 0


@bench_test
async def test_c24_another_block_size_at_the_same_url_is_taken_over_and_logged(
    bench: Bench,
) -> None:
    answers = await bench.joined()
    bench.directory.predict(W0, some_chain(), now=bench.clock.now(), ttl_ms=60_000.0)
    answers.pages["/metrics"] = metrics(block_tokens=64)
    await until(lambda: bench.fleet.block_sizes() == [64])
    assert bench.directory.predicted_count(W0) == 0
    _, fields = next(e for e in bench.log.events if e[0] == "worker.block_size_changed")
    assert (fields["was"], fields["block_tokens"]) == (16, 64)


@bench_test
async def test_a_worker_that_became_another_and_does_not_say_what_is_out_until_it_does(
    bench: Bench,
) -> None:
    answers = await bench.joined()
    old, models = bench.state(), answers.pages.pop("/v1/models")
    answers.pages["/metrics"] = metrics(block_tokens=64)
    await until(lambda: not old.is_healthy)
    assert bench.fleet.usable(bench.clock.boot())[0] == []
    answers.pages["/v1/models"] = models
    await until(lambda: bench.fleet.block_sizes() == [64])
    assert bench.state().is_healthy


@bench_test
async def test_a_draining_worker_stays_so_through_a_new_life(bench: Bench) -> None:
    answers = await bench.joined()
    assert bench.membership.drain("w0:1")
    old = bench.state()
    answers.pages["/metrics"] = metrics(block_tokens=64)
    await until(lambda: bench.state() is not old)
    assert bench.state().is_draining


# -- feeds -----------------------------------------------------------------------------------------


def with_events(*ranks: int) -> Answers:
    answers = Answers(metrics=metrics(), kv_event_sources=b"1")
    answers.sources = [EventSource(endpoint=f"tcp://w0:{9 + rank}", rank=rank) for rank in ranks]
    return answers


@bench_test
async def test_c31_each_rank_is_an_entry_of_its_own_and_is_asked_for_by_header(
    bench: Bench,
) -> None:
    bench.add(answers=with_events(0, 1))
    names = [WorkerId("w0:1@0"), WorkerId("w0:1@1")]
    await until(lambda: [s.worker for s in bench.fleet.states()] == names)
    headers = [bench.table.targets[name].headers for name in names]
    assert headers == [(("x-data-parallel-rank", "0"),), (("x-data-parallel-rank", "1"),)]
    assert bench.directory.slot(names[0]) != bench.directory.slot(names[1])


@bench_test
async def test_c103_a_feed_that_cannot_be_followed_makes_the_worker_approximate_and_unknown(
    bench: Bench,
) -> None:
    bench.add(answers=with_events(0, 3))
    second = WorkerId("w0:1@3")
    await until(lambda: second in bench.feed_actions)
    bench.directory.predict(second, some_chain(), now=bench.clock.now(), ttl_ms=60_000.0)
    bench.feed_actions[second](FeedFailed(worker=second, reason="no socket"))
    assert bench.mode() is Mode.APPROXIMATE
    assert bench.directory.predicted_count(second) == 0, "what can no longer be corrected is gone"
    target = bench.table.targets[second]
    assert target.headers == (("x-data-parallel-rank", "3"),)
    assert target.predicted_ttl_ms == RoutingConfig().approximate_ttl_ms


@bench_test
async def test_a_mistake_of_ours_with_one_worker_is_logged_and_ends_nobody_else(
    bench: Bench,
) -> None:
    await bench.joined(2)
    other = bench.state(WorkerId("w1:2"))
    bench.feed_error = KeyError("a bug")
    bench.add(answers=with_events(0))
    await until(lambda: bench.log.count("worker.follow_failed"))
    await until(lambda: bench.log.count("worker.joined") == 3)
    assert bench.mode() is Mode.EXACT
    assert bench.state(WorkerId("w1:2")) is other


# -- silence ---------------------------------------------------------------------------------------


def answer(bench: Bench, count: int, worker: WorkerId = W0) -> None:
    target = bench.table.targets[worker]
    for _ in range(count):
        target.on_sent()
        target.on_ended(AttemptEnd.COMPLETE)


@bench_test
async def test_c57_announced_events_that_never_come_make_a_worker_approximate_until_they_do(
    bench: Bench,
) -> None:
    await bench.joined(answers=with_events(0))
    bench.directory.predict(W0, some_chain(), now=bench.clock.now(), ttl_ms=60_000.0)
    answer(bench, 2)
    assert bench.mode() is Mode.EXACT
    answer(bench, 2)
    view = bench.membership.view("w0:1")
    assert view is not None
    assert (view.mode, view.degraded) == (Mode.APPROXIMATE, ("events",))
    assert view.reason.startswith("no events since start")
    assert view.ranks[0].feed_stats["batches"] == 0
    assert bench.table.targets[W0].predicted_ttl_ms == RoutingConfig().approximate_ttl_ms
    assert bench.log.count("worker.no_events") == 1
    bench.feeds[W0].live(EventBatch(seq=0, events=(), fingerprint=1), bench.clock.now())
    await until(lambda: bench.mode() is Mode.EXACT)
    assert bench.table.targets[W0].predicted_ttl_ms == RoutingConfig().predicted_ttl_ms
    answer(bench, 9)
    assert bench.mode() is Mode.EXACT


@bench_test
async def test_c57_short_prompts_and_failures_are_no_reason_to_expect_events(bench: Bench) -> None:
    await bench.joined(answers=with_events(0))
    answer(bench, 9)
    bench.directory.predict(W0, some_chain(), now=bench.clock.now(), ttl_ms=60_000.0)
    for _ in range(9):
        bench.table.targets[W0].on_ended(AttemptEnd.CLIENT_GONE)
    assert bench.mode() is Mode.EXACT


@bench_test
async def test_events_that_only_the_operator_knows_of_are_followed(bench: Bench) -> None:
    source = EventSource(endpoint="tcp://w0:5557")
    await bench.joined(answers=Answers(metrics=metrics()), event_sources=(source,))
    assert bench.mode() is Mode.EXACT
    assert bench.followed == [source]


# -- heartbeats ------------------------------------------------------------------------------------


@bench_test
async def test_a_heartbeat_makes_a_worker_digest_and_its_lease_runs_out_without_the_next(
    bench: Bench,
) -> None:
    await bench.joined()
    assert bench.beat(1) is None
    assert bench.mode() is Mode.DIGEST
    assert bench.table.targets[W0].wants_checkpoints
    assert bench.fleet.usable(bench.clock.boot())[0] == [bench.state()]
    await asyncio.sleep(0.11)
    assert bench.fleet.usable(bench.clock.boot())[1] == {W0: Exclusion.LEASE}
    assert "does not follow" in (bench.beat(1) or ""), "nor does a repeated one revive it"
    assert bench.fleet.usable(bench.clock.boot())[1] == {W0: Exclusion.LEASE}
    assert bench.beat(2) is None, "a heartbeat is a registration too"
    assert bench.fleet.usable(bench.clock.boot())[0] == [bench.state()]


@bench_test
async def test_heartbeats_of_the_past_and_of_strangers_are_refused(bench: Bench) -> None:
    assert "no such worker" in (bench.beat(1) or "")
    await bench.joined()
    assert bench.beat(2) is None
    assert "does not follow" in (bench.beat(2) or "")
    assert bench.beat(1, boot_nonce="b") is None
    assert bench.beat(1, boot_nonce="c") is None
    assert "replaced by a newer one" in (bench.beat(9) or "")


@bench_test
async def test_a_heartbeat_of_a_new_life_drops_what_the_old_one_held(bench: Bench) -> None:
    await bench.joined()
    assert bench.beat(1) is None
    bench.directory.predict(W0, some_chain(), now=bench.clock.now(), ttl_ms=60_000.0)
    assert bench.beat(1, boot_nonce="b") is None
    assert bench.directory.predicted_count(W0) == 0
    assert bench.log.count("worker.restarted") == 1


@bench_test
async def test_more_checkpoints_than_are_taken_are_refused_and_change_nothing(
    bench: Bench,
) -> None:
    await bench.joined()
    keys = [BlockKey(number.to_bytes(32, "big")) for number in range(4_097)]
    assert "more than 4096" in (bench.beat(1, checkpoints=frozenset(keys)) or "")
    assert bench.mode() is Mode.APPROXIMATE
    assert bench.beat(1, checkpoints=frozenset(keys[:4_096])) is None


@bench_test
async def test_c24_a_heartbeat_with_another_block_size_has_the_worker_asked_anew(
    bench: Bench,
) -> None:
    await bench.joined(answers=Answers())
    assert "another block size" in (bench.beat(1, block_tokens=64) or "")
    await until(lambda: bench.fleet.block_sizes() == [64])
    assert bench.beat(2, block_tokens=64) is None
    assert bench.mode() is Mode.DIGEST


@bench_test
async def test_heartbeats_of_a_worker_with_events_renew_its_lease_and_leave_it_exact(
    bench: Bench,
) -> None:
    await bench.joined(answers=with_events(0))
    assert bench.beat(1, memory_ratio=0.99) is None
    assert bench.mode() is Mode.EXACT
    assert bench.state().is_full
    seen = bench.answers[1].asked.count("/metrics")
    await until(lambda: bench.answers[1].asked.count("/metrics") > seen + 1)
    assert bench.state().is_full, "what the heartbeat says holds, whatever the metrics do"
    assert not bench.table.targets[W0].wants_checkpoints


# -- breaker ---------------------------------------------------------------------------------------


def test_failures_open_the_breaker_and_a_trial_after_the_pause_closes_it() -> None:
    async def scenario() -> None:
        bench = Bench(cb_failure_threshold=3, cb_success_threshold=1, cb_timeout_duration_secs=0.1)
        async with asyncio.timeout(TEST_S), bench.membership:
            await bench.joined()
            target = bench.table.targets[W0]
            for _ in range(3):
                target.on_sent()
                target.on_ended(AttemptEnd.WORKER_FAILED)
            assert bench.state().is_breaker_open
            await until(lambda: not bench.state().is_breaker_open)
            target.on_sent()
            assert bench.state().is_breaker_open, "one trial at a time"
            target.on_ended(AttemptEnd.COMPLETE)
            assert not bench.state().is_breaker_open

    asyncio.run(scenario())


@bench_test
async def test_c84_refusals_and_leaving_clients_leave_the_breaker_closed(bench: Bench) -> None:
    await bench.joined()
    target = bench.table.targets[W0]
    for end in [AttemptEnd.COMPLETE, AttemptEnd.CLIENT_GONE] * 100:
        target.on_sent()
        target.on_ended(end)
    assert not bench.state().is_breaker_open


def test_a_new_life_begins_with_a_closed_breaker_and_answers_for_itself_alone() -> None:
    async def scenario() -> None:
        bench = Bench(cb_failure_threshold=1)
        async with asyncio.timeout(TEST_S), bench.membership:
            answers = await bench.joined()
            old_target = bench.table.targets[W0]
            old_target.on_ended(AttemptEnd.WORKER_FAILED)
            old = bench.state()
            assert old.is_breaker_open
            answers.pages["/metrics"] = metrics(block_tokens=64)
            await until(lambda: bench.state() is not old)
            assert not bench.state().is_breaker_open
            old_target.on_ended(AttemptEnd.WORKER_FAILED)
            assert not bench.state().is_breaker_open, "a late end of the life before"
            bench.table.targets[W0].on_ended(AttemptEnd.WORKER_FAILED)
            assert bench.state().is_breaker_open

    asyncio.run(scenario())
