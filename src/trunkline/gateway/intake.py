"""From one client message to an `InferenceRequest`: body checks, prompt, affinity hints.

Owns what an inference body may hold. It decides on the decoded body and forwards the client's own
bytes, less the fields that are never forwarded. What stands in a body is read by a module for each
dialect: `chat.py`, `completions.py`, `messages.py`, `responses.py`. Must never take a tenant, a
worker or a cache key from the client. Read `exchange.py` next.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from trunkline.config import LimitsConfig
from trunkline.gateway.answers import quoted
from trunkline.gateway.chat import chat_prompt, media_count, text_of
from trunkline.gateway.claims import is_json
from trunkline.gateway.completions import PromptShape
from trunkline.gateway.contracts import (
    ClientError,
    InferenceRequest,
    Refusal,
    Route,
)
from trunkline.gateway.counters import Counters
from trunkline.gateway.fields import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    COUNT_FIELDS,
    FORBIDDEN,
    HINTS,
    MESSAGES_FIELDS,
    REFUSED,
    RESPONSES_FIELDS,
    Check,
    bad_value,
    check_fields,
)
from trunkline.gateway.head import RequestHead
from trunkline.gateway.media import STAND_IN_TOKENS, require_own_data
from trunkline.gateway.messages import messages_prompt
from trunkline.gateway.responses import responses_prompt
from trunkline.gateway.retention import asked_ms
from trunkline.gateway.spelling import spelled
from trunkline.gateway.strict_json import (
    decode_object,
    has_negative_zero,
    is_list,
    is_object,
    without,
)
from trunkline.gateway.weighing import (
    MEDIA_TOKENS,
    model_in_form,
    text_tokens,
    tokens_in,
    tokens_of_form,
)

COPY_TOKENS = 16
"""What a further sample of one prompt (`n`, `best_of`) computes of it: it reuses all but the last
block.
"""
_HINT_BYTES = 256
# Some reader would find an object here; in UTF-16 or behind a byte order mark we find none.
_OBJECT = re.compile(rb"(?:\xef\xbb\xbf|\xff\xfe|\xfe\xff)?[\x00 \t\r\n]*+\{")
_DIALECTS: Mapping[Route, tuple[dict[str, Check], tuple[str, ...]]] = {
    Route.CHAT: (CHAT_FIELDS, ("messages",)),
    Route.COMPLETION: (COMPLETION_FIELDS, ("prompt",)),
    Route.MESSAGES: (MESSAGES_FIELDS, ("messages", "max_tokens")),
    Route.RESPONSES: (RESPONSES_FIELDS, ("input",)),
    Route.COUNT_TOKENS: (COUNT_FIELDS, ("messages",)),
}
"""Fields that are known, and those that no body may lack."""

_ENGINE_KNOBS = HINTS | {"request_id", "priority"}
"""Not forwarded in bodies that are not read: names and turns of requests are not the client's."""
_CONTENTS = (
    "input", "messages", "query", "queries", "documents", "items", "text_1", "text_2", "data_1",
    "data_2",
)  # fmt: skip
"""Where such bodies have what is to be computed."""
_LENGTHS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
"""What the length of an answer is called; the first one counts."""

# In this order; a per-request id is no affinity key.
_SESSION_HEADERS = (
    b"x-session-id", b"x-user-id", b"x-claude-code-session-id", b"session-id",
    b"x-dynamo-session-id", b"x-session-affinity",
)  # fmt: skip

# In this order, too: a field, and where it is an object the one inside it.
_SESSION_FIELDS = (
    ("prompt_cache_key", ""), ("session_params", "session_id"), ("session_id", ""),
    ("vllm_xargs", "agentic_context"), ("metadata", "user_id"), ("user", ""),
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

    def take(self, limits: LimitsConfig) -> None:
        """Other limits from here on."""
        self._max_json_depth = limits.max_json_depth
        self._strict_fields = limits.strict_fields

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
        if route.is_read:
            self.fill(request)
        elif body and (is_json(head) or _OBJECT.match(body) is not None):
            self._strip(request)
        elif route is Route.AUDIO:
            request.further_tokens = tokens_of_form(body)
            request.model = model_in_form(body)
        hint = _header_hint(head.headers)
        if hint is not None:
            request.session = hint
        return request

    def _strip(self, request: InferenceRequest) -> None:
        """An endpoint we do not read: only what could reach a foreign cache is looked for."""
        fields, nested = decode_object(request.body, self._max_json_depth, FORBIDDEN)
        request.is_object = True
        is_weighed = request.route.is_weighed
        self._drop(request, fields, _ENGINE_KNOBS.intersection(fields) if is_weighed else ())
        _refuse_nested(nested)
        require_own_data(fields)
        if is_weighed and request.route.computes:
            request.further_tokens = tokens_in([fields.get(name) for name in _CONTENTS])
        if is_weighed:
            request.session = _body_hint(fields)
        model = fields.get("model")
        request.model = model if type(model) is str else ""
        request.is_stream = fields.get("stream") is True

    def fill(self, request: InferenceRequest) -> None:
        """What the body of a route that is read says. Raises ClientError."""
        fields, nested = decode_object(request.body, self._max_json_depth, FORBIDDEN)
        request.is_object = True
        known, needed = _DIALECTS[request.route]
        unknown = check_fields(fields, known)
        has_zero = any(value == 0 and type(value) is not bool for value in fields.values())
        if has_zero and has_negative_zero(request.body):
            raise ClientError(Refusal(code="invalid_json", message="-0 is no number here"))
        request.session = _body_hint(fields)
        for name in needed:
            if name not in fields or (name in known and fields[name] is None):
                raise bad_value(name, "is missing")
        unknown.remove(needed[0])
        dropped = self._drop(request, fields, unknown) if unknown else frozenset[str]()
        if nested is not None and not _is_under(fields, dropped, self._max_json_depth):
            _refuse_nested(nested)
        request.model = fields.get("model") or ""
        request.is_stream = bool(fields.get("stream"))
        for name in _LENGTHS:
            if request.max_tokens is None:
                request.max_tokens = fields.get(name)
            if request.max_tokens is not None and request.max_tokens > self._max_model_len:
                raise bad_value(name, f"must be at most {self._max_model_len}")
        request.adds_special_tokens = fields.get("add_special_tokens")
        if request.route is Route.COMPLETION:
            self._read_prompt(request, fields)
        else:
            self._read_chat(request, fields)

    def _read_prompt(self, request: InferenceRequest, fields: dict[str, Any]) -> None:
        shape = PromptShape(
            vocab_size=self._vocab_size_of(request.model), max_model_len=self._max_model_len
        )
        request.prompt, rest_tokens = shape.first_of(fields["prompt"])
        count = len(fields["prompt"]) if rest_tokens else 1
        request.further_tokens = rest_tokens + count * _copies(fields) * COPY_TOKENS

    def _read_chat(self, request: InferenceRequest, fields: dict[str, Any]) -> None:
        """Of any dialect of conversations."""
        match request.route:
            case Route.CHAT:
                prompt = chat_prompt(fields)
            case Route.RESPONSES:
                prompt = responses_prompt(fields)
                request.previous_response = fields.get("previous_response_id") or ""
                request.outlives_answer = fields.get("background") is True
                request.adds_special_tokens = True  # as vLLM does there, and not for chats
            case _:
                prompt = messages_prompt(fields)
        if request.route is Route.COUNT_TOKENS:
            return  # its prompt is counted and not computed: any worker will do
        request.further_tokens = _copies(fields) * COPY_TOKENS
        request.keep_ms = asked_ms(fields)
        media = media_count(prompt.messages)
        request.further_tokens += media * (MEDIA_TOKENS - STAND_IN_TOKENS)
        if request.previous_response:  # what is before it is not here
            request.further_tokens += text_tokens(text_of(prompt))
            return
        request.approximate = prompt.unknown or ("media" if media else "")
        request.prompt = replace(prompt, has_media=True) if media else prompt

    def _drop(
        self, request: InferenceRequest, fields: dict[str, Any], unknown: Iterable[str]
    ) -> frozenset[str]:
        """Take forbidden and unknown fields out of the body; returns what was taken out."""
        forbidden = spelled(fields, FORBIDDEN)
        refused = REFUSED.intersection(fields)
        if refused:
            name = min(refused)
            raise bad_value(name, "is not taken from clients", "forbidden_field")
        if forbidden and self._strict_fields:
            name = min(forbidden.values())
            raise bad_value(name, "is not taken from clients", "forbidden_field")
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


def _copies(fields: dict[str, Any]) -> int:
    """Further samples of each prompt."""
    return max(fields.get("n") or 1, fields.get("best_of") or 1) - 1


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
        raise bad_value(nested, "is not taken from clients, at any nesting", "forbidden_field")


def _header_hint(headers: dict[bytes, bytes]) -> str | None:
    for name in _SESSION_HEADERS:
        value = headers.get(name)
        if value:
            if name == b"session-id" and b"thread-id" in headers:
                value = value + b"/" + headers[b"thread-id"]
            return value[:_HINT_BYTES].decode("latin-1")
    return None


def _body_hint(fields: dict[str, Any]) -> str | None:
    for name, inner in _SESSION_FIELDS:
        value = fields.get(name)
        if inner and value is not None:
            value = value.get(inner) if is_object(value) else None
        if type(value) is str and value:
            return value[:_HINT_BYTES]
    return None
