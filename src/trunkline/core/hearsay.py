"""What gateways of a fleet tell one another of their choices: blocks that a worker will soon have.

    choice: chain |## held or expected there ##|~~~~ new ~~~~|   only what is new is said
    at most once a beat, what was said since ──► the others' directories, as predictions

A hint, as our own predictions are: it ends by its age, by an event that the block is gone, and with
the worker's life, and no worker reuses anything because of it. Blocks are named by their keyed
digests, so only gateways that share the root secret can make or use them, and a namespace's
blocks count only where that namespace is in use. What was told of one that nobody asked for here
yet waits for it, as long as it would have counted. Must never: make an entry that is more than
expected, or outlast its age. Read `directory.py` for where it goes, `control/load_sync.py` for the
words.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from trunkline.core.directory import Directory, Match
from trunkline.core.fleet import WorkerState
from trunkline.core.keys import KeyChain, KeyRun
from trunkline.core.records import Instant, NamespaceTag, WorkerId

MAX_SAID_BLOCKS = 2_048
"""Of one beat: 64 KiB of keys. Where there is more, every choice tells of its first ones."""
MAX_SAID_RUNS = 512
"""Choices of one beat that are told."""
MAX_WAITING_BLOCKS = 65_536
"""Of namespaces that are not in use here; the oldest runs go first."""
MAX_ONLY_TOLD = 64
"""Runs of a worker, the newest, that are told apart from what we expect ourselves."""


class Heard(Enum):
    """What became of a run that was heard."""

    TAKEN = "taken"
    WAITING = "waiting"
    """Nobody has asked under its namespace here yet."""
    LOOSE = "loose"
    """What comes before them is not known here, or they are of another block size."""
    NO_WORKER = "no-worker"


# In Python 3.11 a member costs 50 ns more where it is looked up in its class.
TAKEN, WAITING, LOOSE, NO_WORKER = Heard


@dataclass(slots=True, kw_only=True)
class HearsayStats:
    """Counters of blocks, from the beginning; metrics are made of them."""

    said: int = 0
    left_out: int = 0
    """More than a beat may tell."""
    taken: int = 0
    loose: int = 0
    stale: int = 0
    """Their namespace did not come into use in time, or too many waited."""


@dataclass(slots=True)
class _Said:
    worker: WorkerId
    chain: KeyChain
    first_block: int
    block_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    worker: WorkerId
    run: KeyRun
    ends_at: Instant


class Hearsay:
    """Of one model at one gateway: what is to be said, and what was heard."""

    def __init__(self, directory: Directory, ttl_ms_of: Callable[[WorkerId], float]) -> None:
        """`ttl_ms_of(worker)` is how long our own choices of it count; 0 for none."""
        self.stats = HearsayStats()
        self._directory = directory
        self._ttl_ms_of = ttl_ms_of
        self._said: dict[int, _Said] = {}
        self._waiting: OrderedDict[NamespaceTag, deque[_Waiting]] = OrderedDict()
        self._waiting_count = 0
        self._only_told: dict[WorkerId, deque[tuple[int, bytes, Instant]]] = {}
        """Runs that were taken: place and key of the first new block, and until when it counts."""

    # -- our own choices -------------------------------------------------------------------------

    def say(self, number: int, worker: WorkerId, chain: KeyChain, first_block: int) -> None:
        """An attempt of this number is to fill the chain at a worker, from this block on."""
        new_blocks = len(chain) - first_block
        if new_blocks <= 0:
            return
        if len(self._said) >= MAX_SAID_RUNS:
            self.stats.left_out += new_blocks
            return
        self._said[number] = _Said(worker, chain, first_block, new_blocks)

    def unsay(self, number: int) -> None:
        """It filled nothing; too late once it was told."""
        self._said.pop(number, None)

    def drained(self) -> list[tuple[WorkerId, KeyRun]]:
        """What is to be told now, at most `MAX_SAID_BLOCKS` new blocks, in the order of choice."""
        said, self._said = list(self._said.values()), {}
        limit = _fair_limit([one.block_count for one in said], MAX_SAID_BLOCKS)
        runs: list[tuple[WorkerId, KeyRun]] = []
        for one in said:
            kept = min(one.block_count, limit)
            self.stats.said += kept
            self.stats.left_out += one.block_count - kept
            runs += [
                (one.worker, run) for run in one.chain.runs(one.first_block, one.first_block + kept)
            ]
        return runs

    # -- those of others -------------------------------------------------------------------------

    def hear(self, worker: WorkerId, run: KeyRun, now: Instant) -> Heard:
        """Another gateway made a choice."""
        ttl_ms = self._ttl_ms_of(worker) if self._directory.knows(worker) else 0.0
        if ttl_ms <= 0.0:
            return NO_WORKER
        ends_at = Instant(now + ttl_ms)
        if not self._directory.knows_namespace(run.tag):
            self._wait(_Waiting(worker=worker, run=run, ends_at=ends_at))
            return WAITING
        return self._take(worker, run, now, ends_at)

    def asked(self, tag: NamespaceTag, now: Instant) -> None:
        """Somebody asks under this namespace, which is in use now: what waits for it goes in."""
        waiting = self._waiting.pop(tag, None)
        for one in waiting or ():
            self._waiting_count -= one.run.block_count
            if one.ends_at > now and self._directory.knows(one.worker):
                self._take(one.worker, one.run, now, one.ends_at)
            else:
                self.stats.stale += one.run.block_count

    def lendable(
        self, match: Match, chain: KeyChain, states: Sequence[WorkerState], now: Instant
    ) -> list[int]:
        """Of what is expected at each slot, what may be pulled from there: a block that nobody but
        another gateway expects there may still have to be computed.
        """
        blocks = match.expected[:]
        for state in states:
            slot = state.slot
            told = self._only_told.get(state.worker)
            while told and told[0][2] <= now:
                told.popleft()
            if not told or match.resident[slot] >= blocks[slot]:
                continue
            for place, key, _ in told:
                if match.resident[slot] <= place < blocks[slot] and chain[place] == key:
                    blocks[slot] = place
        return blocks

    @property
    def waiting_count(self) -> int:
        """Blocks whose namespace is not in use here."""
        return self._waiting_count

    def expire(self, now: Instant) -> None:
        """Forget what has waited too long, and who has left. Call a few times a second."""
        for tag in list(self._waiting):
            while tag in self._waiting and self._waiting[tag][0].ends_at <= now:
                self._drop_oldest(tag)
        for worker in [w for w in self._only_told if not self._directory.knows(w)]:
            del self._only_told[worker]

    def _take(self, worker: WorkerId, run: KeyRun, now: Instant, ends_at: Instant) -> Heard:
        count = run.block_count
        if not self._directory.foretold(worker, run, now, ends_at):
            self.stats.loose += count
            return LOOSE
        self.stats.taken += count
        told = self._only_told.get(worker)
        if told is None:
            told = self._only_told[worker] = deque(maxlen=MAX_ONLY_TOLD)
        told.append((run.first_block, run.first_key, ends_at))
        return TAKEN

    def _wait(self, waiting: _Waiting) -> None:
        self._waiting.setdefault(waiting.run.tag, deque()).append(waiting)
        self._waiting_count += waiting.run.block_count
        while self._waiting_count > MAX_WAITING_BLOCKS:
            self._drop_oldest(next(iter(self._waiting)))

    def _drop_oldest(self, tag: NamespaceTag) -> None:
        waiting = self._waiting[tag]
        count = waiting.popleft().run.block_count
        self._waiting_count -= count
        self.stats.stale += count
        if not waiting:
            del self._waiting[tag]


def _fair_limit(counts: Sequence[int], budget: int) -> int:
    """The most of each so that all fit: nobody is cut before who has more."""
    left = budget
    for place, count in enumerate(sorted(counts)):
        share = left // (len(counts) - place)
        if count > share:
            return share
        left -= count
    return budget
