"""The Grafana dashboard, as a table: rows of panels, each with its questions to Prometheus.

Every panel says in a sentence what to look for. Must never name a metric otherwise than by the
table of metrics. Read `promql.py` for how, `monitoring.py` for who writes the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trunkline.promql import promql

MATCHERS = 'job=~"$job", instance=~"$instance"'
SCHEMA_VERSION = 39
"""Of Grafana 10.4; newer ones migrate it by themselves."""
_WIDTH, _PANEL_WIDTH, _PANEL_HEIGHT = 24, 8, 8
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WINDOW = "[$__rate_interval]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """`template` in the words of `promql.py`."""

    template: str
    legend: str

    @property
    def expression(self) -> str:
        return promql(self.template, MATCHERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One diagram. `unit` is a name of Grafana's."""

    title: str
    sentence: str
    unit: str
    queries: tuple[Query, ...]


def _panel(title: str, sentence: str, unit: str, **queries: str) -> Panel:
    """Queries by legend; `_` in a name stands for a space, and `by_x` shows the label x."""
    made = tuple(
        Query(template=template, legend=_legend(name)) for name, template in queries.items()
    )
    return Panel(title=title, sentence=sentence, unit=unit, queries=made)


def _legend(name: str) -> str:
    if name.startswith("by_"):
        return " ".join(f"{{{{{label}}}}}" for label in name.removeprefix("by_").split("_and_"))
    return name.replace("_", " ")


def _rate(metric: str) -> str:
    return f"sum(rate(@{metric}{_WINDOW}))"


def _rate_by(label: str, metric: str) -> str:
    return f"sum by ({label}) (rate(@{metric}{_WINDOW}))"


def _quantile(share: float, histogram: str) -> str:
    return f"histogram_quantile({share}, sum by (le) (rate(@{histogram}_bucket{_WINDOW})))"


def _spread(histogram: str) -> dict[str, str]:
    return {f"p{share * 100:.0f}": _quantile(share, histogram) for share in (0.5, 0.95, 0.99)}


def _whole(metric: str) -> str:
    """How much came to it within the window."""
    return f"sum(increase(@{metric}{_WINDOW}))"


ROWS: Mapping[str, tuple[Panel, ...]] = {
    "What caches save": (
        _panel(
            "Prompt tokens reused",
            "Share of the prompt tokens that workers did not compute, beside what the directory "
            "had promised. Far apart: see over-claims.",
            "percentunit",
            reused=f"{_rate('reused_tokens_total')} / {_rate('prompt_tokens_total')}",
            promised=f"{_rate('predicted_tokens_total')} / {_rate('prompt_tokens_total')}",
            answers_with_a_hit=f"{_rate('reused_prompts_total')} / "
            f"{_rate('reported_prompts_total')}",
        ),
        _panel(
            "Prefill avoided",
            "Prompt tokens a second that were reused, less those computed after all.",
            "short",
            tokens_a_second=f"{_rate('reused_tokens_total')} - {_rate('recomputed_tokens_total')}",
        ),
        _panel(
            "Predicted gain of a decision",
            "Time saved against the best choice without caches. Below 0: prices are off.",
            "s",
            net_gain=f"sum(delta(@decision_net_gain_seconds{_WINDOW})) / "
            f"{_whole('decisions_total')}",
            queue_at_the_chosen=f"{_rate('decision_queue_seconds_total')} / "
            f"{_rate('decisions_total')}",
        ),
        _panel(
            "Where beginnings come from",
            "Choices a second: found at the worker, pulled to it, computed.",
            "reqps",
            by_plan=_rate_by("plan", "plans_total"),
        ),
        _panel(
            "Pulls",
            "How pulls between workers ended, a second.",
            "ops",
            by_end_and_reason=_rate_by("end, reason", "pulls_total"),
            wrong_bytes=_rate("pulled_wrong_bytes_total"),
            unheeded=_rate("unheeded_pulls_total"),
        ),
        _panel(
            "What keeping scopes apart costs",
            "Share of the prompt tokens that another scope had sent lately, and the own had not.",
            "percentunit",
            by_scope=f"{_rate_by('scope', 'isolation_cost_tokens_total')} / scalar("
            f"{_rate('isolation_prompt_tokens_total')})",
        ),
    ),
    "What users see": (
        _panel(
            "Time to the first token",
            "From the end of the request.",
            "s",
            **_spread("ttft_seconds"),
        ),
        _panel("Time a token", "Of whole streams, event to event.", "s", **_spread("tpot_seconds")),
        _panel(
            "Requests",
            "Finished ones a second by class of status.",
            "reqps",
            by_code=_rate_by("code", "requests_total"),
        ),
        _panel(
            "Refusals",
            "Answers a second in the gateway's own name.",
            "reqps",
            by_reason=_rate_by("reason", "refusals_total"),
        ),
        _panel(
            "Duration, 95 of 100",
            "From the end of the request to the end of the answer, by route.",
            "s",
            by_route="histogram_quantile(0.95, sum by (le, route) "
            f"(rate(@request_duration_seconds_bucket{_WINDOW})))",
        ),
        _panel(
            "Further attempts and seams",
            "A second: retries, those the budget forbade, streams that broke and that went on.",
            "ops",
            retries=_rate("retries_total"),
            denied=_rate("retries_denied_total"),
            broken=_rate("broken_streams_total"),
            resumed=_rate("resumed_streams_total"),
        ),
    ),
    "Queue and room": (
        _panel(
            "Queue",
            "Requests that wait for a turn, and those in flight.",
            "short",
            waiting="sum(@queue_depth)",
            in_flight="sum(@requests_active)",
        ),
        _panel(
            "Shed",
            "Requests a second that were refused for overload, and tenants' own rates.",
            "reqps",
            by_priority=_rate_by("priority", "line_shed_total"),
            by_rate=_rate_by("rate", "rate_limited_total"),
        ),
        _panel(
            "Headroom after the loss of one worker",
            "Share of prefill time that would be left. Below 0 the loss would shed requests.",
            "percentunit",
            by_model="min by (model) (@n_minus_1_headroom)",
        ),
        _panel(
            "Requests at workers",
            "In flight, by worker.",
            "short",
            by_worker="sum by (worker) (@worker_requests_active)",
        ),
        _panel(
            "Queue at workers",
            "Predicted prefill in front of a new request.",
            "s",
            by_worker="max by (worker) (@worker_queue_seconds)",
        ),
        _panel(
            "Choices",
            "How often a second each worker was chosen.",
            "reqps",
            by_worker=_rate_by("worker", "worker_selection_total"),
        ),
    ),
    "Trust": (
        _panel(
            "False hits",
            "Anything but 0 is a leak between tenants: the runbook of TrunklineFalseHit.",
            "short",
            answers=_whole("false_hits_total"),
            leaking_workers="sum(max by (worker) (@worker_leaking)) or vector(0)",
        ),
        _panel(
            "Over-claims",
            "Share of answers that reused less than was promised.",
            "percentunit",
            over_claims=f"{_rate('over_claims_total')} / {_rate('reported_prompts_total')}",
        ),
        _panel(
            "Breakers",
            "0 closed, 1 open, 2 half-open.",
            "short",
            by_worker="max by (worker) (@worker_cb_state)",
        ),
        _panel(
            "Workers",
            "How many may be chosen, of how many; models that are routed in panic.",
            "short",
            may_be_chosen="sum(max by (worker) (@worker_health))",
            known="count(max by (worker) (@worker_info))",
            degraded="sum(max by (worker) (@worker_degraded))",
            misaligned="sum(max by (worker) (@worker_misaligned))",
            panic="sum(@panic_routing)",
        ),
        _panel(
            "Event streams",
            "Workers whose cache events are not believed, are being replayed, or are cut off.",
            "short",
            untrusted="sum(max by (worker) (@kv_event_stream_untrusted))",
            recovering="sum(max by (worker) (@kv_event_stream_recovering))",
            silent="sum(max by (worker) (@kv_event_stream_silent))",
            gaps=_whole("kv_event_sequence_gaps_total"),
        ),
        _panel(
            "Alarms",
            "Workers with an alarm on, by kind: `trunkline doctor` and `trunkline top` say which.",
            "short",
            by_kind="sum by (kind) (max by (kind, worker) (@alarm))",
        ),
        _panel(
            "Directory",
            "Blocks known, and how long one look-up takes.",
            "short",
            blocks="max(@prefix_indexer_size)",
            look_up_p99_us=f"1e6 * ({_quantile(0.99, 'directory_lookup_seconds')})",
        ),
    ),
    "Tenants and the gateway itself": (
        _panel(
            "Revocations",
            "In force, and still on their way to somebody.",
            "short",
            in_force=_whole("revocations_total"),
            pending="sum(@revocations_pending)",
        ),
        _panel(
            "Audit log",
            "Sinks that take records, records that wait, and what was lost.",
            "short",
            sinks="min(@audit_sinks_up)",
            waiting="sum(@audit_records_pending)",
            lost=_whole("audit_records_dropped_total"),
        ),
        _panel(
            "Leases and registry",
            "Workers that may reuse, the newest revision, and the gateway's own lease.",
            "short",
            workers="sum(@worker_leases_active)",
            revision="max(@registry_revision)",
            own_lease_s="min(@gateway_lease_seconds)",
        ),
        _panel(
            "Connections",
            "Open ones, to clients and to workers.",
            "short",
            clients="sum(@connections_active)",
            workers="sum(@upstream_connections_active)",
        ),
        _panel(
            "Credentials not taken",
            "A second, by reason.",
            "ops",
            by_reason=_rate_by("reason", "auth_refusals_total"),
        ),
        _panel(
            "Traces",
            "Spans a second that the collector took, and requests whose spans were lost.",
            "short",
            taken=_rate("trace_spans_total"),
            by_why=_rate_by("why", "traces_dropped_total"),
        ),
        _panel(
            "Bugs",
            "Errors nobody foresaw; each is in the log.",
            "short",
            bugs=_whole("bugs_total"),
            samples_dropped=_whole("metrics_dropped_total"),
        ),
    ),
}


def dashboard() -> dict[str, Any]:
    """As Grafana imports it."""
    return {
        "uid": "trunkline",
        "title": "trunkline",
        "description": "Generated by `trunkline monitoring`; change the table there.",
        "tags": ["llm", "kv-cache"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [],
        "templating": {"list": list(_variables())},
        "panels": list(_panels()),
    }


def _variables() -> Iterator[dict[str, Any]]:
    yield {"name": "datasource", "label": "Source", "type": "datasource", "query": "prometheus"}
    for name, matcher in (("job", ""), ("instance", 'job=~"$job"')):
        question = f"label_values({promql('@build_info', matcher)}, {name})"
        yield {
            "name": name,
            "label": name.capitalize(),
            "type": "query",
            "datasource": _SOURCE,
            "query": {"query": question, "refId": name},
            "refresh": 2,
            "includeAll": True,
            "multi": True,
            "allValue": ".*",
            "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        }


def _panels() -> Iterator[dict[str, Any]]:
    number, top = 1, 0
    for title, panels in ROWS.items():
        place = {"h": 1, "w": _WIDTH, "x": 0, "y": top}
        yield {
            "id": number, "type": "row", "title": title, "collapsed": False, "panels": [],
            "gridPos": place,
        }  # fmt: skip
        number, top = number + 1, top + 1
        for index, panel in enumerate(panels):
            row, column = divmod(index, _WIDTH // _PANEL_WIDTH)
            left, down = column * _PANEL_WIDTH, top + row * _PANEL_HEIGHT
            yield _drawn(panel, number, left, down)
            number += 1
        top += -(-len(panels) // (_WIDTH // _PANEL_WIDTH)) * _PANEL_HEIGHT


def _drawn(panel: Panel, number: int, left: int, top: int) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.sentence,
        "datasource": _SOURCE,
        "gridPos": {"h": _PANEL_HEIGHT, "w": _PANEL_WIDTH, "x": left, "y": top},
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "custom": {"fillOpacity": 10, "showPoints": "never"}},
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _SOURCE,
                "editorMode": "code",
                "expr": query.expression,
                "legendFormat": query.legend,
                "range": True,
            }
            for index, query in enumerate(panel.queries)
        ],
    }
