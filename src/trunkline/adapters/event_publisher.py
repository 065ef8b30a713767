"""Publishing of cache events over ZeroMQ, in vLLM's wire format or another, with a replay socket.

A batch is three frames: topic, sequence number (8 bytes, big-endian, from 0), and msgpack of
`[seconds, [event, ...], rank]`, each event a map with `type` first. A replay request to the ROUTER
socket is an empty frame and a sequence number; the answer is all batches kept from there on, then
number -1.

Must never: wait for a subscriber; a slow one loses batches and asks for a replay.
"""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, assert_never

import msgspec
import zmq

from trunkline.core.records import Tier
from trunkline.ports.clock import Clock
from trunkline.ports.publisher import BlockEvent, BlockRemoved, CacheCleared, RunStored

TOPIC = "kv-events"
BUFFER_BATCHES = 10_000
SEND_QUEUE_BATCHES = 100_000
_REPLAY_SPARE = 16
_END_MARK = b"\xff" * 8
_MEDIA = {
    Tier.DEVICE: "GPU",
    Tier.HOST: "CPU",
    Tier.DISK: "DISK",
    Tier.SHARED: "EXTERNAL",
}
"""As engines call their tiers."""
_LOW_64_BITS = 8  # bytes: the form in which engines name blocks by default


class Wire(Protocol):
    """How an engine writes its batches."""

    @property
    def replays_topic(self) -> bool:
        """Whether a replayed batch has its topic in front, as a live one has."""
        ...

    def encode(self, seconds: float, events: Sequence[BlockEvent], rank: int) -> bytes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmWire:
    """`is_wide` names blocks by 32 bytes, not by 64 bits."""

    is_wide: bool = False
    replays_topic: bool = True

    def encode(self, seconds: float, events: Sequence[BlockEvent], rank: int) -> bytes:
        return encode_batch(seconds, events, rank, is_wide=self.is_wide)


_VLLM = VllmWire()


class ZmqEventPublisher:
    """PUB and ROUTER sockets on one address."""

    def __init__(
        self,
        clock: Clock,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        rank: int = 0,
        wire: Wire = _VLLM,
        buffer_batches: int = BUFFER_BATCHES,
    ) -> None:
        self._clock = clock
        self._rank = rank
        self._wire = wire
        self._sequence = 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=buffer_batches)
        self._kept_lock = threading.Lock()
        self._context = zmq.Context()
        self._live = self._context.socket(zmq.PUB)
        self._live.set_hwm(SEND_QUEUE_BATCHES)
        self._live.linger = 0
        replay = self._context.socket(zmq.ROUTER)
        replay.linger = 0
        # Room for a whole ring and its end: a ROUTER drops what does not fit, and waits for nobody.
        replay.sndhwm = buffer_batches + _REPLAY_SPARE
        self.endpoint = _bind(self._live, host, port)
        self.replay_endpoint = _bind(replay, host, 0)
        self.topic = TOPIC
        self.buffer_batches = buffer_batches
        self._server = threading.Thread(
            target=self._serve_replays, args=(replay,), name="event-replay", daemon=True
        )
        self._server.start()

    def publish(self, events: Sequence[BlockEvent], *, is_sent: bool = True) -> None:
        payload = self._wire.encode(self._clock.wall(), events, self._rank)
        with self._kept_lock:
            sequence = self._sequence
            self._sequence += 1
            self._kept.append((sequence, payload))
        if is_sent:
            frames = [TOPIC.encode(), sequence.to_bytes(8, "big"), payload]
            # A PUB socket drops at its high-water mark and never blocks.
            self._live.send_multipart(frames, flags=zmq.NOBLOCK)

    def close(self) -> None:
        self._live.close()
        # Ends the poll of the replay thread, which closes its own socket; then `term` returns.
        self._context.term()
        self._server.join()

    def _serve_replays(self, replay: zmq.Socket[bytes]) -> None:
        try:
            while True:
                request = replay.recv_multipart()
                if len(request) == 3 and len(request[2]) == 8:
                    self._replay(replay, request[0], int.from_bytes(request[2], "big"))
        except zmq.ContextTerminated:
            pass  # `close` was called
        finally:
            replay.close()

    def _replay(self, replay: zmq.Socket[bytes], subscriber: bytes, start: int) -> None:
        with self._kept_lock:
            wanted = [kept for kept in self._kept if kept[0] >= start]
        has_topic = self._wire.replays_topic
        topic, no_topic = ([TOPIC.encode()], [b""]) if has_topic else ([], [])
        for sequence, payload in wanted:
            number = sequence.to_bytes(8, "big")
            replay.send_multipart([subscriber, b"", *topic, number, payload])
        replay.send_multipart([subscriber, b"", *no_topic, _END_MARK, b""])


def encode_batch(
    seconds: float, events: Iterable[BlockEvent], rank: int, *, is_wide: bool = False
) -> bytes:
    """One payload. `is_wide`: block names as 32 bytes; else their last 64 bits as an integer."""
    named = [_as_map(event, is_wide=is_wide) for event in events]
    return msgspec.msgpack.encode([float(seconds), named, rank])


def _as_map(event: BlockEvent, *, is_wide: bool) -> dict[str, Any]:
    """Field names in the order of the wire; the last ones are optional there."""
    match event:
        case RunStored():
            return {
                "type": "BlockStored",
                "block_hashes": [_named(name, is_wide) for name in event.hashes],
                "parent_block_hash": _named(event.parent, is_wide) if event.parent else None,
                "token_ids": _ids(event.tokens),
                "block_size": event.block_tokens,
                "lora_id": None,
                "medium": _MEDIA[event.tier],
                "lora_name": None,
                "extra_keys": _extra_keys(event),
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            }
        case BlockRemoved():
            return {
                "type": "BlockRemoved",
                "block_hashes": [_named(event.hash, is_wide)],
                "medium": _MEDIA[event.tier],
                "group_idx": 0,
            }
        case CacheCleared():
            return {"type": "AllBlocksCleared"}
        case _:
            assert_never(event)


def _extra_keys(run: RunStored) -> list[list[str] | None]:
    """The salt takes part in the first block of a prompt, or of a region with another salt; later
    hashes chain from it."""
    keys: list[list[str] | None] = [None] * len(run.hashes)
    if run.salt is not None and (run.parent is None or run.begins_region):
        keys[0] = [run.salt]
    return keys


def _named(name: bytes, is_wide: bool) -> bytes | int:
    return name if is_wide else int.from_bytes(name[-_LOW_64_BITS:], "big")


def _ids(tokens: array[int]) -> list[int]:
    return tokens.tolist()


def _bind(socket: zmq.Socket[bytes], host: str, port: int) -> str:
    address = f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
    if ":" in host:
        socket.ipv6 = True
    if port:
        socket.bind(f"{address}:{port}")
        return f"{address}:{port}"
    return f"{address}:{socket.bind_to_random_port(address)}"
