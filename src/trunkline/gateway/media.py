"""Pictures, sounds and films in messages: what stands for them in a prompt's keys.

What an engine makes of them is not in the text, and its own names for them come of their pixels. So
keys are exact up to the first of them; there, and behind it, a digest of all its data stands in its
place: equal data has equal keys, other data other ones, and no event of an engine means either. In
a template's output they are found by a character that no client can send. Must never: take a part
for another one because it begins alike. Read `tokenise.py` for who asks.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from trunkline.gateway.fields import bad_value
from trunkline.gateway.strict_json import is_list, is_object

KINDS = {"image_url": "url", "video_url": "url", "audio_url": "url", "input_audio": "data"}
"""Types of parts, and where they have their data."""
MARK = 0xFFFF_FFFE
"""Begins what stands for one: no vocabulary has it."""
STAND_IN_TOKENS = 9
"""The mark and 32 bytes of digest."""
_URLS = ("image_url", "video_url", "audio_url", "file_url")
_HOLDERS = ("image", "video", "audio")
"""Data itself with some engines, or where it is."""
_OTHERS = (
    "input_image",
    "input_audio",
    "image_pil",
    "image_embeds",
    "audio_embeds",
    "video_embeds",
)
NAMES = frozenset((*_URLS, *_HOLDERS, *_OTHERS))
"""What any engine calls media, or where they are."""
_FAR = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_HERE = "\0"
"""Clients cannot send it: `strict_json.py`."""

Message = Mapping[str, Any]


def is_media(part: Any) -> bool:  # a part of a message, checked for shape
    return is_object(part) and part.get("type") in KINDS


def require_own_data(value: Any) -> None:  # any decoded JSON value
    """Of whatever is called as media in it: it comes with its data, as nothing is fetched, and
    without a name, as engines take that for its identity in caches that no salt keeps apart. Level
    by level, so that depth costs no stack. Raises ClientError.
    """
    level: list[Any] = [value]
    while level:
        below: list[Any] = []
        for one in level:
            if is_object(one):
                if not NAMES.isdisjoint(one):
                    _require_data(one)
                below += one.values()
            elif is_list(one) and not (
                one and type(one[0]) is int and set(map(type, one)) == {int}
            ):
                below += one
        level = below


def require_nameless(part: Mapping[str, Any]) -> None:
    """Of a part of a message. Raises ClientError."""
    if part.get("uuid") is not None:
        raise bad_value(
            "uuid", "is not taken from clients: media are their data", "forbidden_field"
        )


def _require_data(fields: Mapping[str, Any]) -> None:
    for name in _URLS:
        holder = fields.get(name)
        url = holder.get("url") if is_object(holder) else holder
        if type(url) is str and not url.startswith("data:"):
            raise bad_value(name, "must be a data: URL; nothing is fetched")
    for name in _HOLDERS:
        source = fields.get(name)
        if type(source) is str and _FAR.match(source):
            raise bad_value(name, "must be its data; nothing is fetched")
    if type(fields.get("uuid")) is str:
        require_nameless(fields)


def digest_of(part: Any) -> bytes:  # a part of a message
    """32 bytes, of everything in it."""
    encoded = msgspec.json.encode(part, order="sorted")
    return hashlib.blake2b(encoded, digest_size=32, person=b"media").digest()


def stand_in(digest: bytes) -> array[int]:
    """Tokens that no text has."""
    tokens = array("I", [MARK])
    tokens.frombytes(digest)
    assert len(tokens) == STAND_IN_TOKENS, "a digest of another length"
    return tokens


def marked(messages: Sequence[Message], *, takes_parts: bool) -> tuple[list[Message], list[bytes]]:
    """The messages with a mark in place of each part that is no text, and digests of these, in the
    order in which they will be found. Engines put them in front of a message's text where the
    template does not go through its parts.
    """
    seen: list[Message] = []
    digests: list[bytes] = []
    for message in messages:
        content: Any = message.get("content")
        if not is_list(content) or not any(map(is_media, content)):
            seen.append(message)
            continue
        parts: list[Any] = content
        if not takes_parts:
            parts = sorted(content, key=lambda part: not is_media(part))
        digests += [digest_of(part) for part in parts if is_media(part)]
        here = {"type": "text", "text": _HERE}
        seen.append({**message, "content": [here if is_media(one) else one for one in parts]})
    return seen, digests


def digested(messages: Sequence[Message]) -> list[Message]:
    """The messages with digests in place of data, for keys of their text."""
    seen: list[Message] = []
    for message in messages:
        content: Any = message.get("content")
        if is_list(content):
            parts = [digest_of(one).hex() if is_media(one) else one for one in content]
            message = {**message, "content": parts}
        seen.append(message)
    return seen


def pieces_of(text: str, digests: Sequence[bytes]) -> list[str] | None:
    """The texts before, between and behind the media; None where the template did otherwise than
    print each once.
    """
    pieces = text.split(_HERE)
    return pieces if len(pieces) == len(digests) + 1 else None
