"""One client connection: reads a message, has it served, reads the next.

Owns the client's socket, its limits and its time-outs. One request at a time: what a client sends
ahead waits, up to a bound, and is read after the answer. A client that does not fetch its answers
is not read from either, and one that sends many messages at once has a few read in each turn of the
loop. A message that breaks the grammar ends the connection, since nobody can say where the next one
would begin. Read `intake.py` and `exchange.py` next.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from enum import Enum
from typing import TYPE_CHECKING, cast

from trunkline.errors import Busy, GatewayError
from trunkline.gateway.answers import Answer, encode, failed
from trunkline.gateway.body import Body
from trunkline.gateway.claims import expects_answer
from trunkline.gateway.contracts import ClientError, InferenceRequest, Refusal, Route
from trunkline.gateway.counters import AccessRecord
from trunkline.gateway.entry import Entry
from trunkline.gateway.exchange import Exchange
from trunkline.gateway.head import RequestHead, parse_request
from trunkline.gateway.inbox import Inbox
from trunkline.gateway.line import CLOSE, RESET, Result, local_result
from trunkline.gateway.routes import Local, with_methods

if TYPE_CHECKING:
    from trunkline.gateway.front import Front

LINGER_S = 2.0
"""How long the rest of a refused message is read and thrown away, so that the refusal is not
lost.
"""

MESSAGES_PER_TURN = 16
"""Most messages of one connection that are read before everybody else has a turn: 0.3 ms or so."""

_NO_LINGER = struct.pack("ii", 1, 0)


class State(Enum):
    HEAD = "head"
    BODY = "body"
    BUSY = "busy"
    LINGER = "linger"
    CLOSED = "closed"


# In Python 3.11 a member costs 50 ns more where it is looked up in its class.
HEAD, BODY, BUSY, LINGER, CLOSED = State


class ClientConnection(asyncio.Protocol):
    """See the module. The front owns it; an exchange calls `refuse` and `exchange_over`."""

    __slots__ = (
        "_body", "_deadline_s", "_drained_bytes", "_entry", "_exchange", "_front", "_has_waited",
        "_head", "_inbox", "_is_held", "_is_idle", "_is_turn_due", "_overflowed",
        "_received_bytes", "_source", "_stalled_since_s", "_started_ms", "_state", "_transport",
        "_unfetched", "_written_bytes", "is_paused",
    )  # fmt: skip

    def __init__(self, front: Front) -> None:
        self._front = front
        self._transport: asyncio.Transport | None = None
        self._state = HEAD
        self._inbox = Inbox()
        self._head: RequestHead | None = None
        self._entry = Entry()
        self._source = ""
        self._has_waited = False
        self._body: Body | None = None
        self._received_bytes = 0
        self._unfetched: list[InferenceRequest] = []
        """Those whose answers may still wait, in part, to be fetched; as many as fit the buffer."""
        self._exchange: Exchange | None = None
        self._is_idle = True
        self._overflowed = False
        self._deadline_s = 0.0
        self._started_ms = 0.0
        self._is_turn_due = False
        self._is_held = False
        self._written_bytes = 0
        self._drained_bytes = 0
        self._stalled_since_s = 0.0
        self.is_paused = False

    # -- what an exchange sees -------------------------------------------------------------------

    @property
    def transport(self) -> asyncio.Transport:
        assert self._transport is not None, "used before it was connected"
        return self._transport

    @property
    def takes_chunks(self) -> bool:
        return self._head is not None and self._head.minor == 1

    @property
    def closes(self) -> bool:
        is_last = self._head is None or not self._head.keeps_alive
        return is_last or self._overflowed or self._front.is_draining

    def write(self, data: bytes) -> None:
        """Everything that goes to the client goes through here, to be counted."""
        self._written_bytes += len(data)
        self.transport.write(data)

    def refuse(self, error: GatewayError) -> int:
        answer = self._failure(error)
        self._write(answer)
        return answer.status

    def _failure(self, error: GatewayError) -> Answer:
        entry = self._entry
        answer = failed(error, entry.request_id, is_anthropic=entry.is_anthropic)
        self._front.counters.count_refusal(answer.code)
        return answer

    def exchange_over(self, result: Result) -> None:
        self._exchange = None
        self._front.end(self._entry.principal)
        self._log(result)
        if self._state is CLOSED:
            return
        if result.ending is RESET:
            self.transport.abort()
        elif result.ending is CLOSE or self.closes:
            self._close(is_drained=not self._inbox.left and not self._overflowed)
        else:
            self._wait_for_next()
            if self._inbox.left:
                self._ask_for_turn()  # not from here: the caller is in a worker's read
                self._pace()

    # -- asyncio.Protocol ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # asyncio's signature is wider
        peer = transport.get_extra_info("peername")
        self._source = str(peer[0]) if peer else ""
        limits = self._front.limits
        self._transport.set_write_buffer_limits(high=limits.write_buffer_bytes)
        self._deadline_s = self._front.now_s() + limits.header_timeout_ms / 1_000.0
        if not self._front.admit(self):
            text = "too many connections"
            self._refuse_message(Refusal(status=503, code="too_many_connections", message=text))

    def data_received(self, data: bytes) -> None:
        if self._state is BUSY:
            self._keep_ahead(data)
            return
        if self._state is LINGER or self._state is CLOSED:
            return
        self._inbox.add(data)
        if not self._is_turn_due:
            self._advance()

    def connection_lost(self, exc: Exception | None) -> None:
        self._state = CLOSED
        self._front.forget(self)
        if self._exchange is not None:
            self._exchange.client_gone()

    def pause_writing(self) -> None:
        self.is_paused = True
        if self._exchange is not None:
            self._exchange.pause_worker()

    def resume_writing(self) -> None:
        self.is_paused = False
        if self._exchange is not None:
            self._exchange.resume_worker()
        elif self._inbox.left:
            self._ask_for_turn()
        self._pace()

    # -- reading messages ------------------------------------------------------------------------

    def _keep_ahead(self, data: bytes) -> None:
        """A client sends before it was answered. Beyond the bound, that answer is the last."""
        if self._overflowed or self._inbox.left + len(data) > self._front.limits.max_head_bytes:
            self._overflowed = True
            self._inbox.clear()
        else:
            self._inbox.add(data)

    def _advance(self) -> None:
        """Read messages until one is being served, no whole one is left, the client has too much to
        fetch, or this connection's turn is over.
        """
        left = MESSAGES_PER_TURN
        while not self.is_paused:
            if self._state is HEAD:
                if not self._inbox.left or not self._read_head():
                    break
                continue
            if self._state is not BODY or not self._read_body():
                break
            left -= 1
            if left == 0 and self._inbox.left:
                self._ask_for_turn()
                break
        self._pace()

    def _ask_for_turn(self) -> None:
        if not self._is_turn_due:
            self._is_turn_due = True
            self._front.call_soon(self._take_turn)

    def _take_turn(self) -> None:
        self._is_turn_due = False
        if not self.transport.is_closing():
            self._advance()

    def _pace(self) -> None:
        """Read the socket only while what comes can be taken. A request in flight always lets us
        read, since that is how we learn that the client left.
        """
        is_reading = self._state is HEAD or self._state is BODY
        is_held = is_reading and (self.is_paused or self._is_turn_due)
        if is_held is not self._is_held and not self.transport.is_closing():
            self._is_held = is_held
            self.transport.pause_reading() if is_held else self.transport.resume_reading()

    def _read_head(self) -> bool:
        limits = self._front.limits
        size = self._inbox.head_size()
        if size == 0 or size > limits.max_head_bytes:
            if self._inbox.left > limits.max_head_bytes:
                text = f"the request head has more than {limits.max_head_bytes} bytes"
                self._refuse_message(Refusal(status=431, code="head_too_large", message=text))
            elif self._inbox.has_bare_lf():
                text = "a header line ends in a bare LF"
                self._refuse_message(Refusal(code="bare_cr_or_lf", message=text))
            elif self._is_idle:
                self._is_idle = False
                self._deadline_s = self._front.now_s() + limits.header_timeout_ms / 1_000.0
            return False
        raw = self._inbox.take(size)
        self._is_idle = False
        self._head = None
        self._entry.begin(self._front.new_request_id())
        self._started_ms = self._front.now_ms()
        try:
            self._take_head(parse_request(raw, limits.max_headers, limits.max_header_bytes))
        except Exception as error:  # noqa: BLE001 - ends one connection, logged and counted
            self._end_message(self._told(error))
            return False
        return True

    def _take_head(self, head: RequestHead) -> None:
        """Everything that can be decided before the body. Raises ClientError."""
        self._head = head
        self._received_bytes = 0
        has_body = head.is_chunked or head.content_length > 0
        self._entry.settle(self._front, head, self._source, has_body=has_body)
        self._body = Body(head, self._front.limits.max_payload_size)
        self._has_waited = False
        self._begin_body(head, has_body=has_body)

    def _begin_body(self, head: RequestHead, *, has_body: bool) -> None:
        if expects_answer(head) and has_body and not self._inbox.left and head.minor == 1:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._state = BODY
        if has_body and (head.is_chunked or self._inbox.left < head.content_length):
            timeout_ms = self._front.limits.body_timeout_ms
            self._deadline_s = self._front.now_s() + timeout_ms / 1_000.0

    def _read_body(self) -> bool:
        """Take what is there of the body; True where the message is whole and was handed on."""
        assert self._body is not None, "a body before its head"
        try:
            body = self._body.take(self._inbox)
        except Exception as error:  # noqa: BLE001 - ends one connection, logged and counted
            self._end_message(self._told(error))
            return False
        if body is None:
            self._has_waited = True
            return False
        self._body = None
        self._received_bytes = len(body)
        self._front.counters.request_bytes += len(body)
        self._serve(body)
        return True

    # -- serving ---------------------------------------------------------------------------------

    def _serve(self, body: bytes) -> None:
        head, route = self._head, self._entry.route
        assert head is not None, "a body without a head"
        assert route is not None, "a body without a route"
        try:
            made = self._made(head, route, body)
        except Exception as error:  # noqa: BLE001 - ends one request, logged and counted
            made = self._failure(self._told(error))
        if isinstance(made, Answer):
            self._answer(made)
        else:
            self._begin(head, made)

    def _made(
        self, head: RequestHead, route: Route | Local, body: bytes
    ) -> Answer | InferenceRequest:
        """What a whole message is: answered, or to be carried out. Raises GatewayError."""
        entry = self._entry
        if isinstance(route, Local):
            return self._front.local_answer(route, entry.principal, head)
        if self._front.is_full(entry.principal):
            raise Busy("too many requests are in flight")
        if self._has_waited:  # for the body: a key may have ended meanwhile
            entry.principal = self._front.principal(head.headers, self._source)
        request = self._front.intake.request(head, route, body, entry.request_id)
        self._front.admit_request(entry.principal, head.headers, request, self._source)
        if entry.trace is not None:
            entry.trace.admitted(request)
        return request

    def _begin(self, head: RequestHead, request: InferenceRequest) -> None:
        self._state = BUSY
        self._front.begin(self._entry.principal)
        if not self.transport.get_write_buffer_size():
            self._unfetched.clear()
        self._unfetched.append(request)
        self._exchange = Exchange(self._front.line, self, request, head.headers)
        self._exchange.start()

    def _answer(self, answer: Answer) -> None:
        """A whole local answer to a whole message."""
        self._write(answer)
        route = self._entry.route
        if answer.code or (isinstance(route, Local) and route.is_for_callers):
            self._log(local_result(answer))
        if self.closes:
            self._close(is_drained=not self._inbox.left)
        else:
            self._wait_for_next()

    def _write(self, answer: Answer, *, is_last: bool = False) -> None:
        head, is_kept = self._head, not is_last and not self.closes
        answer = self._front.browsers.marked(answer, {} if head is None else head.headers)
        has_body = head is None or head.method != "HEAD"
        self.write(encode(answer, self._entry.request_id, keeps_alive=is_kept, has_body=has_body))

    def _told(self, error: Exception) -> GatewayError:
        """What the client is told of this error: nothing of one that nobody foresaw."""
        known = isinstance(error, GatewayError)
        return error if known else self._front.bug(error, self._entry.request_id)

    def _refuse_message(self, refusal: Refusal) -> None:
        self._end_message(ClientError(refusal))

    def _end_message(self, error: GatewayError) -> None:
        """A message that cannot be served nor skipped: answer and end the connection."""
        if not self._entry.request_id:
            self._entry.request_id = self._front.new_request_id()
        answer = with_methods(self._failure(error), self._entry.route)
        self._write(answer, is_last=True)
        self._log(local_result(answer))
        self._close(is_drained=False)

    def _wait_for_next(self) -> None:
        self._state = HEAD
        self._head = None
        self._is_idle = True
        self._deadline_s = self._front.now_s() + self._front.limits.idle_timeout_ms / 1_000.0

    def _close(self, *, is_drained: bool) -> None:
        """Close behind what was written. Unread input would make the kernel drop that: read it."""
        self._inbox.clear()
        self._body = None
        self._state = LINGER
        self._deadline_s = self._front.now_s() + LINGER_S
        self._pace()
        if is_drained or not self.transport.can_write_eof():
            self.transport.close()
        else:
            self.transport.write_eof()

    # -- time ------------------------------------------------------------------------------------

    def check(self, now_s: float) -> None:
        """Called a few times a second."""
        if self._is_stalled(now_s):
            self._front.counters.write_stalls += 1
            self.transport.abort()
            return
        if self._exchange is not None:
            self._exchange.check(now_s)
        elif now_s > self._deadline_s and self._state is not CLOSED:
            self._time_out()

    def _time_out(self) -> None:
        has_unread = self.transport.get_write_buffer_size() > 0
        if self.is_paused or (has_unread and self._is_idle and self._state is HEAD):
            # It still fetches an answer, and may not be read from: the write stall decides.
            self._deadline_s = self._front.now_s() + self._front.limits.idle_timeout_ms / 1_000.0
        elif self._state is BODY or (self._state is HEAD and self._inbox.left):
            text = "the request did not arrive in time"
            self._refuse_message(Refusal(status=408, code="request_timeout", message=text))
        elif self._state is LINGER and has_unread:
            self._deadline_s = float("inf")  # the write stall decides
        else:
            self.transport.abort()

    def _is_stalled(self, now_s: float) -> bool:
        """Whether the client has taken nothing of what waits for it, for too long."""
        waiting_bytes = self.transport.get_write_buffer_size()
        drained_bytes = self._written_bytes - waiting_bytes
        if waiting_bytes == 0 or drained_bytes != self._drained_bytes:
            self._drained_bytes = drained_bytes
            self._stalled_since_s = now_s
            return False
        return (now_s - self._stalled_since_s) * 1_000.0 > self._front.limits.write_stall_ms

    def fence(self) -> bool:
        """The epochs moved: what runs here may have to end. Whether it had to. Bytes of such an
        answer that wait for the client to fetch them are thrown away, with the connection.
        """
        if not any(self._front.objection(request) for request in self._unfetched):
            return False
        is_running = self._exchange is not None
        if self.transport.get_write_buffer_size():
            self._discard()
        elif self._exchange is not None:
            return self._exchange.fence()
        return is_running

    def _discard(self) -> None:
        """Close at once, and let the kernel forget what it has not sent."""
        raw = self.transport.get_extra_info("socket")
        if raw is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self.transport.abort()

    def stop(self, error: GatewayError) -> None:
        """The front ends: finish what is open with an error, and close."""
        if self._exchange is not None:
            self._exchange.stop(error)
        if self._state in {HEAD, BODY}:
            self.transport.close()

    def abort(self) -> None:
        self.transport.abort()

    def close_if_idle(self) -> None:
        if self._state is HEAD and not self._inbox.left:
            self.transport.close()

    def _log(self, result: Result) -> None:
        entry, head = self._entry, self._head
        trace = entry.trace
        self._front.counters.count_request(entry.route_name, result.status)
        if not self._front.wants_record(trace):
            return
        path = head.target.partition(b"?")[0][:128] if head is not None else b""
        self._front.finished(
            AccessRecord(
                request_id=entry.request_id,
                client_request_id=entry.client_id,
                trace_id="" if trace is None else trace.trace_id,
                method=head.method if head is not None else "",
                path=path.decode("ascii"),
                status=result.status,
                code=result.code,
                worker=result.worker,
                attempts=result.attempts,
                request_bytes=self._received_bytes,
                answer_bytes=result.answer_bytes,
                ttft_ms=result.ttft_ms,
                duration_ms=self._front.now_ms() - self._started_ms,
            ),
            trace,
        )
