"""How one exchange's answer goes on when its worker fails in the middle: what is asked then, and
what takes it to the client.

Owns what is asked now: the client's request, or what follows behind the last seam. A further
attempt for an answer that has not begun is made under what holds now; one that has begun goes on
under the very epochs that it began under, or not at all. Must never send anything. Read
`resumption.py` for what can go on, `exchange.py` for who asks.
"""

from __future__ import annotations

from trunkline import observe
from trunkline.errors import GatewayError
from trunkline.gateway.answers import error_event, numbered_error_event
from trunkline.gateway.continuation import Continuation
from trunkline.gateway.contracts import InferenceRequest, Pick, Route
from trunkline.gateway.head import AnswerHead
from trunkline.gateway.journal import read_journal
from trunkline.gateway.line import ClientSide, Line
from trunkline.gateway.relay import Relay
from trunkline.gateway.resumption import NotResumable, Resumption, is_same_namespace, resume
from trunkline.gateway.tenancy import Revoked
from trunkline.ports.tokenizer import Tokenizer

Passage = Relay | Continuation


class Mending:
    """See the module."""

    __slots__ = ("_count", "_line", "_request", "_seam", "_tokenizer", "_tokens", "asked")

    def __init__(self, line: Line, request: InferenceRequest) -> None:
        self._line = line
        self._request = request
        self._seam: Resumption | None = None
        self._count = 0
        self._tokenizer: Tokenizer | None = None
        self._tokens: int | None = None
        """Of a stream that was read and does not go on: who ends it need not read it once more."""
        self.asked = request
        """What workers are asked."""

    @property
    def has_seam(self) -> bool:
        """Whether a further attempt goes on with an answer that the client has a part of."""
        return self._seam is not None

    def renew(self, *, is_first: bool) -> None:
        """Before each choice of a worker. Raises GatewayError."""
        if self._seam is None:
            if not is_first:
                self._line.renew(self._request)
        elif self.objection() is not None or not self._line.is_current(self._request):
            raise _changed()

    def picked(self, pick: Pick) -> None:
        """A worker was chosen for what is asked. Raises GatewayError."""
        self._tokenizer = pick.tokenizer
        if self.asked is not self._request and not is_same_namespace(self._request, self.asked):
            raise _changed()

    def objection(self) -> GatewayError | None:
        """Why nothing may go out now: against the request, or against what goes on of it."""
        objection = self._line.objection(self._request)
        if objection is None and self._seam is not None:
            return self._line.objection(self.asked)
        return objection

    def seam_behind(self, passage: Passage) -> Resumption | None:
        """How the stream goes on behind what was passed on; None where it cannot, and the log says
        why.
        """
        if not self._request.route.can_resume:
            why = "its events are of another dialect"
        elif passage.forwarded is None:
            why = "not all of it was kept"
        elif self.objection() is not None or not self._line.is_current(self._request):
            why = "the epochs that it began under were raised"
        else:
            try:
                delivered = read_journal(passage.forwarded)
                self._tokens = delivered.tokens
                return resume(self._request, delivered, self._tokenizer, self._count + 1)
            except NotResumable as error:
                why = str(error)
        named = {"request_id": self._request.request_id, "trace_id": self._request.trace_id}
        observe.log.info("stream.not_resumable", **named, why=why)
        return None

    def go_on(self, seam: Resumption, request: InferenceRequest) -> None:
        """From here on this is asked, for what is behind the seam."""
        request.has_begun = False  # it will reuse once more, and needs a lease for that
        self._seam, self.asked, self._tokens = seam, request, None

    def passage(self, client: ClientSide, head: AnswerHead, before: Passage | None) -> Passage:
        """What takes an answer with this head to the client, behind what it has already."""
        request, retry = self._request, self._line.retry
        is_stream = request.is_stream and request.route.can_resume and head.status == 200
        most_bytes = retry.resume_buffer_bytes if is_stream and not retry.disable_retries else 0
        if self._seam is None or before is None:
            takes_chunks = client.takes_chunks
            return Relay(client, head, takes_chunks=takes_chunks, most_kept_bytes=most_bytes)
        seam, begun = self._seam, self._mended
        return Continuation(client, seam, before, most_kept_bytes=most_bytes, on_begun=begun)

    def end(self, client: ClientSide, seam: Resumption, before: Passage) -> Passage:
        """Let an answer end that lacked no more than its end."""
        last = Continuation(client, seam, before, most_kept_bytes=0, on_begun=self._mended)
        last.finish()
        return last

    def error_event(self, error: GatewayError, passage: Passage) -> bytes:
        """What ends an answer that cannot be finished."""
        request = self._request
        if request.route is Route.RESPONSES:
            assert isinstance(passage, Relay), "a response that went on elsewhere"
            return numbered_error_event(error, request.request_id, passage.next_number())
        is_anthropic, tokens = request.route.is_anthropic, self._tokens_delivered(passage)
        return error_event(error, request.request_id, tokens, is_anthropic=is_anthropic)

    def _tokens_delivered(self, passage: Passage) -> int:
        """As exactly as it can be told: by token ids, by events with text, by events."""
        if passage.forwarded is None:
            return passage.events_delivered
        return read_journal(passage.forwarded).tokens if self._tokens is None else self._tokens

    def _mended(self) -> None:
        """Something of it goes out: a worker whose first bytes are none of it mended nothing."""
        self._count += 1
        self._line.counters.resumed_streams += 1


def _changed() -> Revoked:
    return Revoked("the access that its answer began under has changed")
