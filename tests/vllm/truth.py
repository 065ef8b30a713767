"""What an engine holds by its own events, all of them, read anew: the measure of the gateway's
directory.

Independent of the product's decoder on purpose. The replay ring has every batch since the engine's
start, as long as there were no more than it keeps; copies of a block are counted.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq
from fleet import WAIT_S, Gateway, until
from traffic import ids
from vllm_engines import BLOCK_TOKENS, Engine

WAIT_MS = 60_000
LOOK_S = 0.2
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


# -- against the gateway ---------------------------------------------------------------------------


def rank_of(gateway: Gateway, engine: Engine) -> dict[str, Any]:
    """What the gateway says of the engine's cache."""
    return gateway.workers()[engine.worker]["detail"]["ranks"][0]


def salt_through(gateway: Gateway, engines: Sequence[Engine]) -> str:
    """The salt of everybody's requests, found by a prompt that nobody sent before."""
    prompt = ids(random.Random(time.monotonic_ns()), 2 * BLOCK_TOKENS)
    answer = gateway.complete(prompt, max_tokens=1)
    assert answer.status == 200, answer.response.text
    engine = next(one for one in engines if one.worker == answer.worker)

    def found() -> str | None:
        blocks = held_by(engine).blocks.values()
        run = tuple(prompt[:BLOCK_TOKENS])
        return next((block.salt for block in blocks if block.tokens == run), None)

    return until(found, "the engine tells of the prompt")


def wait_true(gateway: Gateway, engines: Sequence[Engine], salt: str) -> None:
    """Until nothing is in flight, no replay is open, and the gateway knows of each engine as many
    blocks as it holds.
    """
    for engine in engines:
        ends_at = time.monotonic() + WAIT_S
        while True:
            rank, theirs = rank_of(gateway, engine), held_by(engine).under(salt)
            is_at_rest = rank["in_flight"] == 0 and rank["feed_state"] == "live"
            if is_at_rest and rank["held_blocks"] == theirs:
                break
            assert time.monotonic() < ends_at, f"{engine.name} holds {theirs} blocks: {rank}"
            time.sleep(LOOK_S)


def assert_directory_is_true(
    gateway: Gateway, engines: Sequence[Engine], salt: str, prompts: Sequence[Sequence[int]]
) -> int:
    """The gateway knows as many blocks as each engine holds, and of each prompt expects just what
    each engine has of it, and what it reuses; how many tokens were compared.
    """
    compared = 0
    for prompt in prompts:
        wait_true(gateway, engines, salt)
        truth = {e.worker: held_by(e).leading_tokens(prompt, salt) for e in engines}
        answer = gateway.complete(list(prompt), max_tokens=1)
        assert answer.status == 200, answer.response.text
        decision = gateway.admin(f"/decisions/{answer.response.headers['x-request-id']}").json()
        known = {row["worker"]: row["matched_tokens"] for row in decision["candidates"]}
        assert known == truth, f"the gateway expects {known}, the engines hold {truth}"
        assert answer.cached == truth[answer.worker]
        compared += sum(truth.values())
    wait_true(gateway, engines, salt)
    return compared
