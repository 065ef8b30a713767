"""What a client wishes of the time its request may take and of further attempts; both only narrow.

Owns the names of these headers and their bounds. A time-out is that of the first byte: of a stream
the first token, of any other answer nearly its last byte. Must never widen what the settings allow.
Read `deadline.py` for what comes of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from trunkline.gateway.contracts import ClientError, Refusal

MAX_TIMEOUT_S = 86_400.0
MAX_RETRIES = 100
"""What is beyond these bounds is a mistake, and says nothing that the settings do not."""

_TIMEOUT = b"x-litellm-timeout"
_STREAM_TIMEOUT = b"x-litellm-stream-timeout"
_RETRIES = b"x-litellm-num-retries"
_SECONDS = re.compile(rb"\d{1,9}(?:\.\d{1,9})?")
_COUNT = re.compile(rb"\d{1,9}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """None where nothing is wished."""

    timeout_ms: float | None = None
    max_retries: int | None = None


NO_WISHES = Wishes()


def wishes_in(headers: dict[bytes, bytes], *, is_stream: bool) -> Wishes:
    """Raises ClientError for a header that is no number within its bounds."""
    timeout = headers.get(_STREAM_TIMEOUT) if is_stream else None
    name = _TIMEOUT if timeout is None else _STREAM_TIMEOUT
    timeout = headers.get(_TIMEOUT) if timeout is None else timeout
    retries = headers.get(_RETRIES)
    if timeout is None and retries is None:
        return NO_WISHES
    return Wishes(
        timeout_ms=None if timeout is None else _timeout_ms(name, timeout),
        max_retries=None if retries is None else _max_retries(retries),
    )


def _timeout_ms(name: bytes, value: bytes) -> float:
    seconds = float(value) if _SECONDS.fullmatch(value) else 0.0
    if not 0.0 < seconds <= MAX_TIMEOUT_S:
        raise _bad(name, f"seconds above 0, up to {MAX_TIMEOUT_S:.0f}")
    return seconds * 1_000.0


def _max_retries(value: bytes) -> int:
    count = int(value) if _COUNT.fullmatch(value) else -1
    if not 0 <= count <= MAX_RETRIES:
        raise _bad(_RETRIES, f"a whole number, 0 to {MAX_RETRIES}")
    return count


def _bad(name: bytes, wanted: str) -> ClientError:
    shown = name.decode("ascii")
    return ClientError(
        Refusal(code="invalid_value", message=f"{shown} is not {wanted}", param=shown)
    )
