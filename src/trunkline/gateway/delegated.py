"""One request whose bytes another proxy carries: who asks, where it goes, and the books behind it.

What a client's connection and an exchange do between them, without either connection: the same
checks of head and body, the same grant, the same choice, one attempt. What the proxy does not tell
is not made up: how a stream went on behind its head is `unheard`. Must never: let a request on that
was not admitted and salted, or take a worker's name from a client. Read `front.py` for what it is
among, `adapters/ext_proc_server.py` for who calls.

    begin ─► PICKING ─► SENT ─► (headed) ─► ANSWERING ─► over
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from trunkline import observe
from trunkline.core.records import WorkerId
from trunkline.errors import Busy, GatewayError, NoWorker, WorkerLost, WorkerTimeout
from trunkline.gateway.answers import UNREADABLE, Answer, failed, fields_of
from trunkline.gateway.contracts import (
    AttemptEnd,
    ClientError,
    Endpoint,
    InferenceRequest,
    Pick,
    Refusal,
)
from trunkline.gateway.counters import AccessRecord
from trunkline.gateway.course import Course
from trunkline.gateway.deadline import past
from trunkline.gateway.entry import Entry
from trunkline.gateway.head import PULLED, RequestHead, parse_request
from trunkline.gateway.patience import dismissed
from trunkline.gateway.places import Places
from trunkline.gateway.relay import cached_tokens_in, fields_in, own_fields
from trunkline.gateway.routes import Local, with_methods
from trunkline.gateway.upstream import FORWARDED
from trunkline.ports.proxy import (
    ENDPOINT_HEADER,
    SERVED_HEADER,
    SUBSET_HEADER,
    Asked,
    Fields,
    Headed,
    Said,
    Send,
)

if TYPE_CHECKING:
    from trunkline.gateway.front import Front

KEPT_NAME_CHARS = 47
"""Of a client's name for its request: with what is put behind it, it is a name again."""
MAX_CHOICES = 8
"""Of one request: workers that the proxy cannot reach, or epochs that moved meanwhile."""
_LEFT_BY_PROXY = frozenset({b"host", b"connection"})
"""The proxy writes them itself."""
_CARRIED = b"x-envoy-upstream-service-time"
"""On every answer that came from a worker, and on none that the proxy made."""

Reachable = Callable[[], Iterable[tuple[WorkerId, Endpoint]]]
"""All workers there are, and where."""


class Delegated:
    """See the module. The front counts it among its clients; all of it runs on the front's loop but
    for its making.
    """

    def __init__(
        self,
        front: Front,
        workers: Reachable,
        cut: Callable[[], None],
        *,
        places: Places,
        streams: int,
    ) -> None:
        """`places`: those of the proxy's `streams` that are taken."""
        self._front = front
        self._places, self._streams = places, streams
        self._workers = workers
        self._cut = cut
        self._is_admitted = False
        self._is_over = False
        self._entry = Entry()
        self._request: InferenceRequest | None = None
        self._pick: Pick | None = None
        self._is_stream = False
        self._course: Course | None = None
        self._asked: Asked | None = None
        self._headers: dict[bytes, bytes] = {}
        self._started_ms = 0.0
        self._status, self._code = 499, "client_gone"
        self._end = AttemptEnd.CLIENT_GONE
        self._cached_tokens: int | None = None

    # -- what the proxy tells --------------------------------------------------------------------

    async def begin(self, asked: Asked) -> Send | Said:
        try:
            return await self._begin(asked)
        except (GatewayError, ValueError) as error:
            known = error if isinstance(error, GatewayError) else ClientError(UNREADABLE)
            return self._refuse(known)
        except Exception as error:  # noqa: BLE001 - ends one request, logged and counted
            return self._refuse(self._front.bug(error, self._entry.request_id))

    def headed(self, status: int, fields: Fields) -> Headed | Said:
        request, pick = self._request, self._pick
        if request is None or pick is None:  # an answer of ours, on its way through the proxy
            return Headed(put=(), drop=(), wants_body=False)
        objection = self._front.objection(request)
        if objection is not None:
            return self._refuse(objection)
        told = dict(fields)
        if _CARRIED not in told:
            return self._not_carried(status)
        self._status, self._code = status, ""
        if status >= 500:
            self._end = AttemptEnd.WORKER_FAILED
        else:
            self._end = AttemptEnd.UNHEARD if status < 300 else AttemptEnd.COMPLETE
        request.has_begun = True
        if told.get(PULLED):
            self._front.line.picker.pulled(pick, told[PULLED])
        if status < 300 and not self._is_stream:
            self._front.line.picker.first_byte(pick)
        drop = [name for name, _ in fields if name.startswith(b"x-trunkline-")]
        return Headed(
            put=own_fields(request, pick),
            drop=(*(name.decode("latin-1") for name in drop), SERVED_HEADER),
            wants_body=status < 300 and not self._is_stream,
        )

    def whole(self, body: bytes) -> Said | None:
        request = self._request
        if request is None:
            return None
        objection = self._front.objection(request)
        if objection is not None:
            return self._refuse(objection)
        self._end = AttemptEnd.COMPLETE
        if request.route.tells_reuse:
            self._cached_tokens = cached_tokens_in(body)
        return None

    def over(self) -> None:
        """The proxy has nothing more to say of it."""
        self._is_over = True
        pick, self._pick = self._pick, None
        front = self._front
        worker = "" if pick is None else str(pick.worker)
        if pick is not None:
            if self._course is not None:
                self._course.attempt_over(self._end)
            if self._end is AttemptEnd.WORKER_FAILED or self._end is AttemptEnd.WORKER_LATE:
                front.line.counters.worker_failures += 1
            try:
                front.line.picker.ended(pick, self._end, self._cached_tokens)
            except Exception as error:  # noqa: BLE001 - nobody is left to be told
                front.bug(error, self._entry.request_id)
        request, self._request = self._request, None
        if request is not None:
            front.line.counters.active_requests -= 1
            front.end(self._entry.principal)
            self._places.end(self._entry.principal)
            if self._course is not None:
                self._course.over(None, is_whole=False)
        if self._is_admitted:
            self._is_admitted = False
            front.forget(self)
            front.counters.count_request(self._entry.route_name, self._status)
            self._log(worker)

    # -- what the front asks of everybody that is open -------------------------------------------

    def check(self, now_s: float) -> None:
        """The proxy has the time-outs; not those that a client wished for itself, nor the end of a
        worker's last answers.
        """
        request = self._request
        if request is None:
            return
        is_late = not request.has_begun and past(request.deadline, self._front.now_ms())
        if is_late or dismissed(self._pick) is not None:
            self._cut()

    def close_if_idle(self) -> None:
        """It never is."""

    def stop(self, error: GatewayError) -> None:
        self._cut()

    def abort(self) -> None:
        self._cut()

    def fence(self) -> bool:
        """The epochs moved: have the proxy cut the answer, if it has to end; whether it had."""
        if self._request is None or self._front.objection(self._request) is None:
            return False
        self._cut()
        return True

    # -- inside ----------------------------------------------------------------------------------

    async def _begin(self, asked: Asked) -> Send | Said:
        front = self._front
        self._asked, self._started_ms = asked, front.now_ms()
        entry = self._entry
        entry.begin(front.new_request_id())
        self._is_admitted = True
        has_room = front.admit(self)
        if front.is_draining or not has_room:
            raise NoWorker("the gateway is shutting down" if has_room else "too many connections")
        head = self._head(asked)
        route = entry.settle(
            front, head, asked.source, has_body=bool(asked.body), name_chars=KEPT_NAME_CHARS
        )
        if len(asked.body) > front.limits.max_payload_size:
            text = f"the body has more than {front.limits.max_payload_size} bytes"
            raise ClientError(Refusal(status=413, code="payload_too_large", message=text))
        if isinstance(route, Local):
            return self._said(front.local_answer(route, entry.principal, head))
        is_held = self._places.is_full(entry.principal, self._places.taken, self._streams)
        if is_held or front.is_full(entry.principal):
            raise Busy("too many requests are in flight")
        front.counters.request_bytes += len(asked.body)
        request = front.intake.request(head, route, asked.body, entry.request_id)
        front.admit_request(entry.principal, head.headers, request, asked.source)
        if entry.trace is not None:
            entry.trace.admitted(request)
        front.begin(entry.principal)
        self._places.begin(entry.principal)
        front.line.counters.active_requests += 1
        self._request, self._course = request, Course(front.line, request)
        # What is streamed, and when, is not seen here: the head of an answer tells nothing of its
        # first token, as with one that comes whole.
        self._is_stream, request.is_stream = request.is_stream, False
        pick = await self._chosen(request, asked.among)
        if self._is_over:
            front.line.picker.ended(pick, AttemptEnd.CLIENT_GONE, None)
            raise NoWorker("nobody waits for it any more")
        self._pick = pick
        self._course.picked(pick)
        return self._send(head, request, pick)

    def _head(self, asked: Asked) -> RequestHead:
        """As a client of our own would have sent it. Raises ClientError."""
        limits = self._front.limits
        lines = b"".join(b"%b: %b\r\n" % one for one in asked.fields if one[0] != b"host")
        first = b"%b %b HTTP/1.1\r\nhost: %b\r\n"
        raw = first % (asked.method.encode("ascii"), asked.target, asked.authority)
        head = parse_request(raw + lines + b"\r\n", limits.max_headers, limits.max_header_bytes)
        self._headers = head.headers
        return head

    async def _chosen(self, request: InferenceRequest, among: frozenset[str] | None) -> Pick:
        """Raises GatewayError, ValueError. What it picked and did not take is given back."""
        line = self._front.line
        tried: frozenset[WorkerId] = frozenset()
        if among is not None:
            listed = self._workers()
            tried = frozenset(worker for worker, at in listed if _address(at) not in among)
        for _ in range(MAX_CHOICES):
            choice = line.picker.pick(request, tried)
            pick = choice if isinstance(choice, Pick) else await choice
            objection = line.objection(request)
            if objection is None and not line.is_current(request):
                line.picker.ended(pick, AttemptEnd.CLIENT_GONE, None)
                line.renew(request)  # it waited, and the epochs were raised meanwhile
                continue
            if objection is None and _address(pick.endpoint):
                return pick
            line.picker.ended(pick, AttemptEnd.CLIENT_GONE, None)
            if objection is not None and not objection.retryable:
                raise objection
            if objection is not None:
                request.grant = request.grant.unshared()
                continue
            observe.log.warning(
                "proxy.cannot_reach", worker=pick.worker, remedy="name it by http:// and an IP"
            )
            tried |= {pick.worker}
        raise NoWorker("no worker that the proxy can reach is usable")

    def _send(self, head: RequestHead, request: InferenceRequest, pick: Pick) -> Send:
        endpoint = pick.endpoint
        put = [
            (ENDPOINT_HEADER, _address(endpoint)),
            (":authority", endpoint.host_header),
            (":path", f"{endpoint.base_path}{request.path}"),
            ("x-request-id", request.request_id),
            *pick.headers,
        ]
        if request.trace is not None:
            put += fields_in(request.trace.lines)
        if endpoint.api_key:
            put.append(("authorization", f"Bearer {endpoint.api_key}"))
        if pick.body or request.method != "GET":
            put.append(("content-length", str(len(pick.body))))
            if b"content-type" not in head.headers:
                put.append(("content-type", "application/json"))
        kept = {name for name, _ in put} | {name.decode() for name in FORWARDED | _LEFT_BY_PROXY}
        theirs = [name.decode("latin-1") for name in head.headers]
        drop = [name for name in theirs if name not in kept]
        return Send(
            endpoint=_address(endpoint),
            put=tuple(put),
            drop=(*drop, SUBSET_HEADER, SERVED_HEADER),
            body=pick.body,
        )

    def _not_carried(self, status: int) -> Said:
        """The proxy answers in place of the worker: it could not reach it, or waited too long."""
        is_late = status in (408, 504)
        self._end = AttemptEnd.WORKER_LATE if is_late else AttemptEnd.WORKER_FAILED
        if is_late:
            return self._refuse(WorkerTimeout("the worker did not answer in time"))
        return self._refuse(WorkerLost("the worker could not be reached, or broke off"))

    def _refuse(self, error: GatewayError) -> Said:
        entry = self._entry
        made = failed(error, entry.request_id, is_anthropic=entry.is_anthropic)
        answer = with_methods(made, entry.route)
        self._front.counters.count_refusal(answer.code)
        return self._said(answer)

    def _said(self, answer: Answer) -> Said:
        self._status, self._code = answer.status, answer.code
        answer = self._front.browsers.marked(answer, self._headers)
        put = fields_of(answer, self._entry.request_id)
        return Said(status=answer.status, put=put, body=answer.body)

    def _log(self, worker: str) -> None:
        asked, front, trace = self._asked, self._front, self._entry.trace
        if asked is None or not front.wants_record(trace):
            return
        front.finished(
            AccessRecord(
                request_id=self._entry.request_id,
                client_request_id=self._entry.client_id,
                trace_id="" if trace is None else trace.trace_id,
                method=asked.method,
                path=asked.target.partition(b"?")[0][:128].decode("ascii", "replace"),
                status=self._status,
                code=self._code,
                worker=worker,
                attempts=0 if self._course is None else self._course.attempts,
                request_bytes=len(asked.body),
                answer_bytes=0,
                ttft_ms=None,
                duration_ms=front.now_ms() - self._started_ms,
            ),
            trace,
        )


def _address(endpoint: Endpoint) -> str:
    """As the endpoint-picker protocol names a worker; empty for one that has no such name."""
    if endpoint.tls is not None:
        return ""
    try:
        ip = ipaddress.ip_address(endpoint.host)
    except ValueError:
        return ""
    return f"[{ip}]:{endpoint.port}" if ip.version == 6 else f"{ip}:{endpoint.port}"
