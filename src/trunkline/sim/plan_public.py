"""`trunkline plan public TRACE`: what hard tenants cost on a trace, and which prefixes to register.

Owns the flags and how the count is shown. Must never: print a token, write one unless it was asked
to, or register anything. Read `isolation.py` for what is counted, `prefix_files.py` for the tokens.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Any, TextIO, cast

from trunkline.core.publics import MAX_PREFIXES
from trunkline.errors import ConfigError, TraceError
from trunkline.replay.formats import ReadOptions, TraceFormat, read_trace
from trunkline.replay.traces import TraceRequest, take
from trunkline.replay.workloads import explained, find_workload, load_workload
from trunkline.sim import prefix_files
from trunkline.sim.isolation import (
    NAMED_BLOCK_TOKENS,
    Candidate,
    IsolationCount,
    TenantOf,
    by_map,
    by_model,
    by_session,
    count,
    session_of,
)

MAX_TENANTS = 1_000_000
MAX_MAP_BYTES = 64 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `trunkline plan public`."""
    parser.add_argument("trace", metavar="TRACE", help="a workload (see below) or a trace file")
    add = parser.add_argument_group("what is read").add_argument
    add("--requests", type=int, metavar="COUNT", help="only the first so many [all]")
    add("--traces", type=Path, metavar="DIR", help="folder of the workloads' traces [the bundled]")
    formats = [one.value for one in TraceFormat]
    add("--format", choices=formats, default="auto", help="of a trace file [auto]")
    add(
        "--block-tokens",
        type=int,
        metavar="TOKENS",
        help="tokens that a block id in a trace file stands for [as the file says]",
    )
    add = parser.add_argument_group("who is whose").add_argument
    add(
        "--tenants",
        type=int,
        default=8,
        metavar="NUMBER",
        help="spread the sessions over so many tenants [8]",
    )
    add("--seed", type=int, default=0, metavar="NUMBER", help="of that spread [0]")
    add(
        "--tenant-by",
        choices=("session", "model"),
        help="each session, or each model, is a tenant of its own",
    )
    add(
        "--tenant-map",
        type=Path,
        metavar="FILE",
        help="a JSON object: session -> tenant; takes the place of the two above",
    )
    add = parser.add_argument_group("what is shown").add_argument
    add("--best", type=int, default=10, metavar="COUNT", help="so many prefixes [10]")
    add(
        "--min-tenants",
        type=int,
        default=2,
        metavar="COUNT",
        help="leave out what fewer tenants have in common [2]",
    )
    add("--json", action="store_true", help="print one JSON object in place of the table")
    add(
        "--write-tokens",
        type=Path,
        metavar="DIR",
        help="write the token ids of each shown prefix to DIR/prefix-N.json, as `trunkline public"
        " propose --tokens` takes them; of a trace whose prompts are token ids",
    )
    parser.add_argument_group("workloads", description=explained())


def run(args: argparse.Namespace, *, traces_dir: Path, out: TextIO) -> int:
    """Carry out the command. Raises ConfigError and TraceError."""
    for name, least, most in (
        ("tenants", 1, MAX_TENANTS),
        ("best", 1, MAX_PREFIXES),
        ("min_tenants", 2, MAX_TENANTS),
    ):
        if not least <= getattr(args, name) <= most:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} is {getattr(args, name)}, allowed are {least} to {most}")
    if args.requests is not None and args.requests < 1:
        raise ConfigError(f"--requests is {args.requests}, allowed are 1 and more")
    if args.write_tokens is not None:
        prefix_files.check(args.write_tokens, args.trace, _requests(args, traces_dir))
    counted = count(_requests(args, traces_dir), _tenants(args))
    result = figures(args.trace, counted, best=args.best, min_tenants=args.min_tenants)
    if args.write_tokens is not None:
        rows = result["registering"]["best"]
        prefix_files.write(args.write_tokens, rows, _requests(args, traces_dir))
    print(json.dumps(result, indent=2) if args.json else _table(result), file=out)
    return 0


def figures(trace: str, counted: IsolationCount, *, best: int, min_tenants: int) -> dict[str, Any]:
    """Everything that is shown, in tokens."""
    hits = counted.hits
    candidates = counted.candidates(min_tenants)
    chosen = candidates[:best]
    lost = hits.shared - hits.tenant
    sums = list(accumulate(one.hit_tokens for one in chosen))
    won = sums[-1] if sums else 0
    return {
        "trace": trace,
        "requests": hits.requests,
        "tenants": hits.tenants,
        "sessions": hits.sessions,
        "prompt_tokens": hits.input_tokens,
        "hit_tokens": {
            "shared": hits.shared,
            "tenant": hits.tenant,
            "session": hits.session,
            "tenant_and_public": hits.tenant + won,
        },
        "isolation_cost_tokens": {"tenant": lost, "session": hits.shared - hits.session},
        "registering": {
            "worth_registering": len(candidates),
            "best": [_row(one, total, lost) for one, total in zip(chosen, sums, strict=True)],
            "won_tokens": won,
            "won_of_lost": round(won / lost, 6) if lost else None,
        },
    }


def _row(one: Candidate, total: int, lost: int) -> dict[str, Any]:
    return {**asdict(one), "won_tokens": total, "won_of_lost": round(total / lost, 6)}


def _requests(args: argparse.Namespace, traces_dir: Path) -> Iterable[TraceRequest]:
    found = _all_requests(args, traces_dir)
    return found if args.requests is None else take(found, args.requests)


def _all_requests(args: argparse.Namespace, traces_dir: Path) -> Iterable[TraceRequest]:
    if Path(args.trace).is_file():
        options = ReadOptions(format=TraceFormat(args.format), block_tokens=args.block_tokens)
        return read_trace(Path(args.trace), options)
    if "/" in args.trace or "." in args.trace:
        raise TraceError(f"{args.trace}: no such file")
    return load_workload(find_workload(args.trace).name, traces_dir=args.traces or traces_dir)


def _tenants(args: argparse.Namespace) -> TenantOf:
    if args.tenant_map is not None:
        return by_map(_read_map(args.tenant_map))
    if args.tenant_by == "model":
        return by_model
    if args.tenant_by == "session":
        return session_of
    return by_session(args.tenants, args.seed)


def _read_map(path: Path) -> dict[str, str]:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_MAP_BYTES + 1)
        found: Any = json.loads(raw) if len(raw) <= MAX_MAP_BYTES else None
    except (OSError, ValueError, RecursionError) as error:
        raise TraceError(f"{path}: expected a JSON object of session -> tenant: {error}") from error
    if not isinstance(found, dict) or not all(
        type(tenant) is str for tenant in cast("dict[str, Any]", found).values()
    ):
        raise TraceError(
            f"{path}: expected a JSON object of session -> tenant, of at most {MAX_MAP_BYTES} bytes"
        )
    return cast("dict[str, str]", found)


def _table(result: dict[str, Any]) -> str:
    prompt_tokens, hits = max(1, result["prompt_tokens"]), result["hit_tokens"]
    lines = [
        f"{result['trace']}: {result['requests']:,} requests of {result['tenants']:,} tenants in"
        f" {result['sessions']:,} sessions, {result['prompt_tokens']:,} prompt tokens",
        "hits in a cache without limit, what any router could reach at most:",
        f"{'':28s} {'hit tokens':>14s} {'of prompt':>10s} {'isolation cost':>15s}",
    ]
    for name, title in (
        ("shared", "one namespace for all"),
        ("tenant", "a namespace a tenant"),
        ("session", "a namespace a session"),
    ):
        cost = result["isolation_cost_tokens"].get(name, 0)
        lines.append(f"{title:28s} {hits[name]:14,} {hits[name] / prompt_tokens:10.2%} {cost:15,}")
    if result["sessions"] == result["requests"] > 1:
        lines.append(
            "note: no two requests are of one session, so conversations are torn apart as well: the"
            " cost is an upper bound"
        )
    registering = result["registering"]
    rows = registering["best"]
    if not rows:
        return "\n".join([*lines, "no prefix is worth registering: tenants have none in common"])
    lines += [
        f"prefixes worth registering: {registering['worth_registering']:,}; the best {len(rows)}:",
        f"{'':4s} {'tokens':>8s} {'tenants':>8s} {'of all':>8s} {'hit tokens':>14s}"
        f" {'together':>14s} {'of the lost':>12s}  first request, session",
    ]
    lines += [
        f"{number:4d} {row['prefix_tokens']:8,} {row['tenants']:8,} {row['whole_tenants']:8,}"
        f" {row['hit_tokens']:14,} {row['won_tokens']:14,} {row['won_of_lost']:12.1%}"
        f"  {row['first_request']}, {_printable(row['first_session'])}"
        for number, row in enumerate(rows, start=1)
    ]
    lines.append(
        f"registering {len(rows)} makes it {hits['tenant_and_public']:,} hit tokens"
        f" ({hits['tenant_and_public'] / prompt_tokens:.2%} of prompt)"
    )
    return "\n".join([*lines, *_next_steps(rows)])


def _next_steps(rows: list[dict[str, Any]]) -> list[str]:
    """What to do with the tokens, where they were asked for."""
    if "tokens_file" not in rows[0]:
        return []
    files = [row["tokens_file"] for row in rows if row["tokens_file"]]
    lines = [
        f"prefix {number} was not written: its first request has no token ids"
        for number, row in enumerate(rows, start=1)
        if not row["tokens_file"]
    ]
    if files:
        lines.append(
            f"wrote {len(files)}; look at what they say, then: trunkline public propose NAME"
            f" --tokens {files[0]} --block-tokens {NAMED_BLOCK_TOKENS} --model NAME --owner ORG"
            " --audience all --reason TEXT"
        )
    return lines


def _printable(name: str) -> str:
    return name if name.isprintable() else name.encode("unicode_escape").decode("ascii")
