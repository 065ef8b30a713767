"""The fair queue beside a naive twin: lists, linear scans, nothing ever forgotten."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from trunkline.core.fairness import Added, FairQueue, Full, Waiting

MAX_ENTRIES = 12
MAX_PER_TENANT = 5
COSTS = st.sampled_from([0, 1, 2, 4, 8])
TENANTS = [f"t{number}" for number in range(4)]
# Powers of two: sums are exact, so equal tags are equal in both.
WEIGHTS = dict(zip(TENANTS, (1.0, 1.0, 2.0, 0.5), strict=True))


@dataclass
class Line:
    """One tenant in the twin."""

    finish: float = 0.0
    start: float = 0.0
    turn: int = 0
    depth_since: int = 0
    entries: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])


class Naive:
    """What `FairQueue` promises, told as plainly as it can be."""

    def __init__(self) -> None:
        self.virtual = 0.0
        self.turn = 0
        self.change = 0
        self.lines = {name: Line() for name in TENANTS}

    def count(self) -> int:
        return sum(len(line.entries) for line in self.lines.values())

    def add(self, tenant: str, cost: float, number: int) -> Full | int | None:
        """Why not, or the number that was pushed out, or None."""
        line = self.lines[tenant]
        if len(line.entries) == MAX_PER_TENANT:
            return Full.TENANT
        pushed_out = None
        if self.count() == MAX_ENTRIES:
            deepest = max(len(other.entries) for other in self.lines.values())
            if len(line.entries) + 1 >= deepest:
                return Full.ALL
            full = [other for other in self.lines.values() if len(other.entries) == deepest]
            victim = min(full, key=lambda other: other.depth_since)
            pushed_out = victim.entries[-1][0]
            self.cancel(pushed_out)
        self.line_up(line, starts=not line.entries, start=max(self.virtual, line.finish))
        line.entries.append((number, max(cost, 1.0)))
        self.moved(line)
        return pushed_out

    def take(self) -> int | None:
        waiting = [name for name, line in self.lines.items() if line.entries]
        if not waiting:
            return None
        name = min(waiting, key=lambda n: (self.lines[n].start, self.lines[n].turn))
        line = self.lines[name]
        number, cost = line.entries.pop(0)
        self.moved(line)
        self.virtual = line.start
        line.finish = line.start + cost / WEIGHTS[name]
        self.line_up(line, starts=bool(line.entries), start=line.finish)
        return number

    def cancel(self, number: int) -> bool:
        for line in self.lines.values():
            for entry in line.entries:
                if entry[0] == number:
                    line.entries.remove(entry)
                    self.moved(line)
                    return True
        return False

    def restart(self) -> None:
        self.virtual = 0.0
        for line in self.lines.values():
            line.finish = 0.0

    def line_up(self, line: Line, *, starts: bool, start: float) -> None:
        if starts:
            self.turn += 1
            line.turn, line.start = self.turn, start

    def moved(self, line: Line) -> None:
        self.change += 1
        line.depth_since = self.change


class FairQueueMachine(RuleBasedStateMachine):
    """The same operations on both."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = FairQueue[int](max_entries=MAX_ENTRIES, max_per_tenant=MAX_PER_TENANT)
        self.twin = Naive()
        self.number = 0
        self.made: list[Waiting[int]] = []

    @rule(tenant=st.sampled_from(TENANTS), cost=COSTS)
    def add(self, tenant: str, cost: int) -> None:
        self.number += 1
        outcome = self.queue.add(tenant, float(cost), self.number, weight=WEIGHTS[tenant])
        expected = self.twin.add(tenant, float(cost), self.number)
        if isinstance(outcome, Added):
            self.made.append(outcome.entry)
            assert (outcome.pushed_out and outcome.pushed_out.item) == expected
        else:
            assert outcome is expected

    @rule()
    def take(self) -> None:
        entry = self.queue.take()
        assert (entry and entry.item) == self.twin.take()

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.made:
            entry = data.draw(st.sampled_from(self.made[-4:]))
            assert self.queue.cancel(entry) == self.twin.cancel(entry.item)

    @rule(tenant=st.sampled_from(TENANTS), cost=COSTS)
    def come_and_go(self, tenant: str, cost: int) -> None:
        self.add(tenant, cost)
        if self.made:
            assert self.queue.cancel(self.made[-1]) == self.twin.cancel(self.made[-1].item)

    @rule()
    def drain_and_restart(self) -> None:
        while self.twin.count():
            self.take()
        self.queue.restart()
        self.twin.restart()

    @invariant()
    def counts_agree(self) -> None:
        assert len(self.queue) == self.twin.count() <= MAX_ENTRIES
        for tenant, line in self.twin.lines.items():
            assert self.queue.depth(tenant) == len(line.entries)

    @invariant()
    def who_would_be_ahead_is_by_the_weights_of_those_who_wait(self) -> None:
        depths = {tenant: self.queue.depth(tenant) for tenant in TENANTS}
        for tenant, depth in depths.items():
            others = sum(WEIGHTS[other] for other in TENANTS if other != tenant and depths[other])
            ahead = min(depth + (depth + 1) * others / WEIGHTS[tenant], len(self.queue))
            assert abs(self.queue.ahead_of(tenant, WEIGHTS[tenant]) - ahead) < 1e-6

    @invariant()
    def only_those_who_wait_or_owe_are_kept(self) -> None:
        lines = self.twin.lines.values()
        kept = [line for line in lines if line.entries or line.finish > self.twin.virtual]
        assert self.queue.tenant_count == len(kept)


TestFairQueueMachine = FairQueueMachine.TestCase
TestFairQueueMachine.settings = settings(max_examples=100, stateful_step_count=80)
