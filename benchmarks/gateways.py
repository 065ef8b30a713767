"""Whether sessions stay on one worker behind several gateways, and what of the hits is lost.

    python benchmarks/gateways.py [--sessions 500] [--turns 10] [--first-tokens 20-600] [--json]

Real gateways that share a registry in a real nats-server, before the same simulated workers, all on
loopback. Each turn goes to a gateway that is drawn; its prompt is the session's so far, with the
workers' own answers. First prompts are 20 to 600 tokens long, so that many are shorter than the
checkpoint (256 tokens) that gives a prefix its home. Then W1-smoke the same way. Each load is sent
to one gateway as well. Bars: one worker for all turns of at least 99 % of the sessions; on W1-smoke
hits within one point of one gateway's. `--sessions-only` leaves W1-smoke out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import sys
import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import uvloop

from gateway import cpu_s
from moves import (
    ANSWER_TOKENS,
    BLOCK_TOKENS,
    FIRST_TOKENS,
    STARTS_PER_S,
    THINK_MS,
    WORKERS,
    sessions,
    token_range,
)
from shared_registry import start_server
from trunkline.adapters.clock import SystemClock
from trunkline.adapters.tokenizer import load_tokenizer
from trunkline.control.probe import fetch, post
from trunkline.core.decision import Reason
from trunkline.core.profiles import fifo_profile
from trunkline.ports.worker import Endpoint
from trunkline.rehearsal import OWN_MODEL, traces_dir
from trunkline.replay.client import ClientOptions
from trunkline.replay.counters import percentile
from trunkline.replay.processes import MODEL, Child, endpoint_of, start_child
from trunkline.replay.prompts import PromptOptions
from trunkline.replay.records import RequestRecord, Verdict
from trunkline.replay.run import ReplayOptions, replay_trace
from trunkline.replay.traces import TraceRequest
from trunkline.replay.workloads import find_workload, load_workload

BAR_SESSIONS = 0.99
BAR_POINTS = 1.0
CHECKPOINT_TOKENS = 256
SMOKE = "W1-smoke"
SMOKE_SCALE = 0.0625
"""As `trunkline demo` plays it: a block of 512 tokens is sent as one of 16, 16 times as fast."""
READY_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Fleet:
    urls: list[str]
    key: str
    pids: list[int]


@dataclass(frozen=True, kw_only=True)
class Figures:
    gateways: int
    requests: int
    lost: int
    false_hits: int
    sessions: int
    one_worker: float | None
    """Share of the sessions whose turns all went to one worker."""
    one_worker_short: float | None
    """Of those whose first prompt is shorter than the checkpoint."""
    moved_turns: int
    """Turns at another worker than the session's turn before."""
    moved_for_less: int
    """Of those: what the worker before held was known, and waiting there dearer than computing."""
    hit_tokens: float
    cached_tokens: int
    late_p99_ms: float
    """How late the client sent: its own load, or the machine's."""
    cpu_ms: float
    """Of all gateways, a request."""


async def started(stack: AsyncExitStack, name: str, words: Sequence[str]) -> Child:
    child = await start_child(name, words)
    stack.push_async_callback(child.stop)
    return child


async def is_ready(child: Child) -> bool:
    """All workers may be chosen, tell what they hold and have a lease, and the gateway has one."""
    admin = endpoint_of(child.ready["admin_url"])
    _, told = await fetch(endpoint_of(child.ready["url"]), "GET", "/readyz", timeout_ms=5e3)
    _, body = await fetch(admin, "GET", "/workers", timeout_ms=5e3)
    rows: list[dict[str, Any]] = json.loads(body)["workers"]
    feeds = [rank["feed_state"] for row in rows for rank in row["detail"]["ranks"]]
    return (
        json.loads(told).get("reuse") == "on"
        and len(rows) == WORKERS
        and all(row["state"] == "ready" for row in rows)
        and all(row["detail"]["isolation"].get("lease") for row in rows)
        and all(state in ("live", "none") for state in feeds)
    )


async def waited(child: Child) -> None:
    async with asyncio.timeout(READY_S):
        while not await is_ready(child):  # noqa: ASYNC110  # other processes
            await asyncio.sleep(0.1)


@asynccontextmanager
async def fleet(
    folder: Path, count: int, profile: str, blocks: int, scale: float
) -> AsyncGenerator[Fleet]:
    """Empty workers, and so many gateways with one registry."""
    shared = ["--profile", profile, "--block-size", str(BLOCK_TOKENS), "--time-scale", str(scale)]
    async with AsyncExitStack() as stack:
        (folder / "nats").mkdir(parents=True)
        server, control = start_server(folder / "nats")
        stack.callback(server.wait)
        stack.callback(server.terminate)
        words = ["worker", *shared, "--blocks", str(blocks), "--model", MODEL]
        workers = [await started(stack, f"worker {n}", words) for n in range(WORKERS)]
        for worker in workers:
            await worker.wait_ready()
        urls = [str(worker.ready["url"]) for worker in workers]
        words = ["serve", "--worker-urls", *urls, "--port", "0", "--admin-port", "0", *shared]
        words += ["--control", control, "--control-replicas", "1", "--decision-header"]
        words += ["--disable-self-test", "--disable-gray-detection", "--state-dir"]
        gateways = [await started(stack, "gateway 0", [*words, str(folder / "g0")])]
        await gateways[0].wait_ready()
        for number in range(1, count):  # all have the secrets of the first
            state = folder / f"g{number}"
            shutil.copytree(folder / "g0" / "secrets", state / "secrets")
            state.chmod(0o700)
            gateways.append(await started(stack, f"gateway {number}", [*words, str(state)]))
        for gateway in gateways[1:]:
            await gateway.wait_ready()
        for gateway in gateways:
            await waited(gateway)
        yield Fleet(
            urls=[str(gateway.ready["url"]) for gateway in gateways],
            key=await made_key(gateways),
            pids=[gateway.process.pid for gateway in gateways],
        )


async def made_key(gateways: Sequence[Child]) -> str:
    """One that every gateway knows; its holder is told which worker answered."""
    roles = ["tenant.user", "fleet.operator"]
    order = {"tenant": "bench", "create_tenant": True, "user": "bench", "roles": roles}
    admin = endpoint_of(gateways[0].ready["admin_url"])
    status, body = await post(admin, "/keys", json.dumps(order).encode(), timeout_ms=10e3)
    assert status == 201, body
    key = str(json.loads(body)["key"])
    headers = (("authorization", f"Bearer {key}"),)
    asked = json.dumps({"prompt": [9, 9], "max_tokens": 1}).encode()
    async with asyncio.timeout(READY_S):
        for gateway in gateways:
            at = endpoint_of(gateway.ready["url"])
            while not await is_served(at, asked, headers):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
    return key


async def is_served(at: Endpoint, asked: bytes, headers: tuple[tuple[str, str], ...]) -> bool:
    status, _ = await post(at, "/v1/completions", asked, timeout_ms=5e3, headers=headers)
    return status == 200


async def played(
    before: Fleet, requests: Sequence[TraceRequest], options: ReplayOptions, seed: int
) -> Figures:
    draw = random.Random(seed)
    targets = [draw.choice(before.urls) for _ in requests]
    began_s = sum(map(cpu_s, before.pids))
    result = await replay_trace(requests, targets, options, SystemClock())
    spent_s = sum(map(cpu_s, before.pids)) - began_s
    return counted(result.records, len(before.urls), spent_s)


def counted(records: Sequence[RequestRecord], gateways: int, spent_s: float) -> Figures:
    turns: dict[str, list[RequestRecord]] = {}
    for record in records:
        if record.session is not None:
            turns.setdefault(record.session, []).append(record)
    kept = [record for record in records if not record.is_lost]
    cached = sum(record.cached_tokens or 0 for record in kept)
    moves = [
        after
        for of in turns.values()
        for before, after in pairwise(of)
        if before.worker != after.worker
    ]
    short = [of for of in turns.values() if of[0].prompt_tokens < CHECKPOINT_TOKENS]
    return Figures(
        gateways=gateways,
        requests=len(records),
        lost=len(records) - len(kept),
        false_hits=sum(record.verdict is Verdict.WRONG for record in records),
        sessions=len(turns),
        one_worker=stayed(list(turns.values())),
        one_worker_short=stayed(short),
        moved_turns=len(moves),
        moved_for_less=sum(move.reason == Reason.CACHE_PASSED.value for move in moves),
        hit_tokens=round(cached / max(1, sum(record.prompt_tokens for record in kept)), 5),
        cached_tokens=cached,
        late_p99_ms=round(percentile(sorted(record.client_late_ms for record in records), 0.99), 1),
        cpu_ms=round(spent_s * 1e3 / len(records), 3),
    )


def stayed(sessions_: Sequence[Sequence[RequestRecord]]) -> float | None:
    """Share of those of which every turn was answered, all by one worker; None of none."""
    if not sessions_:
        return None
    whole = sum(
        len({record.worker for record in of}) == 1
        and of[0].worker is not None
        and not any(record.is_lost for record in of)
        for of in sessions_
    )
    return round(whole / len(sessions_), 4)


async def measured_sessions(words: argparse.Namespace, count: int, folder: Path) -> Figures:
    # 10,000 tokens a second, quick to answer: a hit of one block is worth more than a draw.
    profile = fifo_profile(1.0, 0.1, 1.0)
    requests = sessions(
        words.sessions,
        words.turns,
        words.seed,
        think_ms=words.think_ms,
        starts_per_s=words.starts_per_s,
        first_tokens=words.first_tokens,
    )
    async with fleet(folder, count, profile, 40_000, 1.0) as made:
        options = ReplayOptions(
            is_closed_loop=True,
            model=MODEL,
            client=ClientOptions(api_key=made.key),
            prompt=PromptOptions(vocab_size=load_tokenizer(OWN_MODEL).vocab_size),
        )
        return await played(made, requests, options, words.seed)


async def measured_smoke(words: argparse.Namespace, count: int, folder: Path) -> Figures:
    workload = find_workload(SMOKE)
    lighter = workload.block_tokens / BLOCK_TOKENS
    profile = fifo_profile(
        workload.prefill_fixed_ms,
        workload.prefill_token_ms * lighter,
        workload.decode_token_ms,
        round((128 << 10) * lighter),
    )
    requests = load_workload(SMOKE, load=WORKERS / workload.workers, traces_dir=traces_dir())
    async with fleet(folder, count, profile, workload.capacity_blocks, SMOKE_SCALE) as made:
        options = ReplayOptions(
            time_scale=SMOKE_SCALE,
            model=MODEL,
            client=ClientOptions(api_key=made.key),
            prompt=PromptOptions(
                vocab_size=load_tokenizer(OWN_MODEL).vocab_size,
                tokens_per_block=BLOCK_TOKENS,
                max_output_tokens=ANSWER_TOKENS,
            ),
        )
        return await played(made, requests, options, words.seed)


async def measured(words: argparse.Namespace, folder: Path) -> dict[str, Figures]:
    """By load, in the order that they are shown in."""
    parts = {"sessions": measured_sessions}
    if not words.sessions_only:
        parts[SMOKE] = measured_smoke
    return {
        f"{name} {count}": await part(words, count, folder / f"{name}-{count}")
        for name, part in parts.items()
        for count in (1, words.gateways)
    }


def shown(name: str, figures: Figures) -> str:
    share = "-" if figures.one_worker is None else f"{figures.one_worker:.2%}"
    short = "-" if figures.one_worker_short is None else f"{figures.one_worker_short:.2%}"
    return (
        f"{name:12} {share:>10} {short:>10} {figures.moved_turns:>6}"
        f" {figures.moved_for_less:>8} {figures.hit_tokens:>8.2%}"
        f" {figures.lost:>5} {figures.false_hits:>6} {figures.cpu_ms:>7.2f}"
        f" {figures.late_p99_ms:>8.1f}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=500)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--gateways", type=int, default=3)
    parser.add_argument("--starts-per-s", type=float, default=STARTS_PER_S, help="of sessions")
    parser.add_argument("--think-ms", type=float, default=THINK_MS, help="mean, after an answer")
    parser.add_argument(
        "--first-tokens", type=token_range, default=FIRST_TOKENS, metavar="LOW-HIGH"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sessions-only", action="store_true")
    parser.add_argument("--json", action="store_true")
    words = parser.parse_args()
    if words.gateways < 2:
        parser.error(f"--gateways {words.gateways}: one is measured anyway, give 2 or more")
    with tempfile.TemporaryDirectory(prefix="trunkline-") as folder:
        figures = uvloop.run(measured(words, Path(folder)))
    several = figures[f"sessions {words.gateways}"]
    bars = [("sessions on one worker", several.one_worker or 0.0, BAR_SESSIONS)]
    if not words.sessions_only:
        alone, among = figures[f"{SMOKE} 1"], figures[f"{SMOKE} {words.gateways}"]
        lost_points = (alone.hit_tokens - among.hit_tokens) * 100.0
        bars.append(
            (f"{SMOKE}: points of hits lost, with the sign turned", -lost_points, -BAR_POINTS)
        )
    is_right = not any(one.lost or one.false_hits for one in figures.values())
    if words.json:
        print(json.dumps({name: asdict(one) for name, one in figures.items()}))
    else:
        print(
            f"{'gateways':12} {'one worker':>10} {'of short':>10} {'moves':>6}"
            f" {'for less':>8} {'hits':>8} {'lost':>5} {'false':>6} {'CPU ms':>7} {'late p99':>8}"
        )
        for name, one in figures.items():
            print(shown(name, one))
        for what, found, bar in bars:
            print(f"{'PASS' if found >= bar else 'FAIL'}  {what}: {found:.4g} (at least {bar:g})")
    return int(not is_right or any(found < bar for _, found, bar in bars))


if __name__ == "__main__":
    sys.exit(main())
