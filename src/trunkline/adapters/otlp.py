"""Spans by OTLP over HTTP, with OpenTelemetry's own encoder and exporter (extra `otel`).

The SDK is used for what goes over the wire alone: its spans are made here of finished ones, on the
exporter's thread, so none of it is on the hot path. What the environment says to OpenTelemetry
(`OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_RESOURCE_ATTRIBUTES`, `OTEL_SERVICE_NAME`) counts as usual.
Must never be imported where no endpoint is set.
"""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from trunkline.ports import spans as ours

TIMEOUT_S = 5.0
"""Of one batch, attempts included."""
_PATH = "/v1/traces"
_KINDS = {
    ours.SpanKind.SERVER: SpanKind.SERVER,
    ours.SpanKind.CLIENT: SpanKind.CLIENT,
    ours.SpanKind.INTERNAL: SpanKind.INTERNAL,
}


class OtlpExport:
    """A `SpanExport` to one collector."""

    def __init__(self, endpoint: str, *, version: str, timeout_s: float = TIMEOUT_S) -> None:
        """`endpoint` is that of the collector, as `http://127.0.0.1:4318`."""
        base = endpoint.rstrip("/")
        address = base if base.endswith(_PATH) else base + _PATH
        self._exporter = OTLPSpanExporter(endpoint=address, timeout=timeout_s)
        named = {"service.name": "trunkline", "service.version": version}
        self._resource = Resource(named).merge(_from_environment())
        self._scope = InstrumentationScope("trunkline", version)

    def __call__(self, spans: Sequence[ours.Span]) -> bool:
        made = [self._made(span) for span in spans]
        try:
            return self._exporter.export(made) is SpanExportResult.SUCCESS
        except Exception:  # noqa: BLE001 - whatever a foreign library meets, the caller counts it
            return False

    def _made(self, span: ours.Span) -> ReadableSpan:
        status = Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET)
        above = span.parent_id
        return ReadableSpan(
            name=span.name,
            context=_context(span.trace_id, span.span_id, is_remote=False),
            parent=_context(span.trace_id, above, is_remote=span.is_parent_remote)
            if above
            else None,
            resource=self._resource,
            attributes=span.attributes,
            kind=_KINDS[span.kind],
            status=status,
            start_time=int(span.began * 1e9),
            end_time=int(span.ended * 1e9),
            instrumentation_scope=self._scope,
        )


def _from_environment() -> Resource:
    """What the operator calls this service, without the SDK's own `unknown_service`."""
    told = Resource.create({}).attributes
    is_named = not str(told.get("service.name", "")).startswith("unknown_service")
    return Resource({k: v for k, v in told.items() if is_named or k != "service.name"})


def _context(trace_id: str, span_id: str, *, is_remote: bool) -> SpanContext:
    return SpanContext(
        trace_id=int(trace_id, 16), span_id=int(span_id, 16), is_remote=is_remote,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
    )  # fmt: skip
