"""`trunkline replay`: flags, and one run for each policy.

Replay does not know how to start a fleet; `wiring.py` hands it a `StartFleet`. With `--target` it
sends to a gateway that is there already. Owns exit codes: 0 passed, 1 a false hit, a missed bar or
nothing measured. Read `run.py` for what happens in between.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from trunkline.core.profiles import fifo_profile
from trunkline.errors import ConfigError, TraceError
from trunkline.ports.clock import Clock
from trunkline.replay.bars import Bar, check_bars, parse_bars
from trunkline.replay.client import ClientOptions
from trunkline.replay.formats import ReadOptions, TraceFormat, read_trace
from trunkline.replay.page import render_page
from trunkline.replay.plan import FEEDS, FleetPlan, StartFleet
from trunkline.replay.progress import Progress
from trunkline.replay.prompts import PromptOptions
from trunkline.replay.report import PolicyRun, Report, render_text
from trunkline.replay.results import RunFacts, Summary, summarise
from trunkline.replay.run import ReplayOptions, replay_trace
from trunkline.replay.traces import TraceRequest, pace, scale_time, spread_ticks, take
from trunkline.replay.workloads import Workload, find_workload, load_workload

PASSED, FAILED = 0, 1
DEFAULT_POLICIES = "cache_aware,least_queue,round_robin"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `trunkline replay`."""
    add = parser.add_argument
    add(
        "trace",
        nargs="?",
        default="W5",
        help="workload (W1 to W5, W1-smoke, W2-smoke) or a trace file",
    )
    add(
        "--target",
        action="append",
        default=[],
        metavar="URL",
        help="a gateway that is there; repeatable",
    )
    add(
        "--policies",
        default=DEFAULT_POLICIES,
        metavar="A,B",
        help="one run each; the first is judged",
    )
    add("--requests", type=int, metavar="N", help="only the first N requests")
    add("--load", type=float, default=1.0, help="times the workload's rate of arrival")
    add("--rate", type=float, metavar="PER_S", help="even arrivals, for traces without times")
    add("--speed", type=float, default=1.0, help="2 halves the time between requests")
    add(
        "--time-scale",
        type=float,
        default=1.0,
        help="slow workers and arrivals down by this factor",
    )
    add("--workers", type=int, metavar="N", help="simulated workers; the workload's own by default")
    add("--feed", choices=FEEDS, default="exact", help="how workers tell what they hold")
    add("--traces-dir", type=Path, metavar="DIR", help="where the workloads' traces lie")
    add("--format", choices=[f.value for f in TraceFormat], default="auto", help="of a trace file")
    add("--block-tokens", type=int, metavar="N", help="tokens of a block id in a trace file")
    add("--time-divisor", type=float, default=1.0, help="divide the times of a trace file")
    add(
        "--spread-ticks",
        action="store_true",
        help="spread arrivals inside their 3 s ticks (seed 7)",
    )
    add(
        "--tokens-per-block", type=int, metavar="N", help="send each block id as N tokens (lighter)"
    )
    add("--max-output-tokens", type=int, metavar="N", help="longest answer to ask for")
    add("--max-in-flight", type=int, default=1_024, metavar="N", help="requests on the way at most")
    add(
        "--sessions",
        choices=["open", "closed"],
        default="open",
        help="closed: turns wait for turns",
    )
    add("--timeout-s", type=float, default=600.0, help="longest silence of an answer")
    add("--model", default="", help="model to ask for")
    add("--api-key", default="", help="bearer key of the targets")
    add("--no-verify", action="store_true", help="do not compare answers (real engines)")
    add("--vocab-size", type=int, default=4_096, help="of the model behind --target")
    add(
        "--bar",
        action="append",
        default=[],
        metavar="EXPR",
        help="must hold: hit_tokens_ratio>=0.85",
    )
    add("--fail-if", action="append", default=[], metavar="EXPR", help="fails where true: lost>0")
    add("--json", type=Path, metavar="FILE", help="write all figures")
    add(
        "--html",
        type=Path,
        metavar="FILE",
        help="write the report with plots (needs trunkline[report])",
    )
    add("--seed", type=int, default=0, help="prompts of different seeds share nothing")


async def run(
    arguments: argparse.Namespace,
    *,
    clock: Clock,
    start_fleet: StartFleet,
    traces_dir: Path,
    out: TextIO,
    err: TextIO,
) -> int:
    """Replay as asked, print the report, write the files; the answer is the exit code.

    Raises ConfigError or TraceError for what the user got wrong, before anything is started if
    possible.
    """
    bars = [bar for text in arguments.bar for bar in parse_bars(text)]
    bars += [bar for text in arguments.fail_if for bar in parse_bars(text, is_failure=True)]
    requests, workload = load_requests(arguments, arguments.traces_dir or traces_dir)
    for path in (arguments.html, arguments.json):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{path} cannot be written: its folder does not exist")
    if arguments.html is not None:
        _refuse_without_matplotlib()
    runs: list[PolicyRun] = []
    warnings: list[str] = []
    policies = ["target"] if arguments.target else _policies(arguments.policies)
    # The baselines run first: whatever warms up in a run, the judged policy gains nothing from it.
    for policy in [*policies[1:], policies[0]]:
        job = _Job(arguments=arguments, policy=policy, requests=requests, workload=workload)
        policy_run, run_warnings = await _run_policy(job, clock, start_fleet, err)
        runs.append(policy_run)
        warnings += [f"{policy}: {warning}" for warning in run_warnings]
    report = _report(arguments, [runs[-1], *runs[:-1]], warnings, bars)
    out.write(render_text(report))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report.runs[0].summary.as_dict(), indent=2) + "\n")
    if arguments.html is not None:
        arguments.html.write_text(render_page(report), encoding="utf-8")
        out.write(f"\n  wrote {arguments.html}\n")
    return PASSED if report.is_passed else FAILED


def load_requests(
    arguments: argparse.Namespace, traces_dir: Path
) -> tuple[list[TraceRequest], Workload | None]:
    """The requests to send, and the workload where the trace names one."""
    name, load = str(arguments.trace), float(arguments.load)
    if not load > 0.0:
        raise ConfigError(f"--load {load} is not above 0")
    requests: list[TraceRequest]
    workload: Workload | None = None
    if Path(name).is_file():
        options = ReadOptions(
            format=TraceFormat(arguments.format),
            block_tokens=arguments.block_tokens,
            time_divisor=arguments.time_divisor,
        )
        found = read_trace(Path(name), options)
        requests = spread_ticks(found) if arguments.spread_ticks else list(found)
        requests = list(scale_time(requests, 1.0 / load)) if load != 1.0 else requests
    elif "/" in name or ".json" in name:
        raise TraceError(f"{name}: no such file")
    else:
        workload = find_workload(name)
        requests = load_workload(name, load=load, traces_dir=traces_dir)
    if arguments.rate is not None:
        requests = list(pace(requests, arguments.rate))
    if arguments.requests is not None:
        if arguments.requests < 1:
            raise ConfigError(f"--requests is {arguments.requests}, at least 1 is needed")
        requests = list(take(requests, arguments.requests))
    return requests, workload


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    arguments: argparse.Namespace
    policy: str
    requests: list[TraceRequest]
    workload: Workload | None


async def _run_policy(
    job: _Job, clock: Clock, start_fleet: StartFleet, err: TextIO
) -> tuple[PolicyRun, Sequence[str]]:
    options = _replay_options(job.arguments)
    plan = _plan(job)
    progress = Progress(err, len(job.requests), f"{job.policy:<12}", clock)
    if job.arguments.target:
        result = await replay_trace(job.requests, job.arguments.target, options, clock, progress)
        counters = None
    else:
        fleet = await start_fleet(plan)
        try:
            options = replace(
                options,
                model=options.model or fleet.model,
                client=replace(options.client, api_key=fleet.api_key),
                prompt=replace(options.prompt, vocab_size=fleet.vocab_size),
                decode=fleet.decode,
            )
            result = await replay_trace(job.requests, fleet.target_urls, options, clock, progress)
            counters = await fleet.counters()
        finally:
            await fleet.stop()
    progress.end()
    facts = RunFacts(
        workload=job.workload.name if job.workload else Path(job.arguments.trace).name,
        policy=job.policy,
        wall_ms=result.wall_ms,
        time_scale=job.arguments.time_scale,
        block_tokens=plan.block_tokens,
    )
    summary = summarise(result.records, facts, counters)
    return PolicyRun(summary=summary, records=result.records), result.warnings


def _plan(job: _Job) -> FleetPlan:
    """The workload's fleet. With lighter blocks the prefill of a token costs more, so a block
    costs the same.
    """
    workload = job.workload or find_workload("W5")
    trace_tokens = job.requests[0].block_tokens or workload.block_tokens
    sent_tokens = job.arguments.tokens_per_block or trace_tokens
    return FleetPlan(
        policy=job.policy,
        workers=job.arguments.workers or workload.workers,
        capacity_blocks=workload.capacity_blocks,
        block_tokens=sent_tokens,
        profile=fifo_profile(
            workload.prefill_fixed_ms,
            workload.prefill_token_ms * trace_tokens / sent_tokens,
            workload.decode_token_ms,
        ),
        time_scale=job.arguments.time_scale,
        feed=job.arguments.feed,
    )


def _replay_options(arguments: argparse.Namespace) -> ReplayOptions:
    return ReplayOptions(
        speed=arguments.speed,
        time_scale=arguments.time_scale,
        max_in_flight=arguments.max_in_flight,
        is_closed_loop=arguments.sessions == "closed",
        is_verified=not arguments.no_verify,
        model=arguments.model,
        client=ClientOptions(
            idle_timeout_ms=arguments.timeout_s * 1_000.0, api_key=arguments.api_key
        ),
        prompt=PromptOptions(
            vocab_size=arguments.vocab_size,
            tokens_per_block=arguments.tokens_per_block,
            max_output_tokens=arguments.max_output_tokens,
            seed=arguments.seed,
        ),
    )


def _report(
    arguments: argparse.Namespace,
    runs: list[PolicyRun],
    warnings: list[str],
    bars: list[Bar],
) -> Report:
    first, facts = runs[0], runs[0].summary
    baselines: dict[str, Summary] = {run.summary.policy: run.summary for run in runs[1:]}
    judged = replace(first, summary=replace(first.summary, baselines=baselines))
    scale = f", time x{arguments.time_scale:g}" if arguments.time_scale != 1.0 else ""
    return Report(
        title=f"trunkline replay {facts.workload}: {facts.requests:,} requests{scale}",
        runs=[judged, *runs[1:]],
        checks=check_bars(bars, judged.summary.as_dict()),
        warnings=warnings,
        command=_command(arguments),
    )


def _command(arguments: argparse.Namespace) -> str:
    words = ["trunkline", "replay", str(arguments.trace), "--policies", arguments.policies]
    if arguments.target:
        words = [*words[:3], *(word for url in arguments.target for word in ("--target", url))]
    for name in ("load", "speed", "time_scale", "requests", "tokens_per_block", "sessions"):
        value = getattr(arguments, name)
        if value not in (None, 1.0, "open"):
            words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words)


def _policies(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"--policies {text!r}: expected names separated by commas, each once")
    return names


def _refuse_without_matplotlib() -> None:
    """Before the run rather than after it."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise ConfigError("--html needs matplotlib: pip install 'trunkline[report]'")
