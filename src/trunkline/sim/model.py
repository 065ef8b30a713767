"""The fleet model: real routing, directory and feeds over modelled workers, on a virtual clock.

Each worker has a FIFO prefill server (missed tokens x price + fixed), decodes without disturbing
it, and an LRU of blocks that are usable as soon as a prompt is placed. Good for ranking policies,
not for absolute latency: no batching, no chunked prefill, outputs not cached (docs/routing.md).
What it decides with is the code that runs in production: `core` gets the same calls with the same
arguments. What is pulled moves when its source has computed it, with its first token (`pulls.py`).

A trace's block id stands for `block_tokens` tokens: chains are made over ids, one "token" a block,
and prices over tokens. Cost: about 60 us of CPU a request and 1.5 us a block. Read `figures.py`
next.
"""

from __future__ import annotations

import heapq
import random
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from trunkline.core.actions import Action, RequestReplay
from trunkline.core.cost import CostModel
from trunkline.core.debts import Lending, owed_from
from trunkline.core.decision import Decision
from trunkline.core.directory import Directory
from trunkline.core.events import CacheEvent, EventBatch
from trunkline.core.feed import WorkerFeed
from trunkline.core.fleet import Fleet, WorkerState
from trunkline.core.identity import ModelIdentity, Namespace, Scope, ScopeKind, derive_namespace
from trunkline.core.keys import CHECKPOINT_TOKENS, chain
from trunkline.core.links import LinkProfile, Links
from trunkline.core.profiles import Profile, Scheduling
from trunkline.core.records import BootInstant, Instant, WorkerId
from trunkline.core.routing import Router, RouteRequest
from trunkline.replay.traces import Heat, TraceRequest
from trunkline.replay.workloads import Workload
from trunkline.sim.cache import TieredCache
from trunkline.sim.outcome import Outcome
from trunkline.sim.publisher import Publisher
from trunkline.sim.pulls import ModelPulls
from trunkline.sim.worker import Job, ModelWorker, Pull, cache_events

LEASE_MS = 3_000.0
"""Three heartbeats: how long a worker that vanished may still be chosen."""

TICK_MS = 1_000.0
HOT_ROOTS = 3
JOINED = "joined"  # the worker that comes later
_ROOT_KEY = b"trunkline fleet model, root key."
_MAX_DIRECTORY_BLOCKS = 8_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """What may be done to a run."""

    policy: str = "cache_aware"
    event_delay_ms: float = 1_000.0
    event_loss: float = 0.0
    kill_worker_at_ms: float | None = None
    join_worker_at_ms: float | None = None
    """One more worker, with an empty cache."""
    slow_start_ms: float = 60_000.0
    isolate: str = "none"
    """`none`: one namespace; `session`: one a session; `tenants`: two, by turns."""
    seed: int = 0
    churn_weight: float = 1.5
    links: LinkProfile | None = None
    """Of each worker, in each direction; None where nothing can be pulled."""
    kv_bytes_per_token: int = 128 << 10
    host_blocks: int = 0
    """Host memory of each worker; 0 for none."""
    max_copies: int = 64


class _Kind(IntEnum):
    FIRST_TOKEN = 0
    END = 1
    BATCH = 2
    REPLAY = 3
    TICK = 4
    KILL = 5
    LEASE_END = 6
    READY = 7
    JOIN = 8


class FleetModel:
    """One run of one workload under one policy."""

    def __init__(
        self, workload: Workload, options: ModelOptions, stopwatch_us: Callable[[], float]
    ) -> None:
        """`stopwatch_us` times look-ups; it takes no part in any decision."""
        self._workload = workload
        self._options = options
        self._stopwatch_us = stopwatch_us
        self.outcome = Outcome()
        self._directory = Directory(max_blocks=_MAX_DIRECTORY_BLOCKS)
        self._fleet = Fleet(virtual_nodes=128, now=Instant(0.0))
        self._profile = _profile(workload, options.kv_bytes_per_token)
        self._links: Links | None = None
        if options.links is not None:
            self._links = Links(options.links, bytes_per_token=options.kv_bytes_per_token)
        self._cost = CostModel(self._profile, churn_weight=options.churn_weight, links=self._links)
        self._router = Router(
            fleet=self._fleet,
            cost=self._cost,
            policy=options.policy,
            rng=random.Random(options.seed),
            max_copies=options.max_copies,
        )
        self._pulls: ModelPulls | None = None
        if options.links is not None and self._links is not None:
            self._pulls = ModelPulls(
                links=self._links,
                profile=options.links,
                block_bytes=workload.block_tokens * options.kv_bytes_per_token,
                outcome=self.outcome,
                end_at=lambda at_ms, worker, ticket: self._push(
                    at_ms, _Kind.READY, (worker, ticket)
                ),
            )
        self._heap: list[tuple[float, int, _Kind, object]] = []
        self._pushed = 0
        self._now_ms = 0.0
        self._tickets = 0
        self._namespaces: dict[str, Namespace] = {}
        self._hot_roots: dict[int, bytes | None] = {}
        self._hot_holders: Counter[int] = Counter()
        self._hot_id: int | None = None
        self._hot_key: bytes | None = None
        self._workers: dict[WorkerId, ModelWorker] = {}
        for index in range(workload.workers):
            self._add_worker(WorkerId(f"w{index}"), index)

    def run(
        self, requests: Sequence[TraceRequest], progress: Callable[[], None] | None = None
    ) -> Outcome:
        """All requests to their end, and all events to the directory."""
        if self._options.kill_worker_at_ms is not None:
            self._push(self._options.kill_worker_at_ms, _Kind.KILL, WorkerId("w0"))
        if self._options.join_worker_at_ms is not None:
            self._push(self._options.join_worker_at_ms, _Kind.JOIN, WorkerId(JOINED))
        self._push(TICK_MS, _Kind.TICK, None)
        roots = Counter(r.block_ids[0] for r in requests if r.block_ids and r.full_blocks)
        self._hot_roots = dict.fromkeys(root for root, _ in roots.most_common(HOT_ROOTS))
        heat = self._workload.heat
        if heat is not None:
            self._hot_id = _hot_id(requests, heat)
        for number, request in enumerate(requests):
            self._run_until(request.arrival_ms)
            self._arrive(number, request)
            if progress is not None:
                progress()
        self._run_until(float("inf"))
        self._flush_events()
        self._check_directory()
        return self.outcome

    # -- the life of a request -------------------------------------------------------------------

    def _arrive(self, number: int, request: TraceRequest) -> None:
        assert request.block_ids is not None, "the model needs block ids"
        namespace = self._namespace(number, request)
        ids = array("I", request.block_ids[: request.full_blocks])
        job = Job(request=request, keys=chain(namespace, ids), arrival_ms=request.arrival_ms)
        if ids and ids[0] in self._hot_roots:
            self._hot_roots[ids[0]] = job.keys[0]
        if self._hot_id is not None and self._hot_id in ids:
            self._hot_key = job.keys[ids.index(self._hot_id)]
        self.outcome.input_tokens += request.input_tokens
        self._place(job, request.arrival_ms)

    def _place(self, job: Job, now_ms: float) -> None:
        """Route, as the gateway does, until a worker takes the job."""
        while True:
            decision = self._decide(job, now_ms)
            if decision is None:
                self.outcome.lost += 1
                return
            worker = self._workers[decision.worker]
            if not worker.is_dead:
                break
            self.outcome.retried += 1
            if now_ms >= (self._options.kill_worker_at_ms or 0.0) + LEASE_MS:
                self.outcome.used_after_lease += 1
            job.tried |= {decision.worker}
        self._start(job, worker, decision, now_ms)

    def _decide(self, job: Job, now_ms: float) -> Decision | None:
        request, block_tokens = job.request, self._workload.block_tokens
        started = self._stopwatch_us()
        match = self._directory.match(job.keys)
        self.outcome.lookup_us.append(self._stopwatch_us() - started)
        limit = (request.input_tokens - 1) // block_tokens
        matched = [min(blocks, limit) * block_tokens for blocks in match.expected]
        sources = None
        if self._links is not None:
            sources = [min(blocks, limit) * block_tokens for blocks in match.expected]
        home = min(len(job.keys), max(1, CHECKPOINT_TOKENS[0] // block_tokens))
        return self._router.route(
            RouteRequest(
                request_id="",
                prompt_tokens=request.input_tokens,
                matched_tokens=matched,
                home_key=job.keys[home - 1] if home else None,
                source_tokens=sources,
                owed=Lending(
                    keys=job.keys,
                    block_tokens=block_tokens,
                    debts_of=lambda worker: self._workers[worker].jobs,
                    lends_owed=lambda _worker: True,
                ),
            ),
            now=Instant(now_ms),
            boot=BootInstant(now_ms),
            tried=job.tried,
        )

    def _start(self, job: Job, worker: ModelWorker, decision: Decision, now_ms: float) -> None:
        """The worker takes the job: what it really holds decides what is computed."""
        request, outcome, state = job.request, self.outcome, worker.state
        block_tokens = self._workload.block_tokens
        keys: list[bytes] = list(job.keys)
        ids = array("I", (request.block_ids or ())[: len(keys)])
        limit = (request.input_tokens - 1) // block_tokens
        self._tickets += 1
        pull = self._ask(worker, decision, keys[:limit], now_ms)
        use = worker.cache.use(keys, ids)
        hit_blocks = min(use.hit_blocks + len(pull.keys if pull else ()), limit)
        hit_tokens = hit_blocks * block_tokens
        outcome.false_hits += use.false_hits
        outcome.over_claims += decision.expected_tokens > hit_tokens
        outcome.plans[decision.plan.value] += 1
        now = Instant(now_ms)
        state.queue.start(self._tickets, decision.miss_ms, now)
        self._fleet.churn.add(state.queue, request.input_tokens - decision.expected_tokens, now)
        ttl_ms = 5_000.0
        self._directory.predict(state.worker, job.keys, now=now, ttl_ms=ttl_ms)
        prefill_ms = self._workload.prefill_ms(request.input_tokens - hit_tokens)
        loaded_tokens = min(use.loaded_blocks, hit_blocks) * block_tokens
        prefill_ms += self._profile.load_ms(loaded_tokens)
        outcome.host_tokens += loaded_tokens
        outcome.work_ms[state.worker] += prefill_ms
        if job.attempt == 0:
            outcome.hit_tokens += hit_tokens
            outcome.hit_requests += hit_tokens > 0
        job.attempt += 1
        worker.jobs[self._tickets] = job
        job.placed_ms, job.prefill_ms = now_ms, prefill_ms
        job.owed_from = owed_from(decision.matched_tokens // block_tokens, len(keys), limit)
        job.is_pulling = decision.source is not None
        job.pull, job.lacks = pull, worker.follow(self._tickets, keys[: use.hit_blocks])
        worker.expect(self._tickets, keys[use.hit_blocks :])
        if pull is not None and self._pulls is not None:
            job.lacks += 1
            self._pulls.begin(worker, self._tickets, pull, now_ms)
        if not job.lacks:
            self._ready(worker, self._tickets, now_ms)
        self._publish(worker, cache_events(keys, ids, job.keys.namespace.salt, use), now_ms)

    def _ask(
        self, worker: ModelWorker, decision: Decision, keys: list[bytes], now_ms: float
    ) -> Pull | None:
        """What of these keys is to come from the source behind the worker's own."""
        if decision.source is None or self._pulls is None:
            return None
        last = decision.expected_tokens // self._workload.block_tokens
        source = self._workers[decision.source]
        first = worker.cache.run(keys)
        return self._pulls.ask(source, keys[:last], first, now_ms)

    def _publish(self, worker: ModelWorker, events: list[CacheEvent], now_ms: float) -> None:
        batch = worker.publisher.publish(events) if events else None
        if batch is not None:
            self._push(now_ms + self._options.event_delay_ms, _Kind.BATCH, (worker, batch))

    def _pulled(self, worker: ModelWorker, ticket: int, now_ms: float) -> None:
        """Its pull is over: what did not come is computed."""
        job = worker.jobs[ticket]
        pull, job.pull = job.pull, None
        assert pull is not None, "a pull ends once"
        missing = len(pull.keys) if pull.source.is_dead else pull.missing
        self.outcome.failed_pulls += missing == len(pull.keys)
        tokens = missing * self._workload.block_tokens
        self.outcome.pulled_tokens += len(pull.keys) * self._workload.block_tokens - tokens
        self.outcome.hit_tokens -= tokens
        job.prefill_ms += self._workload.prefill_token_ms * tokens
        worker.arrived(ticket, pull.keys[: len(pull.keys) - missing])
        self._has_come(worker, ticket, now_ms)

    def _has_come(self, worker: ModelWorker, ticket: int, now_ms: float) -> None:
        """One thing less that it lacks; with the last one those that follow it go on as well."""
        job = worker.jobs[ticket]
        job.lacks -= 1
        if job.lacks:
            return
        self._ready(worker, ticket, now_ms)
        followers, job.followers = job.followers, []
        for follower in followers:
            self._has_come(worker, follower, now_ms)

    def _ready(self, worker: ModelWorker, ticket: int, now_ms: float) -> None:
        """Nothing is missing for its prefill but the server."""
        worker.ready.append(ticket)
        if worker.serving is None:
            self._serve(worker, now_ms)

    def _serve(self, worker: ModelWorker, now_ms: float) -> None:
        job = worker.next_job()
        if job is not None:
            self.outcome.queue_ms += now_ms - job.placed_ms
            self._push(now_ms + job.prefill_ms, _Kind.FIRST_TOKEN, (worker, worker.serving))

    # -- what else happens -----------------------------------------------------------------------

    def _run_until(self, limit_ms: float) -> None:
        heap = self._heap
        while heap and heap[0][0] <= limit_ms:
            now_ms, _, kind, what = heapq.heappop(heap)
            self._now_ms = now_ms
            self._happen(Instant(now_ms), kind, what)

    def _happen(self, now: Instant, kind: _Kind, what: object) -> None:
        delay_ms = self._options.event_delay_ms
        match kind, what:
            case _Kind.FIRST_TOKEN, (ModelWorker() as worker, int(ticket)):
                self._first_token(worker, ticket, now)
            case _Kind.READY, (ModelWorker() as worker, int(ticket)):
                if ticket in worker.jobs:
                    self._pulled(worker, ticket, now)
            case _Kind.END, (ModelWorker() as worker, int(ticket)):
                worker.state.queue.end(ticket, now)
            case _Kind.BATCH, (ModelWorker() as worker, EventBatch() as batch):
                self._act(worker, worker.feed.live(batch, now, age_ms=delay_ms), now)
            case _Kind.REPLAY, (ModelWorker() as worker, RequestReplay() as asked):
                self._replay(worker, asked, now)
            case _Kind.TICK, _:
                self._tick(now)
            case _Kind.KILL, str(name):
                self._kill(self._workers[WorkerId(name)], now)
            case _Kind.JOIN, str(name):
                self._add_worker(WorkerId(name), len(self._workers))
            case _Kind.LEASE_END, str(name):
                self._fleet.remove(WorkerId(name))
                self._directory.leave(WorkerId(name))
            case _:
                raise AssertionError(f"unknown happening {kind}")

    def _first_token(self, worker: ModelWorker, ticket: int, now: Instant) -> None:
        job = worker.jobs.pop(ticket, None)
        if job is None:
            return  # the worker was killed first
        worker.state.queue.first_token(ticket, now)
        worker.arrived(ticket, job.keys)
        if self._pulls is not None:
            self._pulls.computed(ticket, job, now)
        self.outcome.ttft_ms.append(now - job.arrival_ms)
        answer_ms = job.request.output_tokens * self._workload.decode_token_ms
        self._push(now + answer_ms, _Kind.END, (worker, ticket))
        self._serve(worker, now)

    def _act(self, worker: ModelWorker, actions: list[Action], now: Instant) -> None:
        for action in actions:
            if isinstance(action, RequestReplay):
                delay_ms = self._options.event_delay_ms
                self._push(now + delay_ms, _Kind.REPLAY, (worker, action))

    def _replay(self, worker: ModelWorker, asked: RequestReplay, now: Instant) -> None:
        if worker.is_dead:
            self._act(worker, worker.feed.replay_failed(asked.replay_id, "gone", now), now)
            return
        for batch in worker.publisher.replay(asked.from_seq):
            self._act(worker, worker.feed.replayed(batch, asked.replay_id, now), now)
        self._act(worker, worker.feed.replay_ended(asked.replay_id, now), now)

    def _tick(self, now: Instant) -> None:
        self._directory.expire(now)
        if JOINED in self._workers:
            queues = {w.worker: w.queue.queue_ms(now) for w in self._fleet.states()}
            self.outcome.queues_ms.append(queues)
        for root, key in self._hot_roots.items():
            if key is not None:
                holders = sum(worker.cache.holds(key) for worker in self._workers.values())
                self._hot_holders[root] = max(self._hot_holders[root], holders)
        if self._hot_key is not None:
            copies = sum(worker.cache.holds(self._hot_key) for worker in self._workers.values())
            self.outcome.hot_copies_most = max(self.outcome.hot_copies_most, copies)
            self.outcome.hot_copies_end = copies
        for worker in self._workers.values():
            self._act(worker, worker.feed.tick(now), now)
        if self._heap:
            self._push(now + TICK_MS, _Kind.TICK, None)

    def _kill(self, worker: ModelWorker, now: Instant) -> None:
        """Its connections break at once, so its jobs start anew elsewhere; its lease runs out
        later.
        """
        self._push(now + LEASE_MS, _Kind.LEASE_END, worker.state.worker)
        for ticket, job in worker.die().items():
            worker.state.queue.end(ticket, now)
            if self._pulls is not None:
                self._pulls.died(job, now)
            job.followers.clear()
            job.tried |= {worker.state.worker}
            self._place(job, now)

    # -- set-up and checks -----------------------------------------------------------------------

    def _add_worker(self, name: WorkerId, index: int) -> None:
        slot = self._directory.join(
            name, block_tokens=1, max_predicted=self._workload.capacity_blocks
        )
        state = WorkerState(worker=name, slot=slot, block_tokens=1)
        self._fleet.start_slowly(state, self._options.slow_start_ms)
        self._fleet.add(state)
        draw = random.Random(self._options.seed * 1_009 + index)
        worker = ModelWorker(
            state=state,
            cache=TieredCache(
                device_blocks=self._workload.capacity_blocks, host_blocks=self._options.host_blocks
            ),
            publisher=Publisher(loss=self._options.event_loss, rng=draw),
            feed=WorkerFeed(name, self._directory),
        )
        self._workers[name] = worker
        self.outcome.work_ms[name] = 0.0
        now = Instant(self._now_ms)
        self._act(worker, worker.feed.joined(now), now)

    def _namespace(self, number: int, request: TraceRequest) -> Namespace:
        match self._options.isolate:
            case "session":
                # A sub-agent (`parent/agent`) belongs to its parent's session.
                name = (request.session or str(number)).partition("/")[0]
            case "tenants":
                name = f"tenant-{number % 2}"
            case _:
                name = "everyone"
        known = self._namespaces.get(name)
        if known is None:
            known = self._namespaces[name] = derive_namespace(
                _ROOT_KEY,
                Scope(kind=ScopeKind.TENANT, org="model", tenant=name),
                ModelIdentity(model_id=self._workload.name, block_tokens=1),
            )
            self._directory.admit_namespace(known)
        return known

    def _flush_events(self) -> None:
        """One more batch from each worker that surely arrives, so that the last losses show."""
        now_ms = self._now_ms
        for worker in self._workers.values():
            if not worker.is_dead:
                batch = worker.publisher.publish([], is_sure=True)
                assert batch is not None, "a sure batch arrives"
                self._push(now_ms, _Kind.BATCH, (worker, batch))
        self._run_until(float("inf"))

    def _check_directory(self) -> None:
        outcome = self.outcome
        outcome.directory_blocks = self._directory.block_count()
        outcome.directory_bytes = self._directory.memory_bytes()
        outcome.hot_prefix_holders = min(
            (self._hot_holders[root] for root in self._hot_roots), default=0
        )
        for name, worker in self._workers.items():
            outcome.feed_gaps += worker.feed.stats.gaps
            outcome.feed_replays += worker.feed.stats.replays
            if not worker.is_dead and self._directory.held_keys(name) != worker.cache.keys():
                outcome.directory_agrees = False

    def _push(self, at_ms: float, kind: _Kind, what: object) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (at_ms, self._pushed, kind, what))


def _hot_id(requests: Sequence[TraceRequest], heat: Heat) -> int | None:
    """The last block of the hot prefix; None where no prompt is long enough for all of it."""
    prompts = (r.block_ids for r in requests if r.block_ids and r.full_blocks >= heat.blocks)
    ids = Counter(block_ids[heat.blocks - 1] for block_ids in prompts)
    return ids.most_common(1)[0][0] if ids else None


def _profile(workload: Workload, kv_bytes_per_token: int) -> Profile:
    return Profile(
        name=workload.name,
        prefill_fixed_ms=workload.prefill_fixed_ms,
        prefill_token_ms=workload.prefill_token_ms,
        prefill_context_ms=0.0,
        decode_token_ms=workload.decode_token_ms,
        kv_bytes_per_token=kv_bytes_per_token,
        max_batch_tokens=1,
        scheduling=Scheduling.FIFO,
        source=f"workload {workload.name}",
    )
