"""A row of the table of faults: its goal, the figure that was measured, and the verdict.

Owns how figures are held against goals and how the table looks. Must never weaken a goal: where one
was not reached, the row fails and says by how much. Read `chaos.py` for who runs the rows.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

HEARTBEAT_S = 1.0
"""H of the goals: between two heartbeats of a worker, and between two probes."""


class Verdict(Enum):
    PASS = "pass"
    FAIL = "FAIL"
    ELSEWHERE = "shown elsewhere"
    """By tests that were run now and passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the table."""

    fault: str
    what: str
    goal: str
    figure: str
    verdict: Verdict


def held(fault: str, what: str, goal: str, figure: str, *, is_met: bool) -> Finding:
    verdict = Verdict.PASS if is_met else Verdict.FAIL
    return Finding(fault=fault, what=what, goal=goal, figure=figure, verdict=verdict)


def none_of(fault: str, what: str, bad: int, total: int, *, least: int = 1) -> Finding:
    """None may be bad, of at least so many: what was never tried is no success."""
    goal = "0" if least <= 1 else f"0 of at least {least:,}"
    figure = f"{bad:,} of {total:,}"
    return held(fault, what, goal, figure, is_met=bad == 0 and total >= least)


def all_of(fault: str, what: str, good: int, total: int) -> Finding:
    """Each must be good, and there must be some."""
    share = 100.0 * good / total if total else 0.0
    figure = f"{share:.2f} % of {total:,}"
    return held(fault, what, "100 %", figure, is_met=good == total > 0)


def at_most(fault: str, what: str, value: float, limit: float, unit: str) -> Finding:
    """NaN, for what could not be measured, fails."""
    figure = "nothing was measured" if math.isnan(value) else f"{value:.3g} {unit}".strip()
    return held(fault, what, f"at most {limit:.3g} {unit}".strip(), figure, is_met=value <= limit)


def at_least(fault: str, what: str, value: float, limit: float, unit: str) -> Finding:
    figure = "nothing was measured" if math.isnan(value) else f"{value:.3g} {unit}"
    return held(fault, what, f"at least {limit:.3g} {unit}", figure, is_met=value >= limit)


def percentile(values: Sequence[float], share: float) -> float:
    """NaN of none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def growth(samples: Sequence[tuple[float, float]]) -> float:
    """Slope of the line of least squares, in percent of the mean an hour."""
    if len(samples) < 3:
        return math.nan
    fit = statistics.linear_regression([at for at, _ in samples], [value for _, value in samples])
    mean = statistics.fmean(value for _, value in samples)
    return 100.0 * fit.slope * 3_600.0 / mean if mean else 0.0


@dataclass(slots=True, kw_only=True)
class Stage:
    """What a row is given: how often, how long, and where its dice come from."""

    fault: str
    trials: int | None
    """As the command says; None for the full count."""
    seconds: float | None
    """Length of a phase under load, as the command says; None for the full length."""
    limit_s: float
    """The row begins no new trial after so long."""
    seed: int
    began_s: float

    def dice(self, *words: object) -> random.Random:
        return random.Random(f"{self.seed} {self.fault} {words}")

    def say(self, words: str) -> None:
        """Progress, for whoever waits."""
        spent_s = time.monotonic() - self.began_s
        sys.stderr.write(f"{self.fault:4} {spent_s:6.1f} s  {words}\n")
        sys.stderr.flush()

    def rounds(self, full: int) -> range:
        return range(self.trials or full)

    def phase_s(self, full: float) -> float:
        return min(full, self.seconds) if self.seconds else full

    @property
    def is_late(self) -> bool:
        return time.monotonic() - self.began_s > self.limit_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One fault of the reference, or one part of it."""

    fault: str
    title: str
    run: Callable[[Stage], list[Finding]]
    limit_s: float = 1_800.0
    part: str = ""
    """Told apart by this, where a fault has several rows."""
    is_only_when_named: bool = False


def tried(row: Row, stage: Stage) -> list[Finding]:
    """A row that breaks, however, has failed; the others run all the same."""
    stage.say(row.title)
    try:
        return row.run(stage)
    except Exception as error:  # noqa: BLE001 - what it is, is the finding
        first = error
        while isinstance(first, ExceptionGroup):
            first = first.exceptions[0]
        stage.say("it broke:\n" + "".join(traceback.format_exception(first)))
        words = f"{type(first).__name__}: {str(first)[:160]}".replace("\n", " ")
    return [held(row.fault, row.title, "runs to its end", words, is_met=False)]


def table(findings: Sequence[Finding]) -> str:
    heads = ("fault", "what", "goal", "measured", "verdict")
    lines = [(f.fault, f.what, f.goal, f.figure, f.verdict.value) for f in findings]
    widths = [max(len(line[at]) for line in (heads, *lines)) for at in range(len(heads))]
    rule = tuple("-" * width for width in widths)
    return "\n".join(
        "  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip()
        for line in (heads, rule, *lines)
    )
