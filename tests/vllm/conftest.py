"""Two real vLLM engines for the whole session, and the table of figures at its end.

`make test-vllm` runs what is here; without `VLLM_PYTHON`, the Python of an environment with vLLM,
nothing is collected. Engines take a minute or two to start, so tests share them: whoever needs
others, or ends one, says so to `lab`. Whatever was started is ended with the session, also when it
is interrupted. Read `tools/vllm_engines.py` for the engines, `tests/wire/fleet.py` for the gateway.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parents[1]
sys.path += [str(TESTS / "wire"), str(TESTS.parent / "tools")]

from fleet import Gateway, Processes, processes  # noqa: E402
from vllm_engines import Engine, make_model, wait_all  # noqa: E402

PYTHON = os.environ.get("VLLM_PYTHON", "")
collect_ignore_glob = [] if PYTHON else ["test_*.py"]


@dataclass(slots=True)
class Figures:
    """What was measured, for the table at the end."""

    rows: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])

    def add(self, what: str, measured: str, wanted: str = "") -> None:
        self.rows.append((what, measured, wanted))


class Lab:
    """Engines of one model; all end with the session."""

    def __init__(self, folder: Path, say: Any) -> None:
        self.folder = folder
        self.model = folder / "model"
        self._say = say
        self._engines: list[Engine] = []
        say("making the tiny model")
        make_model(PYTHON, self.model)

    def engine(
        self,
        name: str,
        *flags: str,
        environment: Mapping[str, str] | None = None,
        events: Mapping[str, object] | None = None,
    ) -> Engine:
        """One that is not started yet: `begin` it, several at once, then `wait` for them."""
        made = Engine(
            name,
            python=PYTHON,
            model=self.model,
            folder=self.folder,
            core=len(self._engines),
            flags=flags,
            environment=environment,
            events=events,
        )
        self._engines.append(made)
        return made

    def wait(self, *engines: Engine) -> None:
        """Until they answer."""
        wait_all(engines, self._say)

    def start(self, *engines: Engine) -> None:
        for engine in engines:
            engine.begin()
        self.wait(*engines)

    def end(self) -> None:
        for engine in self._engines:
            engine.stop()


FIGURES = pytest.StashKey[Figures]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[FIGURES] = Figures()
    if PYTHON:
        signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    """As Ctrl-C: fixtures are torn down, and what they started ends."""
    raise KeyboardInterrupt


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    rows = config.stash[FIGURES].rows
    if not rows:
        return
    terminalreporter.section("measured with real vLLM engines")
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        terminalreporter.write_line("  ".join(cells).rstrip())


@pytest.fixture(scope="session")
def figures(request: pytest.FixtureRequest) -> Figures:
    return request.config.stash[FIGURES]


@pytest.fixture(scope="session")
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    capture: Any = request.config.pluginmanager.getplugin("capturemanager")

    def say(text: str) -> None:
        with capture.global_and_fixture_disabled():
            sys.stderr.write(f"\n[vllm] {text}")
            sys.stderr.flush()

    # Under /tmp, whatever TMPDIR is: the names of sockets are short.
    folder = Path(tempfile.mkdtemp(prefix="vllm-", dir="/tmp"))
    made: Lab | None = None
    try:
        made = Lab(folder, say)
        yield made
    finally:
        if made is not None:
            made.end()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def engines(lab: Lab) -> list[Engine]:
    """Two, up; the second names its blocks by whole digests of another kind (the gateway goes by
    the tokens, so it makes no difference).
    """
    both = [
        lab.engine("one"),
        lab.engine(
            "two",
            *("--prefix-caching-hash-algo", "sha256_cbor"),
            environment={"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0"},
        ),
    ]
    lab.start(*both)
    return both


@pytest.fixture
def started() -> Iterator[Processes]:
    with processes() as made:
        yield made


@pytest.fixture(scope="module")
def gateway(lab: Lab, engines: list[Engine]) -> Iterator[Gateway]:
    """Of one tenant, before both engines."""
    with processes() as made:
        yield made.gateway([engine.url for engine in engines], "--model-path", str(lab.model))
