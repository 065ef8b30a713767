"""The token ids of planned prefixes, each in a file that `trunkline public propose` takes.

Only a trace whose prompts are token ids has them: block ids are names of blocks, and what a model
makes of text its tokenizer knows. Owns the files, which nobody else on the machine can read. Must
never: write over a file, or put a token anywhere else. Read `plan_public.py` for who asks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from trunkline.errors import ConfigError, TraceError
from trunkline.replay.traces import TraceRequest


def check(folder: Path, trace: str, requests: Iterable[TraceRequest]) -> None:
    """That there will be something to write, and room for it, before anything is counted. Raises
    TraceError, ConfigError.
    """
    first = next(iter(requests), None)
    if first is not None and first.block_ids is not None:
        raise TraceError(
            f"--write-tokens: {trace} has block ids, which name blocks and are no token ids: there"
            " are no tokens to write; plan on a log of requests whose `prompt` is token ids"
        )
    if first is not None and _tokens_of(first) is None:
        raise TraceError(
            f"--write-tokens: {trace} has prompts of text, and which token ids a model makes of it"
            " only its tokenizer knows; plan on a log of requests whose `prompt` is token ids"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.glob("prefix-*.json"))):
        raise ConfigError(f"--write-tokens {folder} is no folder, or has such files already")


def write(folder: Path, rows: list[dict[str, Any]], requests: Iterable[TraceRequest]) -> None:
    """Write the tokens of each row from its first request on, and the file's name into the row as
    `tokens_file` (None where that request has no token ids). Raises OSError.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    waiting: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        row["tokens_file"] = None
        waiting.setdefault(row["first_request"], []).append(index)
    for number, request in enumerate(requests, start=1):
        for index in waiting.pop(number, ()):
            tokens = _tokens_of(request)
            if tokens is not None:
                path = folder / f"prefix-{index + 1}.json"
                _write_new(path, tokens[: rows[index]["prefix_tokens"]])
                rows[index]["tokens_file"] = str(path)
        if not waiting:
            return


def _tokens_of(request: TraceRequest) -> list[int] | None:
    prompt: Any = (request.body or {}).get("prompt")
    if not isinstance(prompt, list):
        return None
    items = cast("list[Any]", prompt)
    return cast("list[int]", items) if all(type(item) is int for item in items) else None


def _write_new(path: Path, tokens: list[int]) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w", encoding="ascii") as file:
        json.dump(tokens, file)
        file.write("\n")
