"""`trunkline replay`: one run for each policy, then the report.

Replay does not know how to start a fleet; `rehearsal.py` hands it a `StartFleet`. With `--target`
it sends to a gateway that is there already. Owns exit codes: 0 passed, 1 a false hit, a missed bar
or nothing measured. Read `run.py` for what happens in between, `flags.py` for the flags.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from trunkline.core.policies import POLICIES
from trunkline.core.profiles import fifo_profile
from trunkline.errors import ConfigError, TraceError
from trunkline.ports.clock import Clock
from trunkline.ports.worker import Fetch
from trunkline.replay import flags
from trunkline.replay.bars import Bar, check_bars, check_names, parse_bars
from trunkline.replay.client import ClientOptions
from trunkline.replay.figures import specimen
from trunkline.replay.formats import ReadOptions, TraceFormat, read_trace
from trunkline.replay.page import render_page
from trunkline.replay.plan import FleetPlan, StartFleet
from trunkline.replay.plots import require_matplotlib
from trunkline.replay.probe import probe
from trunkline.replay.progress import Progress
from trunkline.replay.prompts import PromptOptions
from trunkline.replay.report import PolicyRun, Report, render_text
from trunkline.replay.results import RunFacts, Summary, summarise
from trunkline.replay.run import ReplayOptions, replay_trace
from trunkline.replay.traces import TraceRequest, pace, scale_time, spread_ticks, take
from trunkline.replay.workloads import Workload, find_workload, load_workload
from trunkline.written import nearest

PASSED, FAILED = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayParts:
    """What a replay is given of the world."""

    clock: Clock
    start_fleet: StartFleet
    fetch: Fetch
    """For the one question to each target, whether it is there."""
    traces_dir: Path
    out: TextIO
    err: TextIO


async def run(arguments: argparse.Namespace, parts: ReplayParts) -> int:
    """Replay as asked, print the report, write the files; the answer is the exit code.

    Raises ConfigError or TraceError for what the user got wrong, before anything is started.
    """
    flags.check(arguments)
    policies = ["target"] if arguments.target else _policies(arguments.policies)
    bars = _bars(arguments, policies)
    requests, workload = load_requests(arguments, arguments.traces_dir or parts.traces_dir)
    if arguments.html is not None:
        require_matplotlib()
    for url in arguments.target:
        await probe(url, arguments.api_key, parts.fetch)
    runs: list[PolicyRun] = []
    warnings: list[str] = []
    # The baselines run first: whatever warms up in a run, the judged policy gains nothing from it.
    for policy in [*policies[1:], policies[0]]:
        job = _Job(arguments=arguments, policy=policy, requests=requests, workload=workload)
        policy_run, run_warnings = await _run_policy(job, parts)
        runs.append(policy_run)
        warnings += [f"{policy}: {warning}" for warning in run_warnings]
    report = _report(arguments, [runs[-1], *runs[:-1]], warnings, bars)
    parts.out.write(render_text(report))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report.runs[0].summary.as_dict(), indent=2) + "\n")
    if arguments.html is not None:
        arguments.html.write_text(render_page(report), encoding="utf-8")
        parts.out.write(f"\n  wrote {arguments.html}\n")
    return PASSED if report.is_passed else FAILED


def load_requests(
    arguments: argparse.Namespace, traces_dir: Path
) -> tuple[list[TraceRequest], Workload | None]:
    """The requests to send, and the workload where the trace names one."""
    name, load = str(arguments.trace), float(arguments.load)
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
        requests = list(take(requests, arguments.requests))
    return requests, workload


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    arguments: argparse.Namespace
    policy: str
    requests: list[TraceRequest]
    workload: Workload | None


async def _run_policy(job: _Job, parts: ReplayParts) -> tuple[PolicyRun, Sequence[str]]:
    options = _replay_options(job.arguments)
    plan, clock = _plan(job), parts.clock
    progress = Progress(parts.err, len(job.requests), f"{job.policy:<12}", clock)
    if job.arguments.target:
        result = await replay_trace(job.requests, job.arguments.target, options, clock, progress)
        counters = None
    else:
        fleet = await parts.start_fleet(plan)
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
    policy_run = PolicyRun(summary=summary, records=result.records, unchecked=result.unchecked)
    return policy_run, result.warnings


def _plan(job: _Job) -> FleetPlan:
    """The workload's fleet. With lighter blocks the prefill of a token costs more and its KV is
    larger, so a block costs the same.
    """
    workload = job.workload or find_workload("W5")
    trace_tokens = job.requests[0].block_tokens or workload.block_tokens
    sent_tokens = job.arguments.tokens_per_block or trace_tokens
    link_gbit, host_factor = job.arguments.link_gbit, job.arguments.host_factor
    if host_factor is None:
        host_factor = flags.PULLING_HOST_FACTOR if link_gbit is not None else 0.0
    return FleetPlan(
        policy=job.policy,
        workers=job.arguments.workers or workload.workers,
        capacity_blocks=workload.capacity_blocks,
        block_tokens=sent_tokens,
        profile=fifo_profile(
            workload.prefill_fixed_ms,
            workload.prefill_token_ms * trace_tokens / sent_tokens,
            workload.decode_token_ms,
            kv_bytes_per_token=round((128 << 10) * trace_tokens / sent_tokens),
        ),
        link_gbit=link_gbit,
        max_copies=job.arguments.max_copies,
        host_blocks=round(host_factor * workload.capacity_blocks),
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
        command=flags.command_line(arguments),
    )


def _bars(arguments: argparse.Namespace, policies: Sequence[str]) -> list[Bar]:
    bars = [bar for text in arguments.bar for bar in parse_bars(text)]
    bars += [bar for text in arguments.fail_if for bar in parse_bars(text, is_failure=True)]
    check_names(bars, specimen(policies[1:]), flags.MANUAL)
    return bars


def _policies(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"--policies {text!r}: expected names separated by commas, each once")
    unknown = next((name for name in names if name not in POLICIES), None)
    if unknown is not None:
        near = nearest(unknown, POLICIES)
        hint = f"did you mean {near}?" if near else f"known are {', '.join(POLICIES)}"
        raise ConfigError(f"--policies: no policy {unknown!r}; {hint}")
    return names
