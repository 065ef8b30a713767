"""Faults on real processes, each held against its goal; exit 1 if one of these is missed.

    make chaos ARGS='--only F1,F2 --trials 20 --seconds 10'

Without options each fault is tried as often and as long as its goal says (F1: 200 kills), a row no
longer than its limit. All processes listen on loopback and are ended by their pids, also after
Ctrl-C or SIGTERM. Figures depend on the machine: its load is printed beside them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # what fleet.py imports
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "wire"))  # fleet.py

import deaths
import disks
import elsewhere
import links
import loads
import registry
import restarts
import soak
import storms
import vanish
from rows import Finding, Row, Stage, Verdict, table, tried

import gateways

ROWS: tuple[Row, ...] = (
    *(*deaths.ROWS, *vanish.ROWS, *links.ROWS, *storms.ROWS, *loads.ROWS),
    *(*gateways.ROWS, *restarts.ROWS, *registry.ROWS, *disks.ROWS, *elsewhere.ROWS, *soak.ROWS),
)


def run(row: Row, args: argparse.Namespace) -> list[Finding]:
    stage = Stage(
        fault=row.fault,
        trials=args.trials,
        seconds=args.seconds,
        limit_s=row.limit_s,
        seed=args.seed,
        began_s=time.monotonic(),
    )
    return tried(row, stage)


def wanted(only: str) -> list[Row]:
    """The rows of the named faults, in order. Raises SystemExit for unknown ones."""
    names = [name.strip().upper() for name in only.split(",") if name.strip()]
    unknown = sorted(set(names) - {row.fault for row in ROWS})
    if unknown:
        known = ", ".join(dict.fromkeys(row.fault for row in ROWS))
        raise SystemExit(f"no such fault: {', '.join(unknown)}; known are {known}")
    chosen = (r for r in ROWS if r.fault in names or not (names or r.is_only_when_named))
    return sorted(chosen, key=lambda row: (row.fault[0], int(row.fault[1:])))


def _interrupted(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt  # so that whatever is open is closed on the way out


def _end_strays() -> None:
    """Children whose start was interrupted before they were in anybody's list."""
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    for pid in path.read_text().split() if path.exists() else ():
        with contextlib.suppress(OSError):
            os.kill(int(pid), signal.SIGKILL)
            os.waitpid(int(pid), 0)


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make chaos", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="faults to try, as F1,F2; all unless told")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--trials", type=int, help="of each fault; as its goal says unless told")
    parser.add_argument("--seconds", type=float, help="longest phase under load; as the goal says")
    parser.add_argument("--seed", type=int, default=1, help="of the victims and moments")
    parser.add_argument("--json", default="", help="write the table to this file, too")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    args = parsed(words)
    for number in (signal.SIGTERM, signal.SIGINT):  # the latter also where a shell ignores it
        signal.signal(number, _interrupted)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    rows = [row for row in wanted(args.only) if args.part in (None, row.part)]
    findings: list[Finding] = []
    loads = [os.getloadavg()[0]]
    code = 0
    try:
        for row in rows:
            findings += run(row, args)
            loads.append(os.getloadavg()[0])
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; what was measured so far:\n")
        _end_strays()
        code = 130
    failed = [f for f in findings if f.verdict is Verdict.FAIL]
    load = f"load average {min(loads):.1f} to {max(loads):.1f} on {os.cpu_count()} cores"
    missed = f"{len(failed)} of {len(findings)} goals were missed"
    sys.stdout.write(f"{table(findings)}\n{load}, seed {args.seed}; {missed}\n")
    if args.json:
        told = [{**asdict(f), "verdict": f.verdict.value} for f in findings]
        Path(args.json).write_text(json.dumps({"load": loads, "findings": told}, indent=1))
    return code or int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
