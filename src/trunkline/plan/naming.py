"""Prompts -> names of their blocks: chained keyed digests, so that no text is kept anywhere.

A name is the first 64 bits of a block key under the namespace of its model (`core/keys.py`).
Without a tokenizer text counts as so many bytes a token. Must never: keep a prompt. Read
`shapes.py` next, which finds the prompt.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec

from trunkline.core.identity import ModelIdentity, Namespace, Scope, ScopeKind, derive_namespace
from trunkline.core.keys import as_tokens, chain
from trunkline.plan.calls import Malformed, Reject

BLOCK_TOKENS = 16
BYTES_PER_TOKEN = 4
MAX_MODELS = 4_096
"""Models that have a namespace of their own; those beyond share the last."""

Tokenise = Callable[[str], Sequence[int]]
_WORDS_A_KEY = 4
_WORD_BYTES = 4


class Namer:
    """Names blocks under one key; two keys give names that cannot be brought together."""

    def __init__(
        self,
        key: bytes,
        *,
        block_tokens: int = BLOCK_TOKENS,
        bytes_per_token: int = BYTES_PER_TOKEN,
        tokenise: Tokenise | None = None,
    ) -> None:
        self._key = key
        self.block_tokens = block_tokens
        self.bytes_per_token = bytes_per_token
        self._tokenise = tokenise
        self._spaces: dict[tuple[str, int], Namespace] = {}

    def prompt(self, body: Mapping[str, Any], model: str) -> tuple[int, array[int]]:
        """Tokens and block names of a request body. Raises Malformed."""
        ids = _token_ids(body.get("prompt"))
        if ids is None:
            text = b"".join(_texts(body))
            if not text:
                raise Malformed(Reject.NO_PROMPT)
            if self._tokenise is None:
                return self._text(text, model)
            ids = as_tokens(self._tokenise(text.decode("utf-8", "replace")))
        if not ids:
            raise Malformed(Reject.NO_PROMPT)
        return len(ids), self._names(ids, model, self.block_tokens)

    def renamed(self, blocks: array[int]) -> array[int]:
        """Names of names: those of a trace that has ids in place of prompts."""
        words = array("I", blocks.tobytes())
        return self._names(words, "", len(words) // len(blocks) if blocks else 2)

    def _text(self, text: bytes, model: str) -> tuple[int, array[int]]:
        size = self.block_tokens * self.bytes_per_token
        full = len(text) // size * size
        words = array("I", text[:full])
        names = self._names(words, model, size // _WORD_BYTES)
        return max(1, len(text) // self.bytes_per_token), names

    def _names(self, words: array[int], model: str, size: int) -> array[int]:
        digests = array("Q", chain(self._space(model, size), words).packed)
        return digests[::_WORDS_A_KEY]

    def _space(self, model: str, size: int) -> Namespace:
        known = self._spaces.get((model, size))
        if known is None:
            if len(self._spaces) >= MAX_MODELS:
                model = "others"
            scope = Scope(kind=ScopeKind.TENANT, org="plan", tenant="all")
            identity = ModelIdentity(model_id=f"model {model}", block_tokens=size)
            known = derive_namespace(self._key, scope, identity)
            if len(self._spaces) <= MAX_MODELS:
                self._spaces[model, size] = known
        return known


def _token_ids(prompt: object) -> array[int] | None:
    """A prompt of token ids, packed; None for one of text."""
    if not isinstance(prompt, list):
        return None
    items = cast("list[object]", prompt)
    if len(items) == 1 and isinstance(items[0], list):
        items = cast("list[object]", items[0])
    if not items or type(items[0]) is not int:
        return None
    try:
        return as_tokens(cast("list[int]", items))
    except (ValueError, TypeError) as error:
        raise Malformed(Reject.BAD_PROMPT) from error


def _texts(body: Mapping[str, Any]) -> Iterator[bytes]:
    """What a prompt is made of, in the order in which templates put it."""
    for name in ("tools", "functions", "instructions", "system"):
        part = body.get(name)
        if part:
            yield msgspec.json.encode(part, order="deterministic")
    for name in ("messages", "prompt", "input"):
        part = body.get(name)
        if isinstance(part, str):
            yield part.encode("utf-8", "surrogatepass")
        elif isinstance(part, list):
            for item in cast("list[Any]", part):
                if isinstance(item, str):
                    yield item.encode("utf-8", "surrogatepass")
                else:
                    yield msgspec.json.encode(item, order="deterministic")
        elif part:
            raise Malformed(Reject.BAD_PROMPT)
        if part:
            return
