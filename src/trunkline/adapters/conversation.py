"""A client's messages and tools as the engines hand them to a chat template.

Between the request and the template an engine rewrites much: the order of fields (as its request
classes declare them), arguments of calls (text becomes an object), contents (one text, or a list of
parts, as the template reads them), roles that the template does not know. All of it shows in what a
template prints. This is what vLLM 0.32 does, case by case; `tools/chat_golden.py` asks it, and the
golden files hold us to its answers. Must never: change what it was given. Read `template.py` next.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

Message = Mapping[str, Any]

_TEXT_OF_PART = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
_PART_FIELDS = frozenset({
    "type", "text", "refusal", "thinking", "closed", "name", "uuid", "data", "file", "input_audio",
    "audio_embeds", "audio_url", "image_embeds", "image_pil", "image_url", "video_embeds",
    "video_url", "prompt_cache_breakpoint",
})  # fmt: skip
"""What an engine reads of a part by itself; further fields reach the template beside the text."""
_PLAIN = frozenset({"role", "content"})
_BILLING_LINE = "x-anthropic-billing-header"
"""Some agents begin their system prompt with a line that differs in each request; engines drop
it."""


def as_engines_see(
    messages: Sequence[Message],
    *,
    takes_parts: bool,
    knows_developer: bool,
    calls_as_given: bool = False,
) -> list[dict[str, Any]]:
    """`takes_parts`: the template goes through contents part by part. `calls_as_given`: the fields
    of calls stay in their order. Raises ValueError for a part that is no text where it takes texts
    only.
    """
    seen = [_seen(message, takes_parts, calls_as_given) for message in messages]
    if not knows_developer and any(message.get("role") == "developer" for message in seen):
        return _one_system([_without_developer(message) for message in seen])
    return seen


def tools_as_engines_see(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Fields that are not of a tool's definition are dropped, the others in their order."""
    if tools is None:
        return None
    return [_tool(tool) for tool in tools]


def options_as_engines_see(options: Mapping[str, Any]) -> dict[str, Any]:
    """An effort that was asked for also switches thinking on, or off."""
    seen = {name: value for name, value in options.items() if value not in (None, "auto")}
    if options.get("reasoning_effort") is not None and "enable_thinking" not in seen:
        seen["enable_thinking"] = options["reasoning_effort"] != "none"
    return seen


def texts_of(parts: Iterable[Any]) -> list[str]:  # Any: decoded JSON
    """Raises ValueError for a part that is no text."""
    texts: list[str] = []
    for part in parts:
        text = _text_of(part)
        if text is None:
            raise ValueError("chat template takes text parts only")
        texts.append(text)
    return texts


def _seen(message: Message, takes_parts: bool, calls_as_given: bool) -> dict[str, Any]:
    role, content = message.get("role"), message.get("content")
    if content is None:
        content = []
    elif isinstance(content, str):
        if not takes_parts and message.keys() <= _PLAIN and not content.startswith(_BILLING_LINE):
            return {"role": role, "content": content}  # what nearly all are
        content = [{"type": "text", "text": content}]
    parts = cast("list[Any]", content)
    if role == "system":
        parts = _without_billing_line(parts)
    shown = [_part(one) for one in parts] if takes_parts else texts_of(parts)
    seen: dict[str, Any] = {"role": role}
    seen["content"] = shown if takes_parts else "\n".join(texts_of(shown))
    if role == "assistant":
        _add_calls(seen, message, calls_as_given)
    elif role == "tool":
        if "tool_call_id" in message:
            seen["tool_call_id"] = message["tool_call_id"]
        if all(_text_of(one) is not None for one in shown):
            seen["content"] = "\n".join(texts_of(shown))
    for name in ("name", "task"):
        if isinstance(message.get(name), str):
            seen[name] = message[name]
    if role == "developer":
        seen["tools"] = message.get("tools")
    return seen


def _text_of(part: Any) -> str | None:  # decoded JSON
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        return None
    fields = cast("Message", part)
    kind = fields.get("type")
    named = _TEXT_OF_PART.get(kind) if isinstance(kind, str) else "text"
    text = fields.get(named) if named else None
    return text if isinstance(text, str) else None


def _part(part: Any) -> dict[str, Any]:  # decoded JSON
    """As one that takes parts gets it. What is no text goes as it is: it depends on the model."""
    text = _text_of(part)
    if text is None:
        return dict(cast("Message", part)) if isinstance(part, Mapping) else {"type": "unknown"}
    seen = {"type": "text", "text": text}
    if isinstance(part, Mapping):
        fields = cast("Message", part)
        seen |= {name: value for name, value in fields.items() if name not in _PART_FIELDS}
    return seen


def _without_billing_line(parts: list[Any]) -> list[Any]:
    kept: list[Any] = []
    for part in parts:
        text = _text_of(part)
        if text is None or not text.startswith(_BILLING_LINE):
            kept.append(part)
        elif rest := text.partition("\n")[2]:
            kept.append(rest if isinstance(part, str) else {**part, "text": rest})
    return kept


def _add_calls(seen: dict[str, Any], message: Message, calls_as_given: bool) -> None:
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        seen["tool_calls"] = [_call(one, calls_as_given) for one in cast("list[Any]", calls)]
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is not None:
        seen["reasoning"] = seen["reasoning_content"] = reasoning


def _call(call: Any, is_as_given: bool) -> Any:  # decoded JSON
    if not isinstance(call, Mapping):
        return call
    fields = cast("Message", call)
    function = fields.get("function")
    if not isinstance(function, Mapping):
        return dict(fields)
    order = ("name", "arguments") if is_as_given else ("arguments", "name")
    named = _ordered(cast("Message", function), order)
    named["arguments"] = _arguments(named.get("arguments"))
    return _ordered({**fields, "function": named}, ("id", "function", "type"))


def _arguments(written: Any) -> dict[str, Any]:  # decoded JSON
    """Templates take an object; what is none, or broken, counts as one that is empty."""
    read: Any = written
    if isinstance(written, str):
        try:
            read = json.loads(written) if written else {}
        except (ValueError, RecursionError):
            read = {}
    return cast("dict[str, Any]", read) if isinstance(read, dict) else {}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return dict(tool)
    fields = cast("Message", function)
    deferred = fields.get("defer_loading")
    if deferred is None:
        deferred = tool.get("defer_loading")
    shown: dict[str, Any] = {
        "name": fields.get("name"),
        "description": fields.get("description"),
        "parameters": fields.get("parameters"),
    }
    if fields.get("strict") is not None:
        shown["strict"] = fields["strict"]
    if deferred is not None:
        shown["defer_loading"] = deferred
    seen: dict[str, Any] = {"type": tool.get("type", "function"), "function": shown}
    if tool.get("defer_loading") is not None:
        seen["defer_loading"] = tool["defer_loading"]
    return seen


def _without_developer(message: dict[str, Any]) -> dict[str, Any]:
    if message.get("role") != "developer":
        return message
    return {name: value for name, value in message.items() if name != "tools"} | {"role": "system"}


def _one_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All that a system says, in one message in front, unless it is so already."""
    systems = [number for number, one in enumerate(messages) if one.get("role") == "system"]
    if systems == [0]:
        return messages
    texts: list[str] = []
    for number in systems:
        content = messages[number].get("content", "")
        texts.append(content if isinstance(content, str) else "\n".join(texts_of(content)))
    others = [one for one in messages if one.get("role") != "system"]
    return [{"role": "system", "content": "\n\n".join(filter(None, texts))}, *others]


def _ordered(fields: Message, first: Sequence[str]) -> dict[str, Any]:
    ordered = {name: fields[name] for name in first if name in fields}
    return ordered | {name: value for name, value in fields.items() if name not in first}
