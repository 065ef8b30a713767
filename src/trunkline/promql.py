"""Expressions over our own metrics, checked against the table that declares them.

A template names a metric as `@requests_total`; what is not in `gateway/families.py`, a part that
its kind does not have, or a label that none of the metrics named has, is an error: so a renamed
metric breaks what is generated, and not somebody's dashboard. Read `panels.py` and `alerts.py` for
the templates.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from trunkline.gateway.families import FAMILIES, PREFIX, Family, Kind

_METRIC = re.compile(r"@([a-z0-9_]+)(\{[^}]*\})?")
_PARTS = ("_bucket", "_count", "_sum")
"""Of a histogram, which has no series of its own name."""
_GROUPED = re.compile(r"\b(?:by|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_MATCHED = re.compile(r"([a-z_]+)\s*(?:=~|!~|!=|=)")
_OF_SCRAPES = frozenset({"instance", "job", "process", "le"})
"""Labels that come with a scrape, from several processes, or with a histogram."""


class UnknownName(ValueError):
    """A template names what is not exported."""


def promql(template: str, matchers: str = "") -> str:
    """The expression; each selector with these `matchers`, as `job="x"`. Raises UnknownName."""

    def written(found: re.Match[str]) -> str:
        inner = ", ".join(part for part in (matchers, (found[2] or "{}")[1:-1]) if part)
        return f"{PREFIX}{found[1]}" + (f"{{{inner}}}" if inner else "")

    _check(template)
    return _METRIC.sub(written, template)


def named(template: str) -> Iterator[Family]:
    """The metrics of a template. Raises UnknownName."""
    for found in _METRIC.finditer(template):
        yield _family(found[1])


def _family(name: str) -> Family:
    part = next((part for part in _PARTS if name.endswith(part)), "")
    stem = name.removesuffix(part) if part else name
    whole = FAMILIES.get(stem) or FAMILIES.get(name)
    if whole is None:
        raise UnknownName(f"{name} is no metric of ours")
    is_histogram = whole.kind is Kind.HISTOGRAM
    if is_histogram != (bool(part) and whole.name == stem):
        raise UnknownName(f"{name}: {whole.name} is a {whole.kind.value}")
    return whole


def _check(template: str) -> None:
    known = _OF_SCRAPES.union(*(family.labels for family in named(template)))
    if known == _OF_SCRAPES and "@" not in template:
        raise UnknownName(f"{template!r} names no metric")
    used = [name for group in _GROUPED.findall(template) for name in group.split(",")]
    for found in _METRIC.finditer(template):
        used += _MATCHED.findall(found[2] or "")
    for name in used:
        if name.strip() and name.strip() not in known:
            raise UnknownName(f"no metric of {template!r} has the label {name.strip()}")
