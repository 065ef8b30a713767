"""Text across the seam of a continued stream: characters and stop texts that lie on both sides.

The engine that goes on knows the tokens in front of it as a prompt: it does not finish a character
that began there, and looks for stop texts in what it says itself. Here both are held together. Must
never let out half a character, or a part of what may still become a stop text. Read
`continuation.py` for who feeds it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from trunkline.ports.tokenizer import Tokenizer

BROKEN = "\ufffd"
"""What a decoder says for bytes that are no character, or not yet."""

_CONTEXT_TOKENS = 6
"""So many tokens in front are decoded along, since spaces depend on what stands before."""
_CHARACTER_TOKENS = 4
"""A character has at most four bytes, and so at most so many tokens."""


class StopWatch:
    """Finds the first stop text in what was shown and what is to follow."""

    def __init__(self, stops: Sequence[str], shown: str, *, is_included: bool) -> None:
        """`shown` is in the client's hands; `is_included`: so is the stop text to be."""
        self._stops: tuple[str, ...] = tuple(stops)
        self._reach = max(map(len, self._stops), default=1) - 1
        self._shown: str = self._last(shown)
        self._held: str = ""
        self._is_included = is_included
        self.found: str = ""
        """The stop text that was met; nothing follows it."""

    def feed(self, text: str, *, is_last: bool = False) -> str:
        """What of `text`, and of what was held back, may go out now."""
        if self.found:
            return ""
        before, whole = len(self._shown), self._shown + self._held + text
        ends = [
            (at + len(stop), index, at)
            for index, stop in enumerate(self._stops)
            if (at := whole.find(stop, max(0, before - len(stop) + 1))) >= 0
        ]
        if ends:  # of those that end together, the engine takes the one that was named first
            end, index, at = min(ends)
            self.found = self._stops[index]
            return whole[before : end if self._is_included else max(at, before)]
        held = 0 if is_last else min(self._begun(whole), len(whole) - before)
        out = whole[before : len(whole) - held]
        self._held = whole[len(whole) - held :]
        self._shown = self._last(self._shown + out)
        return out

    def _begun(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop text begins."""
        for length in range(min(self._reach, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0

    def _last(self, text: str) -> str:
        return text[-self._reach :] if self._reach else ""


class Detokeniser:
    """Token ids -> their text, where they follow others whose text is known."""

    def __init__(self, tokenizer: Tokenizer, said: array[int]) -> None:
        self._tokenizer = tokenizer
        whole, self.text = self._whole(said)
        """Of what was said: all but the character that is not whole yet."""
        self.is_whole = whole == len(said)
        """Whether no character is open."""
        start = max(0, whole - _CONTEXT_TOKENS)
        self._ids = said[start:]
        self._read = whole - start

    def feed(self, ids: array[int]) -> str:
        """The text that these complete."""
        self._ids += ids
        whole, text = self._whole(self._ids)
        if whole <= self._read:
            return ""
        known = self._decode(self._ids[: self._read])
        dropped = max(0, whole - _CONTEXT_TOKENS)
        self._ids = self._ids[dropped:]
        self._read = whole - dropped
        return text[len(known) :]

    def _whole(self, ids: array[int]) -> tuple[int, str]:
        """How many of them end in a whole character, and their text."""
        for back in range(min(_CHARACTER_TOKENS, len(ids) + 1)):
            count = len(ids) - back
            text = self._decode(ids[:count])
            if not text.endswith(BROKEN):
                return count, text
        return len(ids), self._decode(ids)  # no character that begins here: it is not waited for

    def _decode(self, ids: array[int]) -> str:
        return self._tokenizer.decode(ids)


class Voice:
    """What a client is to read of the events of a continuation."""

    def __init__(
        self, *, withheld: str = "", detokeniser: Detokeniser | None, stops: StopWatch | None
    ) -> None:
        """`withheld`: text of tokens that the client was told of, and that it has not seen. With a
        `detokeniser`, the engine's own text is not asked.
        """
        self._withheld = withheld
        self._detokeniser = detokeniser
        self._stops = stops

    @property
    def stopped_by(self) -> str:
        return "" if self._stops is None else self._stops.found

    def says(self, text: str, ids: array[int] | None, *, is_last: bool) -> str:
        """Of one event with this text and these ids, the last before the answer's end or not."""
        if self._detokeniser is not None:
            text = "" if ids is None else self._detokeniser.feed(ids)
        text, self._withheld = self._withheld + text, ""
        return text if self._stops is None else self._stops.feed(text, is_last=is_last)
