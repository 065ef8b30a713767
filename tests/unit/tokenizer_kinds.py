"""Small tokenizers of the kinds that model families use, trained on a few lines here."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

LINES = [
    "The cache keeps what was computed, and the next request begins where the last one ended. ",
    "Grüße aus Köln: 12345 Äpfel, 3.14 und 1e10; don't WE'LL i'm.\n\n",
    "\tdef f(x):\n        return x\n",
    "缓存前缀 東京の天気 안녕하세요 привет мир שלום नमस्ते 👍🏽 e\u0301 \ufb01 ﬁ",
] * 20
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_WORDS = _WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
_CJK = "[一-龥぀-ゟ゠-ヿ]+"
_SPECIAL = ["<s>", "</s>", "<unk>"]
ADDED = [
    AddedToken("<|im_start|>", special=True, normalized=False),
    AddedToken("<|left|>", special=True, normalized=False, lstrip=True),
    AddedToken("<|right|>", special=True, normalized=False, rstrip=True),
    AddedToken("<tool_call>", special=False, normalized=False),
    AddedToken("wholeword", special=False, normalized=False, single_word=True),
    AddedToken("normed", special=False, normalized=True),
]


def _trained(tokenizer: Tokenizer, *, is_bytes: bool, size: int = 700) -> Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet() if is_bytes else []
    special = [*_SPECIAL, *([] if is_bytes else [f"<0x{byte:02X}>" for byte in range(256)])]
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


def _split(pattern: str) -> Any:  # the library has no base class for its parts
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


def _byte_level(*, splits: list[str], normalizer: Any = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*map(_split, splits), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return _trained(tokenizer, is_bytes=True)


def _sentence_pieces(normalizer: Any, pre_tokenizer: Any = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    return _trained(tokenizer, is_bytes=False, size=900)


def _finished(tokenizer: Tokenizer, *, ignores_merges: bool = False) -> bytes:
    """With added tokens and a BOS; as the bytes of a tokenizer.json."""
    tokenizer.add_tokens(ADDED)
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", bos)]
    )
    definition = json.loads(tokenizer.to_str())
    if ignores_merges:
        definition["model"]["ignore_merges"] = True
    for token in definition["added_tokens"]:
        if token["content"].startswith("<0x"):
            token["special"] = False
    definition["added_tokens"] = [
        token for token in definition["added_tokens"] if not token["content"].startswith("<0x")
    ]
    return json.dumps(definition).encode()


def kinds() -> dict[str, bytes]:
    """By family, the bytes of a tokenizer.json of its kind."""
    space = normalizers.Replace(" ", "▁")
    return {
        "gpt2": _finished(
            _trained(_gpt2(), is_bytes=True),
        ),
        "llama3": _finished(_byte_level(splits=[_WORDS]), ignores_merges=True),
        "qwen": _finished(_byte_level(splits=[_QWEN_WORDS], normalizer=normalizers.NFC())),
        "deepseek": _finished(_byte_level(splits=[r"\p{N}{1,3}", _CJK, _WORDS])),
        "llama2": _finished(
            _sentence_pieces(normalizers.Sequence([normalizers.Prepend("▁"), space]))
        ),
        "gemma": _finished(
            _sentence_pieces(space, pre_tokenizers.Split(" ", behavior="merged_with_previous"))
        ),
    }


def _gpt2() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
