"""What the gateway and the simulated worker need of a chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class ChatTemplate(Protocol):
    """Messages -> the text that the engine would tokenise, byte for byte."""

    digest: str
    """Hex digest of the template and the special tokens it may print; part of the namespace."""

    @property
    def takes_parts(self) -> bool:
        """It goes through contents part by part; else it is given one text for each message."""
        ...

    @property
    def wants_system_first(self) -> bool:
        """It takes no system message behind others."""
        ...

    @property
    def effort_without_thinking(self) -> str:
        """The `reasoning_effort` that stands for thinking switched off."""
        ...

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> str:
        """The prompt's text, special tokens written out (so: encode it with
        `add_special_tokens=False`).

        `messages` and `tools` are decoded JSON and stay unchanged. `options` are
        `add_generation_prompt` (True unless given or continuing), `continue_final_message`,
        `calls_as_given` (the fields of calls stay in their order), and further names for the
        template. Raises ValueError that says what the template objects to, without prompt text of
        its own.
        """
        ...
