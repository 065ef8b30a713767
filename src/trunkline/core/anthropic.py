"""A body of Anthropic's Messages API as the chat that engines make of it.

`/v1/messages` is no prompt format of its own: an engine turns it into a chat, and that goes through
the model's template. So the same conversation has the same blocks on both paths, where it is turned
over here as there: this is what vLLM 0.32 does, block by block; `tools/chat_golden.py` asks it, and
golden files hold us to its answers. Must never: change what it was given, or put a client's words
into an error. Read `adapters/conversation.py` for what becomes of the chat.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from trunkline.core.chats import BadBody, Block, Chat, fields_of, is_list, is_object

EFFORTS = ("low", "medium", "high", "xhigh", "max")
NO_EFFORT = "none"
_BILLING_LINE = "x-anthropic-billing-header"
_ROLES = ("user", "assistant", "system")
_BLOCKS = frozenset({
    "text", "image", "tool_use", "tool_result", "tool_reference", "thinking", "redacted_thinking",
    "tool_addition", "tool_removal",
})  # fmt: skip


class Fitting(Protocol):
    """What of a template decides how a body of this API is put to it."""

    @property
    def wants_system_first(self) -> bool:
        """It takes no system message behind others."""
        ...

    @property
    def effort_without_thinking(self) -> str:
        """The `reasoning_effort` that stands for thinking switched off."""
        ...


def as_chat(body: Mapping[str, Any]) -> Chat:
    """Raises BadBody for a body that is none."""
    messages = list(_systems(body.get("system")))
    given = body.get("messages")
    if not is_list(given) or not given:
        raise BadBody("messages", "must be a list of at least one message")
    for index, message in enumerate(given):
        messages += _message(message, f"[{index}]")
    if not messages:
        raise BadBody("messages", "hold nothing")
    tools, unknown = _tools(body.get("tools"), given)
    options, thinks_not = _options(body)
    return Chat(
        messages=messages,
        tools=tools,
        options=options,
        thinks_not=thinks_not,
        unknown=unknown or _unknown_in(given),
    )


def fitted(
    messages: list[dict[str, Any]], options: dict[str, Any], template: Fitting, thinks_not: bool
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The messages and options of a chat that `as_chat` made, for this very template."""
    if template.wants_system_first and any(one["role"] == "system" for one in messages[1:]):
        said = "".join(one["content"] for one in messages if one["role"] == "system")
        others = [one for one in messages if one["role"] != "system"]
        messages = [{"role": "system", "content": said}, *others]
    if thinks_not:
        options = {**options, "reasoning_effort": template.effort_without_thinking}
    return messages, options


# -- messages --------------------------------------------------------------------------------------


def _systems(system: Any) -> Iterator[dict[str, Any]]:  # any JSON
    if system is None:
        return
    if isinstance(system, str):
        texts = [system]
    else:
        texts = _system_texts(_blocks(system, "system", ""))
    if said := "".join(texts):
        yield {"role": "system", "content": said}


def _system_texts(blocks: list[Block]) -> list[str]:
    """Agents put a line of their own in front that differs in each request; engines drop it."""
    texts = (block["text"] for block in blocks if block["type"] == "text" and block.get("text"))
    return [text for text in texts if not text.startswith(_BILLING_LINE)]


def _message(message: Any, where: str) -> list[dict[str, Any]]:  # any JSON
    if not is_object(message):
        raise BadBody("messages", f"{where} must be an object")
    role: Any = message.get("role")  # any JSON
    content: Any = message.get("content")
    if role not in _ROLES:
        raise BadBody("messages", f"{where}.role must be one of {', '.join(_ROLES)}")
    if role == "system":
        if isinstance(content, str):
            texts = [] if content.startswith(_BILLING_LINE) else [content]
        else:
            texts = _system_texts(_blocks(content, "messages", f"{where}.content"))
        said = "".join(texts)
        return [{"role": "system", "content": said}] if said else []
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    return _turn(str(role), _blocks(content, "messages", f"{where}.content"))


def _turn(role: str, blocks: list[Block]) -> list[dict[str, Any]]:
    """A message of blocks; results of tools become messages of their own in front of it."""
    before: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block in blocks:
        match block["type"]:
            case "text" if block.get("text"):
                parts.append({"type": "text", "text": block["text"]})
            case "image":
                parts.append(_image(block["source"]))
            case "thinking" if block.get("thinking") is not None:
                thoughts.append(block["thinking"])
            case "tool_use":
                calls.append(_call(block))
            case "tool_result" if role == "user":
                before += _results(block)
            case "tool_result":
                said = str(block["content"]) if block.get("content") else ""
                parts.append({"type": "text", "text": f"Tool result: {said}"})
            case _:
                pass  # nothing of it is in the prompt
    message: dict[str, Any] = {"role": role}
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    if parts:
        is_one_text = len(parts) == 1 and parts[0]["type"] == "text"
        message["content"] = parts[0]["text"] if is_one_text else parts
    is_empty = role == "user" and "content" not in message
    return before if is_empty else [*before, message]


def _call(block: Block) -> dict[str, Any]:
    arguments = json.dumps(block.get("input") or {})
    function = {"name": block["name"], "arguments": arguments}
    return {"id": block["id"], "type": "function", "function": function}


def _results(block: Block) -> list[dict[str, Any]]:
    """What a tool gave back, and behind it its images as if the user had sent them."""
    content = block.get("content")
    if is_list(content):
        said = "\n".join(item.get("text", "") for item in content if item.get("type") == "text")
        images = [_image(item["source"]) for item in content if item.get("type") == "image"]
    else:
        said, images = content or "", list[dict[str, Any]]()
    told = [{"role": "tool", "tool_call_id": block.get("tool_use_id") or "", "content": said}]
    return [*told, {"role": "user", "content": images}] if images else told


def _image(source: Block) -> dict[str, Any]:
    if source.get("type") == "url":
        url = source["url"]
    else:
        url = f"data:{source.get('media_type', 'image/jpeg')};base64,{source['data']}"
    return {"type": "image_url", "image_url": {"url": url}}


def _unknown_in(messages: list[Any]) -> str:
    """References to tools are written out by engines in ways of their own."""
    for message in messages:
        content = message["content"]
        for block in content if is_list(content) else ():
            inner = block.get("content")
            items = inner if is_list(inner) else []
            if any(fields_of(item).get("type") == "tool_reference" for item in items):
                return "tool references"
    return ""


# -- shapes ----------------------------------------------------------------------------------------


def _blocks(content: Any, param: str, where: str) -> list[Block]:  # any JSON
    if not is_list(content):
        raise BadBody(param, f"{where} must be a string or a list of blocks".lstrip())
    for index, block in enumerate(content):
        _check_block(block, param, f"{where}[{index}]")
    return content


_TEXTS = {
    "text": ("text",), "thinking": ("thinking",), "tool_use": ("id", "name"),
    "tool_result": ("tool_use_id",),
}  # fmt: skip
"""Fields of a block that are texts."""
_NEEDED = frozenset({"id", "name"})


def _check_block(block: Any, param: str, where: str) -> None:  # any JSON
    fields = fields_of(block)
    kind = fields.get("type")
    if not isinstance(kind, str) or kind not in _BLOCKS:
        raise BadBody(param, f"{where} is no block of a known type")
    for name in _TEXTS.get(kind, ()):
        value = fields.get(name)
        if not isinstance(value, str) and (value is not None or name in _NEEDED):
            raise BadBody(param, f"{where}.{name} must be a string")
    if kind == "image":
        _check_source(fields.get("source"), param, f"{where}.source")
    elif kind == "tool_use":
        if not (fields.get("input") is None or is_object(fields["input"])):
            raise BadBody(param, f"{where}.input must be an object")
    elif kind == "tool_result":
        _check_result(fields.get("content"), param, f"{where}.content")
    elif kind in {"tool_addition", "tool_removal"} and not is_object(fields.get("tool")):
        raise BadBody(param, f"{where}.tool must be an object")


def _check_source(source: Any, param: str, where: str) -> None:  # any JSON
    fields = fields_of(source)
    name = "url" if fields.get("type") == "url" else "data"
    media_type = fields.get("media_type", "")
    if not isinstance(fields.get(name), str) or not isinstance(media_type, str):
        raise BadBody(param, f"{where} must hold its {name}")


def _check_result(content: Any, param: str, where: str) -> None:  # any JSON
    if content is None or isinstance(content, str):
        return
    items = content if is_list(content) else [None]
    for index, item in enumerate(items):
        if not is_object(item):
            raise BadBody(param, f"{where} must be a string or a list of blocks")
        fields = item
        if fields.get("type") == "image":
            _check_source(fields.get("source"), param, f"{where}[{index}].source")
        elif not isinstance(fields.get("text", ""), str):
            raise BadBody(param, f"{where}[{index}].text must be a string")


# -- tools and options -----------------------------------------------------------------------------


def _tools(tools: Any, messages: list[Any]) -> tuple[list[dict[str, Any]] | None, str]:
    """As functions of a chat; and what of them is not known here."""
    given: Any = tools
    if tools is None:
        given = list[Any]()
    if not is_list(given):
        raise BadBody("tools", "must be a list of objects")
    named: list[dict[str, Any]] = []
    for index, tool in enumerate(given):
        fields = fields_of(tool)
        if not isinstance(fields.get("name"), str):
            raise BadBody("tools", f"[{index}] must be an object with a name")
        if not is_object(fields.get("input_schema")):
            return None, "built-in tools"
        named.append(_function(fields))
    contents = (message["content"] for message in messages if is_list(message["content"]))
    kinds = {block["type"] for content in contents for block in content}
    if not kinds.isdisjoint({"tool_addition", "tool_removal"}):
        return None, "tools that come and go"
    return named or None, ""


def _function(tool: Block) -> dict[str, Any]:
    schema = tool["input_schema"]
    if "type" not in schema:
        schema = {**schema, "type": "object"}
    function = {
        "name": tool["name"],
        "description": tool.get("description"),
        "parameters": schema,
        "strict": tool.get("strict"),
        "defer_loading": tool.get("defer_loading"),
    }
    return {"type": "function", "function": function}


def _options(body: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    effort = fields_of(body.get("output_config")).get("effort")
    if effort is not None and effort not in EFFORTS:
        raise BadBody("output_config", f"effort must be one of {', '.join(EFFORTS)}")
    options = {} if effort is None else {"reasoning_effort": effort}
    return options, fields_of(body.get("thinking")).get("type") == "disabled"
