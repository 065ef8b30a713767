"""What the inference endpoints take from a client, field by field, and what never goes further."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest

from trunkline.gateway.chat import MAX_MESSAGES
from trunkline.gateway.contracts import ChatPrompt, ClientError, InferenceRequest, Route
from trunkline.gateway.counters import Counters
from trunkline.gateway.head import RequestHead
from trunkline.gateway.intake import COPY_TOKENS, Intake
from trunkline.gateway.routes import Local, model_in, route_of, unknown_path

HELLO = [{"role": "user", "content": "hello"}]
MAX_MODEL_LEN = 1_000


def take(
    body: Any,  # bytes, or something to encode
    route: Route = Route.CHAT,
    *,
    is_strict: bool = False,
    headers: dict[bytes, bytes] | None = None,
    counters: Counters | None = None,
    vocab_size: int = 1 << 32,
) -> InferenceRequest:
    intake = Intake(
        max_json_depth=64, strict_fields=is_strict, max_model_len=MAX_MODEL_LEN,
        counters=counters or Counters(), vocab_size_of=lambda _model: vocab_size,
    )  # fmt: skip
    head = RequestHead(
        method="POST", target=b"/v1/x", minor=1, headers=headers or {}, content_length=0,
        is_chunked=False, keeps_alive=True,
    )  # fmt: skip
    encoded = body if isinstance(body, bytes) else json.dumps(body).encode()
    return intake.request(head, route, encoded, "r")


def chat(**fields: Any) -> dict[str, Any]:  # any JSON
    return {"model": "m", "messages": HELLO, **fields}


BAD_FIELDS: list[tuple[str, Any]] = [
    ("temperature", 2.1), ("temperature", -0.1), ("temperature", "1"), ("temperature", True),
    ("temperature", 1e308), ("temperature", [1]), ("top_p", 0), ("top_p", 1.1), ("top_p", "x"),
    ("min_p", -1), ("top_k", 1.0), ("top_k", -2), ("n", 0), ("n", 9), ("n", 1.0), ("n", True),
    ("n", "1"), ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", "9"),
    ("max_tokens", True), ("max_tokens", 2**63), ("max_tokens", 10**400),
    ("max_tokens", MAX_MODEL_LEN + 1), ("max_completion_tokens", 0), ("seed", 2**63),
    ("seed", 1.0), ("presence_penalty", 2.1), ("frequency_penalty", -3),
    ("repetition_penalty", 0), ("stream", 1), ("stream", "true"), ("stream_options", []),
    ("stream_options", {"include_usage": 1}), ("stream_options", {"x": True}),
    ("stop", [""]), ("stop", ""), ("stop", ["x"] * 17), ("stop", ["x" * 257]), ("stop", [1]),
    ("stop", ["\u20ac" * 100]), ("stop", 1), ("stop", {}), ("stop", ["y"] * 10_000),
    ("stop_token_ids", [1.0]), ("stop_token_ids", [True]), ("stop_token_ids", [1] * 257),
    ("logit_bias", []), ("logit_bias", {"a": 1}), ("logit_bias", {"1": 101}),
    ("logit_bias", {"1": True}), ("logit_bias", {"-1": 1}), ("logit_bias", {"\u0661": 1}),
    ("logit_bias", {str(i): 1 for i in range(1_025)}), ("logprobs", 1), ("top_logprobs", 21),
    ("top_logprobs", -1), ("tools", {}), ("tools", [1]), ("tools", [{}]),
    ("tools", [{"type": "function"}]), ("tools", [{"type": 1, "function": {}}]),
    ("tools", [{"type": "function", "function": {}}] * 1_025), ("tool_choice", 1), ("user", 1),
    ("user", "x" * 513), ("model", 1), ("model", "x" * 257), ("model", ["m"]),
    ("response_format", "json"), ("metadata", "x"), ("guided_regex", "x" * 4_097),
    ("guided_choice", [1]), ("parallel_tool_calls", "yes"), ("ignore_eos", 0),
    ("chat_template", "{{ x }}"), ("chat_template_kwargs", {"a": 1}), ("reasoning_effort", 1),
    ("add_generation_prompt", "yes"), ("documents", "x"), ("documents", [{"text": "a"}]),
    ("documents", []),
    ("allowed_token_ids", [1] * 4_097),
    ("bad_words", ["x"] * 65), ("prompt_logprobs", 21), ("min_tokens", -1),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD_FIELDS)
def test_a_field_out_of_bounds_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ClientError) as caught:
        take(chat(**{name: value}))

    refusal = caught.value.refusal
    assert refusal.status == 400
    assert refusal.param is not None
    assert name.startswith(refusal.param) or refusal.param == "max_tokens"
    assert len(refusal.message) < 200


@pytest.mark.parametrize("text", ["-0", "-0.0", "-0e3"])
def test_a_negative_zero_is_no_number(text: str) -> None:
    body = f'{{"model":"m","messages":[{{"role":"user","content":"x"}}],"temperature":{text}}}'

    with pytest.raises(ClientError):
        take(body.encode())


GOOD_FIELDS: list[tuple[str, Any]] = [
    ("temperature", 0), ("temperature", 2.0), ("temperature", None), ("top_p", 1), ("n", 8),
    ("top_k", -1), ("max_tokens", 1), ("max_tokens", None), ("seed", -(2**63)), ("stop", "x"),
    ("stop", ["x"] * 16), ("stop", None), ("logit_bias", {"50256": -100}), ("logprobs", True),
    ("stream_options", {"include_usage": True}), ("tools", []), ("tool_choice", "auto"),
    ("stream", False), ("response_format", {"type": "json_object"}), ("seed", 0),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), GOOD_FIELDS)
def test_a_field_inside_its_bounds_goes_through_unchanged(name: str, value: Any) -> None:
    body = json.dumps(chat(**{name: value})).encode()

    assert take(body, is_strict=True).body == body


BAD_MESSAGES: list[Any] = [
    None, "x", {}, [], [1], [None], ["x"], [[]], [{}], [{"role": "user"}],
    [{"role": "wizard", "content": "x"}], [{"role": 1, "content": "x"}], [{"content": "x"}],
    [{"role": "User", "content": "x"}], [{"role": "user", "content": 1}],
    [{"role": "user", "content": None}], [{"role": "user", "content": {}}],
    [{"role": "user", "content": []}], [{"role": "user", "content": ["x"]}],
    [{"role": "user", "content": [{"text": "x"}]}],
    [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "user", "content": [{"type": "text", "text": 1}]}],
    [{"role": "user", "content": [{"type": "exec", "text": "x"}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": "http://169.254.169.254/"}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://x/y"}}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc"}}]}],
    [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "//x"}}]}],
    [{"role": "user", "content": [{"type": "image_url"}]}],
    [{"role": "assistant", "content": None, "tool_calls": {}}],
    [{"role": "assistant", "tool_calls": ["x"]}],
    HELLO * (MAX_MESSAGES + 1),
]  # fmt: skip


@pytest.mark.parametrize("messages", BAD_MESSAGES, ids=range(len(BAD_MESSAGES)))
def test_malformed_messages_are_refused(messages: Any) -> None:
    with pytest.raises(ClientError) as caught:
        take({"model": "m", "messages": messages})

    assert caught.value.refusal.param == "messages"


def test_messages_of_every_kind_reach_the_template_as_they_came() -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "\U0001f600"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        {"role": "tool", "content": "t", "tool_call_id": "1"},
    ]  # fmt: skip
    tools = [{"type": "function", "function": {"name": "f"}}]

    request = take(chat(messages=messages, tools=tools, add_generation_prompt=False, stream=True))

    assert isinstance(request.prompt, ChatPrompt)
    assert request.prompt.messages == messages
    assert request.prompt.tools == tools
    assert request.prompt.template_options == {"add_generation_prompt": False}
    assert request.is_stream


@pytest.mark.parametrize("url", ["data:cat", "data:" + "A" * 70_000])
def test_a_prompt_with_an_image_is_read_for_what_is_known_of_it(url: str) -> None:
    """What its keys are is in `test_media.py`."""
    text = {"type": "text", "text": "what is this?"}
    image = {"type": "image_url", "image_url": {"url": url}}
    request = take(chat(messages=[{"role": "user", "content": [text, image]}]))
    assert isinstance(request.prompt, ChatPrompt)
    assert request.prompt.has_media
    assert request.approximate == "media"
    assert request.further_tokens == 1_000 - 9, "and rates are charged by an estimate"
    assert request.is_object, "it bears our salt all the same"
    assert url.encode() in request.body


BAD_PROMPTS: list[tuple[Any, str]] = [
    (None, "prompt must"), (1, "prompt must"), ({}, "prompt must"), ("", "empty"), ([], "empty"),
    ([1, -1], "prompt[1]"), ([1, 2.0], "prompt[1]"), ([1, True], "prompt[1]"),
    ([True, 1], "prompt[0]"), ([1, 2**63], "prompt[1]"), ([1, 2**32], "prompt[1]"),
    ([1, None], "prompt[1]"), ([1, "x"], "prompt[1]"), ([1, [1]], "prompt[1]"),
    ([None], "prompt[0]"), ([{}], "prompt[0]"), (["x", 1], "item 1"), ([[1], "x"], "item 1"),
    ([[1], [2, -1]], "prompt[1][1]"), ([[1], []], "index 1"), (["x", ""], "index 1"),
    ([[[1]]], "prompt[0][0]"), ([1] * (MAX_MODEL_LEN + 1), "1001 token ids"),
    ([1] * 100_000, "100000 token ids"), ([["x"]], "prompt[0][0]"), (["x"] * 257, "257 prompts"),
    ([[1]] * 257, "257 prompts"),
]  # fmt: skip


@pytest.mark.parametrize(("prompt", "where"), BAD_PROMPTS, ids=range(len(BAD_PROMPTS)))
def test_a_prompt_that_is_none_is_refused_with_its_place(prompt: Any, where: str) -> None:
    with pytest.raises(ClientError) as caught:
        take({"model": "m", "prompt": prompt}, Route.COMPLETION)

    assert caught.value.refusal.param == "prompt"
    assert where in caught.value.refusal.message


@pytest.mark.parametrize(
    ("prompt", "taken"),
    [
        ("text", "text"), ([1, 2, 2**32 - 1], array("I", [1, 2, 2**32 - 1])), (["a", "b"], "a"),
        ([[1, 2], [3]], array("I", [1, 2])), ([1] * MAX_MODEL_LEN, array("I", [1] * MAX_MODEL_LEN)),
        ("\U0001f468\u200d\U0001f469 e\u0301 \u4e2d", "\U0001f468\u200d\U0001f469 e\u0301 \u4e2d"),
    ],
)  # fmt: skip
def test_every_documented_shape_of_prompt_is_taken(prompt: Any, taken: Any) -> None:
    """C44: a batch is routed by its first prompt."""
    assert take({"model": "m", "prompt": prompt}, Route.COMPLETION).prompt == taken


@pytest.mark.parametrize(
    ("prompt", "where"),
    [
        ([0, 99, 100], "prompt[2]"), ([100], "prompt[0]"), ([[1], [2, 2**32 - 1]], "prompt[1][1]"),
        ([2**32], "prompt[0]"),
    ],
)  # fmt: skip
def test_a_token_id_outside_the_vocabulary_is_refused_with_its_place(
    prompt: Any, where: str
) -> None:
    with pytest.raises(ClientError) as caught:
        take({"prompt": prompt}, Route.COMPLETION, vocab_size=100)

    assert where in caught.value.refusal.message
    assert caught.value.refusal.param == "prompt"
    assert take({"prompt": [0, 99]}, Route.COMPLETION, vocab_size=100).prompt == array("I", [0, 99])


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"prompt": [1] * 16}, 0), ({"prompt": "x"}, 0), ({"prompt": ["x"]}, 0),
        ({"prompt": [[1] * 16] + [[2] * 900] * 255}, 255 * 900),
        ({"prompt": ["a", "b" * 400, "\u4e2d" * 400]}, 101 + 301),
        ({"prompt": [1] * 100, "n": 4}, 3 * COPY_TOKENS),
        ({"prompt": [[1], [2, 3]], "n": 2, "best_of": 4}, 2 + 2 * 3 * COPY_TOKENS),
    ],
)  # fmt: skip
def test_a_batch_and_its_copies_tell_what_they_cost_beside_the_first_prompt(
    fields: dict[str, Any], tokens: int
) -> None:
    assert take(fields, Route.COMPLETION).further_tokens == tokens


def test_copies_of_a_chat_cost_too() -> None:
    assert take(chat(n=3)).further_tokens == 2 * COPY_TOKENS
    assert take(chat()).further_tokens == 0


@pytest.mark.parametrize("adds", [None, True, False])
def test_special_tokens_are_an_order_to_the_tokenizer_and_no_option_of_the_template(
    adds: bool | None,
) -> None:
    request = take(chat(add_special_tokens=adds))

    assert request.adds_special_tokens is adds
    assert isinstance(request.prompt, ChatPrompt)
    assert request.prompt.template_options == {}
    text = take({"prompt": "x", "add_special_tokens": adds}, Route.COMPLETION)
    assert text.adds_special_tokens is adds


@pytest.mark.parametrize("route", [Route.CHAT, Route.COMPLETION])
def test_a_body_without_its_prompt_is_refused(route: Route) -> None:
    with pytest.raises(ClientError) as caught:
        take({"model": "m"}, route)

    assert "is missing" in caught.value.refusal.message


def test_lax_mode_drops_forbidden_and_unknown_fields_and_counts_them() -> None:
    counters = Counters()
    body = chat(cache_salt="x", kv_transfer_params={"a": 1}, frobnicate=1, session_id="s")

    request = take(body, counters=counters)

    assert json.loads(request.body) == chat()
    assert counters.dropped_fields == {"cache_salt": 1, "kv_transfer_params": 1, "unknown": 1}
    assert request.session == "s"


@pytest.mark.parametrize("name", ["cache_salt", "extra_key", "mm_hashes", "api_base", "frobnicate"])
def test_strict_mode_refuses_what_it_would_drop(name: str) -> None:
    with pytest.raises(ClientError) as caught:
        take(chat(**{name: "x"}), is_strict=True)

    assert caught.value.refusal.code in {"forbidden_field", "unknown_field"}
    assert caught.value.refusal.param == name


@pytest.mark.parametrize("is_strict", [False, True])
def test_a_forbidden_field_inside_what_is_forwarded_is_refused(is_strict: bool) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "x", "cache_salt": "y"}]}]

    with pytest.raises(ClientError) as caught:
        take(chat(messages=messages), is_strict=is_strict)

    assert caught.value.refusal.code == "forbidden_field"


def test_a_forbidden_field_inside_what_is_dropped_goes_with_it() -> None:
    request = take(chat(nvext={"cache_salt": "x"}, extra_body={"api_base": "http://x"}))

    assert json.loads(request.body) == chat()


def test_an_unread_endpoint_loses_only_the_forbidden_fields() -> None:
    body = b'{"input": [1, 2],\n "model": "m", "dimensions": 1e1}'

    assert take(body, Route.OTHER).body == body
    assert json.loads(take({"input": "x", "cache_salt": "y"}, Route.OTHER).body) == {"input": "x"}
    with pytest.raises(ClientError):
        take({"input": [{"cache_salt": "y"}]}, Route.OTHER)


@pytest.mark.parametrize(
    ("headers", "fields", "session"),
    [
        ({}, {}, None),
        ({}, {"user": "u"}, "u"),
        ({}, {"user": "u", "prompt_cache_key": "p"}, "p"),
        ({}, {"metadata": {"user_id": "m"}}, "m"),
        ({}, {"session_params": {"session_id": "s"}}, "s"),
        ({b"x-user-id": b"h"}, {"user": "u"}, "h"),
        ({b"x-session-id": b"a", b"x-user-id": b"b"}, {}, "a"),
        ({b"session-id": b"s", b"thread-id": b"t"}, {}, "s/t"),
        ({b"x-request-id": b"never"}, {}, None),
        ({b"x-session-id": b"z" * 1_000}, {}, "z" * 256),
    ],
)
def test_the_affinity_hint_is_taken_in_the_documented_order(
    headers: dict[bytes, bytes], fields: dict[str, Any], session: str | None
) -> None:
    assert take(chat(**fields), headers=headers).session == session


def test_no_refusal_repeats_more_than_64_bytes_of_the_client() -> None:
    secret = "S3CRET" * 40
    for body in (chat(**{secret: 1}), chat(temperature=secret), chat(stop=[secret * 50]),
                 {"messages": [{"role": secret, "content": "x"}]}):  # fmt: skip
        with pytest.raises(ClientError) as caught:
            take(body, is_strict=True)
        assert secret[:65] not in caught.value.refusal.message


@pytest.mark.parametrize(
    ("target", "route"),
    [
        (b"/v1/chat/completions", Route.CHAT), (b"/v1/chat/completions?x=y", Route.CHAT),
        (b"/v1/completions", Route.COMPLETION), (b"/v1/embeddings", Route.EMBEDDINGS),
        (b"/v1/files/org/name", Route.OTHER), (b"/v1/models", Local.MODELS),
        (b"/v1/models/org/name", Local.MODEL), (b"/v1/models/org%2Fname?x=y", Local.MODEL),
        (b"/v1/models/", None), (b"/v1/v1/messages", None), (b"/v1/v1/nothing", None),
        (b"/v1/responses?a=%20b", Route.RESPONSES),
        (b"/readyz", Local.READINESS), (b"/live", Local.LIVENESS), (b"/", None), (b"/v2/x", None),
        (b"/workers", None), (b"/metrics", None), (b"/flush_cache", None),
        (b"/add_worker?url=x", None),
        (b"/v1/completions/", None), (b"/v1/load_lora_adapter", None),
        (b"/v1/load_lora_adapter/", None), (b"/v1", None),
        (b"/V1/models", None), (b"/health/", None), (b"/v1x", None),
    ],
)  # fmt: skip
def test_a_path_is_exactly_what_the_table_says(target: bytes, route: Route | Local | None) -> None:
    assert route_of(target) is route


@pytest.mark.parametrize(
    "target",
    [
        b"http://x/v1/models", b"x:443", b"*", b"//v1/models", b"/v1//models", b"/v1/./models",
        b"/v1/../workers", b"/v1/..", b"/.", b"/v1/%2e%2e/workers", b"/v1/%2E/x", b"/v1/x%00",
        b"/v1/x%0a", b"/v1/x%0d", b"/v1/x;y", b"/v1/x%3b", b"/v1/x%2fy", b"/v1/x%5cy", b"/v1/x\\y",
        b"/v1/x%252e", b"/v1/x%", b"/v1/x%g0", b"/v1/x#y", b"/v1/x?y#z", b"/v1/x?%00",
        b"/v1/x?y=%0a", b"/v1/%63ompletions", b"/v1/%6coad_lora_adapter", b"/%761/models",
        b"/v1/models/org%20name", b"/v1/models/%2F", b"/v1/models/..%2Fx", b"/v1/models/%2e%2e",
        b"/v1/files/org%2Fname", b"/v1/chat%2Fcompletions?x=y",
        b"/v1/<x>", b'/v1/"x"', b"/v1/{x}", b"v1/models", b"?x",
    ],
)  # fmt: skip
def test_a_target_that_could_mean_two_things_is_refused(target: bytes) -> None:
    with pytest.raises(ClientError) as caught:
        route_of(target)

    assert caught.value.refusal.code == "invalid_target"


@pytest.mark.parametrize(
    ("target", "meant"),
    [
        (b"/chat/completions", "/v1/chat/completions"), (b"/models?x=y", "/v1/models"),
        (b"/v1/v1/messages", "/v1/messages"), (b"/v1/v1/messages/", "/v1/messages"),
        (b"/v1/completions/", "/v1/completions"), (b"/v1/health", "/health"),
        (b"/health/", "/health"),
    ],
)  # fmt: skip
def test_the_usual_slips_of_a_path_are_told_what_was_meant(target: bytes, meant: str) -> None:
    assert unknown_path(target).message.endswith(f"; did you mean {meant}?")


@pytest.mark.parametrize(
    "target", [b"/nothing", b"/workers", b"/metrics?x=y", b"/v1/load_lora_adapter", b"/", b"/v1"]
)
def test_any_other_path_is_named_and_no_more(target: bytes) -> None:
    refusal = unknown_path(target)
    path = target.partition(b"?")[0].decode()
    assert (refusal.status, refusal.code) == (404, "not_found")
    assert refusal.message == f"there is nothing at `{path}`"


def test_of_a_path_no_more_is_named_than_of_any_word_of_a_client() -> None:
    assert len(unknown_path(b"/" + b"x" * 5_000).message) <= 64 + len("there is nothing at ")
    assert unknown_path(b"/\xff\x00\r\n").message.isprintable()


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (b"/v1/models/m", "m"), (b"/v1/models/org/name", "org/name"),
        (b"/v1/models/org%2Fname%2fx?y=%2F", "org/name/x"),
    ],
)  # fmt: skip
def test_a_model_is_named_by_its_path(target: bytes, name: str) -> None:
    assert model_in(target) == name
