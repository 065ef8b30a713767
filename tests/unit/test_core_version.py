"""A compiled core of another version than the source is left alone, and the operator is told."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trunkline.native import _choice

MODULE = Path(_choice.__file__).parent / "cpp" / "module.cpp"
SURFACE = {1: "981bd3cadd3835ed", 2: "b7dd3924f6fd47e4"}
"""Version of the core, digest of what it offers Python."""

PLANT = """
import sys, types
names = ("BlockIndex", "chain_keys", "split_answer", "split_request")
core = types.SimpleNamespace(**dict.fromkeys(names), {version})
sys.modules["trunkline.native._core"] = core
"""


def run(version: str, code: str) -> subprocess.CompletedProcess[str]:
    """`code` in a process whose compiled core is of this version."""
    environ = {name: value for name, value in os.environ.items() if name != "TRUNKLINE_PURE"}
    script = PLANT.format(version=version) + code
    return subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True
    )


SHOW = "from trunkline.native import IMPLEMENTATION, STALE_CORE; print(IMPLEMENTATION, STALE_CORE)"


@pytest.mark.parametrize("version", ["", "VERSION=0", "VERSION=1_000_000"])
def test_a_core_of_another_version_is_left_alone_and_python_does_its_work(version: str) -> None:
    kind, _, why = run(version, SHOW).stdout.strip().partition(" ")
    found = int(version.partition("=")[2] or 0)
    assert kind == "pure"
    assert f"version {found}, and this source needs {_choice.CORE_VERSION}" in why


def test_a_core_of_the_version_that_is_asked_for_is_used() -> None:
    assert run(f"VERSION={_choice.CORE_VERSION}", SHOW).stdout == "compiled \n"


def test_version_and_serve_name_the_remedy_of_a_stale_core() -> None:
    told = run("", "from trunkline.cli import main\nmain(['version'])")
    assert "(pure core" in told.stdout
    assert "`make setup`" in told.stderr
    code = (
        "from trunkline import observe, wiring\nfrom trunkline.config import Config\n"
        "observe.configure('info', 'json')\nwiring._say_what_is_open(Config())"
    )
    lines = run("", code).stderr.splitlines()
    assert [line for line in lines if "core.stale" in line and "`make setup`" in line]


def test_what_the_core_offers_changes_with_its_version_alone() -> None:
    """Who changes what it offers raises both numbers, and puts the new digest here."""
    text = MODULE.read_text("utf-8")
    block = text[text.index("NB_MODULE(") :]
    (written,) = re.findall(r'm\.attr\("VERSION"\) = (\d+);', block)
    assert int(written) == _choice.CORE_VERSION
    offered = "".join(
        re.sub(r"//.*|\s|m\.(?:attr|doc)\b.*", "", line) for line in block.splitlines()
    )
    digest = hashlib.sha256(offered.encode()).hexdigest()[:16]
    assert SURFACE[_choice.CORE_VERSION] == digest
