"""Traces: which requests are recorded, what their workers are told, and the spans they become.

The data plane writes down a few numbers of a request that is recorded, and hands them over when it
is over; the spans are made of them elsewhere (`spans_of`, on the exporter's thread). A request that
is not recorded costs a look at its head. Must never: hold a prompt, an answer or a credential, wait
for anybody, or name a tenant unless the settings say so. Read `trace_context.py` for what is taken
from clients, `span_queue.py` for what becomes of the spans.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from trunkline.core.principals import Principal
from trunkline.core.records import WallTime
from trunkline.core.transfer import PullEnd
from trunkline.gateway.contracts import AttemptEnd, InferenceRequest, Pick, Route
from trunkline.gateway.counters import AccessRecord
from trunkline.gateway.head import AnswerHead
from trunkline.gateway.told import read_told
from trunkline.gateway.trace_context import Parent, lines, parent_in
from trunkline.ports.spans import Span, SpanKind

MAX_NAME_CHARS = 128
"""Of a model, in a trace; a client may ask for one with any name."""
TenantNames = Literal["hash", "name", "none"]
_OPERATIONS = {
    Route.CHAT: "chat",
    Route.MESSAGES: "chat",
    Route.COMPLETION: "text_completion",
}


@dataclass(slots=True, kw_only=True)
class AttemptRecord:
    """What is written down of one attempt."""

    span_id: str
    worker: str
    host: str
    port: int
    began_ms: float
    ended_ms: float = 0.0
    end: str = ""
    status: int = 0
    pulled: bytes = b""
    """What its worker said of a pull."""
    pull_id: str = ""


@dataclass(slots=True, kw_only=True)
class Record:
    """What is written down of one request, until it is over."""

    span_id: str
    parent_id: str
    began_ms: float
    route: Route
    model: str = ""
    is_stream: bool = False
    max_tokens: int | None = None
    usage: dict[str, int] = field(default_factory=dict[str, int])
    """As the engine told it: prompt, completion and cached tokens."""
    attempts: list[AttemptRecord] = field(default_factory=list[AttemptRecord])
    tenant: str = ""
    ended_ms: float = 0.0
    ended_at: WallTime = WallTime(0.0)
    access: AccessRecord | None = None


class Trace:
    """One request's place in a trace."""

    __slots__ = ("_tracer", "lines", "record", "state", "trace_id")

    def __init__(
        self, tracer: Tracer, trace_id: str, state: bytes, told: bytes, record: Record | None
    ) -> None:
        self._tracer = tracer
        self.trace_id = trace_id
        self.state = state
        self.lines = told
        """What the worker is told that is asked now."""
        self.record = record
        """None where no spans are made of it."""

    def admitted(self, request: InferenceRequest) -> None:
        """It is known what is asked, and that it may be."""
        request.trace = self
        if (record := self.record) is not None:
            record.model = request.model[:MAX_NAME_CHARS]
            record.is_stream, record.max_tokens = request.is_stream, request.max_tokens
            record.tenant = self._tracer.tenant_name(request.grant.principal)

    def picked(self, pick: Pick, now_ms: float) -> None:
        """An attempt begins; its worker's spans hang below it."""
        if self.record is None:
            return
        span_id, endpoint = self._tracer.new_id(), pick.endpoint
        attempt = AttemptRecord(
            span_id=span_id, worker=pick.worker, host=endpoint.host, port=endpoint.port,
            began_ms=now_ms,
        )  # fmt: skip
        self.record.attempts.append(attempt)
        self.lines = lines(self.trace_id, span_id, self.state, is_sampled=True)

    def headed(self, head: AnswerHead) -> None:
        """The attempt's worker began to answer."""
        if self.record is not None:
            attempt = self.record.attempts[-1]
            attempt.status = head.status
            if head.pulled:
                attempt.pulled, attempt.pull_id = head.pulled, self._tracer.new_id()

    def attempt_over(self, end: AttemptEnd, now_ms: float) -> None:
        if self.record is not None:
            attempt = self.record.attempts[-1]
            attempt.end, attempt.ended_ms = end.value, now_ms

    def used(self, usage: Mapping[str, int]) -> None:
        """What the engine says of tokens."""
        if self.record is not None:
            self.record.usage.update(usage)


class Tracer:
    """Who decides what is traced. One a gateway."""

    def __init__(
        self,
        *,
        dice: random.Random,
        now_ms: Callable[[], float],
        wall: Callable[[], WallTime],
        sink: Callable[[Trace], None] | None,
        sample_ratio: float = 1.0,
        begins: bool = False,
        tenant_names: TenantNames = "hash",
    ) -> None:
        """Without a `sink` nothing is recorded: what comes is passed on, and where it `begins` some
        a trace of its own is given to what comes without.
        """
        self._dice = dice
        self._now_ms = now_ms
        self._wall = wall
        self._sink = sink
        self._sample_ratio = sample_ratio
        self._begins = begins or sink is not None
        self._tenant_names: TenantNames = tenant_names

    def new_id(self) -> str:
        return f"{self._dice.getrandbits(64) or 1:016x}"

    def begin(self, headers: Mapping[bytes, bytes], route: Route) -> Trace | None:
        """The place of a request with this head; None where it has none."""
        if not self._begins and b"traceparent" not in headers:
            return None
        parent = parent_in(headers)
        if parent is None and not self._begins:
            return None
        if parent is None:
            trace_id = f"{self._dice.getrandbits(128) or 1:032x}"
            is_sampled = self._dice.random() < self._sample_ratio
            parent = Parent(trace_id=trace_id, span_id="", is_sampled=is_sampled, state=b"")
        if self._sink is None or not parent.is_sampled:
            above = parent.span_id or self.new_id()
            told = lines(parent.trace_id, above, parent.state, is_sampled=parent.is_sampled)
            return Trace(self, parent.trace_id, parent.state, told, None)
        record = Record(
            span_id=self.new_id(), parent_id=parent.span_id, began_ms=self._now_ms(), route=route
        )
        return Trace(self, parent.trace_id, parent.state, b"", record)

    def tenant_name(self, principal: Principal) -> str:
        """What a trace calls a caller's tenant; empty for nothing."""
        how, tenant = self._tenant_names, principal.tenant
        if how == "none" or principal.auth_method == "off":
            return ""
        if how == "name":
            return tenant
        digest = hashlib.blake2b(tenant.encode("utf-8"), digest_size=8, person=b"trace tenant")
        return digest.hexdigest()

    def end(self, trace: Trace, access: AccessRecord) -> None:
        """The request is over; its record goes to the sink."""
        record = trace.record
        if record is None or self._sink is None:
            return
        record.access, record.ended_ms = access, self._now_ms()
        record.ended_at = self._wall()
        self._sink(trace)


def spans_of(trace: Trace) -> list[Span]:
    """The spans of a request that is over: its own, one for each attempt, one for each pull."""
    record = trace.record
    assert record is not None, "spans of what was not recorded"
    assert record.access is not None, "spans of a request that is not over"

    def at(ms: float) -> WallTime:
        return WallTime(record.ended_at - (record.ended_ms - ms) / 1_000.0)

    access = record.access
    spans = [
        Span(
            name=f"{_OPERATIONS.get(record.route, access.method)} {record.model}".rstrip(),
            kind=SpanKind.SERVER,
            trace_id=trace.trace_id,
            span_id=record.span_id,
            parent_id=record.parent_id,
            is_parent_remote=True,
            began=at(record.began_ms),
            ended=record.ended_at,
            attributes=_attributes(record, access),
            error=access.code if access.status >= 500 else "",
        )
    ]
    for number, attempt in enumerate(record.attempts, 1):
        spans += _attempt_spans(trace, record, attempt, number, at)
    return spans


def _attributes(record: Record, access: AccessRecord) -> dict[str, str | int | float | bool]:
    """In the words of OpenTelemetry where it has some."""
    found: dict[str, str | int | float | bool | None] = {
        "gen_ai.operation.name": _OPERATIONS.get(record.route),
        "gen_ai.provider.name": "trunkline",
        "gen_ai.request.model": record.model or None,
        "gen_ai.request.max_tokens": record.max_tokens,
        "gen_ai.request.stream": record.is_stream,
        "gen_ai.usage.input_tokens": record.usage.get("prompt"),
        "gen_ai.usage.output_tokens": record.usage.get("completion"),
        "gen_ai.usage.cache_read.input_tokens": record.usage.get("cached"),
        "gen_ai.response.time_to_first_chunk": None
        if access.ttft_ms is None
        else access.ttft_ms / 1_000.0,
        "http.request.method": access.method,
        "url.path": access.path,
        "http.response.status_code": access.status,
        "error.type": access.code or None,
        "trunkline.request_id": access.request_id,
        "trunkline.attempts": access.attempts,
        "trunkline.worker": access.worker or None,
        "trunkline.tenant": record.tenant or None,
    }
    return {name: value for name, value in found.items() if value is not None}


def _attempt_spans(
    trace: Trace,
    record: Record,
    attempt: AttemptRecord,
    number: int,
    at: Callable[[float], WallTime],
) -> list[Span]:
    ended_ms = attempt.ended_ms or record.ended_ms
    is_good = attempt.end in ("", AttemptEnd.COMPLETE.value, AttemptEnd.CLIENT_GONE.value)
    attributes: dict[str, str | int | float | bool] = {
        "server.address": attempt.host,
        "server.port": attempt.port,
        "trunkline.worker": attempt.worker,
        "trunkline.attempt": number,
        "trunkline.end": attempt.end,
    }
    if attempt.status:
        attributes["http.response.status_code"] = attempt.status
    spans = [
        Span(
            name=f"attempt {attempt.worker}",
            kind=SpanKind.CLIENT,
            trace_id=trace.trace_id,
            span_id=attempt.span_id,
            parent_id=record.span_id,
            began=at(attempt.began_ms),
            ended=at(ended_ms),
            attributes=attributes,
            error="" if is_good else attempt.end,
        )
    ]
    pull = _pull_span(trace, attempt, ended_ms, at)
    return spans if pull is None else [*spans, pull]


def _pull_span(
    trace: Trace, attempt: AttemptRecord, ended_ms: float, at: Callable[[float], WallTime]
) -> Span | None:
    """What its worker said of a pull; None where it said nothing that can be read."""
    told = read_told(attempt.pulled) if attempt.pulled else None
    if told is None:
        return None
    end_ms = min(attempt.began_ms + max(0.0, told.ms), ended_ms)
    reason = "" if told.reason is None else told.reason.value
    return Span(
        name="pull",
        kind=SpanKind.INTERNAL,
        trace_id=trace.trace_id,
        span_id=attempt.pull_id,
        parent_id=attempt.span_id,
        began=at(attempt.began_ms),
        ended=at(end_ms),
        attributes={
            "trunkline.pull.end": told.end.value,
            "trunkline.pull.blocks": told.blocks,
            "trunkline.pull.ms": told.ms,
            **({"trunkline.pull.reason": reason} if reason else {}),
        },
        error="" if told.end is PullEnd.PUBLISHED else told.end.value,
    )
