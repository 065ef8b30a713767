"""Turns the payload of a KV-event message into an `EventBatch` (vLLM and SGLang).

A payload is msgpack `[ts, [event, ...], rank]`; an event is a map with `type` first, or, from older
engines, an array with its type first. Two kinds of fault: what breaks the encoding or its caps
makes the whole batch undecodable; an event that decodes and makes no sense is left out and counted,
so that the removals beside it are not lost. Fields that we do not use are not looked at. The caps
also bound how long one message holds the loop: a hundred times what engines send in one.

Must never: raise anything but `UndecodableBatch` on what a worker sends. Read `zmq_events.py` next.
"""

from __future__ import annotations

import gc
import math
import re
from array import array
from collections.abc import Sequence
from itertools import islice
from typing import Any, cast

import msgspec
import xxhash
from msgspec import msgpack

from trunkline.core.events import (
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    BlocksUnnamed,
    CacheEvent,
    EventBatch,
)
from trunkline.core.records import EngineHash, Tier, WallTime

MAX_PAYLOAD_BYTES = 2 << 20
MAX_EVENTS = 8_192
MAX_BLOCKS = 131_072
"""Block hashes in one batch, over all its events: a whole context in pages of one token."""
MAX_DEPTH = 16
MAX_CONTAINERS = 32_768
"""Lists and maps in one batch inside fields that we do not use, over all its events."""
MAX_BLOCK_TOKENS = 65_536
MAX_SALT_CHARACTERS = 256
"""Ours have 43; of a longer one the beginning is kept, which is no salt of ours either."""
_U64 = (1 << 64) - 1

_TIERS = {
    "GPU": Tier.DEVICE,
    "CPU": Tier.HOST,
    "CPU_PINNED": Tier.HOST,
    "DISK": Tier.DISK,
    "STORAGE": Tier.DISK,
    "EXTERNAL": Tier.SHARED,
}

# The order of the fields in the positional form, after the type.
_POSITIONS: dict[str, tuple[str, ...]] = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
        "kv_cache_spec_sliding_window",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}
_OUR_SALT = re.compile(r"[A-Za-z0-9_-]{43}", re.ASCII)


class UndecodableBatch(Exception):
    """The payload is no batch of events; the message says why, never what was in it."""


class _BadEvent(Exception):
    """One event makes no sense."""


class _Payload(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]
    rank: Any = None  # any type: a rank that is no number is taken as not given


def _refuse_extension(code: int, data: memoryview) -> Any:  # msgspec wants Any here
    raise UndecodableBatch(f"extension type {code}")


_PAYLOAD = msgpack.Decoder(_Payload)
_EVENT: msgpack.Decoder[Any] = msgpack.Decoder(ext_hook=_refuse_extension)


def fingerprint(payload: bytes) -> int:
    """64 bits that tell one payload from another; not secret, not collision-proof."""
    return xxhash.xxh3_64_intdigest(payload)


def decode_batch(seq: int, payload: bytes) -> EventBatch:
    """Decode one message's payload. Raises `UndecodableBatch`."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise UndecodableBatch(f"{len(payload)} bytes, at most {MAX_PAYLOAD_BYTES} are taken")
    # The collector would go through the lists of one hostile message again and again.
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        return _decode(seq, payload)
    except RecursionError as error:
        raise UndecodableBatch(f"nested deeper than {MAX_DEPTH}") from error
    except msgspec.MsgspecError as error:
        raise UndecodableBatch(f"no batch: {error}") from error
    finally:
        if is_collecting:
            gc.enable()


def _decode(seq: int, payload: bytes) -> EventBatch:
    batch = _PAYLOAD.decode(payload)
    if not math.isfinite(batch.ts):
        raise UndecodableBatch("its time is not a number")
    if len(batch.events) > MAX_EVENTS:
        raise UndecodableBatch(f"{len(batch.events)} events, at most {MAX_EVENTS} are taken")
    events: list[CacheEvent] = []
    ignored_count = bad_count = block_count = 0
    containers_left = MAX_CONTAINERS
    for raw in batch.events:
        fields = _event_fields(raw)
        block_count += len(_list(fields.get("block_hashes")) or ())
        if block_count > MAX_BLOCKS:
            raise UndecodableBatch(f"more than {MAX_BLOCKS} block hashes")
        unknown = {name: fields[name] for name in fields.keys() - _KNOWN}
        if unknown:
            containers_left -= _check_shape(unknown, containers_left)
        try:
            decoded = _decode_event(fields)
        except _BadEvent:
            containers_left -= _check_shape(fields, containers_left)
            bad_count += 1
        else:
            ignored_count += not decoded
            events.extend(decoded)
    return EventBatch(
        seq=seq,
        events=tuple(events),
        fingerprint=fingerprint(payload),
        rank=batch.rank if type(batch.rank) is int else None,
        sent_at=WallTime(batch.ts),
        ignored_count=ignored_count,
        bad_count=bad_count,
    )


def _event_fields(raw: msgspec.Raw) -> dict[Any, Any]:
    """An event's fields by name, from either form; `type` is one of them where there is one."""
    value = _EVENT.decode(raw)
    fields = _map(value)
    if fields is not None:
        if len(fields) != _map_count(memoryview(raw)):
            raise UndecodableBatch("a map has one key twice")
        return fields
    items = _list(value)
    if not items or type(items[0]) is not str:
        return {"value": value}
    names = _POSITIONS.get(items[0], ())
    fields = dict(zip(names, items[1:], strict=False))
    fields["type"] = items[0]
    fields["rest"] = items[1 + len(names) :]
    metadata = _map(fields.get("lora_name"))
    if metadata is not None:  # SGLang 0.5.18 and 0.5.19 have a map in this place
        del fields["lora_name"]
        fields["metadata"] = metadata
        fields["cache_salt"] = metadata.get("cache_salt")
    return fields


# A plain check narrows `Any` to a list of unknowns; these two keep what is inside `Any`.
def _list(value: Any) -> list[Any] | None:
    return cast("list[Any]", value) if type(value) is list else None


def _map(value: Any) -> dict[Any, Any] | None:
    return cast("dict[Any, Any]", value) if type(value) is dict else None


def _map_count(data: memoryview) -> int:
    """How many entries a msgpack map's header announces."""
    head = data[0]
    if head <= 0x8F:
        return head & 0x0F
    return int.from_bytes(data[1:3] if head == 0xDE else data[1:5], "big")


def _check_shape(fields: dict[Any, Any], most: int) -> int:
    """Refuse depth and time stamps in what is not looked at otherwise, and more than `most`
    containers; how many there are. Costs a C pass a container.
    """
    level: list[Any] = [fields]
    container_count = 0
    for _ in range(MAX_DEPTH - 2):  # the batch and its list of events are the first two
        deeper: list[Any] = []
        container_count += len(level)
        if container_count > most:
            raise UndecodableBatch(f"more than {MAX_CONTAINERS} lists and maps")
        for value in level:
            entries = _map(value)
            items: Sequence[Any] = value
            if entries is not None:
                items = [*entries.keys(), *entries.values()]
            kinds = set(map(type, items))
            if not kinds <= _PLAIN:
                raise UndecodableBatch("extension type -1")
            if kinds & _CONTAINERS:
                found = (item for item in items if type(item) in _CONTAINERS)
                deeper.extend(islice(found, most + 1))
        if not deeper:
            return container_count
        level = deeper
    raise UndecodableBatch(f"nested deeper than {MAX_DEPTH}")


_CONTAINERS: set[type] = {list, dict, tuple}
_PLAIN: set[type] = {type(None), bool, int, float, str, bytes} | _CONTAINERS
_KNOWN = {"type", *(name for names in _POSITIONS.values() for name in names)}


def _decode_event(fields: dict[Any, Any]) -> tuple[CacheEvent, ...]:
    """The events that one wire event means; none when it is left out by rule."""
    match fields.get("type"):
        case "BlockStored":
            return _stored(fields) if _is_full_attention(fields) else ()
        case "BlockRemoved":
            if not _is_full_attention(fields):
                return ()
            hashes = _hashes(fields.get("block_hashes"))
            return (BlocksRemoved(hashes=hashes, tier=_tier(fields.get("medium"))),)
        case "AllBlocksCleared":
            return (AllBlocksCleared(),)
        case str():
            return ()
        case _:
            raise _BadEvent


def _is_full_attention(fields: dict[Any, Any]) -> bool:
    """Whether the blocks belong to the group whose blocks make a prefix usable."""
    group, kind = fields.get("group_idx"), fields.get("kv_cache_spec_kind")
    return group in (None, 0) and kind in (None, "full_attention")


def _stored(fields: dict[Any, Any]) -> tuple[CacheEvent, ...]:
    hashes = _hashes(fields.get("block_hashes"))
    tokens, size = _tokens(fields.get("token_ids")), fields.get("block_size")
    if not tokens:
        return ()  # an offload tier names blocks without their tokens: of no use to us
    if type(size) is not int or not 1 <= size <= MAX_BLOCK_TOKENS:
        raise _BadEvent
    if len(tokens) != len(hashes) * size:
        raise _BadEvent
    parent = fields.get("parent_block_hash")
    adapter = _adapter(fields)
    salt, named_count = _extras(fields.get("extra_keys"), adapter, len(hashes))
    if salt is None and type(fields.get("cache_salt")) is str:
        salt = fields["cache_salt"]  # SGLang's field, told with every run
    stored = BlocksStored(
        hashes=hashes[:named_count],
        parent=None if parent is None else EngineHash(_folded(parent)),
        tokens=tokens[: named_count * size],
        block_tokens=size,
        tier=_tier(fields.get("medium")),
        salt=None if salt is None else salt[:MAX_SALT_CHARACTERS],
        adapter=adapter,
    )
    if named_count == len(hashes):
        return (stored,)
    unnamed = BlocksUnnamed(hashes=hashes[named_count:])
    return (stored, unnamed) if named_count else (unnamed,)


def _adapter(fields: dict[Any, Any]) -> str | None:
    """The adapter that the blocks were computed with; older engines give a number alone."""
    name, number = fields.get("lora_name"), fields.get("lora_id")
    if name is None:
        return None if number is None else "unnamed"
    return name if type(name) is str else "unnamed"


def _extras(value: Any, adapter: str | None, block_count: int) -> tuple[str | None, int]:
    """The salt, and how many leading blocks tokens, salt and adapter name completely.

    The rest holds media or prompt embeddings, whose content is in the engine's hash but not in the
    tokens.
    """
    if value is None:
        return None, block_count
    per_block = _list(value)
    if per_block is None:
        raise _BadEvent
    salt = None
    for index, block in enumerate(per_block[:block_count]):
        if not block:
            continue
        extras = _list(block)
        if extras is None:
            raise _BadEvent
        block_salt, is_named = _block_extras(extras, adapter)
        if index == 0:
            salt = block_salt
        elif block_salt is not None:
            is_named = False
        if not is_named:
            return salt, index
    return salt, block_count


def _block_extras(extras: Sequence[Any], adapter: str | None) -> tuple[str | None, bool]:
    """One block's salt, and whether salt and adapter are all its extras."""
    if extras[0] in ("cache_salt", "lora") and len(extras) in (2, 3):
        extras = [list(extras)]  # one tagged extra, not wrapped in a list of its own
    salts: list[str] = []
    is_named = True
    for item in extras:
        extra, tagged = item, _list(item)
        if tagged and tagged[0] == "lora":
            continue
        if tagged and len(tagged) == 2 and tagged[0] == "cache_salt":
            extra = tagged[1]
        if type(extra) is not str:
            is_named = False
        elif extra != adapter:
            salts.append(extra)
    ours = [salt for salt in salts if _OUR_SALT.fullmatch(salt)]
    salt = (ours or salts or [None])[0]
    return salt, is_named and len(salts) <= 1


def _hashes(value: Any) -> array[int]:
    """Block hashes folded to 64 bits. Raises `_BadEvent` for none, or for what is no hash."""
    hashes = _list(value)
    if not hashes:
        raise _BadEvent
    if set(map(type, hashes)) == {int} and min(hashes) >= 0:
        return array("Q", hashes)
    return array("Q", map(_folded, hashes))


def _folded(value: Any) -> int:
    """An engine's hash as u64: vLLM's integers are the low 64 bits of the digest, SGLang's are
    signed.
    """
    if type(value) is int:
        return value & _U64
    if type(value) is bytes and 8 <= len(value) <= 64:
        return int.from_bytes(value[-8:], "big")
    raise _BadEvent


def _tokens(value: Any) -> array[int]:
    tokens = _list(value)
    if tokens and type(tokens[0]) is list:
        tokens = [_first_of_pair(pair) for pair in tokens]
    if tokens is None or not set(map(type, tokens)) <= {int}:
        raise _BadEvent
    try:
        return array("I", tokens)
    except OverflowError as error:
        raise _BadEvent from error


def _first_of_pair(value: Any) -> Any:
    """SGLang names a block by pairs of neighbours where it drafts tokens (EAGLE): the first of each
    are the block's own, the last pair's second begins the next block.
    """
    pair = _list(value)
    if pair is None or len(pair) != 2 or type(pair[1]) is not int:
        raise _BadEvent
    return pair[0]


def _tier(medium: Any) -> Tier:
    """No medium means the device (older engines); one that we do not know counts as the slowest."""
    if medium is None:
        return Tier.DEVICE
    return _TIERS.get(medium, Tier.SHARED) if type(medium) is str else Tier.SHARED
