"""A block store on a clock that stands still, and blocks whose bytes are known from their keys."""

from __future__ import annotations

import hashlib
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random

from trunkline.adapters.aes_gcm import AesGcmSealer
from trunkline.core.eviction import make_evictor
from trunkline.core.records import BootInstant, Instant, WallTime
from trunkline.core.transfer import Reason, kv_chain
from trunkline.kv import (
    Block,
    BlockStore,
    Component,
    Kept,
    Layout,
    Manifest,
    Owner,
    Pins,
    Place,
    Staging,
    StoreOptions,
)
from trunkline.kv.disk import DiskOptions, DiskTier
from trunkline.kv.files import Files, FolderFiles

BLOCK_TOKENS = 4
ROOT = b"\0" * 32
LAYOUT = Layout(
    model="m1",
    adapter="",
    tokenizer="t1",
    rope="r1",
    dtype="bf16",
    kv_format="paged-1",
    tp_rank=0,
    tp_size=1,
    block_tokens=BLOCK_TOKENS,
    components=(Component(name="kv", size_bytes=192), Component(name="index", size_bytes=64)),
    chunk_bytes=64,
)
SIZE = LAYOUT.block_bytes
SOON = Instant(500_000.0)
"""An end that no test reaches unless it moves the clock there."""


@dataclass
class StillClock:
    ms: float = 1_000.0

    def now(self) -> Instant:
        return Instant(self.ms)

    def boot(self) -> BootInstant:
        return BootInstant(self.ms)

    def wall(self) -> WallTime:
        return WallTime(self.ms / 1_000.0)


@dataclass
class Fence:
    """A judge: epochs of subjects, and whether there is a lease."""

    epochs: dict[str, int] = field(default_factory=dict[str, int])
    has_lease: bool = True

    def fault(self, owner: Owner) -> Reason | None:
        if not self.has_lease:
            return Reason.LEASE
        return Reason.EPOCH if self.is_stale(owner) else None

    def is_stale(self, owner: Owner) -> bool:
        pairs = zip(owner.subjects, owner.epochs, strict=True)
        return any(self.epochs.get(subject, 0) != epoch for subject, epoch in pairs)


@dataclass
class Desk:
    """One store, and what it was told."""

    host_blocks: int = 8
    staging_blocks: int = 4
    layout: Layout = LAYOUT
    max_pins: int = 64
    clock: StillClock = field(default_factory=StillClock)
    judge: Fence = field(default_factory=Fence)
    alarms: list[Manifest] = field(default_factory=list[Manifest])
    disk: DiskTier | None = None
    store: BlockStore = field(init=False)

    def __post_init__(self) -> None:
        size = self.layout.block_bytes
        self.store = BlockStore(
            self.layout,
            StoreOptions(
                host_bytes=self.host_blocks * size,
                staging_bytes=self.staging_blocks * size,
                max_pins=self.max_pins,
            ),
            clock=self.clock,
            judge=self.judge,
            make_order=partial(make_evictor, "lru", capacity_bytes=max(1, self.host_blocks) * size),
            draw=Random(7).randbytes,
            disk=self.disk,
            on_conflict=self.alarms.append,
        )

    def put(self, places: list[Place], owner: Owner) -> list[Kept | Reason]:
        return [self.store.put(place, owner, content(place, self.layout)) for place in places]

    def pin(
        self,
        places: list[Place],
        owner: Owner,
        until: float = SOON,
        load_until: float | None = None,
    ) -> Pins:
        return self.store.pin(
            owner.ns,
            [place.key for place in places],
            until=Instant(until),
            load_until=None if load_until is None else Instant(load_until),
        )

    def hits(self, places: list[Place], owner: Owner, load_until: float | None = None) -> int:
        """How many leading blocks are found, and they are what they should be."""
        pins = self.pin(places, owner, until=self.clock.ms + 1_000.0, load_until=load_until)
        for place, block in zip(places, pins.blocks, strict=False):
            assert is_right(block, place, self.layout)
        assert self.store.unpin(pins.token) is bool(pins.blocks)
        return len(pins.blocks)

    def stage(self, places: list[Place], owner: Owner, until: float = SOON) -> Staging:
        staging = self.store.stage(owner, places, until=Instant(until))
        assert isinstance(staging, Staging)
        return staging

    def staged_bytes(self) -> int:
        return self.store.figures().staged_bytes

    def check_sums(self) -> None:
        """Every byte is somewhere, once."""
        check_sums(self.store)


def check_sums(store: BlockStore) -> None:
    figures = store.figures()
    parts = (
        figures.host_bytes,
        figures.hidden_bytes,
        figures.writing_bytes,
        figures.leaving_bytes,
        figures.moving_bytes,
        figures.staged_bytes,
        figures.quarantined_bytes,
        figures.dirty_bytes,
        figures.free_bytes,
    )
    assert min(parts) >= 0
    assert sum(parts) == figures.total_bytes


def owner(name: str = "a", epoch: int = 0, domain: str | None = None) -> Owner:
    """Whose epoch is part of the namespace, as it is for real."""
    ns = hashlib.blake2b(f"{name}/{epoch}".encode(), digest_size=16).digest()
    return Owner(
        ns=ns,
        subjects=("fleet", f"tenant/{name}"),
        epochs=(0, epoch),
        domain=name if domain is None else domain,
    )


def chain(whose: Owner, first_token: int, count: int) -> list[Place]:
    """The places of a prompt whose tokens count up from `first_token`."""
    tokens = array("I", range(first_token, first_token + count * BLOCK_TOKENS))
    packed = kv_chain(whose.ns.hex(), tokens, BLOCK_TOKENS)
    return places_of(packed)


def places_of(packed: bytes, parent: bytes = ROOT, first_index: int = 0) -> list[Place]:
    places: list[Place] = []
    for number in range(len(packed) // 32):
        key = packed[32 * number : 32 * number + 32]
        places.append(Place(key=key, parent=parent, index=first_index + number))
        parent = key
    return places


def content(place: Place, layout: Layout = LAYOUT) -> bytes:
    """What belongs on the block of that key: no two blocks have the same bytes."""
    return hashlib.shake_128(place.key).digest(layout.block_bytes)


def is_right(block: Block, place: Place, layout: Layout = LAYOUT) -> bool:
    return block.manifest.place == place and bytes(block.data) == content(place, layout)


def manifests_at(source: BlockStore, places: list[Place], whose: Owner) -> list[Manifest]:
    """What a source says about its blocks, all of which it has."""
    pins = source.pin(whose.ns, [place.key for place in places], until=SOON)
    assert len(pins.blocks) == len(places)
    assert source.unpin(pins.token)
    return [block.manifest for block in pins.blocks]


def fill(staging: Staging, layout: Layout = LAYOUT) -> None:
    for index, place in enumerate(staging.places):
        staging.buffer(index)[:] = content(place, layout)


def other_bytes(manifest: Manifest) -> Manifest:
    """The same block, announced with other bytes."""
    return replace(manifest, digests=tuple(bytes(16) for _ in manifest.digests))


@dataclass
class DiskDesk(Desk):
    """A store with a disk tier below it."""

    root: Path = field(kw_only=True)
    disk_blocks: int = 16
    moving_blocks: int = 4
    io_deadline_ms: float = 30_000.0
    min_saved_ms: float = 0.0
    max_jobs: int = 256
    incarnation: str = "1" * 32
    sealer: AesGcmSealer = field(default_factory=AesGcmSealer)
    wrap: Callable[[Files], Files] = staticmethod(lambda files: files)
    """Puts faults between the tier and its files."""

    def __post_init__(self) -> None:
        file_bytes = self.layout.block_bytes + self.sealer.overhead_bytes
        self.disk = DiskTier(
            self.wrap(FolderFiles(self.root, self.incarnation)),
            self.sealer,
            self.clock,
            DiskOptions(
                capacity_bytes=self.disk_blocks * file_bytes,
                io_deadline_ms=self.io_deadline_ms,
                moving_blocks=self.moving_blocks,
                min_saved_ms=self.min_saved_ms,
                max_jobs=self.max_jobs,
            ),
        )
        super().__post_init__()

    @property
    def folder(self) -> Path:
        return self.root / self.incarnation

    def files(self) -> list[Path]:
        return sorted(self.folder.iterdir())

    def settle(self) -> None:
        """Wait until the tier's thread has nothing to do."""
        disk = self.disk
        assert disk is not None
        eventually(lambda: disk.is_idle)

    def put_through(self, places: list[Place], owner: Owner) -> None:
        """Put blocks and wait for what they push down each time."""
        for place in places:
            assert isinstance(self.store.put(place, owner, content(place, self.layout)), Kept)
            self.settle()


def eventually(is_so: Callable[[], bool], limit_s: float = 60.0) -> None:
    """Wait for what another thread does. The limit is there for a broken one."""
    ends_at = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < ends_at, "it did not happen"
        time.sleep(0.001)
