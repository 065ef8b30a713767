"""What the simulated engine makes of pictures, sounds and films: a text of a digest of their data.

A real engine puts tokens of its own there, and what it computes of them depends on the data. So it
is here: the same data are the same tokens, and other data are other ones, with other KV behind
them. Nothing is fetched and nothing is looked at: whatever comes as data will do. Read
`requests.py` for the prompt around it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

_KINDS = ("image_url", "video_url", "audio_url", "input_audio")
_DIGEST_BYTES = 16


def with_media_as_text(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same messages where they have none."""
    return [_shown(message) for message in messages]


def _shown(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    return {**message, "content": [_part(part) for part in cast("list[Any]", content)]}


def _part(part: Any) -> Any:  # decoded JSON
    if not isinstance(part, Mapping):
        return part
    fields = cast("Mapping[str, Any]", part)
    kind = fields.get("type")
    if kind not in _KINDS or fields.get(kind) is None:
        return fields
    # The order in which a client wrote fields is none of the data's.
    data = msgspec.json.encode(fields[kind], order="deterministic")
    digest = hashlib.blake2b(data, digest_size=_DIGEST_BYTES, person=b"simulated").hexdigest()
    return {"type": "text", "text": f"<{kind} {digest}>"}
