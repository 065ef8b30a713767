"""Takes the small pages of an engine together to whole blocks, as they are told of.

SGLang's page may hold a single token: a directory with an entry for each would be sixteen times as
large, and a prompt would be hashed token by token. So a block here is several pages, and bears the
name of its last page. A prefix cache lets go of what comes last first: that page is there as long
as all of them are, so only stores are translated and removals pass through as they are.

    pages of a run   0 1 2 3 | 4 5          names of blocks: page 3; pages 4 and 5 wait
    a run behind 5           | . . 6 7 | 8  block of 4 to 7, named by page 7, behind page 3
    a run behind 1   . . a b |              block of 0, 1, a, b: another one, named by page b

Runs may continue any page of an earlier one, so their pages are remembered, 12 bytes a page of one
token, up to a bound; of those used longest ago nothing is known any more. What a name stands for
never changes: nothing is forgotten when pages are removed. Must never: make a block of pages that
do not follow each other. Read `residency.py` for who asks.
"""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum

from trunkline.core.events import BlocksStored
from trunkline.core.records import EngineHash

MAX_PAGES = 1 << 19
"""Remembered of a worker: 6 MiB of pages of one token. A page inside a run is searched for in all
of them the first time, which takes 5 ms where there are so many.
"""
MAX_RUNS = 1 << 16
"""Each costs half a kilobyte beside its pages."""
MAX_JOINTS = 64
"""Places inside a run that were found once and are kept at hand; others are searched for again."""
_NAME_BYTES = 8


class Unfolded(Enum):
    """Why a run makes no block."""

    PENDING = "pending"
    """Its pages do not fill one yet."""
    ORPHAN = "orphan"
    """It continues a page that is not known."""


@dataclass(slots=True, eq=False)
class _Run:
    """Pages that follow each other, with those before them back to the start of a block."""

    names: bytes
    """Of the run's own pages, 8 bytes each."""
    tokens: array[int]
    """From the start of the block on in which the run begins."""
    lead: int
    """Pages of that block before the run's own."""
    before: EngineHash | None
    """The block before that one."""
    salt: str | None
    joints: dict[int, int] = field(default_factory=dict[int, int])

    def name(self, index: int) -> EngineHash:
        at = index * _NAME_BYTES
        return EngineHash(int.from_bytes(self.names[at : at + _NAME_BYTES], sys.byteorder))

    def find(self, name: int) -> int | None:
        """A page's index; None where it is not of this run."""
        wanted = name.to_bytes(_NAME_BYTES, sys.byteorder)
        at = self.names.find(wanted)
        while at >= 0 and at % _NAME_BYTES:
            at = self.names.find(wanted, at + 1)
        return at // _NAME_BYTES if at >= 0 else None


@dataclass(frozen=True, slots=True)
class _Start:
    """What lies between the last whole block and a page that comes next."""

    tokens: array[int]
    before: EngineHash | None
    salt: str | None


class Folding:
    """The pages of one worker's present life."""

    def __init__(
        self,
        *,
        page_tokens: int,
        block_tokens: int,
        max_pages: int = MAX_PAGES,
        max_runs: int = MAX_RUNS,
    ) -> None:
        assert 0 < page_tokens < block_tokens, "pages are smaller than blocks"
        assert block_tokens % page_tokens == 0, "a block is whole pages"
        self.page_tokens = page_tokens
        self._block_tokens = block_tokens
        self._block_pages = block_tokens // page_tokens
        self._max_pages = max_pages
        self._max_runs = max_runs
        self._runs: OrderedDict[EngineHash, _Run] = OrderedDict()
        """By the name of the last page, the one used longest ago first."""
        self._joints: dict[int, _Run] = {}
        """Pages inside runs that others were found to continue."""
        self._page_count = 0

    @property
    def page_count(self) -> int:
        return self._page_count

    def clear(self) -> None:
        """Another life of the engine, whose names may mean something else."""
        self._runs.clear()
        self._joints.clear()
        self._page_count = 0

    def stored(self, run: BlocksStored) -> BlocksStored | Unfolded:
        """The blocks that a run of pages completes."""
        assert run.block_tokens == self.page_tokens, "pages of another size"
        assert len(run.tokens) == len(run.hashes) * self.page_tokens, "pages are whole"
        start = self._start_of(run)
        if start is None:
            return Unfolded.ORPHAN
        lead = len(start.tokens) // self.page_tokens
        tokens = start.tokens + run.tokens
        names = run.hashes.tobytes()
        self._remember(run, _Run(names, tokens, lead, start.before, start.salt))
        block_count = len(tokens) // self._block_tokens
        if not block_count:
            return Unfolded.PENDING
        ends = run.hashes[self._block_pages - 1 - lead :: self._block_pages]
        assert len(ends) == block_count, "each block ends in the run that completes it"
        return BlocksStored(
            hashes=ends,
            parent=start.before,
            tokens=tokens[: block_count * self._block_tokens],
            block_tokens=self._block_tokens,
            tier=run.tier,
            salt=start.salt if start.before is None else None,
            adapter=run.adapter,
        )

    def _start_of(self, run: BlocksStored) -> _Start | None:
        """What comes before a run's first page, in the block that this page belongs to."""
        if run.parent is None:
            return _Start(array("I"), None, run.salt)
        found = self._find(run.parent)
        if found is None:
            return None
        earlier, index = found
        page_count = earlier.lead + index + 1
        block_count = page_count // self._block_pages
        before, last = earlier.before, block_count * self._block_pages - 1 - earlier.lead
        if block_count:
            before = earlier.name(last)
        tokens = earlier.tokens[block_count * self._block_tokens : page_count * self.page_tokens]
        return _Start(tokens, before, earlier.salt)

    def _find(self, name: EngineHash) -> tuple[_Run, int] | None:
        """A page in the run that holds it, which counts as used now."""
        run = self._runs.get(name)
        if run is not None:
            self._runs.move_to_end(name)
            return run, len(run.names) // _NAME_BYTES - 1
        run = self._joints.get(name)
        if run is not None:
            self._runs.move_to_end(_last(run))
            return run, run.joints[name]
        for last in reversed(self._runs):
            run = self._runs[last]
            index = run.find(name)
            if index is not None:
                self._runs.move_to_end(last)
                if len(run.joints) < MAX_JOINTS:
                    run.joints[name] = index
                    self._joints[name] = run
                return run, index
        return None

    def _remember(self, told: BlocksStored, run: _Run) -> None:
        last = EngineHash(told.hashes[-1])
        known = self._runs.get(last)
        if known is not None and len(known.names) >= len(run.names):
            self._runs.move_to_end(last)  # the same pages in another tier, or again
            return
        if known is not None:
            self._forget(last)
        self._runs[last] = run
        self._page_count += len(told.hashes)
        while self._page_count > self._max_pages or len(self._runs) > self._max_runs:
            self._forget(next(iter(self._runs)))

    def _forget(self, last: EngineHash) -> None:
        run = self._runs.pop(last)
        self._page_count -= len(run.names) // _NAME_BYTES
        for name in run.joints:
            del self._joints[name]


def _last(run: _Run) -> EngineHash:
    return run.name(len(run.names) // _NAME_BYTES - 1)
