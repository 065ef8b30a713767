"""Small pages taken together to blocks, against a cache that is a plain set of paths.

The engine side is a prefix tree as SGLang's: a prompt is stored behind what is resident of it, from
any page on; what comes last goes first. After each step the directory must believe of each prompt
just the whole blocks that are there.
"""

from __future__ import annotations

import hashlib
from array import array

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from trunkline.core.directory import Directory
from trunkline.core.events import AllBlocksCleared, BlocksRemoved, BlocksStored, EventBatch
from trunkline.core.feed import WorkerFeed
from trunkline.core.folding import Folding
from trunkline.core.identity import ModelIdentity, Scope, ScopeKind, derive_namespace
from trunkline.core.keys import chain
from trunkline.core.records import EngineHash, Instant, Tier, WorkerId

WORKER = WorkerId("w")
NOW = Instant(0.0)
MAX_TOKENS = 40
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=MAX_TOKENS)

Path = tuple[int, ...]


def name_of(path: Path) -> int:
    packed = array("I", path).tobytes()
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "big")


class FoldingMachine(RuleBasedStateMachine):
    """One worker; `resident` has a path for each page that is there, from the root to its end."""

    max_pages = 1 << 19

    @initialize(page=st.sampled_from([1, 2, 3]), pages=st.sampled_from([2, 4, 5]))
    def begin(self, page: int, pages: int) -> None:
        self.page = page
        self.block = page * pages
        scope = Scope(kind=ScopeKind.TENANT, org="o", tenant="t")
        model = ModelIdentity(model_id="m", block_tokens=self.block)
        self.namespace = derive_namespace(bytes(32), scope, model)
        self.directory = Directory(max_blocks=100_000)
        self.directory.admit_namespace(self.namespace)
        self.directory.join(WORKER, block_tokens=self.block)
        folding = Folding(page_tokens=page, block_tokens=self.block, max_pages=self.max_pages)
        self.folding = folding
        self.feed = WorkerFeed(WORKER, self.directory, can_replay=False, folding=folding)
        self.resident: dict[Path, None] = {}
        self.prompts: list[Path] = []
        self.seq = self.said = 0

    def tell(self, *events: BlocksStored | BlocksRemoved | AllBlocksCleared) -> None:
        self.feed.live(EventBatch(seq=self.seq, events=events, fingerprint=self.said), NOW)
        self.said += 1
        self.seq += 1

    def run(self, path: Path, first: int, last: int, tier: Tier = Tier.DEVICE) -> BlocksStored:
        """Pages `first` to `last` of a path."""
        page = self.page
        parent = name_of(path[: first * page]) if first else None
        return BlocksStored(
            hashes=array("Q", [name_of(path[: (i + 1) * page]) for i in range(first, last)]),
            parent=None if parent is None else EngineHash(parent),
            tokens=array("I", path[first * page : last * page]),
            block_tokens=page,
            tier=tier,
            salt=self.namespace.salt,
        )

    @rule(tokens=TOKENS, is_split=st.booleans())
    def store(self, tokens: list[int], is_split: bool) -> None:
        """What is not there of a prompt, in one run or, as older releases tell it, page by page."""
        path = tuple(tokens)
        self.prompts.append(path)
        count = len(path) // self.page
        first = 0
        while first < count and path[: (first + 1) * self.page] in self.resident:
            first += 1
        if first == count:
            return
        for index in range(first, count):
            self.resident[path[: (index + 1) * self.page]] = None
        step = 1 if is_split else count
        starts = range(first, count, step)
        self.tell(*(self.run(path, at, min(at + step, count)) for at in starts))

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def store_behind_the_device(self, data: st.DataObject) -> None:
        """A part of a prompt in host memory: told again, with the same names."""
        path = data.draw(st.sampled_from(self.prompts))
        count = len(path) // self.page
        if count:
            first = data.draw(st.integers(0, count - 1))
            self.tell(self.run(path, first, count, Tier.HOST))

    @precondition(lambda self: self.resident)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        """A page and all behind it, those furthest from the root first."""
        start = data.draw(st.sampled_from(list(self.resident)))
        gone = [path for path in self.resident if path[: len(start)] == start]
        gone.sort(key=len, reverse=True)
        for path in gone:
            del self.resident[path]
        self.tell(
            BlocksRemoved(hashes=array("Q", [name_of(path) for path in gone]), tier=Tier.DEVICE)
        )

    @rule()
    def flush(self) -> None:
        self.resident.clear()
        self.tell(AllBlocksCleared())

    @rule()
    def restart(self) -> None:
        self.resident.clear()
        self.seq = 0

    def there(self, path: Path) -> int:
        """Leading whole blocks of which every page is on the device."""
        pages = 0
        while path[: (pages + 1) * self.page] in self.resident and (
            (pages + 1) * self.page <= len(path)
        ):
            pages += 1
        return pages * self.page // self.block

    def believed(self, path: Path) -> int:
        match = self.directory.match(chain(self.namespace, array("I", path)))
        return match.device[self.directory.slot(WORKER)]

    @invariant()
    def the_directory_knows_just_the_whole_blocks(self) -> None:
        if self.seq == 0:
            return  # a new life that nobody has heard of yet
        for path in self.prompts[-20:]:
            assert self.believed(path) == self.there(path)
        assert not self.feed.stats.bad_events
        assert not self.feed.stats.conflicts


class ForgetfulMachine(FoldingMachine):
    """The same with room for few pages: less may be known, and never more than is there."""

    max_pages = 12

    @invariant()
    def the_directory_knows_just_the_whole_blocks(self) -> None:
        assert self.folding.page_count <= max(self.max_pages, 0)
        if self.seq:
            assert all(self.believed(path) <= self.there(path) for path in self.prompts[-20:])


TestFolding = FoldingMachine.TestCase
TestFolding.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
TestForgetful = ForgetfulMachine.TestCase
TestForgetful.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
