"""What a prefix cache would save, by its size, and what keeping owners apart would cost.

One pass over the calls: blocks shared by all, and apart for each tenant, user and session as far as
the log names them. A cache kept apart is one cache in which names of two owners never meet. Read
`distances.py` for how hits are counted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trunkline.plan.calls import Call
from trunkline.plan.distances import MAX_BLOCKS, ReuseDistances

FIRST_CALLS = 1_000
"""Calls that tell which owners the log names."""
FIRST_USES = 4_000_000
"""Blocks of all of them: 32 MB. Where prompts are longer, fewer calls tell."""
MAX_OWNERS = 1 << 16
"""Owners whose digests are remembered."""
SHARED = "shared"
_EIGHT = 8

OwnerOf = Callable[[int, Call], str]


def _tenant(_number: int, call: Call) -> str:
    return call.tenant or ""


def _user(_number: int, call: Call) -> str:
    return f"{call.tenant or ''}\0{call.user or ''}"


def _session(number: int, call: Call) -> str:
    """A sub-agent (`parent/agent`) is of its parent's session; without a name each is its own."""
    name = f"#{number}" if call.session is None else call.session.partition("/")[0]
    return f"{call.tenant or ''}\0{name}"


OWNERS: dict[str, tuple[OwnerOf, Callable[[Call], object]]] = {
    "tenant": (_tenant, lambda call: call.tenant),
    "user": (_user, lambda call: call.user),
    "session": (_session, lambda call: call.session),
}
"""Who may be kept apart: whose a call is, and whether the call says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """Hit tokens of one way to share, by the capacity of one cache for the whole fleet."""

    scope: str
    hit_tokens: list[float]
    """One for each capacity, and the last without limit."""
    distinct_tokens: float
    rate: float
    """Share of the blocks that was followed."""


class Savings:
    """Takes in calls in order."""

    def __init__(self, capacity_tokens: Sequence[int], *, max_blocks: int = MAX_BLOCKS) -> None:
        self.capacity_tokens = list(capacity_tokens)
        self._max_blocks = max_blocks
        self._first: list[Call] | None = []
        self._first_uses = 0
        self._block_tokens = 0
        self._shared: ReuseDistances | None = None
        self._apart: dict[str, ReuseDistances] = {}
        self._digests: dict[str, int] = {}
        self.calls = 0
        self.tokens = 0
        self.output_tokens = 0
        self.longest_tokens = 0

    def add(self, call: Call) -> None:
        self.tokens += call.tokens
        self.output_tokens += call.output_tokens
        self.longest_tokens = max(self.longest_tokens, call.tokens)
        if self._first is None:
            self._use(call)
            return
        self._first.append(call)
        self._first_uses += len(call.blocks)
        if len(self._first) >= FIRST_CALLS or self._first_uses >= FIRST_USES:
            self._begin()

    def found(self) -> list[Saving]:
        """Shared by all first, then narrower and narrower."""
        if self._first is not None:
            self._begin()
        size = self._block_tokens
        trackers = {SHARED: self._shared, **self._apart}
        return [
            Saving(
                scope=scope,
                hit_tokens=[blocks * size for blocks in tracker.hit_blocks()],
                distinct_tokens=tracker.distinct_blocks() * size,
                rate=tracker.rate,
            )
            for scope, tracker in trackers.items()
            if tracker is not None
        ]

    def _begin(self) -> None:
        """Decide who is to be kept apart, and catch up."""
        first, self._first = self._first or [], None
        if not first:
            return
        self._block_tokens = first[0].block_tokens
        self._shared = self._tracker()
        for scope, (_, is_named) in OWNERS.items():
            if any(is_named(call) for call in first):
                self._apart[scope] = self._tracker()
        for call in first:
            self._use(call)

    def _tracker(self) -> ReuseDistances:
        blocks = [tokens // self._block_tokens for tokens in self.capacity_tokens]
        return ReuseDistances(blocks, max_blocks=self._max_blocks)

    def _use(self, call: Call) -> None:
        assert self._shared is not None, "begun"
        most = call.most_hits
        names = call.blocks.tolist()
        self._shared.use(names, most)
        for scope, tracker in self._apart.items():
            mark = self._digest(OWNERS[scope][0](self.calls, call))
            tracker.use([name ^ mark for name in names], most)
        self.calls += 1

    def _digest(self, owner: str) -> int:
        known = self._digests.get(owner)
        if known is None:
            if len(self._digests) >= MAX_OWNERS:
                self._digests.clear()
            raw = owner.encode("utf-8", "surrogatepass")
            known = int.from_bytes(hashlib.blake2b(raw, digest_size=_EIGHT).digest(), "big")
            self._digests[owner] = known
        return known
