"""The registry's log in a bucket of NATS JetStream, for several gateways that all write.

    log.1  log.2  log.3 ...      each value: 32 bytes of digest up to here, then the record

A record is put only behind the newest one (compare-and-set over all of `log.*`), so that revisions
have no gap and no two writers both succeed. The digest chains it to all before it, as in the
embedded store: two copies of the log with one digest are one log. Must never: put a record behind
one that it does not follow from, or go on with a log that is shorter than the one seen here. Read
`control/mirrored_store.py` for the copy that each gateway keeps.
"""

from __future__ import annotations

import asyncio

from trunkline.adapters.nats_bucket import BucketConflict, BucketGone, Held, NatsBucket
from trunkline.adapters.sqlite_store import chained
from trunkline.ports.store import StoreBehind, StoreBroken, StoreConflict, StoreDown, Tip

LOG_PATTERN = "log.*"
DIGEST_BYTES = 32
READS_AT_ONCE = 16

_NOTHING = Tip(rev=0, digest=b"")
_ATTEMPTS = 3


class NatsStore:
    """`ports.store.ChainedStore` on a bucket that is connected. Belongs to one event loop."""

    def __init__(self, bucket: NatsBucket) -> None:
        self._bucket = bucket
        self._seen = _NOTHING
        """The newest record that was seen here."""
        self._seen_seq = 0
        self._seen_stamp = ""
        """When that was put; empty for one of our own until it was read."""
        self.moves = 0
        """Times that a record seen here was found to be put at another place or time: it was lost,
        and somebody put it in again.
        """

    async def append(self, expected_rev: int, record: bytes) -> int:
        for _ in range(_ATTEMPTS):
            # Read anew each time: in data that was restored, another record may be at that place.
            tip, seq = await self.tip(), self._seen_seq
            if tip.rev != expected_rev:
                raise StoreConflict(tip.rev)
            digest = chained(tip.digest, tip.rev + 1, record)
            try:
                put_at = await self._bucket.put(
                    f"log.{tip.rev + 1}", digest + record, behind=(LOG_PATTERN, seq)
                )
            except BucketConflict:
                continue  # somebody was quicker
            self._see(Tip(rev=tip.rev + 1, digest=digest), put_at, "")
            return tip.rev + 1
        raise StoreDown("the log in NATS does not hold still")

    async def read(self, after_rev: int, limit: int) -> list[tuple[int, bytes]]:
        tip = await self.tip()
        last = min(after_rev + limit, tip.rev)
        previous = await self._held(after_rev) if after_rev and last > after_rev else None
        digest = previous.value[:DIGEST_BYTES] if previous else b""
        rows: list[tuple[int, bytes]] = []
        for first in range(after_rev + 1, last + 1, READS_AT_ONCE):
            revs = range(first, min(first + READS_AT_ONCE, last + 1))
            for rev, held in zip(revs, await asyncio.gather(*map(self._held, revs)), strict=True):
                record = held.value[DIGEST_BYTES:]
                digest = chained(digest, rev, record)
                if digest != held.value[:DIGEST_BYTES]:
                    raise StoreBroken(f"revision {rev} in NATS does not follow {rev - 1}")
                rows.append((rev, record))
        return rows

    async def head(self) -> int:
        return (await self.tip()).rev

    async def high_water(self) -> int:
        """Only as long as this process lives; what outlives it is remembered by the mirror."""
        return max(self._seen.rev, await self.head())

    async def tip(self) -> Tip:
        """The newest record. Raises StoreBehind where it is older than the newest seen here,
        StoreBroken where another one stands in the place of that.
        """
        seen, place, stamp = self._seen, self._seen_seq, self._seen_stamp
        # An append may go on meanwhile: what was seen before is what the answer is held against.
        try:
            held = await self._bucket.newest(LOG_PATTERN)
        except BucketGone:  # an empty one is as good as none, and can be written
            await self._bucket.ensure()
            held = None
        found = _NOTHING if held is None else Tip(rev=_rev_of(held), digest=_digest_of(held))
        if found.rev < seen.rev:
            raise StoreBehind(found)
        if held is None:
            return found
        if seen.rev and (found.rev, held.seq, held.stamp) != (seen.rev, place, stamp):
            same = held if found.rev == seen.rev else await self._held(seen.rev)
            if _digest_of(same) != seen.digest:
                raise StoreBroken(f"revision {seen.rev} in NATS is another than it was")
            self.moves += same.seq != place or stamp not in ("", same.stamp)
        self._see(found, held.seq, held.stamp)
        return found

    async def digest_at(self, rev: int) -> bytes:
        """The digest of the log up to a revision that is there. Raises StoreDown, StoreBroken."""
        return _digest_of(await self._held(rev)) if rev else b""

    def forget(self) -> None:
        """What is there counts, also where it is less than was seen: the caller mends it."""
        self._seen, self._seen_seq, self._seen_stamp = _NOTHING, 0, ""

    async def close(self) -> None:
        await self._bucket.close()

    def _see(self, tip: Tip, seq: int, stamp: str) -> None:
        if tip.rev >= self._seen.rev:
            self._seen, self._seen_seq, self._seen_stamp = tip, seq, stamp

    async def _held(self, rev: int) -> Held:
        held = await self._bucket.newest(f"log.{rev}")
        if held is None:
            raise StoreBroken(f"revision {rev} is missing in NATS")
        return held


def _rev_of(held: Held) -> int:
    text = held.key.removeprefix("log.")
    if not text.isdecimal() or len(held.value) < DIGEST_BYTES:
        raise StoreBroken(f"{held.key} in NATS is no record of ours")
    return int(text)


def _digest_of(held: Held) -> bytes:
    return held.value[:DIGEST_BYTES]
