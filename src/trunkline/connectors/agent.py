"""The agent inside an engine's worker process: leases, orders and figures, on a port of its own.

    POST /trunkline/lease    a grant for the ask of the last call; the answer is a new ask, where
                             blocks can be pulled from, and how pulls ended since the last call
    POST /trunkline/revoke   epochs swapped, blocks unreachable in the store: then the answer
    GET  /trunkline/erased   how far the overwriting for one revision has come
    GET  /trunkline/figures  what was verified and reused, pulled, kept and refused

The engine's own device memory is not ours: there the salt is the fence, and bytes stay until it is
restarted. The port is reachable from gateways only. Must never: answer an order before it is
carried out. Read `kv/holder.py` for the books.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from trunkline.connectors.keeper import Keeper
from trunkline.core.freshness import Freshness, Taken
from trunkline.core.records import BootInstant
from trunkline.kv.entries import Erasure
from trunkline.kv.holder import MAX_BODY_BYTES, BadOrder, Holder, Parts

MAX_CALLS = 64
"""At a time; a further one is answered 503."""


@dataclass(slots=True, kw_only=True)
class Belief:
    """What the worker believes: `kv.judge.Believing`."""

    freshness: Freshness
    boot: Callable[[], BootInstant]
    grants: dict[Taken, int] = field(default_factory=lambda: dict.fromkeys(Taken, 0))


@dataclass(slots=True, eq=False, kw_only=True)
class HostErasure:
    """What one change of epochs condemned in the store."""

    rev: int = 0
    parts: list[Erasure] = field(default_factory=list[Erasure])

    @property
    def condemned_blocks(self) -> int:
        return sum(part.condemned_blocks for part in self.parts)

    @property
    def is_empty(self) -> bool:
        return not self.condemned_blocks

    @property
    def is_done(self) -> bool:
        return all(part.is_done for part in self.parts)


class Agent:
    """Handlers over one keeper. Belongs to the loop that serves them."""

    def __init__(
        self,
        keeper: Keeper,
        belief: Belief,
        *,
        pull: Callable[[], Mapping[str, Any] | None],
    ) -> None:
        """`pull()`: where others pull from, None where nobody can."""
        self._keeper = keeper
        self._belief = belief
        self._pull = pull
        parts = Parts(receipt=HostErasure, condemn=self._condemn, abort=self._abort)
        self._holder = Holder(belief.freshness, belief.boot, parts)

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/trunkline/lease", self.lease, methods=["POST"]),
                Route("/trunkline/revoke", self.revoke, methods=["POST"]),
                Route("/trunkline/erased", self.erased),
                Route("/trunkline/figures", self.figures),
            ],
            exception_handlers={BadOrder: _on_bad_order},
        )

    async def lease(self, request: Request) -> Response:
        taken = self._holder.lease(await _body(request))
        if taken is not None:
            self._belief.grants[taken] += 1
        self._keeper.tend()
        told = self._holder.ask()
        told |= {"fence": "gateway", "erase": "restart", "salt_regions": False}
        address = self._pull()
        told |= {} if address is None else {"pull": address}
        told |= {
            "lost_tokens": self._keeper.figures.lost,
            "pulled": self._keeper.take_told(),
        }
        return JSONResponse(told)

    async def revoke(self, request: Request) -> Response:
        erasure = self._holder.revoke(await _body(request))
        condemned_bytes = sum(part.condemned_bytes for part in erasure.parts)
        return JSONResponse(
            {
                "rev": erasure.rev,
                "boot_nonce": self._belief.freshness.boot_nonce,
                "aborted": 0,
                "condemned_blocks": erasure.condemned_blocks,
                "condemned_bytes": {"host": condemned_bytes},
            }
        )

    async def erased(self, request: Request) -> Response:
        erasure = self._holder.erased(request.query_params.get("rev", ""))
        return JSONResponse(
            {
                "rev": erasure.rev,
                "done": erasure.is_done,
                "blocks": sum(part.erased_blocks for part in erasure.parts),
                "bytes": {"host": sum(part.erased_bytes for part in erasure.parts)},
            }
        )

    async def figures(self, request: Request) -> Response:
        figures = self._keeper.figures
        return JSONResponse(
            {
                "tokens": {
                    "host": figures.from_host,
                    "pull": figures.from_pull,
                    "lost": figures.lost,
                    "saved": figures.saved,
                },
                "pulls": [
                    {"end": end.value, "reason": reason.value if reason else None, "count": count}
                    for (end, reason), count in sorted(figures.pulls.items(), key=str)
                ],
                "pulled_bytes": figures.pulled_bytes,
                "put_refused": {why.value: n for why, n in figures.put_refused.items()},
                "load_refused": {why.value: n for why, n in figures.load_refused.items()},
                "grants": {taken.value: n for taken, n in self._belief.grants.items()},
                "store": asdict(self._keeper.store.figures()),
            }
        )

    def _condemn(self, raised: Mapping[str, int], erasure: HostErasure) -> None:
        erasure.parts.append(self._keeper.condemn(raised))

    def _abort(self, raised: Mapping[str, int], erasure: HostErasure) -> None:
        """The gateway ends what runs: an engine takes no such order from here."""


class AgentServer:
    """Serves an agent in a thread of its own."""

    def __init__(self, app: Starlette, host: str, port: int) -> None:
        """Raises OSError where the address cannot be listened on."""
        self._socket = socket.create_server((host, port), backlog=64)
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, limit_concurrency=MAX_CALLS, lifespan="off"
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="trunkline-agent", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End it and wait for its thread."""
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._socket]))


async def _body(request: Request) -> bytes:
    raw = bytearray()
    try:
        async for part in request.stream():
            raw += part
            if len(raw) > MAX_BODY_BYTES:
                raise BadOrder(f"the body is larger than {MAX_BODY_BYTES} bytes", status=413)
    except ClientDisconnect as error:
        raise BadOrder("the client left") from error
    return bytes(raw)


async def _on_bad_order(_request: Request, error: Exception) -> Response:
    assert isinstance(error, BadOrder)
    body = {"error": {"message": str(error), "param": error.param}}
    return JSONResponse(body, status_code=error.status)
