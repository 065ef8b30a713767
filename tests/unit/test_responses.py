"""Bodies of the Responses API: shapes that are refused, what is not known, names of responses, and
no surprise for any JSON.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from picker_bench import W0, W1, Bench, ids, request

from trunkline.core.chats import BadBody
from trunkline.core.responses import MAX_ITEMS, as_chat
from trunkline.gateway.contracts import OPEN_GRANT, ClientError, InferenceRequest, Pick, Route


def user(content: Any) -> list[dict[str, Any]]:  # any JSON
    return [{"role": "user", "content": content}]


BAD: list[tuple[Any, str]] = [
    (None, "input must"), ({}, "input must"), ([], "input is empty"), ([1], "input[0]"),
    ([{}], "input[0].role"), ([{"role": []}], "input[0].role"), ([{"type": []}], "input[0].type"),
    (user(None), "input[0].content"),
    (user([]), "input[0].content"), (user([{"type": 1}]), "input[0].content[0]"),
    (user([{"type": "input_text"}]), "input[0].content[0].text"),
    ([{"type": "function_call", "name": "f", "arguments": "{}"}], "input[0].call_id"),
    ([{"type": "function_call", "call_id": "1", "arguments": "{}"}], "input[0].name"),
    ([{"type": "function_call", "call_id": "1", "name": "f"}], "input[0].arguments"),
    ([{"type": "function_call_output", "call_id": "1"}], "input[0].output"),
    ([{"type": "function_call_output", "output": "x"}], "input[0].call_id"),
    ([{"type": "reasoning", "summary": [1]}], "input[0].summary[0].text"),
    (user("x") * (MAX_ITEMS + 1), "limit"),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "where"), BAD, ids=range(len(BAD)))
def test_c78_a_body_that_is_none_is_refused_with_its_place(asked: Any, where: str) -> None:
    with pytest.raises(BadBody) as caught:
        as_chat({"input": asked})
    assert where in str(caught.value)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"input": "x", "truncation": "auto"}, "truncation"),
        ({"input": user([{"type": "input_file", "file_id": "f"}])}, "files"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "items of other kinds"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "reasoning"),
        ({"input": "x", "tools": [{"type": "custom", "name": "f"}]}, "tools of other kinds"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_what_engines_make_in_ways_of_their_own_is_said_to_be_unknown(
    body: dict[str, Any], why: str
) -> None:
    assert why in as_chat(body).unknown


@pytest.mark.parametrize("kind", [[], {}, None, 1])
def test_c78_a_type_that_is_no_text_is_no_accident(kind: Any) -> None:
    for body in ({"input": [{"type": kind}]}, {"input": "x", "tools": [{"type": kind}]}):
        with pytest.raises(BadBody):
            as_chat(body)


def test_items_that_are_not_known_are_told_apart_and_weigh_something() -> None:
    known = user("a text")
    first = as_chat({"input": [*known, {"type": "item_reference", "id": "x"}]})
    second = as_chat({"input": [*known, {"type": "item_reference", "id": "y"}]})
    assert first.messages[0] == second.messages[0] == known[0]
    assert first.messages != second.messages


def test_calls_of_one_turn_are_gathered_in_place() -> None:
    call = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"}
    (message,) = as_chat({"input": [call] * 3}).messages
    calls = message["tool_calls"]
    (grown,) = as_chat({"input": [call] * MAX_ITEMS}).messages
    assert (len(calls), len(grown["tool_calls"])) == (3, MAX_ITEMS)


WORDS = st.sampled_from([
    "role", "content", "type", "text", "user", "assistant", "system", "developer", "message",
    "function_call", "function_call_output", "reasoning", "summary", "input_text", "output_text",
    "input_image", "image_url", "call_id", "name", "arguments", "output", "status", "incomplete",
    "function", "tools", "effort", "custom_tool_call", "id",
])  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.floats(allow_nan=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=5),
    max_leaves=30,
)
KINDS = ["message", "function_call", "function_call_output", "reasoning", "custom_tool_call"]
ITEMS = st.fixed_dictionaries(
    {"type": st.sampled_from(KINDS) | JSON},
    optional={
        "role": WORDS, "content": JSON, "call_id": WORDS, "name": WORDS, "arguments": WORDS,
        "output": JSON, "summary": JSON, "status": WORDS,
    },
)  # fmt: skip


@given(st.lists(ITEMS | JSON, max_size=4) | JSON, JSON, JSON, JSON)
def test_c78_any_json_is_read_or_refused_and_never_an_accident(
    asked: Any, tools: Any, reasoning: Any, instructions: Any
) -> None:
    body = {"input": asked, "tools": tools, "reasoning": reasoning, "instructions": instructions}
    try:
        chat = as_chat(body)
    except BadBody:
        return
    assert chat.messages or chat.unknown
    assert all(message["role"] for message in chat.messages)


# -- names -----------------------------------------------------------------------------------------


def response(previous: str = "") -> InferenceRequest:
    asked = request(ids(3))
    return replace(asked, route=Route.RESPONSES, previous_response=previous)


def picked(bench: Bench, asked: InferenceRequest) -> Pick:
    found = bench.picker.pick(asked, frozenset())
    assert isinstance(found, Pick)
    return found


def named(pick: Pick) -> str:
    return json.loads(pick.body)["request_id"]


def test_what_goes_on_goes_to_the_worker_that_gave_what_was_before() -> None:
    bench = Bench(W0, W1)
    for _ in range(8):
        first = picked(bench, response())
        assert picked(bench, response(named(first))).worker == first.worker


def test_every_attempt_has_a_name_of_its_own_and_other_routes_have_none() -> None:
    bench = Bench(W0)
    assert len({named(picked(bench, response())) for _ in range(8)}) == 8
    assert "request_id" not in json.loads(picked(bench, request(ids(3))).body)


@pytest.mark.parametrize("name", ["x", "resp_" + "0" * 56, "resp_" + "g" * 56, "resp_"])
def test_a_name_that_is_not_the_callers_is_unknown_where_there_are_tenants(name: str) -> None:
    bench = Bench(W0)
    asked = response(name)
    assert picked(bench, asked).worker == W0, "without tenants its worker will know"
    someone = replace(OPEN_GRANT.principal, auth_method="key")
    asked.grant = replace(OPEN_GRANT, principal=someone)
    with pytest.raises(ClientError) as caught:
        bench.picker.pick(asked, frozenset())
    assert caught.value.refusal.code == "previous_response_not_found"


def test_a_name_means_nothing_where_nothing_is_kept() -> None:
    bench = Bench(W0, W1)
    name = named(picked(bench, response()))
    asked = response(name)
    someone = replace(OPEN_GRANT.principal, auth_method="key")
    asked.grant = replace(OPEN_GRANT.unshared(), principal=someone)
    with pytest.raises(ClientError):
        bench.picker.pick(asked, frozenset())
