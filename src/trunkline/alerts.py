"""The alert rules, as a table, with what each means and what to do: rules and runbook are one.

`page` is for what hurts tenants or users now, `warning` for what will, or what costs. Must never
name a metric otherwise than by the table of metrics. Read `promql.py` for how, `monitoring.py` for
who writes the files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from trunkline.promql import promql

JOB = "trunkline"
"""The name of the scrape job that is generated beside the rules."""
OVERLOAD = "busy|overloaded|rate_limit_exceeded|deadline_unmet|no_worker|too_many_connections"
UPSTREAM = "worker_lost|worker_late|worker_timeout|reuse_lease_lost"


class Severity(Enum):
    PAGE = "page"
    WARNING = "warning"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One rule. `lasts` is how long it has to hold, as Prometheus writes times."""

    name: str
    severity: Severity
    template: str
    lasts: str
    summary: str
    """One line, for the message; may name labels as `{{ $labels.worker }}`."""
    meaning: str
    remedy: str

    @property
    def expression(self) -> str:
        return self.template if "@" not in self.template else promql(self.template)

    @property
    def anchor(self) -> str:
        return self.name.lower()


def _page(name: str, lasts: str, template: str, summary: str, meaning: str, remedy: str) -> Alert:
    return Alert(
        name=name, severity=Severity.PAGE, template=template, lasts=lasts, summary=summary,
        meaning=meaning, remedy=remedy,
    )  # fmt: skip


def _warn(name: str, lasts: str, template: str, summary: str, meaning: str, remedy: str) -> Alert:
    return Alert(
        name=name, severity=Severity.WARNING, template=template, lasts=lasts, summary=summary,
        meaning=meaning, remedy=remedy,
    )  # fmt: skip


def _share(part: str, whole: str, above: float) -> str:
    """Over ten minutes, and not of a handful of requests."""
    of = f"sum(increase(@{whole}[10m]))"
    return f"sum(increase(@{part}[10m])) / {of} > {above} and {of} > 100"


ALERTS: tuple[Alert, ...] = (
    _page(
        "TrunklineFalseHit",
        "0m",
        "sum(increase(@false_hits_total[15m])) > 0 or sum(max by (worker) (@worker_leaking)) > 0",
        "KV of somebody else was reused",
        "An answer reused KV although its request had a salt that no other request has "
        "(`false_hits_total`), or the self-test of a worker saw KV reused across salts "
        "(`worker_leaking`). Something behind the engine, as a KV connector that goes by tokens "
        "alone, serves one tenant's cache to another.",
        "`trunkline doctor` names the worker and what it did. Drain it, then take the connector or "
        "tier out that ignores salts; `trunkline doctor WORKER` must be clean before it comes "
        "back. Where only `false_hits_total` moved, `reuse.false_hit` in the log names request and "
        "worker. Tell the tenants who ran there.",
    ),
    _page(
        "TrunklineNoUsableWorker",
        "1m",
        "sum by (job, instance) (@worker_health) == 0 "
        "or count by (job, instance) (@build_info) unless sum by (job, instance) (@worker_health)",
        "{{ $labels.instance }} has no worker that may be chosen",
        "Every request is answered 503: no worker is known, or each of them is down, draining, "
        "asleep, being tested, or failed the isolation test.",
        "`GET /workers` has a state and a reason for each. `unhealthy` and `breaker-open`: look at "
        "the engines. None listed: look at the source of workers (`workers.source_failed` in the "
        "log). `isolation-failed`: see TrunklineFalseHit.",
    ),
    _page(
        "TrunklineGatewayDown",
        "2m",
        f'up{{job="{JOB}"}} == 0',
        "{{ $labels.instance }} does not answer its scrapes",
        "The admin port of a gateway is away: the process ended, hangs, or cannot be reached.",
        "Look at the last lines of its log and at the exit code (Operations, Run). Where it "
        "restarts again and again, the first error after each start says why.",
    ),
    _page(
        "TrunklinePanicRouting",
        "1m",
        "max by (instance) (@panic_routing) > 0",
        "More than half of the workers are in doubt",
        "Over half of a model's workers are silent, suspect, ejected or have an open breaker, so "
        "none is left out for that any more. The fault is likelier the load's, the network's or "
        "the gateway's own than theirs.",
        "Look at the network between gateway and workers and at the gateway's own CPU first, then "
        "at `worker_cb_state` and `GET /workers`. It ends by itself when half are well.",
    ),
    _page(
        "TrunklineRevocationPending",
        "1m",
        "max by (instance) (@revocations_pending) > 0",
        "A revocation is not in force with everybody",
        "A holder of a lease neither acknowledged nor provably stopped. At the gateways and in "
        "stock engines it is in force at once, by the salt; what is missing is a worker's or "
        "another gateway's word.",
        "`GET /revocations` shows who is waited for, `GET /audit?kind=` what is written. A worker "
        "that hangs: end it. It is over when its lease has run out, in seconds; one that stays "
        "for minutes is a clock that stands, or a registry that does not answer.",
    ),
    _page(
        "TrunklineAuditSinkFailing",
        "1m",
        "min by (instance) (@audit_sinks_up) == 0 "
        "or sum by (instance) (increase(@audit_records_dropped_total[15m])) > 0",
        "No audit sink takes records at {{ $labels.instance }}",
        "Nothing can be granted, and no worker added, until a sink takes records; or records "
        "were lost. Revocations go on, with receipts that say `audit: pending`.",
        "The log names the sink (`audit.sink_out`): a full disk, a read-only mount, a folder that "
        "is gone. Then `trunkline audit verify`.",
    ),
    _page(
        "TrunklineLeaseLost",
        "1m",
        "min by (instance) (@gateway_lease_seconds) == 0",
        "{{ $labels.instance }} serves without reuse",
        "The gateway has no lease of the shared registry: it goes on serving, and computes "
        "everything anew.",
        "NATS is away or has no quorum, or the gateway's clock jumped (`clock.jumped`). See "
        "Several gateways in tenancy.md.",
    ),
    _warn(
        "TrunklineAuditSinkLost",
        "5m",
        "min by (instance) (@audit_sinks_up) < "
        "max by (instance) (max_over_time(@audit_sinks_up[1d]))",
        "One of the audit sinks of {{ $labels.instance }} is down",
        "A sink that worked takes nothing now; the other still does.",
        "As TrunklineAuditSinkFailing, before it is one.",
    ),
    _warn(
        "TrunklineNoHeadroom",
        "10m",
        "min by (model) (@n_minus_1_headroom) < 0",
        "The loss of one worker of {{ $labels.model }} would shed requests",
        "With one worker less, and what it held computed anew by the others, there is more prefill "
        "to do than time to do it in.",
        "Add a worker, or lower what is asked for (`rate_limit_tokens_per_second`, quotas of "
        "tenants). `trunkline plan LOG` says how many workers a TTFT goal needs.",
    ),
    _warn(
        "TrunklineStreamUntrusted",
        "5m",
        "max by (worker) (@kv_event_stream_untrusted) == 1",
        "Cache events of {{ $labels.worker }} are not believed",
        "Events were lost and could not be replayed, or break the protocol: what the worker holds "
        "is learnt anew, and prompts are computed that it may hold.",
        "`GET /workers/{id}` has `feed_state` and the reason. A replay endpoint, and more "
        "`buffer_steps` at the engine, let gaps be repaired; `trunkline doctor` tests both.",
    ),
    _warn(
        "TrunklineOverClaims",
        "10m",
        _share("over_claims_total", "reported_prompts_total", 0.05),
        "The directory promises more than workers have",
        "More than one answer in twenty reused less than was promised: the directory is behind, "
        "or a worker does not keep what it announces. It costs time, not answers.",
        "Which worker: `GET /decisions` has `predicted_tokens` and `reused_tokens` of each. Then "
        "`trunkline doctor WORKER`, and its event stream (TrunklineStreamUntrusted). Much "
        "eviction at the workers: fewer sessions each, or more memory.",
    ),
    _warn(
        "TrunklineBreakerOpen",
        "5m",
        "max by (worker) (@worker_cb_state) == 1",
        "The breaker of {{ $labels.worker }} is open",
        "Its requests failed in a row while its probes may be well.",
        "The log has `worker_lost` and `worker_timeout` with the reason. It closes by itself after "
        "`--cb-success-threshold` good ones.",
    ),
    _warn(
        "TrunklineWorkerDegraded",
        "10m",
        "max by (worker) (@worker_degraded) == 1 or max by (worker) (@worker_misaligned) == 1",
        "{{ $labels.worker }} is not what routing takes it for",
        "It tells no load, sends none of the events that it announced, or its self-test found "
        "something wrong: tokens, block size, salt or reuse.",
        "`trunkline doctor {worker}` says what was expected, what was found and what to do.",
    ),
    _warn(
        "TrunklineWorkerAlarm",
        "2m",
        "max by (kind, worker) (@alarm) == 1",
        "{{ $labels.worker }}: {{ $labels.kind }}",
        "Something lasts and needs somebody: promises of cache that do not come true "
        "(`over-claims`), first tokens far from the predicted time (`calibration-drift`), no news "
        "of the worker (`silent`), pulls that it takes no notice of (`unheeded-pulls`).",
        "`trunkline doctor {worker}`, or `detail.alarms` of `GET /workers/{id}`, has since when, "
        "why and what to do. It ends by itself, later than it began.",
    ),
    _warn(
        "TrunklinePullsDegraded",
        "10m",
        "max by (instance) (@pulls_degraded) > 0 "
        "or max by (instance) (@workers_ignoring_pulls) > 0",
        "Pulls between workers do not work",
        "A prefix of our own did not come through to some worker, or workers take no notice of "
        "what they are told to pull. Their prompts are computed instead.",
        "`notes` of each decision name the worker and the reason; `pulls.degraded` and "
        "`worker.ignores_pulls` in the log. Keys (`--transfer-key-file`), layouts and ports of "
        "the stores must be the same or reachable (transfer.md).",
    ),
    _warn(
        "TrunklineRetryBudgetGone",
        "5m",
        "sum by (instance) (rate(@retries_denied_total[5m])) > 0",
        "Retries are denied at {{ $labels.instance }}",
        "More attempts fail than the retry budget lets be repeated, so clients see errors that "
        "another worker might have spared them. The budget keeps a fleet in trouble from being "
        "asked twice for everything.",
        "Do not raise it first: find out why attempts fail (`worker_failures_total`, "
        "TrunklineBreakerOpen).",
    ),
    _warn(
        "TrunklineRefusedShare",
        "10m",
        _share(f'refusals_total{{reason=~"{OVERLOAD}|{UPSTREAM}"}}', "requests_total", 0.05),
        "More than one request in twenty is refused",
        "For overload (429), for want of workers or of an answer from them (502, 503, 504). "
        "Clients' own mistakes do not count.",
        "By reason on the panel Refusals. `overloaded` and `busy`: the fleet is too small for what "
        "is asked (TrunklineNoHeadroom), or the profile is far from the engines (Overload).",
    ),
    _warn(
        "TrunklineRegistryRestored",
        "0m",
        "max by (instance) (@registry_lost_revisions) > 0",
        "The registry was restored from a backup that had forgotten changes",
        "Tenants, keys and epochs that were changed after the backup are not known any more. All "
        "caches were left behind, so nothing revoked can be reused.",
        "`trunkline audit` shows what was changed after the backup: make those changes again.",
    ),
    _warn(
        "TrunklineBugs",
        "0m",
        "sum by (instance) (increase(@bugs_total[1h])) > 0 "
        "or sum by (instance) (increase(@metrics_dropped_total[1h])) > 0",
        "{{ $labels.instance }} met an error nobody foresaw",
        "One request was ended with a 500, or a number could not be shown.",
        "The log has `exchange.bug` with a traceback, and no prompt: please report it.",
    ),
)


def rules(docs_url: str) -> str:
    """The file of rules. Strings are written as JSON, which YAML takes."""
    lines = ["# Generated by `trunkline monitoring`; change the table in alerts.py there."]
    lines += ["groups:", f"  - name: {JOB}", "    rules:"]
    for alert in ALERTS:
        lines.append(f"      - alert: {alert.name}")
        lines.append(f"        expr: {json.dumps(alert.expression)}")
        lines.append(f"        for: {alert.lasts}")
        lines.append(f"        labels: {{severity: {alert.severity.value}}}")
        lines.append("        annotations:")
        lines.append(f"          summary: {json.dumps(alert.summary)}")
        lines.append(f"          description: {json.dumps(alert.meaning)}")
        lines.append(f"          runbook_url: {json.dumps(f'{docs_url}#{alert.anchor}')}")
    return "\n".join(lines) + "\n"


def runbook() -> str:
    """A section for each, as Markdown."""
    return "\n".join(line for alert in ALERTS for line in _section(alert))


def _section(alert: Alert) -> Iterator[str]:
    lasts = "at once" if alert.lasts == "0m" else f"after {alert.lasts}"
    yield f"### {alert.name}\n"
    yield f"{alert.severity.value.capitalize()}, {lasts}: `{alert.expression}`\n"
    yield f"{alert.meaning}\n"
    yield f"**What to do.** {alert.remedy}\n"
