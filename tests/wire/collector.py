"""A collector of traces: a small HTTP server that takes OTLP, decodes it and keeps the spans."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

ERROR = 2
"""`STATUS_CODE_ERROR`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One span as it came over the wire."""

    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    began_ns: int
    ended_ns: int
    attributes: dict[str, Any]
    is_error: bool
    resource: dict[str, Any]


@dataclass
class Collector:
    """Answers 200, or what `status` says; `raw` is all that it was sent."""

    url: str = ""
    status: int = 200
    spans: list[Seen] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)

    def of(self, trace_id: str) -> list[Seen]:
        return [span for span in self.spans if span.trace_id == trace_id]

    def take(self, body: bytes) -> None:
        self.raw.append(body)
        message = ExportTraceServiceRequest.FromString(body)
        for group in message.resource_spans:
            resource = plain(group.resource.attributes)
            for scope in group.scope_spans:
                self.spans += [_seen(span, resource) for span in scope.spans]


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if collector.status == 200 and self.path == "/v1/traces":
                collector.take(body)
            self.send_response(collector.status if self.path == "/v1/traces" else 404)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def plain(attributes: Any) -> dict[str, Any]:
    """Protobuf's key-value pairs as Python has them."""
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in attributes}


def _seen(span: Any, resource: dict[str, Any]) -> Seen:
    return Seen(
        name=span.name,
        kind=span.kind,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        began_ns=span.start_time_unix_nano,
        ended_ns=span.end_time_unix_nano,
        attributes=plain(span.attributes),
        is_error=span.status.code == ERROR,
        resource=resource,
    )
