"""The report on a terminal: policies side by side, bars, and false hits where nobody overlooks
them.

Plain text, aligned, no colours. Owns the order in which figures are told, which `page.py` shares.
Must never drop a figure since it is bad. Read `page.py` next.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from trunkline.replay.bars import Check
from trunkline.replay.counters import Quantiles
from trunkline.replay.records import RequestRecord
from trunkline.replay.results import Spread, Summary

REFERENCE = "least_queue"
"""The strong baseline: ratios are against it."""

NOT_MEASURED = "-"
MAX_COLUMNS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRun:
    """One policy's run: figures, and the records that plots are made from."""

    summary: Summary
    records: Sequence[RequestRecord] = field(default=(), repr=False)
    unchecked: str = ""
    """Why not one answer was checked, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that is to be told. The first run is the one that bars judge."""

    title: str
    runs: Sequence[PolicyRun]
    checks: Sequence[Check] = ()
    warnings: Sequence[str] = ()
    command: str = ""
    """How to make it again."""

    @property
    def false_hits(self) -> int:
        return sum(run.summary.false_hits for run in self.runs)

    @property
    def answers_checked(self) -> int:
        return sum(run.summary.answers_checked for run in self.runs)

    @property
    def is_passed(self) -> bool:
        """No false hit, no missed bar, and something was measured."""
        is_alive = all(run.summary.completed > 0 for run in self.runs)
        return is_alive and not self.false_hits and all(check.is_passed for check in self.checks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A figure of every run. `ratios[i]` is against the reference; None where there is none."""

    label: str
    values: Sequence[str]
    ratios: Sequence[float | None]


def table(summaries: Sequence[Summary]) -> list[Row]:
    """The figures in the order of the report."""
    return [_row(label, read, show, summaries) for label, read, show in _FIGURES]


def shown_hits(report: Report) -> str:
    """The large number; no number where nobody counted."""
    is_counted = report.answers_checked or report.false_hits
    return f"{report.false_hits:,}" if is_counted else "not checked"


def verdict_on_hits(report: Report) -> str:
    """The sentence below the large number."""
    if report.false_hits:
        return "answers were made with KV of another prompt. Nothing else in this report matters."
    if not report.answers_checked:
        reasons = dict.fromkeys(run.unchecked for run in report.runs if run.unchecked)
        return ": ".join(["no answer was checked", *list(reasons)[:1]])
    return f"{report.answers_checked:,} answers compared token by token"


def in_words(report: Report) -> str:
    """What the judged run won or lost against the reference; empty where that did not run."""
    judged = report.runs[0].summary
    others = [run.summary for run in report.runs[1:] if run.summary.policy == REFERENCE]
    ttft = judged.ttft_ms
    if not others or ttft is None or others[0].ttft_ms is None or not others[0].prefill_tokens:
        return ""
    computed = 1.0 - judged.prefill_tokens / others[0].prefill_tokens
    sooner = 1.0 - ttft.mean / others[0].ttft_ms.mean
    tokens, time = _change(computed, "fewer", "more"), _change(sooner, "sooner", "later")
    told = [
        f"computed {tokens} prompt tokens" if tokens else "no difference in prompt tokens computed",
        f"gave the first token {time} on average" if time else "no difference in mean TTFT",
    ]
    joint = " and " if bool(tokens) == bool(time) else "; "
    return f"Against {REFERENCE}, {judged.policy}: " + joint.join(told) + "."


def _change(gain: float, good: str, bad: str) -> str:
    """`12% fewer`; empty where that would be 0%."""
    shown = f"{abs(gain):.0%}"
    return "" if shown == "0%" else f"{shown} {good if gain > 0.0 else bad}"


def render_text(report: Report) -> str:
    """The whole report, ending in a newline."""
    lines = [report.title, "=" * len(report.title), ""]
    lines += _text_table([run.summary for run in report.runs])
    words = in_words(report)
    lines += ["", *textwrap.wrap(words, MAX_COLUMNS)] if words else []
    lines += ["", *_box(report)]
    if report.checks:
        lines += ["", *(f"  {check.line}" for check in report.checks)]
    for run in report.runs:
        lines += [
            f"  lost under {run.summary.policy}: {count:,} x {reason}"
            for reason, count in run.summary.lost_reasons.items()
        ]
    lines += [f"  warning: {warning}" for warning in report.warnings]
    lines += ["", f"  {'PASS' if report.is_passed else 'FAIL'}"]
    return "\n".join(lines) + "\n"


def _text_table(summaries: Sequence[Summary]) -> list[str]:
    rows = table(summaries)
    label_width = max(len(row.label) for row in rows)
    cells = [[_cell(row, index) for index in range(len(summaries))] for row in rows]
    widths = [
        max(len(summary.policy), *(len(value) for value, _ in column))
        for summary, column in zip(summaries, zip(*cells, strict=True), strict=True)
    ]
    head = " " * label_width
    for summary, width in zip(summaries, widths, strict=True):
        note = "x ref" if summary.policy != REFERENCE and _has_reference(summaries) else ""
        head += f"   {summary.policy:>{width}} {note:>7}"
    lines = [head.rstrip()]
    for row, columns in zip(rows, cells, strict=True):
        line = f"{row.label:<{label_width}}"
        for (value, ratio), width in zip(columns, widths, strict=True):
            line += f"   {value:>{width}} {ratio:>7}"
        lines.append(line.rstrip())
    if _has_reference(summaries):
        lines += ["", f"x ref: the figure over that of {REFERENCE}. TTFT is in engine ms."]
    return lines


def _box(report: Report) -> list[str]:
    number = f"FALSE HITS   {shown_hits(report)}"
    lines = [number, *textwrap.wrap(verdict_on_hits(report), MAX_COLUMNS - 8)]
    width = max(map(len, lines)) + 4
    edge = "  +" + "-" * width + "+"
    return [edge, *(f"  |{line:^{width}}|" for line in lines), edge]


def _cell(row: Row, index: int) -> tuple[str, str]:
    ratio = row.ratios[index]
    return row.values[index], "" if ratio is None else f"x{ratio:.2f}"


def _has_reference(summaries: Sequence[Summary]) -> bool:
    return any(summary.policy == REFERENCE for summary in summaries)


def _row(
    label: str,
    read: Callable[[Summary], float | None],
    show: Callable[[float], str],
    summaries: Sequence[Summary],
) -> Row:
    values = [read(summary) for summary in summaries]
    reference = next(
        (value for value, s in zip(values, summaries, strict=True) if s.policy == REFERENCE), None
    )
    ratios = [
        value / reference
        if value is not None and reference and summary.policy != REFERENCE and show is not _count
        else None
        for value, summary in zip(values, summaries, strict=True)
    ]
    shown = [NOT_MEASURED if value is None else show(value) for value in values]
    return Row(label=label, values=shown, ratios=ratios)


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _percent(value: float) -> str:
    return f"{value * 100:.1f} %"


def _tokens(value: float) -> str:
    return f"{value / 1e6:.2f} M" if value >= 1e6 else f"{value:,.0f}"


def _ms(value: float) -> str:
    return f"{value:,.1f} ms" if value < 1_000.0 else f"{value / 1_000.0:,.2f} s"


def _us(value: float) -> str:
    return f"{value:,.0f} us"


def _bytes(value: float) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.0f} B"


def _plain(value: float) -> str:
    return f"{value:.2f}"


def _point(
    spread: Callable[[Summary], Spread | Quantiles | None], name: str
) -> Callable[[Summary], float | None]:
    def read(summary: Summary) -> float | None:
        found = spread(summary)
        return None if found is None else getattr(found, name, None)

    return read


_FIGURES: tuple[tuple[str, Callable[[Summary], float | None], Callable[[float], str]], ...] = (
    ("requests", lambda s: s.requests, _count),
    ("lost", lambda s: s.lost, _count),
    ("hit tokens", lambda s: s.hit_tokens_ratio, _percent),
    ("hit requests", lambda s: s.hit_requests_ratio, _percent),
    ("prefill tokens avoided", lambda s: s.cached_tokens, _tokens),
    ("prefill tokens computed", lambda s: s.prefill_tokens, _tokens),
    ("TTFT mean", _point(lambda s: s.ttft_ms, "mean"), _ms),
    ("TTFT p50", _point(lambda s: s.ttft_ms, "p50"), _ms),
    ("TTFT p95", _point(lambda s: s.ttft_ms, "p95"), _ms),
    ("TTFT p99", _point(lambda s: s.ttft_ms, "p99"), _ms),
    ("TTFT p99, wall", _point(lambda s: s.ttft_wall_ms, "p99"), _ms),
    ("router queue p50", _point(lambda s: s.router_queue_ms, "p50"), _ms),
    ("router queue p99", _point(lambda s: s.router_queue_ms, "p99"), _ms),
    ("directory look-up p50", _point(lambda s: s.directory_lookup_us, "p50"), _us),
    ("directory look-up p99", _point(lambda s: s.directory_lookup_us, "p99"), _us),
    ("busiest / mean work", lambda s: s.busiest_over_mean_work, _plain),
    ("net time saved, mean", lambda s: s.net_saved_ms, _ms),
    ("plans: local hit", lambda s: s.plans.get("local"), _count),
    ("plans: pull", lambda s: s.plans.get("pull"), _count),
    ("plans: recompute", lambda s: s.plans.get("recompute"), _count),
    ("tokens pulled", lambda s: s.pulled_tokens, _tokens),
    ("bytes transferred", lambda s: s.transfer_bytes, _bytes),
    ("KV memory", lambda s: s.kv_memory_bytes, _bytes),
    ("gateway memory", lambda s: s.gateway_memory_bytes, _bytes),
    ("over-claims", lambda s: s.over_claims, _count),
    ("client late p99", _point(lambda s: s.client_late_ms, "p99"), _ms),
)
