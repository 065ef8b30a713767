"""The body of a chat: its messages, tools and what of its options the template sees.

Owns their shapes. Must never look at sampling parameters; those are in `fields.py`. Read
`intake.py` for who asks, `messages.py` for the other dialect of conversations.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trunkline.gateway.contracts import ChatPrompt
from trunkline.gateway.fields import bad_value
from trunkline.gateway.media import KINDS, require_nameless
from trunkline.gateway.strict_json import is_list, is_object

MAX_MESSAGES = 10_000
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_TEMPLATE_OPTIONS = (
    "add_generation_prompt", "continue_final_message", "reasoning_effort",
)  # fmt: skip
_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})


def chat_prompt(fields: dict[str, Any]) -> ChatPrompt:
    """Raises ClientError."""
    value = fields["messages"]
    if not is_list(value) or not value:
        raise bad_value("messages", "must be a list of at least one message")
    messages = value
    if len(messages) > MAX_MESSAGES:
        raise bad_value("messages", f"has {len(messages)} items; the limit is {MAX_MESSAGES}")
    for index, message in enumerate(messages):
        _check_message(message, index)
    if fields.get("documents") is not None:
        raise bad_value("documents", "is not offered: put the documents into the messages")
    tools: list[dict[str, Any]] | None = fields.get("tools")
    for index, tool in enumerate(tools or ()):
        if type(tool.get("type")) is not str or type(tool.get("function")) is not dict:
            raise bad_value("tools", f"tools[{index}] must have a type and a function")
    options = {name: fields[name] for name in _TEMPLATE_OPTIONS if fields.get(name) is not None}
    return ChatPrompt(messages=messages, tools=tools, template_options=options)


def media_count(messages: list[dict[str, Any]]) -> int:
    """How many pictures, sounds and films there are."""
    count = 0
    for message in messages:
        content = message.get("content")
        if is_list(content):
            count += sum(part["type"] in KINDS for part in content)
    return count


def require_data_urls(messages: list[dict[str, Any]]) -> None:
    """Of pictures of messages that were made of another dialect. Raises ClientError."""
    for part in _parts_of(messages):
        if part["type"] == "image_url" and not part["image_url"]["url"].startswith("data:"):
            raise bad_value("messages", "an image must come with its data; nothing is fetched")


def text_of(prompt: ChatPrompt) -> str:
    """All that is text in its contents."""
    messages = prompt.messages
    whole = [content for one in messages if type(content := one.get("content")) is str]
    return " ".join([*whole, *(str(part.get("text", "")) for part in _parts_of(messages))])


def _parts_of(messages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for message in messages:
        content = message.get("content")
        if is_list(content):
            yield from content


def _check_message(message: Any, index: int) -> None:  # any decoded JSON value
    where = f"messages[{index}]"
    if not is_object(message):
        raise bad_value("messages", f"{where} must be an object")
    role = message.get("role")
    if type(role) is not str or role not in _ROLES:
        raise bad_value("messages", f"{where}.role must be one of {', '.join(sorted(_ROLES))}")
    content = message.get("content")
    if type(content) is str:
        pass
    elif content is None:
        if role != "assistant":
            raise bad_value("messages", f"{where}.content is missing")
    elif is_list(content) and content:
        for part_index, part in enumerate(content):
            _check_part(part, f"{where}.content[{part_index}]")
    else:
        raise bad_value("messages", f"{where}.content must be a string or a list of parts")
    calls = message.get("tool_calls")
    if calls is None:
        return
    if not is_list(calls) or not all(is_object(call) for call in calls):
        raise bad_value("messages", f"{where}.tool_calls must be a list of objects")


def _check_part(part: Any, where: str) -> None:  # any decoded JSON value
    if not is_object(part):
        raise bad_value("messages", f"{where} must be an object")
    require_nameless(part)
    kind = part.get("type")
    if type(kind) is not str:
        raise bad_value("messages", f"{where}.type is missing")
    if kind in _TEXT_PARTS:
        text = part.get("refusal" if kind == "refusal" else "text", part.get(kind))
        if type(text) is not str:
            raise bad_value("messages", f"{where}.text must be a string")
        return
    inner_name = KINDS.get(kind)
    if inner_name is None:
        raise bad_value("messages", f"{where}.type is not known")
    holder = part.get(kind)
    source = holder.get(inner_name) if is_object(holder) else holder
    if type(source) is not str:
        raise bad_value("messages", f"{where}.{kind} must hold its data")
    if inner_name == "url" and not source.startswith("data:"):
        raise bad_value("messages", f"{where}.{kind} must be a data: URL; nothing is fetched")
