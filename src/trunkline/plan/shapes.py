"""One decoded object of a log -> a `Call`: block ids, a request body, or a record around one.

Knows Mooncake's and Qwen-Bailian's fields, OpenAI's bodies, and what LiteLLM, batch files and
proxies of one's own wrap around them: names of fields are tried in a fixed order, outer ones first.
Must never: put what a field holds into an error. Read `reader.py` next.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from math import isfinite
from typing import Any, cast

import msgspec

from trunkline.plan.calls import Call, Malformed, Reject
from trunkline.plan.naming import Namer

TIMES = (
    *("timestamp", "startTime", "start_time", "arrival_time", "request_time", "created"),
    *("created_at", "createdAt", "time", "ts", "@timestamp", "date", "datetime"),
)
TENANTS = (
    *("tenant", "tenant_id", "team_id", "organization_id", "organization", "org_id"),
    *("user_api_key_team_id", "api_key", "user_api_key_hash"),
)
USERS = ("end_user", "user", "user_id", "user_api_key_end_user_id", "user_api_key_user_id")
SESSIONS = (
    *("session_id", "litellm_session_id", "conversation_id", "thread_id", "prompt_cache_key"),
)
WRAPPINGS = (
    *("body", "request", "request_body", "proxy_server_request", "payload", "params"),
    *("requestBody", "kwargs", "data", "json", "input", "message", "details"),
)
PROMPTS = ("messages", "prompt", "input")
PACKED = ("messages", "input", "tools", "functions")
"""What may be JSON inside a string. A prompt is never: it may look like it."""
MAX_WRAPPINGS = 4
MAX_TOKENS = 1 << 27
MAX_NAME = 256
MAX_CHATS = 1 << 17
EPOCHS = ((1e17, 1e-6), (1e14, 1e-3), (1e11, 1.0), (1e8, 1e3))
"""A number from one of these on is a time since 1970, of so many ms; below, since the log began."""
_MAX_EPOCH_NS = 1e19

Fields = Mapping[str, Any]


class Shapes:
    """Reads the objects of one log."""

    def __init__(
        self, namer: Namer, *, block_tokens: int, tenant_field: str | None, relative_ms: float
    ) -> None:
        """`block_tokens`: of block ids. `relative_ms`: the unit of times since the log began."""
        self._namer = namer
        self._block_tokens = block_tokens
        self._tenants = (tenant_field,) if tenant_field else TENANTS
        self._times = Times(relative_ms)
        self._roots: OrderedDict[int, int] = OrderedDict()

    def call(self, fields: Fields) -> Call:
        """Raises Malformed."""
        if "hash_ids" in fields:
            return self._of_ids(fields)
        layers = list(_layers(fields, MAX_WRAPPINGS))
        body = next((layer for layer in layers if _has_prompt(layer)), None)
        if body is None:
            raise Malformed(Reject.NO_PROMPT)
        layers += [found for layer in layers if (found := _object(layer.get("metadata")))]
        model = self._name(layers, ("model", "model_name")) or ""
        unpacked = {name: _unpacked(body[name]) for name in PACKED if name in body}
        tokens, blocks = self._namer.prompt({**body, **unpacked}, model)
        usage = _usage(layers)
        return Call(
            at_ms=self._time(layers),
            tokens=min(tokens, MAX_TOKENS),
            output_tokens=_output_tokens(layers, usage),
            blocks=blocks,
            block_tokens=self._namer.block_tokens,
            tenant=self._name(layers, self._tenants),
            user=self._name(layers, USERS),
            session=self._name(layers, SESSIONS),
            model=model or None,
            usage_tokens=_count(usage, "prompt_tokens", "input_tokens"),
        )

    def _of_ids(self, fields: Fields) -> Call:
        tokens = _count(fields, "input_length")
        if not tokens:
            raise Malformed(Reject.BAD_COUNT)
        size = self._block_tokens
        blocks = -(-tokens // size)
        try:
            ids = array("Q", fields["hash_ids"])
        except (TypeError, OverflowError) as error:
            raise Malformed(Reject.BAD_BLOCKS) from error
        if not blocks - 1 <= len(ids) <= blocks:
            raise Malformed(Reject.BAD_BLOCKS)
        session = self._name([fields], SESSIONS)
        if session is None and "chat_id" in fields:
            session = self._chat_root(fields)
        return Call(
            at_ms=self._time([fields]),
            tokens=tokens,
            output_tokens=_count(fields, "output_length") or 0,
            blocks=ids[: tokens // size],
            block_tokens=size,
            tenant=self._name([fields], self._tenants),
            user=self._name([fields], USERS),
            session=session,
            model=self._name([fields], ("model",)),
        )

    def _chat_root(self, fields: Fields) -> str:
        """Bailian's chats as sessions: that of the first chat they go on from."""
        chat, parent = fields["chat_id"], fields.get("parent_chat_id")
        if type(chat) is not int or not (parent is None or type(parent) is int):
            raise Malformed(Reject.BAD_NAME)
        root = chat if parent is None or parent < 0 else self._roots.get(parent, parent)
        self._roots[chat] = root
        if len(self._roots) > MAX_CHATS:
            self._roots.popitem(last=False)
        return str(root)

    def _time(self, layers: list[Fields]) -> float | None:
        for layer in layers:
            for name in TIMES:
                value = layer.get(name)
                if value is not None and value != "":
                    return self._times.ms(value)
        return None

    def _name(self, layers: list[Fields], names: tuple[str, ...]) -> str | None:
        for layer in layers:
            for name in names:
                value = layer.get(name)
                if value is None or value == "":
                    continue
                if type(value) is int:
                    return str(value)
                if type(value) is not str or len(value) > MAX_NAME:
                    raise Malformed(Reject.BAD_NAME)
                return value
        return None


class Times:
    """Times of one log. The first number above 0 tells the unit of all: a trace of a week in ms
    comes to look like seconds since 1970.
    """

    def __init__(self, relative_ms: float) -> None:
        self._relative_ms = relative_ms
        self._unit_ms: float | None = None

    def ms(self, value: object) -> float:
        """A time of any usual kind. Raises Malformed."""
        if isinstance(value, str):
            try:
                number = float(value)
            except ValueError:
                return _calendar_ms(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            try:
                number = float(value)
            except OverflowError as error:
                raise Malformed(Reject.BAD_TIME) from error
        else:
            raise Malformed(Reject.BAD_TIME)
        if not isfinite(number) or not 0.0 <= number < _MAX_EPOCH_NS:
            raise Malformed(Reject.BAD_TIME)
        if self._unit_ms is None and number > 0.0:
            units = (unit_ms for least, unit_ms in EPOCHS if number >= least)
            self._unit_ms = next(units, self._relative_ms)
        return number * (self._unit_ms or 0.0)


def _calendar_ms(text: str) -> float:
    """`2026-11-30T12:00:00.123Z` and its kin; without a zone it is UTC."""
    try:
        at = datetime.fromisoformat(text.strip().removesuffix(" UTC"))
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1e3
    except (ValueError, OverflowError) as error:
        raise Malformed(Reject.BAD_TIME) from error


def _layers(fields: Fields, depth: int) -> Iterator[Fields]:
    """The object and what is wrapped in it, outer ones first."""
    yield fields
    if depth:
        for name in WRAPPINGS:
            inner = _object(fields.get(name))
            if inner:
                yield from _layers(inner, depth - 1)


def _has_prompt(layer: Fields) -> bool:
    for name in PROMPTS:
        value = layer.get(name)
        if name in PACKED:
            value = _unpacked(value)
        if (isinstance(value, str) and value) or (isinstance(value, list) and value):
            return True
    return False


def _object(value: object) -> Fields | None:
    value = _unpacked(value)
    return cast("Fields", value) if isinstance(value, dict) else None


def _unpacked(value: object) -> object:
    """JSON inside a string, as spend logs and CSV columns have it; anything else as it is."""
    if not isinstance(value, str) or not value.startswith(("{", "[")):
        return value
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return value


def _usage(layers: list[Fields]) -> Fields:
    for layer in layers:
        for holder in (layer, _object(layer.get("response")) or {}):
            usage = _object(holder.get("usage"))
            if usage:
                return usage
    nothing: Fields = {}
    return next((layer for layer in layers if "prompt_tokens" in layer), nothing)


def _count(fields: Fields, *names: str) -> int | None:
    """The first of these that is a number of tokens; None for none of them."""
    for name in names:
        value = fields.get(name)
        if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10:
            value = int(value)
        if value is None:
            continue
        if type(value) is not int or not 0 <= value <= MAX_TOKENS:
            raise Malformed(Reject.BAD_COUNT)
        return value
    return None


def _output_tokens(layers: list[Fields], usage: Fields) -> int:
    found = _count(usage, "completion_tokens", "output_tokens")
    if found is not None:
        return found
    for layer in layers:
        asked = _count(layer, "max_completion_tokens", "max_tokens", "max_output_tokens")
        if asked is not None:
            return asked
    return 16
