"""What a body may cost whose prompts are not read: a guess that nothing makes fail."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.gateway.media import NAMES
from trunkline.gateway.weighing import (
    FORM_TOKENS,
    MEDIA_TOKENS,
    model_in_form,
    text_tokens,
    tokens_in,
    tokens_of_form,
)

PICTURE = "data:image/png;base64," + "A" * 100_000


@pytest.mark.parametrize(
    ("value", "tokens"),
    [
        (None, 0), (True, 0), (1.5, 0), (7, 1), ("", 1), ("x" * 400, 101), ([1, 2, 3], 3),
        ([[1, 2], [3]], 3), (["x" * 40, "y" * 40], 22), ({"a": {"b": ["x" * 4]}}, 2),
        ([], 0), ([1, "x"], 2), ({"image_url": {"url": PICTURE}}, MEDIA_TOKENS),
        ({"type": "image_url", "image_url": PICTURE}, MEDIA_TOKENS + text_tokens("image_url")),
        ({"image": PICTURE}, MEDIA_TOKENS), ({"input_audio": {"data": PICTURE}}, MEDIA_TOKENS),
        ({"image_url": {"url": PICTURE, "detail": "x" * 40}}, MEDIA_TOKENS + 11),
        ({"image_url": "x" * 40}, 11), ({"image_url": [1, 2]}, 2), ({"image_url": None}, 0),
    ],
)  # fmt: skip
def test_ids_texts_and_media_weigh_what_they_are(value: Any, tokens: int) -> None:
    assert tokens_in(value) == tokens


@pytest.mark.parametrize("key", ["text", "content", "url", "data", "title"])
def test_a_text_is_no_cheaper_for_looking_like_the_data_of_a_picture(key: str) -> None:
    """Engines compute it as a text, whatever it begins with."""
    texts = ["data:" + "x" * 60_000] * 10
    assert tokens_in(texts) > 150_000
    assert tokens_in([{"type": "text", key: text} for text in texts]) > 150_000
    assert tokens_in({"image_url": texts}) > 150_000


WORDS = st.text(max_size=20) | st.text(max_size=20).map(lambda text: "data:" + text)
KEYS = st.text(max_size=3) | st.sampled_from(["image_url", "image", "input_audio", "url", "data"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(KEYS, inner),
    max_leaves=40,
)


def naive(value: Any) -> int:
    if isinstance(value, dict):
        return sum(naive_field(key, held) for key, held in value.items())
    if isinstance(value, list):
        return sum(map(naive, value))
    if isinstance(value, str):
        return text_tokens(value)
    return 1 if type(value) is int else 0


def naive_field(name: str, held: Any) -> int:
    if name not in NAMES:
        return naive(held)
    if isinstance(held, dict):
        return sum(
            naive_data(value) if key in ("url", "data") else naive(value)
            for key, value in held.items()
        )
    return naive_data(held)


def naive_data(value: Any) -> int:
    is_data = isinstance(value, str) and value.startswith("data:")
    return MEDIA_TOKENS if is_data else naive(value)


@given(JSON)
def test_any_json_weighs_the_sum_of_its_parts(value: Any) -> None:
    assert tokens_in(value) == naive(value)


@given(st.binary(max_size=200))
def test_a_form_is_weighed_by_its_size_and_never_fails(body: bytes) -> None:
    assert tokens_of_form(body) == FORM_TOKENS
    assert model_in_form(body).isascii()
    assert tokens_of_form(bytes(5_000_000)) > 10 * FORM_TOKENS


def test_the_model_of_a_form_is_a_plain_word() -> None:
    form = b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\n%b\r\n--x--\r\n'
    assert model_in_form(form % b"whisper-1") == "whisper-1"
    for odd in (b"two words", b"", b"x" * 257, b"\xff", b"a\x00b"):
        assert model_in_form(form % odd) == ""
