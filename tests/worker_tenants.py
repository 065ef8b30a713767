"""A store of the simulated worker under a fence, with a clock that the test moves; tickets."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from random import Random

from trunkline.core.freshness import Freshness, Grant, Taken
from trunkline.core.records import BootInstant, Instant, WallTime
from trunkline.core.simkv import answer_tokens
from trunkline.kv.tickets import Ticket
from trunkline.worker.blocks import KvSequence, Terms
from trunkline.worker.cache import BlockCache
from trunkline.worker.fence import Fence, Reason
from trunkline.worker.options import WorkerOptions
from trunkline.worker.requests import Region
from trunkline.worker.storage import StorageParts, build_storage
from trunkline.worker.tiers import HostTier

VOCAB = 4_096
BLOCK = 16
BLOCK_BYTES = 1_024
NS = bytes(range(16))
SUBJECTS = (
    *("fleet", "org/o", "tenant/t", "user/t/u", "key_class/k", "public/p", "model/m"),
    "adapter/a",
)
EPOCHS = (1, 2, 3, 4, 5, 6, 7, 8)


def tokens(count: int, first: int = 300) -> array[int]:
    return array("I", (first + index % 977 for index in range(count)))


def right(prompt: array[int], count: int = 8) -> array[int]:
    return answer_tokens(prompt, count, VOCAB)


def ticket(
    *,
    ns: bytes = NS,
    epochs: tuple[int, ...] = EPOCHS,
    rev: int = 9,
    tenant: str = "a" * 32,
    floor: int = 0,
    cap: int | None = None,
    regions: tuple[bytes, ...] = (),
) -> Ticket:
    """`floor` and `cap` in blocks."""
    return Ticket(
        ns=ns,
        subjects=SUBJECTS,
        epochs=epochs,
        rev=rev,
        tenant=tenant,
        floor_bytes=floor * BLOCK_BYTES,
        cap_bytes=None if cap is None else cap * BLOCK_BYTES,
        regions=regions,
    )


@dataclass(slots=True)
class Store:
    """One cache, with `host` blocks behind it where that is more than 0; `boot_ms` is its clock."""

    capacity: int = 32
    host: int = 0
    boot_ms: float = 1_000.0
    fence: Fence = field(init=False)
    tier: HostTier | None = field(init=False, default=None)
    cache: BlockCache = field(init=False)

    def __post_init__(self) -> None:
        self.fence = Fence(freshness=Freshness("ab"), boot=self.boot)
        if self.host:
            self.tier = self._tier()
        self.cache = BlockCache(
            capacity=self.capacity, block_tokens=BLOCK, guard=self.fence, tier=self.tier
        )

    def now(self) -> Instant:
        return Instant(self.boot_ms)

    def boot(self) -> BootInstant:
        return BootInstant(self.boot_ms)

    def wall(self) -> WallTime:
        return WallTime(self.boot_ms / 1e3)

    @property
    def behind(self) -> HostTier:
        assert self.tier is not None
        return self.tier

    def host_bytes(self) -> int:
        return self.behind.store.figures().host_bytes

    def crowd_out(self) -> None:
        """Nothing of before is on the device any more; what is, is nobody's."""
        for first in (3_000, 3_500):
            self.run(tokens(self.capacity * BLOCK - 8, first=first), None)

    def _tier(self) -> HostTier:
        options = WorkerOptions(block_size=BLOCK, blocks=self.capacity, host_blocks=self.host)
        parts = StorageParts(
            fence=self.fence,
            clock=self,
            draw=Random(7).randbytes,
            transfer_key=b"",
            vocab_size=VOCAB,
            boot_nonce="ab",
        )
        storage = build_storage(options, parts)
        assert storage is not None
        return storage.tier

    def lease(self, rev: int = 9, **epochs: int) -> None:
        """From now on for 3 s; the table is that of `EPOCHS` but for what is named."""
        freshness = self.fence.freshness
        table = dict(zip(SUBJECTS, EPOCHS, strict=True)) | epochs
        ask = freshness.ask(self.fence.boot())
        grant = Grant(ask=ask, rev=rev, ttl_ms=3_000, epochs=table)
        assert freshness.take(grant) is Taken.ARMED

    def admitted(
        self,
        prompt: array[int],
        asked: Ticket | None,
        *,
        salt: str | None = "salt",
        regions: tuple[Region, ...] = (),
    ) -> KvSequence:
        terms = Terms(ticket=asked, regions=regions)
        sequence = self.cache.admit(prompt, salt, 1, terms)
        assert sequence is not None
        return sequence

    def run(
        self,
        prompt: array[int],
        asked: Ticket | None,
        *,
        salt: str | None = "salt",
        regions: tuple[Region, ...] = (),
    ) -> int:
        """Cached tokens of a whole request, whose answer is right."""
        sequence = self.admitted(prompt, asked, salt=salt, regions=regions)
        self.cache.compute(sequence, len(prompt))
        answer = self.cache.answer(sequence, 8, VOCAB)
        self.cache.release(sequence)
        assert answer == right(prompt)
        return sequence.cached_tokens

    def refused(self) -> dict[Reason, int]:
        return {reason: count for reason, count in self.fence.refused.items() if count}
