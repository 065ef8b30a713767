"""The report's pictures, as SVG that takes its colours from the page around it.

Needs matplotlib, of the `report` extra; imported when the first plot is drawn. Colours are
placeholders that become CSS variables, so that one picture serves light and dark. Read `page.py`
next.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from trunkline.errors import ConfigError
from trunkline.replay.records import RequestRecord
from trunkline.replay.report import PolicyRun

TIME_BINS = 60
MAX_CURVE_POINTS = 500
SERIES = 6
"""Policies that get a colour of their own; further ones share the last."""

_INK, _GRID = "#010203", "#010204"
_SERIES_COLOURS = tuple(f"#0102{index + 16:02x}" for index in range(SERIES))
_VARIABLES = {
    _INK: "var(--ink)",
    _GRID: "var(--grid)",
    **{colour: f"var(--series-{index})" for index, colour in enumerate(_SERIES_COLOURS)},
}
_STYLE: dict[str, Any] = {  # rcParams are of many types
    "svg.fonttype": "none",
    "svg.hashsalt": "trunkline",
    "font.family": "sans-serif",
    "font.size": 9.0,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _GRID,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "grid.color": _GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "lines.linewidth": 2.0,
}


def ttft_curve(runs: Sequence[PolicyRun]) -> str:
    """Share of requests whose first token came within a time, log scale."""

    def draw(axes: Any) -> None:  # Any: matplotlib is optional
        for index, run in enumerate(runs):
            scale = run.summary.time_scale
            ordered = sorted(r.ttft_ms / scale for r in run.records if r.ttft_ms is not None)
            points = _thinned(len(ordered))
            axes.plot(
                [max(ordered[point], 0.1) for point in points],
                [100.0 * (point + 1) / len(ordered) for point in points],
                **_series(index, run),
            )
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(_time_label)
        axes.set_ylim(0.0, 101.0)
        axes.set_xlabel("time to first token, engine time")
        axes.set_ylabel("requests, %")
        axes.legend(loc="lower right")

    return svg(draw)


def hits_over_time(runs: Sequence[PolicyRun]) -> str:
    """Share of prompt tokens that were cached, by time of arrival."""

    def draw(axes: Any) -> None:
        for index, run in enumerate(runs):
            times_s, shares = _binned_hits(run)
            axes.plot(times_s, shares, **_series(index, run))
        axes.set_ylim(0.0, 101.0)
        axes.set_xlabel("time of arrival, engine seconds")
        axes.set_ylabel("hit tokens, %")
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(runs))

    return svg(draw)


def work_per_worker(runs: Sequence[PolicyRun]) -> str:
    """Each worker's work over the mean, busiest first; empty when no run knows its workers."""
    known = [(index, run) for index, run in enumerate(runs) if run.summary.worker_work]
    if not known:
        return ""

    def draw(axes: Any) -> None:
        for index, run in known:
            work = sorted(run.summary.worker_work.values(), reverse=True)
            mean = sum(work) / len(work) or 1.0
            ranks = list(range(1, len(work) + 1))
            marker = "o" if len(work) <= 64 else ""
            shares = [value / mean for value in work]
            axes.plot(ranks, shares, marker=marker, markersize=5.0, **_series(index, run))
        axes.axhline(1.0, color=_INK, linewidth=1.0, linestyle="--")
        axes.set_ylim(bottom=0.0)
        axes.set_xlabel("workers, busiest first")
        axes.set_ylabel("prefill work over mean")
        axes.legend(loc="lower left")

    return svg(draw)


def _series(index: int, run: PolicyRun) -> dict[str, str]:
    return {"color": series_colour(index), "label": run.summary.policy}


def series_colour(index: int) -> str:
    """That of the first, second, ... thing that is compared."""
    return _SERIES_COLOURS[min(index, SERIES - 1)]


def line_colour() -> str:
    """That of what is there to be looked past."""
    return _GRID


def _thinned(count: int) -> list[int]:
    """Indexes of at most some hundred points, the last one among them."""
    if count <= MAX_CURVE_POINTS:
        return list(range(count))
    step = (count - 1) / (MAX_CURVE_POINTS - 1)
    return [round(point * step) for point in range(MAX_CURVE_POINTS)]


def _binned_hits(run: PolicyRun) -> tuple[list[float], list[float]]:
    kept: list[RequestRecord] = [record for record in run.records if not record.is_lost]
    end_ms = max((record.arrival_ms for record in kept), default=0.0) or 1.0
    prompt, cached = [0] * TIME_BINS, [0] * TIME_BINS
    for record in kept:
        slot = min(int(record.arrival_ms / end_ms * TIME_BINS), TIME_BINS - 1)
        prompt[slot] += record.prompt_tokens
        cached[slot] += record.cached_tokens or 0
    filled = [slot for slot in range(TIME_BINS) if prompt[slot]]
    width_s = end_ms / TIME_BINS / 1_000.0 / run.summary.time_scale
    times_s = [(slot + 0.5) * width_s for slot in filled]
    return times_s, [100.0 * cached[slot] / prompt[slot] for slot in filled]


def _time_label(value_ms: float, _position: int) -> str:
    return f"{value_ms:g} ms" if value_ms < 1_000.0 else f"{value_ms / 1_000.0:g} s"


def svg(draw: Callable[[Any], None]) -> str:
    """What `draw` puts on the axes that it is given. Raises ConfigError without matplotlib."""
    matplotlib = require_matplotlib()
    figures: Any = import_module("matplotlib.figure")
    buffer = io.StringIO()
    with matplotlib.rc_context(_STYLE):
        figure = figures.Figure(figsize=(7.6, 3.6), layout="constrained")
        axes = figure.subplots()
        axes.grid(visible=True, linewidth=0.8)
        draw(axes)
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return _inline(buffer.getvalue())


def require_matplotlib() -> Any:  # optional, so its types are too
    """Before what takes long rather than after it. Raises ConfigError where it is not installed."""
    try:
        return import_module("matplotlib")
    except ImportError as error:
        raise ConfigError(
            "a page with plots needs matplotlib: pip install 'trunkline[report]'"
        ) from error


def _inline(svg: str) -> str:
    """What may stand inside HTML: no prolog, metadata or address; colours by variable."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", svg).replace("xlink:href", "href")
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r"font: ([0-9.]+)px [^;\"]*", r"font: \1px var(--font)", svg)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    return svg.strip()
