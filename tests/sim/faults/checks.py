"""The invariants, each a small check against what the world knows by itself.

    I1 I2 I7   ground_truth.py, at each use of a block
    I3   after the ack of a revocation: no use (ground_truth.py), and no token leaves the gateway
    I3b  revisions and epochs never go back, in any holder's life
    I4   nothing is sent to a worker that may not be chosen, or that is long gone
    I5   one end for each call; tokens without gap or repeat; usage as delivered; no bug on the way
    I9   at rest nothing is left: attempts, places, pins, connections, tasks
    I12  retries within their budget, in every window
    LIVE what had to come back is back, 10 heartbeats after the faults
    DIR  at rest the directory says what the workers hold

Read `world.py` for who calls, `planted.py` for what shows that each can fail.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Awaitable, Mapping
from typing import TYPE_CHECKING, Any

from faults.callers import Caller, Outcome, piece
from faults.gate import Gate, subject_of_tenant, worker_name
from faults.setting import Call

from trunkline.control.receipts import Receipt
from trunkline.core.decision import Exclusion
from trunkline.core.feed import FeedState
from trunkline.core.freshness import grant_ms
from trunkline.core.identity import ScopeKind
from trunkline.core.records import WorkerId
from trunkline.errors import GatewayError
from trunkline.gateway.contracts import InferenceRequest, Pick
from trunkline.gateway.tenancy import Asked
from trunkline.ports.worker import AttemptEnd
from trunkline.worker.blocks import BlockState

if TYPE_CHECKING:
    from faults.crew import Life
    from faults.world import World

GONE_S = 5.0
"""Two failed probes, each with its interval and its time-out, and a moment."""
WINDOW_S = 9.0
"""The budget counts ten slots of one second; in any nine seconds it is kept whatever they are."""
BUDGET_SHARE = 0.2
ACK_SLACK_MS = 200.0
"""The store, the audit's patience and the ways."""
_TIMED = (Exclusion.SUSPECT, Exclusion.EJECTED)
_BUGS = ("exchange.bug", "worker.join_failed", "worker.follow_failed", "revocation.holder_failed")


class Checks:
    """Of one run."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._revs: dict[object, int] = {}
        self._barred: dict[int, int] = {}
        """Tenants whose revocation was acknowledged and who are not enabled again."""
        self._drained: dict[str, None] = {}
        self._requests: deque[float] = deque()
        self._retries: deque[float] = deque()
        self._failed: dict[str, None] = {}
        """Requests whose last attempt failed."""
        self._known: dict[str, None] = {}
        self._doomed: set[int] = set()
        """Calls that were open when the gateway died."""
        self._was_barred: set[int] = set()
        self.last_pick_s = 0.0
        self.raises = 0
        self.was_raised: set[int] = set()
        self._unanswered: list[tuple[int, int]] = []
        """Tenants whose epoch somebody wants to raise, and in which life of the gateway."""
        self.doubted: dict[str, None] = {}
        """Workers that were still left out for what their streams missed."""

    # -- while it runs -----------------------------------------------------------------------------

    def watch(self, gate: Gate) -> None:
        """From when it is up on."""
        gate.on_up = lambda: self._watch(gate)

    def begins(self, caller: Caller) -> None:
        """Look at each byte that the gateway writes to this client."""
        caller.on_written = lambda data: self._leaves(caller.call, data)

    def look(self) -> None:
        """I3b, and what else can be looked at any time."""
        world = self._world
        table = world.gate.registry.table if hasattr(world.gate, "registry") else None
        if table is not None:
            self._must_grow("registry", table.rev)
            for subject, epoch in table.epochs.items():
                self._must_grow(("registry", str(subject)), epoch)
        for life in world.lives.values():
            freshness, name = life.fence.freshness, f"{life.name}#{life.number}"
            self._must_grow(name, freshness.rev)
            for number in range(world.setting.tenant_count):
                subject = str(subject_of_tenant(number))
                self._must_grow((name, subject), freshness.epoch(subject))

    def heard(self, event: str, cause: BaseException | None) -> None:
        """Errors that nobody foresaw are in the log."""
        if event in _BUGS or (event == "revocation.failed" and cause is not None):
            self._world.violate("I5", f"a bug: {event} {cause!r}")

    def gate_dies(self) -> None:
        """Its clients are reset: it cannot do better."""
        self._drained.clear()
        for number, caller in self._world.callers.items():
            if not caller.over.is_set():
                self._doomed.add(number)

    def drained(self, name: str) -> None:
        self._drained[name] = None

    def taken_in(self, name: str) -> None:
        self._drained.pop(name, None)

    def raising(self, tenant: int) -> None:
        self.was_raised.add(tenant)
        self._unanswered.append((tenant, self._world.gate.life))

    def answered(self, tenant: int) -> None:
        """With a receipt, or with a refusal."""
        self._unanswered.remove((tenant, self._world.gate.life))

    def raised(self, tenant: int, receipt: Receipt, *, bars: bool) -> None:
        """A receipt: from now on nothing older is used."""
        world = self._world
        self.raises += 1
        world.note("acked", f"tenant {tenant} epoch {receipt.epoch} in {receipt.ms:.1f} ms")
        world.seen.receipt(receipt)
        acked = world.truth.acked
        acked[tenant] = max(acked.get(tenant, 0), receipt.epoch)
        if bars:
            self._was_barred.add(tenant)
        if bars and subject_of_tenant(tenant) in world.gate.registry.table.barred:
            self._barred[tenant] = receipt.epoch  # nobody has enabled it meanwhile
        if receipt.ms > grant_ms() + ACK_SLACK_MS:
            world.violate("LIVE", f"the ack took {receipt.ms:.0f} ms")

    def enabling(self, tenant: int) -> None:
        self._barred.pop(tenant, None)

    def _must_grow(self, what: object, value: int) -> None:
        if value < self._revs.get(what, 0):
            self._world.violate("I3b", f"{what} went back to {value} from {self._revs[what]}")
        self._revs[what] = value

    def _leaves(self, call: Call, data: bytes) -> None:
        if call.tenant in self._barred and b'"choices"' in data:
            self._world.violate("I3", f"call {call.number} gets tokens after its revocation's ack")

    # -- picks -------------------------------------------------------------------------------------

    def _watch(self, gate: Gate) -> None:
        line, picker = gate.line, gate.core.picker
        take, ended, choose = line.pick, line.ended, picker.pick

        def picked(request: InferenceRequest, tried: frozenset[Any]) -> Any:
            self._count(request)
            return take(request, tried)

        def over(pick: Pick, end: AttemptEnd, cached_tokens: int | None) -> None:
            if end is AttemptEnd.WORKER_FAILED:
                self._failed[pick.ticket.decision.request_id] = None
            ended(pick, end, cached_tokens)

        def chosen(request: InferenceRequest, tried: frozenset[Any]) -> Any:
            usable, excluded = gate.core.fleet.usable(gate.clock.boot())
            found = choose(request, tried)
            if inspect.isawaitable(found):
                return self._later(found)
            self._check_choice(found, excluded if usable else {})
            return found

        line.pick, line.ended, picker.pick = picked, over, chosen

    async def _later(self, found: Awaitable[Pick]) -> Pick:
        made = await found
        self._check_choice(made, {})  # who may be chosen has changed since
        return made

    def _check_choice(self, pick: Pick, excluded: Mapping[WorkerId, Exclusion]) -> None:
        """I4. `excluded` as of just before; empty where all are, and any will do."""
        world, name = self._world, str(pick.worker)
        self.last_pick_s = world.net.time()
        world.seen.picked(pick)
        if pick.worker in excluded:
            world.violate("I4", f"{name} was chosen though {excluded[pick.worker].value}")
        if name in self._drained:
            world.violate("I4", f"{name} was chosen after it was drained")
        bad, now_s = world.troubles.bad_since, world.net.time()
        since_s = bad.get(name)
        others = world.setting.worker_count - len(bad)
        are_enough = 2 * others >= world.setting.worker_count
        if since_s is not None and now_s - since_s > GONE_S and are_enough:
            world.violate("I4", f"{name} was chosen {now_s - since_s:.1f} s after it was gone")

    def _count(self, request: InferenceRequest) -> None:
        """I12."""
        now_s, name = self._world.net.time(), request.request_id
        if name not in self._known:
            self._known[name] = None
            self._requests.append(now_s)
        elif name in self._failed:
            del self._failed[name]
            self._retries.append(now_s)
            self._check_budget(now_s)

    def _check_budget(self, now_s: float) -> None:
        retries = sum(at_s > now_s - WINDOW_S for at_s in self._retries)
        requests = sum(at_s > now_s - 10.0 - 1.0 for at_s in self._requests)
        floor = 10.0 * self._world.setting.retry_floor_per_s
        if retries > BUDGET_SHARE * requests + floor:
            self._world.violate("I12", f"{retries} retries of {requests} requests, floor {floor}")

    # -- ends --------------------------------------------------------------------------------------

    def ended(self, caller: Caller) -> None:
        """I5, for one call."""
        world, call, made = self._world, caller.call, caller.outcome
        told = f"call {call.number}"
        world.note("end", f"{told} {made.kind} {made.status} {made.code}")
        world.seen.ended(caller)
        if made.problem and call.number not in self._doomed:
            world.violate("I5", f"{told}: {made.problem}")
        is_doomed = call.number in self._doomed or made.kind == "unreached"
        if made.kind == "open":
            world.violate("I5", f"{told} has no end")
        if made.kind == "cut" and not is_doomed and not self._was_too_slow(call):
            world.violate("I5", f"{told} was cut off without a word, status {made.status}")
        if made.kind == "unreached" and world.gate.life == 1:
            world.violate("I5", f"{told} could not reach the gateway")
        self._check_tokens(call, made)
        if made.kind == "complete":
            self._check_whole(call, made)

    def _was_too_slow(self, call: Call) -> bool:
        """Who reads nothing for too long is dropped; and what waits unread for a client when its
        tenant is revoked is thrown away, with the connection.
        """
        if call.pauses_s and call.tenant in self._was_barred:
            return True
        return call.pauses_s * 1_000.0 >= self._world.setting.write_stall_ms

    def _check_tokens(self, call: Call, made: Outcome) -> None:
        """What came is the beginning of what is right: no token wrong, twice or missing."""
        answer = self._world.prompts.answer(call, call.answer_tokens)
        text = "".join(piece(token) for token in answer)
        if not text.startswith(made.text):
            self._world.violate("I1", f"call {call.number}: wrong text {made.text[:60]!r}")
        if made.ids and made.ids != answer.tolist()[: len(made.ids)]:
            self._world.violate("I1", f"call {call.number}: wrong tokens {made.ids[:6]}")

    def _check_whole(self, call: Call, made: Outcome) -> None:
        world, told = self._world, f"call {call.number}"
        answer = world.prompts.answer(call, call.answer_tokens)
        if made.text != "".join(piece(token) for token in answer):
            world.violate("I5", f"{told} is complete, with {len(made.text)} characters")
        usage = made.usage or {}
        wanted = (len(world.prompts.tokens(call)), call.answer_tokens)
        if (usage.get("prompt_tokens"), usage.get("completion_tokens")) != wanted:
            world.violate("I5", f"{told}: usage {usage}, delivered {wanted}")
        if made.ids and len(made.ids) != call.answer_tokens:
            world.violate("I5", f"{told}: {len(made.ids)} ids of {call.answer_tokens}")

    # -- after the faults --------------------------------------------------------------------------

    def has_healed(self) -> None:
        """LIVE: ten heartbeats after the faults."""
        world, gate = self._world, self._world.gate
        for tenant, life in self._unanswered:
            if life == gate.life:
                world.violate("LIVE", f"a revocation of tenant {tenant} was never answered")
        boot = gate.clock.boot()
        usable, excluded = gate.core.fleet.usable(boot)
        for number in range(world.setting.worker_count):
            name = worker_name(number)
            state = next((state for state in usable if state.worker == name), None)
            if state is None:
                why = next((e for w, e in excluded.items() if w == name), None)
                if why in _TIMED:
                    self.doubted[name] = None  # for its time: see `is_believed_again`
                else:
                    world.violate("LIVE", f"{name} is not back: {why.value if why else 'unknown'}")
            holder = gate.holdings.find(name)
            if holder is None or not holder.is_granted():
                world.violate("LIVE", f"{name} has no lease again")
            life = world.lives[name]
            if not life.fence.freshness.is_valid(life.clock.boot()):
                world.violate("LIVE", f"{name} believes no lease")
            if life.fence.freshness.rev != gate.registry.rev:
                world.violate("LIVE", f"{name} knows revision {life.fence.freshness.rev}")

    def is_believed_again(self) -> None:
        """LIVE: strikes fade, and who was ejected for them is let in again."""
        gate = self._world.gate
        usable, excluded = gate.core.fleet.usable(gate.clock.boot())
        for name in self.doubted:
            if all(state.worker != name for state in usable):
                why = next((e.value for w, e in excluded.items() if w == name), "unknown")
                self._world.violate("LIVE", f"{name} is not back when its doubts are over: {why}")

    def is_at_rest(self) -> None:
        """I9 and DIR."""
        self._gate_at_rest(self._world.gate)
        for life in self._world.lives.values():
            self._life_at_rest(life)
            self._directory_is_true(life)

    def _gate_at_rest(self, gate: Gate) -> None:
        front, world = gate.front, self._world
        left = {
            "active requests": front.counters.active_requests,
            "late picks": front.counters.late_picks,
            "open clients": front.counters.open_clients,
            "open upstreams": front.counters.open_upstreams - front.pool.idle_count(),
            "requests by tenant": len(front._running),
            "waiting": gate.line.waiting_count,
            "tickets": len(gate.core.picker._tickets),
            "in flight": sum(s.queue.in_flight_count for s in gate.core.fleet.states()),
            "revocations": gate.revoker._running_count,
        }
        if world.base_tasks and gate.life == 1:
            # What holders have erased is asked of them for a minute.
            open_tasks = gate.machine.open_tasks(lambda name: not name.startswith("revision "))
            left["more tasks than before"] = max(0, open_tasks - world.base_tasks)
        for what, count in left.items():
            if count:
                world.violate("I9", f"{what}: {count} are left")

    def _life_at_rest(self, life: Life) -> None:
        engine, cache, world = life.engine, life.engine.cache, self._world
        resident = [block for copies in cache._resident.values() for block in copies]
        left = {
            "running": engine.running,
            "waiting": engine.waiting,
            "reserved places": cache._reserved,
            "places in use": cache.capacity - cache.places.free_count,
            "pinned blocks": sum(bool(block.references) for block in resident),
            "blocks that are not ready": sum(b.state is not BlockState.READY for b in resident),
            "bytes of blocks that are none": sum(
                len(block.kv) != cache.block_bytes for block in resident
            ),
        }
        for what, count in left.items():
            if count:
                world.violate("I9", f"{what} at {life.name}: {count} are left")

    def _directory_is_true(self, life: Life) -> None:
        """What the directory says of each call's prompt, and what the worker has of it."""
        world, gate = self._world, self._world.gate
        worker = next((s for s in gate.core.fleet.states() if s.worker == life.name), None)
        feed = gate.feeds.get(worker.worker) if worker else None
        if worker is None or feed is None or feed.state is not FeedState.LIVE:
            if feed is None or feed.state is not FeedState.BLIND:
                world.violate("LIVE", f"the feed of {life.name} is {feed and feed.state}")
            return
        asked: dict[object, None] = {}
        for call in world.setting.calls:
            tokens = world.prompts.tokens(call)
            key = (call.tenant, call.wish, call.user, tokens.tobytes())
            if call.wish == "none" or key in asked:
                continue
            asked[key] = None
            told = self._told(gate, call, worker.slot, worker.block_tokens)
            if told is None:
                continue
            there = world.truth.leading_blocks(life, call)
            if told > there:
                world.violate("DIR", f"{life.name} has {there} of call {call.number}, told {told}")
            stats = feed.stats
            has_gaps = stats.relearned or stats.late_replays
            is_whole = gate.life == 1 and not has_gaps and not self.was_raised
            if told < there and is_whole and life.number == 1:
                world.violate("DIR", f"{life.name} has {there} of call {call.number}, known {told}")

    def _told(self, gate: Gate, call: Call, slot: int, block_tokens: int) -> int | None:
        """By the gateway's own way from a caller to its keys; None where it is barred."""
        principal = gate._authenticate(f"Bearer {call.tenant}/user{call.user}".encode(), "")
        wish = ScopeKind.USER if call.wish == "user" else None
        try:
            grant = gate.tenancy.admit(Asked(principal=principal, model="", wish=wish))
        except GatewayError:
            return None
        tokens = self._world.prompts.tokens(call)
        keys = gate.core.namespaces.keys(grant, tokens, block_tokens)
        assert keys is not None
        most = (len(tokens) - 1) // block_tokens
        return min(most, gate.core.directory.match(keys.private).resident[slot])
