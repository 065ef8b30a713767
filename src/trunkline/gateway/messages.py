"""The body of `/v1/messages`: Anthropic's dialect of conversations.

An engine makes a chat of it, and so do we (`core/anthropic.py`), so that a conversation has one
cache on both paths. Where it is not known what an engine makes of a body, nothing is promised of
it. Must never: let anything be fetched. Read `intake.py` for who asks.
"""

from __future__ import annotations

from typing import Any

from trunkline.core.anthropic import as_chat
from trunkline.core.chats import BadBody
from trunkline.gateway.chat import MAX_MESSAGES, require_data_urls
from trunkline.gateway.contracts import ChatPrompt
from trunkline.gateway.fields import bad_value
from trunkline.gateway.strict_json import is_list


def messages_prompt(fields: dict[str, Any]) -> ChatPrompt:
    """Raises ClientError."""
    messages = fields["messages"]
    if is_list(messages) and len(messages) > MAX_MESSAGES:
        raise bad_value("messages", f"has {len(messages)} items; the limit is {MAX_MESSAGES}")
    try:
        chat = as_chat(fields)
    except BadBody as error:
        raise bad_value(error.param, str(error)) from error
    require_data_urls(chat.messages)
    return ChatPrompt(
        messages=chat.messages,
        tools=chat.tools,
        template_options=chat.options,
        is_anthropic=True,
        thinks_not=chat.thinks_not,
        unknown=chat.unknown,
    )
