"""Prompts with pictures and sounds: exact keys up to the first of them, all of its data behind."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from picker_bench import MAX_TOKENS, W0, Bench, Characters, request

from trunkline.adapters.template import JinjaTemplate, load_template
from trunkline.adapters.tokenizer import load_tokenizer
from trunkline.gateway.contracts import ChatPrompt, ClientError, InferenceRequest, Pick, Route
from trunkline.gateway.counters import Counters
from trunkline.gateway.head import RequestHead
from trunkline.gateway.intake import Intake
from trunkline.gateway.media import MARK, STAND_IN_TOKENS, digest_of, marked, stand_in
from trunkline.gateway.tokenise import TEXT_MARK, PromptTokens

FOLDER = Path(__file__).resolve().parents[2] / "src/trunkline/worker/model"
TEXTS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}</>{% endfor %}"
)
DOUBLED = TEXTS + "{{ messages[0].content }}"


def reading(template: str) -> PromptTokens:
    return PromptTokens(Characters(), JinjaTemplate(template, {}), max_tokens=MAX_TOKENS)


@pytest.fixture(params=[TEXTS, PARTS], ids=["texts", "parts"])
def prompts(request: pytest.FixtureRequest) -> Iterator[PromptTokens]:
    made = reading(request.param)
    yield made
    made.close()


def image(data: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def take(*contents: Any) -> InferenceRequest:  # a text, or parts
    messages = [{"role": "user", "content": content} for content in contents]
    return posted(Route.CHAT, {"messages": messages})


def posted(route: Route, body: dict[str, Any]) -> InferenceRequest:
    intake = Intake(
        max_json_depth=64, strict_fields=False, max_model_len=4_096, counters=Counters()
    )
    head = RequestHead(
        method="POST", target=b"/v1/x", minor=1, headers={}, content_length=0, is_chunked=False,
        keeps_alive=True,
    )  # fmt: skip
    return intake.request(head, route, json.dumps(body).encode(), "r")


def tokens(prompts: PromptTokens, *contents: Any) -> array[int]:
    asked = take(*contents)
    found = prompts.tokens(asked)
    if found is not None:
        return found
    assert isinstance(asked.prompt, ChatPrompt)
    return prompts._encode(asked.prompt, None)  # pyright: ignore[reportPrivateUsage]


def shared(one: array[int], other: array[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def test_c49_two_images_differ_from_the_image_on_and_one_is_itself(prompts: PromptTokens) -> None:
    cat, dog, again = (
        tokens(prompts, "before", [text("what is this?"), image(data)])
        for data in ("cat", "dog", "cat")
    )
    assert cat == again
    at = shared(cat, dog)
    assert cat[at - 1] == MARK, "up to there, both are the same text"
    assert cat[: at - 1].tolist() == list(map(ord, "<user>before</><user>")) + (
        list(map(ord, "what is this?")) if prompts_take_parts(prompts) else []
    )


def prompts_take_parts(prompts: PromptTokens) -> bool:
    return prompts._template.takes_parts  # pyright: ignore[reportPrivateUsage]


def test_c50_images_that_begin_alike_are_told_apart(prompts: PromptTokens) -> None:
    one, other = (tokens(prompts, [image("A" * 1_000_000 + tail)]) for tail in "xy")
    assert len(one) == len(other)
    assert one != other


def test_text_before_an_image_has_the_keys_of_the_text_alone(prompts: PromptTokens) -> None:
    history = [f"turn {number} " * 9 for number in range(4)]
    plain = tokens(prompts, *history)
    seen = tokens(prompts, *history, [image("x"), text("look")])
    assert seen[: len(plain)] == plain
    assert seen[len(plain) + len("<user>")] == MARK


def test_the_order_and_the_kind_of_media_count(prompts: PromptTokens) -> None:
    sound = {"type": "input_audio", "input_audio": {"data": "cat", "format": "wav"}}
    film = {"type": "video_url", "video_url": {"url": "data:image/png;base64,cat"}}
    made = [
        tokens(prompts, parts)
        for parts in (
            [image("cat"), image("dog")], [image("dog"), image("cat")], [image("cat")],
            [sound], [film], [image("cat"), image("cat")],
        )
    ]  # fmt: skip
    assert len({one.tobytes() for one in made}) == len(made)


def test_a_template_that_prints_a_message_twice_is_known_by_bytes_alone() -> None:
    prompts = reading(DOUBLED)
    cat, dog = (tokens(prompts, [image(data), text("x")]) for data in ("cat", "dog"))
    assert cat[0] == dog[0] == TEXT_MARK
    assert cat != dog
    prompts.close()


def test_where_prompts_are_read_as_text_all_data_counts_too() -> None:
    prompts = reading(TEXTS)
    prompts.read_text()
    cat, dog = (tokens(prompts, "before " * 20, [image(data)]) for data in ("cat", "dog"))
    assert len(cat) == len(dog) < 150, "by their digests, not by their bytes"
    assert 30 < shared(cat, dog) < len(cat)
    prompts.close()


def test_the_models_own_template_reads_images() -> None:
    prompts = PromptTokens(load_tokenizer(FOLDER), load_template(FOLDER), max_tokens=MAX_TOKENS)
    seen = tokens(prompts, "a long history " * 20, [text("what is this?"), image("cat")])
    assert seen.tolist().count(MARK) == 1
    prompts.close()


@given(st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32))
def test_what_stands_for_media_is_no_text_and_one_to_one(one: bytes, other: bytes) -> None:
    assert (stand_in(one) == stand_in(other)) is (one == other)
    assert stand_in(one)[0] == MARK
    assert len(stand_in(one)) == STAND_IN_TOKENS


PART = st.one_of(
    st.text(max_size=8).map(lambda said: text(said.replace("\0", ""))),
    st.sampled_from(["a", "b", "ab"]).map(image),
)


@given(st.lists(st.lists(PART, min_size=1, max_size=4), min_size=1, max_size=3), st.booleans())
def test_every_part_that_is_no_text_is_found_once(
    contents: list[list[dict[str, Any]]], takes_parts: bool
) -> None:
    messages = [{"role": "user", "content": content} for content in contents]
    before = json.dumps(messages)
    seen, digests = marked(messages, takes_parts=takes_parts)
    assert json.dumps(messages) == before
    found = [part for content in contents for part in content if part["type"] == "image_url"]
    assert sorted(digests) == sorted(map(digest_of, found))
    assert json.dumps(seen).count("\\u0000") == len(found)


# -- the picker ------------------------------------------------------------------------------------


def picked(bench: Bench, asked: InferenceRequest) -> Pick:
    found = bench.picker.pick(asked, frozenset())
    assert isinstance(found, Pick)
    return found


def test_an_image_is_counted_as_approximate_and_no_stream_of_it_goes_on() -> None:
    bench = Bench(W0)
    asked = take([text("x" * 100), image("cat")])
    pick = picked(bench, asked)
    assert pick.tokenizer is None
    assert bench.picker.accounts.approximate_prompts == {"media": 1}
    assert bench.picker.accounts.unread_prompts == 0
    assert picked(bench, request(bench_ids())).tokenizer is not None


def bench_ids() -> array[int]:
    return array("I", range(40))


def test_the_same_image_finds_its_worker_again_and_another_one_its_text() -> None:
    bench = Bench(W0)
    history = "h" * 200
    bench_tokens = [picked(bench, take(history, [image(data)])) for data in ("cat", "cat", "dog")]
    matched = [pick.ticket.decision.expected_tokens for pick in bench_tokens]
    assert matched[0] == 0
    assert matched[1] >= matched[2] > 0


# -- what no client may say of media ---------------------------------------------------------------

FAR = "http://169.254.169.254/latest"
ELSEWHERE: list[tuple[Route, dict[str, Any]]] = [
    (Route.RESPONSES, {"input": [
        {"role": "user", "content": [{"type": "input_image", "image_url": FAR}]},
        {"type": "item_reference", "id": "x"},
    ]}),
    (Route.RESPONSES, {"input": [
        {"role": "user", "content": [
            {"type": "input_file", "file_id": "f"}, {"type": "input_image", "image_url": FAR},
        ]},
    ]}),
    (Route.RESPONSES, {"input": [
        {"role": "user", "content": [{"type": "input_file", "file_url": FAR}]},
    ]}),
    (Route.EMBEDDINGS, {"messages": [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": FAR}}]},
    ]}),
    (Route.EMBEDDINGS, {"input": [{"image": FAR}]}),
    (Route.SCORES, {"query": "q", "documents": {"content": [
        {"type": "video_url", "video_url": {"url": FAR}},
    ]}}),
    (Route.TOKENIZE, {"messages": [{"role": "user", "content": [{"image_url": FAR}]}]}),
    (Route.OTHER, {"messages": [{"role": "user", "content": [{"audio_url": FAR}]}]}),
]  # fmt: skip


@pytest.mark.parametrize(("route", "body"), ELSEWHERE, ids=range(len(ELSEWHERE)))
def test_nothing_is_fetched_for_a_client_by_any_path(route: Route, body: dict[str, Any]) -> None:
    with pytest.raises(ClientError) as caught:
        posted(route, body)
    assert "nothing is fetched" in str(caught.value)


DATA = "data:image/png;base64,AAAA"
NAMED: list[tuple[Route, dict[str, Any]]] = [
    (Route.CHAT, {"type": "image_url", "image_url": {"url": DATA}, "uuid": "theirs"}),
    (Route.CHAT, {"type": "text", "text": "x", "image_url": FAR, "uuid": "theirs"}),
    (Route.EMBEDDINGS, {"type": "image_url", "image_url": None, "uuid": "theirs"}),
    (Route.TOKENIZE, {"type": "input_audio", "input_audio": {"data": "AA"}, "uuid": "theirs"}),
    (Route.OTHER, {"type": "image_embeds", "image_embeds": None, "uuid": "theirs"}),
]  # fmt: skip


@pytest.mark.parametrize(("route", "part"), NAMED, ids=range(len(NAMED)))
def test_no_client_names_a_picture_as_caches_do(route: Route, part: dict[str, Any]) -> None:
    with pytest.raises(ClientError) as caught:
        posted(route, {"messages": [{"role": "user", "content": [part]}]})
    assert caught.value.refusal.code in {"forbidden_field", "invalid_value"}


def test_a_picture_with_its_data_and_a_tool_that_speaks_of_urls_are_taken() -> None:
    schema = {"properties": {"image_url": {"type": "string"}, "uuid": {"type": "string"}}}
    part = {"type": "image_url", "image_url": {"url": DATA}}
    body = {"messages": [{"role": "user", "content": [part]}], "tools": [{"parameters": schema}]}
    for route in (Route.EMBEDDINGS, Route.TOKENIZE, Route.OTHER):
        assert posted(route, body).is_object
