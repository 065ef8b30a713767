"""A request's prompt -> token ids, equal to what the worker will compute.

Short prompts are done at once, since a hop to a thread costs more than the work; long ones go to a
small pool, so that the loop that forwards everybody's bytes never waits for one user's book. The
tokenizer gives up the interpreter lock while it works. Read `picker.py` next.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor

from trunkline.gateway.contracts import ChatPrompt, ClientError, Prompt, Refusal
from trunkline.ports.template import ChatTemplate
from trunkline.ports.tokenizer import Tokenizer

INLINE_CHARACTERS = 32_768
"""Longest prompt done on the loop: about 0.2 ms of ordinary text, at most 2 ms of random words."""

THREADS = 2


class PromptTokens:
    """Renders and tokenises prompts, on the loop or off it by length."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, *, max_tokens: int = 1 << 24
    ) -> None:
        """`max_tokens` bounds a prompt, before any work is spent on its keys."""
        self._max_tokens = max_tokens
        self._tokenizer = tokenizer
        self._template = template
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenise")

    def tokens(self, prompt: Prompt) -> array[int] | Awaitable[array[int]]:
        """Token ids (u32). Raises ValueError when the template refuses the messages, ClientError
        beyond `max_tokens`.
        """
        if isinstance(prompt, array):
            return prompt
        if prompt_characters(prompt) <= INLINE_CHARACTERS:
            return self._encode(prompt)
        return asyncio.get_running_loop().run_in_executor(self._pool, self._encode, prompt)

    def close(self) -> None:
        """Waits for nothing: what is being tokenised is thrown away."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _encode(self, prompt: ChatPrompt | str) -> array[int]:
        if isinstance(prompt, str):
            tokens = self._tokenizer.encode(prompt, add_special_tokens=True)
        else:
            text = self._template.render(prompt.messages, prompt.tools, prompt.template_options)
            tokens = self._tokenizer.encode(text, add_special_tokens=False)
        if len(tokens) > self._max_tokens:
            param = "prompt" if isinstance(prompt, str) else "messages"
            raise _too_long(param, len(tokens), self._max_tokens)
        return tokens


def _too_long(param: str, tokens: int, max_tokens: int) -> ClientError:
    text = f"{param} has {tokens} tokens; the context has {max_tokens}"
    return ClientError(Refusal(code="context_length_exceeded", message=text, param=param))


def prompt_characters(prompt: ChatPrompt | str) -> int:
    """About how long the text is, without rendering it: the contents of messages and tools."""
    if isinstance(prompt, str):
        return len(prompt)
    total = 0
    for message in prompt.messages:
        content = message.get("content")
        if isinstance(content, str):
            total += len(content)
        elif isinstance(content, list):
            total += sum(_part_characters(part) for part in content)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]  # decoded JSON
    return total + 200 * len(prompt.tools or ())


def _part_characters(part: object) -> int:
    text = part.get("text") if isinstance(part, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]  # decoded JSON
    return len(text) if isinstance(text, str) else 0
