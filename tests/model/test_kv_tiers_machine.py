"""The block store with a disk below it that fails now and then: what is found is right, what the
index names is there, and every byte is somewhere.
"""

from __future__ import annotations

import errno
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kv_desk import SIZE, SOON, DiskDesk, chain, check_sums, content, is_right, owner
from trunkline.core.records import Tier
from trunkline.core.transfer import Reason
from trunkline.kv import Kept, Owner, Place
from trunkline.kv.files import Files
from trunkline.kv.records import Added, Gone

HOST_BLOCKS = 3
DISK_BLOCKS = 5
DEPTH = 3
TENANTS = ["a", "b"]

names = st.sampled_from(TENANTS)
prompts = st.integers(0, 2)
depths = st.integers(1, DEPTH)


class MemoryFiles:
    """Files in a dict, with a fault for the next write or read."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.fails_to_write = False
        self.damage: str | None = None

    def write(self, name: str, data: bytes) -> None:
        if self.fails_to_write:
            self.fails_to_write = False
            raise OSError(errno.ENOSPC, "no space left on device")
        assert name not in self.kept, "a name was used twice"
        self.kept[name] = data

    def read(self, name: str, size_bytes: int) -> bytes | None:
        damage, self.damage = self.damage, None
        data = self.kept.get(name)
        if data is None or damage == "missing" or len(data) != size_bytes:
            return None
        if damage == "flip":
            return data[:20] + bytes([data[20] ^ 1]) + data[21:]
        if damage == "error":
            raise OSError(errno.EIO, "input/output error")
        return data

    def remove(self, name: str) -> None:
        self.kept.pop(name, None)

    def sweep(self) -> int:
        return 0

    def close(self) -> None:
        self.kept.clear()


class TiersMachine(RuleBasedStateMachine):
    """Two tenants with three prompts each."""

    def __init__(self) -> None:
        super().__init__()
        self.files = MemoryFiles()
        self.folder = TemporaryDirectory()
        self.desk = DiskDesk(
            root=Path(self.folder.name),
            host_blocks=HOST_BLOCKS,
            disk_blocks=DISK_BLOCKS,
            moving_blocks=2,
            wrap=self.take_files,
        )
        self.epochs = dict.fromkeys(TENANTS, 0)
        self.told: dict[Tier, set[bytes]] = {Tier.HOST: set(), Tier.DISK: set()}
        self.pinned: list[tuple[bytes, list[Place], tuple[memoryview, ...]]] = []

    def take_files(self, files: Files) -> Files:
        files.close()
        return self.files

    def teardown(self) -> None:
        self.desk.store.close()
        self.folder.cleanup()

    def owner(self, name: str) -> Owner:
        return owner(name, self.epochs[name])

    def places(self, name: str, prompt: int) -> list[Place]:
        return chain(self.owner(name), 1_000 * prompt, DEPTH)

    @rule(name=names, prompt=prompts, depth=depths)
    def put_run(self, name: str, prompt: int, depth: int) -> None:
        for place in self.places(name, prompt)[:depth]:
            outcome = self.desk.store.put(place, self.owner(name), content(place))
            assert isinstance(outcome, Kept) or outcome in (Reason.FULL, Reason.CHAIN)
            self.desk.settle()

    @rule(name=names, prompt=prompts, loads=st.booleans(), keeps=st.booleans())
    def read(self, name: str, prompt: int, loads: bool, keeps: bool) -> None:
        places = self.places(name, prompt)
        known = {manifest.place.key for _, manifest in self.desk.store.resident()}
        pins = self.desk.pin(places, self.owner(name), load_until=SOON if loads else None)
        for place, block in zip(places, pins.blocks, strict=False):
            assert is_right(block, place)
            assert place.key in known
        if keeps and pins.blocks and len(self.pinned) < 2:
            held = places[: len(pins.blocks)]
            self.pinned.append((pins.token, held, tuple(block.data for block in pins.blocks)))
        else:
            assert self.desk.store.unpin(pins.token) is bool(pins.blocks)
        self.desk.settle()

    @rule()
    def let_go(self) -> None:
        if self.pinned:
            assert self.desk.store.unpin(self.pinned.pop(0)[0])

    @rule(damage=st.sampled_from(["missing", "flip", "error"]))
    def next_read_is_bad(self, damage: str) -> None:
        self.files.damage = damage

    @rule()
    def next_write_fails(self) -> None:
        self.files.fails_to_write = True

    @rule()
    def time_passes(self) -> None:
        """Long enough for a breaker to let something through again."""
        self.desk.clock.ms += 6_000.0
        self.pinned = [pin for pin in self.pinned if self.desk.clock.ms < SOON]

    @rule(name=names)
    def revoke(self, name: str) -> None:
        places = self.places(name, 0)
        whose = self.owner(name)
        self.epochs[name] += 1
        self.desk.judge.epochs[f"tenant/{name}"] = self.epochs[name]
        erasure = self.desk.store.condemn(self.desk.judge.is_stale)
        assert self.desk.pin(places, whose, load_until=SOON).blocks == ()
        if not self.pinned:
            while self.desk.store.erase(8):
                pass
            self.desk.settle()
            assert erasure.is_done
            assert erasure.erased_bytes == erasure.condemned_bytes

    @rule()
    def erase(self) -> None:
        while self.desk.store.erase(8):
            pass
        self.desk.settle()

    # -- always --------------------------------------------------------------------------------

    @invariant()
    def every_byte_is_somewhere_once(self) -> None:
        check_sums(self.desk.store)
        figures = self.desk.store.figures()
        assert figures.moving_bytes == figures.writing_bytes == 0
        assert figures.disk_bytes == len(self.files.kept) * SIZE <= DISK_BLOCKS * SIZE
        assert figures.host_bytes + figures.hidden_bytes + figures.leaving_bytes <= (
            HOST_BLOCKS * SIZE
        )

    @invariant()
    def events_and_index_agree_and_nothing_is_out_of_reach(self) -> None:
        for event in self.desk.store.take_events():
            if isinstance(event, Added):
                assert not self.told[event.tier] & set(event.keys)
                self.told[event.tier] |= set(event.keys)
            else:
                assert isinstance(event, Gone)
                self.told[event.tier].remove(event.key)
        resident = self.desk.store.resident()
        here = {manifest.place.key for _, manifest in resident}
        for tier, manifest in resident:
            assert manifest.place.key in self.told[tier]
            assert not manifest.place.index or manifest.place.parent in here

    @invariant()
    def a_pinned_block_keeps_its_bytes(self) -> None:
        for _, places, data in self.pinned:
            for place, view in zip(places, data, strict=True):
                assert bytes(view) == content(place)


TestTiersMachine = TiersMachine.TestCase
TestTiersMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
