"""Tokenizers of the kinds that model families use get the ids of the reference, whatever the
text."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_kinds import ADDED, kinds

from trunkline.adapters import tokenizer as adapter
from trunkline.adapters.tokenizer import build_tokenizer

KINDS = kinds()
OURS = {name: build_tokenizer(definition) for name, definition in KINDS.items()}
REFERENCE = {name: tokenizers.Tokenizer.from_str(text.decode()) for name, text in KINDS.items()}
SAMPLES = [
    "", " ", "Hello, world!\n\n  Two  spaces.\ttab\r\n", "缓存前缀 東京の天気 안녕하세요",
    "👩‍👩‍👧‍👦 👍🏽 🇵🇱", "e\u0301 vs \u00e9, A\u030a\ufb01 \u200b\u200d\ufeff", "\u0300\u0301",
    "<|im_start|>user\nhi</s><s>", "a <|left|> b", "a <|right|>  b", "<tool_call>x</tool_call>",
    "wholeword notwholeword wholeword.", "normed NORMED", "<0x41> <0xE2>é", "<0x", "\x00\x01\x7f",
    "x" * 5_000, "0" * 100, "\n" * 50, " " * 77 + "a", "日本" * 500, "aé" * 3_000,
    "ꙮ\ufffd\U0001f9ff",
    "don't we'll I'M 12345 3.14", "a\u0085b\u00a0c\u2028d", "ǅ ſ İ ß",
]  # fmt: skip
TEXT = st.lists(
    st.one_of(
        st.text(max_size=8),
        st.sampled_from([*SAMPLES[:16], *(token.content for token in ADDED)]),
        st.text("ab1é你 \n<|>'", max_size=6),
    ),
    max_size=8,
).map("".join)


def _assert_equal(kind: str, text: str) -> None:
    for adds in (False, True):
        expected = REFERENCE[kind].encode(text, add_special_tokens=adds).ids
        assert OURS[kind].encode(text, add_special_tokens=adds).tolist() == expected


@pytest.mark.parametrize("text", SAMPLES, ids=lambda text: repr(text[:20]))
@pytest.mark.parametrize("kind", KINDS)
def test_c46_samples_of_every_kind_get_the_ids_of_the_reference(kind: str, text: str) -> None:
    _assert_equal(kind, text)


@given(kind=st.sampled_from(sorted(KINDS)), text=TEXT)
def test_c46_any_text_of_any_kind_gets_the_ids_of_the_reference(kind: str, text: str) -> None:
    _assert_equal(kind, text)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_read_by_the_quick_library(kind: str) -> None:
    assert type(OURS[kind]).__name__ == "_FastTokenizer"


def test_where_the_two_libraries_disagree_on_a_definition_the_reference_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = adapter._FastTokenizer.encode  # pyright: ignore[reportPrivateUsage]

    def wrong(self: Any, text: str, *, add_special_tokens: bool) -> Any:  # as the method has it
        ids = right(self, text, add_special_tokens=add_special_tokens)
        return ids[:-1] if "你" in text else ids

    monkeypatch.setattr(adapter._FastTokenizer, "encode", wrong)  # pyright: ignore[reportPrivateUsage]
    ours = build_tokenizer(KINDS["qwen"])
    text = "你好"
    assert ours.encode(text, add_special_tokens=False).tolist() == (
        REFERENCE["qwen"].encode(text, add_special_tokens=False).ids
    )
