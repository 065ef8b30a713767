"""Faults that seeded and exhaustive tests show better than real processes: F13 to F16.

A row runs the tests that it names, and fails where one of them is not there.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from rows import Finding, Row, Stage, Verdict

REPOSITORY = Path(__file__).resolve().parents[2]
LIMIT_S = 900
NONE_RAN = 4
"""How pytest ends where a test that it was told to run is not there."""

WIDE = 70

SHOWN: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "F13": (
        ("a full disk costs a block of the spill, no request", (
            "tests/unit/test_kv_disk_faults.py",
        )),
        ("a full disk refuses a change of the registry", (
            "tests/unit/test_sqlite_store.py::"
            "test_a_full_disk_refuses_the_change_and_keeps_what_was",
        )),
        ("audit log and registry lose nothing in 1,000 kills", (
            "tests/wire/test_kills.py",
        )),
    ),
    "F14": (
        ("leases go by the boot clock, rates 1 % off", (
            "tests/unit/test_freshness.py::"
            "test_a_grantor_outwaits_any_holder_whose_clock_is_one_percent_off",
            "tests/unit/test_worker_fence.py::"
            "test_a_lease_ends_by_the_boot_clock_to_the_millisecond",
        )),
        ("no lease is honoured late, in every state", (
            "tests/model/test_revocation_model.py",
        )),
        ("a source that slept through its lease sends nothing", (
            "tests/wire/test_kv_pull_edges.py::"
            "test_nothing_is_sent_by_a_source_that_slept_through_its_lease",
        )),
        ("a jump of the wall clock is in the log", (
            "tests/unit/test_clock.py::test_f14_a_jump_of_the_wall_clock_is_logged",
        )),
    ),
    "F15": (
        ("0 blocks visible before they are verified, at any chunk", (
            "tests/wire/test_kv_pull_faults.py",
            "tests/wire/test_kv_pull_hostile.py",
        )),
        ("aborted pulls leak 0 bytes", ("tests/wire/test_kv_pull_aborts.py",)),
    ),
    "F16": (
        ("the directory equals the truth after gaps, resets, overlaps", (
            "tests/model/test_feed_machine.py",
            "tests/unit/test_feed.py",
            "tests/unit/test_feed_lives.py",
        )),
    ),
}  # fmt: skip


def shown(fault: str) -> Callable[[Stage], list[Finding]]:
    return lambda stage: [_run(stage, what, tests) for what, tests in SHOWN[fault]]


def _run(stage: Stage, what: str, tests: tuple[str, ...]) -> Finding:
    names = ", ".join(test.rpartition("::")[2].rpartition("/")[2] for test in tests)
    words = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *tests]
    child = subprocess.Popen(
        words, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        said, _ = child.communicate(timeout=LIMIT_S)
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
    last = said.strip().splitlines()[-1] if said.strip() else "it said nothing"
    stage.say(f"{names}: {last}")
    has_shown = child.returncode == 0 and " passed" in last  # tests that were skipped show nothing
    return Finding(
        fault=stage.fault,
        what=what,
        goal=names if len(names) <= WIDE else f"{names[:WIDE]}...",
        figure="no such test" if child.returncode == NONE_RAN else last.strip("= ")[:WIDE],
        verdict=Verdict.ELSEWHERE if has_shown else Verdict.FAIL,
    )


ROWS = tuple(
    Row(fault=fault, part="elsewhere", title="tests that show it", run=shown(fault))
    for fault in SHOWN
)
