"""`tools/vllm_demo.py` whole, but for vLLM: a simulated worker stands in for each engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from fleet import MODEL_FOLDER, WAIT_S, until
from vllm_demo import replay_arguments
from vllm_engines import MAX_MODEL_LEN
from vllm_environment import VERSION

from trunkline.rehearsal import traces_dir
from trunkline.replay import flags
from trunkline.replay.command import load_requests
from trunkline.replay.prompts import PromptMaker, PromptOptions

DEMO = Path(__file__).resolve().parents[2] / "tools" / "vllm_demo.py"
STAND_IN = f"""#!{sys.executable}
import os, shutil, sys
words = sys.argv[1:]
if words[0] == "-c":
    print("{VERSION}")
elif words[0] == "-m":
    if os.environ.get("BROKEN"):
        sys.exit("no engine today")
    port = words[words.index("--port") + 1]
    flags = ["--port", port, "--model", "tiny", "--block-size", "32"]
    os.execv(sys.executable, [sys.executable, "-m", "trunkline", "worker", *flags])
else:
    shutil.copytree({str(MODEL_FOLDER)!r}, words[1])
"""
FEW = ("--requests", "6", "--speed", "1000")
ENDLESS = ("--requests", "6", "--rate", "0.001")


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """Answers as the Python of an environment with vLLM would."""
    path = tmp_path / "python"
    path.write_text(STAND_IN)
    path.chmod(0o755)
    return path


@contextmanager
def demo(python: Path | str, *words: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, str(DEMO), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "VLLM_PYTHON": str(python), **environment},
        start_new_session=True,
        preexec_fn=_ignore_ctrl_c,
    )
    try:
        yield child
    finally:
        if child.poll() is None:
            for pid in children_of(child.pid):
                os.kill(pid, signal.SIGTERM)
            child.kill()
        child.communicate(timeout=WAIT_S)


def _ignore_ctrl_c() -> None:
    """As a shell does for what it starts in the background."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def children_of(pid: int) -> set[int]:
    found: set[int] = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            told = path.read_text()
        except OSError:
            continue  # it has just ended
        if int(told.rpartition(")")[2].split()[1]) == pid:
            found.add(int(path.parent.name))
    return found


def test_the_demo_prints_one_report_of_both_policies(python: Path, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    with demo(python, *FEW, "--json", str(figures)) as child:
        out, err = child.communicate(timeout=280)
    assert child.returncode == 0, out + err
    told = json.loads(figures.read_text())
    assert (told["requests"], told["lost"], told["over_claims"]) == (6, 0, 0)
    assert list(told["baselines"]) == ["least_queue"]
    assert told["avoided_prefill_tokens"] > 0
    assert "x ref" in out
    assert "make test-vllm" in out
    assert "followed: exact, exact" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["starting two", "followed"])
def test_a_demo_that_is_interrupted_ends_what_it_started(
    python: Path, number: signal.Signals, moment: str
) -> None:
    with demo(python, *ENDLESS) as child:
        assert child.stderr is not None
        assert any(moment in line for line in child.stderr)
        count = 3 if moment == "followed" else 2  # engines, and then a gateway
        started = until(
            lambda: len(found := children_of(child.pid)) >= count and found, "they are started"
        )
        child.send_signal(number)
        _, err = child.communicate(timeout=WAIT_S)
    assert child.returncode == 130, err
    assert "Traceback" not in err
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started), "they have ended")


def test_an_engine_that_does_not_start_is_said_so(python: Path) -> None:
    with demo(python, *FEW, BROKEN="1") as child:
        _, err = child.communicate(timeout=WAIT_S)
    assert child.returncode == 1
    assert "no engine today" in err
    assert "Traceback" not in err


def test_the_demo_is_skipped_where_there_is_no_vllm() -> None:
    with demo("/nowhere/python") as child:
        out, err = child.communicate(timeout=WAIT_S)
    assert (child.returncode, out) == (0, "")
    assert "skipped: VLLM_PYTHON is /nowhere/python" in err


def test_every_prompt_of_the_demo_fits_the_tiny_model() -> None:
    arguments = replay_arguments([])
    flags.check(arguments)
    requests, _ = load_requests(arguments, traces_dir())
    maker = PromptMaker(
        PromptOptions(
            tokens_per_block=arguments.tokens_per_block,
            max_output_tokens=arguments.max_output_tokens,
        )
    )
    longest = max(len(maker.prompt(one)) + maker.output_tokens(one) for one in requests)
    assert longest <= MAX_MODEL_LEN
