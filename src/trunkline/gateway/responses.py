"""The body of `/v1/responses`: OpenAI's dialect of conversations in items.

An engine makes a chat of it, and so do we (`core/responses.py`). What goes on from an earlier
response is known to the worker alone that gave that one; `response_ids.py` finds it. Must never:
let anything be fetched. Read `intake.py` for who asks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trunkline.core.chats import BadBody
from trunkline.core.responses import as_chat
from trunkline.gateway.contracts import ChatPrompt
from trunkline.gateway.fields import bad_value
from trunkline.gateway.media import require_own_data


def responses_prompt(fields: dict[str, Any]) -> ChatPrompt:
    """Raises ClientError."""
    if fields.get("prompt") is not None:
        raise bad_value("prompt", "is not offered: put its text into the instructions")
    try:
        chat = as_chat(fields)
    except BadBody as error:
        raise bad_value(error.param, str(error)) from error
    require_own_data(fields["input"])
    prompt = ChatPrompt(
        messages=chat.messages,
        tools=chat.tools,
        template_options=chat.options,
        unknown=chat.unknown,
    )
    goes_on = fields.get("previous_response_id") is not None
    return replace(prompt, unknown="previous response") if goes_on else prompt
