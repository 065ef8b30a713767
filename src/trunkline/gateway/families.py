"""Every metric, declared once: name, kind, labels, bound and one sentence.

Page, dashboard, alert rules and the operations page all go by this table; a name that is not in it
is exported nowhere. Must never have a label that a client's words fill without a bound. Read
`metrics.py` next, which writes the page.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from trunkline.core.alarms import AlarmKind

PREFIX = "trunkline_"
# Up to an hour: long answers stream that long, and a bucket that ends earlier hides them.
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1_200, 3_600)
# Engines give a token each 5 to 100 ms; one that takes ten seconds hangs.
TOKEN_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2),
    *(0.3, 0.5, 1, 2.5, 10),
)
# A look-up of a 128k-token prompt takes about a millisecond.
LOOKUP_SECONDS = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.01, 0.1)


class Kind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Declaration of one metric. Further series than `max_series` are added up under `other`."""

    name: str
    kind: Kind
    sentence: str
    labels: tuple[str, ...] = ()
    max_series: int = 1_000


def _counter(name: str, sentence: str, *labels: str) -> Family:
    return Family(name=name, kind=Kind.COUNTER, sentence=sentence, labels=labels)


def _gauge(name: str, sentence: str, *labels: str) -> Family:
    return Family(name=name, kind=Kind.GAUGE, sentence=sentence, labels=labels)


def _histogram(name: str, sentence: str, *labels: str) -> Family:
    return Family(name=name, kind=Kind.HISTOGRAM, sentence=sentence, labels=labels)


# Workers are ours, not the client's: a fleet of 1,000 with ranks must show each of them.
_MOST_WORKERS = 16_384


def _worker(kind: Kind, name: str, sentence: str) -> Family:
    labels = ("worker",)
    return Family(name=name, kind=kind, sentence=sentence, labels=labels, max_series=_MOST_WORKERS)


FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        _counter(
            "requests_total",
            "Finished requests; `code` is a class, or client_gone.",
            "route",
            "code",
        ),
        _gauge("requests_active", "Requests in flight."),
        _gauge("connections_active", "Open client connections."),
        _histogram(
            "request_duration_seconds",
            "From the end of the request to the end of the answer.",
            "route",
        ),
        _histogram("ttft_seconds", "From the end of the request to its first token."),
        _histogram("tpot_seconds", "Of whole streams, from one event to the next."),
        _counter("refusals_total", "Requests refused by the gateway itself.", "reason"),
        _counter(
            "dropped_fields_total", "Body fields not forwarded; `unknown` are all others.", "field"
        ),
        _gauge("upstream_connections_active", "Open connections to workers."),
        _gauge("late_picks_active", "Choices still being made for clients that left."),
        _counter("upstream_connects_total", "Connections opened to workers."),
        _counter("attempts_total", "Requests sent to workers, retries included."),
        _counter("retries_total", "Further attempts after a failed one."),
        _counter("retries_denied_total", "Retries that the budget forbade."),
        _counter("stale_retries_total", "Second sends after a kept connection had died."),
        _counter("worker_failures_total", "Attempts that failed at their worker."),
        _counter("broken_streams_total", "Answers that broke after they had begun."),
        _counter("resumed_streams_total", "Times a broken answer went on from another worker."),
        _counter("write_stalls_total", "Clients dropped because they fetched nothing."),
        _counter("bugs_total", "Errors nobody foresaw; each is in the log."),
        _counter("request_bytes_total", "Bytes of request bodies."),
        _counter("answer_bytes_total", "Bytes of answer bodies, framing included."),
        _counter("decisions_total", "Routing choices.", "reason"),
        _counter("plans_total", "Where prompts' beginnings were to come from.", "plan"),
        _counter(
            "pulls_total",
            "Pulls that workers were told to make, by how they ended.",
            "end",
            "reason",
        ),
        _counter("pulled_tokens_total", "Tokens whose KV workers took from one another."),
        _counter("pulled_bytes_total", "KV bytes of those tokens, by the profile."),
        _counter("pull_seconds_total", "Time of pulls, sum."),
        _counter("phantom_entries_total", "Blocks that were to be pulled and were not there."),
        _gauge("pull_sources_suspect", "Workers whose bytes were wrong too often to pull from."),
        _counter("pull_canaries_total", "Tests of pulls with a prefix of our own.", "end"),
        _gauge("pulls_degraded", "Workers to which no canary came through: an alarm."),
        _counter("pulled_wrong_bytes_total", "Pulls that ended at bytes which failed their check."),
        _counter("unheeded_pulls_total", "Pulls that a worker took no notice of."),
        _gauge("workers_ignoring_pulls", "Workers that took no notice of several in a row."),
        Family(
            name="worker_info",
            kind=Kind.GAUGE,
            sentence="Always 1: what a worker serves, and on what.",
            labels=("worker", "model", "engine"),
            max_series=_MOST_WORKERS,
        ),
        _worker(Kind.GAUGE, "worker_health", "1 if the worker may be chosen."),
        _worker(Kind.GAUGE, "worker_degraded", "1 if it tells no load, or sends no events."),
        _worker(Kind.GAUGE, "worker_misaligned", "1 if its self-test found something wrong."),
        _worker(Kind.GAUGE, "worker_leaking", "1 if it reused KV across salts: an alarm."),
        _worker(Kind.GAUGE, "worker_cb_state", "Breaker: 0 closed, 1 open, 2 half-open."),
        _worker(Kind.GAUGE, "worker_requests_active", "Requests in flight at the worker."),
        _worker(Kind.GAUGE, "worker_queue_seconds", "Predicted prefill in front of a new request."),
        Family(
            name="alarm",
            kind=Kind.GAUGE,
            sentence="1 while an alarm of the worker is on.",
            labels=("kind", "worker"),
            max_series=len(AlarmKind) * _MOST_WORKERS,
        ),
        _worker(Kind.COUNTER, "worker_selection_total", "Times the worker was chosen."),
        _worker(Kind.COUNTER, "kv_event_sequence_gaps_total", "Gaps in the worker's events."),
        _worker(Kind.GAUGE, "kv_event_stream_recovering", "1 while what was missed is replayed."),
        _worker(Kind.GAUGE, "kv_event_stream_silent", "1 while its connection is down."),
        _worker(Kind.GAUGE, "kv_event_stream_untrusted", "1 while its entries are not believed."),
        _gauge("panic_routing", "Models with over half of their workers in doubt: an alarm."),
        _counter("panics_total", "Times that this came about."),
        _gauge(
            "n_minus_1_headroom",
            "Share of the workers' prefill time left after the loss of one and its cache; below 0 "
            "that would shed requests.",
            "model",
        ),
        _gauge("prefix_indexer_size", "Distinct blocks in the directory."),
        _gauge("prefix_indexer_hit_ratio", "Prompt tokens found at the chosen worker, share."),
        _histogram("directory_lookup_seconds", "One look-up of a prompt's prefix."),
        _counter("prompt_tokens_total", "Prompt tokens of answers that tell their reuse."),
        _counter("predicted_tokens_total", "Of these, promised by the directory at the worker."),
        _counter("reused_tokens_total", "Of these, reused as the workers say."),
        _counter("reported_prompts_total", "Answers whose usage tells how much was reused."),
        _counter("reused_prompts_total", "Of these, those that reused anything."),
        _counter(
            "approximate_prompts_total",
            "Requests whose keys are not quite those of workers, by what is not known.",
            "reason",
        ),
        _counter("unread_prompts_total", "Requests routed by load alone: their prompt is unknown."),
        _counter("false_hits_total", "Answers that reused KV under a salt of their own: an alarm."),
        _counter("over_claims_total", "Requests whose worker reused less than was promised."),
        _counter("over_claimed_tokens_total", "Tokens promised to such requests in vain."),
        _counter("recomputed_tokens_total", "Of the reused ones, computed after all."),
        _counter("decision_queue_seconds_total", "Predicted queue at the chosen workers, sum."),
        _gauge("decision_net_gain_seconds", "Predicted time saved by choices, sum; may fall."),
        _counter("auth_refusals_total", "Credentials that were not taken.", "reason"),
        _counter("rate_limited_total", "Requests over their tenant's own rate.", "rate"),
        _gauge("queue_depth", "Requests that wait for their tenant's turn."),
        _counter("line_ended_total", "Requests that waited for a turn, by what came of it.", "end"),
        _counter("line_shed_total", "Requests refused for overload.", "priority"),
        _gauge("line_overloaded", "Lines whose wait has been too long for a while."),
        _counter("line_waited_seconds_total", "Time waited by those that were sent, sum."),
        _gauge("registry_revision", "Newest revision of the registry."),
        _gauge("registry_lost_revisions", "Changes that a restored backup had forgotten."),
        _gauge("gateway_lease_seconds", "Time this gateway may still reuse without the registry."),
        _gauge("gateways_other", "Further gateways at the registry that may be reusing."),
        _counter(
            "foretold_blocks_total",
            "Blocks that gateways tell one another they expect, by what became of them.",
            "end",
        ),
        _counter("gateway_words_refused_total", "Words of gateways that made no sense."),
        _counter("handovers_total", "What is known of a worker, handed over whole.", "outcome"),
        _counter("handed_over_blocks_total", "Blocks of such handovers.", "outcome"),
        _gauge(
            "relayed_feeds_active", "Workers whose events come over another gateway, or are to."
        ),
        _counter("relayed_batches_total", "Batches of events that gateways told on.", "way"),
        _gauge("audit_sinks_up", "Places that take audit records now; 0 stops all granting."),
        _gauge("audit_records_pending", "Audit records that wait for a sink."),
        _counter("audit_records_dropped_total", "Audit records that found no place to wait."),
        _gauge("revocations_pending", "Revocations that are not in force with everybody yet."),
        _counter("revocations_total", "Revocations and invalidations that are in force."),
        _counter("revocation_seconds_total", "Time until they were, sum."),
        _gauge("worker_leases_active", "Workers that may reuse: their lease is valid."),
        _gauge("namespaces_active", "Namespaces in use."),
        _gauge("public_prefixes_active", "Registered public prefixes."),
        _counter("public_fills_total", "Public prefixes written to a worker."),
        _counter(
            "isolation_cost_tokens_total",
            "Prompt tokens that another scope had sent lately, and this one had not.",
            "scope",
        ),
        _counter("isolation_prompt_tokens_total", "Prompt tokens that this was looked for in."),
        _gauge("processes_serving", "Gateway processes that take connections."),
        _counter("process_restarts_total", "Gateway processes that ended and were started again."),
        _counter("trace_spans_total", "Spans that a collector took."),
        _gauge("traces_waiting", "Requests whose spans wait for the collector."),
        _counter("traces_dropped_total", "Requests whose spans were lost.", "why"),
        _gauge("build_info", "Always 1.", "version", "native"),
        _counter("metrics_dropped_total", "Samples that no declaration fits; a bug."),
    )
}
