"""`trunkline explain`: why a request went where it went, what the others would have cost, and what
came true of it.

Shows what the admin port says and computes nothing but shares. Must never: show a prompt. Read
`core/decision.py` for the terms.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

from trunkline.admin_client import AdminRefused, Json
from trunkline.errors import ConfigError
from trunkline.tenant_answers import client_of
from trunkline.tenant_commands import add_where
from trunkline.terminal import OK, Terminal, print_json, printable

MAX_PROMPT_BYTES = 8 << 20
_SHOWN = 16
"""Candidates in a table, the chosen one always among them; --json has all."""
_TERMS = ("queue_ms", "transfer_ms", "miss_ms", "imbalance_ms", "decode_pressure_ms")
_HEADS = ("queue", "transfer", "miss", "imbalance", "decode")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "request",
        nargs="?",
        metavar="REQUEST_ID",
        help="the x-request-id of an answer, or its x-trunkline-decision as a client sees it",
    )
    group = parser.add_argument_group("in place of a request, one that is not sent")
    group.add_argument(
        "--prompt",
        type=Path,
        metavar="FILE",
        help="a request's body as JSON (with messages or prompt), or any text; - for stdin",
    )
    group.add_argument("--tenant", default="", metavar="NAME", help="who would ask [the only one]")
    group.add_argument("--user", default="", metavar="NAME", help="of that tenant [none]")
    group.add_argument("--model", default="", metavar="NAME", help="[what the body says]")
    add_where(parser)


def run(arguments: argparse.Namespace, terminal: Terminal) -> int:
    """Raises ConfigError, and what the admin client raises."""
    if (arguments.request is None) == (arguments.prompt is None):
        raise ConfigError("give a request's id, or --prompt FILE for one that is not sent")
    if arguments.prompt is None and (arguments.tenant or arguments.user or arguments.model):
        raise ConfigError("--tenant, --user and --model go with --prompt FILE")
    client = client_of(arguments, terminal)
    if arguments.prompt is not None:
        found = client.ask("POST", "/decisions", _order(arguments))
    else:
        try:
            found = client.get(f"/decisions/{quote(arguments.request, safe='')}")
        except AdminRefused as refused:
            if refused.answered != 404:
                raise
            raise ConfigError(
                f"the gateway keeps no decision of {arguments.request!r}: it remembers the last"
                " ones only (--decisions-kept), each gateway its own"
            ) from refused
    if arguments.json:
        return print_json(found, terminal)
    for line in _all_lines(found):
        terminal.say(printable(line))
    return OK


# -- what is asked ---------------------------------------------------------------------------------


def _order(arguments: argparse.Namespace) -> Json:
    raw = _read(arguments.prompt)
    try:
        body: Any = json.loads(raw)
    except (ValueError, RecursionError):
        body = None
    if isinstance(body, dict) and ("messages" in body or "prompt" in body):
        request = cast("Json", body)
    elif raw:
        request = {"prompt": raw}
    else:
        raise ConfigError(f"--prompt {arguments.prompt} is empty")
    if arguments.model:
        request["model"] = arguments.model
    path = "/v1/chat/completions" if "messages" in request else "/v1/completions"
    return {
        "tenant": arguments.tenant,
        "user": arguments.user,
        "path": path,
        "request": request,
    }


def _read(path: Path) -> str:
    import sys

    try:
        with sys.stdin.buffer if str(path) == "-" else path.open("rb") as file:
            raw = file.read(MAX_PROMPT_BYTES + 1)
        if len(raw) > MAX_PROMPT_BYTES:
            raise ConfigError(f"--prompt {path} has more than {MAX_PROMPT_BYTES} bytes")
        return raw.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompt {path} cannot be read: {error}") from error


# -- what is shown ---------------------------------------------------------------------------------


def _all_lines(found: Json) -> list[str]:
    others = found.get("same_id", [])
    lines = _lines(found)
    if others:
        count = f"{len(others)} other request{'' if len(others) == 1 else 's'}"
        lines = [f"{count} had the same id: the latest is shown first", "", *lines]
    for one in others:
        lines += ["", *_lines(one)]
    return lines


def _lines(found: Json) -> list[str]:
    is_dry = "outcome" not in found
    verb = "would go to" if is_dry else "went to"
    title = "this request" if is_dry else f"request {found['request_id']}"
    lines = [f"{title} {verb} {found['worker']}: {found['reason']} (policy {found['policy']})"]
    if found.get("at"):
        lines.append(f"chosen at {found['at']}")
    lines.append(_prompt_line(found))
    lines += gain_lines(found)
    lines += ["", *_table(found)]
    lines += [f"  not asked: {worker} ({why})" for worker, why in found["excluded"].items()]
    lines += [f"  note: {note}" for note in found["notes"]]
    if is_dry:
        return [*lines, "", "nothing was sent, and nothing is remembered of it"]
    lines += ["", _outcome_line(found)]
    lines += [
        f"  an earlier attempt: {one['worker']}, {_outcome_line(one)}" for one in found["earlier"]
    ]
    return lines


def _prompt_line(found: Json) -> str:
    tokens, matched, pulled = (
        found[name] for name in ("prompt_tokens", "matched_tokens", "pulled_tokens")
    )
    if not tokens:
        return "nothing is known of its prompt: it was placed by load alone"
    pull = f", {pulled:,} pulled from {found['source']}" if pulled else ""
    return (
        f"prompt of {tokens:,} tokens: {matched:,} expected there ({matched / tokens:.0%}){pull},"
        f" {tokens - matched - pulled:,} to compute"
    )


def gain_lines(found: Json) -> list[str]:
    """The sum, and what of it is time where not all of it is."""
    gain = found["gain"]
    saved, queue, transfer, imbalance = (
        f"{unsigned(gain[name]):,.1f}"
        for name in ("saved_prefill_ms", "queue_ms", "transfer_ms", "imbalance_ms")
    )
    sum_line = (
        "against the best choice that is blind to caches:"
        f" {unsigned(found['net_gain_ms']):+,.1f} ms = saved prefill {saved} - queue {queue}"
        f" - transfer {transfer} - imbalance {imbalance}"
    )
    if unsigned(gain["imbalance_ms"]) == 0.0:
        return [sum_line]
    spared_ms = gain["saved_prefill_ms"] - gain["queue_ms"] - gain["transfer_ms"]
    return [
        sum_line,
        f"of it, time: {unsigned(spared_ms):+,.1f} ms (imbalance is the price that keeps cold"
        " prompts from crowding one worker: nobody waits for it)",
    ]


def unsigned(ms: float) -> float:
    """Less the sign of what is shown as nothing."""
    return 0.0 if abs(ms) < 0.05 else ms


def _table(found: Json) -> list[str]:
    """Every candidate with its terms, the cheapest first; the terms add up to the cost."""
    rows = sorted(found["candidates"], key=lambda row: row["cost_ms"])
    shown = _chosen_among(rows, found["worker"])
    width = max(len("worker"), *(len(row["worker"]) for row in shown))
    heads = " ".join(f"{head:>10s}" for head in _HEADS)
    lines = [f"  {'worker':{width}s} {'has':>9s} {'pulls':>9s} {heads} {'= cost ms':>11s}"]
    for row in shown:
        mark = "*" if row["worker"] == found["worker"] else " "
        terms = " ".join(f"{unsigned(row[name]):10,.1f}" for name in _TERMS)
        lines.append(
            f"{mark} {row['worker']:{width}s} {row['matched_tokens']:9,} {row['pulled_tokens']:9,}"
            f" {terms} {row['cost_ms']:11,.1f}"
        )
    if len(rows) > len(shown):
        lines.append(f"  and {len(rows) - len(shown)} more, all dearer; --json has them")
    return lines


def _chosen_among(rows: Sequence[Json], worker: str) -> list[Json]:
    shown = list(rows[:_SHOWN])
    if all(row["worker"] != worker for row in shown):
        shown[-1] = next(row for row in rows if row["worker"] == worker)
    return shown


def _outcome_line(found: Json) -> str:
    outcome = found["outcome"]
    if outcome is None:
        return "it is still running"
    if outcome["end"] == "unheard":
        return (
            f"over after {outcome['took_ms']:,.0f} ms: a stream that another proxy carried, so that"
            " neither its first token nor what it reused is known"
        )
    first = outcome["first_byte_ms"]
    began = (
        "no answer began"
        if first is None
        else f"its answer began after {first:,.0f} ms (its prefill was predicted to take"
        f" {outcome['predicted_ms']:,.0f})"
    )
    reused, predicted = outcome["reused_tokens"], outcome["predicted_tokens"]
    told = (
        "the worker does not say what it reused"
        if reused is None
        else f"{reused:,} tokens reused of {predicted:,} predicted"
    )
    return f"{outcome['end']} after {outcome['took_ms']:,.0f} ms: {began}; {told}"
