"""`trunkline simulate`: flags, the runs of one workload under a policy and its baselines, the
verdict.

Owns exit codes: 0 passed, 1 a false hit or a missed bar. Read `model.py` for what happens in
between.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from trunkline.core.links import LinkProfile, gbit_per_s
from trunkline.core.policies import POLICIES
from trunkline.errors import ConfigError
from trunkline.ports.clock import Clock
from trunkline.replay.bars import Bar, check_bars, check_names, parse_bars
from trunkline.replay.figures import ListFigures, listing
from trunkline.replay.progress import Progress
from trunkline.replay.traces import TraceRequest
from trunkline.replay.workloads import Workload, explained, find_workload, load_workload
from trunkline.sim.acceptance import ALWAYS, Setting, bars_for
from trunkline.sim.figures import figures
from trunkline.sim.limit import limit
from trunkline.sim.model import FleetModel, ModelOptions
from trunkline.sim.outcome import Outcome

PASSED, FAILED = 0, 1
BASELINES = ("round_robin", "least_queue")
WITHOUT_PULLS = "without_pulls"
CALM = "calm"
"""Other runs of the policy under test: without pulls, and without the hot prefix."""
MAX_KV_KIB_PER_TOKEN = 65_536.0
MAX_HOST_FACTOR = 1_000.0
MANUAL = "trunkline simulate --figures"
_LIMIT_FIGURES = ("hit_tokens_ratio", "hit_requests_ratio", "ttft_ms")
_ISOLATION = ("none", "session", "tenants")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `trunkline simulate`."""
    _add_run(parser)
    _add_movement(parser)
    _add_disturbances(parser)
    _add_verdict(parser)
    parser.add_argument_group("workloads", description=explained())


def _add_run(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what is run").add_argument
    add("workload", metavar="WORKLOAD", help="one of those below")
    add(
        "--policy",
        default="cache_aware",
        choices=list(POLICIES),
        metavar="NAME",
        help=f"policy under test, one of {', '.join(POLICIES)} [cache_aware]",
    )
    add(
        "--no-baselines",
        action="store_true",
        help=f"run the policy alone, without {' and '.join(BASELINES)}",
    )
    add(
        "--load",
        type=float,
        default=1.0,
        metavar="FACTOR",
        help="send the trace so many times as fast [1]",
    )
    add(
        "--isolate",
        default="none",
        choices=_ISOLATION,
        help="one namespace for all, one a session, or two tenants by turns [none]",
    )
    add(
        "--churn-weight",
        type=float,
        default=1.5,
        metavar="FACTOR",
        help="k of the cost formula [1.5]",
    )
    add("--seed", type=int, default=0, metavar="NUMBER", help="seed of all draws [0]")
    add(
        "--traces",
        type=Path,
        default=None,
        metavar="DIR",
        help="folder of the trace files [the bundled ones]",
    )


def _add_movement(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("how KV moves").add_argument
    add(
        "--link-gbit",
        type=float,
        default=None,
        metavar="RATE",
        help="workers pull KV from one another over links of so many Gbit/s [they do not]; a run"
        f" without pulls, {WITHOUT_PULLS}, is then shown as well",
    )
    add(
        "--kv-kib-per-token",
        type=float,
        default=128.0,
        metavar="KIB",
        help="size of the KV of a token [128, an 8B model in bf16]",
    )
    add(
        "--host-factor",
        type=float,
        default=0.0,
        metavar="FACTOR",
        help="host memory for KV at each worker, in times of its device memory [0]",
    )
    add(
        "--max-copies",
        type=int,
        default=64,
        metavar="COUNT",
        help="what so many workers hold is not pulled any more [64]",
    )


def _add_disturbances(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what goes wrong").add_argument
    add(
        "--event-delay-ms",
        type=float,
        default=None,
        metavar="MS",
        help="age of cache events [the workload's: 1000, W5 140]",
    )
    add(
        "--event-loss",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="share of event batches that are lost, from 0 to below 1 [0]",
    )
    add(
        "--kill-worker-at",
        type=float,
        default=None,
        metavar="SHARE",
        help="kill one worker at this share of the trace, from 0 to 1 [never]",
    )


def _add_verdict(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("verdict")
    add = group.add_argument
    add("--figures", action=ListFigures, text=lambda: listing(_specimen(BASELINES)))
    add(
        "--fail-if",
        action="append",
        default=[],
        metavar="EXPR",
        help="exit code 1 where true: 'ttft_ms.p99>300'; may be repeated",
    )
    add("--json", action="store_true", help="print one JSON object in place of the table")


def run(
    args: argparse.Namespace, *, traces_dir: Path, clock: Clock, out: TextIO, progress_out: TextIO
) -> int:
    """Carry out the command; the answer is the exit code. Raises ConfigError and TraceError."""
    workload = find_workload(args.workload)
    options = _options(args, workload)
    variants = _variants(args, workload, options)
    fail_if = [bar for text in args.fail_if for bar in parse_bars(text, is_failure=True)]
    check_names(fail_if, _specimen(list(variants)[1:]), MANUAL)
    results: dict[str, dict[str, Any]] = {}
    for name, variant in variants.items():
        requests = _requests(args, workload, traces_dir, is_calm=name == CALM)
        bar = Progress(progress_out, len(requests), f"{workload.name} {name}", clock)
        model = FleetModel(workload, _timed(args, variant, requests), _stopwatch(clock))
        outcome = model.run(requests, bar.step)
        bar.end()
        results[name] = figures(workload.name, variant.policy, outcome)
    result = results.pop(args.policy)
    result["baselines"] = results
    requests = _requests(args, workload, traces_dir, is_calm=False)
    result["limit"] = _limit(workload, requests, options.host_blocks)
    verdicts = check_bars([*_bars(args, workload), *fail_if], result)
    result["bars"] = {v.bar.text: "pass" if v.is_passed else "fail" for v in verdicts}
    if args.json:
        print(json.dumps(result, indent=2), file=out)
    else:
        print(_table(result), file=out)
        print("\n".join(v.line for v in verdicts), file=out)
    return PASSED if all(v.is_passed for v in verdicts) else FAILED


def _variants(
    args: argparse.Namespace, workload: Workload, options: ModelOptions
) -> dict[str, ModelOptions]:
    """The run under test first, then what it is compared with."""
    variants = {args.policy: replace(options, policy=args.policy)}
    if args.no_baselines:
        return variants
    variants |= {name: replace(options, policy=name) for name in BASELINES if name != args.policy}
    if options.links is not None:
        variants[WITHOUT_PULLS] = replace(options, policy=args.policy, links=None)
    if workload.heat is not None:
        variants[CALM] = replace(options, policy=args.policy)
    return variants


def _requests(
    args: argparse.Namespace, workload: Workload, traces_dir: Path, *, is_calm: bool
) -> list[TraceRequest]:
    folder = args.traces or traces_dir
    return load_workload(workload.name, load=args.load, traces_dir=folder, is_calm=is_calm)


def _timed(
    args: argparse.Namespace, options: ModelOptions, requests: Sequence[TraceRequest]
) -> ModelOptions:
    """With the moment in which a worker is killed."""
    if args.kill_worker_at is None:
        return options
    first_ms, last_ms = requests[0].arrival_ms, requests[-1].arrival_ms
    at_ms = first_ms + args.kill_worker_at * (last_ms - first_ms)
    return replace(options, kill_worker_at_ms=at_ms)


def _options(args: argparse.Namespace, workload: Workload) -> ModelOptions:
    if not 0.0 <= args.event_loss < 1.0:
        raise ConfigError(f"--event-loss is {args.event_loss}, allowed are 0 up to below 1")
    if args.kill_worker_at is not None and not 0.0 <= args.kill_worker_at <= 1.0:
        raise ConfigError(f"--kill-worker-at is {args.kill_worker_at}, a share from 0 to 1")
    delay_ms = workload.directory_delay_ms if args.event_delay_ms is None else args.event_delay_ms
    if not 0.0 <= delay_ms <= 86_400_000.0:
        raise ConfigError(f"--event-delay-ms is {delay_ms}, allowed are 0 to a day")
    for flag, value, most in (
        ("--kv-kib-per-token", args.kv_kib_per_token, MAX_KV_KIB_PER_TOKEN),
        ("--host-factor", args.host_factor, MAX_HOST_FACTOR),
    ):
        if not 0.0 <= value <= most:
            raise ConfigError(f"{flag} is {value}, allowed are 0 to {most:g}")
    kv_bytes = int(args.kv_kib_per_token * 1_024)
    if kv_bytes < 1:
        raise ConfigError(f"--kv-kib-per-token is {args.kv_kib_per_token}, less than a byte")
    if args.max_copies < 1:
        raise ConfigError(f"--max-copies is {args.max_copies}, at least 1 is needed")
    return ModelOptions(
        links=_links(args.link_gbit),
        kv_bytes_per_token=kv_bytes,
        host_blocks=int(args.host_factor * workload.capacity_blocks),
        max_copies=args.max_copies,
        event_delay_ms=delay_ms,
        event_loss=args.event_loss,
        isolate=args.isolate,
        seed=args.seed,
        churn_weight=args.churn_weight,
    )


def _links(gbit: float | None) -> LinkProfile | None:
    if gbit is None:
        return None
    if not 0.001 <= gbit <= 100_000.0:
        raise ConfigError(f"--link-gbit is {gbit}, allowed are 0.001 to 100000")
    return LinkProfile(bytes_per_ms=gbit_per_s(gbit))


def _bars(args: argparse.Namespace, workload: Workload) -> list[Bar]:
    """The acceptance bars where nothing disturbs the run; else only what must hold always."""
    is_plain = (
        args.policy == "cache_aware"
        and not args.no_baselines
        and args.isolate == "none"
        and args.kill_worker_at is None
        and not args.event_loss
        and args.event_delay_ms is None
        and args.kv_kib_per_token == 128.0
    )
    if is_plain:
        setting = Setting(load=args.load, link_gbit=args.link_gbit, host_factor=args.host_factor)
        return bars_for(workload.name, setting)
    return parse_bars(ALWAYS + ",used_after_lease==0")


def _limit(
    workload: Workload, requests: Sequence[TraceRequest], host_blocks: int
) -> dict[str, Any]:
    """What no router can beat, as far as it is comparable."""
    told = figures(workload.name, "limit", limit(workload, requests, host_blocks=host_blocks))
    return {key: told[key] for key in _LIMIT_FIGURES}


def _specimen(baselines: Iterable[str]) -> dict[str, Any]:
    """The figures that a run has, known before it."""
    blank = figures("", "", Outcome())
    others = dict.fromkeys(baselines, blank)
    return {**blank, "baselines": others, "limit": {key: blank[key] for key in _LIMIT_FIGURES}}


def _stopwatch(clock: Clock) -> Callable[[], float]:
    return lambda: clock.now() * 1_000.0


def _table(result: dict[str, Any]) -> str:
    """The policy, its baselines and the limit, one row each."""
    lines = [
        f"{result['workload']}: {result['requests']:,} requests",
        f"{'':14s} {'hit tokens':>10s} {'hit reqs':>9s} {'prefill Mtok':>12s}"
        f" {'TTFT ms p50':>12s} {'p95':>9s} {'p99':>9s} {'mean':>9s} {'busiest/mean':>12s}",
    ]
    rows = {result["policy"]: result, **result["baselines"], "limit": result["limit"]}
    for name, row in rows.items():
        ttft = row["ttft_ms"]
        prefill = f"{row['prefill_tokens'] / 1e6:12.2f}" if "prefill_tokens" in row else " " * 12
        busiest = row.get("busiest_over_mean_work")
        lines.append(
            f"{name:14s} {row['hit_tokens_ratio']:10.2%} {row['hit_requests_ratio']:9.2%} {prefill}"
            f" {ttft['p50']:12.0f} {ttft['p95']:9.0f} {ttft['p99']:9.0f} {ttft['mean']:9.0f}"
            + (f" {busiest:12.3f}" if busiest else "")
        )
    lookup = result["directory_lookup_us"]
    moved = result["pulls"]
    if moved["count"] or result["host_tokens"]:
        plans = ", ".join(f"{plan} {count:,}" for plan, count in result["plans"].items())
        lines.append(
            f"plans: {plans}; {result['transfer_bytes'] / 2**30:,.1f} GiB pulled for"
            f" {moved['tokens']:,} tokens in {moved['count']:,} pulls ({moved['failed']} in vain),"
            f" mean {moved['ms_mean']:.1f} ms; {result['host_tokens']:,} tokens from host memory"
        )
    if result["hot_copies"]["most"]:
        lines.append(
            f"hot prefix: on {result['hot_copies']['most']} workers at most,"
            f" {result['hot_copies']['end']} at the end"
        )
    lines.append(
        f"look-up p50 {lookup['p50']:.1f} us, p99 {lookup['p99']:.1f} us;"
        f" over-claims {result['over_claims']:,}; lost {result['lost']};"
        f" FALSE HITS {result['false_hits']}"
    )
    return "\n".join(lines)
