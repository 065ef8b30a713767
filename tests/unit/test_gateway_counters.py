"""What is counted is shown: a number that nobody can read is not worth counting."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path

from trunkline import operations
from trunkline.gateway import families
from trunkline.gateway.counters import Counters


def test_every_metric_is_declared_and_given_once() -> None:
    text = Path(operations.__file__).read_text(encoding="utf-8")
    given = [word.split('"')[0] for word in text.split('Sample("')[1:]]
    assert len(given) == len(set(given))
    declared = Path(families.__file__).read_text(encoding="utf-8")
    for name in given:
        assert declared.count(f'"{name}"') == 1, name


def test_every_counter_is_exported() -> None:
    tree = ast.parse(Path(operations.__file__).read_text(encoding="utf-8"))
    read = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "counters"
    }
    assert {field.name for field in fields(Counters)} <= read
