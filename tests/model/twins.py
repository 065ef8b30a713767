"""Both implementations of the native core, and the prompts that tests give them."""

from __future__ import annotations

import importlib
from array import array
from typing import Any

import pytest

from trunkline.native import _fallback

try:
    compiled: Any = importlib.import_module("trunkline.native._core")  # it has no stubs
except ImportError:
    compiled = None

needs_compiled = pytest.mark.skipif(
    compiled is None, reason="the extension is not built here: no twin to compare with"
)
TWINS: list[Any] = [_fallback] if compiled is None else [_fallback, compiled]

BLOCK_TOKENS = 2
SECRETS = [(bytes([n]) * 32, bytes([n + 100]) * 32) for n in range(2)]

Path = tuple[int, ...]


def tokens_of(path: Path) -> array[int]:
    """Each step of a path is one block; steps with equal numbers have equal tokens."""
    return array("I", [token for step in path for token in (step, 1000 + step)])


def chain_of(namespace_id: int, path: Path) -> bytes:
    key, root = SECRETS[namespace_id]
    return _fallback.chain_keys(key, root, tokens_of(path), BLOCK_TOKENS)
