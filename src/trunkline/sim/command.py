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

from trunkline.core.policies import POLICIES
from trunkline.errors import ConfigError
from trunkline.ports.clock import Clock
from trunkline.replay.bars import Bar, check_bars, check_names, parse_bars
from trunkline.replay.figures import ListFigures, listing
from trunkline.replay.progress import Progress
from trunkline.replay.traces import TraceRequest
from trunkline.replay.workloads import Workload, explained, find_workload, load_workload
from trunkline.sim.acceptance import ALWAYS, bars_for
from trunkline.sim.figures import figures
from trunkline.sim.limit import limit
from trunkline.sim.model import FleetModel, ModelOptions, Outcome

PASSED, FAILED = 0, 1
BASELINES = ("round_robin", "least_queue")
MANUAL = "trunkline simulate --figures"
_LIMIT_FIGURES = ("hit_tokens_ratio", "hit_requests_ratio", "ttft_ms")
_ISOLATION = ("none", "session", "tenants")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `trunkline simulate`."""
    _add_run(parser)
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
    policies = [args.policy]
    if not args.no_baselines:
        policies += [name for name in BASELINES if name != args.policy]
    fail_if = [bar for text in args.fail_if for bar in parse_bars(text, is_failure=True)]
    check_names(fail_if, _specimen(policies[1:]), MANUAL)
    requests = load_workload(workload.name, load=args.load, traces_dir=args.traces or traces_dir)
    if args.kill_worker_at is not None:
        first_ms, last_ms = requests[0].arrival_ms, requests[-1].arrival_ms
        at_ms = first_ms + args.kill_worker_at * (last_ms - first_ms)
        options = replace(options, kill_worker_at_ms=at_ms)
    results: dict[str, dict[str, Any]] = {}
    for policy in policies:
        bar = Progress(progress_out, len(requests), f"{workload.name} {policy}", clock)
        model = FleetModel(workload, replace(options, policy=policy), _stopwatch(clock))
        outcome = model.run(requests, bar.step)
        bar.end()
        results[policy] = figures(workload.name, policy, outcome)
    result = results.pop(args.policy)
    result["baselines"] = results
    result["limit"] = _limit(workload, requests)
    verdicts = check_bars([*_bars(args, workload), *fail_if], result)
    result["bars"] = {v.bar.text: "pass" if v.is_passed else "fail" for v in verdicts}
    if args.json:
        print(json.dumps(result, indent=2), file=out)
    else:
        print(_table(result), file=out)
        print("\n".join(v.line for v in verdicts), file=out)
    return PASSED if all(v.is_passed for v in verdicts) else FAILED


def _options(args: argparse.Namespace, workload: Workload) -> ModelOptions:
    if not 0.0 <= args.event_loss < 1.0:
        raise ConfigError(f"--event-loss is {args.event_loss}, allowed are 0 up to below 1")
    if args.kill_worker_at is not None and not 0.0 <= args.kill_worker_at <= 1.0:
        raise ConfigError(f"--kill-worker-at is {args.kill_worker_at}, a share from 0 to 1")
    delay_ms = workload.directory_delay_ms if args.event_delay_ms is None else args.event_delay_ms
    if not 0.0 <= delay_ms <= 86_400_000.0:
        raise ConfigError(f"--event-delay-ms is {delay_ms}, allowed are 0 to a day")
    return ModelOptions(
        event_delay_ms=delay_ms,
        event_loss=args.event_loss,
        isolate=args.isolate,
        seed=args.seed,
        churn_weight=args.churn_weight,
    )


def _bars(args: argparse.Namespace, workload: Workload) -> list[Bar]:
    """The acceptance bars where nothing disturbs the run; else only what must hold always."""
    is_plain = (
        args.policy == "cache_aware"
        and not args.no_baselines
        and args.isolate == "none"
        and args.kill_worker_at is None
        and not args.event_loss
        and args.event_delay_ms is None
    )
    if is_plain:
        return bars_for(workload.name, args.load)
    return parse_bars(ALWAYS + ",used_after_lease==0")


def _limit(workload: Workload, requests: Sequence[TraceRequest]) -> dict[str, Any]:
    """What no router can beat, as far as it is comparable."""
    told = figures(workload.name, "limit", limit(workload, requests))
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
    lines.append(
        f"look-up p50 {lookup['p50']:.1f} us, p99 {lookup['p99']:.1f} us;"
        f" over-claims {result['over_claims']:,}; lost {result['lost']};"
        f" FALSE HITS {result['false_hits']}"
    )
    return "\n".join(lines)
