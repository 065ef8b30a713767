"""From one client message to an `InferenceRequest`: body checks, prompt, affinity hints.

Owns what an inference body may hold. It decides on the decoded body and forwards the client's own
bytes, less the fields that are never forwarded. A batch of prompts is served by one worker, routed
by its first prompt and priced by all. Must never take a tenant, a worker or a cache key from the
client. Read `exchange.py` next.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterator
from typing import Any

from trunkline.gateway.answers import quoted
from trunkline.gateway.claims import is_json
from trunkline.gateway.contracts import (
    ChatPrompt,
    ClientError,
    InferenceRequest,
    Prompt,
    Refusal,
    Route,
)
from trunkline.gateway.counters import Counters
from trunkline.gateway.fields import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    FORBIDDEN,
    HINTS,
    REFUSED,
    check_fields,
)
from trunkline.gateway.head import RequestHead
from trunkline.gateway.spelling import spelled
from trunkline.gateway.strict_json import (
    decode_object,
    has_negative_zero,
    is_list,
    is_object,
    without,
)

MAX_MESSAGES = 10_000
MAX_BATCH = 256
COPY_TOKENS = 16
"""What a further sample of one prompt (`n`, `best_of`) computes of it: it reuses all but the last
block.
"""
MEDIA_TOKENS = 1_000
"""What a picture of a megapixel takes in models of today, about: an estimate, for rate limits."""
_TOKEN_BYTES = 4
"""Of ordinary text, about."""
_HINT_BYTES = 256
# Some reader would find an object here; in UTF-16 or behind a byte order mark we find none.
_OBJECT = re.compile(rb"(?:\xef\xbb\xbf|\xff\xfe|\xfe\xff)?[\x00 \t\r\n]*+\{")
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_TEMPLATE_OPTIONS = (
    "add_generation_prompt", "continue_final_message", "reasoning_effort",
)  # fmt: skip
_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})
_MEDIA_PARTS = {"image_url": "url", "video_url": "url", "audio_url": "url", "input_audio": "data"}

# In this order; a per-request id is no affinity key.
_SESSION_HEADERS = (
    b"x-session-id", b"x-user-id", b"x-claude-code-session-id", b"session-id",
    b"x-dynamo-session-id", b"x-session-affinity",
)  # fmt: skip


class Intake:
    """Makes requests of messages, under the limits it was built with."""

    def __init__(
        self,
        *,
        max_json_depth: int,
        strict_fields: bool,
        max_model_len: int,
        counters: Counters,
        vocab_size_of: Callable[[str], int] = lambda _model: 1 << 32,
    ) -> None:
        """Token ids for a model, by the name in the request, are below `vocab_size_of` it."""
        self._vocab_size_of = vocab_size_of
        self._max_json_depth = max_json_depth
        self._strict_fields = strict_fields
        self._max_model_len = max_model_len
        self._counters = counters

    def request(
        self, head: RequestHead, route: Route, body: bytes, request_id: str
    ) -> InferenceRequest:
        """The request in a whole message whose head was accepted. Raises ClientError."""
        request = InferenceRequest(
            request_id=request_id,
            route=route,
            method=head.method,
            path=head.target.decode("ascii"),
            body=body,
        )
        if route is not Route.OTHER:
            self.fill(request)
        elif body and (is_json(head) or _OBJECT.match(body) is not None):
            self._strip(request)
        hint = _header_hint(head.headers)
        if hint is not None:
            request.session = hint
        return request

    def _strip(self, request: InferenceRequest) -> None:
        """An endpoint we do not read: only what could reach a foreign cache is looked for."""
        fields, nested = decode_object(request.body, self._max_json_depth, FORBIDDEN)
        request.is_object = True
        self._drop(request, fields, [])
        _refuse_nested(nested)
        model = fields.get("model")
        request.model = model if type(model) is str else ""
        request.is_stream = fields.get("stream") is True

    def fill(self, request: InferenceRequest) -> None:
        """What the body of a chat or a completion says. Raises ClientError."""
        fields, nested = decode_object(request.body, self._max_json_depth, FORBIDDEN)
        request.is_object = True
        is_chat = request.route is Route.CHAT
        unknown = check_fields(fields, CHAT_FIELDS if is_chat else COMPLETION_FIELDS)
        has_zero = any(value == 0 and type(value) is not bool for value in fields.values())
        if has_zero and has_negative_zero(request.body):
            raise ClientError(Refusal(code="invalid_json", message="-0 is no number here"))
        request.session = _body_hint(fields)
        prompt_name = "messages" if is_chat else "prompt"
        if prompt_name not in fields:
            raise _bad(prompt_name, "is missing")
        unknown.remove(prompt_name)
        dropped = self._drop(request, fields, unknown) if unknown else frozenset[str]()
        if nested is not None and not _is_under(fields, dropped, self._max_json_depth):
            _refuse_nested(nested)
        request.model = fields.get("model") or ""
        request.is_stream = bool(fields.get("stream"))
        request.max_tokens = fields.get("max_completion_tokens") or fields.get("max_tokens")
        if request.max_tokens is not None and request.max_tokens > self._max_model_len:
            raise _bad("max_tokens", f"must be at most {self._max_model_len}")
        request.adds_special_tokens = fields.get("add_special_tokens")
        value, media = fields[prompt_name], 0
        if is_chat:
            prompt, rest_tokens = _chat_prompt(value, fields), 0
            media = _media_count(prompt.messages)
            # What an engine makes of a picture is not in the text: nothing is known of the prompt.
            request.prompt = None if media else prompt
        else:
            request.prompt, rest_tokens = self._text_prompt(value, request.model)
        count = len(value) if rest_tokens else 1
        copies = max(fields.get("n") or 1, fields.get("best_of") or 1) - 1
        request.further_tokens = rest_tokens + count * copies * COPY_TOKENS
        if request.prompt is None:
            request.further_tokens += _estimated_tokens(_text_of(value)) + media * MEDIA_TOKENS

    def _drop(
        self, request: InferenceRequest, fields: dict[str, Any], unknown: list[str]
    ) -> frozenset[str]:
        """Take forbidden and unknown fields out of the body; returns what was taken out."""
        forbidden = spelled(fields, FORBIDDEN)
        refused = REFUSED.intersection(fields)
        if refused:
            name = min(refused)
            raise _bad(name, "is not taken from clients", "forbidden_field")
        if forbidden and self._strict_fields:
            name = min(forbidden.values())
            raise _bad(name, "is not taken from clients", "forbidden_field")
        others = [name for name in unknown if name not in forbidden and name not in HINTS]
        if others and self._strict_fields:
            shown = quoted(others[0])
            text = f"the field {shown} is not known"
            raise ClientError(Refusal(code="unknown_field", message=text, param=shown[1:-1]))
        for name in forbidden.values():
            self._counters.count_dropped(name)
        for _ in others:
            self._counters.count_dropped("unknown")
        dropped = frozenset(forbidden).union(unknown)
        if dropped:
            request.body = without(request.body, dropped)
        return dropped

    def _text_prompt(self, value: Any, model: str) -> tuple[Prompt, int]:  # any decoded JSON value
        """A text, token ids, or the first of a batch of either; and about how many tokens the rest
        of the batch has.
        """
        if type(value) is str:
            if not value:
                raise _bad("prompt", "is empty")
            return value, 0
        if not is_list(value):
            raise _bad("prompt", "must be a string, token ids, or a list of either")
        items = value
        if not items:
            raise _bad("prompt", "is empty")
        first = items[0]
        is_text = type(first) is str
        if not is_text and not is_list(first):
            return self._token_ids(items, "prompt", self._vocab_size_of(model)), 0
        if len(items) > MAX_BATCH:
            raise _bad("prompt", f"has {len(items)} prompts; the limit is {MAX_BATCH}")
        for index, item in enumerate(items):
            if not (type(item) is str if is_text else is_list(item)):
                raise _bad("prompt", f"mixes kinds: item {index} differs from the first")
            if not item:
                raise _bad("prompt", f"has an empty prompt at index {index}")
        if type(first) is str:
            return first, sum(_estimated_tokens(item) for item in items[1:])
        size = self._vocab_size_of(model)
        batch = [self._token_ids(ids, f"prompt[{index}]", size) for index, ids in enumerate(items)]
        return batch[0], sum(map(len, batch[1:]))

    def _token_ids(self, items: list[Any], name: str, vocab_size: int) -> array[int]:
        assert 0 < vocab_size <= 1 << 32, "token ids are u32"
        if len(items) > self._max_model_len:
            text = f"has {len(items)} token ids; the context has {self._max_model_len}"
            raise _bad("prompt", text, "context_length_exceeded")
        if set(map(type, items)) == {int}:
            try:
                if max(items) < vocab_size:
                    return array("I", items)
            except OverflowError:
                pass  # the loop below names the item
        for index, item in enumerate(items):
            if type(item) is not int or not 0 <= item < 1 << 32:
                raise _bad("prompt", f"{name}[{index}] is not a token id")
            if item >= vocab_size:
                text = f"{name}[{index}] is not in the vocabulary of {vocab_size} tokens"
                raise _bad("prompt", text)
        raise AssertionError("an id in range did not fit")


def _estimated_tokens(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass")) // _TOKEN_BYTES + 1


def _chat_prompt(value: Any, fields: dict[str, Any]) -> ChatPrompt:  # any decoded JSON value
    if not is_list(value) or not value:
        raise _bad("messages", "must be a list of at least one message")
    messages = value
    if len(messages) > MAX_MESSAGES:
        raise _bad("messages", f"has {len(messages)} items; the limit is {MAX_MESSAGES}")
    for index, message in enumerate(messages):
        _check_message(message, index)
    if fields.get("documents") is not None:
        raise _bad("documents", "is not offered: put the documents into the messages")
    tools: list[dict[str, Any]] | None = fields.get("tools")
    for index, tool in enumerate(tools or ()):
        if type(tool.get("type")) is not str or type(tool.get("function")) is not dict:
            raise _bad("tools", f"tools[{index}] must have a type and a function")
    options = {name: fields[name] for name in _TEMPLATE_OPTIONS if fields.get(name) is not None}
    return ChatPrompt(messages=messages, tools=tools, template_options=options)


def _check_message(message: Any, index: int) -> None:  # any decoded JSON value
    where = f"messages[{index}]"
    if not is_object(message):
        raise _bad("messages", f"{where} must be an object")
    role = message.get("role")
    if type(role) is not str or role not in _ROLES:
        raise _bad("messages", f"{where}.role must be one of {', '.join(sorted(_ROLES))}")
    content = message.get("content")
    if type(content) is str:
        pass
    elif content is None:
        if role != "assistant":
            raise _bad("messages", f"{where}.content is missing")
    elif is_list(content) and content:
        for part_index, part in enumerate(content):
            _check_part(part, f"{where}.content[{part_index}]")
    else:
        raise _bad("messages", f"{where}.content must be a string or a list of parts")
    calls = message.get("tool_calls")
    if calls is None:
        return
    if not is_list(calls) or not all(is_object(call) for call in calls):
        raise _bad("messages", f"{where}.tool_calls must be a list of objects")


def _check_part(part: Any, where: str) -> None:  # any decoded JSON value
    if not is_object(part):
        raise _bad("messages", f"{where} must be an object")
    kind = part.get("type")
    if type(kind) is not str:
        raise _bad("messages", f"{where}.type is missing")
    if kind in _TEXT_PARTS:
        text = part.get("refusal" if kind == "refusal" else "text", part.get(kind))
        if type(text) is not str:
            raise _bad("messages", f"{where}.text must be a string")
        return
    inner_name = _MEDIA_PARTS.get(kind)
    if inner_name is None:
        raise _bad("messages", f"{where}.type is not known")
    holder = part.get(kind)
    source = holder.get(inner_name) if is_object(holder) else holder
    if type(source) is not str:
        raise _bad("messages", f"{where}.{kind} must hold its data")
    if inner_name == "url" and not source.startswith("data:"):
        raise _bad("messages", f"{where}.{kind} must be a data: URL; nothing is fetched")


def _media_count(messages: list[dict[str, Any]]) -> int:
    return sum(part["type"] in _MEDIA_PARTS for part in _parts_of(messages))


def _text_of(messages: list[dict[str, Any]]) -> str:
    """Of messages with media: all that is text."""
    whole = [content for one in messages if type(content := one.get("content")) is str]
    return " ".join([*whole, *(str(part.get("text", "")) for part in _parts_of(messages))])


def _parts_of(messages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for message in messages:
        content = message.get("content")
        if is_list(content):
            yield from content


def _is_under(fields: dict[str, Any], dropped: frozenset[str], max_depth: int) -> bool:
    """Whether every forbidden key below the top level went away with a dropped field."""
    kept = {name: value for name, value in fields.items() if name not in dropped}
    return find_forbidden(kept, max_depth) is None


def find_forbidden(value: Any, depth_left: int) -> str | None:  # any decoded JSON value
    """A forbidden key anywhere in `value`. The depth was bounded when it was decoded."""
    assert depth_left >= 0, "deeper than the decoder let through"
    if is_object(value):
        meant = spelled(value, FORBIDDEN)
        if meant:
            return min(meant.values())
        below = list(value.values())
    elif is_list(value):
        below = value
    else:
        return None
    for item in below:
        found = find_forbidden(item, depth_left - 1)
        if found is not None:
            return found
    return None


def _refuse_nested(nested: str | None) -> None:
    if nested is not None:
        raise _bad(nested, "is not taken from clients, at any nesting", "forbidden_field")


def _header_hint(headers: dict[bytes, bytes]) -> str | None:
    for name in _SESSION_HEADERS:
        value = headers.get(name)
        if value:
            if name == b"session-id" and b"thread-id" in headers:
                value = value + b"/" + headers[b"thread-id"]
            return value[:_HINT_BYTES].decode("latin-1")
    return None


def _body_hint(fields: dict[str, Any]) -> str | None:
    session = fields.get("session_params")
    metadata = fields.get("metadata")
    for value in (
        fields.get("prompt_cache_key"),
        session.get("session_id") if is_object(session) else None,
        fields.get("session_id"),
        metadata.get("user_id") if is_object(metadata) else None,
        fields.get("user"),
    ):
        if type(value) is str and value:
            return value[:_HINT_BYTES]
    return None


def _bad(param: str, wrong: str, code: str = "invalid_value") -> ClientError:
    text = wrong if wrong.startswith(param) else f"{param} {wrong}"
    return ClientError(Refusal(code=code, message=text, param=param))
