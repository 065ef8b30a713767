"""What workers still owe of the prompts that were sent to them: what of it can be lent, and when.

    a prompt there   |#### there ####|~~~~ computed by an attempt in flight ~~~~|
                     0           owed_from                           end of its prompt

A source lends what it computes as soon as it has computed it, which is known by its first token,
and the asker waits for that. What it is about to pull itself is not asked of it: two that waited
for each other would wait for ever.
Must never: take what an attempt owes for there. Read `routing.py` for who asks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from trunkline.core.fleet import WorkerState
from trunkline.core.keys import KeyChain
from trunkline.core.records import Instant, WorkerId

MAX_DEBTS = 64
"""Attempts at one worker that are looked at, those served next. What a later one owes may be taken
for there: the asker then waits longer than was thought.
"""


class Debt(Protocol):
    """One attempt that has not given its first token."""

    @property
    def keys(self) -> KeyChain | None:
        """Of its prompt; None where nothing is known of it."""
        ...

    @property
    def owed_from(self) -> int:
        """Blocks before this one are there, or owed by others."""
        ...

    @property
    def is_pulling(self) -> bool:
        """Whether it takes a part from elsewhere, and so waits for another worker itself."""
        ...


class Owed(Protocol):
    """What routing asks about one prompt. `Lending` answers it."""

    def there_tokens(self, state: WorkerState, tokens: int) -> int: ...
    def ready_ms(self, state: WorkerState, tokens: int, now: Instant) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Lending:
    """One prompt before all workers: what of its leading tokens each could lend, and how soon."""

    keys: KeyChain = field(repr=False)
    block_tokens: int
    debts_of: Callable[[WorkerId], Mapping[int, Debt]]
    """By ticket, as they are numbered in the worker's queue."""
    lends_owed: Callable[[WorkerId], bool]
    """Whether a worker lets who asks wait for what it computes."""

    def there_tokens(self, state: WorkerState, tokens: int) -> int:
        """Of so many leading tokens that are expected at a worker, those that are there now."""
        keys, there = self.keys, tokens // self.block_tokens
        for debt in islice(self.debts_of(state.worker).values(), MAX_DEBTS):
            if debt.owed_from < there and _owes(debt, keys, debt.owed_from):
                there = debt.owed_from
        return min(tokens, there * self.block_tokens)

    def ready_ms(self, state: WorkerState, tokens: int, now: Instant) -> float:
        """How long until all of these are there: 0 where they are. Infinite where it does not lend
        them, or one of them is to come from elsewhere.
        """
        debts, keys = self.debts_of(state.worker), self.keys
        last = tokens // self.block_tokens - 1
        owing: int | None = None
        for ticket, debt in islice(debts.items(), MAX_DEBTS):
            if debt.owed_from <= last and _owes(debt, keys, debt.owed_from):
                if debt.is_pulling or not self.lends_owed(state.worker):
                    return math.inf
                owing = ticket
                if _owes(debt, keys, last):
                    break
        return 0.0 if owing is None else state.queue.prefilled_in_ms(owing, now)


def owed_from(known_blocks: int, blocks: int, reusable_blocks: int) -> int:
    """The first block that nobody expected at the chosen worker; all, where all that counts was."""
    return blocks if 0 < known_blocks == reusable_blocks else known_blocks


def _owes(debt: Debt, keys: KeyChain, block: int) -> bool:
    """Whether this block of the chain is one of its prompt; a key stands for all before it."""
    theirs = debt.keys
    return theirs is not None and block < len(theirs) and theirs[block] == keys[block]
