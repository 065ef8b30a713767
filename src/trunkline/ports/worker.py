"""What the membership, the data plane and the feeds tell one another about a worker.

The membership (`control/`) finds out what a worker is; the data plane (`gateway/`) sends requests
there; neither imports the other. Plain records and two Protocols.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from trunkline.core.actions import Action
from trunkline.core.alignment import Examination
from trunkline.core.feed import WorkerFeed
from trunkline.core.pace import Pace
from trunkline.core.records import WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a worker listens. Made from the registry, never from a client's words."""

    host: str
    port: int
    host_header: str
    base_path: str = ""
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    """Whose certificates are believed there; None where it speaks plain HTTP."""
    api_key: str = field(default="", repr=False)


class EngineKind(Enum):
    """Whose surface a worker has, as far as it tells."""

    VLLM = "vllm"
    SGLANG = "sglang"
    TRUNKLINE = "trunkline"
    """Our simulated worker, which has vLLM's."""
    UNKNOWN = "unknown"

    @property
    def reset_path(self) -> str:
        """A POST there empties the prefix cache, where the engine offers that."""
        return "/flush_cache" if self is EngineKind.SGLANG else "/reset_prefix_cache"


_SGLANG_SALTED = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})
"""Its Anthropic, embedding and scoring paths take none (0.5.23)."""

_VLLM_SALTED_LATE = frozenset({
    "/v1/messages", "/v1/responses", "/v1/embeddings", "/v1/rerank", "/rerank", "/v1/score",
    "/score",
})  # fmt: skip
"""Paths of vLLM that took no salt in earlier releases, where all callers shared a cache; on others
that we read, every release does."""
_UNSALTED = frozenset({"/v1/audio/transcriptions", "/v1/audio/translations"})
"""Forms, which have no room for a salt."""
_VLLM_SALTS_ALL = (0, 32)
"""The release in which we read that they do."""


class AttemptEnd(Enum):
    """How one attempt ended, for load book, breaker and calibration."""

    COMPLETE = "complete"
    """The whole answer went through; the worker's status was below 500."""
    WORKER_FAILED = "worker-failed"
    """Connection refused or lost, status 5xx, or a broken answer."""
    WORKER_LATE = "worker-late"
    """A deadline went by: a failure, and one that health probes may not see."""
    CLIENT_GONE = "client-gone"
    """The client left; says nothing about the worker."""
    UNHEARD = "unheard"
    """The head of the answer was well, and another proxy carried the rest of it: how that went was
    not told.
    """


def ignore_sent() -> None:
    """For workers that nobody watches."""


def ignore_ended(end: AttemptEnd) -> None:
    """For workers that nobody watches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullAddress:
    """Where other workers may pull KV blocks from one, as it says itself."""

    worker: str
    """What it calls itself, and wants to be called in grants."""
    incarnation: str
    host: str
    port: int
    local: str
    """The name of its unix socket, for who is on the same host; empty where there is none."""
    layout: bytes
    """Digest of what the bytes of a block mean: blocks go only between workers of one layout."""
    block_bytes: int
    sources: int = 1
    """How many sources one order to it may name."""
    tells_later: bool = False
    """How its pulls ended comes with its leases, not with its answers."""
    lends_owed: bool = False
    """Who asks it for what it is to compute waits there until it has; else that is a miss."""


class WorkerAgent(Protocol):
    """What stands beside a worker's engine and keeps to our epochs; stock engines have none."""

    @property
    def takes_tickets(self) -> bool:
        """It checks at the point of use what a request may reuse."""
        ...

    @property
    def has_salt_regions(self) -> bool:
        """A prompt there can begin under one salt and go on under another."""
        ...

    @property
    def pull(self) -> PullAddress | None:
        """Where its blocks can be pulled from; None where nobody can, or it has not said yet."""
        ...


def never_gone() -> bool:
    """For workers that nobody watches."""
    return False


@dataclass(slots=True, kw_only=True, eq=False)
class Stay:
    """How long a worker is with us; all its lives and ranks share one."""

    is_over: bool = False
    """Its requests had their time to end, and are given up: tried elsewhere, or broken off."""
    is_gone: Callable[[], bool] = never_gone
    """Whether nothing at all is heard of it, though it is asked: it may have vanished."""


@dataclass(slots=True, kw_only=True)
class Target:
    """What the data plane must know of a worker beside its routing state."""

    worker: WorkerId
    endpoint: Endpoint
    headers: tuple[tuple[str, str], ...] = ()
    """Sent with each request, for example the data-parallel rank."""
    predicted_ttl_ms: float = 0.0
    """How long a decision counts as residency there."""
    is_exact: bool = True
    """Its cache events say what it holds; without them only what was sent there does."""
    max_model_len: int | None = None
    """Longest prompt that it takes; None where it does not say."""
    engine: EngineKind = EngineKind.UNKNOWN
    release: tuple[int, ...] = ()
    """The engine's release; empty where it does not say."""
    models: frozenset[str] = frozenset()
    """The names that it answers to, adapters included; empty where that is not known."""
    agent: WorkerAgent | None = None
    wants_checkpoints: bool = False
    """A digest-mode worker: it is told the labels of the prefix it is about to hold."""
    is_told_in_body: bool = False
    """Its agent is a connector inside the engine, which sees a request's `kv_transfer_params` and
    no header, and tells how pulls ended with its leases."""
    p2p: tuple[str, int] | None = None
    """Host and port of the engine's own peer-to-peer tier; None where it is not used."""
    pace: Pace | None = None
    """Of its present life: told what streams give, asked how long they may be silent. None where
    nobody holds that against it."""
    stay: Stay = field(default_factory=Stay)
    on_sent: Callable[[], None] = ignore_sent
    on_ended: Callable[[AttemptEnd], None] = ignore_ended
    """Told of each attempt once when it is sent and once when it ends, for the breaker."""

    def ttl_ms(self, keep_ms: float) -> float:
        """How long a decision counts as residency there that asks for so much. Events know better
        than any wish.
        """
        return self.predicted_ttl_ms if self.is_exact else max(self.predicted_ttl_ms, keep_ms)

    def keeps_salt(self, path: str) -> bool:
        """Whether the salt of a request to this path reaches the cache. On paths that we know
        nothing of, the operator says so (`--tenant-paths`); of SGLang we know that few do.
        """
        plain = path.partition("?")[0].rstrip("/")
        if plain in _UNSALTED:
            return False
        if self.engine is EngineKind.SGLANG:
            return plain in _SGLANG_SALTED
        if self.engine is EngineKind.TRUNKLINE or plain not in _VLLM_SALTED_LATE:
            return True
        return self.release >= _VLLM_SALTS_ALL


class Targets(Protocol):
    """The data plane's table of workers, as the membership writes it."""

    def add_target(self, target: Target) -> None: ...
    def remove_target(self, worker: WorkerId) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EventSource:
    """One event stream: one data-parallel rank of one worker."""

    endpoint: str
    is_bound_by_us: bool = False
    """The publisher connects, so the subscriber listens."""
    replay_endpoint: str | None = None
    """None where the publisher offers no replay."""
    topic: str = ""
    rank: int | None = None
    buffer_steps: int = 10_000
    """Batches that the publisher keeps for replay."""
    page_tokens: int | None = None
    """Tokens of the blocks that it speaks of; None where they are the worker's blocks."""


class FeedRunner(Protocol):
    """Follows one event stream and hands its batches to a feed, until cancelled."""

    async def __call__(
        self, source: EventSource, feed: WorkerFeed, on_action: Callable[[Action], None]
    ) -> None:
        """`on_action` gets what concerns the worker as a whole: trust, restarts, failure."""
        ...


class Examine(Protocol):
    """Tests a worker with requests of the gateway's own."""

    async def __call__(
        self,
        ranks: Sequence[tuple[WorkerId, WorkerFeed | None]],
        adapters: Sequence[str],
    ) -> Examination:
        """One worker's ranks, each with its event feed where it has one; the adapters that it
        serves. Never raises for what the worker does.
        """
        ...


class Fetch(Protocol):
    """One small HTTP request to a worker: status and body."""

    async def __call__(
        self, endpoint: Endpoint, method: str, path: str, *, timeout_ms: float
    ) -> tuple[int, bytes]:
        """Raises WorkerLost or WorkerTimeout."""
        ...


class Post(Protocol):
    """One small HTTP POST of JSON to a worker: status and body."""

    async def __call__(
        self,
        endpoint: Endpoint,
        path: str,
        body: bytes,
        *,
        timeout_ms: float,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> tuple[int, bytes]:
        """Raises WorkerLost or WorkerTimeout."""
        ...
