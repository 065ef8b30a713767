"""What an engine holds by its own events, all of them, read anew: the measure of the gateway's
directory.

Independent of the product's decoder on purpose. The replay ring has every batch since the engine's
start, as long as there were no more than it keeps; copies of a block are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import zmq
from vllm_engines import Engine

WAIT_MS = 60_000
_END = b"\xff" * 8


@dataclass(slots=True)
class Block:
    """One block by its hash: how many copies lie there, what it follows, and the salt that the
    first block of its chain was stored with.
    """

    parent: int | bytes | None
    tokens: tuple[int, ...]
    salt: str | None
    copies: int = 0


@dataclass(slots=True)
class Held:
    """All that an engine holds."""

    blocks: dict[int | bytes, Block] = field(default_factory=dict[int | bytes, Block])
    batches: int = 0
    removed: int = 0

    def salts(self) -> set[str | None]:
        return {block.salt for block in self.blocks.values()}

    def under(self, salt: str) -> int:
        """How many different blocks."""
        return sum(block.salt == salt for block in self.blocks.values())

    def leading_tokens(self, tokens: Sequence[int], salt: str) -> int:
        """How many of a prompt's tokens a request with this salt would find."""
        children = {
            (block.parent, block.tokens, block.salt): name for name, block in self.blocks.items()
        }
        size = len(next(iter(self.blocks.values())).tokens) if self.blocks else 1
        parent: int | bytes | None = None
        found = 0
        while found + size < len(tokens):  # the last token is always computed
            run = tuple(tokens[found : found + size])
            name = children.get((parent, run, salt))
            if name is None:
                break
            parent, found = name, found + size
        return found


def held_by(engine: Engine) -> Held:
    """Read the whole ring of the engine's replay endpoint."""
    held = Held()
    context = zmq.Context()
    with context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.connect(engine.replay)
        socket.send_multipart([b"", (0).to_bytes(8, "big")])
        while True:
            assert socket.poll(WAIT_MS), f"{engine.name} does not replay"
            *_, seq, payload = socket.recv_multipart()
            if seq == _END:
                return held
            expected = int.from_bytes(seq, "big")
            assert expected == held.batches, "the ring has lost the beginning: use fewer requests"
            held.batches += 1
            for event in msgspec.msgpack.decode(payload)[1]:
                _apply(held, event)


def _apply(held: Held, event: dict[str, object]) -> None:
    match event:
        case {"type": "AllBlocksCleared"}:
            held.blocks.clear()
        case {"type": "BlockRemoved", "block_hashes": list(hashes)}:
            for name in hashes:
                held.removed += 1
                held.blocks[name].copies -= 1
                if not held.blocks[name].copies:
                    del held.blocks[name]
        case {
            "type": "BlockStored",
            "block_hashes": list(hashes),
            "parent_block_hash": parent,
            "token_ids": list(tokens),
            "block_size": int(size),
        }:
            salt = held.blocks[parent].salt if parent is not None else _salt(event)  # type: ignore[index]  # as decoded
            for index, name in enumerate(hashes):
                run = tuple(tokens[index * size : (index + 1) * size])
                block = held.blocks.setdefault(name, Block(parent, run, salt))  # type: ignore[arg-type]  # as decoded
                block.copies += 1
                parent = name
        case _:
            raise AssertionError(f"an event that nobody expected: {event}")


def _salt(event: dict[str, object]) -> str | None:
    """The salt is named with the first block alone."""
    extras = event.get("extra_keys")
    first = extras[0] if isinstance(extras, list) else None
    return str(first[0]) if isinstance(first, list | tuple) and first else None
