"""The gateway's part in pulls: who may take part, the order that goes with a request, what its end
teaches.

    x-trunkline-pull    to the worker: a signed grant, and where to ask
    x-trunkline-pulled  in its answer: how the pull ended; read here, never passed on

A source is believed to have what its events say, and what we sent there once nobody owes it any
more. Prompts that begin with a public prefix are not pulled. Must never: grant what the ticket
beside it does not cover. Read `core/transfer.py` for grants, `worker/pulls.py` for the other end.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from trunkline.core.decision import Decision
from trunkline.core.directory import Match
from trunkline.core.fleet import WorkerState
from trunkline.core.keys import KeyChain
from trunkline.core.links import Links
from trunkline.core.records import WorkerId
from trunkline.core.sources import Sources
from trunkline.core.transfer import (
    KV_KEY_BYTES,
    MAX_GRANT_BLOCKS,
    MAX_GRANT_LIFE_MS,
    NONCE_BYTES,
    Grant,
    Lesson,
    PullEnd,
    Reason,
    keys_digest,
    kv_chain,
)
from trunkline.gateway.hot import HotPrompts
from trunkline.gateway.namespaces import Stakes
from trunkline.ports.clock import Clock
from trunkline.ports.worker import PullAddress, Target

NO_PART = -1
"""Of a worker that takes no part in pulls, neither as a source nor as a destination."""
HEADER = "x-trunkline-pull"
MAX_TOLD_BYTES = 1_024
GRANT_SLACK_MS = 5_000.0
"""A grant outlives the time that its pull should take by so much; the worker gives up before."""
_PATIENCE = 3.0


class _Told(msgspec.Struct, kw_only=True):
    """What the worker's header says; what else it says is passed over."""

    end: PullEnd
    reason: Reason | None = None
    blocks: int = msgspec.field(default=0)
    ms: float = 0.0


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


def plan_of(decision: Decision, block_tokens: int) -> PullPlan | None:
    """What a decision wants pulled; None where its plan is another."""
    if decision.source is None:
        return None
    return PullPlan(
        source=decision.source,
        destination=decision.worker,
        first_block=decision.matched_tokens // block_tokens,
        last_block=decision.expected_tokens // block_tokens,
        queue_ms=decision.candidates.queue_ms[decision.choice],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PullOrder:
    """One pull that a request was sent with."""

    source: WorkerId
    destination: WorkerId
    incarnation: str
    """Of the source: what its pull teaches is about this life alone."""
    first_block: int
    block_count: int
    names: bytes = field(repr=False)
    """The kv keys of these blocks."""
    header: tuple[str, str] = field(repr=False)


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
    ) -> None:
        """`on_missing` is told the kv key of a block that a worker should have and does not."""
        self._on_missing = on_missing
        self.accounts = PullAccounts()
        self.sources = Sources()
        self.hot = HotPrompts()
        self.links = links
        self._transfer_key = transfer_key
        self._clock = clock
        self._draw = draw
        self._lives: dict[WorkerId, str] = {}

    def source_tokens(
        self,
        match: Match,
        keys: KeyChain,
        pulling: Sequence[tuple[WorkerState, PullAddress]],
        is_owing: Callable[[WorkerId], bool],
        limit: int,
    ) -> list[int]:
        """For each slot, how many leading tokens may be pulled from there; `NO_PART` for workers
        that cannot pull either. Blocks go only between workers of one layout, which is that of
        most.
        """
        now, found = self._clock.now(), [NO_PART] * len(match.expected)
        layouts = Counter(address.layout for _, address in pulling)
        layout = max(layouts, key=layouts.__getitem__, default=b"")
        for state, address in pulling:
            if address.layout != layout or state.block_tokens != keys.block_tokens:
                continue
            if self.sources.rests(state.worker, now):
                continue
            self._note_life(state.worker, address.incarnation)
            slot = state.slot
            held = match.expected[slot]  # what lies on disk is not lent
            if is_owing(state.worker):
                held = min(held, match.resident[slot])
            held = self.sources.blocks(state.worker, keys, min(held, limit), now)
            found[slot] = held * keys.block_tokens
        return found

    def order(
        self,
        plan: PullPlan,
        stakes: Stakes,
        keys: KeyChain,
        tokens: array[int],
        ends: tuple[PullAddress, PullAddress],
    ) -> PullOrder:
        """What the destination is told to pull of the prompt, from the first end to the other."""
        source, destination = ends
        first_block = plan.first_block
        last_block = min(plan.last_block, first_block + MAX_GRANT_BLOCKS)
        granted = kv_keys(keys, tokens, last_block)[first_block * KV_KEY_BYTES :]
        count = last_block - first_block
        expected_ms = plan.queue_ms + self.links.transfer_ms(
            plan.source, plan.destination, count * keys.block_tokens
        )
        life_ms = min(_PATIENCE * expected_ms + GRANT_SLACK_MS, MAX_GRANT_LIFE_MS)
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
            keys=keys_digest(granted),
            max_bytes=count * source.block_bytes,
            deadline_ms=int(self._clock.wall() * 1e3 + life_ms),
            nonce=self._draw(NONCE_BYTES),
        )
        told = {
            "grant": grant.signed(self._transfer_key),
            "host": source.host,
            "port": source.port,
            "local": source.local,
            "source": source.worker,
        }
        self.accounts.ordered += 1
        return PullOrder(
            source=plan.source,
            destination=plan.destination,
            incarnation=source.incarnation,
            first_block=first_block,
            block_count=count,
            names=granted[: count * KV_KEY_BYTES],
            header=(HEADER, json.dumps(told, separators=(",", ":"))),
        )

    def learn(self, order: PullOrder, keys: KeyChain, told: bytes) -> None:
        """The answer to a request with a pull began, and says how that ended."""
        read = _read(told)
        if read is None or not 0 <= read.blocks <= order.block_count or not 0.0 <= read.ms < 1e9:
            self._count("untold", "")
            return
        self._count(read.end.value, read.reason.value if read.reason else "")
        tokens = read.blocks * keys.block_tokens
        moved_bytes = tokens * self.links.bytes_per_token
        self.accounts.tokens += tokens
        self.accounts.bytes += moved_bytes
        self.accounts.ms += read.ms
        if self._lives.get(order.source) != order.incarnation:
            return  # the source lives anew: nothing is learnt of what it was
        if read.end is PullEnd.PUBLISHED and read.blocks:
            self.links.observe(order.source, order.destination, moved_bytes=moved_bytes, ms=read.ms)
            if read.reason is None:
                self.sources.published(order.source, order.destination)
        missing = order.first_block + read.blocks
        if read.reason is not None and missing < len(keys):
            now = self._clock.now()
            if read.reason.lesson is Lesson.REMOVE and read.blocks < order.block_count:
                at = read.blocks * KV_KEY_BYTES
                self._on_missing(order.source, order.names[at : at + KV_KEY_BYTES])
            self.sources.failed(order.source, order.destination, read.reason, keys[missing], now)

    def forget(self, worker: WorkerId) -> None:
        """It left."""
        self._lives.pop(worker, None)
        self.sources.forget(worker)
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
    if target is None or target.agent is None or not target.agent.takes_tickets:
        return None
    return target.agent.pull


def _read(told: bytes) -> _Told | None:
    if len(told) > MAX_TOLD_BYTES:
        return None
    try:
        return msgspec.json.decode(told, type=_Told)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
