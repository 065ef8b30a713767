"""The report as one HTML file: no script, no address of any other file, light and dark.

Owns the page's look. Every text goes through `escape`. Read `command.py` next.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from trunkline.replay.plots import hits_over_time, ttft_curve, work_per_worker
from trunkline.replay.report import (
    REFERENCE,
    Report,
    Row,
    shown_hits,
    table,
    verdict_on_hits,
)

_CSS = """
:root {
  color-scheme: light dark;
  --font: system-ui, sans-serif;
  --paper: #ffffff; --card: #f5f6f8; --ink: #1d2430; --soft: #5b6472; --grid: #d9dde3;
  --good: #0a7d3c; --bad: #c4211d;
  --series-0: #1463d8; --series-1: #d9730d; --series-2: #6b7280;
  --series-3: #0f8f7f; --series-4: #a13fc0; --series-5: #b0891a;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #12161c; --card: #1b212a; --ink: #e6e9ee; --soft: #9aa4b2; --grid: #39424f;
    --good: #4cc77e; --bad: #ff6b64;
    --series-0: #6aa8ff; --series-1: #ff9f4a; --series-2: #a9b1bd;
    --series-3: #45d1bf; --series-4: #d58cf0; --series-5: #e3c14f;
  }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 2rem 1.25rem 4rem; background: var(--paper);
  color: var(--ink); font: 16px/1.5 var(--font); }
h1 { font-size: 1.5rem; margin: 0 0 1.25rem; }
h2 { font-size: 1.05rem; margin: 2.25rem 0 .5rem; }
.tiles { display: flex; flex-wrap: wrap; gap: 1rem; }
.tile { flex: 1 1 12rem; background: var(--card); border-radius: .6rem; padding: 1rem 1.25rem; }
.tile b { display: block; font-size: 2rem; line-height: 1.25; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
.tile small { color: var(--soft); }
.good { color: var(--good); } .bad { color: var(--bad); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .3rem .75rem; border-bottom: 1px solid var(--grid);
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
thead th { border-bottom: 2px solid var(--grid); }
td small { color: var(--soft); display: inline-block; min-width: 3.4em; }
.key { display: inline-block; width: .7em; height: .7em; border-radius: 50%; margin-right: .4em; }
ul { padding-left: 1.2rem; } li { margin: .2rem 0; }
code { background: var(--card); padding: .15rem .4rem; border-radius: .3rem; font-size: .9em;
  overflow-wrap: anywhere; }
figure { margin: 0; } figure svg { width: 100%; height: auto; }
p.note { color: var(--soft); margin: .5rem 0; }
"""


def render_page(report: Report) -> str:
    """The whole page. Raises ConfigError when matplotlib is not installed."""
    sections = [
        f"<h1>{escape(report.title)}</h1>",
        _tiles(report),
        _bars(report),
        "<h2>Figures</h2>",
        _table(report),
        *_figures(report),
        _notes(report),
    ]
    return whole_page(report.title, sections)


def whole_page(title: str, sections: Sequence[str]) -> str:
    """A page of sections that are HTML already; empty ones are left out."""
    title = escape(title)
    body = "\n".join(section for section in sections if section)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{_CSS}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _tiles(report: Report) -> str:
    rows = {row.label: row for row in table([run.summary for run in report.runs])}
    tone = "bad" if report.false_hits or not report.answers_checked else "good"
    tiles = [
        tile(shown_hits(report), "false hits", verdict_on_hits(report), tone),
        _figure_tile(rows["hit tokens"], "hit tokens"),
        _figure_tile(rows["TTFT p95"], "TTFT p95, engine time"),
        tile(
            "PASS" if report.is_passed else "FAIL",
            "verdict",
            _bar_note(report),
            "good" if report.is_passed else "bad",
        ),
    ]
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _bar_note(report: Report) -> str:
    if not report.checks:
        return "no bar was set"
    passed = sum(check.is_passed for check in report.checks)
    return f"{passed} of {len(report.checks)} bars passed"


def _figure_tile(row: Row, name: str) -> str:
    ratio = row.ratios[0]
    note = "" if ratio is None else f"{ratio:.2f} times {REFERENCE}"
    return tile(row.values[0], name, note, "")


def tile(number: str, name: str, note: str, tone: str = "") -> str:
    """One large number; `tone` is `good`, `bad` or none."""
    return (
        f'<div class="tile"><small>{escape(name)}</small><b class="{tone}">{escape(number)}</b>'
        f"<small>{escape(note)}</small></div>"
    )


def _bars(report: Report) -> str:
    if not report.checks:
        return ""
    items = "".join(
        f'<li class="{"good" if check.is_passed else "bad"}">{escape(check.line)}</li>'
        for check in report.checks
    )
    return f"<h2>Bars</h2><ul>{items}</ul>"


def _table(report: Report) -> str:
    summaries = [run.summary for run in report.runs]
    head = "".join(
        f'<th><span class="key" style="background: var(--series-{min(index, 5)})"></span>'
        f"{escape(summary.policy)}</th>"
        for index, summary in enumerate(summaries)
    )
    rows = table(summaries)
    has_ratios = any(ratio is not None for row in rows for ratio in row.ratios)
    body = "".join(_table_row(row, has_ratios=has_ratios) for row in rows)
    note = f'<p class="note">Small: times the figure of {REFERENCE}.</p>' if has_ratios else ""
    return (
        f'<div class="scroll"><table><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>{note}"
    )


def _table_row(row: Row, *, has_ratios: bool) -> str:
    cells = ""
    for value, ratio in zip(row.values, row.ratios, strict=True):
        small = "" if ratio is None else f"×{ratio:.2f}"
        cells += (
            f"<td>{escape(value)}" + (f" <small>{small}</small>" if has_ratios else "") + "</td>"
        )
    return f"<tr><td>{escape(row.label)}</td>{cells}</tr>"


def _figures(report: Report) -> list[str]:
    runs = [run for run in report.runs if any(record.ttft_ms is not None for record in run.records)]
    if len(runs) < len(report.runs):
        return ['<p class="note">No plots: a run has no request that got a first token.</p>']
    drawn = (
        ("Time to first token", ttft_curve(runs)),
        ("Hits over time", hits_over_time(runs)),
        ("Work per worker", work_per_worker(runs)),
    )
    return [f"<h2>{name}</h2><figure>{svg}</figure>" for name, svg in drawn if svg]


def _notes(report: Report) -> str:
    items = [f"warning: {warning}" for warning in report.warnings]
    items += [
        f"lost under {run.summary.policy}: {count:,} x {reason}"
        for run in report.runs
        for reason, count in run.summary.lost_reasons.items()
    ]
    command = (
        f"<p>Make it again: <code>{escape(report.command)}</code></p>" if report.command else ""
    )
    return "".join(("<h2>Notes</h2>" if items or command else "", bullets(items), command))


def bullets(items: Sequence[str]) -> str:
    """A list; empty for no items."""
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>" if items else ""
