"""The gateway's part in pulls: who may take part, the order that goes with a request, what its end
teaches.

    x-trunkline-pull    to the worker: a signed grant, and where to ask; another such for when that
                        source fails
    x-trunkline-pulled  in its answer: how the pull ended; read here, never passed on

A connector inside an engine is told in the body (`telling.py`), and tells the end with its lease.

A source is believed to have what is expected of it; what our own attempts there still owe, once
they give their first token. Prompts that begin with a public prefix are not pulled. Must never:
grant what the ticket beside it does not cover, or send an order that a worker would not take. Read
`core/transfer.py` for grants, `worker/pulls.py` for the other end.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from trunkline.core.decision import Decision
from trunkline.core.fleet import WorkerState
from trunkline.core.heed import Heed
from trunkline.core.keys import KeyChain
from trunkline.core.links import Links
from trunkline.core.records import WorkerId
from trunkline.core.sources import Sources
from trunkline.core.transfer import (
    KV_KEY_BYTES,
    MAX_GRANT_BLOCKS,
    MAX_GRANT_LIFE_MS,
    MAX_ORDER_BYTES,
    NONCE_BYTES,
    Grant,
    Lesson,
    PullEnd,
    keys_digest,
    kv_chain,
)
from trunkline.gateway.hot import HotPrompts
from trunkline.gateway.namespaces import Stakes
from trunkline.gateway.told import Told, read_told
from trunkline.gateway.unheard import Unheard
from trunkline.ports.clock import Clock
from trunkline.ports.worker import PullAddress, Target

P2P_LAYOUT = b"the engine's p2p"
"""Of workers whose own peer-to-peer tier moves the blocks: between such alone."""
NO_PART = -1
"""Of a worker that takes no part in pulls, neither as a source nor as a destination."""
HEADER = "x-trunkline-pull"
GRANT_SLACK_MS = 5_000.0
"""A grant outlives the time that its pull should take by so much; the worker gives up before."""
_PATIENCE = 3.0
_NAME_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PullPlan:
    """Blocks of a prompt that one worker is to take from another."""

    source: WorkerId
    destination: WorkerId
    first_block: int
    last_block: int
    """Exclusive."""
    queue_ms: float = 0.0
    """How long the request waits for its turn there, beside the pull."""
    ready_ms: float = 0.0
    """How long until the source has computed all of them."""
    other: PullPlan | None = None
    """Whom it takes them from where the source fails."""


def plan_of(
    decision: Decision, block_tokens: int, tokens_at: Callable[[WorkerId], int]
) -> PullPlan | None:
    """What a decision wants pulled; None where its plan is another. `tokens_at` is how many leading
    tokens each worker could give now.
    """
    if decision.source is None:
        return None
    plan = PullPlan(
        source=decision.source,
        destination=decision.worker,
        first_block=decision.matched_tokens // block_tokens,
        last_block=decision.expected_tokens // block_tokens,
        queue_ms=decision.candidates.queue_ms[decision.choice],
        ready_ms=decision.source_ready_ms,
    )
    workers, queues = decision.candidates.workers, decision.candidates.queue_ms
    others = [
        (-min(tokens_at(worker), decision.expected_tokens), queue_ms, worker)
        for worker, queue_ms in zip(workers, queues, strict=True)
        if worker not in (plan.source, plan.destination)
    ]
    tokens, _, worker = min(others, default=(0, 0.0, plan.source))
    last_block = -tokens // block_tokens
    if last_block <= plan.first_block:
        return plan
    other = replace(plan, source=worker, last_block=last_block, ready_ms=0.0)
    return replace(plan, other=other)


@dataclass(frozen=True, slots=True, kw_only=True)
class PullOrder:
    """One pull that a request was sent with."""

    source: WorkerId
    destination: WorkerId
    incarnation: str
    """Of the source: what its pull teaches is about this life alone."""
    first_block: int
    block_count: int
    ready_ms: float
    """How long the source was expected to need until it has them."""
    names: bytes = field(repr=False)
    """The kv keys of these blocks."""
    header: tuple[str, str] = field(repr=False)
    other: PullOrder | None = None
    """What the header says of the other source; it is never sent by itself."""
    name: str = ""
    """What its end is told by, with a lease; empty where the answer itself tells."""
    p2p: str = ""
    """Where the engine's own tier is to ask, as JSON; empty for pulls of ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Terms:
    """What the grants of one order have in common."""

    stakes: Stakes
    destination: PullAddress
    packed_keys: bytes
    """Of the prompt, as far as anything is pulled."""
    deadline_ms: int


@dataclass(slots=True, kw_only=True)
class PullAccounts:
    """Plain counters since start."""

    ordered: int = 0
    ended: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    """By end and reason; `untold` where the answer did not say."""
    tokens: int = 0
    bytes: int = 0
    """As the profile has the KV of a token."""
    ms: float = 0.0


class PullDesk:
    """One for a fleet."""

    def __init__(
        self,
        links: Links,
        *,
        transfer_key: bytes,
        clock: Clock,
        draw: Callable[[int], bytes],
        on_missing: Callable[[WorkerId, bytes], None],
        on_ignored: Callable[[WorkerId], None] = lambda _worker: None,
    ) -> None:
        """`on_missing` is told the kv key of a block that a worker should have and does not;
        `on_ignored` a worker that takes no notice of orders.
        """
        self._on_missing = on_missing
        self._on_ignored = on_ignored
        self.accounts = PullAccounts()
        self.sources = Sources()
        self.heed = Heed()
        self.hot = HotPrompts()
        self.degraded: dict[WorkerId, str] = {}
        """Destinations whose canary was lost, and where (`canary.py`)."""
        self.links = links
        self._transfer_key = transfer_key
        self._clock = clock
        self._draw = draw
        self._lives: dict[WorkerId, str] = {}
        self._unheard = Unheard[tuple[PullOrder, KeyChain]]()

    def source_tokens(
        self,
        expected: Sequence[int],
        keys: KeyChain,
        pulling: Sequence[tuple[WorkerState, PullAddress]],
        limit: int,
    ) -> list[int]:
        """For each slot, how many leading tokens may be pulled from there, of the blocks that are
        expected; `NO_PART` for workers that cannot pull either. Blocks go only between workers of
        one layout, which is that of most.
        """
        now, found = self._clock.now(), [NO_PART] * len(expected)
        if not self._transfer_key:  # then engines move blocks by themselves, or nobody does
            pulling = [one for one in pulling if one[1].layout == P2P_LAYOUT]
        layouts = Counter(address.layout for _, address in pulling)
        layout = max(layouts, key=layouts.__getitem__, default=b"")
        for state, address in pulling:
            if address.layout != layout or state.block_tokens != keys.block_tokens:
                continue
            if self.sources.rests(state.worker, now) or self.heed.is_left_out(state.worker, now):
                continue
            self._note_life(state.worker, address.incarnation)
            slot = state.slot
            held = self.sources.blocks(state.worker, keys, min(expected[slot], limit), now)
            found[slot] = held * keys.block_tokens
        return found

    def order(
        self,
        plan: PullPlan,
        stakes: Stakes,
        keys: KeyChain,
        tokens: array[int],
        address_of: Callable[[WorkerId], PullAddress | None],
    ) -> PullOrder | None:
        """What the destination is told to pull of the prompt. None where no order can say it: an
        end is gone, or a name or a subject is too long. It is never longer than a worker takes.
        """
        destination = address_of(plan.destination)
        if destination is None:
            return None
        if destination.layout == P2P_LAYOUT:
            return self._p2p_order(plan, address_of(plan.source))
        packed = kv_keys(keys, tokens, plan.last_block)
        pulled_tokens = (plan.last_block - plan.first_block) * keys.block_tokens
        expected_ms = (
            plan.queue_ms
            + plan.ready_ms
            + self.links.transfer_ms(plan.source, plan.destination, pulled_tokens)
        )
        life_ms = min(_PATIENCE * expected_ms + GRANT_SLACK_MS, MAX_GRANT_LIFE_MS)
        terms = _Terms(
            stakes=stakes,
            destination=destination,
            packed_keys=packed,
            deadline_ms=int(self._clock.wall() * 1e3 + life_ms),
        )
        order = self._order_from(plan, terms, address_of)
        if order is None:
            return None
        self.accounts.ordered += 1
        if plan.other is not None and destination.sources >= 2:
            order = _with_other(order, self._order_from(plan.other, terms, address_of))
        if destination.tells_later:
            order = replace(order, name=self._draw(_NAME_BYTES).hex())
            self._unheard.begin(order.name, order.destination, (order, keys))
        return order

    def _order_from(
        self,
        plan: PullPlan,
        terms: _Terms,
        address_of: Callable[[WorkerId], PullAddress | None],
    ) -> PullOrder | None:
        """From one source alone."""
        source, destination, stakes = address_of(plan.source), terms.destination, terms.stakes
        if source is None:
            return None
        first_block = plan.first_block
        count = min(plan.last_block - first_block, MAX_GRANT_BLOCKS)
        names = terms.packed_keys[first_block * KV_KEY_BYTES :][: count * KV_KEY_BYTES]
        try:
            grant = Grant(
                source=source.worker,
                source_incarnation=source.incarnation,
                destination=destination.worker,
                destination_incarnation=destination.incarnation,
                ns=stakes.ns,
                subjects=stakes.subjects,
                epochs=stakes.epochs,
                rev=stakes.rev,
                layout=destination.layout,
                first_block=first_block,
                block_count=count,
                keys=keys_digest(names),
                max_bytes=count * source.block_bytes,
                deadline_ms=terms.deadline_ms,
                nonce=self._draw(NONCE_BYTES),
            ).signed(self._transfer_key)
        except ValueError:
            return None
        words: dict[str, str | int | float] = {
            "grant": grant,
            "host": source.host,
            "port": source.port,
            "local": source.local,
            "source": source.worker,
        }
        if plan.ready_ms:
            words["ready_ms"] = round(min(plan.ready_ms, MAX_GRANT_LIFE_MS), 3)
        told = json.dumps(words, separators=(",", ":"))
        if not _fits(told):
            return None
        return PullOrder(
            source=plan.source,
            destination=plan.destination,
            incarnation=source.incarnation,
            first_block=first_block,
            block_count=count,
            ready_ms=plan.ready_ms,
            names=names,
            header=(HEADER, told),
        )

    def _p2p_order(self, plan: PullPlan, source: PullAddress | None) -> PullOrder | None:
        """Where the engine's own tier is to look for what it lacks: no grant, and no proof."""
        if source is None:
            return None
        name = self._draw(_NAME_BYTES).hex()
        told = {"kv_request_id": name, "remote_host": source.host, "remote_port": source.port}
        self.accounts.ordered += 1
        return PullOrder(
            source=plan.source,
            destination=plan.destination,
            incarnation=source.incarnation,
            first_block=plan.first_block,
            block_count=plan.last_block - plan.first_block,
            ready_ms=0.0,
            names=b"",
            header=("", ""),
            p2p=json.dumps(told, separators=(",", ":")),
        )

    def answered(
        self, order: PullOrder, keys: KeyChain, cached_tokens: int | None, *, is_good: bool
    ) -> None:
        """The answer is over, and its head said nothing of the pull."""
        if order.name:
            now = self._clock.now()
            if is_good:
                self._unheard.end(order.name, now)
            elif self._unheard.take(order.name, _name_of(order.destination)):
                self.learn(order, keys, b"")
            for late, _ in self._unheard.overdue(now):
                self.ignored(late)
        elif not is_good:
            self.learn(order, keys, b"")
        elif not order.p2p:
            self.ignored(order)
        elif cached_tokens is not None:
            self.reused(order, keys, cached_tokens)

    def told(self, worker: str, name: str, told: bytes) -> None:
        """A lease of this worker says how the pull of that name ended."""
        awaited = self._unheard.take(name, worker)
        if awaited is not None:
            self.learn(*awaited, told)

    def ignored(self, order: PullOrder) -> None:
        """A good answer came as if nothing had been ordered."""
        self._count("untold", "")
        if self.heed.ignored(order.destination, self._clock.now()):
            self._on_ignored(order.destination)

    def reused(self, order: PullOrder, keys: KeyChain, cached_tokens: int) -> None:
        """An engine's own tier tells nothing: what it reused says whether it pulled anything."""
        blocks = cached_tokens // keys.block_tokens - order.first_block
        if blocks <= 0:
            self.ignored(order)
            return
        self.heed.heeded(order.destination)
        self._count("p2p", "")
        self.accounts.tokens += min(blocks, order.block_count) * keys.block_tokens

    def learn(self, order: PullOrder, keys: KeyChain, told: bytes) -> None:
        """The answer to a request with a pull began, and says how that ended."""
        read = read_told(told)
        asked = order if read is None or read.first is None else order.other
        if read is None or asked is None or not read.is_of(asked.block_count):
            self._count("untold", "")
            return
        if read.first is not None:
            failed = Told(end=PullEnd.REJECTED, reason=read.first.reason, ms=read.first.ms)
            self._learn(order, keys, failed, was_asked_on=True)
        self.heed.heeded(order.destination)
        self._learn(asked, keys, read)

    def _learn(
        self, order: PullOrder, keys: KeyChain, read: Told, *, was_asked_on: bool = False
    ) -> None:
        """From one of the sources that were asked. After the first of two the destination asked on:
        it was the source's fault.
        """
        self._count(read.end.value, read.reason.value if read.reason else "")
        tokens = read.blocks * keys.block_tokens
        moved_bytes = tokens * self.links.bytes_per_token
        self.accounts.tokens += tokens
        self.accounts.bytes += moved_bytes
        self.accounts.ms += read.ms
        if self._lives.get(order.source) != order.incarnation:
            return  # the source lives anew: nothing is learnt of what it was
        if read.end is PullEnd.PUBLISHED and read.blocks:
            if not order.ready_ms:  # the time of a pull that waited is not the link's
                self.links.observe(
                    order.source, order.destination, moved_bytes=moved_bytes, ms=read.ms
                )
            if read.reason is None:
                self.sources.published(order.source, order.destination)
        missing = order.first_block + read.blocks
        if read.reason is not None and missing < len(keys):
            now = self._clock.now()
            if read.reason.lesson is Lesson.REMOVE and read.blocks < order.block_count:
                at = read.blocks * KV_KEY_BYTES
                self._on_missing(order.source, order.names[at : at + KV_KEY_BYTES])
            ends = (order.source, order.destination)
            self.sources.failed(*ends, read.reason, keys[missing], now, is_of_source=was_asked_on)

    def forget(self, worker: WorkerId) -> None:
        """It left."""
        self._lives.pop(worker, None)
        self.sources.forget(worker)
        self.heed.forget(worker)
        self.links.forget(worker)

    def _note_life(self, worker: WorkerId, incarnation: str) -> None:
        if self._lives.get(worker) != incarnation:
            self.forget(worker)
            self._lives[worker] = incarnation

    def _count(self, end: str, reason: str) -> None:
        ended = self.accounts.ended
        ended[end, reason] = ended.get((end, reason), 0) + 1


def kv_keys(keys: KeyChain, tokens: array[int], blocks: int) -> bytes:
    """The kv keys of the leading blocks of a prompt of one namespace."""
    lead = tokens[: blocks * keys.block_tokens]
    return kv_chain(keys.namespace.salt, lead, keys.block_tokens)


def pull_address(target: Target | None) -> PullAddress | None:
    """Where its blocks can be pulled from; None where it takes no part."""
    if target is None:
        return None
    if target.p2p is not None:
        host, port = target.p2p
        return PullAddress(
            worker=target.worker,
            incarnation=P2P_LAYOUT.decode(),
            host=host,
            port=port,
            local="",
            layout=P2P_LAYOUT,
            block_bytes=1,
        )
    if target.agent is None or not target.agent.takes_tickets:
        return None
    told = target.agent.pull
    return replace(told, tells_later=True) if told and target.is_told_in_body else told


def _with_other(order: PullOrder, other: PullOrder | None) -> PullOrder:
    """With a second source, where there is one and a worker takes as much."""
    if other is None:
        return order
    told = f'{order.header[1][:-1]},"other":{other.header[1]}}}'
    return replace(order, header=(HEADER, told), other=other) if _fits(told) else order


def _name_of(worker: WorkerId) -> str:
    """Of the worker that a rank is of."""
    return worker.partition("@")[0]


def _fits(told: str) -> bool:
    """Whether a worker takes it: a longer one would be answered with an error, to the client."""
    assert told.isascii()
    return len(told) <= MAX_ORDER_BYTES
