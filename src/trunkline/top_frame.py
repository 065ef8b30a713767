"""What `trunkline top` shows, made of what the admin port says: a snapshot, and its lines.

Pure. A snapshot is read from `GET /workers` and `GET /metrics`; rates and times to first token are
of the last seconds where there is an earlier one, else since the gateway began. Must never: let a
name steer the terminal, or be wider or higher than it was told. Read `top.py` for who draws it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from trunkline.admin_client import Json
from trunkline.terminal import printable

MIN_WIDTH = 40
MAX_ALARM_LINES = 3
_SAMPLE = re.compile(
    r"^trunkline_([a-z0-9_]+)(?:\{(.*)\})? ([0-9eE+.\-]+|NaN|[+-]Inf)$", re.MULTILINE
)
"""A line of numbers, and not one of help, which may begin alike."""
_BOUND = re.compile(r'le="([^"]+)"')
_COUNTED = (
    *("prompt_tokens_total", "reused_tokens_total", "recomputed_tokens_total", "requests_total"),
    *("over_claims_total", "false_hits_total", "pulled_tokens_total"),
)
_GAUGES = ("requests_active", "queue_depth", "worker_leaking")
_TTFT = "ttft_seconds_bucket"
_MODES = {"approximate": "approx"}


class Style(Enum):
    PLAIN = ""
    HEAD = "1"
    GOOD = "32"
    BAD = "31"
    WARN = "33"
    DIM = "2"


@dataclass(frozen=True, slots=True)
class Line:
    text: str
    style: Style = Style.PLAIN


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One worker. None where it does not say."""

    worker: str
    state: str
    mode: str
    breaker: str
    load_ms: float
    running: int | None
    waiting: int | None
    hit_share: float | None
    kv_share: float | None
    alarms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The fleet at one moment. `counts` and `ttft` are since the gateway began."""

    at_s: float
    rows: tuple[Row, ...]
    counts: Mapping[str, float]
    gauges: Mapping[str, float]
    ttft: Mapping[float, float] = field(default_factory=dict[float, float])
    """Bound in seconds -> answers up to it."""

    def as_json(self) -> Json:
        first = fleet_of(self, None)
        return {
            "at_s": round(self.at_s, 3),
            "fleet": asdict(first),
            "workers": [asdict(row) for row in self.rows],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """What all workers together do; None where nothing tells."""

    requests_per_s: float | None
    requests_active: int
    waiting: int
    hit_share: float | None
    hit_tokens: int
    prompt_tokens: int
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    false_hits: int
    leaking: int
    """Workers that a self-test saw reuse across salts."""
    over_claims: int
    window_s: float | None
    """What shares, rates and times are of; None for since the start."""


# -- what the admin port says ----------------------------------------------------------------------


def snapshot_of(workers: Sequence[Json], metrics: str, at_s: float) -> Snapshot:
    counts: dict[str, float] = dict.fromkeys(_COUNTED, 0.0)
    gauges: dict[str, float] = dict.fromkeys(_GAUGES, 0.0)
    ttft: dict[float, float] = {}
    for found in _SAMPLE.finditer(metrics):
        name, labels, text = found.group(1), found.group(2) or "", found.group(3)
        if name in counts:
            counts[name] += float(text)
        elif name in gauges:
            gauges[name] += float(text)
        elif name == _TTFT and (bound := _BOUND.search(labels)):
            at = float(bound.group(1))
            ttft[at] = ttft.get(at, 0.0) + float(text)
    rows = tuple(_row(worker) for worker in workers)
    return Snapshot(at_s=at_s, rows=rows, counts=counts, gauges=gauges, ttft=ttft)


def _row(worker: Json) -> Row:
    detail: Json = worker["detail"]
    load: Json = detail.get("load") or {}
    reuse: Json = detail.get("reuse") or {}
    held = sum(rank["held_blocks"] for rank in detail["ranks"])
    capacity = (detail["capacity_blocks"] or 0) * max(1, len(detail["ranks"]))
    alarms = tuple(
        f"{one['kind']} for {one['lasts_s']} s: {one['why']}" for one in detail["alarms"]
    )
    return Row(
        worker=worker["worker"],
        state=worker["state"],
        mode=worker["mode"],
        breaker=worker["breaker"],
        load_ms=worker["queue_ms"],
        running=load.get("running"),
        waiting=load.get("waiting"),
        hit_share=_share(reuse.get("reused_tokens", 0), reuse.get("prompt_tokens", 0)),
        kv_share=min(1.0, held / capacity) if capacity else None,
        alarms=alarms,
    )


def fleet_of(now: Snapshot, before: Snapshot | None) -> Fleet:
    """As of between the two; since the start without an earlier one, or after a new start."""
    if before is not None and any(now.counts[name] < before.counts[name] for name in _COUNTED):
        before = None
    since = dict.fromkeys(_COUNTED, 0.0) if before is None else before.counts
    counted = {name: now.counts[name] - since[name] for name in _COUNTED}
    window_s = None if before is None else max(0.001, now.at_s - before.at_s)
    earlier: Mapping[float, float] = {} if before is None else before.ttft
    times = {bound: count - earlier.get(bound, 0.0) for bound, count in now.ttft.items()}
    reused = now.counts["reused_tokens_total"] - now.counts["recomputed_tokens_total"]
    return Fleet(
        requests_per_s=None if window_s is None else counted["requests_total"] / window_s,
        requests_active=int(now.gauges["requests_active"]),
        waiting=int(now.gauges["queue_depth"]),
        hit_share=_share(
            counted["reused_tokens_total"] - counted["recomputed_tokens_total"],
            counted["prompt_tokens_total"],
        ),
        hit_tokens=int(reused),
        prompt_tokens=int(now.counts["prompt_tokens_total"]),
        ttft_p50_ms=quantile_ms(times, 0.5),
        ttft_p95_ms=quantile_ms(times, 0.95),
        false_hits=int(now.counts["false_hits_total"]),
        leaking=int(now.gauges["worker_leaking"]),
        over_claims=int(now.counts["over_claims_total"]),
        window_s=window_s,
    )


def quantile_ms(buckets: Mapping[float, float], share: float) -> float | None:
    """By straight lines between the bounds, as Prometheus does it; None without any answer."""
    bounds = sorted(buckets)
    total = buckets[bounds[-1]] if bounds else 0.0
    if total <= 0.0:
        return None
    wanted, low_s, below = share * total, 0.0, 0.0
    for bound in bounds:
        count = buckets[bound]
        if count >= wanted:
            if bound == float("inf"):
                return low_s * 1_000.0
            part = (wanted - below) / (count - below) if count > below else 1.0
            return (low_s + (bound - low_s) * part) * 1_000.0
        low_s, below = bound, count
    return low_s * 1_000.0


def _share(part: float, whole: float) -> float | None:
    return min(1.0, max(0.0, part / whole)) if whole > 0 else None


# -- how it is sorted ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Order:
    """`is_reversed` turns round what comes first."""

    key: str = "s"
    is_reversed: bool = False

    def pressed(self, key: str) -> Order:
        return Order(key, is_reversed=not self.is_reversed) if key == self.key else Order(key)


SORTS: Mapping[str, tuple[str, Callable[[Row], Any]]] = {
    "s": ("state", lambda row: (row.state == "ready" and not row.alarms, row.state)),
    "l": ("load", lambda row: -row.load_ms),
    "r": ("running", lambda row: -(row.running or 0)),
    "h": ("hits", lambda row: -(row.hit_share or 0.0)),
    "k": ("kv", lambda row: -(row.kv_share or 0.0)),
    "w": ("worker", lambda row: 0),
}
"""What each key sorts by; of equals, by name."""


def sorted_rows(rows: Iterable[Row], order: Order) -> list[Row]:
    key = SORTS[order.key][1]
    named = sorted(rows, key=lambda row: (key(row), row.worker))
    return named[::-1] if order.is_reversed else named


# -- lines -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    """Where it goes. None for as high as it gets."""

    width: int
    height: int | None = None
    order: Order = Order()
    gone: str = ""
    """Why the gateway does not answer now; empty where it does."""
    url: str = ""
    clock: str = ""
    has_keys: bool = True


def frame(now: Snapshot | None, before: Snapshot | None, screen: Screen) -> list[Line]:
    """Never more than fit: rows are left out, and how many is said."""
    width = max(MIN_WIDTH, screen.width)
    lines = list(_head(now, before, screen))
    if now is not None:
        lines += list(_alarm_lines(now))
        if screen.has_keys:
            lines.append(Line(_keys(screen.order), Style.DIM))
        lines.append(Line(_columns("WORKER", _HEADS, width), Style.HEAD))
        rows = [
            Line(_cells(row, width), _style(row, screen))
            for row in sorted_rows(now.rows, screen.order)
        ]
        room = None if screen.height is None else screen.height - len(lines)
        if room is not None and len(rows) > room:
            left = len(rows) - max(0, room - 1)
            rows = [*rows[: max(0, room - 1)], Line(f"and {left} more", Style.DIM)]
        lines += rows
    if screen.height is not None:
        lines = lines[: max(1, screen.height)]
    return [Line(printable(line.text)[: screen.width], line.style) for line in lines]


def _head(now: Snapshot | None, before: Snapshot | None, screen: Screen) -> Iterator[Line]:
    yield Line(f"trunkline top  {screen.url}  {screen.clock}".rstrip(), Style.HEAD)
    if screen.gone:
        yield Line(f"gateway gone: {screen.gone}; asking again", Style.BAD)
    if now is None:
        return
    if screen.gone:
        yield Line("what follows is what it said last", Style.DIM)
    fleet = fleet_of(now, before)
    ready = sum(row.state == "ready" for row in now.rows)
    of = "since start" if fleet.window_s is None else f"last {fleet.window_s:.0f} s"
    rate = "" if fleet.requests_per_s is None else f"{fleet.requests_per_s:,.1f} requests/s, "
    workers = f"{len(now.rows)} worker{'' if len(now.rows) == 1 else 's'}"
    yield Line(
        f"{workers}, {ready} ready; {rate}{fleet.requests_active:,} in flight,"
        f" {fleet.waiting:,} waiting",
        Style.PLAIN if ready == len(now.rows) else Style.WARN,
    )
    yield Line(
        f"ttft p50 {_ms(fleet.ttft_p50_ms)} p95 {_ms(fleet.ttft_p95_ms)}, hits"
        f" {_percent(fleet.hit_share)} ({of}); over-claims {fleet.over_claims:,}"
    )
    is_false = bool(fleet.false_hits or fleet.leaking)
    leaks = f" (leaking workers: {fleet.leaking})" if fleet.leaking else ""
    yield Line(
        f"hit tokens {fleet.hit_tokens:,} of {fleet.prompt_tokens:,}; false hits"
        f" {fleet.false_hits:,}{leaks}",
        Style.BAD if is_false else Style.PLAIN,
    )


def _alarm_lines(now: Snapshot) -> Iterator[Line]:
    told = [f"! {row.worker}: {alarm}" for row in now.rows for alarm in row.alarms]
    for text in told[:MAX_ALARM_LINES]:
        yield Line(text, Style.BAD)
    if len(told) > MAX_ALARM_LINES:
        more = len(told) - MAX_ALARM_LINES
        yield Line(f"! and {more} more alarms: trunkline doctor has all", Style.BAD)


def _keys(order: Order) -> str:
    keys = " ".join(f"[{key}]{name}" for key, (name, _) in SORTS.items())
    way = ", reversed" if order.is_reversed else ""
    return f"by {SORTS[order.key][0]}{way}   {keys} [q]uit"


_HEADS = ("STATE", "MODE", "LOAD ms", "RUN", "WAIT", "HIT%", "KV%", "BREAKER")
_WIDTHS = (("<", 12), ("<", 7), (">", 8), (">", 4), (">", 4), (">", 4), (">", 4), ("<", 9))


def _cells(row: Row, width: int) -> str:
    cells = (
        row.state,
        _MODES.get(row.mode, row.mode),
        f"{row.load_ms:,.0f}",
        _count(row.running),
        _count(row.waiting),
        _percent(row.hit_share).rstrip(" %"),
        _percent(row.kv_share).rstrip(" %"),
        row.breaker,
    )
    return _columns(("! " if row.alarms else "") + row.worker, cells, width)


def _columns(worker: str, cells: Sequence[str], width: int) -> str:
    """The name takes what the others leave, and is cut at its beginning: its port tells most."""
    assert len(cells) == len(_WIDTHS), "a cell for each column"
    rest = "".join(
        f" {cell[:most]:{side}{most}}" for cell, (side, most) in zip(cells, _WIDTHS, strict=True)
    )
    room = max(8, width - len(rest))
    cut = worker if len(worker) <= room else "~" + worker[1 - room :]
    return f"{cut:<{room}}{rest}"


def _style(row: Row, screen: Screen) -> Style:
    if screen.gone:
        return Style.DIM
    if row.state == "ready" and not row.alarms and row.breaker == "closed":
        return Style.PLAIN
    return Style.WARN if row.state in ("ready", "draining", "warming", "checking") else Style.BAD


def _count(count: int | None) -> str:
    return "-" if count is None else f"{count}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share * 100.0:.0f} %"


def _ms(ms: float | None) -> str:
    return "-" if ms is None else f"{ms:,.0f} ms"
