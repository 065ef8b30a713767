"""The bucket that gateways share, as a list; and one gateway's way to it, which may fail.

Stands for `adapters/nats_bucket.py`: one order for all keys, and compare-and-set behind a pattern.
Who lets a gateway ask says what the way is like; see `gateway_world.py` and `faults/shared.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TypeVar

from trunkline.adapters.nats_bucket import BucketConflict, Held
from trunkline.adapters.sqlite_store import chained
from trunkline.control.memory_store import MemoryStore
from trunkline.ports.store import Tip

_T = TypeVar("_T")


class ChainedMemory(MemoryStore):
    """The copy of a gateway."""

    async def tip(self) -> Tip:
        return Tip(rev=len(self.records), digest=await self.digest_at(len(self.records)))

    async def digest_at(self, rev: int) -> bytes:
        digest = b""
        for number, record in enumerate(self.records[:rev], start=1):
            digest = chained(digest, number, record)
        return digest


@dataclass
class Bucket:
    """What the servers have: one order for all keys."""

    entries: list[Held] = field(default_factory=list[Held])
    last_seq: int = 0
    puts: int = 0

    def put(self, key: str, value: bytes, behind: tuple[str, int] | None) -> int:
        if behind is not None:
            newest = self.newest(behind[0])
            if (newest.seq if newest else 0) != behind[1]:
                raise BucketConflict
        self.last_seq += 1
        self.puts += 1
        made = Held(key=key, seq=self.last_seq, stamp=str(self.puts), value=value)
        self.entries = [each for each in self.entries if each.key != key] + [made]
        return made.seq

    def newest(self, pattern: str) -> Held | None:
        found = [each for each in self.entries if fnmatchcase(each.key, pattern)]
        return found[-1] if found else None

    def after(self, seq: int, pattern: str) -> Held | None:
        found = (e for e in self.entries if e.seq > seq and fnmatchcase(e.key, pattern))
        return next(found, None)

    def restore(self, older: Bucket) -> None:
        self.entries, self.last_seq = list(older.entries), older.last_seq


def snapshot(bucket: Bucket) -> Bucket:
    return replace(bucket, entries=list(bucket.entries))


class BucketLink(ABC):
    """The `NatsBucket` of one gateway, over a network."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._on_news: list[Callable[[str], None]] = []

    @abstractmethod
    async def way(self, *, is_back: bool) -> None:
        """To the servers, or back from them. Raises StoreDown."""

    @abstractmethod
    def spread(self, key: str) -> None:
        """All gateways are told that something was put, as far as they can be."""

    def listen(self, on_news: Callable[[str], None]) -> None:
        self._on_news.append(on_news)

    def tell(self, key: str) -> None:
        for on_news in self._on_news:
            on_news(key)

    async def connect(self) -> None:
        await self._through(lambda: None)

    async def ensure(self) -> None:
        await self.connect()

    async def close(self) -> None:
        self._on_news.clear()

    async def put(
        self, key: str, value: bytes, *, behind: tuple[str, int] | None = None, ttl_s: int = 0
    ) -> int:
        def put() -> int:
            seq = self._bucket.put(key, value, behind)
            self.spread(key)
            return seq

        return await self._through(put)

    async def newest(self, pattern: str) -> Held | None:
        return await self._through(lambda: self._bucket.newest(pattern))

    async def after(self, seq: int, pattern: str) -> Held | None:
        return await self._through(lambda: self._bucket.after(seq, pattern))

    async def _through(self, ask: Callable[[], _T]) -> _T:
        await self.way(is_back=False)
        answer = ask()
        await self.way(is_back=True)
        return answer
