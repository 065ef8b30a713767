"""Rare states: what a run reached at least once, seen from outside.

By counters, logs, picks, receipts and ends; nothing in the product says it for our sake. A state
that no seed reaches is one that the simulation does not test. Read `runs.py` for the table.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from faults import kv_rare
from faults.callers import Caller
from faults.gate import Gate
from faults.setting import Trouble

from trunkline.control import gateways
from trunkline.control.receipts import Receipt
from trunkline.core.breaker import BreakerState
from trunkline.gateway.contracts import Pick

if TYPE_CHECKING:
    from faults.world import World

CATALOGUE = (
    *("crash while streaming", "crash while some wait", "stop while streaming"),
    *("stop while some wait", "gateway-dies under load", "gateway waits for a slow reader"),
    *("no worker is usable", "worker without a lease", "queue at a worker"),
    *("connection reset", "torn frame", "requests wait in line"),
    # revocations
    *("revoke under load", "revoke while a worker is stopped", "revoke while a worker is dead"),
    *("invalidate under load", "invalidate while a worker is stopped"),
    *("invalidate while a worker is dead", "ack by a lease's end", "ack by workers"),
    *("revocation aborts streams", "revocation condemns blocks", "log revocation.failed"),
    *("log audit.sink_out", "log audit.down", "an ack before its audit record"),
    *("log revocation.resumed", "log ledger.behind"),
    # what a worker refuses to use, and what it makes of grants
    *("use refused: lease", "use refused: sum", "second check refuses"),
    *("grant other-life", "grant behind", "worker queue full", "block evicted"),
    # the event feed
    *("feed gaps", "feed repeats", "feed undecodable", "feed restarts", "feed relearned"),
    *("feed relearning", "feed late_replays", "feed replay_failures", "feed resyncs"),
    *("feed cleared", "feed removed_unknown", "feed unknown_salt", "feed parked_dropped"),
    *("feed parked_joined", "feed blind", "orphan parked", "live batches wait for a replay"),
    # ends, as clients see them
    *("end broken", "end unreached", "end refused", "error worker_timeout", "error worker_lost"),
    *("error no_worker", "error access_revoked", "error rate_limit_exceeded", "error 503"),
    *("client leaves in mid-stream", "stream broken after tokens", "answer with cached tokens"),
    *("stream resumed", "stream resumed twice"),
    # attempts and choices
    *("retries", "retries_denied", "stale_retries", "write stalls", "line released"),
    *("line refused", "line left", "line timed_out", "breaker opened", "breaker tries again"),
    *("excluded unhealthy", "excluded draining", "excluded breaker-open"),
    *("decision cache-hit", "decision cache-passed", "decision cold-home"),
    *("decision cold-cheapest", "decision load-only", "mode approximate"),
    *("log worker.restarted", "log worker.unreachable"),
    # several gateways
    *("two gateways reuse", "gateway without a lease", "sent without reuse"),
    *("gateway-cut under load", "registry-away under load", "registry restored"),
    *("revoke while a gateway is cut off", "invalidate while a gateway is cut off"),
    *("ack by another gateway", "wait for another gateway", "log control.restored"),
    *("ack without a word with the registry", "error reuse_lease_lost", "log control.out"),
    *("another gateway says what waits", "answer goes on at a gateway without a lease"),
    *kv_rare.CATALOGUE,
)
"""What is worth reaching. Tests require a share of it of a few seeds, and `make sim-night` more.
"""


VIEWED_EACH = 5
"""Looks: what operators are shown costs more than the rest, and changes less often."""
BREAKERS = {
    BreakerState.OPEN.value: "breaker opened",
    BreakerState.HALF_OPEN.value: "breaker tries again",
}


class Sightings:
    """Of one run: state -> how often."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.counts: Counter[str] = Counter()
        self._looks = 0

    def heard(self, event: str, fields: dict[str, Any]) -> None:
        self.counts[f"log {event}"] += 1

    def met(self, trouble: Trouble) -> None:
        life_of, world = self._world.lives, self._world
        busy = [
            gate.name
            for gate in world.gates.values()
            if gate.is_up.is_set() and gate.front.counters.active_requests
        ]
        name = f"w{trouble.who}"
        if trouble.kind in ("crash", "stop") and name in life_of:
            engine = life_of[name].engine
            if engine.running:
                self.counts[f"{trouble.kind} while streaming"] += 1
            if engine.waiting:
                self.counts[f"{trouble.kind} while some wait"] += 1
            kv_rare.notes_trouble(life_of[name], trouble.kind, self.counts)
        if trouble.kind in ("revoke", "invalidate") and busy:
            self.counts[f"{trouble.kind} under load"] += 1
        if trouble.kind in ("revoke", "invalidate"):
            if any(life.machine.is_stopped for life in life_of.values()):
                self.counts[f"{trouble.kind} while a worker is stopped"] += 1
            if any(life.machine.is_dead for life in life_of.values()):
                self.counts[f"{trouble.kind} while a worker is dead"] += 1
            if world.common and any(world.common.is_cut(name) for name in world.gates):
                self.counts[f"{trouble.kind} while a gateway is cut off"] += 1
        if trouble.kind in ("gateway-dies", "gateway-cut", "registry-away") and busy:
            self.counts[f"{trouble.kind} under load"] += 1

    def receipt(self, receipt: Receipt) -> None:
        if receipt.fenced:
            self.counts["ack by a lease's end"] += 1
        if len(receipt.acked) > 1:
            self.counts["ack by workers"] += 1
        for told, lives in (("ack by", receipt.acked), ("wait for", receipt.fenced)):
            if any(life.startswith("gateway/") for life in lives):
                self.counts[f"{told} another gateway"] += 1
        if gateways.UNSEEN in receipt.fenced:
            self.counts["ack without a word with the registry"] += 1
        if receipt.aborted:
            self.counts["revocation aborts streams"] += 1
        if receipt.condemned_blocks:
            self.counts["revocation condemns blocks"] += 1

    def picked(self, pick: Pick) -> None:
        decision = pick.ticket.decision
        self.counts[f"decision {decision.reason.value}"] += 1
        if decision.expected_tokens:
            self.counts["decision expects a hit"] += 1
        if pick.ticket.pull is not None and pick.ticket.pull.other is not None:
            self.counts["pull ordered with two sources"] += 1

    def ended(self, caller: Caller) -> None:
        made = caller.outcome
        self.counts[f"end {made.kind}"] += 1
        if made.code:
            self.counts[f"error {made.code}"] += 1
        if made.resumed:
            self.counts["stream resumed"] += 1
        if made.resumed > 1:
            self.counts["stream resumed twice"] += 1
        if made.kind == "left" and made.text:
            self.counts["client leaves in mid-stream"] += 1
        if made.kind == "broken" and made.text:
            self.counts["stream broken after tokens"] += 1
        if made.usage and (made.usage.get("prompt_tokens_details") or {}).get("cached_tokens"):
            self.counts["answer with cached tokens"] += 1

    def look(self) -> None:
        world = self._world
        self._looks += 1
        for gate in world.gates.values():
            if gate.is_up.is_set() and not gate.machine.is_dead:
                self._look_at(gate)
        for life in world.lives.values():
            if not life.machine.is_dead and not life.fence.freshness.is_valid(life.clock.boot()):
                self.counts["worker without a lease"] += 1
            if life.engine.waiting and not life.machine.is_dead:
                self.counts["queue at a worker"] += 1
            kv_rare.looks_at(life, self.counts)
        if any(caller.is_write_paused for caller in world.callers.values()):
            self.counts["gateway waits for a slow reader"] += 1

    def _look_at(self, gate: Gate) -> None:
        usable, excluded = gate.core.fleet.usable(gate.clock.boot())
        for reason in excluded.values():
            self.counts[f"excluded {reason.value}"] += 1
        if excluded and not usable:
            self.counts["no worker is usable"] += 1
        if self._looks % VIEWED_EACH == 0:
            for view in gate.members.views():
                self.counts[f"mode {view.mode.value}"] += 1
                self.counts[BREAKERS.get(view.breaker, "breaker closed")] += 1
        for feed in gate.feeds.values():
            self.counts[f"feed {feed.state.value}"] += 1
            if feed.parked_count:
                self.counts["orphan parked"] += 1
            if feed.buffered_count:
                self.counts["live batches wait for a replay"] += 1
        if gate.line.waiting_count:
            self.counts["requests wait in line"] += 1
        if any(state.queue._told_ms for state in gate.core.fleet.states()):
            self.counts["another gateway says what waits"] += 1
        if gate.gateways is not None:
            self.counts["gateway without a lease"] += not gate.gateways.is_valid()
            self.counts["two gateways reuse"] += gate.gateways.others() > 0

    def look_back(self) -> None:
        """What counters say at the end."""
        world = self._world
        for gate in world.gates.values():
            self._gate(gate)
        for life in (*world.earlier, *world.lives.values()):
            for reason, count in life.fence.refused.items():
                self._add(f"use refused: {reason.value}", count)
            for taken, count in life.fence.grants.items():
                self._add(f"grant {taken.value}", count)
            totals = life.engine.totals
            self._add("worker queue full", totals.rejected_requests)
            self._add("worker aborts", totals.aborted_requests)
            self._add("hit at a worker", totals.hit)
        kv_rare.notes_ends(world)
        self._add("bound blocks", world.truth.bound_blocks)
        self._add("connection reset", world.net.ground.resets)
        self._add("torn frame", world.net.ground.torn)
        for what, count in world.truth.notes.items():
            self._add(what, count)

    def _gate(self, gate: Gate) -> None:
        counters = gate.front.counters
        for name in ("retries", "retries_denied", "stale_retries", "worker_failures"):
            self._add(name, getattr(counters, name))
        self._add("broken streams", counters.broken_streams)
        self._add("write stalls", counters.write_stalls)
        accounts = gate.line.accounts
        for name in ("released", "refused", "timed_out", "left"):
            self._add(f"line {name}", getattr(accounts, name))
        self._add("rate limited", gate.allowance.refused_requests)
        for feed in gate.feeds.values():
            stats = feed.stats
            for name in stats.__slots__:
                value = getattr(stats, name)
                if isinstance(value, int):
                    self._add(f"feed {name}", value)

    def _add(self, what: str, count: int) -> None:
        if count:
            self.counts[what] += count
