"""What of a request becomes spans, and which requests do."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace

import pytest

from hand_clock import HandClock
from trunkline.config import Config, ObserveConfig
from trunkline.core.records import WorkerId
from trunkline.errors import ConfigError
from trunkline.gateway.contracts import AttemptEnd, Endpoint, Pick, Route
from trunkline.gateway.counters import AccessRecord
from trunkline.gateway.head import parse_answer
from trunkline.gateway.tracing import MAX_NAME_CHARS, Trace, Tracer, spans_of
from trunkline.observe import log
from trunkline.ports.spans import Span, SpanKind
from trunkline.trace_side import trace_side

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Desk:
    """A tracer, its clock, and what it handed over."""

    def __init__(self, ratio: float = 1.0, *, records: bool = True, begins: bool = False) -> None:
        self.clock = HandClock()
        self.over: list[Trace] = []
        self.tracer = Tracer(
            dice=random.Random(5),
            now_ms=self.clock.now,
            wall=self.clock.wall,
            sink=self.over.append if records else None,
            sample_ratio=ratio,
            begins=begins,
        )

    def begin(self, flags: str = "") -> Trace | None:
        told = {b"traceparent": f"00-{TRACE}-{SPAN}-{flags}".encode()} if flags else {}
        return self.tracer.begin(told, Route.CHAT)

    def end(self, trace: Trace, status: int = 200, code: str = "") -> list[Span]:
        access = AccessRecord(
            request_id="r", client_request_id="", trace_id=trace.trace_id, method="POST",
            path="/v1/chat/completions", status=status, code=code, worker="w0", attempts=1,
            request_bytes=0, answer_bytes=0, ttft_ms=None, duration_ms=1.0,
        )  # fmt: skip
        self.tracer.end(trace, access)
        return spans_of(self.over.pop()) if self.over else []


def pick(worker: str = "w0") -> Pick:
    endpoint = Endpoint(host="10.0.0.1", port=8_000, host_header="x")
    return Pick(worker=WorkerId(worker), endpoint=endpoint, body=b"the prompt")


def begun(desk: Desk, flags: str = "") -> Trace:
    trace = desk.begin(flags)
    assert trace is not None
    return trace


@pytest.mark.parametrize(
    ("ratio", "flags", "is_recorded"),
    [(0.0, "", False), (1.0, "", True), (0.0, "01", True), (1.0, "00", False)],
)
def test_the_share_is_of_traces_that_begin_here_and_the_callers_flag_decides_of_others(
    ratio: float, flags: str, is_recorded: bool
) -> None:
    desk = Desk(ratio)
    traces = [begun(desk, flags) for _ in range(20)]
    assert {trace.record is not None for trace in traces} == {is_recorded}
    if flags == "00":
        assert {trace.lines for trace in traces} == {
            f"traceparent: 00-{TRACE}-{SPAN}-00\r\n".encode()
        }


def test_about_a_share_of_them_is_recorded() -> None:
    desk = Desk(0.25)
    assert 200 < sum(begun(desk).record is not None for _ in range(1_000)) < 300


def test_without_a_collector_only_what_comes_goes_on() -> None:
    desk = Desk(records=False)
    assert desk.begin() is None
    trace = begun(desk, "01")
    assert trace.record is None
    assert trace.lines == f"traceparent: 00-{TRACE}-{SPAN}-01\r\n".encode()
    assert desk.end(trace) == []


def test_where_the_settings_say_so_each_request_has_a_trace() -> None:
    desk = Desk(records=False, begins=True)
    first, second = begun(desk), begun(desk)
    assert first.trace_id != second.trace_id
    assert first.record is None
    assert first.lines.startswith(f"traceparent: 00-{first.trace_id}-".encode())


def test_a_pull_is_a_span_below_its_attempt_as_long_as_the_worker_says() -> None:
    desk = Desk()
    trace = begun(desk, "01")
    desk.clock.ms = 100.0
    trace.picked(pick(), desk.clock.now())
    told = b'{"end":"rejected","reason":"miss","blocks":0,"ms":40.0}'
    raw = b"HTTP/1.1 200 OK\r\nx-trunkline-pulled: %b\r\ncontent-length: 0\r\n\r\n" % told
    trace.headed(parse_answer(raw))
    desk.clock.ms = 300.0
    trace.attempt_over(AttemptEnd.COMPLETE, desk.clock.now())
    root, attempt, pulled = desk.end(trace)
    assert [span.kind for span in (root, attempt, pulled)] == list(SpanKind)
    assert (root.parent_id, attempt.parent_id, pulled.parent_id) == (
        SPAN,
        root.span_id,
        attempt.span_id,
    )
    assert pulled.ended - pulled.began == pytest.approx(0.04, abs=1e-6)
    assert attempt.ended - attempt.began == pytest.approx(0.2, abs=1e-6)
    assert pulled.attributes["trunkline.pull.reason"] == "miss"
    assert (pulled.error, attempt.error) == ("rejected", "")


def test_a_word_on_a_pull_that_makes_no_sense_is_no_span() -> None:
    desk = Desk()
    trace = begun(desk)
    trace.picked(pick(), 0.0)
    trace.headed(parse_answer(b"HTTP/1.1 200 OK\r\nx-trunkline-pulled: x\r\n\r\n"))
    trace.attempt_over(AttemptEnd.COMPLETE, 1.0)
    assert len(desk.end(trace)) == 2


def test_errors_of_ours_and_of_workers_are_errors_and_those_of_clients_are_not() -> None:
    desk = Desk()
    for end, is_error in ((AttemptEnd.WORKER_FAILED, True), (AttemptEnd.CLIENT_GONE, False)):
        trace = begun(desk)
        trace.picked(pick(), 0.0)
        trace.attempt_over(end, 1.0)
        _, attempt = desk.end(trace)
        assert bool(attempt.error) is is_error
    [refused] = desk.end(begun(desk), 400, "invalid_json")
    [broken] = desk.end(begun(desk), 502, "worker_lost")
    assert (refused.error, broken.error) == ("", "worker_lost")
    assert refused.attributes["error.type"] == "invalid_json"


def test_the_name_of_a_model_is_cut_and_a_prompt_is_nowhere() -> None:
    from picker_bench import request

    desk = Desk()
    trace = begun(desk)
    asked = request("the prompt", body=b"the prompt")
    asked.model = "m" * 10_000
    trace.admitted(asked)
    trace.picked(pick(), 0.0)
    spans = desk.end(trace)
    assert spans[0].name == f"chat {'m' * MAX_NAME_CHARS}"
    assert "the prompt" not in repr(spans)
    assert "trunkline.tenant" not in spans[0].attributes, "where all are one tenant"


def test_opentelemetry_is_imported_only_where_spans_are_wanted() -> None:
    program = (
        "import sys; from trunkline.adapters.clock import SystemClock; "
        "from trunkline.config import Config; from trunkline.observe import log; "
        "from trunkline.trace_side import trace_side; import trunkline.wiring; "
        "trace_side(Config(), SystemClock(), log); "
        "sys.exit('opentelemetry' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=120).returncode == 0


def test_without_opentelemetry_a_collector_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "trunkline.adapters.otlp", None)  # as if it were not there
    wanted = replace(Config(), observe=ObserveConfig(otlp_endpoint="http://127.0.0.1:4318"))
    with pytest.raises(ConfigError, match=r"pip install 'trunkline\[otel\]'"):
        trace_side(wanted, HandClock(), log)
