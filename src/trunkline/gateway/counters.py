"""What the data plane counts, as plain integers; `operations.py` turns each of them into a metric.

Owns numbers only; reading them costs the hot path nothing. Every key of every table is a constant
of ours, so that no client can make it grow. Read `exchange.py` for who counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from trunkline.gateway.contracts import Route
from trunkline.gateway.families import TOKEN_SECONDS
from trunkline.gateway.metrics import Histogram


@dataclass(slots=True, kw_only=True)
class Counters:
    """All of them; `active_*` and `open_*` are gauges, the rest only grow."""

    requests: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    """Finished requests by (route, status class such as `2xx`); 499 counts as `client_gone`."""
    refusals: dict[str, int] = field(default_factory=dict[str, int])
    """Answers in our own name that are not 200, by code."""
    dropped_fields: dict[str, int] = field(default_factory=dict[str, int])
    """Body fields not forwarded: forbidden ones by name, all others as `unknown`."""
    active_requests: int = 0
    open_clients: int = 0
    open_upstreams: int = 0
    connects: int = 0
    """Connections opened to workers."""
    attempts: int = 0
    retries: int = 0
    """Attempts on a further worker."""
    retries_denied: int = 0
    """Retries that the budget forbade."""
    stale_retries: int = 0
    """Transparent second sends after a kept-alive connection had died."""
    worker_failures: int = 0
    broken_streams: int = 0
    """Answers that ended in an error after they had begun."""
    resumed_streams: int = 0
    """Seams at which an answer that had begun went on, or came to its end all the same."""
    bugs: int = 0
    """Errors that nobody foresaw: each ended one request with a 500, and is in the log."""
    late_picks: int = 0
    """Choices still being made for clients that have left: a gauge."""
    write_stalls: int = 0
    """Clients dropped because they read nothing; they count among `client_gone`, too."""
    request_bytes: int = 0
    answer_bytes: int = 0
    ttft: Histogram = field(default_factory=Histogram)
    """From the end of the request to the first token of a good answer."""
    tpot: Histogram = field(default_factory=lambda: Histogram(TOKEN_SECONDS))
    """From the first event of a whole stream to its end, over the further ones."""
    durations: dict[Route, Histogram] = field(
        default_factory=lambda: {route: Histogram() for route in Route}
    )
    """From the end of the request to the end of the answer."""

    def count_request(self, route: str, status: int) -> None:
        key = (route, "client_gone" if status == 499 else f"{status // 100}xx")
        self.requests[key] = self.requests.get(key, 0) + 1

    def count_refusal(self, code: str) -> None:
        self.refusals[code] = self.refusals.get(code, 0) + 1

    def count_dropped(self, name: str) -> None:
        self.dropped_fields[name] = self.dropped_fields.get(name, 0) + 1


@dataclass(slots=True, kw_only=True)
class AccessRecord:
    """One finished request, for the access log. No header, no query, no body."""

    request_id: str
    client_request_id: str
    """What the client called it where that was no good name: escaped, at most 64 bytes."""
    trace_id: str
    """Empty where it is in no trace."""
    method: str
    path: str
    status: int
    """What the client saw; 499 where it left first."""
    code: str
    """Why it was refused or broken; empty for good answers."""
    worker: str
    """The worker of the last attempt; empty where none was made."""
    attempts: int
    request_bytes: int
    answer_bytes: int
    ttft_ms: float | None
    duration_ms: float
