"""Real vLLM engines on this machine's CPU: started, waited for, killed and ended by their pid.

Each listens on loopback and publishes its KV events on sockets in a folder of its own, so that
nothing of it is reachable from elsewhere. An engine is three processes in one process group, which
ends as a whole, and with the process that started it. Must never be imported by the product.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

TOOLS = Path(__file__).resolve().parent
MODEL = "tiny"
BLOCK_TOKENS = 32
"""CPU attention takes multiples of 32."""
MAX_MODEL_LEN = 8_192
START_S = 600.0
"""Usually one to two minutes, nearly all of it imports; longer on a machine that is busy."""
STOP_S = 30.0
PROGRESS_S = 15.0
_SIGTERM_WHEN_PARENT_DIES = 1


class EngineFailed(Exception):
    """It did not start; the message has the end of its log."""


class Engine:
    """One engine, in one life after another, always under the same address."""

    def __init__(
        self,
        name: str,
        *,
        python: str,
        model: Path,
        folder: Path,
        core: int = 0,
        flags: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        events: Mapping[str, object] | None = None,
    ) -> None:
        """Files go to `folder`, whose path must be short (socket names have at most 107 bytes).
        `events` changes what the engine is told of publishing them; None leaves a setting away.
        """
        self.name = name
        self.model = model
        self.flags = tuple(flags)
        self.told_of_events = dict(events or {})
        """As `flags`, this may be changed between two lives."""
        self.events = f"ipc://{folder}/{name}.events"
        self.replay = f"ipc://{folder}/{name}.replay"
        self._port = _free_port()
        self._python = python
        self._log = folder / f"{name}.log"
        self._environment = {**_environment(core), **(environment or {})}
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def worker(self) -> str:
        """As a gateway calls it."""
        return f"127.0.0.1:{self._port}"

    @property
    def is_running(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def begin(self) -> None:
        """Start without waiting."""
        assert not self.is_running, f"{self.name} runs already"
        log: IO[bytes]
        with self._log.open("ab") as log:
            self._child = subprocess.Popen(
                [self._python, *self._words()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )

    def answers(self) -> bool:
        """Whether it serves. Raises EngineFailed when its process has ended."""
        if not self.is_running:
            raise EngineFailed(f"engine {self.name} ended:\n{self.log()[-3_000:]}")
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def kill(self) -> None:
        """As abrupt as a crash: all of its processes at once."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def log(self) -> str:
        return self._log.read_text("utf-8", "replace") if self._log.exists() else ""

    def _words(self) -> list[str]:
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.events,
            "replay_endpoint": self.replay,
            **self.told_of_events,
        }
        events = {name: value for name, value in events.items() if value is not None}
        return [
            *("-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(self.model), "--served-model-name", MODEL),
            *("--host", "127.0.0.1", "--port", str(self._port)),
            *("--dtype", "float32", "--enforce-eager", "--max-model-len", str(MAX_MODEL_LEN)),
            *("--block-size", str(BLOCK_TOKENS), "--enable-prompt-tokens-details"),
            *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
            *("--kv-events-config", json.dumps(events)),
            *self.flags,
        ]

    def _end(self, number: signal.Signals) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with suppress(subprocess.TimeoutExpired):
            child.wait(STOP_S)
        # The group's others, too, whatever became of the one that we know.
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def wait_all(engines: Sequence[Engine], say: Callable[[str], None]) -> None:
    """Until all of them answer. Raises EngineFailed."""
    began = said_at = time.monotonic()
    missing = list(engines)
    while missing:
        missing = [engine for engine in missing if not engine.answers()]
        now = time.monotonic()
        names = ", ".join(engine.name for engine in missing)
        if missing and now - began > START_S:
            raise EngineFailed(f"no answer within {START_S:.0f} s: {names}")
        if missing and now - said_at > PROGRESS_S:
            said_at = now
            say(f"waiting for {names}: {now - began:.0f} s (one to two minutes)")
        if missing:
            time.sleep(0.5)
    say(
        f"{', '.join(engine.name for engine in engines)}: up after {time.monotonic() - began:.0f} s"
    )


def make_model(python: str, folder: Path) -> None:
    """The tiny model's files in `folder`. Raises EngineFailed."""
    words = [python, str(TOOLS / "tiny_model.py"), str(folder)]
    made = subprocess.run(words, capture_output=True, text=True, env=_environment(0), check=False)
    if made.returncode:
        raise EngineFailed(f"the model was not made: {made.stderr[-2_000:]}")


def _environment(core: int) -> dict[str, str]:
    """Without what would make an engine slow, or have it talk to somebody."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH") and not name.startswith("VLLM_")
    }
    return {
        **kept,
        "VLLM_CPU_OMP_THREADS_BIND": str(core % (os.cpu_count() or 1)),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _end_with_parent() -> None:
    """In the child: a signal when whoever started it is gone, however that went."""
    ctypes.CDLL(None).prctl(_SIGTERM_WHEN_PARENT_DIES, signal.SIGTERM)


def _free_port() -> int:
    """Below those that the kernel hands out, so that it is still free when the engine binds it."""
    dice = random.SystemRandom()
    while True:
        port = dice.randrange(10_000, 32_768)
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
