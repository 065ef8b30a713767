"""The `[[models]]` tables of a settings file: several models behind one gateway.

Each table is a model with its own workers, tokenizer and template; what it leaves out is as the
sections say. Must never: read the file (`settings.py` does). Read `config.py` for what a table may
hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from trunkline.config import Config
from trunkline.config_models import ModelTable
from trunkline.errors import ConfigError
from trunkline.leaf import Leaf, checked, from_toml, table_leaves, toml_value

MAX_MODELS = 64
TITLE = "models"
MIN_BLOCKS = 1_024
"""Of the directory of one model, however many there are."""


def tables_from_toml(content: Any, path: str) -> tuple[ModelTable, ...]:  # what TOML holds
    """Raises ConfigError for an unknown key, a value out of bounds, a name that two have."""
    written = cast("list[Any]", content) if isinstance(content, list) else [content]
    if len(written) > MAX_MODELS:
        raise ConfigError(f"{path} has {len(written)} tables [[models]]; the limit is {MAX_MODELS}")
    tables = tuple(_table(one, number, path) for number, one in enumerate(written, 1))
    taken: dict[str, str] = {}
    for table in tables:
        for name in (table.name, *table.served_names):
            if taken.setdefault(name, table.name) != table.name:
                raise ConfigError(
                    f"{path}: {name} names two models, {taken[name]} and {table.name}"
                )
    return tables


def conflict(config: Config) -> str | None:
    """Why the tables and the section `[model]` cannot stand beside one another."""
    for name in ("model_path", "tokenizer_path", "chat_template", "served_model_name"):
        if config.models and getattr(config.model, name):
            return f"is of one model; with [[models]], {name} stands in each table"
    return None


def configs_of(config: Config) -> list[Config]:
    """The settings of each model, as if it were alone; those of one model are what was given."""
    if not config.models:
        return [config]
    share = max(MIN_BLOCKS, config.directory.max_blocks // len(config.models))
    return [
        replace(
            config,
            models=(),
            model=replace(
                config.model,
                served_model_name=table.name,
                model_path=table.model_path,
                tokenizer_path=table.tokenizer_path,
                chat_template=table.chat_template,
                block_size=table.block_size or config.model.block_size,
                max_model_len=table.max_model_len or config.model.max_model_len,
            ),
            routing=replace(config.routing, profile=table.profile or config.routing.profile),
            directory=replace(config.directory, max_blocks=share),
        )
        for table in config.models
    ]


def names_of(tables: Sequence[ModelTable]) -> dict[str, str]:
    """Every name that a table gives, and the model that it stands for."""
    return {name: table.name for table in tables for name in (table.name, *table.served_names)}


def as_toml(tables: Sequence[ModelTable]) -> list[str]:
    lines: list[str] = []
    for table in tables:
        lines += ["", f"[[{TITLE}]]"]
        lines += [f"{leaf.name} = {toml_value(_value(leaf, table))}" for leaf in _leaves()]
    return lines


def as_dicts(tables: Sequence[ModelTable]) -> list[dict[str, Any]]:
    return [{leaf.name: _value(leaf, table) for leaf in _leaves()} for table in tables]


def _table(content: Any, number: int, path: str) -> ModelTable:  # what TOML holds
    origin = f"file {path}, table {number} of [[models]]"
    if not isinstance(content, Mapping):
        raise ConfigError(f"{TITLE} ({path}) is written as tables: [[models]]")
    by_name = {leaf.name: leaf for leaf in _leaves()}
    values: dict[str, Any] = {}
    for name, value in cast("Mapping[str, Any]", content).items():
        if name not in by_name:
            known = ", ".join(by_name)
            raise ConfigError(f"{name} ({origin}) is not a setting of a model; these are: {known}")
        leaf = by_name[name]
        values[name] = checked(leaf, from_toml(leaf, value, origin), origin)
    table = ModelTable(**values)
    if not table.name:
        raise ConfigError(f"name ({origin}) is missing: the model as its workers list it")
    return table


def _leaves() -> tuple[Leaf, ...]:
    return table_leaves(TITLE, ModelTable)


def _value(leaf: Leaf, table: ModelTable) -> Any:  # the field's own type
    return getattr(table, leaf.name)
