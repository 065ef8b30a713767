"""The tokenizer that ships, its maker, and the adapter that reads any model's."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
from array import array
from pathlib import Path
from types import ModuleType

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from trunkline.adapters.tokenizer import build_tokenizer, load_tokenizer
from trunkline.core.simkv import answer_first_id
from trunkline.errors import ConfigError
from trunkline.ports.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
MODEL_FOLDER = ROOT / "src" / "trunkline" / "worker" / "model"
SHIPPED = load_tokenizer(MODEL_FOLDER)
REFERENCE = tokenizers.Tokenizer.from_file(str(MODEL_FOLDER / "tokenizer.json"))

SAMPLES = [
    "",
    " ",
    "Hello, world!\n\n  Two  spaces.\ttab\r\n",
    "缓存前缀 東京の天気 안녕하세요",
    "👩‍👩‍👧‍👦 👍🏽 🇵🇱",
    "e\u0301 vs \u00e9, A\u030a\ufb01 \u200b\u200d\ufeff",
    "<|im_start|>user\nhi<|im_end|>\n<|bos|><|eos|> <|im_start| > <|bos|",
    "שלום سلام नमस्ते",
    "don't we'll I'M 12345 3.14 a_b-c",
    "\x00\x01\x7f",
    "x" * 5_000,
]
TEXT = st.lists(
    st.one_of(
        st.text(max_size=12),
        st.sampled_from(["<|im_end|>", "<|bos|>", " the", "\n", "  ", "你", "🙂", "\u0301", "'s"]),
    ),
    max_size=12,
).map("".join)


def _maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("maker", ROOT / "tools" / "train_tokenizer.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_shipped_files_are_what_the_maker_makes_byte_for_byte() -> None:
    for name, content in _maker().rendered_files().items():
        assert (MODEL_FOLDER / name).read_text("utf-8") == content, name


def _assert_equal_to_reference(text: str, adds: bool) -> None:
    expected = REFERENCE.encode(text, add_special_tokens=adds).ids
    ids = SHIPPED.encode(text, add_special_tokens=adds)
    assert ids.typecode == "I"
    assert ids.tolist() == expected


@pytest.mark.parametrize("text", SAMPLES)
@pytest.mark.parametrize("adds", [False, True])
def test_c46_samples_get_the_ids_of_the_reference(text: str, adds: bool) -> None:
    _assert_equal_to_reference(text, adds)


@given(text=TEXT, adds=st.booleans())
def test_any_text_gets_the_ids_of_the_reference(text: str, adds: bool) -> None:
    _assert_equal_to_reference(text, adds)


@given(text=TEXT.filter(lambda text: "<|" not in text))
def test_plain_text_survives_encoding_and_decoding(text: str) -> None:
    assert SHIPPED.decode(SHIPPED.encode(text, add_special_tokens=False)) == text


def test_special_tokens_are_left_out_of_decoded_text() -> None:
    ids = SHIPPED.encode("<|im_start|>hi<|im_end|>", add_special_tokens=True)
    assert SHIPPED.decode(ids) == "hi"


@pytest.mark.parametrize("text", ["", "hi", "<|im_start|>hi"])
def test_c47_special_tokens_add_exactly_one_bos_and_only_where_asked_for(text: str) -> None:
    (bos,) = SHIPPED.encode("", add_special_tokens=True)
    assert SHIPPED.encode(text, add_special_tokens=True).count(bos) == 1
    assert SHIPPED.encode(text, add_special_tokens=True)[0] == bos
    assert SHIPPED.encode(text, add_special_tokens=False).count(bos) == 0


def test_a_lone_surrogate_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="surrogates"):
        SHIPPED.encode("a\ud800b", add_special_tokens=False)


def test_every_answer_word_encodes_to_itself_in_any_order() -> None:
    ids = list(range(answer_first_id(SHIPPED.vocab_size), SHIPPED.vocab_size))
    assert len(ids) == 1_024
    random.Random(3).shuffle(ids)
    text = SHIPPED.decode(array("I", ids))
    for before in ("", "assistant\n", "word", "."):
        sent_back = SHIPPED.encode(before + text + "<|im_end|>", add_special_tokens=False)
        assert sent_back[-1_025:-1].tolist() == ids


# A unigram model: a kind that fastokens does not read.
_UNIGRAM = {
    "version": "1.0",
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"},
    "post_processor": None,
    "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"},
    "model": {
        "type": "Unigram",
        "unk_id": 0,
        "vocab": [["<unk>", 0.0], ["▁he", -1.0], ["llo", -1.5], ["▁", -3.0]],
        "byte_fallback": False,
    },
}


def test_a_model_that_the_fast_library_cannot_read_falls_back_to_the_reference() -> None:
    tokenizer = build_tokenizer(json.dumps(_UNIGRAM).encode())
    ids = tokenizer.encode("hello", add_special_tokens=False)
    assert ids == array("I", [1, 2])
    assert tokenizer.decode(ids) == "hello"
    with pytest.raises(ValueError, match="surrogates"):
        tokenizer.encode("\ud800", add_special_tokens=False)


def test_digests_differ_when_the_definition_does() -> None:
    changed = (MODEL_FOLDER / "tokenizer.json").read_bytes() + b" "
    assert build_tokenizer(changed).digest != SHIPPED.digest
    assert len(SHIPPED.digest) == 64


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not usable"):
        load_tokenizer(tmp_path)


async def _turns_while_encoding(tokenizer: Tokenizer, text: str) -> tuple[int, int]:
    """Turns of the loop between the begin and the end of one call, and the tokens encoded."""
    is_inside = False

    def encode() -> int:
        nonlocal is_inside
        is_inside = True
        tokens = tokenizer.encode(text, add_special_tokens=False)
        is_inside = False
        return len(tokens)

    encoding, turns_count = asyncio.ensure_future(asyncio.to_thread(encode)), 0
    while not encoding.done():
        await asyncio.sleep(0.001)
        turns_count += is_inside
    return turns_count, await encoding


def test_the_loop_keeps_turning_while_a_long_prompt_is_encoded() -> None:
    rng = random.Random(5)
    words = [array("I", (rng.randrange(3_072, 4_096) for _ in range(100_000))) for _ in range(8)]
    tokenizer = build_tokenizer((MODEL_FOLDER / "tokenizer.json").read_bytes())
    texts = [tokenizer.decode(ids) for ids in words]
    seen = [asyncio.run(_turns_while_encoding(tokenizer, text)) for text in texts]
    assert [tokens for _, tokens in seen] == [100_000] * 8
    assert max(turns for turns, _ in seen) > 3, "where the lock is held, it does not turn"
