"""How a stream that broke goes on: what is asked of another worker, or why nothing is.

The next worker is given token ids: those of the prompt and those that were generated, as the stream
told them where its client asked for `return_token_ids`, else as the model's tokenizer makes them of
the delivered text. Greedy answers go on as they would have; sampled ones go on from the same
distribution, under a seed of their own. An answer of which nothing was delivered yet is asked for
again as it was.

Not continued, since nobody could tell that what follows is what would have followed: several
choices, log probabilities, constrained output, tools and reasoning (their parsers are inside the
engine that died), penalties that count what was generated, and texts that do not lead back to their
tokens. Must never: ask under another namespace than the first worker was asked under. Read
`journal.py` for what is known, `continuation.py` for what is done with the answer.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from trunkline.gateway.contracts import InferenceRequest, Route
from trunkline.gateway.journal import LOGPROBS, PARSED, Delivered
from trunkline.gateway.seam import BROKEN, Detokeniser, StopWatch, Voice
from trunkline.gateway.strict_json import is_object
from trunkline.ports.tokenizer import Tokenizer

COMPLETIONS = "/v1/completions"
_COMPLETION_TOKENS = 16
"""What engines take `max_tokens` of a completion for where it is left out."""

_KEPT = (
    "model", "user", "temperature", "top_p", "min_p", "top_k", "repetition_penalty", "stop",
    "stop_token_ids", "logit_bias", "ignore_eos", "include_stop_str_in_output",
    "allowed_token_ids",
)  # fmt: skip
"""Goes on as the client said it: fields that both endpoints have, and that mean the same in the
middle of an answer as at its beginning.
"""

_OPPOSED: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "echo": (False,), "suffix": ("",), "logprobs": (False,),
    "top_logprobs": (0,), "prompt_logprobs": (), "structured_outputs": (), "guided_json": (),
    "guided_regex": (), "guided_choice": (), "guided_grammar": (), "frequency_penalty": (0,),
    "presence_penalty": (0,), "length_penalty": (1,), "bad_words": ([],),
    "skip_special_tokens": (True,), "spaces_between_special_tokens": (True,),
    "reasoning_effort": (), "include_reasoning": (False,),
}  # fmt: skip
"""What stands against a continuation, but for these values and null."""


_HARMLESS_AT_END = frozenset({"", PARSED, LOGPROBS})
_NO_TOKENIZER = "no tokenizer of the model"
_NONE = array("I")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """One seam: how to go on behind it."""

    request: InferenceRequest | None
    """What another worker is asked; None where all that was to be generated is there."""
    is_anew: bool = False
    """The first request once more: nothing of its answer was delivered."""
    is_done: bool = False
    """Even the last event is there."""
    finish_reason: str = ""
    """Without a request: why generation ended; empty where the client was told that."""
    envelope: dict[str, Any] = field(default_factory=dict[str, Any])
    is_chat: bool = False
    tells_ids: bool = False
    tells_usage: bool = False
    prompt_tokens: int = 0
    said_tokens: int = 0
    """Generated and delivered before the seam."""
    count: int = 1
    """How many seams the stream has, with this one."""
    voice: Voice = field(default_factory=lambda: Voice(detokeniser=None, stops=None))


class NotResumable(Exception):
    """Why a stream cannot go on."""


def resume(
    request: InferenceRequest, delivered: Delivered, tokenizer: Tokenizer | None, count: int
) -> Resumption:
    """How `request`, whose stream has come so far, goes on. `tokenizer`: the model's; None where it
    is not known. Raises NotResumable.
    """
    fields: dict[str, Any] = msgspec.json.decode(request.body)
    known = _Known(request=request, fields=fields, delivered=delivered)
    if delivered.is_torn:
        raise NotResumable("an event was cut")
    if delivered.is_done or (delivered.finish_reason and delivered.trouble in _HARMLESS_AT_END):
        return _ended(known, tokenizer, count)
    if delivered.trouble:
        raise NotResumable(delivered.trouble)
    if not delivered.has_begun:
        return Resumption(
            request=replace(request, deadline=None),
            is_anew=True,
            envelope=delivered.envelope,
            count=count,
        )
    return _continued(known, tokenizer, count)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    request: InferenceRequest
    fields: dict[str, Any]
    delivered: Delivered

    @property
    def is_chat(self) -> bool:
        return self.request.route is Route.CHAT

    @property
    def tells_usage(self) -> bool:
        options = self.fields.get("stream_options")
        return is_object(options) and options.get("include_usage") is True

    @property
    def stops(self) -> list[str]:
        stops: Any = self.fields.get("stop") or []  # checked when the request came
        return [stops] if type(stops) is str else stops

    @property
    def most_tokens(self) -> int | None:
        """As the client or the endpoint bounds the answer."""
        asked = self.request.max_tokens
        return _COMPLETION_TOKENS if asked is None and not self.is_chat else asked


def _ended(known: _Known, tokenizer: Tokenizer | None, count: int) -> Resumption:
    """The answer is there; what is missing are its last words."""
    delivered = known.delivered
    lacks_usage = known.tells_usage and not delivered.has_usage and not delivered.is_done
    prompt, said = _tokens(known, tokenizer) if lacks_usage else (_NONE, _NONE)
    return Resumption(
        request=None,
        is_done=delivered.is_done,
        envelope=delivered.envelope,
        is_chat=known.is_chat,
        tells_usage=lacks_usage,
        prompt_tokens=len(prompt),
        said_tokens=len(said),
        count=count,
    )


def _continued(known: _Known, tokenizer: Tokenizer | None, count: int) -> Resumption:
    delivered = known.delivered
    _require_continuable(known)
    if known.is_chat and tokenizer is None:
        raise NotResumable(_NO_TOKENIZER)
    prompt, said = _tokens(known, tokenizer)
    left = None if known.most_tokens is None else known.most_tokens - len(said)
    return Resumption(
        request=None if left is not None and left <= 0 else _request(known, prompt, said, left),
        finish_reason="length",
        envelope=delivered.envelope,
        is_chat=known.is_chat,
        tells_ids=known.fields.get("return_token_ids") is True,
        tells_usage=known.tells_usage,
        prompt_tokens=len(prompt),
        said_tokens=len(said),
        count=count,
        voice=_voice(known, said, tokenizer),
    )


def _tokens(known: _Known, tokenizer: Tokenizer | None) -> tuple[array[int], array[int]]:
    """Those of the prompt and those that were generated. Raises NotResumable."""
    request, delivered = known.request, known.delivered
    prompt = delivered.prompt_ids or (request.prompt if tokenizer is not None else None)
    is_one = isinstance(request.prompt, array) and not request.further_tokens
    if not isinstance(prompt, array) or not is_one:
        raise NotResumable("its prompt is not one list of tokens")
    if delivered.ids is not None:
        return prompt, delivered.ids
    return prompt, _said(delivered.text, tokenizer)


def _require_continuable(known: _Known) -> None:
    """Raises NotResumable for what the client asked for and a continuation cannot give."""
    fields = known.fields
    for name, harmless in _OPPOSED.items():
        value = fields.get(name)
        if value is not None and value not in harmless:
            raise NotResumable(name)
    form = fields.get("response_format")
    if is_object(form) and form.get("type") != "text":
        raise NotResumable("response_format")
    if fields.get("tools") and fields.get("tool_choice") != "none":
        raise NotResumable("tools")
    options = fields.get("stream_options")
    if is_object(options) and options.get("continuous_usage_stats"):
        raise NotResumable("continuous_usage_stats")
    if fields.get("min_tokens") and known.stops:
        raise NotResumable("min_tokens beside stop")


def _said(text: str, tokenizer: Tokenizer | None) -> array[int]:
    """The tokens of a text that the model said. Raises NotResumable where they are not the text."""
    if tokenizer is None:
        raise NotResumable(_NO_TOKENIZER)
    if BROKEN in text:
        raise NotResumable("its text lacks bytes")
    said = tokenizer.encode(text, add_special_tokens=False)
    if tokenizer.decode(said) != text:
        raise NotResumable("its text does not lead back to its tokens")
    return said


def _voice(known: _Known, said: array[int], tokenizer: Tokenizer | None) -> Voice:
    """Whether or not the client has all the text of the tokens that it was told of."""
    delivered = known.delivered
    stops = _stop_watch(known, delivered.text)
    if delivered.ids is None:
        return Voice(detokeniser=None, stops=stops)  # nothing is held back of what counts as said
    if tokenizer is None:
        if known.stops or delivered.is_last_silent:
            raise NotResumable(_NO_TOKENIZER)
        return Voice(detokeniser=None, stops=None)
    detokeniser = Detokeniser(tokenizer, said)
    if not detokeniser.text.startswith(delivered.text):
        raise NotResumable("its text is not that of its tokens")
    withheld = detokeniser.text[len(delivered.text) :]
    is_clean = detokeniser.is_whole and not withheld
    return Voice(withheld=withheld, detokeniser=None if is_clean else detokeniser, stops=stops)


def _stop_watch(known: _Known, shown: str) -> StopWatch | None:
    if not known.stops:
        return None
    is_included = known.fields.get("include_stop_str_in_output") is True
    return StopWatch(known.stops, shown, is_included=is_included)


def _request(
    known: _Known, prompt: array[int], said: array[int], left: int | None
) -> InferenceRequest:
    """The completion that goes on behind these tokens, with at most `left` more."""
    fields, ids = known.fields, prompt + said
    body = {name: fields[name] for name in _KEPT if fields.get(name) is not None}
    seed, least = fields.get("seed"), fields.get("min_tokens")
    if seed is not None:  # the same draws would go with other tokens
        body["seed"] = (seed + len(said)) % (1 << 63)
    if least:
        body["min_tokens"] = max(0, least - len(said))
    body |= {
        "prompt": ids.tolist(),
        "max_tokens": left,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    return replace(
        known.request,
        route=Route.COMPLETION,
        path=COMPLETIONS,
        body=msgspec.json.encode(body),
        prompt=ids,
        max_tokens=left,
        adds_special_tokens=None,
        deadline=None,
    )


def is_same_namespace(first: InferenceRequest, again: InferenceRequest) -> bool:
    """Whether both are asked under the same name: scope, epochs, model and adapter."""
    a, b = first.grant, again.grant
    return (a.domain, a.adapter, a.scope) == (b.domain, b.adapter, b.scope)
