"""What a client of the simulated engine may ask for, checked as the engine checks it.

Turns a decoded JSON body into a `Generation`, or raises `BadRequest` that names the field. Read
`api.py` next, which answers it.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from trunkline.kv.tickets import MAX_REGIONS
from trunkline.ports.template import ChatTemplate
from trunkline.ports.tokenizer import Tokenizer
from trunkline.worker.media import with_media_as_text

MAX_STOPS = 16
MAX_LABELS = 16
MAX_PROMPTS = 256  # of a batch, as a gateway takes
MAX_REGION_BLOCKS = 1 << 20
MAX_SALT_CHARACTERS = 1_024
_MAX_LABEL_CHARACTERS = 64
_COMPLETION_TOKENS = 16  # the engine's own default for /v1/completions


class BadRequest(Exception):
    """The client's mistake; `param` is the field."""

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """So many leading blocks (behind the regions before it) are under a salt of their own."""

    blocks: int
    salt: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One checked request for an answer."""

    is_chat: bool
    prompt: array[int] = field(repr=False)
    wanted_tokens: int
    has_own_end: bool
    """The client set no length, so the answer ends by itself."""
    stops: tuple[str, ...] = field(repr=False)
    is_stream: bool
    includes_usage: bool
    returns_ids: bool
    salt: str | None = field(repr=False)
    regions: tuple[Region, ...]
    labels: tuple[tuple[int, str], ...]
    """What the gateway calls the prefix of so many tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Reads bodies for one model."""

    tokenizer: Tokenizer
    template: ChatTemplate
    model: str
    context_tokens: int
    default_tokens: int
    has_regions: bool = True
    """Whether a prompt may have regions under other salts; a stock engine ignores them."""

    def generation(self, body: Mapping[str, Any], *, is_chat: bool) -> Generation:
        """Raises BadRequest."""
        self.check_model(body)
        return self._of_prompt(body, self.chat_prompt(body) if is_chat else None)

    def batch(self, body: Mapping[str, Any]) -> list[Generation]:
        """One for each prompt of a completion. What a gateway says of a prompt, where its public
        beginning ends and what it calls its prefixes, it says of the first. Raises BadRequest.
        """
        self.check_model(body)
        given: Any = body.get("prompt")  # any JSON
        if not _is_batch(given):
            return [self._of_prompt(body)]
        prompts = cast("list[Any]", given)
        if len(prompts) > MAX_PROMPTS:
            raise BadRequest(
                f"prompt has {len(prompts)}, at most {MAX_PROMPTS} are taken", "prompt"
            )
        read = [self._of_prompt({**body, "prompt": prompt}) for prompt in prompts]
        return [read[0], *(replace(one, regions=(), labels=()) for one in read[1:])]

    def _of_prompt(
        self, body: Mapping[str, Any], chat_prompt: array[int] | None = None
    ) -> Generation:
        """Of a completion, where there is no prompt of a chat."""
        is_chat = chat_prompt is not None
        if _whole(body, "n", 1) != 1:
            raise BadRequest("only n=1 is served", "n")
        prompt = self.completion_prompt(body) if chat_prompt is None else chat_prompt
        if not prompt:
            raise BadRequest("the prompt has no tokens", "messages" if is_chat else "prompt")
        wanted = _whole(body, "max_tokens", None)
        if is_chat:
            wanted = _whole(body, "max_completion_tokens", wanted)
        room = self.context_tokens - len(prompt)
        if room < (wanted or 1):
            raise BadRequest(
                f"This model's maximum context length is {self.context_tokens} tokens, and "
                f"{len(prompt)} in the prompt with {wanted or 1} in the completion are more.",
                "max_tokens" if room > 0 else ("messages" if is_chat else "prompt"),
            )
        if wanted is not None and wanted < 1:
            raise BadRequest(f"max_tokens is {wanted}, needed is 1 or more", "max_tokens")
        natural = self.default_tokens if is_chat else _COMPLETION_TOKENS
        return Generation(
            is_chat=is_chat,
            prompt=prompt,
            wanted_tokens=wanted or min(natural, room),
            has_own_end=wanted is None,
            stops=_stops(body),
            is_stream=_flag(body, "stream"),
            includes_usage=_flag(_mapping(body, "stream_options"), "include_usage"),
            returns_ids=_flag(body, "return_token_ids"),
            salt=_salt(body),
            regions=_regions(body) if self.has_regions else (),
            labels=_labels(body),
        )

    def check_model(self, body: Mapping[str, Any]) -> None:
        """A body may leave the model out."""
        model = body.get("model")
        if model is not None and model != self.model:
            raise BadRequest("The model does not exist.", "model", status=404)

    def chat_prompt(self, body: Mapping[str, Any]) -> array[int]:
        """Render and tokenise `messages` as the engine does."""
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise BadRequest("messages must be a list with at least one message", "messages")
        for message in cast("list[Any]", messages):
            if not isinstance(message, dict) or not isinstance(
                cast("dict[str, Any]", message).get("role"), str
            ):
                raise BadRequest("each message must be an object with a role", "messages")
        tools = body.get("tools")
        if tools is not None and not isinstance(tools, list):
            raise BadRequest("tools must be a list", "tools")
        options = dict(_mapping(body, "chat_template_kwargs"))
        for name in ("add_generation_prompt", "continue_final_message"):
            if body.get(name) is not None:
                options[name] = _flag(body, name)
        if body.get("reasoning_effort") is not None:
            options["reasoning_effort"] = body["reasoning_effort"]
        shown = with_media_as_text(cast("list[dict[str, Any]]", messages))
        try:
            text = self.template.render(shown, cast("list[dict[str, Any]]", tools), options)
        except ValueError as error:
            raise BadRequest(str(error), "messages") from error
        return self._encoded(text, _flag(body, "add_special_tokens"))

    def completion_prompt(self, body: Mapping[str, Any]) -> array[int]:
        """A text, or token ids."""
        prompt: Any = body.get("prompt")  # any JSON
        if _is_batch(prompt) and len(prompt) == 1:
            (prompt,) = prompt
        if isinstance(prompt, str):
            return self._encoded(prompt, _flag(body, "add_special_tokens", True))
        if not isinstance(prompt, list):
            raise BadRequest("prompt must be a text or a list of token ids", "prompt")
        return self.token_ids(cast("list[Any]", prompt), "prompt")

    def token_ids(self, ids: list[Any], param: str) -> array[int]:
        """Pack ids that all name a token of the vocabulary."""
        if any(kind is not int for kind in set(map(type, ids))):
            raise BadRequest(f"{param} holds something that is not a token id", param)
        if ids and not (min(ids) >= 0 and max(ids) < self.tokenizer.vocab_size):
            bad = next(i for i, one in enumerate(ids) if not 0 <= one < self.tokenizer.vocab_size)
            raise BadRequest(f"{param}[{bad}] is out of the vocabulary", param)
        return array("I", ids)

    def _encoded(self, text: str, adds_special_tokens: bool) -> array[int]:
        try:
            return self.tokenizer.encode(text, add_special_tokens=adds_special_tokens)
        except ValueError as error:
            raise BadRequest("the text is not valid Unicode") from error


def _is_batch(prompt: Any) -> bool:  # any JSON
    """Whether it holds prompts; a list of token ids is one."""
    return isinstance(prompt, list) and isinstance(
        next(iter(cast("list[Any]", prompt)), 0), str | list
    )


def _whole(body: Mapping[str, Any], name: str, default: int | None) -> int | None:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int:
        raise BadRequest(f"{name} must be a whole number", name)
    return value


def _flag(body: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise BadRequest(f"{name} must be true or false", name)
    return value


def _mapping(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadRequest(f"{name} must be an object", name)
    return cast("dict[str, Any]", value)


def _salt(body: Mapping[str, Any]) -> str | None:
    salt = body.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise BadRequest("cache_salt must be a text that is not empty", "cache_salt")
    return salt


def _regions(body: Mapping[str, Any]) -> tuple[Region, ...]:
    """`cache_salt_regions`: `[[blocks, salt], ...]`; what follows is under `cache_salt`."""
    param = "cache_salt_regions"
    given: Any = body.get(param)  # any JSON
    if given is None:
        return ()
    items = cast("list[Any]", given) if isinstance(given, list) else None
    if items is None or len(items) > MAX_REGIONS:
        raise BadRequest(f"{param} must be a list of up to {MAX_REGIONS}", param)
    regions: list[Region] = []
    for item in items:
        match item:
            case [int(blocks), str(salt)] if (
                type(blocks) is int
                and 1 <= blocks <= MAX_REGION_BLOCKS
                and 1 <= len(salt) <= MAX_SALT_CHARACTERS
            ):
                regions.append(Region(blocks=blocks, salt=salt))
            case _:
                raise BadRequest(f"a region of {param} must be [blocks, salt]", param)
    if regions and _salt(body) is None:
        raise BadRequest(f"{param} needs a cache_salt for the rest", param)
    return tuple(regions)


def _stops(body: Mapping[str, Any]) -> tuple[str, ...]:
    given = body.get("stop")
    stops = [given] if isinstance(given, str) else given or []
    if not isinstance(stops, list):
        raise BadRequest("stop must be a text or a list of texts", "stop")
    texts = cast("list[Any]", stops)
    if len(texts) > MAX_STOPS or not all(isinstance(one, str) and one for one in texts):
        raise BadRequest(f"stop takes up to {MAX_STOPS} texts that are not empty", "stop")
    return tuple(texts)


def _labels(body: Mapping[str, Any]) -> tuple[tuple[int, str], ...]:
    """`kv_transfer_params.trunkline.checkpoints`: `[[tokens, label], ...]`, from the gateway."""
    param = "kv_transfer_params"
    ours = _mapping(_mapping(body, param), "trunkline")
    given: Any = ours.get("checkpoints") or []  # any JSON
    checkpoints = cast("list[Any]", given) if isinstance(given, list) else None
    if checkpoints is None or len(checkpoints) > MAX_LABELS:
        raise BadRequest(f"checkpoints must be a list of up to {MAX_LABELS}", param)
    labels: list[tuple[int, str]] = []
    for checkpoint in checkpoints:
        match checkpoint:
            case [int(tokens), str(label)] if 0 < len(label) <= _MAX_LABEL_CHARACTERS:
                labels.append((tokens, label))
            case _:
                raise BadRequest("a checkpoint must be [tokens, label]", param)
    return tuple(labels)
