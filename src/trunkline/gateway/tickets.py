"""The attempts in flight, one ticket each: who still owes a prefill, and to whom it would pass.

Owns what a decision left behind until its attempt ends: nothing here outlives `close`. An answer
that is not streamed shows its first byte only at its end, so its prefill counts as over when it was
predicted to be. Must never: read a clock, or look at a request. Read `picker.py` next.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from trunkline.core.decision import Decision
from trunkline.core.fleet import WorkerState
from trunkline.core.keys import KeyChain
from trunkline.core.records import Instant, WorkerId
from trunkline.ports.worker import Target

_SLACK_ENTRIES = 64


@dataclass(slots=True, kw_only=True, eq=False)
class Ticket:
    """One attempt in flight."""

    number: int
    state: WorkerState
    target: Target
    decision: Decision
    keys: KeyChain | None
    """What it fills at the worker; None where nothing is known of its prompt."""
    owed_from: int
    """Blocks before this one were expected there already; those from it on, this attempt fills."""
    sent_at: Instant
    is_stream: bool
    is_prefilled: bool = False
    has_first_byte: bool = False

    @property
    def worker(self) -> WorkerId:
        return self.target.worker


class Tickets:
    """All open tickets of a gateway, by worker."""

    def __init__(self) -> None:
        self._by_worker: dict[WorkerId, dict[int, Ticket]] = {}
        self._due: list[tuple[Instant, int, WorkerId]] = []
        self._last_number = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def due_count(self) -> int:
        """Entries of the heap of predicted ends, those of ended attempts included."""
        return len(self._due)

    def next_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def open(self, ticket: Ticket, due: Instant | None) -> None:
        """An attempt begins. `due` is when its prefill counts as over without a sign of it."""
        self._by_worker.setdefault(ticket.worker, {})[ticket.number] = ticket
        self._count += 1
        if due is not None:
            heapq.heappush(self._due, (due, ticket.number, ticket.worker))

    def close(self, ticket: Ticket) -> None:
        """An attempt is over. Raises KeyError for one that is not open."""
        at_worker = self._by_worker[ticket.worker]
        del at_worker[ticket.number]
        self._count -= 1
        if not at_worker:
            del self._by_worker[ticket.worker]
        if len(self._due) > 2 * self._count + _SLACK_ENTRIES:
            self._due = [entry for entry in self._due if self._open(entry) is not None]
            heapq.heapify(self._due)

    def settle(self, now: Instant) -> None:
        """Prefills that were predicted to be over by now are."""
        due = self._due
        while due and due[0][0] <= now:
            ticket = self._open(heapq.heappop(due))
            if ticket is not None and not ticket.is_prefilled:
                ticket.is_prefilled = True
                ticket.state.queue.first_token(ticket.number, now)

    def hand_over(self, ticket: Ticket) -> int:
        """`ticket` (closed already) will not fill its blocks: others in flight there, that begin
        with the same blocks, now owe them. Returns how many leading blocks are still expected.
        """
        keys = ticket.keys
        assert keys is not None, "nothing was expected of an unknown prompt"
        expected_blocks = ticket.owed_from
        for other in self._by_worker.get(ticket.worker, {}).values():
            if other.keys is None or other.state is not ticket.state:
                continue
            shared = _shared_blocks(keys, other.keys, ticket.owed_from)
            if shared > ticket.owed_from:
                expected_blocks = max(expected_blocks, shared)
                other.owed_from = min(other.owed_from, ticket.owed_from)
        return expected_blocks

    def _open(self, entry: tuple[Instant, int, WorkerId]) -> Ticket | None:
        _, number, worker = entry
        return self._by_worker.get(worker, {}).get(number)


def _shared_blocks(one: KeyChain, other: KeyChain, known_from: int) -> int:
    """Leading blocks that two chains share, where it is more than `known_from`; else 0.

    A key stands for all blocks before it, so a binary search finds the depth.
    """
    shortest = min(len(one), len(other))
    if known_from >= shortest or one[known_from] != other[known_from]:
        return 0
    low, high = known_from + 1, shortest  # at least `low` and at most `high` are shared
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
