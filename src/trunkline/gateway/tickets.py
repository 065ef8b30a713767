"""The attempts in flight, one ticket each: who still owes a prefill, and to whom it would pass.

    open ──(first byte, or its time has come)──► prefilled ──► closed
      └──(failed, refused, or given up)──► closed, its debt handed over

A decision lets everybody expect the prompt's blocks at the worker, so somebody owes their
computation. Whoever is prefilled pays for all that begin like it; whoever ends before that leaves
its debt to them. An answer that is not streamed shows its first byte only at its end, so its
prefill counts as over when it was predicted to be. Must never: read a clock, or look at a request.
Read `picker.py` next.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType

from trunkline.core.debts import owed_from
from trunkline.core.decision import Decision, Outcome
from trunkline.core.fleet import WorkerState
from trunkline.core.identity import DIGEST_BYTES
from trunkline.core.keys import KeyChain
from trunkline.core.records import Instant, WorkerId
from trunkline.gateway.pulls import PullOrder
from trunkline.ports.worker import AttemptEnd, Target

MAX_SIBLINGS = 64
"""So that thousands that wait at a worker which dies do not ask each other: 0.25 us each."""

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
    """Blocks before this one are there, or owed by others; those from it on, this attempt owes."""
    sent_at: Instant
    is_stream: bool
    is_guess: bool = False
    """Its tokens are not quite those that the worker computes."""
    is_alone: bool = False
    """Nothing can be reused for it: its salt is its own."""
    tenant: str = ""
    """In whose name it was sent."""
    pull: PullOrder | None = None
    """What it was told to pull, until the answer says what became of it."""
    is_prefilled: bool = False
    """It owes nothing any more, as far as we can tell."""
    first_byte_at: Instant | None = None
    """When the worker began to answer with a status below 300; None before, or if it did not."""

    @property
    def worker(self) -> WorkerId:
        return self.target.worker

    @property
    def tells_speed(self) -> bool:
        """Whether its first token says how fast the worker is: a prompt of unknown length does not,
        nor one of which a part was pulled.
        """
        return self.keys is not None and not self.is_guess and not self.is_pulling

    @property
    def is_pulling(self) -> bool:
        return self.decision.source is not None

    @property
    def has_first_byte(self) -> bool:
        return self.first_byte_at is not None

    @property
    def predicted_ms(self) -> float:
        """From its choice to the end of its prefill."""
        candidates, choice = self.decision.candidates, self.decision.choice
        waits_ms = candidates.queue_ms[choice] + candidates.transfer_ms[choice]
        return waits_ms + self.decision.miss_ms

    def outcome(self, end: AttemptEnd, cached_tokens: int | None, now: Instant) -> Outcome:
        """What came true, now that it is over."""
        first = self.first_byte_at
        return Outcome(
            end=end.value,
            predicted_ms=self.predicted_ms,
            first_byte_ms=None if first is None else first - self.sent_at,
            took_ms=now - self.sent_at,
            predicted_tokens=self.decision.expected_tokens,
            reused_tokens=cached_tokens,
            is_stream=self.is_stream,
        )


def reusable_blocks(tokens: int, block_tokens: int) -> int:
    """The last token is always computed, so the whole of a prompt is never reused."""
    return max(0, tokens - 1) // block_tokens


def first_owed(decision: Decision, keys: KeyChain, further_tokens: int) -> int:
    """What an attempt owes from, of a prompt with so many tokens behind those of the chain."""
    known_blocks = decision.matched_tokens // keys.block_tokens
    first_tokens = decision.prompt_tokens - further_tokens
    return owed_from(known_blocks, len(keys), reusable_blocks(first_tokens, keys.block_tokens))


_NONE: Mapping[int, Ticket] = MappingProxyType({})


class Tickets:
    """All open tickets of a gateway; those that owe a prefill, by worker."""

    def __init__(self) -> None:
        self._owing: dict[WorkerId, dict[int, Ticket]] = {}
        self._due: list[tuple[Instant, int, WorkerId]] = []
        self._last_number = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def due_count(self) -> int:
        """Entries of the heap of predicted ends, those of ended attempts included."""
        return len(self._due)

    def owing(self, worker: WorkerId) -> Mapping[int, Ticket]:
        """Those at a worker whose prefill is not over yet, as far as we can tell; oldest first."""
        return self._owing.get(worker, _NONE)

    def next_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def open(self, ticket: Ticket, due: Instant | None) -> None:
        """An attempt begins. `due` is when its prefill counts as over without a sign of it."""
        self._owing.setdefault(ticket.worker, {})[ticket.number] = ticket
        self._count += 1
        if due is not None:
            heapq.heappush(self._due, (due, ticket.number, ticket.worker))

    def prefilled(self, ticket: Ticket) -> None:
        """Its blocks are there now: nobody else owes them."""
        if ticket.is_prefilled:
            return
        ticket.is_prefilled = True
        self._forget(ticket)
        for other, shared in self._siblings(ticket, from_block=None):
            other.owed_from = shared

    def close(self, ticket: Ticket) -> None:
        """An attempt is over."""
        self._count -= 1
        assert self._count >= 0, "more tickets closed than opened"
        if not ticket.is_prefilled:
            self._forget(ticket)
        if len(self._due) > 2 * self._count + _SLACK_ENTRIES:
            self._due = [entry for entry in self._due if self._find(entry) is not None]
            heapq.heapify(self._due)

    def settle(self, now: Instant) -> None:
        """Prefills that were predicted to be over by now are."""
        due = self._due
        while due and due[0][0] <= now:
            entry = heapq.heappop(due)
            ticket = self._find(entry)
            if ticket is not None:
                # At the time it was due, whenever that is noticed.
                ticket.state.queue.first_token(ticket.number, entry[0])
                self.prefilled(ticket)

    def hand_over(self, ticket: Ticket) -> int:
        """`ticket`, closed without a prefill, leaves its debt to those that begin like it. Returns
        how many of its leading blocks are still expected.
        """
        expected_blocks = ticket.owed_from
        for other, shared in self._siblings(ticket, from_block=ticket.owed_from):
            expected_blocks = max(expected_blocks, shared)
            other.owed_from = min(other.owed_from, ticket.owed_from)
        return expected_blocks

    def _siblings(self, ticket: Ticket, from_block: int | None) -> Iterator[tuple[Ticket, int]]:
        """Who else owes at the same life of the worker, with how many leading blocks are shared:
        more than `from_block`, or (None) more than the other one owes from.

        The oldest `MAX_SIBLINGS` are looked at, who are served next. What a later one shares may so
        be forgotten, or expected in vain for a while; both cost time and nothing else.
        """
        keys = ticket.keys
        if keys is None:
            return
        for other in islice(self._owing.get(ticket.worker, {}).values(), MAX_SIBLINGS):
            if other.keys is not None and other.state is ticket.state:
                beyond = other.owed_from if from_block is None else from_block
                shared = _shared_blocks(keys, other.keys, beyond)
                if shared:
                    yield other, shared

    def _forget(self, ticket: Ticket) -> None:
        at_worker = self._owing[ticket.worker]
        del at_worker[ticket.number]
        if not at_worker:
            del self._owing[ticket.worker]

    def _find(self, entry: tuple[Instant, int, WorkerId]) -> Ticket | None:
        _, number, worker = entry
        return self._owing.get(worker, {}).get(number)


def _shared_blocks(one: KeyChain, other: KeyChain, beyond: int) -> int:
    """Leading blocks that two chains share, where these are more than `beyond`; else 0.

    A key stands for all blocks before it, so one comparison says no, and a binary search finds the
    depth.
    """
    first, second = one.packed, other.packed
    start, end = beyond * DIGEST_BYTES, (beyond + 1) * DIGEST_BYTES
    low, high = beyond + 1, min(len(first), len(second)) // DIGEST_BYTES
    if low > high or first[start:end] != second[start:end]:
        return 0
    while low < high:  # at least `low` and at most `high` are shared
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
