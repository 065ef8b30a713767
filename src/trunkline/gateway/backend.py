"""What the admin port needs of the rest of the gateway, and the records that go to and fro.

`wiring.py` implements `AdminBackend` over fleet, registry and decision book. Outcomes are values:
None is "nobody knows that name" (404), `Refused` carries its own status. Must never hold a key of a
worker in a record that goes out. Read `admin.py` next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from trunkline.core.records import BlockKey, WorkerId

WorkerCondition = Literal[
    "joining", "ready", "unhealthy", "draining", "breaker-open", "lease-expired"
]
"""`ready` may be chosen now; the others may not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOrder:
    """A worker to be joined. `url` is well-formed; whether it is allowed the backend decides."""

    url: str
    model_id: str = ""
    """It joins only if it serves this one; empty for whatever the gateway serves."""
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    api_key: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJob:
    """What became of an order, so far. `GET /workers/{id}` tells the rest."""

    worker: WorkerId
    state: WorkerCondition | Literal["removed"]
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """One worker as operators see it. `detail` takes what else is worth showing, never a key."""

    worker: WorkerId
    url: str
    state: WorkerCondition
    mode: Literal["exact", "approximate", "digest", "blind"]
    reason: str = ""
    """Why it is in this state and mode, where that needs saying."""
    model_id: str = ""
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    breaker: Literal["closed", "open", "half-open"] = "closed"
    requests_active: int = 0
    queue_ms: float = 0.0
    detail: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """News of a digest-mode worker, in bounds. If complete, `checkpoints` is all it holds."""

    worker: WorkerId
    boot_nonce: str
    counter: int
    checkpoints: tuple[BlockKey, ...] = field(repr=False)
    is_complete: bool
    memory: float
    """Share of KV memory in use, 0 to 1."""
    load: float
    """Share of its capacity in use; above 1 while requests wait."""
    block_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Why an order was not taken: 400 wrong, 403 not allowed, 409 conflicts, 503 not now."""

    status: Literal[400, 403, 409, 503]
    code: str
    message: str


class AdminBackend(Protocol):
    """The gateway behind the admin port. All methods are called on its event loop."""

    async def workers(self) -> Sequence[WorkerView]:
        """All of them, in a fixed order."""
        ...

    async def worker(self, worker: WorkerId) -> WorkerView | None: ...

    async def add_worker(self, order: WorkerOrder) -> WorkerJob | Refused:
        """Begin to join a worker; answers at once, with `joining`."""
        ...

    async def remove_worker(self, worker: WorkerId) -> WorkerJob | Refused | None:
        """Forget it: no new requests, those in flight end. `worker` may also be its URL."""
        ...

    async def drain_worker(self, worker: WorkerId) -> WorkerJob | Refused | None:
        """No new requests; it stays listed."""
        ...

    async def decisions(
        self, *, limit: int, worker: WorkerId | None
    ) -> Sequence[Mapping[str, Any]]:
        """The latest first, as `Decision.as_dict` has them."""
        ...

    async def decision(self, request_id: str) -> Mapping[str, Any] | None: ...

    async def heartbeat_key(self, worker: WorkerId) -> str | None:
        """What this worker proves itself with: its api_key, empty for none; None if unknown."""
        ...

    async def heartbeat(self, beat: Heartbeat) -> str | None:
        """Take it, or say why not (old life, counter not higher); then nothing has changed."""
        ...
