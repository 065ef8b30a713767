"""What a body may cost whose prompts are not read: embeddings, scores, forms with sound.

A guess in tokens, for the load book and for rate limits: token ids count one each, texts by their
bytes, media by a flat rate where a part says that it is one: a text that only looks like their data
is a text to engines, and is paid for as one. Must never take long: a body is gone through
once. Read `intake.py` for who asks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trunkline.gateway.media import NAMES
from trunkline.gateway.strict_json import is_list, is_object

MEDIA_TOKENS = 1_000
"""What a picture of a megapixel takes in models of today, about."""
FORM_TOKENS = 1_500
"""What half a minute of sound takes in models of today."""
_FORM_BYTES = 480_000
"""Half a minute of sound as the encodings of today have it, about."""
_FORM_MODEL = re.compile(rb'name="model"\r\n\r\n([!-~]{1,256})\r\n')
_DATA = ("url", "data")
"""Where what holds one has its data."""
_TOKEN_BYTES = 4
"""Of ordinary text, about."""


def text_tokens(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass")) // _TOKEN_BYTES + 1


def tokens_in(value: Any) -> int:  # any decoded JSON value
    """Of all that stands in it. Level by level, so that depth costs no stack."""
    tokens, level = 0, [value]
    while level:
        below: list[Any] = []
        for one in level:
            if type(one) is str:
                tokens += text_tokens(one)
            elif type(one) is int:
                tokens += 1
            elif is_list(one):
                is_ids = bool(one) and set(map(type, one)) == {int}
                tokens += len(one) if is_ids else 0
                below += [] if is_ids else one
            elif is_object(one):
                if NAMES.isdisjoint(one):
                    below += one.values()
                    continue
                media, others = _parted(one)
                tokens += media * MEDIA_TOKENS
                below += others
        level = below
    return tokens


def _parted(fields: Mapping[str, Any]) -> tuple[int, list[Any]]:
    """How many media an object has under their names, and what else there is in it."""
    media = 0
    others: list[Any] = []
    for name, held in fields.items():
        if name not in NAMES:
            others.append(held)
        elif is_object(held):
            data = [key for key in _DATA if _is_data(held.get(key))]
            media += len(data)
            others += [value for key, value in held.items() if key not in data]
        elif _is_data(held):
            media += 1
        else:
            others.append(held)
    return media, others


def _is_data(value: Any) -> bool:  # any decoded JSON value
    return type(value) is str and value.startswith("data:")


def tokens_of_form(body: bytes) -> int:
    """Of a form with sound in it."""
    return FORM_TOKENS * (1 + len(body) // _FORM_BYTES)


def model_in_form(body: bytes) -> str:
    """The model that a form names: it says where the form goes, and nothing else. Empty where none
    is found.
    """
    found = _FORM_MODEL.search(body)
    return found[1].decode("ascii") if found else ""
