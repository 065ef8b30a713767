"""A model's `tokenizer.json` as a `Tokenizer`: fastokens where it can, else tokenizers.

Both release the interpreter lock while they encode, and give the same ids: tests compare them on
the kinds that model families use, and each definition is tried on a few texts when it is loaded.
Must never: change the text on its way in. Read `template.py` next.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from pathlib import Path

import fastokens  # pyright: ignore[reportMissingTypeStubs]  its types are in a private stub
import tokenizers

from trunkline.errors import ConfigError
from trunkline.ports.tokenizer import Tokenizer

_DEFINITION_MAX_BYTES = 256 << 20  # the largest published definition is about 35 MB
_BYTE_TOKEN = "<0x0A>"
_TRIED = (
    "Hello, wOrld's 3 1234567 tabs\t\t and\r\n\n\n   blanks  ",
    "Grüße, 你好 안녕 こんにちは привет שלום नमस्ते 👩‍👩‍👧‍👦 e\u0301 ﬁ \u00a0\u2028\ufeff\x00",
    "<s></s><|im_start|>user\n<|endoftext|><bos>[INST] <unk> </s >",
    "def f(x):\n        return {'a': [1.0, -2e3]}  # TODO\n",
    "ab" * 700,
)
"""Texts that show most ways in which two tokenizers of one definition differ."""


def load_tokenizer(path: Path) -> Tokenizer:
    """Read `tokenizer.json`, given itself or by its folder. Raises ConfigError that names the
    file."""
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        if file.stat().st_size > _DEFINITION_MAX_BYTES:
            raise ConfigError(f"tokenizer {file} is larger than {_DEFINITION_MAX_BYTES} bytes")
        definition = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"tokenizer {file} cannot be read: {error.strerror}") from error
    try:
        return build_tokenizer(definition)
    except ValueError as error:
        raise ConfigError(f"tokenizer {file} is not usable: {error}") from error


def build_tokenizer(definition: bytes) -> Tokenizer:
    """From the bytes of a `tokenizer.json`. Raises ValueError."""
    digest = hashlib.sha256(definition).hexdigest()
    text = definition.decode("utf-8")
    reference = _ReferenceTokenizer(text, digest)
    try:
        fast = fastokens.Tokenizer.from_json_str(text)
    except ValueError:
        # A model kind that fastokens does not know, for example Unigram.
        return reference
    fast.no_truncation()
    quick = _FastTokenizer(fast, reference)
    if any(
        quick.encode(text, add_special_tokens=adds)
        != reference.encode(text, add_special_tokens=adds)
        for text in _TRIED
        for adds in (False, True)
    ):
        return reference  # slower, and right
    return quick


class _FastTokenizer:
    """fastokens: 50 to 100 times faster than the reference on long prompts."""

    def __init__(self, fast: fastokens.Tokenizer, reference: _ReferenceTokenizer) -> None:
        self._fast = fast
        self._reference = reference
        self.digest = reference.digest
        self.vocab_size = reference.vocab_size
        self._has_byte_tokens = reference.knows(_BYTE_TOKEN)

    def encode(self, text: str, *, add_special_tokens: bool) -> array[int]:
        if self._has_byte_tokens and "<0x" in text:
            # It takes the name of a byte's token, written out, for that token.
            return self._reference.encode(text, add_special_tokens=add_special_tokens)
        # The flat form makes no Python object for each token.
        packed, _ = self._fast.encode_batch_flat([text], add_special_tokens)
        return _as_array(packed)

    def decode(self, token_ids: array[int]) -> str:
        return self._reference.decode(token_ids)


class _ReferenceTokenizer:
    """Hugging Face tokenizers: reads every kind of definition, and decodes."""

    def __init__(self, definition: str, digest: str) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(definition)
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(str(error)) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.digest = digest
        self.vocab_size = int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def knows(self, token: str) -> bool:
        """Whether it is a token of the vocabulary."""
        return self._tokenizer.token_to_id(token) is not None

    def encode(self, text: str, *, add_special_tokens: bool) -> array[int]:
        # The library raises TypeError for lone surrogates; the contract says ValueError.
        text.encode("utf-8")
        encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return array("I", encoding.ids)

    def decode(self, token_ids: array[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)


def _as_array(packed: bytes) -> array[int]:
    ids: array[int] = array("I")
    ids.frombytes(packed)
    if sys.byteorder != "little":
        ids.byteswap()
    return ids
