"""The invariants, each a small check against what the world knows by itself.

    I1 I2 I7   ground_truth.py, at each use of a block
    I8         ground_truth.py, at each eviction
    I3   after the ack of a revocation: no use (ground_truth.py), and no token leaves the gateway
    I3b  revisions and epochs never go back, in any holder's life
    I4 I12     picks.py, at each choice of a gateway
    I10        records.py, at each ack and at rest
    I5   one end for each call; tokens without gap or repeat; usage as delivered; no bug on the way
    I9   at rest nothing is left: attempts, places, pins, connections, tasks
    LIVE what had to come back is back, 10 heartbeats after the faults
    DIR  at rest the directory says what the workers hold

Read `world.py` for who calls, `planted.py` for what shows that each can fail.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from faults.callers import Caller, Outcome, piece
from faults.gate import BREAKER_PAUSE_S, Gate, lease_ends_s, subject_of_tenant, worker_name
from faults.ground_truth import owner_of
from faults.kv_rest import left_of_pulls
from faults.picks import Picks
from faults.records import Records
from faults.setting import Call

from trunkline.control.receipts import Receipt
from trunkline.core.decision import Exclusion
from trunkline.core.feed import FeedState
from trunkline.core.freshness import grant_ms
from trunkline.core.identity import ScopeKind
from trunkline.errors import GatewayError
from trunkline.gateway.tenancy import Asked
from trunkline.worker.blocks import BlockState

if TYPE_CHECKING:
    from faults.crew import Life
    from faults.world import World

ACK_SLACK_MS = 200.0
"""The store, the audit's patience and the ways."""
_TIMED = (Exclusion.SUSPECT, Exclusion.EJECTED)
_BUGS = ("exchange.bug", "worker.join_failed", "worker.follow_failed", "revocation.holder_failed")


class Checks:
    """Of one run."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._revs: dict[object, int] = {}
        self._tables: dict[str, object] = {}
        """What was looked at last."""
        self._barred: dict[int, int] = {}
        """Tenants whose revocation was acknowledged and who are not enabled again."""
        self.drained: dict[tuple[str, str], None] = {}
        """(gateway, worker)"""
        self.records = Records(world)
        self._picks: dict[str, Picks] = {}
        """By gateway, of its newest life."""
        self._doomed: set[int] = set()
        """Calls that were open when their gateway died."""
        self._was_barred: set[int] = set()
        self.raises = 0
        self.was_raised: set[int] = set()
        self._unanswered: list[tuple[int, Gate]] = []
        """Tenants whose epoch somebody wants to raise, and at which life of which gateway."""
        self._enabled_s: dict[int, float] = {}
        """When somebody last asked for a tenant to be enabled again, wherever."""
        self.doubted: dict[tuple[str, str], None] = {}
        """(gateway, worker): those that were still left out for what their streams missed."""

    # -- while it runs -----------------------------------------------------------------------------

    def watch(self, gate: Gate) -> None:
        """From when it is up on."""

        def up() -> None:
            self._picks[gate.name] = Picks(self._world, gate)

        gate.on_up = up

    @property
    def last_pick_s(self) -> float:
        return max((picks.last_s for picks in self._picks.values()), default=0.0)

    def begins(self, caller: Caller) -> None:
        """Look at each byte that the gateway writes to this client."""
        caller.on_written = lambda data: self._leaves(caller, data)

    def look(self) -> None:
        """I3b, and that no worker believes more than any gateway (I4)."""
        world = self._world
        for gate in world.gates.values():
            table = gate.registry.table if hasattr(gate, "registry") else None
            if table is None or table is self._tables.get(gate.name):
                continue
            self._tables[gate.name] = table
            self._must_grow(gate.name, table.rev)
            for subject, epoch in table.epochs.items():
                self._must_grow((gate.name, str(subject)), epoch)
        ends_s = lease_ends_s(world.common.posted_s) if world.common else 1e9
        for life in world.lives.values():
            freshness, name = life.fence.freshness, f"{life.name}#{life.number}"
            if world.net.time() > ends_s and freshness.is_valid(life.clock.boot()):
                world.violate("I4", f"{name} believes a lease beyond that of every gateway")
            self._must_grow(name, freshness.rev)
            for number in range(world.setting.tenant_count):
                subject = str(subject_of_tenant(number))
                self._must_grow((name, subject), freshness.epoch(subject))

    def heard(self, event: str, cause: BaseException | None) -> None:
        """Errors that nobody foresaw are in the log."""
        if event in _BUGS or (event == "revocation.failed" and cause is not None):
            self._world.violate("I5", f"a bug: {event} {cause!r}")

    def gate_dies(self, gate: Gate) -> None:
        """Its clients are reset: it cannot do better."""
        self.drained = {pair: None for pair in self.drained if pair[0] != gate.name}
        for number, caller in self._world.callers.items():
            if not caller.over.is_set() and caller.gateway in ("", gate.name):
                self._doomed.add(number)

    def raising(self, tenant: int, gate: Gate) -> None:
        self.was_raised.add(tenant)
        self._unanswered.append((tenant, gate))

    def answered(self, tenant: int, gate: Gate) -> None:
        """With a receipt, or with a refusal."""
        self._unanswered.remove((tenant, gate))

    @property
    def waiting_for_answers(self) -> int:
        return len(self._unanswered)

    def raised(self, tenant: int, receipt: Receipt, began_s: float, *, bars: bool) -> None:
        """A receipt: from now on nothing older is used, at no gateway."""
        world = self._world
        self.raises += 1
        world.note("acked", f"tenant {tenant} epoch {receipt.epoch} in {receipt.ms:.1f} ms")
        world.seen.receipt(receipt)
        acked = world.truth.acked
        acked[tenant] = max(acked.get(tenant, 0), receipt.epoch)
        if bars:
            self._was_barred.add(tenant)
        if bars and self._enabled_s.get(tenant, -1.0) < began_s:
            self._barred[tenant] = receipt.epoch  # nobody has enabled it meanwhile
        if receipt.ms > grant_ms() + ACK_SLACK_MS:
            world.violate("LIVE", f"the ack took {receipt.ms:.0f} ms")

    def enabling(self, tenant: int) -> None:
        self._enabled_s[tenant] = self._world.net.time()
        self._barred.pop(tenant, None)

    def _must_grow(self, what: object, value: int) -> None:
        if value < self._revs.get(what, 0):
            self._world.violate("I3b", f"{what} went back to {value} from {self._revs[what]}")
        self._revs[what] = value

    def _leaves(self, caller: Caller, data: bytes) -> None:
        call = caller.call
        if call.tenant not in self._barred or b'"choices"' not in data:
            return
        gate = self._world.gates[caller.gateway]
        if caller.chunks and self._world.setting.lets_begun_finish and gate.is_apart():
            self._world.seen.counts["answer goes on at a gateway without a lease"] += 1
            return  # as `control_lost` has it: what it reused was bound under the lease
        self._world.violate("I3", f"call {call.number} gets tokens after its revocation's ack")

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
        if made.kind == "unreached" and not world.were_all_down(caller.began_s, caller.ended_s):
            world.violate("I5", f"{told} could reach no gateway")
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
        world = self._world
        for tenant, gate in self._unanswered:
            if gate is world.gates[gate.name]:
                world.violate("LIVE", f"a revocation of tenant {tenant} was never answered")
        revs = {gate.registry.rev for gate in world.gates.values()}
        if len(revs) > 1:
            world.violate("LIVE", f"the gateways are at revisions {sorted(revs)}")
        for gate in world.gates.values():
            self._gate_has_healed(gate)

    def _gate_has_healed(self, gate: Gate) -> None:
        world, boot = self._world, gate.clock.boot()
        if gate.gateways is not None and not gate.gateways.is_valid():
            world.violate("LIVE", f"{gate.name} has no lease again: {gate.gateways.trouble}")
        usable, excluded = gate.core.fleet.usable(boot)
        for number in range(world.setting.worker_count):
            name = worker_name(number)
            told = f"{name} at {gate.name}"
            state = next((state for state in usable if state.worker == name), None)
            if state is None:
                why = next((e for w, e in excluded.items() if w == name), None)
                if why in _TIMED or (why is Exclusion.BREAKER and _is_tried_soon(gate, name)):
                    self.doubted[gate.name, name] = None  # see `is_believed_again`
                else:
                    world.violate("LIVE", f"{told} is not back: {why.value if why else 'unknown'}")
            holder = gate.holdings.find(name)
            if holder is None or not holder.is_granted():
                world.violate("LIVE", f"{told} has no lease again")
            life = world.lives[name]
            if not life.fence.freshness.is_valid(life.clock.boot()):
                world.violate("LIVE", f"{name} believes no lease")
            if life.fence.freshness.rev != gate.registry.rev:
                world.violate("LIVE", f"{name} knows revision {life.fence.freshness.rev}")

    def is_believed_again(self) -> None:
        """LIVE: strikes fade and breakers try again, and who was left out for them is let in."""
        for gateway, name in self.doubted:
            gate = self._world.gates[gateway]
            usable, excluded = gate.core.fleet.usable(gate.clock.boot())
            if all(state.worker != name for state in usable):
                why = next((e.value for w, e in excluded.items() if w == name), "unknown")
                self._world.violate("LIVE", f"{name} is not back when its doubts are over: {why}")

    def is_at_rest(self) -> None:
        """I9, I10 and DIR."""
        self.records.is_at_rest()
        for gate in self._world.gates.values():
            self._gate_at_rest(gate)
            for life in self._world.lives.values():
                self._directory_is_true(gate, life)
        for life in self._world.lives.values():
            self._life_at_rest(life)

    def _gate_at_rest(self, gate: Gate) -> None:
        front, world = gate.front, self._world
        states = gate.core.fleet.states()
        left = {
            "active requests": front.counters.active_requests,
            "late picks": front.counters.late_picks,
            "open clients": front.counters.open_clients,
            "open upstreams": front.counters.open_upstreams - front.pool.idle_count(),
            "requests by tenant": len(front._places),
            "waiting": gate.line.waiting_count,
            "tickets": len(gate.core.picker._tickets),
            "in flight": sum(s.queue.in_flight_count for s in states),
            "revocations": gate.revoker._running_count,
            "ms told by other gateways": sum(s.queue._told_ms for s in states),
        }
        base_tasks = world.base_tasks.get(gate.name)
        if base_tasks and gate.life == 1:
            # What holders have erased is asked of them for a minute.
            open_tasks = gate.machine.open_tasks(lambda name: not name.startswith("revision "))
            left["more tasks than before"] = max(0, open_tasks - base_tasks)
        for what, count in left.items():
            if count:
                world.violate("I9", f"{what} at {gate.name}: {count} are left")

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
        if world.plane is not None:
            left |= left_of_pulls(life, world.plane)
        for what, count in left.items():
            if count:
                world.violate("I9", f"{what} at {life.name}: {count} are left")

    def _directory_is_true(self, gate: Gate, life: Life) -> None:
        """What the directory says of each call's prompt, and what the worker has of it."""
        world = self._world
        worker = next((s for s in gate.core.fleet.states() if s.worker == life.name), None)
        feed = gate.feeds.get(worker.worker) if worker else None
        if worker is None or feed is None or feed.state is not FeedState.LIVE:
            if feed is None or feed.state is not FeedState.BLIND:
                world.violate("LIVE", f"the feed of {life.name} is {feed and feed.state}")
            return
        asked: dict[object, None] = {}
        served = {
            (caller.gateway, owner_of(caller.call))
            for caller in world.callers.values()
            if caller.outcome.kind == "complete"
        }
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
            if gate.common is not None:  # of whom it knew nothing it asks again, a minute later
                has_gaps = has_gaps or feed._residency.has_unknown_salts
            is_whole = gate.life == 1 and not has_gaps and not self.was_raised
            is_known = (gate.name, owner_of(call)) in served  # else its blocks are of nobody
            if told < there and is_whole and is_known and life.number == 1:
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
        if keys is None:
            return None  # it has no lease
        most = (len(tokens) - 1) // block_tokens
        return min(most, gate.core.directory.match(keys.private).resident[slot])


def _is_tried_soon(gate: Gate, name: str) -> bool:
    """Whether its breaker opened, or let a trial through, so short a time ago that it may well be
    open: a worker with a long queue fails requests without any fault.
    """
    breaker = gate.members._members[name]._guard._breaker
    since = max(breaker._opened_at, breaker._trial_at or 0.0)
    return gate.clock.now() - since < BREAKER_PAUSE_S * 1e3
