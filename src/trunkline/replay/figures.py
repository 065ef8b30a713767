"""Which figures a replay has, known before it runs: what bars may name, and how users list them.

Made from a specimen of the very record that a run gives, so that no list can grow stale. Must
never hold a measured value. Read `bars.py` next.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from trunkline.replay.bars import flatten
from trunkline.replay.counters import Quantiles
from trunkline.replay.results import Spread, Summary

_SPREAD = Spread(mean=0.0, p50=0.0, p95=0.0, p99=0.0)
_QUANTILES = Quantiles(p50=0.0, p99=0.0)


def specimen(baselines: Iterable[str] = ()) -> dict[str, Any]:
    """The figures of a run in which everything was measured, beside these baselines."""
    summary = Summary(
        workload="",
        policy="",
        requests=1,
        lost=0,
        lost_reasons={},
        wall_s=1.0,
        time_scale=1.0,
        prompt_tokens=1,
        cached_tokens=0,
        hit_requests=0,
        answers_checked=1,
        false_hits=0,
        over_claims=0,
        ttft_wall_ms=_SPREAD,
        client_late_ms=_SPREAD,
        router_queue_ms=_SPREAD,
        worker_work={},
        directory_lookup_us=_QUANTILES,
        transfer_bytes=0,
        kv_memory_bytes=0,
        gateway_memory_bytes=0,
        pulled_tokens=0,
        net_saved_wall_ms=0.0,
    )
    figures = summary.as_dict()
    return {**figures, "baselines": {name: dict(figures, baselines={}) for name in baselines}}


def listing(figures: Mapping[str, Any]) -> str:
    """What bars may name, one line a figure or group, for people."""
    lines = ["Figures that a bar or --fail-if may name (what nobody measured never passes):", ""]
    for name, value in figures.items():
        if isinstance(value, Mapping):
            points = ",".join(flatten(cast("Mapping[str, Any]", value)))
            lines += [f"  {name}.{{{points}}}"] if points and name != "baselines" else []
        elif not isinstance(value, str):
            lines.append(f"  {name}")
    lines += ["", "Of another policy in the same run: baselines.least_queue.ttft_ms.p95 and so on."]
    lines += ["A bar compares a figure with a number, a figure, or number*figure:"]
    lines += ["  hit_tokens_ratio>=0.85,ttft_ms.p95<=1.02*baselines.least_queue.ttft_ms.p95"]
    return "\n".join(lines) + "\n"


class ListFigures(argparse.Action):
    """`--figures`: print what bars may name, then leave, as `--help` does."""

    def __init__(self, option_strings: list[str], text: Callable[[], str], **rest: Any) -> None:
        # Any: argparse hands on its own keywords.
        super().__init__(
            option_strings,
            dest=argparse.SUPPRESS,
            default=argparse.SUPPRESS,
            nargs=0,
            help="list the figures that bars may name, then leave",
        )
        self._text = text

    def __call__(self, parser: argparse.ArgumentParser, *_rest: object) -> None:
        print(self._text(), end="")
        parser.exit()
