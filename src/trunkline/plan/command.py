"""`trunkline plan LOG` and `trunkline plan export LOG`: flags, progress, and where results go.

Must never: print what a line of the log says. Read `study.py` for what is found out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from trunkline.errors import ConfigError, TraceError
from trunkline.plan import told
from trunkline.plan.naming import BLOCK_TOKENS, BYTES_PER_TOKEN, Namer, Tokenise
from trunkline.plan.page import render
from trunkline.plan.queueing import MAX_WORKERS
from trunkline.plan.reader import LogFormat, LogReader, ReadOptions
from trunkline.plan.study import Fleet, Study
from trunkline.ports.clock import Clock
from trunkline.replay.plots import require_matplotlib
from trunkline.replay.progress import Progress

MAX_BLOCK_TOKENS = 65_536
MAX_BYTES_PER_TOKEN = 64
PLAN_KEY = b"names of blocks inside one plan."
"""No secret: these names never leave the process."""
_FLEET = Fleet()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanParts:
    """What the command needs of the world."""

    clock: Clock
    out: TextIO
    progress_out: TextIO
    load_tokenise: Callable[[Path], Tokenise]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `trunkline plan`."""
    add_reading(parser)
    _add_fleet(parser)
    add = parser.add_argument_group("what is shown").add_argument
    add("--best", type=int, default=10, metavar="COUNT", help="so many public prefixes [10]")
    add("--json", action="store_true", help="print one JSON object in place of the text")
    add("--html", type=Path, metavar="FILE", help="write a page with plots (extra `report`), too")


def _add_fleet(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("the fleet that is planned").add_argument
    add("--workers", type=int, default=_FLEET.workers, metavar="N", help="replicas [16]")
    add(
        "--cache-gib",
        type=float,
        default=None,
        metavar="GIB",
        help="memory for KV of each worker [40]",
    )
    add(
        "--cache-blocks",
        type=int,
        default=None,
        metavar="COUNT",
        help="the same in blocks of 16 tokens, as vLLM counts them",
    )
    add(
        "--kv-kib-per-token",
        type=float,
        default=_FLEET.kv_kib_per_token,
        metavar="KIB",
        help="size of the KV of a token [128, an 8B model in bf16]",
    )
    add(
        "--prefill-tokens-per-s",
        type=float,
        default=_FLEET.prefill_tokens_per_s,
        metavar="RATE",
        help="of one worker [8000]",
    )
    add(
        "--link-gbit",
        type=float,
        default=_FLEET.link_gbit,
        metavar="RATE",
        help="between workers, for pulls [25]",
    )
    add(
        "--ttft-goal-ms",
        type=float,
        default=_FLEET.ttft_goal_ms,
        metavar="MS",
        help="how many workers give 95 of 100 first tokens within it [2000]",
    )
    add(
        "--per-second",
        type=float,
        default=_FLEET.per_second,
        metavar="RATE",
        help="pace of a log without times [1]",
    )
    add("--seed", type=int, default=0, metavar="NUMBER", help="seed of all draws [0]")


def add_reading(parser: argparse.ArgumentParser) -> None:
    """The flags that say how a log is to be read."""
    parser.add_argument(
        "log",
        type=Path,
        metavar="LOG",
        help="a log of requests, plain or gzip: OpenAI bodies as JSON lines, alone or wrapped"
        " (LiteLLM, batch files), CSV with such a column, vLLM's own log, Mooncake, Qwen-Bailian",
    )
    add = parser.add_argument_group("how the log is read").add_argument
    add("--format", choices=[one.value for one in LogFormat], default="auto", help="[auto]")
    add(
        "--block-tokens",
        type=int,
        metavar="TOKENS",
        help="of a block [of prompts 16; of block ids as the log says]",
    )
    add(
        "--bytes-per-token",
        type=int,
        default=BYTES_PER_TOKEN,
        metavar="BYTES",
        help="of text, where no tokenizer is given [4]",
    )
    add(
        "--tokenizer-path",
        type=Path,
        metavar="PATH",
        help="count text with this tokenizer.json, or that of this folder; much slower",
    )
    add("--tenant-field", metavar="NAME", help="the field that says whose a request is")
    add(
        "--time-unit",
        choices=("auto", "s", "ms"),
        default="auto",
        help="of times that do not count from 1970 [Bailian s, others ms]",
    )


def run(args: argparse.Namespace, parts: PlanParts) -> int:
    """Carry out `trunkline plan LOG`. Raises ConfigError and TraceError."""
    fleet = _fleet(args)
    check_folder(args.html, "--html")
    if args.html is not None:
        require_matplotlib()
    study = read(args, parts, fleet)
    bar = Progress(parts.progress_out, study.steps, "routing", parts.clock)
    found = study.figures(bar.step)
    bar.end()
    title = f"Plan of {args.log.name}"
    print(json.dumps(found, indent=2) if args.json else told.page(found, title), file=parts.out)
    if args.html is not None:  # last, as a file may not be written
        args.html.write_text(render(found, title), encoding="utf-8")
    return 0


def read(args: argparse.Namespace, parts: PlanParts, fleet: Fleet) -> Study:
    """The log, once, with a bar."""
    reader, bar = open_log(args, parts, PLAN_KEY)
    study = Study(reader, fleet)
    study.read()
    bar.fill()
    return study


def open_log(args: argparse.Namespace, parts: PlanParts, key: bytes) -> tuple[LogReader, Progress]:
    """A reader of the log and the bar that it moves. Raises TraceError for no such file."""
    try:
        size = args.log.stat().st_size
    except OSError as error:
        raise TraceError(f"{args.log}: {error.strerror or error}") from error
    bar = Progress(
        parts.progress_out, max(1, size >> 10), f"reading {args.log.name}", parts.clock, " KiB"
    )
    options = ReadOptions(
        format=LogFormat(args.format),
        block_tokens=args.block_tokens,
        tenant_field=args.tenant_field,
        is_in_seconds=None if args.time_unit == "auto" else args.time_unit == "s",
    )
    return LogReader(args.log, _namer(args, parts, key), options, bar.reach_bytes), bar


def _namer(args: argparse.Namespace, parts: PlanParts, key: bytes) -> Namer:
    size, per_token = args.block_tokens or BLOCK_TOKENS, args.bytes_per_token
    check("--block-tokens", size, 1, MAX_BLOCK_TOKENS)
    check("--bytes-per-token", per_token, 1, MAX_BYTES_PER_TOKEN)
    if size * per_token % 4:
        raise ConfigError(
            f"--block-tokens {size} times --bytes-per-token {per_token} is no multiple of 4"
        )
    path = args.tokenizer_path
    return Namer(
        key,
        block_tokens=size,
        bytes_per_token=per_token,
        tokenise=None if path is None else parts.load_tokenise(path),
    )


def _fleet(args: argparse.Namespace) -> Fleet:
    check("--workers", args.workers, 1, MAX_WORKERS)
    check("--kv-kib-per-token", args.kv_kib_per_token, 0.001, 65_536)
    check("--prefill-tokens-per-s", args.prefill_tokens_per_s, 1, 1e9)
    check("--link-gbit", args.link_gbit, 0.001, 100_000)
    check("--ttft-goal-ms", args.ttft_goal_ms, 1, 86_400_000)
    check("--per-second", args.per_second, 1e-6, 1e6)
    check("--best", args.best, 1, 1_000)
    gib = args.cache_gib
    if args.cache_blocks is not None:
        if gib is not None:
            raise ConfigError("--cache-gib and --cache-blocks say the same: give one of them")
        check("--cache-blocks", args.cache_blocks, 1, 10**9)
        gib = args.cache_blocks * BLOCK_TOKENS * args.kv_kib_per_token / (1 << 20)
    gib = _FLEET.cache_gib if gib is None else gib
    check("--cache-gib", gib, 0.001, 1e6)
    return Fleet(
        workers=args.workers,
        cache_gib=gib,
        kv_kib_per_token=args.kv_kib_per_token,
        prefill_tokens_per_s=args.prefill_tokens_per_s,
        link_gbit=args.link_gbit,
        ttft_goal_ms=args.ttft_goal_ms,
        per_second=args.per_second,
        best_prefixes=args.best,
        seed=args.seed,
    )


def check(flag: str, value: float, least: float, most: float) -> None:
    """Raises ConfigError that names the flag."""
    if not least <= value <= most:
        raise ConfigError(f"{flag} is {value:g}, allowed are {least:g} to {most:g}")


def check_folder(path: Path | None, flag: str) -> None:
    """Before hours of reading: whether there is a folder to write into."""
    if path is not None and not path.parent.is_dir():
        raise ConfigError(f"{flag} {path}: {path.parent} is no folder")
    if path is not None and path.is_dir():
        raise ConfigError(f"{flag} {path} is a folder")


def figures(log: Path, **changes: Any) -> dict[str, Any]:
    """The figures of one log before one fleet, without flags or bars: for benchmarks and tests."""
    fleet = Fleet(**changes)
    study = Study(LogReader(log, Namer(PLAN_KEY)), fleet)
    study.read()
    return study.figures(lambda: None)
