"""Whose request is next: a queue in which each tenant gets its share, whatever the others ask for.

Start-time fair queueing over tenants, charged by uncached tokens (P. Goyal, H. Vin, H. Cheng,
"Start-time Fair Queueing", SIGCOMM 1996). Each tenant's first entry has a start tag: where the
tenant's last one ended on the scale of tokens/weight, or where the queue is by now (`virtual`),
whichever is later. The least tag goes first; the queue is then at that tag. So:

- never idle while something waits, and no tenant saves up turns by being silent;
- while two tenants f and g both wait, their shares differ by at most one entry each:
      |tokens_f / w_f - tokens_g / w_g|  <=  largest_f / w_f + largest_g / w_g      (Theorem 1)
- before an entry is taken that found Q tokens of its own tenant waiting, others get at most
      the sum over tenants g of  (Q + D) * w_g / w_f + largest_g
  where D, at most largest_f, is what its tenant has had in advance. With Q = D = 0, one entry each.

Must never: know what an entry stands for, read a clock, or keep a tenant that owes nothing. Read
`rates.py` for limits that hold without contention.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

Item = TypeVar("Item")


@dataclass(slots=True, kw_only=True, eq=False)
class Waiting(Generic[Item]):
    """One entry. Its identity is what it is cancelled by."""

    tenant: str
    cost_tokens: float
    item: Item


class Full(Enum):
    """Why an entry was not taken in."""

    TENANT = "tenant"
    """Its tenant has as many as one tenant may have."""
    ALL = "all"
    """The queue is full, and nobody in it has more than this tenant would have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Added(Generic[Item]):
    """An entry that waits now, and the one that had to make room for it, if any: the newest of the
    tenant that had most.
    """

    entry: Waiting[Item]
    pushed_out: Waiting[Item] | None = None


class FairQueue(Generic[Item]):
    """A bounded queue; every operation is O(log tenants), amortised."""

    def __init__(self, *, max_entries: int, max_per_tenant: int, max_resting: int = 10_000) -> None:
        """`max_resting` bounds the tenants that wait for nothing and still owe for their last turn;
        at the bound the one that owes least is forgiven.
        """
        assert 1 <= max_per_tenant <= max_entries, (max_per_tenant, max_entries)
        self._max_entries = max_entries
        self._max_per_tenant = max_per_tenant
        self._max_resting = max_resting
        self._virtual = 0.0
        self._turn = 0
        self._count = 0
        self._weights = 0.0
        """Sum over the tenants that wait for something."""
        self._tenants: dict[str, _Tenant[Item]] = {}
        self._resting_count = 0
        self._heads: list[tuple[float, int, _Tenant[Item]]] = []
        """Heap of (start tag, turn, tenant); `turn` is unique, and tells entries that are stale."""
        self._debts: list[tuple[float, int, _Tenant[Item]]] = []
        """Heap of (finish tag, turn, tenant) of those that rest; some are stale, too."""
        self._by_depth = [OrderedDict[str, None]() for _ in range(max_per_tenant + 1)]
        """Tenants by how many entries they have, in the order in which they came to have them."""
        self._deepest = 0

    def __len__(self) -> int:
        return self._count

    @property
    def tenant_count(self) -> int:
        """Tenants of which anything is kept."""
        return len(self._tenants)

    @property
    def heap_sizes(self) -> tuple[int, int]:
        """Of the heads and of the debts, stale entries included: for a look at the bound."""
        return len(self._heads), len(self._debts)

    def depth(self, tenant: str) -> int:
        state = self._tenants.get(tenant)
        return 0 if state is None else len(state.entries)

    def ahead_of(self, tenant: str, weight: float) -> float:
        """About how many entries would go before one that this tenant added now, were all alike."""
        state = self._tenants.get(tenant)
        depth = 0 if state is None else len(state.entries)
        others = self._weights - (state.weight if state is not None and depth else 0.0)
        return min(depth + (depth + 1) * max(others, 0.0) / weight, float(self._count))

    def add(
        self, tenant: str, cost_tokens: float, item: Item, *, weight: float = 1.0
    ) -> Added[Item] | Full:
        """Let an entry wait. A cost below one token counts as one; the newest `weight` counts for
        all entries of the tenant that are taken from now on.
        """
        assert cost_tokens >= 0.0, cost_tokens
        assert weight > 0.0, weight
        depth = self.depth(tenant)
        if depth >= self._max_per_tenant:
            return Full.TENANT
        pushed_out = None
        if self._count >= self._max_entries:
            if depth + 1 >= self._deepest:
                return Full.ALL
            pushed_out = self._newest_of_deepest()
            self.cancel(pushed_out)
        entry = Waiting(tenant=tenant, cost_tokens=max(cost_tokens, 1.0), item=item)
        state = self._tenants.get(tenant)
        if state is None:
            state = self._tenants[tenant] = _Tenant(name=tenant)
        elif not state.entries:
            self._resting_count -= 1
        self._weights += weight - (state.weight if state.entries else 0.0)
        state.weight = weight
        state.entries[entry] = None
        self._count += 1
        self._moved(state, depth)
        if depth == 0:
            self._line_up(state, max(self._virtual, state.finish))
        return Added(entry=entry, pushed_out=pushed_out)

    def take(self) -> Waiting[Item] | None:
        """The next entry; None where nothing waits."""
        while self._heads:
            start, turn, state = heapq.heappop(self._heads)
            if turn == state.turn and state.entries:
                break
        else:
            return None
        assert start >= self._virtual, (start, self._virtual)
        self._virtual = start
        entry = next(iter(state.entries))
        del state.entries[entry]
        self._count -= 1
        self._moved(state, len(state.entries) + 1)
        state.finish = start + entry.cost_tokens / state.weight
        if state.entries:
            self._line_up(state, state.finish)
        else:
            self._rest(state)
        self._forgive()
        return entry

    def recharge(self, entry: Waiting[Item], cost_tokens: float) -> None:
        """Say what the entry that was taken last has really cost, before another one is taken."""
        assert cost_tokens >= 0.0, cost_tokens
        state = self._tenants.get(entry.tenant)
        cost_tokens = max(cost_tokens, 1.0)
        if state is None or cost_tokens == entry.cost_tokens:
            return  # at the bound of those that rest it may have been forgiven
        assert entry not in state.entries, "an entry that still waits has cost nothing yet"
        state.finish = self._virtual + cost_tokens / state.weight
        entry.cost_tokens = cost_tokens
        if state.entries:
            self._line_up(state, state.finish)
            return
        self._resting_count -= 1
        self._rest(state)
        self._forgive()

    def cancel(self, entry: Waiting[Item]) -> bool:
        """Take an entry out that nobody waits for any more; whether it was still in. It costs its
        tenant nothing.
        """
        state = self._tenants.get(entry.tenant)
        if state is None or entry not in state.entries:
            return False
        del state.entries[entry]
        self._count -= 1
        self._moved(state, len(state.entries) + 1)
        if not state.entries:
            self._rest(state)
            self._forgive()
        return True

    def restart(self) -> None:
        """Nothing waits and nothing is being served: nobody owes anybody anything."""
        assert self._count == 0, self._count
        self._virtual = 0.0
        self._tenants.clear()
        self._resting_count = 0
        self._heads.clear()
        self._debts.clear()

    def _line_up(self, state: _Tenant[Item], start: float) -> None:
        self._turn += 1
        state.turn = self._turn
        heapq.heappush(self._heads, (start, self._turn, state))
        if len(self._heads) > 2 * len(self._tenants) + _SLACK:
            self._heads = [h for h in self._heads if h[1] == h[2].turn and h[2].entries]
            heapq.heapify(self._heads)

    def _rest(self, state: _Tenant[Item]) -> None:
        self._turn += 1
        state.turn = self._turn
        self._resting_count += 1
        heapq.heappush(self._debts, (state.finish, self._turn, state))
        if len(self._debts) > 2 * self._resting_count + _SLACK:
            self._debts = [d for d in self._debts if d[1] == d[2].turn and not d[2].entries]
            heapq.heapify(self._debts)

    def _forgive(self) -> None:
        """Forget who rests and owes nothing any more, and at the bound who owes least."""
        while self._debts:
            finish, turn, state = self._debts[0]
            is_stale = turn != state.turn or bool(state.entries)
            is_over = finish <= self._virtual or self._resting_count > self._max_resting
            if not (is_stale or is_over):
                return
            heapq.heappop(self._debts)
            if not is_stale:
                del self._tenants[state.name]
                self._resting_count -= 1

    def _moved(self, state: _Tenant[Item], old_depth: int) -> None:
        """Keeps `_by_depth` true after a tenant's queue grew or shrank by one."""
        depth = len(state.entries)
        self._by_depth[old_depth].pop(state.name, None)
        if depth:
            self._by_depth[depth][state.name] = None
        else:
            # Sums of floats drift; of nobody it is exactly 0.
            self._weights = self._weights - state.weight if self._count else 0.0
        self._deepest = max(self._deepest, depth)
        if self._deepest and not self._by_depth[self._deepest]:
            self._deepest -= 1

    def _newest_of_deepest(self) -> Waiting[Item]:
        name = next(iter(self._by_depth[self._deepest]))
        return next(reversed(self._tenants[name].entries))


@dataclass(slots=True, kw_only=True, eq=False)
class _Tenant(Generic[Item]):
    name: str
    weight: float = 1.0
    finish: float = 0.0
    """The tag at which its last entry ended."""
    turn: int = -1
    """The one heap entry of it that is not stale."""
    entries: OrderedDict[Waiting[Item], None] = field(
        default_factory=OrderedDict["Waiting[Item]", None]
    )
    """Not a plain dict: finding the first of one costs the more, the more were taken from it."""


_SLACK = 64
"""Stale heap entries beyond twice the tenants before they are swept."""
