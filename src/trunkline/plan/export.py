"""`trunkline plan export LOG`: a log as an anonymised trace, Mooncake's or Qwen-Bailian's.

What is written: times since the first request, lengths, and keyed hashes of blocks and of sessions.
Never text, and no name of a tenant, user, session or model. Without `--key-file` the key is drawn
and forgotten: then nobody, who has the log included, can say which block is which. Read `naming.py`
for the hashes.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from array import array
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from trunkline.errors import ConfigError
from trunkline.plan.calls import Call
from trunkline.plan.command import PlanParts, add_reading, check, check_folder, open_log
from trunkline.plan.naming import Namer
from trunkline.plan.reader import LogReader

KEY_BYTES = 32
MOONCAKE, BAILIAN = "mooncake", "bailian"
MAX_ID = (1 << 63) - 1
"""Readers take ids for signed 64-bit numbers."""
MAX_SESSIONS = 1 << 17
"""Sessions whose last chat is remembered, for Bailian; older ones begin anew."""
MAX_TAKEN_TOGETHER = 4_096
PACE_MS = 1_000.0
"""Between requests of a log without times."""
_ID_BYTES = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `trunkline plan export`."""
    add_reading(parser)
    add = parser.add_argument_group("what is written").add_argument
    add("--out", type=Path, required=True, metavar="FILE", help="the trace; must not exist yet")
    add("--as", dest="kind", choices=(MOONCAKE, BAILIAN), default=MOONCAKE, help="[mooncake]")
    add(
        "--together",
        type=int,
        default=1,
        metavar="COUNT",
        help="make one block of so many: 32 makes the 512 tokens that Mooncake's traces have of"
        " blocks of 16 [1]",
    )
    add(
        "--key-file",
        type=Path,
        metavar="FILE",
        help="32 bytes or more that key the hashes, so that two exports can be brought together"
        " [drawn and forgotten]",
    )


def run(args: argparse.Namespace, parts: PlanParts, draw: Callable[[int], bytes]) -> int:
    """Carry out the command. Raises ConfigError and TraceError; then no file is left."""
    check("--together", args.together, 1, MAX_TAKEN_TOGETHER)
    check_folder(args.out, "--out")
    key = draw(KEY_BYTES) if args.key_file is None else _read_key(args.key_file)
    reader, bar = open_log(args, parts, key)
    try:
        # Only its owner may read it, until they decide who else does.
        handle = os.open(args.out, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise ConfigError(f"--out {args.out} exists already") from error
    is_whole = False
    try:
        with os.fdopen(handle, "wb") as file:
            count, size = _write(file, reader, Exporter(key, args.kind, args.together))
        is_whole = True
    finally:
        if not is_whole:
            args.out.unlink(missing_ok=True)
    bar.fill()
    left_out = f"; {reader.rejects.total:,} lines left out" if reader.rejects.total else ""
    print(
        f"wrote {count:,} requests to {args.out}, in blocks of {size} tokens{left_out}",
        file=parts.out,
    )
    return 0


class Exporter:
    """Calls -> rows of a trace."""

    def __init__(self, key: bytes, kind: str, together: int) -> None:
        self._kind = kind
        self.together = together
        self._key = hashlib.blake2b(key, digest_size=KEY_BYTES, person=b"plan export").digest()
        # Names made under one key still are hashed once more: ids of a trace are no names yet.
        self._namer = Namer(self._key)
        self._first_ms: float | None = None
        self._last_ms = 0.0
        self._chats: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._row_count = 0

    def row(self, call: Call) -> dict[str, Any]:
        """One request, without anything that was written in it."""
        if call.at_ms is not None:
            self._first_ms = call.at_ms if self._first_ms is None else self._first_ms
            self._last_ms = max(0.0, call.at_ms - self._first_ms)
        elif self._first_ms is None:
            self._last_ms = PACE_MS * self._row_count
        self._row_count += 1
        names = self._namer.renamed(array("Q", call.blocks))[self.together - 1 :: self.together]
        row: dict[str, Any] = {
            "timestamp": round(self._last_ms),
            "input_length": call.tokens,
            "output_length": call.output_tokens,
            "hash_ids": [name & MAX_ID for name in names],
        }
        if self._kind == BAILIAN:
            return {**self._chat(call), **row, "timestamp": round(self._last_ms / 1e3, 3)}
        if call.session is not None:
            row["session_id"] = self._session(call)
        return row

    def _chat(self, call: Call) -> dict[str, Any]:
        """A chat goes on from the one before it in its session."""
        parent, turn = -1, 1
        if call.session is not None:
            name = self._session(call)
            before = self._chats.pop(name, None)
            if before is not None:
                parent, turn = before[0], before[1] + 1
            self._chats[name] = (self._row_count, turn)
            if len(self._chats) > MAX_SESSIONS:
                self._chats.popitem(last=False)
        return {
            "chat_id": self._row_count,
            "parent_chat_id": parent,
            "turn": turn,
            "type": "text",
        }

    def _session(self, call: Call) -> str:
        """A sub-agent stays one of its parent's session."""
        root, slash, rest = (call.session or "").partition("/")
        owner = f"{call.tenant or ''}\0{root}"
        return self._hashed(owner) + (slash + self._hashed(f"{owner}\0{rest}") if slash else "")

    def _hashed(self, name: str) -> str:
        raw = name.encode("utf-8", "surrogatepass")
        return hashlib.blake2b(raw, digest_size=_ID_BYTES, key=self._key).hexdigest()


def _write(file: BinaryIO, reader: LogReader, exporter: Exporter) -> tuple[int, int]:
    """Rows as they come; how many they were, and the size of their blocks."""
    encoder = msgspec.json.Encoder()
    count = size = 0
    for call in reader.calls():
        file.write(encoder.encode(exporter.row(call)) + b"\n")
        count, size = count + 1, call.block_tokens * exporter.together
    return count, size


def _read_key(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            raw = file.read(1 << 16)
    except OSError as error:
        raise ConfigError(f"--key-file {path}: {error.strerror or error}") from error
    if len(raw) < KEY_BYTES:
        raise ConfigError(f"--key-file {path} holds {len(raw)} bytes, needed are {KEY_BYTES}")
    return hashlib.blake2b(raw, digest_size=KEY_BYTES).digest()
