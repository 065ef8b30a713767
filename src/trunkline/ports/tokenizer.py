"""What the gateway and the simulated worker need of a tokenizer."""

from __future__ import annotations

from array import array
from typing import Protocol


class Tokenizer(Protocol):
    """Text <-> token ids, equal to the engine's own."""

    digest: str
    """Hex digest of the tokenizer's definition; part of the namespace."""

    vocab_size: int

    def encode(self, text: str, *, add_special_tokens: bool) -> array[int]:
        """Token ids (u32). Special tokens written in the text count as such, as in the engine.

        Releases the interpreter lock while it works. Raises ValueError for lone surrogates.
        """
        ...

    def decode(self, token_ids: array[int]) -> str:
        """The text of some ids, special tokens left out; incomplete characters become U+FFFD."""
        ...
