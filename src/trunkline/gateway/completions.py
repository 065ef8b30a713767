"""The prompt of a completion: a text, token ids, or a batch of either.

A batch is served by one worker, routed by its first prompt and priced by all. Must never take an id
that the model's vocabulary does not have. Read `intake.py` for who asks.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

from trunkline.gateway.contracts import Prompt
from trunkline.gateway.fields import bad_value
from trunkline.gateway.strict_json import is_list
from trunkline.gateway.weighing import text_tokens

MAX_BATCH = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptShape:
    """How prompts may be. Token ids are below `vocab_size`."""

    vocab_size: int
    max_model_len: int

    def first_of(self, value: Any) -> tuple[Prompt, int]:  # any decoded JSON value
        """A text, token ids, or the first of a batch of either; and about how many tokens the rest
        of the batch has.
        """
        if type(value) is str:
            if not value:
                raise bad_value("prompt", "is empty")
            return value, 0
        if not is_list(value):
            raise bad_value("prompt", "must be a string, token ids, or a list of either")
        items = value
        if not items:
            raise bad_value("prompt", "is empty")
        first = items[0]
        is_text = type(first) is str
        if not is_text and not is_list(first):
            return self._token_ids(items, "prompt"), 0
        if len(items) > MAX_BATCH:
            raise bad_value("prompt", f"has {len(items)} prompts; the limit is {MAX_BATCH}")
        for index, item in enumerate(items):
            if not (type(item) is str if is_text else is_list(item)):
                raise bad_value("prompt", f"mixes kinds: item {index} differs from the first")
            if not item:
                raise bad_value("prompt", f"has an empty prompt at index {index}")
        if type(first) is str:
            return first, sum(text_tokens(item) for item in items[1:])
        batch = [self._token_ids(ids, f"prompt[{index}]") for index, ids in enumerate(items)]
        return batch[0], sum(map(len, batch[1:]))

    def _token_ids(self, items: list[Any], name: str) -> array[int]:
        assert 0 < self.vocab_size <= 1 << 32, "token ids are u32"
        if len(items) > self.max_model_len:
            text = f"has {len(items)} token ids; the context has {self.max_model_len}"
            raise bad_value("prompt", text, "context_length_exceeded")
        if set(map(type, items)) == {int}:
            try:
                if max(items) < self.vocab_size:
                    return array("I", items)
            except OverflowError:
                pass  # the loop below names the item
        for index, item in enumerate(items):
            if type(item) is not int or not 0 <= item < 1 << 32:
                raise bad_value("prompt", f"{name}[{index}] is not a token id")
            if item >= self.vocab_size:
                text = f"{name}[{index}] is not in the vocabulary of {self.vocab_size} tokens"
                raise bad_value("prompt", text)
        raise AssertionError("an id in range did not fit")
