"""Which body fields the inference endpoints take, and what each may hold.

Owns the allow-list and the bounds of the sampling parameters. What is not named here is never
forwarded. Must never look at messages or prompts; that is `intake.py`, which to read next.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from trunkline.gateway.contracts import ClientError, Refusal
from trunkline.gateway.strict_json import is_list, is_object

FORBIDDEN = frozenset({
    "cache_salt", "cache_salt_regions", "extra_key", "kv_transfer_params", "mm_hashes",
    "prompt_embeds", "api_base", "user_config", "token_data", "session_control",
})  # fmt: skip
"""Would let a client name cache entries, workers or addresses. Never taken, at any nesting, in any
spelling that `spelling.py` knows.
"""

REFUSED = frozenset({"chat_template", "chat_template_kwargs"})
"""Would let a client run its own template."""

HINTS = frozenset({
    "prompt_cache_key", "session_id", "session_params", "previous_response_id", "nvext",
    "vllm_xargs", "cache_control",
})  # fmt: skip
"""Understood here and not forwarded."""

Check = Callable[[Any], str | None]  # any decoded JSON value; the answer says what is wrong with it


def _is_number(value: Any) -> bool:  # any decoded JSON value
    return type(value) is int or (type(value) is float and math.isfinite(value))


def _number(low: float, high: float, *, opens_low: bool = False) -> Check:
    bounds = f"{'above' if opens_low else 'at least'} {low:g} and at most {high:g}"

    def check(value: Any) -> str | None:
        if not _is_number(value):
            return "must be a number"
        is_inside = (low < value if opens_low else low <= value) and value <= high
        return None if is_inside else f"must be {bounds}"

    return check


def _integer(low: int, high: int, also: int | None = None) -> Check:
    def check(value: Any) -> str | None:
        if type(value) is not int:
            return "must be an integer"
        return None if low <= value <= high or value == also else f"must be {low} to {high}"

    return check


def _of_type(kind: type, name: str) -> Check:
    return lambda value: None if type(value) is kind else f"must be {name}"


def _text(max_bytes: int) -> Check:
    def check(value: Any) -> str | None:
        if type(value) is not str:
            return "must be a string"
        return None if len(value.encode()) <= max_bytes else f"must have at most {max_bytes} bytes"

    return check


def _list_of(kind: type, name: str, max_items: int) -> Check:
    def check(value: Any) -> str | None:
        if not is_list(value):
            return f"must be a list of {name}"
        if len(value) > max_items:
            return f"must have at most {max_items} items, not {len(value)}"
        bad = next((i for i, item in enumerate(value) if type(item) is not kind), None)
        return None if bad is None else f"must be a list of {name}; item {bad} is not"

    return check


def _stop(value: Any) -> str | None:
    stops: Any = [value] if type(value) is str else value
    if not is_list(stops):
        return "must be a string or a list of strings"
    if len(stops) > 16:
        return f"must have at most 16 strings, not {len(stops)}"
    for index, stop in enumerate(stops):
        if type(stop) is not str:
            return f"must be a string or a list of strings; item {index} is not"
        if not 1 <= len(stop.encode()) <= 256:
            return f"must have strings of 1 to 256 bytes; item {index} has {len(stop.encode())}"
    return None


def _logit_bias(value: Any) -> str | None:
    if not is_object(value):
        return "must be an object"
    if len(value) > 1_024:
        return f"must have at most 1024 entries, not {len(value)}"
    for name, bias in value.items():
        if not (name.isascii() and name.isdecimal() and len(name) <= 10):
            return "must have token ids as keys"
        if not _is_number(bias) or not -100 <= bias <= 100:
            return "must have numbers from -100 to 100 as values"
    return None


def _stream_options(value: Any) -> str | None:
    if not is_object(value):
        return "must be an object"
    known = {"include_usage", "continuous_usage_stats", "include_obfuscation"}
    for name, flag in value.items():
        if name not in known or type(flag) is not bool:
            return "must hold only include_usage and continuous_usage_stats, true or false"
    return None


def _logprobs(value: Any) -> str | None:
    if type(value) is bool or (type(value) is int and 0 <= value <= 20):
        return None
    return "must be true, false or 0 to 20"


def _string_or_object(value: Any) -> str | None:
    return None if type(value) in {str, dict} else "must be a string or an object"


def _text_or_list(value: Any) -> str | None:
    return None if type(value) in {str, list} else "must be a string or a list of blocks"


_BOOL = _of_type(bool, "true or false")
_OBJECT = _of_type(dict, "an object")
_COUNT = _integer(1, 2**31 - 1)

_SAMPLING: dict[str, Check] = {
    "model": _text(256), "user": _text(512), "stream": _BOOL, "stream_options": _stream_options,
    "temperature": _number(0, 2), "top_p": _number(0, 1, opens_low=True), "min_p": _number(0, 1),
    "top_k": _integer(0, 2**31 - 1, also=-1), "n": _integer(1, 8), "max_tokens": _COUNT,
    "min_tokens": _integer(0, 2**31 - 1), "seed": _integer(-(2**63), 2**63 - 1),
    "frequency_penalty": _number(-2, 2), "presence_penalty": _number(-2, 2),
    "repetition_penalty": _number(0, 10, opens_low=True), "length_penalty": _number(-10, 10),
    "stop": _stop, "stop_token_ids": _list_of(int, "token ids", 256), "logit_bias": _logit_bias,
    "logprobs": _logprobs, "prompt_logprobs": _integer(-1, 20), "ignore_eos": _BOOL,
    "include_stop_str_in_output": _BOOL, "skip_special_tokens": _BOOL,
    "spaces_between_special_tokens": _BOOL, "add_special_tokens": _BOOL, "echo": _BOOL,
    "allowed_token_ids": _list_of(int, "token ids", 4_096),
    "bad_words": _list_of(str, "strings", 64), "response_format": _OBJECT,
    "structured_outputs": _OBJECT, "guided_json": _string_or_object, "guided_regex": _text(4_096),
    "guided_choice": _list_of(str, "strings", 1_024), "guided_grammar": _text(16_384),
    "return_token_ids": _BOOL, "return_tokens_as_token_ids": _BOOL, "metadata": _OBJECT,
}  # fmt: skip

CHAT_FIELDS: dict[str, Check] = {
    **_SAMPLING,
    "logprobs": _BOOL, "top_logprobs": _integer(0, 20), "max_completion_tokens": _COUNT,
    "tool_choice": _string_or_object, "tools": _list_of(dict, "objects", 1_024),
    "parallel_tool_calls": _BOOL, "reasoning_effort": _text(32), "include_reasoning": _BOOL,
    "add_generation_prompt": _BOOL, "continue_final_message": _BOOL,
    "documents": _list_of(dict, "objects", 1_024), "service_tier": _text(32), "store": _BOOL,
}  # fmt: skip

COMPLETION_FIELDS: dict[str, Check] = {
    **_SAMPLING, "suffix": _text(1 << 20), "best_of": _integer(1, 8),
}  # fmt: skip


_ANTHROPIC: dict[str, Check] = {
    "model": _text(256), "system": _text_or_list, "tools": _list_of(dict, "objects", 1_024),
    "tool_choice": _OBJECT, "thinking": _OBJECT, "output_config": _OBJECT,
}  # fmt: skip

MESSAGES_FIELDS: dict[str, Check] = {
    **_ANTHROPIC,
    "max_tokens": _COUNT, "metadata": _OBJECT, "stop_sequences": _stop, "stream": _BOOL,
    "temperature": _number(0, 2), "top_k": _integer(0, 2**31 - 1, also=-1),
    "top_p": _number(0, 1, opens_low=True), "service_tier": _text(32),
}  # fmt: skip

RESPONSES_FIELDS: dict[str, Check] = {
    "background": _BOOL, "include": _list_of(str, "strings", 64), "instructions": _text(8 << 20),
    "max_output_tokens": _COUNT, "max_tool_calls": _COUNT, "metadata": _OBJECT, "prompt": _OBJECT,
    "parallel_tool_calls": _BOOL, "previous_response_id": _text(256), "reasoning": _OBJECT,
    "include_reasoning": _BOOL, "service_tier": _text(32), "store": _BOOL, "text": _OBJECT,
    "tool_choice": _string_or_object, "tools": _list_of(dict, "objects", 1_024),
    "top_logprobs": _integer(0, 20), "truncation": _text(32),
    **{
        name: _SAMPLING[name]
        for name in (
            "model", "user", "stream", "temperature", "top_p", "top_k", "min_p", "seed", "stop",
            "stop_token_ids", "presence_penalty", "frequency_penalty", "repetition_penalty",
            "logit_bias", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output",
            "structured_outputs",
        )
    },
}  # fmt: skip
"""Not `request_id`: we choose what a response is called."""

COUNT_FIELDS: dict[str, Check] = _ANTHROPIC


def check_fields(fields: dict[str, Any], known: dict[str, Check]) -> list[str]:
    """Check every known field that is not null. Returns the names that are not known."""
    unknown: list[str] = []
    for name, value in fields.items():
        check = known.get(name)
        if check is None:
            unknown.append(name)
        elif value is not None and (wrong := check(value)) is not None:
            text = f"{name} {wrong}"
            raise ClientError(Refusal(code="invalid_value", message=text, param=name))
    return unknown


def bad_value(param: str, wrong: str, code: str = "invalid_value") -> ClientError:
    """What is told of a field that cannot be taken."""
    text = wrong if wrong.startswith(param) else f"{param} {wrong}"
    return ClientError(Refusal(code=code, message=text, param=param))
