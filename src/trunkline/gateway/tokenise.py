"""A request's prompt -> token ids, equal to what the worker will compute.

Where no tokenizer of the model is known, a text counts as runs of its bytes instead: equal
beginnings still have equal keys, so our own routing can be learned from, but no worker's events
mean the same. Token ids that a client gives stay what they are.

Short prompts are done at once, since a hop to a thread costs more than the work; long ones go to a
few threads, so that the loop that forwards everybody's bytes never waits for one user's book. The
tokenizer gives up the interpreter lock while it works. Read `picker.py` next.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from trunkline.core.anthropic import fitted
from trunkline.gateway.contracts import ChatPrompt, ClientError, InferenceRequest, Prompt, Refusal
from trunkline.gateway.lane import Lane
from trunkline.gateway.media import digested, marked, pieces_of, stand_in
from trunkline.ports.template import ChatTemplate
from trunkline.ports.tokenizer import Tokenizer

INLINE_BYTES = 32_768
"""Longest body done on the loop: about 0.2 ms of ordinary text, at most 2 ms of random words. The
body bounds whatever a template may print of it: contents, tools, arguments."""

INLINE_MESSAGES = 128
"""Most messages rendered on the loop: some 7 us each."""

THREADS = 2

TEXT_MARK = 0xFFFF_FFFF
"""Begins what stands for a text, so that none is taken for token ids: no vocabulary has it."""
_OF_TEXT = [TEXT_MARK]
_RUN_BYTES = 4
"""Of ordinary text, a token has about so many; a run counts as one."""


class PromptTokens:
    """Renders and tokenises prompts, on the loop or off it by size."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, *, max_tokens: int = 1 << 24
    ) -> None:
        """`max_tokens` bounds a prompt, before any work is spent on its keys."""
        self._max_tokens = max_tokens
        self._tokenizer = tokenizer
        self._template = template
        self._lane = Lane(THREADS, "tokenise")
        self.is_text = False
        """Texts count as runs of their bytes: no tokenizer of the model is known."""
        self.is_exact = True
        """Keys are those of the blocks that workers compute."""

    @property
    def tokenizer_digest(self) -> str:
        return "text" if self.is_text else self._tokenizer.digest

    @property
    def template_digest(self) -> str:
        return "" if self.is_text else self._template.digest

    @property
    def vocab_size(self) -> int:
        """Token ids below this exist, as far as is known."""
        return TEXT_MARK if self.is_text else self._tokenizer.vocab_size

    @property
    def exact_tokenizer(self) -> Tokenizer | None:
        """The model's; None while prompts are read otherwise than by workers."""
        return self._tokenizer if self.is_exact and not self.is_text else None

    def read_text(self) -> None:
        """From here on the tokenizer is not the model's."""
        self.is_text, self.is_exact = True, False

    def is_exact_for(self, request: InferenceRequest) -> bool:
        """Whether all its keys are those of the blocks that workers compute."""
        return self.is_exact and not request.approximate

    def is_guess(self, request: InferenceRequest) -> bool:
        """Whether its tokens, once it is read, are not quite those that a worker will compute."""
        prompt = request.prompt
        is_of_text = self.is_text and isinstance(prompt, array) and prompt[:1].tolist() == _OF_TEXT
        return is_of_text or bool(request.approximate)

    def tokens(self, request: InferenceRequest) -> array[int] | None:
        """Token ids (u32) of its prompt; None where that takes long: then await `tokens_later`.

        Raises ValueError when the template refuses the messages, ClientError beyond `max_tokens`.
        """
        prompt = request.prompt
        assert prompt is not None, "nothing to tokenise"
        if isinstance(prompt, array):
            return prompt
        if len(request.body) > INLINE_BYTES:
            return None
        if isinstance(prompt, ChatPrompt) and len(prompt.messages) > INLINE_MESSAGES:
            return None
        return self._encode(prompt, request.adds_special_tokens)

    async def tokens_later(self, request: InferenceRequest) -> array[int]:
        """As `tokens`, off the loop. Cancelled while it waits for a thread, it costs nothing."""
        prompt = request.prompt
        assert prompt is not None, "nothing to tokenise"
        assert not isinstance(prompt, array), "token ids are no text"
        return await self._lane.run(partial(self._encode, prompt, request.adds_special_tokens))

    def close(self) -> None:
        self._lane.close()

    def _encode(self, prompt: ChatPrompt | str, adds_special_tokens: bool | None) -> array[int]:
        if self.is_text or (isinstance(prompt, ChatPrompt) and prompt.unknown):
            return _runs(prompt)  # how many tokens it really has, the worker will say
        if isinstance(prompt, ChatPrompt) and prompt.has_media:
            return self._encode_media(prompt, adds_special_tokens or False)
        text = prompt if isinstance(prompt, str) else self._render(prompt, prompt.messages)
        is_default = isinstance(prompt, str)
        adds = is_default if adds_special_tokens is None else adds_special_tokens
        tokens = self._tokenizer.encode(text, add_special_tokens=adds)
        if len(tokens) > self._max_tokens:
            raise too_long(prompt, len(tokens), self._max_tokens)
        return tokens

    def _render(self, prompt: ChatPrompt, messages: Sequence[Mapping[str, Any]]) -> str:
        options = prompt.template_options
        if prompt.is_anthropic:
            own = [dict(one) for one in messages]
            messages, options = fitted(own, options, self._template, prompt.thinks_not)
        return self._template.render(messages, prompt.tools, options)

    def _encode_media(self, prompt: ChatPrompt, adds: bool) -> array[int]:
        """Exact up to the first of its media, where a worker's own tokens are not known."""
        messages, digests = marked(prompt.messages, takes_parts=self._template.takes_parts)
        pieces = pieces_of(self._render(prompt, messages), digests)
        if pieces is None:
            return _runs(prompt)
        tokens = self._tokenizer.encode(pieces[0], add_special_tokens=adds)
        for digest, text in zip(digests, pieces[1:], strict=True):
            tokens += stand_in(digest)
            tokens += self._tokenizer.encode(text, add_special_tokens=False)
        return tokens


def _runs(prompt: ChatPrompt | str) -> array[int]:
    """A text as runs of its bytes. A conversation that goes on begins with what it was before."""
    if isinstance(prompt, str):
        written = prompt.encode("utf-8", "surrogatepass")
    else:
        encode = partial(msgspec.json.encode, order="sorted")
        lines = [[prompt.tools, prompt.template_options], *digested(prompt.messages)]
        written = b"\n".join(map(encode, lines))
    runs = array("I", [TEXT_MARK])
    runs.frombytes(written[: len(written) // _RUN_BYTES * _RUN_BYTES])
    return runs


def too_long(prompt: Prompt | None, tokens: int, max_tokens: int) -> ClientError:
    """What a client is told whose prompt has more tokens than can be taken."""
    param = "messages" if isinstance(prompt, ChatPrompt) else "prompt"
    text = f"{param} has {tokens} tokens; the context has {max_tokens}"
    return ClientError(Refusal(code="context_length_exceeded", message=text, param=param))
