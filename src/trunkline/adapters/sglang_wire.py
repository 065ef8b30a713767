"""SGLang's cache events as bytes, for a simulated worker that stands for it.

A batch is msgpack of `[seconds, [event, ...], rank]`. From 0.5.20 on an event is a map with `type`
first and without what is absent; before, an array, with the salt in a map at its end. Names are
signed 64-bit integers; runs that follow each other are one event, and so are removals. Releases up
to 0.5.20 replay without the topic. Read `event_publisher.py` for the sockets, `vllm_events.py` for
who reads it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, assert_never

import msgspec

from trunkline.core.records import Tier
from trunkline.ports.publisher import BlockEvent, BlockRemoved, CacheCleared, RunStored

_MEDIA = {
    Tier.DEVICE: "GPU",
    Tier.HOST: "CPU_PINNED",
    Tier.DISK: "DISK",
    Tier.SHARED: "EXTERNAL",
}
_NAME_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangWire:
    """How one worker writes; its pages may be smaller than the blocks that it is given."""

    block_pages: int = 1
    is_positional: bool = False
    """As 0.5.18 and 0.5.19 write, who do not repeat the topic in a replay either."""

    @property
    def replays_topic(self) -> bool:
        return not self.is_positional

    def encode(self, seconds: float, events: Sequence[BlockEvent], rank: int) -> bytes:
        """One payload."""
        told = _coalesced(self._told(event) for event in events)
        if self.is_positional:
            return msgspec.msgpack.encode([float(seconds), [_as_array(one) for one in told], rank])
        return msgspec.msgpack.encode([float(seconds), [_as_map(one) for one in told], rank])

    def _told(self, event: BlockEvent) -> dict[str, Any]:
        """Every field by name, in the order of the wire."""
        match event:
            case RunStored():
                return {
                    "type": "BlockStored",
                    "block_hashes": [name for block in event.hashes for name in self._names(block)],
                    "parent_block_hash": _name(event.parent) if event.parent else None,
                    "token_ids": event.tokens.tolist(),
                    "block_size": event.block_tokens // self.block_pages,
                    "lora_id": None,
                    "medium": _MEDIA[event.tier],
                    "cache_salt": event.salt,
                }
            case BlockRemoved():
                return {
                    "type": "BlockRemoved",
                    "block_hashes": self._names(event.hash),
                    "medium": _MEDIA[event.tier],
                }
            case CacheCleared():
                return {"type": "AllBlocksCleared"}
            case _:
                assert_never(event)

    def _names(self, block: bytes) -> list[int]:
        """Of a block's pages; the last one has the block's own, which its children chain from."""
        inner = (hashlib.sha256(block + bytes([page])) for page in range(self.block_pages - 1))
        return [*(_name(page.digest()) for page in inner), _name(block)]


def _name(digest: bytes) -> int:
    return int.from_bytes(digest[:_NAME_BYTES], "big", signed=True)


def _coalesced(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs that continue the one before them, and removals in a row, are one event."""
    told: list[dict[str, Any]] = []
    for event in events:
        last = told[-1] if told else None
        if last is None or not _continues(event, last):
            told.append(event)
            continue
        last["block_hashes"] += event["block_hashes"]
        if "token_ids" in event:
            last["token_ids"] += event["token_ids"]
    return told


def _continues(event: dict[str, Any], last: dict[str, Any]) -> bool:
    if event["type"] != last["type"] or event.get("medium") != last.get("medium"):
        return False
    if event["type"] == "BlockStored":
        is_next = event["parent_block_hash"] == last["block_hashes"][-1]
        return is_next and event["cache_salt"] == last["cache_salt"]
    return event["type"] == "BlockRemoved"


def _as_map(event: dict[str, Any]) -> dict[str, Any]:
    kept = dict(event)
    if kept.get("cache_salt") is None:
        kept.pop("cache_salt", None)
    return kept


def _as_array(event: dict[str, Any]) -> list[Any]:
    *fields, salt = event.values() if "cache_salt" in event else (*event.values(), None)
    return fields if salt is None else [*fields, {"cache_salt": salt}]
