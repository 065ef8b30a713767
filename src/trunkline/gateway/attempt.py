"""One attempt: from the choice of a worker to the first of its answer that may go out.

Owns the connection until then: made or taken from the pool, the one second send where a kept one
had died, the head of the answer, and a small answer with a length until it is whole, so that one
whose worker dies in the middle can still be asked for elsewhere. An attempt is ended by `drop`, or
hands its connection on; what comes from its worker afterwards finds nobody. Must never decide
whether there is another attempt. Read `exchange.py` for who does.
"""

from __future__ import annotations

from typing import Protocol

from trunkline.errors import GatewayError, WorkerLost, WorkerTimeout
from trunkline.gateway.contracts import InferenceRequest, Pick
from trunkline.gateway.head import AnswerHead, BrokenAnswer, final_head
from trunkline.gateway.line import ClientSide, Line
from trunkline.gateway.phases import CONNECTING, WAITING, Phase
from trunkline.gateway.upstream import AnswerSink, WorkerConnection, request_head

WHOLE_BYTES = 64 << 10
"""Answers with a length up to this go out whole or not at all."""


class Owner(AnswerSink, Protocol):
    """Whose attempt it is. As a sink it gets what comes behind what it was handed."""

    def stands_at(self, phase: Phase) -> None:
        """The attempt has come so far; now."""
        ...

    def overtaken(self) -> None:
        """The epochs under which the request was salted were raised: nothing was sent."""
        ...

    def objected(self, objection: GatewayError) -> None:
        """Nothing of the answer may go out."""
        ...

    def failed(self, error: GatewayError) -> None:
        """Nothing of the answer came, or not enough to pass on."""
        ...

    def headed(self, link: WorkerConnection, head: AnswerHead, body: bytes) -> None:
        """The answer has begun; all that has come of its body. The link is the owner's now."""
        ...

    def bug(self, error: Exception) -> None:
        """An error that nobody foresaw."""
        ...


class Attempt:
    """See the module. The exchange starts it and drops it; a worker connection calls the rest."""

    __slots__ = (
        "_begun", "_buffer", "_client", "_has_answer_bytes", "_headers", "_is_over",
        "_is_second_send", "_line", "_link", "_owner", "_pick", "_request",
    )  # fmt: skip

    def __init__(
        self,
        line: Line,
        owner: Owner,
        client: ClientSide,
        request: InferenceRequest,
        headers: dict[bytes, bytes],
        pick: Pick,
    ) -> None:
        self._line = line
        self._owner = owner
        self._client = client
        self._request = request
        self._headers = headers
        self._pick = pick
        self._link: WorkerConnection | None = None
        self._buffer = b""
        self._begun: tuple[AnswerHead, list[bytes], int] | None = None
        """A small answer that is not whole yet: its head, its body, and how much is missing."""
        self._has_answer_bytes = False
        self._is_second_send = False
        self._is_over = False

    def start(self) -> None:
        link = self._line.pool.take(self._pick.endpoint)
        if link is None:
            self._connect()
        else:
            self._send(link)

    def drop(self) -> None:
        """Nothing of it is wanted any more; the worker learns it by the closed connection."""
        self._is_over = True
        link, self._link = self._link, None
        if link is not None:
            link.abort()

    def pause(self) -> None:
        if self._link is not None:
            self._link.pause()

    def resume(self) -> None:
        if self._link is not None:
            self._link.resume()

    # -- the worker's side -----------------------------------------------------------------------

    def received(self, data: bytes) -> None:
        try:
            objection = self._line.objection(self._request)
            if objection is not None:
                self._owner.objected(objection)
            elif self._begun is None:
                self._receive_head(data)
            else:
                self._receive_rest(*self._begun, data)
        except BrokenAnswer as error:
            self._owner.failed(WorkerLost(str(error)))
        except Exception as error:  # noqa: BLE001 - ends one request, logged and counted
            self._owner.bug(error)

    def lost(self, error: Exception | None) -> None:
        """The worker's connection ended."""
        link, self._link = self._link, None
        if link is None or self._is_over:
            return
        is_stale = link.uses > 1 and not self._has_answer_bytes
        if is_stale and not self._is_second_send:
            self._is_second_send = True
            self._line.counters.stale_retries += 1
            self._connect()
            return
        self._owner.failed(WorkerLost("the worker closed the connection without an answer"))

    # -- inside ----------------------------------------------------------------------------------

    def _connect(self) -> None:
        self._owner.stands_at(CONNECTING)
        self._line.spawn(self._await_connection())

    async def _await_connection(self) -> None:
        try:
            link = await self._line.pool.connect(self._pick.endpoint)
            if self._is_over:
                link.release(is_reusable=True)
            else:
                self._send(link)
        except (WorkerLost, WorkerTimeout) as error:
            if not self._is_over:
                self._owner.failed(error)
        except Exception as error:  # noqa: BLE001 - ends one request, logged and counted
            self._owner.bug(error)

    def _send(self, link: WorkerConnection) -> None:
        if not self._line.is_current(self._request):
            link.release(is_reusable=True)
            self._owner.overtaken()
            return
        self._owner.stands_at(WAITING)
        self._buffer = b""
        self._has_answer_bytes = False
        self._link = link
        link.attach(self)
        link.send(request_head(self._request, self._headers, self._pick), self._pick.body)
        if self._client.is_paused:
            link.pause()

    def _receive_head(self, data: bytes) -> None:
        self._has_answer_bytes = True
        raw = self._buffer + data if self._buffer else data
        found = final_head(raw)
        if found is None:
            self._buffer = raw
            return
        self._buffer = b""
        head, body = found
        length = head.content_length
        if length is None or length > WHOLE_BYTES or len(body) >= length:
            self._hand_on(head, body)
        else:
            self._begun = (head, [body], length - len(body))

    def _receive_rest(self, head: AnswerHead, pieces: list[bytes], left: int, data: bytes) -> None:
        pieces.append(data)
        left -= len(data)
        self._begun = (head, pieces, left)
        if left <= 0:  # what is beyond the end, the relay refuses
            self._hand_on(head, b"".join(pieces))

    def _hand_on(self, head: AnswerHead, body: bytes) -> None:
        link, self._link = self._link, None
        assert link is not None, "a head without a connection"
        self._is_over = True
        link.hand_on(self._owner)
        self._owner.headed(link, head, body)
