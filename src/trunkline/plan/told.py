"""The figures of a plan for people: what they mean in words first, then tables.

Plain text, aligned. The sentences and the tables are those of the page, too (`page.py`). Must
never: leave out what was assumed.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any

from trunkline.plan.moves import MAX_GOAL_WORKERS
from trunkline.plan.peers import LEAST_QUEUE, OURS, ROUND_ROBIN
from trunkline.plan.savings import SHARED

MAX_COLUMNS = 100
ENOUGH = 0.999
"""Of the ceiling: larger caches are not shown."""
_POINT = 0.0005


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """One table; the first column is of words."""

    title: str
    note: str
    head: list[str]
    rows: list[list[str]]


def sentences(found: dict[str, Any]) -> list[str]:
    """What it means."""
    told = [*_of_savings(found), *_of_routing(found), *_of_goal(found), *_of_pulls(found)]
    return told + _of_isolation(found)


def doubts(found: dict[str, Any]) -> list[str]:
    """What stands behind the figures, and what was wrong with the log."""
    log, fleet, routing = found["log"], found["fleet"], found["routing"]
    workers = counted(fleet["workers"], "worker")
    told = [
        f"assumed: {workers} with {fleet['cache_gib']:g} GiB for KV each,"
        f" {fleet['kv_kib_per_token']:g} KiB a token ({fleet['cache_tokens']:,} tokens), a"
        f" prefill of {fleet['prefill_tokens_per_s']:,.0f} tokens a second; caches begin empty, and"
        " last tokens are always computed"
    ]
    if routing["requests"] < routing["of_requests"]:
        told.append(
            f"routing was tried on the busiest {routing['requests']:,} of"
            f" {routing['of_requests']:,} requests ({_seconds(routing['span_s'])})"
        )
    if routing["block_tokens"] != log["block_tokens"]:
        told.append(f"routing took blocks together, to {routing['block_tokens']:,} tokens")
    if routing["spread_ticks_ms"]:
        told.append(
            f"arrivals are rounded to {routing['spread_ticks_ms'] / 1e3:g} s; they were spread"
            " inside these ticks, with a fixed seed"
        )
    followed = min(found["savings"]["followed"].values())
    if followed < 1.0:
        told.append(f"one block of {1 / followed:,.0f} was followed; savings are estimates")
    if log["without_time"]:
        told.append(
            f"{log['without_time']:,} requests have no time; the pace is"
            f" {fleet['per_second']:g} a second"
        )
    if log["late"]:
        told.append(f"{log['late']:,} requests came too late to be put in order of time")
    if log["usage_over_guess"]:
        told.append(
            f"engines counted {log['usage_over_guess']:.2f} times the prompt tokens that were"
            " guessed from the text; --bytes-per-token or --tokenizer-path bring it nearer"
        )
    if log["other_lines"]:
        is_or_are = "is" if log["other_lines"] == 1 else "are"
        told.append(
            f"{counted(log['other_lines'], 'line')} {is_or_are} about something else than a prompt"
        )
    for reason, what in log["malformed_by_reason"].items():
        more = ", ..." if what["count"] > len(what["first"]) else ""
        told.append(f"left out: {what['count']:,} x {reason} ({', '.join(what['first'])}{more})")
    return told


def sheets(found: dict[str, Any]) -> list[Sheet]:
    """All tables, in order."""
    made = [_savings_sheet(found), _routing_sheet(found), _pulls_sheet(found)]
    if found["isolation"]:
        made.append(_isolation_sheet(found))
    if found["public_prefixes"] and found["public_prefixes"]["rows"]:
        made.append(_prefix_sheet(found["public_prefixes"]))
    return made


def page(found: dict[str, Any], title: str) -> str:
    """The whole plan as text."""
    log = found["log"]
    lines = [title, "=" * len(title), ""]
    lines.append(
        f"{counted(log['requests'], 'request')}, {log['prompt_tokens']:,} prompt tokens,"
        f" {_seconds(log['span_s'])}; {counted(log['malformed'], 'line')} left out"
    )
    for text in sentences(found):
        lines += ["", *textwrap.wrap(text, MAX_COLUMNS)]
    for sheet in sheets(found):
        lines += ["", sheet.title, *textwrap.wrap(sheet.note, MAX_COLUMNS), *_aligned(sheet)]
    lines.append("")
    for text in doubts(found):
        lines += textwrap.wrap(text, MAX_COLUMNS, initial_indent="- ", subsequent_indent="  ")
    return "\n".join(lines)


def _aligned(sheet: Sheet) -> list[str]:
    cells = [sheet.head, *sheet.rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            f"{cell:<{width}}" if index == 0 else f"{cell:>{width}}"
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def _of_savings(found: dict[str, Any]) -> list[str]:
    savings, fleet = found["savings"], found["fleet"]
    ceiling = savings["ceiling"][SHARED]
    if ceiling < _POINT:
        return ["No prompt begins like an earlier one: a prefix cache would save nothing here."]
    rows = savings["by_cache"]
    one = next(row for row in rows if row["gib"] == fleet["cache_gib"])
    count = fleet["workers"]
    everyone = "the one worker" if count == 1 else f"all {count} workers"
    whole = next(row for row in rows if row["gib"] == fleet["cache_gib"] * fleet["workers"])
    return [
        f"A prefix cache without limit would save {ceiling:.1%} of all prompt tokens. One cache of"
        f" {one['gib']:g} GiB saves {one[SHARED]:.1%}; the memory of {everyone}"
        f" as one ({whole['gib']:,.0f} GiB) {whole[SHARED]:.1%}."
    ]


def _of_routing(found: dict[str, Any]) -> list[str]:
    rows = {row["router"]: row for row in found["routing"]["rows"]}
    ours, blind, turns = rows[OURS], rows[LEAST_QUEUE], rows[ROUND_ROBIN]
    peers = [row for name, row in rows.items() if name not in (OURS, LEAST_QUEUE, ROUND_ROBIN)]
    best = min(peers[:-1], key=lambda row: row["ttft_ms"]["p95"])
    computed = 1.0 - ours["prefill_tokens"] / max(1, blind["prefill_tokens"])
    within, blindly, by_turns, at_best = (
        shown_time(row["ttft_ms"]["p95"]) for row in (ours, blind, turns, best)
    )
    workers = counted(found["fleet"]["workers"], "worker")
    told = (
        f"With {OURS} {workers} would hit {ours['hit_tokens_ratio']:.1%}"
        f" and give the first token within {within} (95 of 100 requests); {LEAST_QUEUE}"
        f" {blind['hit_tokens_ratio']:.1%} and {blindly}, {ROUND_ROBIN}"
        f" {turns['hit_tokens_ratio']:.1%} and {by_turns}."
    )
    if abs(computed) < _POINT:
        return [f"{told} Whom a request goes to makes no difference to what is computed here."]
    return [
        f"{told} That is {abs(computed):.0%}"
        f" {'less' if computed > 0 else 'more'} prefill than {LEAST_QUEUE}. Of the other routers"
        f" {best['router']} comes first: {best['hit_tokens_ratio']:.1%} and {at_best}."
    ]


def _of_goal(found: dict[str, Any]) -> list[str]:
    goal = found["goal"]
    ours, blind = goal["workers"][OURS], goal["workers"][LEAST_QUEUE]
    within = shown_time(goal["ttft_ms"])
    what = f"A first token within {within} for {goal['share']:.0%} of the requests"
    if ours is None:
        return [
            f"{what} is out of reach at this prefill speed with up to {MAX_GOAL_WORKERS} workers."
        ]
    more = f"with {LEAST_QUEUE} {blind}" if blind else f"with {LEAST_QUEUE} it is out of reach"
    return [f"{what} needs {counted(ours, 'worker')}; {more}."]


def _of_pulls(found: dict[str, Any]) -> list[str]:
    pulls, fleet = found["pulls"], found["fleet"]
    row = next(row for row in pulls["rows"] if row["gbit"] == fleet["link_gbit"])
    if row["tokens"] is None:
        return [
            f"Pulling KV over {fleet['link_gbit']:g} Gbit/s never pays: computing is faster. It"
            f" begins to above {pulls['least_gbit']:g} Gbit/s."
        ]
    return [
        f"Pulling KV over {fleet['link_gbit']:g} Gbit/s pays from {row['tokens']:,.0f} tokens on;"
        f" {counted(row['calls'], 'request')} would have won {row['saved_ms'] / 1e3:,.0f} s of"
        " prefill."
    ]


def _of_isolation(found: dict[str, Any]) -> list[str]:
    told: list[str] = []
    if not found["isolation"]:
        told.append("The log names no tenant, user or session, so what isolation costs is unknown.")
    told += [
        f"A namespace for each {row['scope']} costs {100 * row['ceiling_cost']:.1f} points of"
        f" the ceiling, and {100 * row['at_fleet_cost']:.1f} in the fleet's memory."
        for row in found["isolation"]
    ]
    prefixes = found["public_prefixes"]
    if prefixes and prefixes["rows"]:
        told.append(
            f"Registering {len(prefixes['rows'])} public prefixes would bring back"
            f" {prefixes['won_of_lost']:.0%} of what keeping each {prefixes['owners']} apart loses."
        )
    elif prefixes:
        told.append("No prefix is worth registering: owners have none in common.")
    return told


def _savings_sheet(found: dict[str, Any]) -> Sheet:
    savings = found["savings"]
    scopes, ceiling = list(savings["ceiling"]), savings["ceiling"]
    shown = shown_sizes(savings)
    titles = {SHARED: "shared by all"}
    return Sheet(
        title="Hit tokens by the size of one cache",
        note="least recently used first, leaves before roots",
        head=["cache", "tokens", *(titles.get(name, f"apart by {name}") for name in scopes)],
        rows=[
            [f"{row['gib']:,g} GiB", f"{row['tokens']:,}", *(f"{row[s]:.1%}" for s in scopes)]
            for row in shown
        ]
        + [["no limit", "", *(f"{ceiling[scope]:.1%}" for scope in scopes)]],
    )


def _routing_sheet(found: dict[str, Any]) -> Sheet:
    return Sheet(
        title=f"Routing at {counted(found['fleet']['workers'], 'worker')}",
        note="A model that ranks routers; it does not predict absolute latency. Others' are short"
        " versions of their published rules. The limit: one cache of the fleet's size.",
        head=["", "hit tokens", "prefill", "TTFT mean", "p50", "p95", "p99", "busiest/mean"],
        rows=[
            [
                row["router"],
                f"{row['hit_tokens_ratio']:.1%}",
                f"{row['prefill_tokens'] / 1e6:,.2f} M",
                *(shown_time(row["ttft_ms"][name]) for name in ("mean", "p50", "p95", "p99")),
                f"{row['busiest_over_mean_work']:.2f}",
            ]
            for row in found["routing"]["rows"]
        ],
    )


def _pulls_sheet(found: dict[str, Any]) -> Sheet:
    return Sheet(
        title="Pulls between workers",
        note=f"{found['pulls']['calls_with_more_elsewhere']:,} requests went where another worker"
        " held more of their prompt",
        head=["link", "pays from", "requests", "tokens", "prefill saved"],
        rows=[
            [
                f"{row['gbit']:g} Gbit/s",
                "never" if row["tokens"] is None else f"{row['tokens']:,.0f} tokens",
                f"{row['calls']:,}",
                f"{row['pulled_tokens']:,}",
                f"{row['saved_ms'] / 1e3:,.1f} s",
            ]
            for row in found["pulls"]["rows"]
        ],
    )


def _isolation_sheet(found: dict[str, Any]) -> Sheet:
    return Sheet(
        title="What isolation costs",
        note="in points of all prompt tokens",
        head=["a namespace a", "no limit", "cost", "in the fleet's memory", "cost"],
        rows=[
            [
                row["scope"],
                f"{row['ceiling']:.1%}",
                f"{100 * row['ceiling_cost']:.1f}",
                f"{row['at_fleet']:.1%}",
                f"{100 * row['at_fleet_cost']:.1f}",
            ]
            for row in found["isolation"]
        ],
    )


def _prefix_sheet(prefixes: dict[str, Any]) -> Sheet:
    owners = prefixes["owners"]
    return Sheet(
        title="Public prefixes worth registering",
        note=f"found in the busiest stretch, of {prefixes['count']:,} {owners}s; the line is the"
        " first that has all of it",
        head=["", "tokens", f"{owners}s", "hit tokens", "of the lost, together", "line"],
        rows=[
            [
                str(number),
                f"{row['prefix_tokens']:,}",
                f"{row['owners']:,}",
                f"{row['hit_tokens']:,}",
                f"{row['won_of_lost']:.0%}",
                f"{row['first_line']:,}",
            ]
            for number, row in enumerate(prefixes["rows"], start=1)
        ],
    )


def shown_sizes(savings: dict[str, Any]) -> list[dict[str, Any]]:
    """Cache sizes up to the one that is as good as one without limit."""
    rows, ceiling = savings["by_cache"], savings["ceiling"][SHARED]
    enough = next((n for n, row in enumerate(rows) if row[SHARED] >= ENOUGH * ceiling), len(rows))
    return rows[: max(2, enough + 1)]


def counted(count: int, noun: str) -> str:
    """So many of them, in the singular where it is one."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _seconds(span_s: float) -> str:
    """A short log is not shown as none."""
    return f"{span_s:,.0f} s" if span_s >= 10.0 else f"{span_s:.3g} s"


def shown_time(ms: float) -> str:
    """A time as people say it."""
    return f"{ms:,.0f} ms" if ms < 1e3 else f"{ms / 1e3:,.2f} s"
