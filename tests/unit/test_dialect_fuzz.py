"""Any JSON on any path that is read: taken, or refused in words; never an accident, here or where
it is rendered.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from picker_bench import MAX_TOKENS

from trunkline.adapters.template import load_template
from trunkline.adapters.tokenizer import load_tokenizer
from trunkline.gateway.contracts import ClientError, Route
from trunkline.gateway.counters import Counters
from trunkline.gateway.head import RequestHead
from trunkline.gateway.intake import Intake
from trunkline.gateway.tokenise import PromptTokens

FOLDER = Path(__file__).resolve().parents[2] / "src/trunkline/worker/model"
PROMPTS = PromptTokens(load_tokenizer(FOLDER), load_template(FOLDER), max_tokens=MAX_TOKENS)
INTAKE = Intake(max_json_depth=64, strict_fields=False, max_model_len=1 << 20, counters=Counters())
ROUTES = [
    Route.CHAT, Route.MESSAGES, Route.COUNT_TOKENS, Route.RESPONSES, Route.EMBEDDINGS, Route.SCORES,
    Route.TOKENIZE,
]  # fmt: skip
NAMES = st.sampled_from([
    "role", "content", "type", "text", "id", "name", "input", "tool_use_id", "call_id", "summary",
    "arguments", "output", "image_url", "url", "source", "data", "media_type", "thinking", "tool",
    "function", "parameters", "input_schema", "tool_calls", "status", "cache_control", "ttl",
    "reasoning", "strict", "effort", "system",
])  # fmt: skip
VALUES = st.sampled_from([
    "user", "assistant", "system", "developer", "tool", "text", "image", "image_url", "tool_use",
    "tool_result", "thinking", "input_text", "output_text", "input_image", "function_call",
    "function_call_output", "reasoning", "message", "function", "base64", "url", "data:a,b",
    "{}", "[1]", "incomplete", "high", "1h", "é",
])  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 3) | VALUES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=6),
    max_leaves=25,
)
TEXT = st.fixed_dictionaries({"type": st.just("text"), "text": VALUES})
MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system", "tool"]),
        "content": VALUES | st.lists(TEXT | st.dictionaries(NAMES, JSON, max_size=4), max_size=3),
    },
    optional={"tool_calls": JSON, "reasoning": JSON, "status": JSON, "name": JSON},
)
BODY = st.fixed_dictionaries(
    {"max_tokens": st.just(1)},
    optional={
        "messages": st.lists(MESSAGE, max_size=3) | JSON, "input": st.lists(MESSAGE | JSON) | JSON,
        "system": JSON, "tools": JSON, "instructions": JSON, "reasoning": JSON, "thinking": JSON,
        "output_config": JSON, "metadata": JSON, "query": JSON, "documents": JSON,
        "truncation": JSON, "previous_response_id": JSON, "vllm_xargs": JSON, "nvext": JSON,
        "cache_control": JSON, "reasoning_effort": JSON, "session_params": JSON,
    },
)  # fmt: skip


@pytest.mark.parametrize("route", ROUTES, ids=lambda one: one.value)
def test_c78_any_body_is_taken_or_refused_and_what_is_taken_can_be_read(route: Route) -> None:
    head = RequestHead(
        method="POST", target=b"/v1/x", minor=1, headers={b"content-type": b"application/json"},
        content_length=1, is_chunked=False, keeps_alive=True,
    )  # fmt: skip

    @given(BODY)
    def holds(body: dict[str, Any]) -> None:
        try:
            request = INTAKE.request(head, route, json.dumps(body).encode(), "r")
        except ClientError:
            return
        if request.prompt is not None:
            with contextlib.suppress(ValueError, ClientError):
                assert PROMPTS.tokens(request) is not None

    holds()
