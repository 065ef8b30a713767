"""What tracing costs a request: its head looked at, passed on, recorded, and its spans sent.

    python benchmarks/traces.py [--json] [--requests 20000] [--rounds 5]

CPU time, medians over rounds, of one request with one attempt:
  none      no traceparent and no collector: the head is looked at
  passed    a good traceparent goes on to the worker; nothing is recorded
  unsampled a collector, and the caller's flag says no
  recorded  a collector: what the event loop does, all that a request waits for
  sent      what the exporter's thread does beside it: spans, protobuf and HTTP, to a collector on
            this machine that takes all. Needs the extra `otel`.
Nothing else of the gateway is in it; `gateway.py` has the whole.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from trunkline.adapters.clock import SystemClock
from trunkline.adapters.otlp import OtlpExport
from trunkline.core.records import WorkerId
from trunkline.gateway.contracts import AttemptEnd, Endpoint, InferenceRequest, Pick, Route
from trunkline.gateway.counters import AccessRecord
from trunkline.gateway.head import parse_answer
from trunkline.gateway.span_queue import MAX_BATCH
from trunkline.gateway.tracing import Trace, Tracer, spans_of

TOLD = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-"
ENDPOINT = Endpoint(host="10.0.0.1", port=8_000, host_header="w")
PICK = Pick(worker=WorkerId("w0"), endpoint=ENDPOINT, body=b"")
HEAD = parse_answer(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n")
REQUEST = InferenceRequest(
    request_id="r", route=Route.CHAT, method="POST", path="/v1/chat/completions", body=b"",
    model="m",
)  # fmt: skip
ACCESS = AccessRecord(
    request_id="r", client_request_id="", trace_id="", method="POST", path="/v1/chat/completions",
    status=200, code="", worker="w0", attempts=1, request_bytes=0, answer_bytes=0, ttft_ms=1.0,
    duration_ms=1.0,
)  # fmt: skip
USAGE = {"prompt": 1, "completion": 1, "cached": 0}


def played(tracer: Tracer, headers: dict[bytes, bytes], clock: SystemClock) -> None:
    """One request, as the data plane tells of it."""
    trace = tracer.begin(headers, Route.CHAT)
    if trace is None:
        return
    trace.admitted(REQUEST)
    trace.picked(PICK, clock.now())
    trace.headed(HEAD)
    trace.attempt_over(AttemptEnd.COMPLETE, clock.now())
    trace.used(USAGE)
    tracer.end(trace, ACCESS)


def cpu_us(work: Callable[[], object], count: int) -> float:
    began = time.process_time()
    for _ in range(count):
        work()
    return (time.process_time() - began) / count * 1e6


class Taking(BaseHTTPRequestHandler):
    """A collector that takes everything."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name
        pass


def run(requests: int, rounds: int) -> dict[str, float]:
    clock, dice = SystemClock(), random.Random(1)
    over: list[Trace] = []
    plain = Tracer(dice=dice, now_ms=clock.now, wall=clock.wall, sink=None)
    recording = Tracer(dice=dice, now_ms=clock.now, wall=clock.wall, sink=over.append)
    cases = {
        "none": (plain, {}),
        "passed": (plain, {b"traceparent": TOLD + b"01"}),
        "unsampled": (recording, {b"traceparent": TOLD + b"00"}),
        "recorded": (recording, {b"traceparent": TOLD + b"01"}),
    }
    found: dict[str, list[float]] = {name: [] for name in (*cases, "sent")}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Taking)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    export = OtlpExport(f"http://127.0.0.1:{server.server_port}", version="benchmark")
    for _ in range(rounds):
        for name, (tracer, headers) in cases.items():
            over.clear()
            found[name].append(cpu_us(lambda t=tracer, h=headers: played(t, h, clock), requests))
        batch = [span for trace in over[:MAX_BATCH] for span in spans_of(trace)]
        assert export(batch), "the collector took nothing"

        def send() -> None:
            assert export([span for trace in over[:MAX_BATCH] for span in spans_of(trace)])

        found["sent"].append(cpu_us(send, 10) / MAX_BATCH)
    server.shutdown()
    return {name: statistics.median(values) for name, values in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    results = run(args.requests, args.rounds)
    report = {
        "benchmark": "traces", "machine": platform.platform(), "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0], "cpu_us_a_request": results,
    }  # fmt: skip
    lines = [f"{name:10} {value:7.2f} us CPU a request" for name, value in results.items()]
    sys.stdout.write((json.dumps(report, indent=2) if args.json else "\n".join(lines)) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
