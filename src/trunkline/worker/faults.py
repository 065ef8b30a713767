"""Ways in which a simulated worker misbehaves on purpose, for tests.

Owns the parsing and the damage done to events; `api.py`, `app.py`, `engine.py` and `lending.py` ask
it about the rest. One that ignores the salt cannot be made safe from outside: it is there to be
found out by the gateway's self-test.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from trunkline.ports.publisher import BlockEvent, BlockRemoved, EventPublisher, RunStored
from trunkline.ports.tokenizer import Tokenizer

FAULT_KINDS = (
    "slow:FACTOR",
    "hang",
    "die-after:TOKENS",
    "http-503",
    "wrong-events",
    "late-events:MS",
    "drop-events:RATE",
    "no-events",
    "pull-flip",
    "pull-stall",
    "ignore-salt",
    "no-prefix-cache",
    "no-usage-details",
    "other-tokens",
    "told-block-size:TOKENS",
    "other-hashes",
    "keep-alive:MS",
    "clock-off:SECONDS",
    "told-version:RELEASE",
    "no-replay",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What is wrong with a worker; the default is nothing."""

    slow_factor: float = 1.0
    is_hanging: bool = False
    """Inference requests are accepted and never answered."""
    die_after_tokens: int = 0
    """The process kills itself instead of giving one token more; 0 means never."""
    is_unavailable: bool = False
    """Inference requests are answered 503."""
    has_wrong_events: bool = False
    """Events name other tokens than those computed."""
    late_events_ms: float = 0.0
    drop_events_rate: float = 0.0
    has_no_events: bool = False
    is_pull_flipping: bool = False
    """Of the blocks that others pull, the last is damaged on its way."""
    is_pull_stalling: bool = False
    """Whoever pulls hears nothing until it gives up."""
    is_ignoring_salt: bool = False
    """All share one cache, as behind a connector that names blocks by their tokens alone."""
    has_no_prefix_cache: bool = False
    """Nothing is ever reused."""
    has_no_usage_details: bool = False
    """Answers do not tell how much was reused."""
    has_other_tokens: bool = False
    """Its tokenizer puts one token more in front of each text."""
    told_block_tokens: int = 0
    """Its metrics tell this block size; 0 for the right one."""
    has_other_hashes: bool = False
    """Events call blocks otherwise than other workers' do."""
    keep_alive_ms: float | None = None
    """Idle connections are closed after this; None as the engine does."""
    clock_off_s: float = 0.0
    """Its clock, as answers tell it, is so far before the true one, from its start on."""
    told_version: str = ""
    """Its release; empty for the true one."""
    has_no_replay: bool = False
    """It announces no way to have events again."""


def parse_faults(words: Sequence[str]) -> Faults:
    """From `--fault` values. Raises ValueError that names the bad one and lists the kinds."""
    faults = Faults()
    for word in words:
        kind, _, argument = word.partition(":")
        try:
            faults = dataclasses.replace(faults, **_setting(kind, argument))
        except ValueError as error:
            known = ", ".join(FAULT_KINDS)
            raise ValueError(f"fault {word!r} is not one of {known}") from error
    return faults


def _setting(kind: str, argument: str) -> dict[str, bool | float | int | str]:
    match kind:
        case "slow":
            return {"slow_factor": _number(argument, 0.01, 10_000)}
        case "die-after":
            return {"die_after_tokens": int(_number(argument, 1, 1e12))}
        case "late-events":
            return {"late_events_ms": _number(argument, 0, 3_600_000)}
        case "told-block-size":
            return {"told_block_tokens": int(_number(argument, 1, 65_536))}
        case "keep-alive":
            return {"keep_alive_ms": _number(argument, 1, 600_000)}
        case "clock-off":
            return {"clock_off_s": _number(argument, -1e9, 1e9)}
        case "told-version":
            return {"told_version": argument[:64]}
        case "drop-events":
            return {"drop_events_rate": _number(argument, 0, 1)}
        case _:
            flags = {
                "hang": "is_hanging",
                "http-503": "is_unavailable",
                "wrong-events": "has_wrong_events",
                "no-events": "has_no_events",
                "pull-flip": "is_pull_flipping",
                "pull-stall": "is_pull_stalling",
                "ignore-salt": "is_ignoring_salt",
                "no-prefix-cache": "has_no_prefix_cache",
                "no-usage-details": "has_no_usage_details",
                "other-tokens": "has_other_tokens",
                "other-hashes": "has_other_hashes",
                "no-replay": "has_no_replay",
            }
            if argument or kind not in flags:
                raise ValueError(kind)
            return {flags[kind]: True}


def _number(text: str, low: float, high: float) -> float:
    value = float(text)
    if not low <= value <= high:
        raise ValueError(text)
    return value


class FaultyFeed:
    """Publishes batches as the faults have it; without faults, as they are."""

    def __init__(
        self, publisher: EventPublisher | None, faults: Faults, rng: random.Random
    ) -> None:
        self._publisher = publisher
        self._faults = faults
        self._rng = rng

    def publish(self, events: Sequence[BlockEvent]) -> None:
        if self._publisher is None or self._faults.has_no_events or not events:
            return
        if self._faults.has_wrong_events:
            events = [_with_other_tokens(event) for event in events]
        if self._faults.has_other_hashes:
            events = [_with_other_hashes(event) for event in events]
        is_sent = self._rng.random() >= self._faults.drop_events_rate
        if self._faults.late_events_ms:
            # Timers of one delay fire in the order in which they were set.
            loop = asyncio.get_running_loop()
            loop.call_later(self._faults.late_events_ms / 1e3, self._send, events, is_sent)
        else:
            self._send(events, is_sent)

    def _send(self, events: Sequence[BlockEvent], is_sent: bool) -> None:
        assert self._publisher is not None
        self._publisher.publish(events, is_sent=is_sent)


def _with_other_tokens(event: BlockEvent) -> BlockEvent:
    if not isinstance(event, RunStored):
        return event
    tokens = event.tokens[:]
    for index, token in enumerate(tokens):
        tokens[index] = token ^ 1
    return dataclasses.replace(event, tokens=tokens)


def _with_other_hashes(event: BlockEvent) -> BlockEvent:
    match event:
        case RunStored():
            parent = None if event.parent is None else _other(event.parent)
            hashes = tuple(_other(name) for name in event.hashes)
            return dataclasses.replace(event, hashes=hashes, parent=parent)
        case BlockRemoved():
            return dataclasses.replace(event, hash=_other(event.hash))
        case _:
            return event


def _other(name: bytes) -> bytes:
    return hashlib.sha256(b"another seed" + name).digest()


class OneMore:
    """A tokenizer that puts one token more in front of what another one makes of a text."""

    def __init__(self, plain: Tokenizer) -> None:
        self._plain = plain
        self.digest = plain.digest
        self.vocab_size = plain.vocab_size

    def encode(self, text: str, *, add_special_tokens: bool) -> array[int]:
        made = self._plain.encode(text, add_special_tokens=add_special_tokens)
        return made[:1] + made

    def decode(self, token_ids: array[int]) -> str:
        return self._plain.decode(token_ids)
