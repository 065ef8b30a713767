"""What is shown of settings: passwords that stand inside addresses."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from test_settings import refusal, resolve, written

from trunkline import settings


def test_a_password_in_the_address_of_a_server_is_shown_nowhere_and_kept_out_of_logs(
    tmp_path: Path,
) -> None:
    address = "nats://gateway:marked%2Fpass@n1:4222"
    resolved = resolve("--control", address, "nats://marked-token@n2", "nats://g:marked/x@n3")
    text = settings.to_toml(resolved)
    assert "marked" not in text + repr(settings.redacted(resolved.config))
    shown = ["nats://***@n1:4222", "nats://***@n2", "nats://***@n3"]
    assert tomllib.loads(text)["control"]["control"] == shown
    assert "in place of a secret" in refusal(file=written(tmp_path, text))
    found = settings.secret_values(resolved.config)
    assert {"marked%2Fpass", "marked/pass", "marked-token"} <= set(found)
    assert "gateway" not in found, "a user's name is a word of logs"
    assert "marked" not in refusal("--control", "nats://gateway:marked\x01pass@n1")
    assert resolved.config.control.control[0] == address


@pytest.mark.parametrize(
    "address", ["nats://gateway:marked@n1:4222", "nats://marked-token@n1:4222"]
)
def test_a_file_that_everyone_may_read_logs_in_to_no_server(tmp_path: Path, address: str) -> None:
    text = f'[control]\ncontrol = ["nats://n0:4222", "{address}"]\n'
    file = written(tmp_path, text, 0o644)
    said = refusal(file=file)
    assert f"{file} holds control.control and everyone may read it; chmod 600 it" in said
    assert "marked" not in said
    [found] = settings.refusals_in(str(file))
    assert str(found) in said
    file.chmod(0o600)
    assert resolve(file=file).config.control.control == ("nats://n0:4222", address)
    file = written(tmp_path, text.replace(address, "nats://n1:4222"), 0o644)
    assert resolve(file=file).config.control.control == ("nats://n0:4222", "nats://n1:4222")
