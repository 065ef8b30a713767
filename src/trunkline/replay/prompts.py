"""Requests of a trace -> prompt token ids, and the one right answer of the simulated model.

A block id names its block in the context of all blocks before it, so tokens are a function of the
id: equal prefixes of ids become equal prefixes of tokens. Generated workloads name parts instead,
and their prompts hold the workers' real answers. Owns the token range of prompts. Must never keep
more than its bounded caches. Read `client.py` next.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

from trunkline.core import simkv
from trunkline.errors import TraceError
from trunkline.replay.traces import PartKind, PromptPart, TraceRequest

CACHED_BLOCKS = 4_096
CACHED_STATES = 65_536
CACHED_ANSWERS = 8_192
_U32_BYTES = 4

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """Which tokens prompts are made of."""

    vocab_size: int = 4_096
    first_id: int = 512
    """Lower ids are left to special tokens and bytes. The last quarter is left to answers."""
    tokens_per_block: int | None = None
    """Send each block id as this many tokens, to make a trace lighter; None sends what it stands
    for.
    """
    max_output_tokens: int | None = None
    seed: int = 0
    """Prompts of different seeds share nothing."""


class _Recent(Generic[KeyT, ValueT]):
    """A dict of bounded size; the entry not used for longest goes first."""

    def __init__(self, most: int) -> None:
        assert most > 0
        self._most = most
        self._entries: OrderedDict[KeyT, ValueT] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: KeyT) -> ValueT | None:
        value = self._entries.get(key)
        if value is not None:
            self._entries.move_to_end(key)
        return value

    def put(self, key: KeyT, value: ValueT) -> None:
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) > self._most:
            self._entries.popitem(last=False)


class PromptMaker:
    """Makes prompts and the answers expected to them. Deterministic in the options."""

    def __init__(self, options: PromptOptions | None = None) -> None:
        self.options = options or PromptOptions()
        low, high = self.options.first_id, simkv.answer_first_id(self.options.vocab_size)
        if not 0 <= low < high:
            raise ValueError(f"first_id {low} leaves no ids below {high} for prompts")
        # A power of two turns 'modulo' into one AND over the whole block.
        self._mask = (1 << ((high - low).bit_length() - 1)) - 1
        self._low = low
        self._blocks: _Recent[tuple[str, int], bytes] = _Recent(CACHED_BLOCKS)
        self._states: _Recent[int, bytes] = _Recent(CACHED_STATES)
        self._answers: _Recent[int, array[int]] = _Recent(CACHED_ANSWERS)

    def prompt(self, request: TraceRequest) -> array[int]:
        """The prompt's token ids. Raises TraceError for a request that carries a body instead of
        ids.
        """
        if request.parts is not None:
            return self._of_parts(request.parts)
        if request.block_ids is None:
            raise TraceError("a request with a body has no block ids to make a prompt from")
        return self._of_blocks(request, request.block_ids)

    def output_tokens(self, request: TraceRequest) -> int:
        """Answer tokens to ask for: at least 1, at most what the options allow."""
        most = self.options.max_output_tokens
        return max(1, request.output_tokens if most is None else min(request.output_tokens, most))

    def answer(self, request: TraceRequest, prompt: array[int], count: int) -> array[int]:
        """What the simulated model answers to `prompt`, which `prompt(request)` made."""
        ids, block_tokens = request.block_ids, self._block_tokens(request)
        if ids is None or block_tokens == 0 or block_tokens % simkv.CELL_TOKENS:
            return simkv.answer_tokens(prompt, count, self.options.vocab_size)
        full = min(len(ids), len(prompt) // block_tokens)
        known, state = self._deepest_state(ids[:full])
        states = simkv.prefix_digests(prompt[known * block_tokens :], state)
        cells = block_tokens // simkv.CELL_TOKENS
        for index in range(known, full):
            self._states.put(ids[index], states[(index - known + 1) * cells - 1])
        read = known * block_tokens + len(states) * simkv.CELL_TOKENS
        final = states[-1] if states else state
        return simkv.answer_from(final, prompt[read:], count, self.options.vocab_size)

    def _deepest_state(self, ids: tuple[int, ...]) -> tuple[int, bytes]:
        """`(blocks, state after them)`: the longest prefix of ids whose state is still cached."""
        for count in range(len(ids), 0, -1):
            state = self._states.get(ids[count - 1])
            if state is not None:
                return count, state
        return 0, simkv.ROOT

    def _block_tokens(self, request: TraceRequest) -> int:
        if request.parts is not None:
            return request.block_tokens
        return self.options.tokens_per_block or request.block_tokens

    def _of_blocks(self, request: TraceRequest, ids: tuple[int, ...]) -> array[int]:
        size = self._block_tokens(request)
        full, rest = divmod(request.input_tokens, request.block_tokens)
        if size != request.block_tokens and rest:
            rest = max(1, rest * size // request.block_tokens)
        parts = [self._run(("block", block_id), size) for block_id in ids[:full]]
        if rest:
            # A trace may name full blocks only; then nothing else has this last one.
            is_named = len(ids) > full
            name = ids[full] if is_named else (ids[-1] if ids else 0)
            parts.append(
                self._run(("block" if is_named else f"tail {request.session}", name), rest)
            )
        return _tokens(b"".join(parts))

    def _of_parts(self, parts: tuple[PromptPart, ...]) -> array[int]:
        tokens: array[int] = array("I")
        for part in parts:
            if part.kind is not PartKind.ANSWER:
                tokens.extend(_tokens(self._run((part.kind.value, part.key), part.tokens)))
                continue
            answer = self._answers.get(part.key)
            if answer is None:
                answer = simkv.answer_tokens(tokens, part.tokens, self.options.vocab_size)
                self._answers.put(part.key, answer)
            tokens.extend(answer)
        return tokens

    def _run(self, name: tuple[str, int], count: int) -> bytes:
        """`count` tokens, packed; a shorter run of a name is the beginning of a longer one."""
        packed = self._blocks.get(name)
        if packed is None or len(packed) < count * _U32_BYTES:
            packed = self._expanded(name, count)
            self._blocks.put(name, packed)
        return packed[: count * _U32_BYTES]

    def _expanded(self, name: tuple[str, int], count: int) -> bytes:
        label = f"trunkline prompt\0{self.options.seed}\0{name[0]}\0{name[1]}".encode()
        width = count * _U32_BYTES
        noise = int.from_bytes(hashlib.shake_128(label).digest(width), "little")
        mask = int.from_bytes(self._mask.to_bytes(_U32_BYTES, "little") * count, "little")
        base = int.from_bytes(self._low.to_bytes(_U32_BYTES, "little") * count, "little")
        return ((noise & mask) + base).to_bytes(width, "little")


def _tokens(packed: bytes) -> array[int]:
    """Little-endian u32 -> ids, on any machine."""
    tokens: array[int] = array("I")
    tokens.frombytes(packed)
    if sys.byteorder != "little":
        tokens.byteswap()
    return tokens
