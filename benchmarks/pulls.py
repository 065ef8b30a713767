"""What pulls win on the fleet model: W1 to W4 at 25, 100 and 400 Gbit/s, and with host memory.

    python benchmarks/pulls.py [--json] [--seeds COUNT]

KV is 128 KiB a token. Beside each setting stands the run without pulls and the pooled limit, one
cache of the fleet's whole size; the last columns are that of endless caches in which a block is
found once it is computed. p95 of the time to first token in s, hit tokens in percent; both
are the model's and the same on any machine. Half a minute of CPU for one seed.

Bars are those of `trunkline simulate` (`sim/acceptance.py`), for the first seed: p95 and hits at
100 Gbit/s, never worse than without pulls at 25, host memory of 8 times the device at 25.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trunkline.core.links import LinkProfile, gbit_per_s
from trunkline.replay.bars import check_bars
from trunkline.replay.traces import TraceRequest
from trunkline.replay.workloads import Workload, find_workload, load_workload
from trunkline.sim.acceptance import Setting, bars_for
from trunkline.sim.figures import figures
from trunkline.sim.limit import computed_limit, limit
from trunkline.sim.model import FleetModel, ModelOptions

TRACES = Path(__file__).resolve().parents[1] / "traces"
SETTINGS = (
    *((workload, 0.0) for workload in ("W1", "W2", "W3", "W4")),
    *((workload, 8.0) for workload in ("W1", "W3")),
)
"""Workload, and times of host over device memory."""
LINKS_GBIT = (None, 25.0, 100.0, 400.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    workload: str
    host_factor: float
    link_gbit: float | None
    seed: int
    p95_s: float
    hit_percent: float
    pulls: int
    pulled_gib: float
    limit_p95_s: float
    limit_hit_percent: float
    computed_limit_p95_s: float
    computed_limit_hit_percent: float
    missed: list[str]


def run(
    workload: Workload,
    requests: list[TraceRequest],
    setting: Setting,
    seed: int,
) -> dict[str, Any]:  # JSON
    gbit = setting.link_gbit
    options = ModelOptions(
        links=None if gbit is None else LinkProfile(bytes_per_ms=gbit_per_s(gbit)),
        host_blocks=round(setting.host_factor * workload.capacity_blocks),
        event_delay_ms=workload.directory_delay_ms,
        seed=seed,
    )
    outcome = FleetModel(workload, options, lambda: 0.0).run(requests)
    return figures(workload.name, "cache_aware", outcome)


def rows(name: str, host_factor: float, seed: int) -> list[Row]:
    workload = find_workload(name)
    requests = load_workload(name, traces_dir=TRACES)
    host_blocks = round(host_factor * workload.capacity_blocks)
    most = figures(name, "limit", limit(workload, requests, host_blocks=host_blocks))
    causal = figures(name, "limit", computed_limit(workload, requests))
    made: list[Row] = []
    without: dict[str, Any] = {}  # JSON
    for gbit in LINKS_GBIT:
        print(f"{name} host x{host_factor:g} {gbit or 'no'} Gbit/s ...", file=sys.stderr)
        setting = Setting(link_gbit=gbit, host_factor=host_factor)
        told = run(workload, requests, setting, seed)
        without = without or dict(told)
        told["baselines"] = {"without_pulls": without}
        bars = [] if gbit is None or seed else bars_for(name, setting)
        made.append(
            Row(
                workload=name,
                host_factor=host_factor,
                link_gbit=gbit,
                seed=seed,
                p95_s=told["ttft_ms"]["p95"] / 1_000,
                hit_percent=100 * told["hit_tokens_ratio"],
                pulls=told["pulls"]["count"],
                pulled_gib=told["transfer_bytes"] / 2**30,
                limit_p95_s=most["ttft_ms"]["p95"] / 1_000,
                limit_hit_percent=100 * most["hit_tokens_ratio"],
                computed_limit_p95_s=causal["ttft_ms"]["p95"] / 1_000,
                computed_limit_hit_percent=100 * causal["hit_tokens_ratio"],
                missed=[v.bar.text for v in check_bars(bars, told) if not v.is_passed],
            )
        )
    return made


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON list")
    parser.add_argument("--seeds", type=int, default=1, metavar="COUNT", help="of all draws [1]")
    arguments = parser.parse_args()
    found = [
        row
        for name, host_factor in SETTINGS
        for seed in range(arguments.seeds)
        for row in rows(name, host_factor, seed)
    ]
    if arguments.json:
        print(json.dumps([asdict(row) for row in found], indent=2))
    else:
        print(f"{'':4s} {'host':>5s} {'Gbit/s':>7s} {'p95 s':>8s} {'hits':>7s} {'pulls':>7s}"
              f" {'GiB':>8s} {'limit p95, hits':>17s} {'if computed':>17s}")  # fmt: skip
        for row in found:
            link = "none" if row.link_gbit is None else f"{row.link_gbit:g}"
            print(
                f"{row.workload:4s} {row.host_factor:>4g}x {link:>7s} {row.p95_s:8.2f}"
                f" {row.hit_percent:6.2f}% {row.pulls:7,d} {row.pulled_gib:8,.1f}"
                f" {row.limit_p95_s:8.2f} {row.limit_hit_percent:7.2f}%"
                f" {row.computed_limit_p95_s:8.2f} {row.computed_limit_hit_percent:7.2f}%"
                + "".join(f"  MISSED {bar}" for bar in row.missed)
            )
    return 1 if any(row.missed for row in found) else 0


if __name__ == "__main__":
    raise SystemExit(main())
