"""`trunkline plan` on an hour of chat, 12,031 requests: time, CPU, memory of its largest process.

    python benchmarks/planning.py [--json]
    python benchmarks/planning.py --rows 10000000     # ten minutes of CPU, 1.5 GB of disk

Bars: 10 s, 1 GiB. CPU is shown beside it. Start-up of Python and the page's plots are in it;
routers are tried on up to four cores. `--rows` plans a log of so many drawn conversations in
Mooncake's format instead, against the bar of memory alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TRACE = Path(__file__).resolve().parents[1] / "traces" / "mooncake_conversation.jsonl.gz"
MAX_S = 10.0
MAX_MIB = 1_024.0


SESSIONS = 2_000
"""Conversations that go on at one time."""
TURNS, TURN_BLOCKS, PUBLIC_BLOCKS = 8, 3, 4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rows", type=int, default=0, metavar="N", help="plan N drawn rows")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        page, drawn = Path(folder) / "plan.html", Path(folder) / "drawn.jsonl"
        if args.rows:
            draw(drawn, args.rows)
        command = [sys.executable, "-m", "trunkline", "plan", str(drawn if args.rows else TRACE)]
        command += ["--json", "--html", str(page)]
        command += ["--cache-gib", "125", "--prefill-tokens-per-s", "3500"]
        command += ["--ttft-goal-ms", "15000"]
        began_s = time.monotonic()
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=os.environ)
        wall_s = time.monotonic() - began_s
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = json.loads(done.stdout)
    result = {
        "requests": found["log"]["requests"],
        "wall_s": round(wall_s, 2),
        "cpu_s": round(used.ru_utime + used.ru_stime, 2),
        "peak_mib": round(used.ru_maxrss / 1_024, 1),
        "ceiling": found["savings"]["ceiling"]["shared"],
    }
    max_s = float("inf") if args.rows else MAX_S
    is_met = result["wall_s"] < max_s and result["peak_mib"] < MAX_MIB
    if args.json:
        print(json.dumps({**result, "bars": "pass" if is_met else "fail"}))
    else:
        print(
            f"{result['requests']:,} requests: {result['wall_s']} s ({result['cpu_s']} s of CPU),"
            f" {result['peak_mib']} MiB; bars {max_s:g} s, {MAX_MIB:g} MiB:"
            f" {'pass' if is_met else 'FAIL'}"
        )
    return 0 if is_met else 1


def draw(path: Path, rows: int) -> None:
    """Conversations of up to 8 turns behind one of 64 system prompts, 2,000 at a time; each turn
    has all blocks of the one before.
    """
    random_ = random.Random(0)
    new = 64 * PUBLIC_BLOCKS
    talks: list[list[int]] = [[] for _ in range(SESSIONS)]
    with path.open("w") as out:
        for row in range(rows):
            which = random_.randrange(SESSIONS)
            blocks = talks[which]
            if len(blocks) in (0, PUBLIC_BLOCKS + TURNS * TURN_BLOCKS):
                first = random_.randrange(64) * PUBLIC_BLOCKS
                blocks = talks[which] = list(range(first, first + PUBLIC_BLOCKS))
            blocks.extend(range(new, new + TURN_BLOCKS))
            new += TURN_BLOCKS
            length = 512 * len(blocks)
            out.write(
                f'{{"timestamp":{20 * row},"input_length":{length},"output_length":200,'
                f'"hash_ids":{blocks}}}\n'
            )


if __name__ == "__main__":
    raise SystemExit(main())
