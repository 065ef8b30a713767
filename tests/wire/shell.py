"""Verbs of `trunkline` run in this process against an admin port, and what they print."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tenant_port import OPERATOR_KEY, TenantPort

from trunkline import cli


class Shell:
    """Runs verbs in this process, as `trunkline` does."""

    def __init__(self, port: TenantPort, capsys: pytest.CaptureFixture[str]) -> None:
        self.port = port
        self._capsys = capsys

    def run(self, *words: str, key: str = OPERATOR_KEY) -> tuple[int, str, str]:
        given = ["--admin-key", key] if key else []
        code = cli.main([*words, "--admin-url", self.port.url, *given])
        out, err = self._capsys.readouterr()
        return code, out, err

    def said(self, *words: str, key: str = OPERATOR_KEY) -> str:
        code, out, err = self.run(*words, key=key)
        assert (code, err) == (0, ""), (out, err)
        return out

    def json(self, *words: str, key: str = OPERATOR_KEY) -> Any:
        return json.loads(self.said(*words, "--json", key=key))
