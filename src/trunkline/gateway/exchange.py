"""One request's life: attempts on workers, the answer's passage, deadlines, and the books.

Owns the order of things: pick, connect, send, relay, end. Each pick is ended exactly once, by
whichever of the worker, the client and the deadline comes first; afterwards late bytes find nobody.
A further attempt is made while the client has seen nothing, and where a stream can go on from
another worker. Must never touch a body. Read `attempt.py`, `relay.py` and `resumption.py`.

    PICKING ─► CONNECTING ─► WAITING ─► ANSWERING ─► DONE
       ▲           │            │           │
       └─PAUSING◄──┴────────────┘           └─ broken: error event or cut
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from trunkline import observe
from trunkline.core.records import WorkerId
from trunkline.errors import GatewayError, WorkerLost, WorkerTimeout
from trunkline.gateway.answers import UNREADABLE
from trunkline.gateway.attempt import Attempt
from trunkline.gateway.choice import Choice
from trunkline.gateway.continuation import Continuation
from trunkline.gateway.contracts import AttemptEnd, ClientError, InferenceRequest, Pick
from trunkline.gateway.course import Course
from trunkline.gateway.deadline import past
from trunkline.gateway.framing import BrokenFraming
from trunkline.gateway.head import AnswerHead, BrokenAnswer
from trunkline.gateway.line import CLOSE, KEEP, RESET, ClientSide, Ending, Line, Result
from trunkline.gateway.mending import Mending, Passage
from trunkline.gateway.patience import dismissed, lateness, moved
from trunkline.gateway.phases import ANSWERING, DONE, PAUSING, PICKING, WAITING, Phase, overdue
from trunkline.gateway.relay import Relay, own_lines, rewrite
from trunkline.gateway.retry import backoff_ms
from trunkline.gateway.upstream import WorkerConnection

# In Python 3.11 a member costs 50 ns more where it is looked up in its class.
COMPLETE, CLIENT_GONE = AttemptEnd.COMPLETE, AttemptEnd.CLIENT_GONE
WORKER_FAILED, WORKER_LATE = AttemptEnd.WORKER_FAILED, AttemptEnd.WORKER_LATE
_RETRYABLE = frozenset({502, 503, 504})


class Exchange:
    """See the module. Worker connections call `received` and `lost`, the client's all the rest."""

    __slots__ = (
        "_asked", "_attempt", "_choice", "_client", "_course", "_first_error",
        "_has_first_token", "_has_moved", "_headers", "_held", "_is_link_reusable", "_line",
        "_link", "_mending", "_pause", "_phase", "_pick", "_pieces", "_relay", "_request",
        "_status", "_timed_from_s", "_tried", "_worker",
    )  # fmt: skip

    def __init__(
        self,
        line: Line,
        client: ClientSide,
        request: InferenceRequest,
        headers: dict[bytes, bytes],
    ) -> None:
        self._line = line
        self._client = client
        self._request = request
        self._mending = Mending(line, request)
        self._asked = request
        """What the worker was asked whose turn it is."""
        self._headers = headers
        self._phase: Phase = PICKING
        self._tried: frozenset[WorkerId] = frozenset()
        self._course = Course(line, request)
        self._pick: Pick | None = None
        self._choice: Choice | None = None
        self._worker = ""
        self._attempt: Attempt | None = None
        """Until its answer has begun; from then on there is a link instead."""
        self._link: WorkerConnection | None = None
        self._held: tuple[WorkerConnection, AnswerHead, bytes] | None = None
        self._relay: Passage | None = None
        self._pause: asyncio.TimerHandle | None = None
        self._first_error: GatewayError | None = None
        self._is_link_reusable = False
        self._has_moved = False
        self._pieces = 0
        """Since the last check; looked into only until one is a token, which a comment is not."""
        self._has_first_token = False
        self._status = 0
        self._timed_from_s = line.now_s()

    def start(self) -> None:
        self._line.counters.active_requests += 1
        self._line.budget.count_request(self._timed_from_s)
        self._next_attempt()

    # -- attempts --------------------------------------------------------------------------------

    def _next_attempt(self) -> None:
        self._pause = None
        self._phase = PICKING
        self._timed_from_s = self._line.now_s()
        try:
            try:
                self._mending.renew(is_first=self._course.attempts == 0)
                choice = self._line.picker.pick(self._mending.asked, self._tried)
            except (GatewayError, ValueError) as error:
                self._no_pick(error)
                return
            if isinstance(choice, Pick):
                self._picked(choice)
            else:
                self._choice = Choice(self._line, choice, self._chosen)
        except Exception as error:  # noqa: BLE001 - ends one request, logged and counted
            self.bug(error)

    def _chosen(self, outcome: Pick | Exception) -> None:
        """What came of a choice that took its time."""
        self._choice = None
        try:
            if isinstance(outcome, Pick):
                self._picked(outcome)
            elif isinstance(outcome, GatewayError | ValueError):
                self._no_pick(outcome)
            else:
                self.bug(outcome)
        except Exception as error:  # noqa: BLE001 - ends one request, logged and counted
            self.bug(error)

    def _drop_choice(self) -> None:
        choice, self._choice = self._choice, None
        if choice is not None:
            choice.drop()

    def _no_pick(self, error: GatewayError | ValueError) -> None:
        if self._held is not None:
            link, head, body = self._held
            self._held = None
            self._answer(link, head, body)
        elif self._first_error is not None:
            self._refuse(self._first_error)
        elif isinstance(error, GatewayError):
            self._refuse(error)
        else:
            self._refuse(ClientError(UNREADABLE))

    def _picked(self, pick: Pick) -> None:
        assert self._pick is None, "a pick before the last one ended"
        self._drop_held()
        self._pick = pick
        self._worker = pick.worker
        self._course.picked(pick)
        self._tried |= {pick.worker}
        self._has_first_token = False
        try:
            self._mending.picked(pick)
        except GatewayError as error:
            self._end_early(error)
            return
        asked = self._asked = self._mending.asked
        self._attempt = Attempt(self._line, self, self._client, asked, self._headers, pick)
        self._attempt.start()

    # -- what an attempt tells -------------------------------------------------------------------

    def stands_at(self, phase: Phase) -> None:
        self._phase = phase
        self._timed_from_s = self._line.now_s()

    def overtaken(self) -> None:
        """It was salted under epochs that were raised while a connection was made."""
        assert self._pick is not None, "overtaken without an attempt"
        self._attempt = None
        self._tried -= {self._pick.worker}
        self._end_attempt(CLIENT_GONE, None)
        self._next_attempt()

    def objected(self, objection: GatewayError) -> None:
        """Nothing of this attempt may go out any more. Where only reuse is in doubt and nothing has
        gone out, it is computed anew without.
        """
        if self._relay is not None or not objection.retryable:
            self._end_early(objection)
            return
        self._request.grant = self._request.grant.unshared()
        if self._choice is not None:
            self._drop_held()
            return  # the choice is still to come, and will be made under this grant
        self._drop_link()
        self._tried -= {self._pick.worker} if self._pick else set()
        self._end_attempt(CLIENT_GONE, None)
        self._retry_later()

    def failed(self, error: GatewayError) -> None:
        """Nothing of this attempt has reached the client."""
        self._drop_link()
        self._first_error = error
        self._end_attempt(_end_by(error), None)
        if error.retryable and self._may_retry():
            self._retry_later()
        else:
            self._refuse(error)

    def headed(self, link: WorkerConnection, head: AnswerHead, body: bytes) -> None:
        self._attempt = None
        self._course.headed(head)
        if head.pulled:
            self._tell(self._pick, lambda pick: self._line.picker.pulled(pick, head.pulled))
        has_seam = self._mending.has_seam
        if has_seam and not Continuation.takes(head):
            link.abort()
            self.failed(WorkerLost(f"the worker answered {head.status} to the rest of a stream"))
            return
        if not has_seam and head.status in _RETRYABLE and self._may_retry():
            # The worker's own words are kept: they are the answer if there is no other worker.
            link.pause()
            self._held = (link, head, body)
            self._first_error = WorkerLost(f"the worker answered {head.status}")
            self._end_attempt(WORKER_FAILED, None)
            self._retry_later()
            return
        self._answer(link, head, body)

    def bug(self, error: Exception) -> None:
        """An error that nobody foresaw ends this request alone, and with an answer."""
        self._count_bug(error)
        if self._phase is not DONE:
            self._end_early(GatewayError("the gateway failed to serve this request"))

    # -- the worker's side -----------------------------------------------------------------------

    def received(self, data: bytes) -> None:
        """Bytes of the worker whose turn it is, behind the head of its answer."""
        relay = self._relay
        try:
            if (objection := self._line.objection(self._asked)) is not None:
                self.objected(objection)
                return
            assert relay is not None, "an answer that nobody passes on"
            self._pieces += 1
            if not self._has_moved and (not relay.is_events or b"data:" in data):
                self._has_moved = True
                if not self._has_first_token:
                    self._first_token()
            if relay.pass_on(data):
                self._answered()
        except (BrokenAnswer, BrokenFraming) as error:
            self._broken(WorkerLost(str(error)))
        except Exception as error:  # noqa: BLE001 - ends one request, logged and counted
            self.bug(error)

    def lost(self, error: Exception | None) -> None:
        """The worker's connection ended."""
        if self._relay is None:
            return  # an answer that is held; `_answer` sees that the connection is gone
        self._link = None
        if error is None and self._relay.end_of_worker():
            self._answered()
        else:
            self._broken(WorkerLost("the worker went away in the middle of its answer"))

    def _answer(self, link: WorkerConnection, head: AnswerHead, body: bytes) -> None:
        client, before = self._client, self._relay
        self.stands_at(ANSWERING)
        self._has_moved, self._pieces = False, 0
        self._link = link
        self._status = head.status
        self._is_link_reusable = head.keeps_alive
        relay = self._relay = self._mending.passage(client, head, before)
        pick = self._pick
        try:
            out = b""
            if isinstance(relay, Relay):
                is_told = pick is not None and pick.decision_header
                own = own_lines(self._request, pick, self._course.told() if is_told else "")
                out = rewrite(head, relay, own, closes=client.closes)
            is_over = relay.begin(out, body)
        except (BrokenAnswer, BrokenFraming) as error:
            self._relay = before  # nothing was written yet
            failed = self.failed if before is None else self._broken
            failed(WorkerLost(str(error)))
            return
        self._mending.asked.has_begun = True
        if not relay.is_events or b"data:" in body:
            self._first_token()
        if is_over:
            self._answered()
        elif not link.is_open:
            self.lost(None)
        elif pick is None and not client.is_paused:
            link.resume()

    def _first_token(self) -> None:
        self._has_first_token = True
        self._has_moved, self._pieces = False, 0
        self._timed_from_s = self._line.now_s()
        if self._status >= 300 or self._pick is None:
            return
        self._course.first_token()
        self._tell(self._pick, self._line.picker.first_byte)

    def _tell(self, pick: Pick | None, what: Callable[[Pick], None]) -> None:
        """The picker hears of an attempt, if there is one."""
        try:
            if pick is not None:
                what(pick)
        except Exception as error:  # noqa: BLE001 - a wrong book is no reason to cut an answer
            self._count_bug(error)

    # -- ends ------------------------------------------------------------------------------------

    def _may_retry(self) -> bool:
        return self._line.may_retry(self._mending.asked, self._course.attempts)

    def _retry_later(self) -> None:
        self._phase = PAUSING
        self._timed_from_s = self._line.now_s()
        pause_ms = backoff_ms(self._line.retry, self._course.attempts - 1, self._line.dice)
        self._pause = self._line.call_later(pause_ms / 1_000.0, self._next_attempt)

    def _answered(self) -> None:
        """The answer went through whole."""
        relay, link = self._relay, self._link
        assert relay is not None, "answered without a relay"
        self._link = None
        if link is not None:
            link.release(is_reusable=self._is_link_reusable and relay.leaves_link_clean)
        is_good = self._status < 500
        tells_reuse = self._status < 300 and self._request.route.tells_reuse
        cached = relay.cached_tokens() if tells_reuse else None
        self._end_attempt(COMPLETE if is_good else WORKER_FAILED, cached)
        ending = CLOSE if relay.ends_by_closing else KEEP
        self._finish(self._status, "", ending)

    def _broken(self, error: GatewayError) -> None:
        """The worker of an answer that has begun failed: it goes on elsewhere, or ends here."""
        self._drop_link()
        self._end_attempt(_end_by(error), None)
        if not self._goes_on(error):
            self._break_off(error)

    def _goes_on(self, error: GatewayError) -> bool:
        """Whether the stream goes on from another worker, or was all there but for its end."""
        relay = self._relay
        assert relay is not None, "broken without a relay"
        seam = self._mending.seam_behind(relay)
        if seam is None:
            return False
        if seam.request is None:
            self._relay = self._mending.end(self._client, seam, relay)
            self._finish(self._status, "", KEEP)
            return True
        if not self._line.may_retry(seam.request, self._course.attempts):
            return False
        self._mending.go_on(seam, seam.request)
        self._first_error = error
        self._retry_later()
        return True

    def _break_off(self, error: GatewayError) -> None:
        """The answer cannot be finished; its client is told."""
        relay = self._relay
        assert relay is not None, "broken without a relay"
        self._drop_link()
        self._line.counters.broken_streams += 1
        event = self._mending.error_event(error, relay)
        if relay.break_off(event):
            # A message that ended as it should keeps the connection: the client may have sent its
            # next request already, and would lose it.
            ending = KEEP if relay.is_chunked_out else CLOSE
        else:
            ending = RESET if relay.ends_by_closing else CLOSE
        self._finish(self._status, error.code, ending)

    def client_gone(self) -> None:
        """The client left. The worker is told at once, by closing, and is not blamed."""
        if self._phase is DONE:
            return
        self._drop_link()
        self._end_attempt(CLIENT_GONE, None)
        self._finish(499, "client_gone", CLOSE)

    def fence(self) -> bool:
        """What it was admitted under may have changed: end it if it has to; whether it had."""
        objection = self._mending.objection()
        if objection is None or self._phase is DONE:
            return False
        self.objected(objection)
        return True

    def stop(self, error: GatewayError) -> None:
        """The gateway ends it: a shutdown whose grace is over."""
        if self._phase is not DONE:
            self._end_early(error)

    def _end_early(self, error: GatewayError) -> None:
        """End with an error that is not the worker's."""
        self._drop_link()
        self._end_attempt(CLIENT_GONE, None)
        self._refuse(error)

    def _count_bug(self, error: Exception) -> None:
        self._line.counters.bugs += 1
        named = {"request_id": self._request.request_id, "trace_id": self._request.trace_id}
        observe.log.error("exchange.bug", cause=error, **named, worker=self._worker)

    def _refuse(self, error: GatewayError) -> None:
        """End with an error: as the whole answer, or as the end of one that has begun."""
        if self._relay is not None:
            self._break_off(error)
            return
        self._drop_link()
        status = self._client.refuse(error)
        code = error.refusal.code if isinstance(error, ClientError) else error.code
        self._finish(status, code, KEEP)

    def _finish(self, status: int, code: str, ending: Ending) -> None:
        assert self._pick is None, "an exchange finished with an open attempt"
        assert self._phase is not DONE, "an exchange finished twice"
        self._phase = DONE
        self._drop_choice()
        self._line.counters.active_requests -= 1
        answer_bytes = self._course.over(self._relay, is_whole=status < 300 and not code)
        self._client.exchange_over(
            Result(
                status=status, code=code, worker=self._worker, attempts=self._course.attempts,
                answer_bytes=answer_bytes, ttft_ms=self._course.ttft_ms, ending=ending,
            )
        )  # fmt: skip

    def _end_attempt(self, end: AttemptEnd, cached_tokens: int | None) -> None:
        pick, self._pick = self._pick, None
        if pick is None:
            return
        self._course.attempt_over(end)
        if end is WORKER_FAILED or end is WORKER_LATE:
            self._line.counters.worker_failures += 1
        self._tell(pick, lambda pick: self._line.picker.ended(pick, end, cached_tokens))

    def _drop_link(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        self._drop_held()
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.drop()
        link, self._link = self._link, None
        if link is not None:
            link.abort()

    def _drop_held(self) -> None:
        if self._held is not None:
            self._held[0].abort()
            self._held = None

    # -- the client's pace, and deadlines --------------------------------------------------------

    def pause_worker(self) -> None:
        if (source := self._attempt or self._link) is not None:
            source.pause()

    def resume_worker(self) -> None:
        if (source := self._attempt or self._link) is not None:
            source.resume()

    def check(self, now_s: float) -> None:
        """Called a few times a second: ends what waits for too long."""
        if not self._has_first_token:
            late = past(self._mending.asked.deadline, self._line.now_ms())
            if late is not None:
                self._end_early(late)
                return
        is_answer_due = self._phase is ANSWERING or self._phase is WAITING
        waited_ms = (now_s - self._timed_from_s) * 1_000.0
        is_stream = self._relay is None or self._relay.is_events
        error: GatewayError | None = dismissed(self._pick)
        if error is None and (self._has_moved or (is_answer_due and self._client.is_paused)):
            if self._has_moved and is_stream:
                moved(self._pick, self._pieces, waited_ms, self._line.now_ms())
            self._has_moved, self._pieces = False, 0
            self._timed_from_s = now_s
            return
        if error is None:
            error = overdue(self._phase, waited_ms, self._line.upstream, self._line.retry)
        if error is None and is_answer_due and is_stream:
            error = lateness(self._pick, waited_ms, has_first_token=self._has_first_token)
        if error is None:
            return
        if self._phase is ANSWERING:
            self._broken(error)
        elif self._phase is PICKING:
            self._refuse(error)
        elif self._phase is PAUSING:
            if self._pause is not None:
                self._pause.cancel()
            self._next_attempt()
        else:
            self.failed(error)


def _end_by(error: GatewayError) -> AttemptEnd:
    return WORKER_LATE if isinstance(error, WorkerTimeout) else WORKER_FAILED
