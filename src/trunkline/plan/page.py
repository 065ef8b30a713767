"""The plan as one HTML file: words, plots and tables, no script, no address of any other file.

Needs matplotlib, of the `report` extra. Every text goes through `escape`. Must never: say what
`told.py` does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from trunkline.plan import told
from trunkline.plan.labels import Box, offsets
from trunkline.plan.peers import LEAST_QUEUE, OURS, ROUND_ROBIN
from trunkline.plan.savings import SHARED
from trunkline.replay.page import bullets, tile, whole_page
from trunkline.replay.plots import line_colour, series_colour, svg

_NAME_POINTS = 8.0


def render(found: dict[str, Any], title: str) -> str:
    """The whole page. Raises ConfigError when matplotlib is not installed."""
    sections = [
        f"<h1>{escape(title)}</h1>",
        _tiles(found),
        "<h2>What it means</h2>",
        bullets(told.sentences(found)),
        *_pictures(found),
    ]
    for sheet in told.sheets(found):
        sections += [f"<h2>{escape(sheet.title)}</h2>", _table(sheet)]
    sections += ["<h2>What stands behind it</h2>", bullets(told.doubts(found))]
    return whole_page(title, sections)


def _tiles(found: dict[str, Any]) -> str:
    log, savings, goal = found["log"], found["savings"], found["goal"]
    rows = {row["router"]: row for row in found["routing"]["rows"]}
    ours, blind = rows[OURS], rows[LEAST_QUEUE]
    needed = goal["workers"][OURS]
    tiles = [
        tile(f"{log['requests']:,}", "requests", f"{log['prompt_tokens']:,} prompt tokens"),
        tile(f"{savings['ceiling'][SHARED]:.1%}", "could be saved", "by a cache without limit"),
        tile(
            f"{ours['hit_tokens_ratio']:.1%}",
            f"hit tokens with {OURS}",
            f"{LEAST_QUEUE}: {blind['hit_tokens_ratio']:.1%}",
        ),
        tile(
            "none" if needed is None else f"{needed:,}",
            "workers for the goal",
            f"95 of 100 first tokens within {told.shown_time(goal['ttft_ms'])}",
        ),
    ]
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _pictures(found: dict[str, Any]) -> list[str]:
    drawn = [
        ("Savings by the size of one cache", _savings_curve(found)),
        ("Hits and waiting, by router", _router_points(found)),
        ("Prefill that pulls would save", _pulls_curve(found)),
    ]
    return [
        f"<h2>{escape(name)}</h2><figure>{picture}</figure>" for name, picture in drawn if picture
    ]


def _savings_curve(found: dict[str, Any]) -> str:
    savings = found["savings"]
    rows = told.shown_sizes(savings)

    def draw(axes: Any) -> None:  # Any: matplotlib is optional
        for index, scope in enumerate(savings["ceiling"]):
            name = "shared by all" if scope == SHARED else f"apart by {scope}"
            shares = [100.0 * row[scope] for row in rows]
            axes.plot([row["gib"] for row in rows], shares, color=series_colour(index), label=name)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(_in_gib)
        axes.set_ylim(bottom=0.0)
        axes.set_xlabel("memory for KV")
        axes.set_ylabel("hit tokens, %")
        axes.legend(loc="upper left")

    return svg(draw)


def _router_points(found: dict[str, Any]) -> str:
    rows = found["routing"]["rows"]
    own = {OURS: 0, LEAST_QUEUE: 1, ROUND_ROBIN: 2}

    def draw(axes: Any) -> None:
        points: dict[str, tuple[float, float]] = {}
        for row in rows:
            name = row["router"]
            colour = series_colour(own.get(name, 3))
            point = (100.0 * row["hit_tokens_ratio"], max(row["ttft_ms"]["p95"], 0.1) / 1e3)
            axes.plot(*point, marker="o", linestyle="", color=colour)
            points[name] = point
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(_in_seconds)
        axes.yaxis.set_minor_formatter(_in_seconds)
        axes.margins(x=0.12)
        axes.set_xlabel("hit tokens, %")
        axes.set_ylabel("TTFT p95")
        _name(axes, points)

    return svg(draw)


def _name(axes: Any, points: Mapping[str, tuple[float, float]]) -> None:
    """Put names beside points, with a line to the point where one stands further away."""
    figure = axes.figure
    figure.draw_without_rendering()  # until then nobody knows where the axes are
    inner, per_point = axes.get_window_extent(), 72.0 / figure.dpi
    inside = Box(left=inner.x0, bottom=inner.y0, right=inner.x1, top=inner.y1)
    placed = [(float(x), float(y)) for x, y in axes.transData.transform(list(points.values()))]
    # Browsers have a font of their own: six tenths of its size are more than a letter takes.
    size = _NAME_POINTS / per_point
    sizes = [(0.6 * size * len(name), 1.2 * size) for name in points]
    found = zip(points.items(), offsets(placed, sizes, inside), sizes, strict=True)
    for (name, point), (dx, dy), (width, height) in found:
        is_far = abs(dy + height / 2) > height
        is_left = dx < 0
        axes.annotate(
            name,
            point,
            xytext=((dx + width if is_left else dx) * per_point, (dy + height / 2) * per_point),
            textcoords="offset points",
            fontsize=_NAME_POINTS,
            horizontalalignment="right" if is_left else "left",
            verticalalignment="center",
            arrowprops={"arrowstyle": "-", "linewidth": 0.8, "color": line_colour()}
            if is_far
            else None,
        ).set_in_layout(False)


def _pulls_curve(found: dict[str, Any]) -> str:
    rows = [row for row in found["pulls"]["rows"] if row["tokens"] is not None]
    if len(rows) < 2:
        return ""

    def draw(axes: Any) -> None:
        axes.plot(
            [row["gbit"] for row in rows],
            [row["saved_ms"] / 1e3 for row in rows],
            marker="o",
            color=series_colour(0),
        )
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(_bare)
        axes.set_ylim(bottom=0.0)
        axes.set_xlabel("link between workers, Gbit/s")
        axes.set_ylabel("prefill saved, s")

    return svg(draw)


def _in_gib(value: float, _position: int) -> str:
    return f"{value:g} GiB"


def _in_seconds(value: float, _position: int) -> str:
    return f"{value:g} s"


def _bare(value: float, _position: int) -> str:
    return f"{value:g}"


def _table(sheet: told.Sheet) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in sheet.head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in sheet.rows
    )
    return (
        f'<p class="note">{escape(sheet.note)}</p><div class="scroll"><table><thead><tr>{head}</tr>'
        f"</thead><tbody>{body}</tbody></table></div>"
    )
