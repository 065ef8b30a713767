"""What a proxy that carries requests itself asks the gateway, and what it is told.

The proxy (`adapters/ext_proc_server.py` speaks for Envoy) has the client's and the worker's
connection; the gateway (`gateway/delegated.py`) authenticates, decides and keeps the books. Plain
records and two Protocols; everything of a `Delegate` is called on the gateway's event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

ENDPOINT_HEADER = "x-gateway-destination-endpoint"
"""Names the worker, `ip:port`, in the endpoint-picker protocol; only we may say it."""
SUBSET_HEADER = f"{ENDPOINT_HEADER}-subset"
SERVED_HEADER = f"{ENDPOINT_HEADER}-served"

Fields = Sequence[tuple[bytes, bytes]]
"""Header names, in lower case, and values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One whole request as the proxy has it."""

    method: str
    target: bytes
    authority: bytes
    fields: Fields = field(repr=False)
    """Its headers, without those that begin with a colon."""
    body: bytes = field(repr=False)
    source: str
    """The client's address; empty where the proxy does not say."""
    among: frozenset[str] | None = None
    """Workers, `ip:port`, that the proxy allows; None for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Where the request goes, and as what."""

    endpoint: str
    put: tuple[tuple[str, str], ...]
    """Headers to set, in place of any of the same name."""
    drop: tuple[str, ...]
    """Headers that a worker must not see."""
    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """An answer of the gateway's own: the request goes nowhere."""

    status: int
    put: tuple[tuple[str, str], ...]
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Headed:
    """What becomes of the head of a worker's answer."""

    put: tuple[tuple[str, str], ...]
    drop: tuple[str, ...]
    wants_body: bool
    """Whether the whole body is to be told: it says what was reused."""


class Delegate(Protocol):
    """One request. `begin` comes first, `over` last and exactly once, whatever happened between."""

    async def begin(self, asked: Asked) -> Send | Said:
        """Cancelled, it leaves nothing behind."""
        ...

    def headed(self, status: int, fields: Fields) -> Headed | Said:
        """The worker answers, or the proxy in its place."""
        ...

    def whole(self, body: bytes) -> Said | None:
        """All of the body, before any of it goes out; None lets it go."""
        ...

    def over(self) -> None: ...


MakeDelegate = Callable[[Callable[[], None]], Delegate]
"""(cut) -> who serves one request; `cut()` ends it at the proxy now. Both from any thread."""
