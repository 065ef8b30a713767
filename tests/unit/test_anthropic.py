"""Bodies of Anthropic's API: shapes that are refused, what is not known, and no surprise for any
JSON.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.core.anthropic import as_chat
from trunkline.core.chats import BadBody
from trunkline.gateway.contracts import ClientError
from trunkline.gateway.messages import messages_prompt

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
TOOL = {"name": "f", "input_schema": {}}


def user(content: Any) -> list[dict[str, Any]]:  # any JSON
    return [{"role": "user", "content": content}]


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "messages"), ({"messages": []}, "messages"), ({"messages": {}}, "messages"),
    ({"messages": ["x"]}, "messages[0]"), ({"messages": [{"role": 1}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].role"),
    ({"messages": user(None)}, "messages[0].content"),
    ({"messages": user([1])}, "messages[0].content[0]"),
    ({"messages": user([{"type": []}])}, "messages[0].content[0]"),
    ({"messages": user([{"type": "text", "text": 1}])}, "content[0].text"),
    ({"messages": user([{"type": "thinking", "thinking": {}}])}, "content[0].thinking"),
    ({"messages": user([{"type": "tool_use", "id": "1"}])}, "content[0].name"),
    ({"messages": user([{"type": "tool_use", "id": "1", "name": "f", "input": 1}])}, "input"),
    ({"messages": user([{"type": "tool_result", "content": 1}])}, "content[0].content"),
    ({"messages": user([{"type": "tool_result", "content": [1]}])}, "content[0].content"),
    ({"messages": user([{"type": "tool_result", "content": [{"text": 1}]}])}, "content[0].text"),
    ({"messages": user([{"type": "image", "source": None}])}, "content[0].source"),
    ({"messages": user([{"type": "image", "source": {"type": "url"}}])}, "must hold its url"),
    ({"messages": [{"role": "system", "content": [{"type": "tool_addition"}]}]}, "tool"),
    ({"messages": user([{"type": "text", "text": ""}])}, "messages hold nothing"),
    ({"system": [1], "messages": user("x")}, "system[0]"),
    ({"system": {}, "messages": user("x")}, "system must"),
    ({"tools": "x", "messages": user("x")}, "tools must"),
    ({"tools": [{"name": 1}], "messages": user("x")}, "tools[0]"),
    ({"output_config": {"effort": "huge"}, "messages": user("x")}, "output_config effort"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "where"), BAD, ids=range(len(BAD)))
def test_c78_a_body_that_is_none_is_refused_with_its_place(
    body: dict[str, Any], where: str
) -> None:
    with pytest.raises(BadBody) as caught:
        as_chat(body)
    assert where in str(caught.value)
    assert str(caught.value).startswith(caught.value.param)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "built-in tools"),
        ({"messages": user([{"type": "tool_result", "content": [
            {"type": "tool_reference", "tool_name": "f"}]}])}, "tool references"),
        ({"tools": [TOOL], "messages": [*user("x"), {"role": "system", "content": [
            {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "f"}}]}]},
         "tools that come and go"),
    ],
    ids=["built-in", "reference", "removal"],
)  # fmt: skip
def test_what_engines_make_in_ways_of_their_own_is_said_to_be_unknown(
    more: dict[str, Any], why: str
) -> None:
    assert as_chat({"messages": user("x"), **more}).unknown == why


def test_an_image_is_taken_with_its_data_and_never_fetched() -> None:
    assert messages_prompt({"messages": user([IMAGE])}).messages[0]["content"][0] == {
        "type": "image_url",
        "image_url": {"url": "data:image/png;base64,AAAA"},
    }
    for where in ("plain", "result"):
        url = {"type": "image", "source": {"type": "url", "url": "http://169.254.169.254/x"}}
        block = url if where == "plain" else {"type": "tool_result", "content": [url]}
        with pytest.raises(ClientError, match="nothing is fetched"):
            messages_prompt({"messages": user([block])})


WORDS = st.sampled_from([
    "messages", "role", "content", "type", "text", "user", "assistant", "system", "tool_use",
    "tool_result", "image", "source", "base64", "url", "data", "id", "name", "input", "thinking",
    "tools", "input_schema", "tool_use_id", "tool_addition", "tool", "output_config", "effort",
])  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.floats(allow_nan=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=5),
    max_leaves=30,
)
BLOCKS = st.dictionaries(WORDS, JSON, max_size=4).flatmap(
    lambda rest: st.sampled_from(
        [
            "text",
            "image",
            "tool_use",
            "tool_result",
            "thinking",
            "redacted_thinking",
            "tool_removal",
        ]
    ).map(lambda kind: {**rest, "type": kind})
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "system"]),
            "content": st.text(max_size=5) | st.lists(BLOCKS | JSON, max_size=3),
        }
    ),
    max_size=3,
)


@given(st.dictionaries(WORDS, JSON, max_size=6), MESSAGES | JSON)
def test_c78_any_json_is_read_or_refused_and_never_an_accident(
    body: dict[str, Any], messages: Any
) -> None:
    try:
        chat = as_chat({**body, "messages": messages})
    except BadBody:
        return
    assert chat.messages
    assert all(message["role"] for message in chat.messages)
