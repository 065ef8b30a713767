"""Where each prefix block lives, as far as the workers and our own decisions have told.

Everything it knows is a hint: it may be stale, which costs time and never correctness, since a
worker reuses only what it really holds under the same salt. Three sources fill it: cache events
(exact), our own decisions with a TTL (predicted; all there is for approximate workers), and
heartbeat digests.

Must never: answer across namespaces (a lookup takes a chain, and each block of a chain has one),
claim a block behind a hole, or know a namespace that was retired. Read `feed.py` (what calls
`stored` and `removed`) and `routing.py` (what calls `match`).
"""

from __future__ import annotations

from array import array
from collections.abc import Collection
from dataclasses import dataclass

from trunkline.core.digest import MAX_CHECKPOINTS_PER_HEARTBEAT, Digest
from trunkline.core.events import BlocksRemoved, BlocksStored
from trunkline.core.handover import Rows
from trunkline.core.identity import DIGEST_BYTES, Namespace
from trunkline.core.keys import CHECKPOINT_TOKENS, KeyChain, KeyRun
from trunkline.core.outcomes import StoreOutcome, outcome_of
from trunkline.core.records import (
    BlockKey,
    Incarnation,
    Instant,
    NamespaceTag,
    Slot,
    WorkerId,
)
from trunkline.native import (
    IMPLEMENTATION,
    BlockIndex,
)

MAX_EVENT_AGE_MS = 120_000.0
"""Older events than this are of no use; also what is assumed before the first one has come."""

MAX_NAMESPACES = 65_536
"""That live at one time; sessions and raised epochs make any number of them, one after another."""
SWEEP_BLOCKS = 4_096 if IMPLEMENTATION == "compiled" else 256
"""Blocks of retired namespaces dropped in one step: 0.3 ms compiled, 3 ms in Python."""
SMALL_SHARE_BLOCKS = 65_536
"""Every worker may hold so many blocks, however small the index or the cache it tells of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Leading, unbroken blocks of one chain for every slot: three lists indexed by `Slot`.

    `device` <= `resident` (any tier). `expected` is what routing counts on: on the device, in host
    memory (loaded from there at little cost), or predicted by a recent decision. What lies on disk
    or in a shared store costs more than its computation may, so it is resident and not expected.
    """

    block_tokens: int
    block_count: int
    device: list[int]
    resident: list[int]
    expected: list[int]


@dataclass(slots=True, kw_only=True)
class _Holder:
    """One live worker incarnation."""

    slot: Slot
    incarnation: Incarnation
    block_tokens: int
    max_predicted: int
    max_held: int
    is_trusted: bool = True
    is_barred: bool = False
    told_share: float = 1.0
    """Of what it told, what is believed to be there still."""
    digest: Digest | None = None
    predicted_until: float = 0.0
    event_age_ms: float = 0.0

    def expires_ms(self, until_ms: float) -> float:
        """When a prediction that is to count until then ends: events that come late confirm late.
        And a slot's predictions expire in order, also when a TTL has just become shorter.
        """
        until_ms += self.event_age_ms
        if until_ms > self.predicted_until:
            self.predicted_until = until_ms
        return self.predicted_until


class Directory:
    """The one index of a gateway. All methods are O(blocks of the call); `match` is one index
    call.
    """

    def __init__(self, *, max_blocks: int, seed: int = 0) -> None:
        """`seed` (64 bits, secret in service) keeps workers from choosing engine hashes that make
        the index slow; it changes no answer.
        """
        self._index = BlockIndex(max_blocks, seed)
        self._max_blocks = max_blocks
        self._holders: dict[WorkerId, _Holder] = {}
        # Holders whose depths `match` corrects: untrusted and barred ones, and those with a digest.
        self._special: dict[WorkerId, _Holder] = {}
        self._incarnation_count = 0
        self._namespace_ids: dict[bytes, int] = {}
        self._tags: dict[int, NamespaceTag] = {}
        self._by_salt: dict[str, Namespace] = {}
        self._salts: dict[bytes, str] = {}

    # -- namespaces --------------------------------------------------------------------------------

    def admit_namespace(self, namespace: Namespace) -> int:
        """Make events that carry the namespace's salt understood; idempotent. The index's number
        for it, until it is retired.

        Raises ValueError beyond 65,536 live namespaces.
        """
        known = self._namespace_ids.get(namespace.tag)
        if known is not None:
            return known
        if len(self._namespace_ids) >= MAX_NAMESPACES:
            raise ValueError(f"the directory holds its limit of {MAX_NAMESPACES} namespaces")
        namespace_id = self._index.add_namespace(namespace.key, namespace.root)
        self._namespace_ids[namespace.tag] = namespace_id
        self._tags[namespace_id] = namespace.tag
        self._by_salt[namespace.salt] = namespace
        self._salts[namespace.tag] = namespace.salt
        return namespace_id

    def retire_namespace(self, tag: NamespaceTag) -> bool:
        """Forget a namespace: from here on its salt is unknown and its blocks match nothing. False
        when it was unknown already.

        Its blocks are dropped in slices, here the first and in `sweep` the others, at a cost of the
        namespace's own blocks. Where a worker still names some, their names stay until the worker
        lets go of them: what it chains after them is of an unknown salt, and no orphan.
        """
        namespace_id = self._namespace_ids.pop(tag, None)
        if namespace_id is None:
            return False
        del self._tags[namespace_id]
        salt = self._salts.pop(tag)
        del self._by_salt[salt]
        self._index.retire_namespace(namespace_id)
        self.sweep()
        return True

    def sweep(self) -> bool:
        """Drop a slice of the blocks of retired namespaces; whether that was all of them."""
        return self._index.sweep(SWEEP_BLOCKS) == 0

    def knows_salt(self, salt: str) -> bool:
        return salt in self._by_salt

    def knows_namespace(self, tag: NamespaceTag) -> bool:
        return tag in self._namespace_ids

    def namespace_count(self) -> int:
        return len(self._namespace_ids)

    # -- workers -----------------------------------------------------------------------------------

    def join(
        self,
        worker: WorkerId,
        *,
        block_tokens: int,
        max_predicted: int = 1 << 20,
        max_held: int | None = None,
    ) -> Slot:
        """Begin a new incarnation of a worker, knowing nothing of it. Raises ValueError beyond
        65,535.

        `max_predicted` bounds what we expect there, blocks: its cache capacity where that is known.
        `max_held` bounds what its events may fill: further runs are `FULL`. By default four times
        `max_predicted`, since slower tiers hold more, and at most a quarter of the index.
        """
        _check_block_tokens(worker, block_tokens)
        if max_held is None:
            share = max(self._max_blocks // 4, SMALL_SHARE_BLOCKS)
            max_held = min(max(4 * max_predicted, SMALL_SHARE_BLOCKS), share)
        if max_predicted < 0 or max_held < 0:
            raise ValueError(f"{worker}: max_predicted and max_held must not be negative")
        self.leave(worker)
        slot = Slot(self._index.add_slot())
        self._holders[worker] = _Holder(
            slot=slot,
            incarnation=self._next_incarnation(),
            block_tokens=block_tokens,
            max_predicted=max_predicted,
            max_held=max_held,
        )
        return slot

    def leave(self, worker: WorkerId) -> None:
        """Forget a worker and all it held; nothing happens when it is unknown."""
        holder = self._holders.pop(worker, None)
        if holder is not None:
            self._index.drop_slot(holder.slot)
            self._special.pop(worker, None)

    def restart(self, worker: WorkerId) -> Incarnation:
        """The worker's engine began a new life: same slot, next incarnation, nothing held."""
        self.clear(worker)
        holder = self._holders[worker]
        holder.incarnation = self._next_incarnation()
        return holder.incarnation

    def clear(self, worker: WorkerId) -> int:
        """The worker's cache is empty now, digest and predictions included; how many blocks it
        held.
        """
        holder = self._holders[worker]
        holder.digest = None
        holder.predicted_until = 0.0
        self._note_special(worker, holder)
        return self._index.clear_slot(holder.slot)

    def trust(self, worker: WorkerId, is_trusted: bool) -> None:
        """Whether a worker's entries count. What an untrusted one told matches nothing, at once;
        while it has told nothing, what we sent there is expected as anywhere.
        """
        holder = self._holders[worker]
        holder.is_trusted = is_trusted
        self._note_special(worker, holder)

    def bar(self, worker: WorkerId, is_barred: bool) -> None:
        """Whether nothing counts there, neither what it tells nor what we sent: a self-test says
        so. What it tells is kept all the same.
        """
        holder = self._holders[worker]
        holder.is_barred = is_barred
        self._note_special(worker, holder)

    def doubt(self, worker: WorkerId, told_share: float) -> None:
        """So much of what a worker told is believed to be there still; 1 believes all."""
        assert 0.0 <= told_share <= 1.0, told_share
        holder = self._holders[worker]
        holder.told_share = told_share
        self._note_special(worker, holder)

    def _note_special(self, worker: WorkerId, holder: _Holder) -> None:
        is_plain = holder.is_trusted and not holder.is_barred and holder.digest is None
        if is_plain and holder.told_share == 1.0:
            self._special.pop(worker, None)
        else:
            self._special[worker] = holder

    def _next_incarnation(self) -> Incarnation:
        # One counter for all workers: it must not forget a name that has left, nor keep every name.
        self._incarnation_count += 1
        return Incarnation(self._incarnation_count)

    def is_trusted(self, worker: WorkerId) -> bool:
        return self._holders[worker].is_trusted

    def incarnation(self, worker: WorkerId) -> Incarnation:
        return self._holders[worker].incarnation

    def slot(self, worker: WorkerId) -> Slot:
        return self._holders[worker].slot

    def knows(self, worker: WorkerId) -> bool:
        return worker in self._holders

    # -- events ------------------------------------------------------------------------------------

    def stored(self, worker: WorkerId, event: BlocksStored) -> StoreOutcome:
        """Take in a run of blocks. Only `STORED` means that all of it is in.

        A run with both a parent and a salt begins a zone: its blocks are of the salt's namespace,
        chained after the parent, of whatever namespace that is.
        """
        holder = self._holders[worker]
        if event.block_tokens != holder.block_tokens:
            return StoreOutcome.WRONG_BLOCK_SIZE
        if self._index.held_count(holder.slot) + len(event.hashes) > holder.max_held:
            return StoreOutcome.FULL
        namespace_id = -1
        if event.parent is None or event.salt is not None:
            namespace = self._by_salt.get(event.salt) if event.salt is not None else None
            if namespace is None:
                return StoreOutcome.UNKNOWN_SALT
            if namespace.model.block_tokens != event.block_tokens:
                return StoreOutcome.WRONG_BLOCK_SIZE
            namespace_id = self._namespace_ids[namespace.tag]
        count = self._index.store(
            holder.slot,
            event.tier,
            namespace_id,
            event.parent or 0,
            event.hashes,
            event.tokens,
            event.block_tokens,
            event.parent is not None,
        )
        return outcome_of(count)

    def removed(self, worker: WorkerId, event: BlocksRemoved) -> int:
        """Take out one copy of each block; how many of them were known."""
        return self._index.remove(self._holders[worker].slot, event.tier, event.hashes)

    # -- what another gateway's directory knows ----------------------------------------------------

    def export(self, worker: WorkerId, start: int, max_rows: int) -> Rows:
        """A slice of what a worker's events have told: from a place on, 0 at first. Each block
        comes once where no event is taken in between the first slice and the last.
        """
        slot = self._holders[worker].slot
        at, packed, ids = self._index.export_rows(slot, start, max_rows)
        tags = tuple(self._tags.get(number, NamespaceTag(b"")) for number in ids)
        return Rows(packed=packed, tags=tags, next_start=at)

    def adopt(self, worker: WorkerId, rows: Rows) -> tuple[StoreOutcome, array[int]]:
        """Take in such a slice of the same worker's blocks; only `STORED` means that all is in. And
        the engine hashes of what is left out: it is of namespaces that are not known here.
        """
        holder = self._holders[worker]
        if self._index.held_count(holder.slot) + rows.count > holder.max_held:
            return StoreOutcome.FULL, array("Q")
        ids = [self._namespace_ids.get(tag, -1) for tag in rows.tags]
        count, left_out = self._index.adopt_rows(holder.slot, rows.packed, ids)
        return outcome_of(count), array("Q", left_out)

    # -- our own decisions, and digests ------------------------------------------------------------

    def predict(self, worker: WorkerId, chain: KeyChain, *, now: Instant, ttl_ms: float) -> None:
        """Expect a chain's blocks at a worker for a while: a request that fills them is on its way.

        A chain in another block size than the worker's says nothing about it and is left out; so is
        one of a new namespace when no more can be admitted.
        """
        holder = self._holders[worker]
        namespace_id, lead_id = self._admitted(chain.namespace), self._admitted(chain.public)
        if holder.block_tokens != chain.block_tokens or namespace_id is None or lead_id is None:
            return
        self._index.predict(
            holder.slot,
            namespace_id,
            chain.packed,
            holder.expires_ms(now + ttl_ms),
            holder.max_predicted,
            lead_id,
            chain.public_blocks,
        )
        if holder.digest is not None:
            holder.digest.routed((key for _, key in chain.checkpoints()), now)

    def foretold(self, worker: WorkerId, run: KeyRun, now: Instant, ends_at: Instant) -> bool:
        """Another gateway expects a part of a chain at a worker, until then. False where its
        namespace is not in use here, the block before it is not known at all, or the worker has
        another block size.
        """
        holder = self._holders[worker]
        namespace = self._by_salt.get(self._salts.get(run.tag, ""))
        if namespace is None or namespace.model.block_tokens != holder.block_tokens:
            return False
        # An index takes the first block of what it is given for the first of a chain, unless it
        # knows that block already.
        if run.first_block and not self._index.knows(run.packed[:DIGEST_BYTES]):
            return False
        namespace_id = self._namespace_ids[run.tag]
        expires_ms = holder.expires_ms(ends_at)
        self._index.predict(holder.slot, namespace_id, run.packed, expires_ms, holder.max_predicted)
        if holder.digest is not None:
            depths = (tokens // holder.block_tokens for tokens in CHECKPOINT_TOKENS)
            keys = (run.key(depth - 1) for depth in depths if depth)
            holder.digest.routed((key for key in keys if key is not None), now)
        return True

    def _admitted(self, namespace: Namespace | None) -> int | None:
        """The namespace's number, -1 for none; None where it is new and there is no room."""
        if namespace is None:
            return -1
        known = self._namespace_ids.get(namespace.tag)
        if known is not None or len(self._namespace_ids) >= MAX_NAMESPACES:
            return known
        return self.admit_namespace(namespace)

    def note_event_age(self, worker: WorkerId, age_ms: float) -> None:
        """How old the worker's events are when they come; rises at once, falls by a tenth a batch.

        From two wall clocks, so a hint: kept within 0 and two minutes.
        """
        holder = self._holders[worker]
        age_ms = min(max(0.0, age_ms), MAX_EVENT_AGE_MS)
        if age_ms > holder.event_age_ms or holder.event_age_ms >= MAX_EVENT_AGE_MS:
            holder.event_age_ms = age_ms
        else:
            holder.event_age_ms += 0.1 * (age_ms - holder.event_age_ms)

    def unpredict(self, worker: WorkerId, chain: KeyChain) -> None:
        """The request that was to fill these blocks did not."""
        if worker in self._holders:
            self._index.unpredict(self._holders[worker].slot, chain.packed)

    def report(
        self,
        worker: WorkerId,
        checkpoints: Collection[BlockKey],
        *,
        is_complete: bool,
        taken_at: Instant,
    ) -> None:
        """A heartbeat's checkpoint keys (256, 1024, 4096 tokens) of what the worker holds.

        `is_complete` says that none was left out, so that absence means eviction. `taken_at` is
        when the worker made the list, at the latest. Raises ValueError beyond 4,096 keys.
        """
        if len(checkpoints) > MAX_CHECKPOINTS_PER_HEARTBEAT:
            most = MAX_CHECKPOINTS_PER_HEARTBEAT
            raise ValueError(f"{worker}: {len(checkpoints)} checkpoint keys, at most {most}")
        holder = self._holders[worker]
        digest = holder.digest = holder.digest or Digest()
        digest.report(checkpoints, is_complete=is_complete, taken_at=taken_at)
        self._note_special(worker, holder)

    def expire(self, now: Instant) -> None:
        """Drop predictions whose time has come, and a slice of what was retired. Call a few times a
        second.
        """
        self._index.expire(now)
        self.sweep()

    # -- lookups -----------------------------------------------------------------------------------

    def match(self, chain: KeyChain) -> Match:
        """How many leading blocks of a chain each worker holds. One index walk for all workers.

        A worker with another block size matches nothing by itself: the size is part of every key.
        Where a chain has two zones, both are matched in the one walk.
        """
        device, resident, expected = self._index.match(chain.packed)
        checkpoints: list[tuple[int, BlockKey]] = []
        if self._special and self._is_live(chain):
            checkpoints = chain.checkpoints()
        for holder in self._special.values():
            slot = holder.slot
            if holder.is_barred or (not holder.is_trusted and self._index.held_count(slot)):
                device[slot] = resident[slot] = expected[slot] = 0
            elif holder.digest is not None and holder.block_tokens == chain.block_tokens:
                depth = holder.digest.depth(checkpoints, chain, expected[slot])
                expected[slot] = max(depth, device[slot])
            elif holder.told_share < 1.0:
                expected[slot] = int(expected[slot] * holder.told_share)
        return Match(
            block_tokens=chain.block_tokens,
            block_count=len(chain),
            device=device,
            resident=resident,
            expected=expected,
        )

    def told(self, worker: WorkerId, chain: KeyChain) -> int:
        """Leading blocks on the device there as its events have it, believed or not."""
        return self._index.match(chain.packed)[0][self._holders[worker].slot]

    def _is_live(self, chain: KeyChain) -> bool:
        """What heartbeats report outlives a namespace by a heartbeat, and must not count then."""
        namespaces = (chain.namespace, chain.public or chain.namespace)
        return all(namespace.tag in self._namespace_ids for namespace in namespaces)

    def held_count(self, worker: WorkerId) -> int:
        """Blocks that events say a worker holds."""
        return self._index.held_count(self._holders[worker].slot)

    def tier_counts(self, worker: WorkerId) -> list[int]:
        """The same in each `Tier`; a block may be in several."""
        return self._index.tier_counts(self._holders[worker].slot)

    def believed_share(self, worker: WorkerId) -> float:
        """Of what a worker told, what counts: 1 for all, 0 for nothing."""
        holder = self._holders[worker]
        return holder.told_share if holder.is_trusted and not holder.is_barred else 0.0

    def predicted_count(self, worker: WorkerId) -> int:
        """Blocks that our decisions let us expect there."""
        return self._index.predicted_count(self._holders[worker].slot)

    def held_keys(self, worker: WorkerId) -> bytes:
        """The keys a worker holds, sorted and packed; for checks against ground truth."""
        return self._index.held(self._holders[worker].slot)

    def block_count(self) -> int:
        return self._index.block_count()

    def memory_bytes(self) -> int:
        return self._index.memory_bytes()


def _check_block_tokens(worker: WorkerId, block_tokens: object) -> None:
    """Registrations come from outside: a size must be a whole number, and one that a namespace
    allows.
    """
    if type(block_tokens) is not int or not 1 <= block_tokens <= 65_536:
        raise ValueError(
            f"{worker}: block size {block_tokens!r} must be a whole number, 1 to 65536"
        )
