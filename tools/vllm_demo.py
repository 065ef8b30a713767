"""`make demo-vllm`: a short replay through a real gateway before two real vLLM engines on the CPU.

The first coding sessions of the bundled trace W2, in prompts that the tiny model has room for, go
through a gateway of each policy in turn, before emptied engines; the report is that of `trunkline
replay`, whose flags may follow. Owns the demo's numbers, and ends what it starts, however it is
left. Answers are not compared here: `make test-vllm` does that. Read `vllm_engines.py` for the
engines, `trunkline/replay/command.py` for the run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import uvloop
from vllm_engines import BLOCK_TOKENS, MODEL, Engine, EngineFailed, make_model, wait_all
from vllm_environment import Unavailable, engine_python

from trunkline.adapters.clock import SystemClock
from trunkline.control.probe import fetch
from trunkline.core.profiles import fifo_profile, profile_named
from trunkline.errors import GatewayError
from trunkline.rehearsal import traces_dir
from trunkline.replay import command, flags
from trunkline.replay.plan import FleetPlan
from trunkline.replay.processes import (
    Child,
    ProcessFleet,
    StartFailed,
    endpoint_of,
    gateway_words,
    start_child,
    stop_all,
)

ENGINES = ("engine-one", "engine-two")
TRACE = "W2"
POLICIES = "cache_aware,least_queue"
REQUESTS = 200
SPEED = 7.0
"""Eight minutes of the workload, 23 sessions, in a little more than one, for each policy."""
MAX_OUTPUT_TOKENS = 4
"""What the demo shows is prefill; each token of an answer is a step of some 10 ms here."""
BARS = ("lost==0",)

KV_BYTES_PER_TOKEN = 16 << 10
PROFILE = fifo_profile(20.0, 0.4, 10.0, KV_BYTES_PER_TOKEN)
"""The tiny model on one core, where prices start from: measured on a 2-core machine."""
VOCABULARY = 4_096
"""That of the simulated model, whose tokenizer the tiny one has."""

WARM_TOKENS = 2_048
WARM_S = 120.0
FOLLOWED_S = 60.0
RUN_S = 900.0
"""For all policies; a machine on which it takes longer is too small for the demo."""
NOT_COMPARED = "Real engines have no answers known beforehand: `make test-vllm` compares them."
SKIPPED, FAILED, INTERRUPTED = 0, 1, 130
_ASK_MS = 15_000.0
"""A reset waits for the engine for 10 s at most."""


class RealFleets:
    """A gateway for each policy before the same engines; ends every gateway that it started."""

    def __init__(self, engines: Sequence[Engine], model: Path) -> None:
        self._engines = engines
        self._model = model
        self._gateways: list[Child] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await stop_all(self._gateways)

    async def start(self, plan: FleetPlan) -> ProcessFleet:
        """Of the plan, the policy alone counts. Raises StartFailed."""
        plan = replace(plan, profile=PROFILE, block_tokens=BLOCK_TOKENS, time_scale=1.0)
        words = gateway_words(plan, [engine.url for engine in self._engines], admin_port=0)
        # A test of its own while requests are timed would be in their way.
        words += ["--model-path", str(self._model), "--disable-self-test"]
        gateway = await start_child("gateway", words)
        self._gateways.append(gateway)
        await gateway.wait_ready()
        admin_url = str(gateway.ready["admin_url"])
        modes = await _followed(admin_url)
        for engine in self._engines:
            # Through the gateway: an idle engine would tell it with the next request only.
            status, told = await _ask(admin_url, "POST", f"/workers/{engine.worker}/reset")
            if status != 202:
                raise StartFailed(f"{engine.name} was not emptied: {status} {told!r}")
        say(f"a gateway with --policy {plan.policy}; its workers are followed: {', '.join(modes)}")
        fleet = ProcessFleet(
            gateway=gateway,
            worker_urls={engine.name: engine.url for engine in self._engines},
            fetch=fetch,
            decode=None,
            vocab_size=VOCABULARY,
            token_bytes=profile_named(PROFILE).kv_bytes_per_token,
        )
        await fleet.wait_ready(len(self._engines))
        return fleet


async def _followed(admin_url: str) -> list[str]:
    """How each worker is followed, once all may be chosen and have told what they hold. Raises
    StartFailed.
    """
    ends_at = time.monotonic() + FOLLOWED_S
    rows: list[dict[str, Any]] = []
    while time.monotonic() < ends_at:
        _, body = await _ask(admin_url, "GET", "/workers")
        rows = json.loads(body)["workers"]
        feeds = [rank["feed_state"] for row in rows for rank in row["detail"]["ranks"]]
        if all(row["state"] == "ready" for row in rows) and feeds and set(feeds) == {"live"}:
            return [row["mode"] for row in rows]
        await asyncio.sleep(0.1)
    raise StartFailed(f"the engines are not followed after {FOLLOWED_S:.0f} s: {rows}")


async def _ask(url: str, method: str, path: str) -> tuple[int, bytes]:
    return await fetch(endpoint_of(url), method, path, timeout_ms=_ASK_MS)


def demo(arguments: argparse.Namespace, python: str) -> int:
    """Engines, replay, report; the exit code. Raises EngineFailed or GatewayError."""
    # Under /tmp, whatever TMPDIR is: the names of sockets are short.
    folder = Path(tempfile.mkdtemp(prefix="vllm-", dir="/tmp"))
    engines: list[Engine] = []
    try:
        say("making a model of 29 million parameters")
        make_model(python, folder / "model")
        engines += [
            Engine(name, python=python, model=folder / "model", folder=folder, core=core)
            for core, name in enumerate(ENGINES)
        ]
        say("starting two vLLM engines: one to two minutes")
        for engine in engines:
            engine.begin()
        wait_all(engines, say)
        for engine in engines:
            _warm(engine)
        return uvloop.run(_replay(arguments, engines, folder / "model"))
    finally:
        # What ends them must not be broken off by a second Ctrl-C.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        say("ending the engines")
        for engine in engines:
            engine.stop()
        shutil.rmtree(folder, ignore_errors=True)


async def _replay(arguments: argparse.Namespace, engines: Sequence[Engine], model: Path) -> int:
    """Raises EngineFailed where it takes too long."""
    async with RealFleets(engines, model) as fleets:
        parts = command.ReplayParts(
            clock=SystemClock(),
            start_fleet=fleets.start,
            fetch=fetch,
            traces_dir=traces_dir(),
            out=sys.stdout,
            err=sys.stderr,
        )
        try:
            async with asyncio.timeout(RUN_S):
                code = await command.run(arguments, parts)
        except TimeoutError as error:
            raise EngineFailed(
                f"not done within {RUN_S:.0f} s: this machine is too busy"
            ) from error
    sys.stdout.write(f"\n  {NOT_COMPARED}\n")
    return code


def _warm(engine: Engine) -> None:
    """One prompt that is computed in vain: an engine's first one takes longer than all others."""
    prompt = [512 + number % 1_024 for number in range(WARM_TOKENS)]
    body = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": MAX_OUTPUT_TOKENS})
    request = urllib.request.Request(
        f"{engine.url}/v1/completions", body.encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=WARM_S) as answer:
        answer.read()


def replay_arguments(words: Sequence[str]) -> argparse.Namespace:
    """The demo as arguments of `trunkline replay`, with what the user changes of it."""
    parser = argparse.ArgumentParser(
        prog="make demo-vllm", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_arguments(parser)
    own = [
        TRACE,
        *("--policies", POLICIES),
        *("--requests", str(REQUESTS)),
        *("--speed", str(SPEED)),
        *("--sessions", "closed"),
        *("--model", MODEL),
        *("--tokens-per-block", str(BLOCK_TOKENS)),
        *("--max-output-tokens", str(MAX_OUTPUT_TOKENS)),
        "--no-verify",
    ]
    for bar in BARS:
        own += ["--bar", bar]
    return parser.parse_args([*own, *words])


def say(text: str) -> None:
    sys.stderr.write(f"[vllm] {text}\n")
    sys.stderr.flush()


def _as_ctrl_c(_number: int, _frame: FrameType | None) -> None:
    signal.raise_signal(signal.SIGINT)


def main() -> int:
    arguments = replay_arguments(sys.argv[1:])
    # Where it is started in the background, Ctrl-C would be ignored, and SIGTERM with it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _as_ctrl_c)
    try:
        return demo(arguments, engine_python())
    except Unavailable as reason:
        say(f"skipped: {reason}")
        return SKIPPED
    except (EngineFailed, GatewayError, OSError) as error:
        say(str(error))
        return FAILED
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
