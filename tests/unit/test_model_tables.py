"""Several models in the settings: what a table may say, and what each model's settings are then."""

from __future__ import annotations

from pathlib import Path

import pytest

from trunkline.config import Config
from trunkline.config_models import ModelTable
from trunkline.errors import ConfigError
from trunkline.model_tables import MAX_MODELS, configs_of, names_of
from trunkline.settings import redacted, resolve, to_toml

TWO = """
worker_urls = ["http://w:1"]
[model]
block_size = 32
[[models]]
name = "a"
served_names = ["alpha"]
model_path = "/models/a"
worker_urls = ["http://w:2"]
[[models]]
name = "b"
block_size = 64
profile = "tiny"
"""


def _resolved(path: Path, text: str) -> Config:
    file = path / "trunkline.toml"
    file.write_text(text)
    return resolve({"config": str(file)}, {}).config


def test_each_model_has_the_settings_of_its_table_and_else_those_of_the_sections(
    tmp_path: Path,
) -> None:
    config = _resolved(tmp_path, TWO)
    one, two = configs_of(config)
    assert (one.model.served_model_name, two.model.served_model_name) == ("a", "b")
    assert (one.model.model_path, two.model.model_path) == ("/models/a", "")
    assert (one.model.block_size, two.model.block_size) == (32, 64)
    assert (one.routing.profile, two.routing.profile) == (config.routing.profile, "tiny")
    assert one.directory.max_blocks + two.directory.max_blocks <= config.directory.max_blocks
    assert names_of(config.models) == {"a": "a", "alpha": "a", "b": "b"}


def test_one_model_is_what_the_sections_say() -> None:
    config = Config()
    assert configs_of(config) == [config]


def test_what_is_printed_is_read_again_as_the_same(tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text(TWO)
    first = resolve({"config": str(tmp_path / "one.toml")}, {})
    again = _resolved(tmp_path, to_toml(first))
    assert again.models == first.config.models
    assert [row["name"] for row in redacted(again)["models"]] == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[[models]]\nmodel_path = "x"', "name .* is missing"),
        ('[[models]]\nname = "a"\nnam = 1', "nam .* is not a setting of a model"),
        ('[[models]]\nname = "a"\nblock_size = -1', "below 0"),
        ('[[models]]\nname = "a"\n[[models]]\nname = "b"\nserved_names = ["a"]', "two models"),
        ('[model]\nmodel_path = "x"\n[[models]]\nname = "a"', "stands in each table"),
        ('models = ["a"]', "written as tables"),
        (
            'worker_urls = ["http://w:1"]\n[[models]]\nname = "a"\nworker_urls = ["http://w:1"]',
            "twice",
        ),
        ("".join(f'[[models]]\nname = "{n}"\n' for n in range(MAX_MODELS + 1)), "limit is 64"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(
    tmp_path: Path, text: str, told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        _resolved(tmp_path, text)


def test_as_many_models_as_are_allowed_are_taken(tmp_path: Path) -> None:
    text = "".join(f'[[models]]\nname = "{n}"\n' for n in range(MAX_MODELS))
    assert len(_resolved(tmp_path, text).models) == MAX_MODELS
    assert ModelTable(name="x").block_size == 0
