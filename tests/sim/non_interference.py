"""Pairs of runs that differ in nothing but what a victim says: the set-up of `S1`.

    PYTHONPATH=tests python tests/sim/non_interference.py 4711  # one seed again, and what differed

One run is a gateway and one to three simulated workers in this process: the real front, tenancy,
line, picker, router, directory, feeds and, behind `HttpToolsProtocol`, the real workers with their
stores and fences. They speak HTTP over a network in memory, under a virtual clock, so a run is the
same to the byte and to the microsecond whenever its inputs are. In the second run of a pair every
token of the victim is another one; lengths, and what its prompts share among themselves, stay. The
attacker asks the same in both: the victim's prompts of the first run, whole, cut and continued, the
victim's others, prompts of its own, and what is refused. What it sees is written down byte by byte
with the time of each.

What keys cannot hide, and how it is kept out: the load. Victim and attacker share workers and may
overlap in time, so both runs must load each worker alike. Where a prompt is placed may depend on
its keyed hash (homes on the ring), and a victim whose prompts change would then load other workers;
that tells an attacker that something changed, as any change of load does, and nothing of what. The
second run's tokens are therefore drawn until they have the same homes; `Scenario.pins_homes` says
where. That the load really was equal is checked: the victim's own timing is the same in both runs.

Not in these runs: the registry and its keys, and the lease loop (leases are granted in place);
`tests/wire/test_tenants.py` has them.
Read `victim_words.py` for what is asked, `memory_net.py` for the network.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from memory_net import NetLoop, Recorder
from uvicorn import Config as ServerConfig
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState
from victim_words import (
    ATTACKER,
    BLOCK,
    MODEL,
    ORG,
    REFUSED,
    VICTIM,
    VIRTUAL_NODES,
    Call,
    Contents,
    Scenario,
    body_of,
    cached_tokens,
    contents_of,
    root_key,
    scenario_of,
    template,
    tokenizer,
)

from trunkline.adapters.event_publisher import encode_batch
from trunkline.adapters.vllm_events import decode_batch
from trunkline.assembly import Core, Given, assemble
from trunkline.config import (
    Config,
    LimitsConfig,
    ListenConfig,
    RetryConfig,
    RoutingConfig,
    UpstreamConfig,
)
from trunkline.control.book import Quota
from trunkline.control.probe import post
from trunkline.core.actions import Action, RequestReplay
from trunkline.core.epochs import Subject, SubjectKind
from trunkline.core.feed import WorkerFeed
from trunkline.core.fleet import WorkerState
from trunkline.core.freshness import Grant as Lease
from trunkline.core.load import PrefillQueue
from trunkline.core.principals import Principal
from trunkline.core.records import Instant, WorkerId
from trunkline.errors import WorkerLost, WorkerTimeout
from trunkline.gateway.allowance import Allowance
from trunkline.gateway.contracts import ClientError, Refusal
from trunkline.gateway.fair_line import FairPicker, LineLimits
from trunkline.gateway.front import Front, FrontParts, Readiness, serve_front
from trunkline.gateway.tenancy import Tenancy
from trunkline.ports.publisher import BlockEvent
from trunkline.ports.worker import Endpoint, PullAddress, Target
from trunkline.worker.app import WorkerParts, build_app
from trunkline.worker.fence import Fence
from trunkline.worker.options import WorkerOptions
from virtual_loop import LoopClock

BLOCK_BYTES = BLOCK * 64
EVENT_DELAY_S = 0.002
LIMIT_S = 60.0
"""Virtual; a run that takes longer waits for something that does not come."""


# -- the world -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TakesTickets:
    """`ports.worker.WorkerAgent` of a worker of ours."""

    takes_tickets: bool = True
    has_salt_regions: bool = True
    pull: PullAddress | None = None


class Link:
    """A worker's events on their way to its feed: encoded, delayed, decoded. Lost ones stay in the
    ring, and the feed asks for them.
    """

    endpoint = replay_endpoint = topic = ""
    buffer_batches = 1_000

    def __init__(self, loop: NetLoop) -> None:
        self._loop = loop
        self._ring: deque[tuple[int, bytes]] = deque(maxlen=self.buffer_batches)
        self._count = 0
        self.feed: WorkerFeed | None = None

    def begin(self, feed: WorkerFeed) -> None:
        self.feed = feed
        self._act(feed.joined(self._now()))
        self._tick()

    def publish(self, events: Sequence[BlockEvent], *, is_sent: bool = True) -> None:
        payload = encode_batch(self._loop.time(), events, 0)
        self._ring.append((self._count, payload))
        if is_sent:
            self._loop.call_later(EVENT_DELAY_S, self._arrive, self._count, payload)
        self._count += 1

    def close(self) -> None:
        self.feed = None

    def _arrive(self, seq: int, payload: bytes) -> None:
        if self.feed is not None:
            batch = decode_batch(seq, payload)
            self._act(self.feed.live(batch, self._now(), age_ms=EVENT_DELAY_S * 1e3))

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, RequestReplay):
                self._loop.call_later(2 * EVENT_DELAY_S, self._replay, action)

    def _replay(self, asked: RequestReplay) -> None:
        if self.feed is None:
            return
        for seq, payload in list(self._ring):
            if seq >= asked.from_seq:
                batch = decode_batch(seq, payload)
                self._act(self.feed.replayed(batch, asked.replay_id, self._now()))
        self._act(self.feed.replay_ended(asked.replay_id, self._now()))

    def _tick(self) -> None:
        if self.feed is not None:
            self._act(self.feed.tick(self._now()))
            self._loop.call_later(0.25, self._tick)

    def _now(self) -> Instant:
        return Instant(self._loop.time() * 1e3)


@dataclass(slots=True, kw_only=True)
class Life:
    """One life of one worker."""

    fence: Fence
    link: Link
    connections: list[HttpToolsProtocol]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What came of a run."""

    attacker: tuple[tuple[tuple[float, bytes], ...], ...]
    """For each of its calls, what it saw and when."""
    victim_times: tuple[tuple[float, ...], ...]
    victim_cached: tuple[int, ...]
    """-1 where an answer tells of none."""
    attacker_cached: tuple[int, ...]


@dataclass(slots=True)
class World:
    """One run; make it on its own loop."""

    loop: NetLoop
    scenario: Scenario
    contents: Contents
    """What the victim says."""
    known: Contents
    """What the attacker takes the victim to say: that of the first run."""
    clock: LoopClock = field(init=False)
    core: Core = field(init=False)
    tenancy: Tenancy = field(init=False)
    front: Front = field(init=False)
    port: int = 0
    lives: dict[WorkerId, Life] = field(default_factory=dict[WorkerId, Life])
    rev: int = 0

    def __post_init__(self) -> None:
        scenario = self.scenario
        self.clock = LoopClock(self.loop)
        draw = random.Random(f"draws {scenario.seed}").randbytes
        self.core = core_of(scenario, self.clock)
        rates = Quota(requests_per_s=scenario.requests_per_s)
        self.tenancy = Tenancy(
            authenticate=self._authenticate,
            has_lease=lambda: True,
            session_key=draw(32),
            draw=draw,
            allowance=Allowance(lambda _tenant: rates, self.clock),
        )

    async def run(self) -> View:
        scenario = self.scenario
        for number in range(scenario.worker_count):
            self._join(WorkerId(f"w{number}:1"))
        self.front = await serve_front(ListenConfig(port=0), self._front_parts())
        self._plan_troubles()
        self._grant_leases()
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
            victim = [
                group.create_task(self._ask(call, "victim", self.contents))
                for call in scenario.victim
            ]
            attacker = [
                group.create_task(self._ask(call, "attacker", self.known))
                for call in scenario.attacker
            ]
        await self.front.close()
        return View(
            attacker=tuple(tuple(task.result().seen) for task in attacker),
            victim_times=tuple(tuple(at for at, _ in task.result().seen) for task in victim),
            victim_cached=tuple(cached_tokens(task.result().raw) for task in victim),
            attacker_cached=tuple(cached_tokens(task.result().raw) for task in attacker),
        )

    # -- the gateway -------------------------------------------------------------------------------

    def _front_parts(self) -> FrontParts:
        core, allowance = self.core, self.tenancy._allowance
        return FrontParts(
            picker=FairPicker(
                core.picker,
                fleet=core.fleet,
                clock=self.clock,
                limits=LineLimits(max_waiting=64),
                allowance=allowance,
                renew=self.tenancy.renew,
            ),
            models=lambda _principal: [],
            readiness=lambda: Readiness(is_ready=True),
            clock=self.clock,
            dice=random.Random(f"dice {self.scenario.seed}"),
            limits=LimitsConfig(),
            upstream=UpstreamConfig(),
            retry=RetryConfig(),
            max_model_len=4_096,
            version="1",
            vocab_size_of=lambda _model: core.prompts.vocab_size,
            knows_model=lambda name: name == MODEL,
            tenancy=self.tenancy,
        )

    def _authenticate(self, authorization: bytes, _source: str) -> Principal:
        who, _, user = authorization.removeprefix(b"Bearer ").decode().partition("/")
        tenants = {"victim": VICTIM, "attacker": ATTACKER}
        if who not in tenants:
            raise ClientError(Refusal(status=401, code="invalid_api_key", message="no"))
        tenant = VICTIM if self.scenario.is_same_tenant else tenants[who]
        return Principal(org=ORG, tenant=tenant, user=user, actor=who, auth_method="key")

    async def _ask(self, call: Call, who: str, contents: Contents) -> Recorder:
        await asyncio.sleep(call.at_s)
        path, extra = "/v1/completions", ""
        if call.raw:
            extra, body = REFUSED[call.raw]
        else:
            path = "/v1/chat/completions" if call.is_chat else path
            extra = f"x-cache-scope: {call.wish}\r\n" if call.wish else ""
            body = body_of(call, contents.prompt(call))
        if "authorization" not in extra:
            extra += f"authorization: Bearer {who}/{call.user}\r\n"
        raw = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: g\r\ncontent-type: application/json\r\n"
            f"connection: close\r\n{extra}content-length: {len(raw)}\r\n\r\n"
        )
        recorder = Recorder(self.loop, self.loop.time())
        transport, _ = await self.loop.create_connection(
            lambda: recorder, "127.0.0.1", self.front.port
        )
        transport.write(head.encode() + raw)
        await recorder.over.wait()
        return recorder

    # -- workers -----------------------------------------------------------------------------------

    def _join(self, name: WorkerId) -> None:
        """A new life of a worker: as `control.member` does it, found and followed at once."""
        core, earlier = self.core, self.lives.get(name)
        queue = PrefillQueue()
        if earlier is not None:
            earlier.link.close()
            state = core.fleet.get(name)
            assert state is not None
            queue = state.queue
            core.fleet.remove(name)
            core.directory.leave(name)
        life = self.lives[name] = self._serve(name)
        slot = core.directory.join(name, block_tokens=BLOCK)
        core.fleet.add(WorkerState(worker=name, slot=slot, block_tokens=BLOCK, queue=queue))
        core.picker.add_target(
            Target(
                worker=name,
                endpoint=_endpoint(name),
                predicted_ttl_ms=5_000.0,
                max_model_len=4_096,
                agent=TakesTickets(),
            )
        )
        life.link.begin(WorkerFeed(name, core.directory))

    def _serve(self, name: WorkerId) -> Life:
        scenario, link = self.scenario, Link(self.loop)
        options = WorkerOptions(
            profile="tiny",
            blocks=scenario.capacity_blocks,
            max_model_len=min(4_096, scenario.capacity_blocks * BLOCK),
            fault=scenario.faults,
            seed=scenario.seed,
        )
        lives = random.Random(f"life of {name} from {self.loop.time()} in {scenario.seed}")
        parts = WorkerParts(
            tokenizer=tokenizer(),
            template=template(),
            make_publisher=lambda host, port, rank: link,
            clock=self.clock,
            boot_nonce=lives.randbytes(16).hex(),
            draw=bytes,
        )
        built = build_app(options, parts)
        config = ServerConfig(
            built.app, http="httptools", ws="none", lifespan="off", log_config=None
        )
        config.load()
        endpoint, state = _endpoint(name), ServerState()
        connections: list[HttpToolsProtocol] = []

        def accept() -> HttpToolsProtocol:
            connections.append(HttpToolsProtocol(config, state, {}, self.loop))
            return connections[-1]

        self.loop.listeners[endpoint.host, endpoint.port] = accept
        fence = built.ranks[0].engine.cache._guard
        assert isinstance(fence, Fence)
        return Life(fence=fence, link=link, connections=connections)

    def _grant_leases(self) -> None:
        """As long as any are given; those that are to end soon are given for less long."""
        ends_at_s = self.scenario.leases_end_at_s
        if ends_at_s is None or self.loop.time() < ends_at_s:
            for life in self.lives.values():
                self._grant_lease(life, 3_000.0 if ends_at_s is None else 200.0)
            self.loop.call_later(1.0 if ends_at_s is None else 0.1, self._grant_leases)

    def _grant_lease(self, life: Life, ttl_ms: float) -> None:
        freshness, table = life.fence.freshness, self.tenancy.table
        epochs = {str(subject): epoch for subject, epoch in table.epochs.items()}
        ask = freshness.ask(self.clock.boot())
        freshness.take(Lease(ask=ask, rev=table.rev, ttl_ms=ttl_ms, epochs=epochs))

    # -- what happens besides ----------------------------------------------------------------------

    def _plan_troubles(self) -> None:
        scenario = self.scenario
        if scenario.restart_at_s is not None:
            self.loop.call_later(scenario.restart_at_s, self._restart, WorkerId("w0:1"))
        if scenario.raised is not None:
            at_s, verb = scenario.raised
            self.loop.call_later(at_s, self._raise, verb)

    def _restart(self, name: WorkerId) -> None:
        """As a crash: its connections break, its cache is gone, and it is found again at once."""
        for served in self.lives[name].connections:
            served.transport.close()
        self._join(name)
        self._grant_lease(self.lives[name], 1_000.0)

    def _raise(self, verb: str) -> None:
        """The victim's epoch moves: at the gateway at once, at the workers by an order."""
        subject = Subject(kind=SubjectKind.TENANT, path=VICTIM)
        table = self.tenancy.table
        self.tenancy.swap(table.raised(subject, 1, rev=table.rev + 1, bars=verb == "revoke"))
        self.front.fence()
        self.core.namespaces.retire_stale(self.tenancy.table)
        order = {"rev": table.rev + 1, "subject": str(subject), "epoch": 1, "verb": verb}
        raw = json.dumps(order).encode()
        for name in self.lives:
            work = post(_endpoint(name), "/trunkline/revoke", raw, timeout_ms=1_000)
            self.front._spawn(_ignoring(work))


# -- its parts, and pairs --------------------------------------------------------------------------


def core_of(scenario: Scenario, clock: LoopClock) -> Core:
    """The deciding half of the gateway: with the same secrets for the same scenario."""
    draw = random.Random(f"secrets {scenario.seed}").randbytes
    cap = scenario.cap_blocks
    quota = Quota(
        cache_floor_bytes=scenario.floor_blocks * BLOCK_BYTES,
        cache_cap_bytes=None if cap is None else cap * BLOCK_BYTES,
    )
    routing = RoutingConfig(
        policy=scenario.policy,
        profile="tiny",
        seed=scenario.seed,
        decision_header=True,
        virtual_nodes=VIRTUAL_NODES,
    )
    given = Given(
        tokenizer=tokenizer(),
        template=template(),
        root_key=root_key(scenario),
        directory_seed=scenario.seed,
        clock=clock,
        draw=draw,
        quota_of=lambda _tenant: quota,
    )
    core = assemble(Config(routing=routing), given)
    core.model.settle((MODEL,), "")
    return core


def _endpoint(name: WorkerId) -> Endpoint:
    return Endpoint(host=name.partition(":")[0], port=1, host_header=name)


async def _ignoring(work: Coroutine[Any, Any, object]) -> None:
    """An order that a worker which is just being restarted does not get."""
    with contextlib.suppress(WorkerLost, WorkerTimeout):
        await work


def view(scenario: Scenario, contents: Contents, known: Contents) -> View:
    """Run it."""
    loop = NetLoop()
    try:
        return loop.run_until_complete(World(loop, scenario, contents, known).run())
    finally:
        loop.close()


def views(scenario: Scenario, count: int = 2) -> list[View]:
    """So many runs of one scenario, that differ in what the victim says."""
    drawn = contents_of(scenario, count)
    return [view(scenario, contents, drawn[0]) for contents in drawn]


def main() -> None:
    seed = int(sys.argv[1])
    scenario = scenario_of(seed)
    first, second = views(scenario)
    print(scenario)  # noqa: T201 - a tool for people
    for index, (one, other) in enumerate(zip(first.attacker, second.attacker, strict=True)):
        print(index, "equal" if one == other else f"DIFFERS\n{one}\n{other}")  # noqa: T201
    print("the victim's times are equal:", first.victim_times == second.victim_times)  # noqa: T201
    print("cached", first.victim_cached, first.attacker_cached)  # noqa: T201


if __name__ == "__main__":
    main()
