"""The gateway's part in pulls: who may take part, the order that goes with a request, what its end
teaches.

    x-trunkline-pull    to the worker: a signed grant, and where to ask
    x-trunkline-pulled  in its answer: how the pull ended; read here, never passed on

A source is believed to have what its events say, and what we sent there once nobody owes it any
more. Prompts that begin with a public prefix are not pulled. Must never: grant what the ticket
beside it does not cover. Read `core/transfer.py` for grants, `worker/pulls.py` for the other end.
"""

from __future__ import annotations

from array import array
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
    PullEnd,
    Reason,
    keys_digest,
    kv_chain,
)
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
class PullOrder:
    """One pull that a request was sent with."""

    source: WorkerId
    destination: WorkerId
    incarnation: str
    """Of the source: what its pull teaches is about this life alone."""
    first_block: int
    block_count: int
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
        self, links: Links, *, transfer_key: bytes, clock: Clock, draw: Callable[[int], bytes]
    ) -> None:
        self.accounts = PullAccounts()
        self.sources = Sources()
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
        that cannot pull either. Blocks go only between workers of one layout: the first one's.
        """
        now, found = self._clock.now(), [NO_PART] * len(match.expected)
        layout: bytes | None = None
        for state, address in pulling:
            layout = address.layout if layout is None else layout
            if address.layout != layout or state.block_tokens != keys.block_tokens:
                continue
            self._note_life(state.worker, address.incarnation)
            slot = state.slot
            held = match.resident[slot] if is_owing(state.worker) else match.expected[slot]
            held = self.sources.blocks(state.worker, keys, min(held, limit), now)
            found[slot] = held * keys.block_tokens
        return found

    def order(
        self,
        decision: Decision,
        stakes: Stakes,
        keys: KeyChain,
        tokens: array[int],
        ends: tuple[PullAddress, PullAddress],
    ) -> PullOrder:
        """What the chosen worker is told to pull of the prompt, from the first end to the other."""
        assert decision.source is not None, "nothing is to be pulled"
        block_tokens = keys.block_tokens
        source, destination = ends
        first_block = decision.matched_tokens // block_tokens
        last_block = min(decision.expected_tokens // block_tokens, first_block + MAX_GRANT_BLOCKS)
        granted = kv_keys(keys, tokens, last_block)[first_block * KV_KEY_BYTES :]
        count = last_block - first_block
        expected_ms = decision.candidates.queue_ms[decision.choice]
        expected_ms += self.links.transfer_ms(
            decision.source, decision.worker, count * block_tokens
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
            source=decision.source,
            destination=decision.worker,
            incarnation=source.incarnation,
            first_block=first_block,
            block_count=count,
            header=(HEADER, msgspec.json.encode(told).decode("ascii")),
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
            self.sources.published(order.source)
        missing = order.first_block + read.blocks
        if read.reason is not None and missing < len(keys):
            self.sources.failed(order.source, read.reason, keys[missing], self._clock.now())

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
