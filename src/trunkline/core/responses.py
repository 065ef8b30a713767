"""A body of OpenAI's Responses API as the chat that engines make of it.

Items of `input` become messages, several of them one where they are of one turn. This is what vLLM
0.32 does, item by item; `tools/chat_golden.py` asks it, and golden files hold us to its answers.
Must never: change what it was given, or put a client's words into an error. Read
`adapters/conversation.py` for what becomes of the chat.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from trunkline.core.chats import BadBody, Block, Chat, fields_of, is_list, is_object

MAX_ITEMS = 10_000
_ROLES = frozenset({"user", "system", "developer", "assistant"})
_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_PARTS = frozenset({"input_text", "input_image", "input_file"})
_UNFINISHED = ("in_progress", "incomplete")
_RENDERED_OTHERWISE = ("namespace", "custom")
"""Kinds of tools that engines show to a model in a form of their own."""

Message = dict[str, Any]


class _Unknown(Exception):
    """What an engine makes of this is not known here."""


def as_chat(body: Mapping[str, Any]) -> Chat:
    """Raises BadBody for a body that is none."""
    asked, instructions = body.get("input"), body.get("instructions")
    if not isinstance(asked, str) and not is_list(asked):
        raise BadBody("input", "must be a string or a list of items")
    if is_list(asked) and len(asked) > MAX_ITEMS:
        raise BadBody("input", f"has {len(asked)} items; the limit is {MAX_ITEMS}")
    messages = list[Message]()
    if isinstance(instructions, str) and instructions:
        messages.append({"role": "system", "content": instructions})
    unknown = _add_turns(messages, asked)
    try:
        tools = _tools(body.get("tools"))
    except _Unknown as error:
        unknown, tools = unknown or str(error), None
    if body.get("truncation") == "auto":
        unknown = unknown or "truncation"
    if not messages and not unknown:
        raise BadBody("input", "is empty")
    return Chat(messages=messages, tools=tools, options=_options(body), unknown=unknown)


def _options(body: Mapping[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {"calls_as_given": True}
    effort = fields_of(body.get("reasoning")).get("effort")
    if effort is not None:
        options["reasoning_effort"] = effort
    if _goes_on(body["input"]):
        options |= {"add_generation_prompt": False, "continue_final_message": True}
    return options


def _goes_on(asked: Any) -> bool:  # any JSON
    """Whether the last turn is unfinished, and to be continued."""
    last = fields_of(asked[-1] if is_list(asked) and asked else None)
    is_message = last.get("type", "message") in ("message", "reasoning")
    return is_message and last.get("status") in _UNFINISHED


# -- items -----------------------------------------------------------------------------------------


def _add_turns(messages: list[Message], asked: Any) -> str:  # any JSON
    """What of them is not known. Such an item counts as its own text, so that it weighs something
    and is told from another.
    """
    if isinstance(asked, str):
        messages.append({"role": "user", "content": asked})
        return ""
    unknown = ""
    last: Message | None = None
    for index, item in enumerate(asked):
        if not is_object(item):
            raise BadBody("input", f"[{index}] must be an object")
        try:
            message = _message(item, last, f"[{index}]")
        except _Unknown as error:
            unknown = unknown or str(error)
            message = {"role": "user", "content": json.dumps(item)}
        if message is not None:
            messages.append(message)
            last = message if message["role"] == "assistant" else None
    return unknown


def _message(item: Block, last: Message | None, where: str) -> Message | None:
    """The message of an item; None where it went into the last one, an assistant's."""
    kind = item.get("type", "message")
    if not isinstance(kind, str):
        raise BadBody("input", f"{where}.type must be a string")
    if kind == "function_call":
        return _joined(last, "tool_calls", [_call(item, where)])
    if kind == "reasoning":
        return _joined(last, "reasoning", _thought(item, where))
    if kind in _OUTPUTS and kind != "custom_tool_call_output":
        return {
            "role": "tool",
            "content": _content(item.get("output"), f"{where}.output"),
            "tool_call_id": _text(item, "call_id", where),
        }
    if kind != "message":
        raise _Unknown("items of other kinds")
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise BadBody("input", f"{where}.role must be one of {', '.join(sorted(_ROLES))}")
    if role == "assistant":
        return _joined(last, "content", _said(item.get("content"), where))
    return {"role": role, "content": _content(item.get("content"), f"{where}.content")}


def _joined(last: Message | None, name: str, value: Any) -> Message | None:  # text or calls
    """Into the last message, where that has none of it yet; calls always."""
    if last is not None and name == "tool_calls":
        last.setdefault(name, []).extend(value)
        return None
    if last is not None and last.get(name) is None:
        last[name] = value
        return None
    return {"role": "assistant", name: value}


def _call(item: Block, where: str) -> Block:
    if item.get("namespace"):
        raise _Unknown("tools of other kinds")
    name, arguments = _text(item, "name", where), _text(item, "arguments", where)
    function = {"name": name, "arguments": arguments}
    return {"id": _text(item, "call_id", where), "function": function, "type": "function"}


def _thought(item: Block, where: str) -> str:
    """What it thought; else the summary of that."""
    if item.get("encrypted_content") or not is_list(item.get("summary")):
        raise _Unknown("reasoning that engines do not read")
    for name in ("content", "summary"):
        parts = item.get(name)
        if is_list(parts) and parts:
            return _text(fields_of(parts[0]), "text", f"{where}.{name}[0]")
    return ""


def _said(content: Any, where: str) -> str:  # any JSON
    """Of what an assistant said, engines read the first part."""
    if isinstance(content, str):
        return content
    first = fields_of(content[0] if is_list(content) and content else None)
    if first.get("type") != "output_text":
        raise _Unknown("items of other kinds")
    return _text(first, "text", f"{where}.content[0]")


def _content(content: Any, where: str) -> str | list[Block]:  # any JSON
    if isinstance(content, str):
        return content
    if not is_list(content) or not content:
        raise BadBody("input", f"{where} must be a string or a list of parts")
    return [_part(part, f"{where}[{index}]") for index, part in enumerate(content)]


def _part(part: Any, where: str) -> Block:  # any JSON
    fields = fields_of(part)
    kind = fields.get("type")
    if not isinstance(kind, str) or kind not in _PARTS:
        raise BadBody("input", f"{where} is no part of a known type")
    if kind == "input_text":
        return {"type": "text", "text": _text(fields, "text", where)}
    if kind == "input_image" and isinstance(fields.get("image_url"), str):
        return {"type": "image_url", "image_url": {"url": fields["image_url"]}}
    raise _Unknown("files")


def _text(fields: Block, name: str, where: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise BadBody("input", f"{where}.{name} must be a string")
    return value


# -- tools -----------------------------------------------------------------------------------------


def _tools(tools: Any) -> list[dict[str, Any]] | None:  # any JSON
    """Functions; tools that the engine has itself are not shown to the model."""
    if tools is None or tools == []:
        return None
    if not is_list(tools):
        raise BadBody("tools", "must be a list of objects")
    shown = list[dict[str, Any]]()
    for index, tool in enumerate(tools):
        fields = fields_of(tool)
        kind = fields.get("type")
        if not isinstance(kind, str):
            raise BadBody("tools", f"[{index}] must have a type")
        if kind in _RENDERED_OTHERWISE:
            raise _Unknown("tools of other kinds")
        if kind != "function":
            continue
        if not isinstance(fields.get("name"), str):
            raise BadBody("tools", f"[{index}] must have a name")
        named = ("name", "description", "parameters", "strict", "defer_loading")
        shown.append({"type": "function", "function": {name: fields.get(name) for name in named}})
    return shown
