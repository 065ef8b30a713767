"""Bars: `hit_tokens_ratio>=0.85,ttft_ms.p99<=534` -> checks against a run's figures.

A bar must hold; with `--fail-if` the run fails where the expression is true. The right side may
name another figure, with a factor: `ttft_ms.p95<=1.02*baselines.least_queue.ttft_ms.p95`. A figure
that was not measured never passes. Names are checked before a run, by `check_names`; `figures.py`
knows them. Read `report.py` next.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, cast

from trunkline.errors import ConfigError
from trunkline.written import nearest

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
_KEY = r"[A-Za-z_][A-Za-z0-9_.@-]*"
_NUMBER = r"-?[0-9]+(?:_?[0-9])*(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?"
_BAR = re.compile(
    rf"\s*({_KEY})\s*(>=|<=|==|!=|>|<)\s*(?:({_NUMBER})\s*\*\s*({_KEY})|({_NUMBER})|({_KEY}))\s*"
)

OPEN_GROUPS = ("worker_work", "lost_reasons")
"""Figures below these are named by what happens in the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One comparison. `right_key` empty: against the number alone; else against number times
    figure.
    """

    text: str
    key: str
    compare: str
    number: float
    right_key: str = ""
    is_failure: bool = False
    """The run fails where the comparison is true, not where it is false."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """How a run did at a bar."""

    bar: Bar
    measured: float | None
    limit: float | None
    is_passed: bool

    @property
    def line(self) -> str:
        word = "PASS" if self.is_passed else "FAIL"
        prefix = "not " if self.bar.is_failure else ""
        return f"{word}  {prefix}{self.bar.text}  (measured {_shown(self.measured)})"


def parse_bars(expression: str, *, is_failure: bool = False) -> list[Bar]:
    """Comparisons separated by commas. Raises ConfigError for what is none."""
    bars: list[Bar] = []
    for text in expression.split(","):
        match = _BAR.fullmatch(text)
        if match is None:
            raise ConfigError(
                f"bar {text.strip()[:80]!r}: expected figure, one of"
                f" {' '.join(_OPERATORS)}, and a number, figure or number*figure"
            )
        factor, factor_key, number, key = match[3], match[4], match[5], match[6]
        bars.append(
            Bar(
                text=text.strip(),
                key=match[1],
                compare=match[2],
                number=float(factor or number or 1.0),
                right_key=factor_key or key or "",
                is_failure=is_failure,
            )
        )
    return bars


def check_names(bars: Iterable[Bar], figures: Mapping[str, Any], manual: str) -> None:
    """Raises ConfigError for a figure that no run can have. `figures` is a specimen of a run's.

    `manual` is the command that lists them.
    """
    known = flatten(figures)
    for bar in bars:
        for key in (bar.key, bar.right_key):
            if key and key not in known and key.partition(".")[0] not in OPEN_GROUPS:
                raise ConfigError(f"bar {bar.text!r}: {_unknown(key, figures, manual)}")


def check_bars(bars: list[Bar], figures: Mapping[str, Any]) -> list[Check]:
    """Hold a run's figures (`Summary.as_dict()`) against bars."""
    known = flatten(figures)
    return [_checked(bar, known) for bar in bars]


def flatten(figures: Mapping[str, Any], prefix: str = "") -> dict[str, float | None]:
    """Dotted names of all numbers; a figure that was not measured is there with None."""
    flat: dict[str, float | None] = {}
    for name, value in figures.items():
        if isinstance(value, Mapping):
            nested = cast("Mapping[str, Any]", value)
            flat.update(flatten(nested, f"{prefix}{name}."))
        elif value is None or isinstance(value, (int, float)):
            flat[prefix + name] = value
    return flat


def _checked(bar: Bar, known: Mapping[str, float | None]) -> Check:
    measured = known.get(bar.key)
    limit: float | None = bar.number
    if bar.right_key:
        other = known.get(bar.right_key)
        limit = None if other is None else bar.number * other
    if measured is None or limit is None or not isfinite(measured):
        return Check(bar=bar, measured=measured, limit=limit, is_passed=False)
    is_true = _OPERATORS[bar.compare](measured, limit)
    return Check(bar=bar, measured=measured, limit=limit, is_passed=is_true != bar.is_failure)


def _unknown(key: str, figures: Mapping[str, Any], manual: str) -> str:
    """Why `key` is no figure of this run, and what to do."""
    baselines: Mapping[str, Any] = figures.get("baselines", {})
    policy = key.split(".")[1] if key.startswith("baselines.") else ""
    if policy and policy not in baselines:
        others = ", ".join(baselines) or "none"
        return f"{policy} is no baseline of this run; its baselines: {others}"
    near = nearest(key, flatten(figures))
    hint = f"did you mean {near}? " if near else ""
    return f"no figure {key!r}; {hint}`{manual}` lists them"


def _shown(value: float | None) -> str:
    return "nothing" if value is None else f"{value:.6g}"
