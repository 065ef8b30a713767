"""Lines of vLLM's own log -> objects, where `--enable-log-requests` wrote prompts into it.

Two spellings: `Received request ID: prompt: '...', params: ..., prompt_token_ids: [...]` of older
releases, and `Request ID details: prompt: '...', prompt_token_ids: [...]`, or `Request ID JSON
body: {...}`, of newer ones at log level DEBUG. All other lines of such a log are none of ours.
Must never: take a prompt that was cut (`--max-log-len`) for a whole one without saying so.
"""

from __future__ import annotations

import ast
import re
from datetime import UTC, datetime
from typing import Any

import msgspec

from trunkline.plan.calls import Malformed, Reject

_HEAD = re.compile(
    rb"(?:\b(?P<date>\d\d-\d\d) (?P<time>\d\d:\d\d:\d\d)\b.{0,200}?)?"
    rb"(?:Received request (?P<old>[^\s:]{1,200}): prompt: "
    rb"|Request (?P<new>[^\s:]{1,200}) (?P<kind>details: prompt: |JSON body: ))"
)
_IDS = b"prompt_token_ids: ["
_MAX_ANSWER = re.compile(rb"\bmax_tokens=(\d{1,8})\b")
_SOME_LEAP_YEAR = 2024
"""The lines name none, and only differences of times count."""


def is_engine_line(line: bytes) -> bool:
    return _HEAD.search(line) is not None


def fields_of(line: bytes) -> dict[str, Any] | None:
    """What a line says of a request; None for a line about something else. Raises Malformed."""
    head = _HEAD.search(line)
    if head is None:
        return None
    fields: dict[str, Any] = {}
    if head["date"]:
        fields["timestamp"] = _time(head["date"] + b" " + head["time"])
    rest = line[head.end() :]
    if head["kind"] == b"JSON body: ":
        fields["body"] = _decoded(rest)
        return fields
    answer = _MAX_ANSWER.search(rest)
    if answer is not None:
        fields["max_tokens"] = int(answer[1])
    # The last one: a prompt may quote such a line.
    at = rest.rfind(_IDS)
    end = rest.find(b"]", at)
    if at >= 0 and end > at + len(_IDS):
        fields["prompt"] = _decoded(rest[at + len(_IDS) - 1 : end + 1])
    else:
        fields["prompt"] = _quoted(rest)
    return fields


def _time(text: bytes) -> float:
    try:
        at = datetime.strptime(f"{_SOME_LEAP_YEAR}-{text.decode()}", "%Y-%m-%d %H:%M:%S")
    except ValueError as error:
        raise Malformed(Reject.BAD_TIME) from error
    return at.replace(tzinfo=UTC).timestamp()


def _decoded(raw: bytes) -> object:
    try:
        return msgspec.json.decode(raw.strip())
    except RecursionError as error:
        raise Malformed(Reject.TOO_DEEP) from error
    except (msgspec.DecodeError, UnicodeError) as error:
        raise Malformed(Reject.BAD_PROMPT) from error


# Possessive, as each place that might be gone back to takes 120 bytes.
_QUOTED = re.compile(rb"'(?:[^'\\]++|\\.)*+'|\"(?:[^\"\\]++|\\.)*+\"", re.DOTALL)


def _quoted(rest: bytes) -> str:
    """A text as Python writes it."""
    found = _QUOTED.match(rest)
    if found is None:
        raise Malformed(Reject.NO_PROMPT)
    try:
        text = ast.literal_eval(found[0].decode("utf-8", "replace"))
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise Malformed(Reject.BAD_PROMPT) from error
    if not isinstance(text, str) or not text:
        raise Malformed(Reject.NO_PROMPT)
    return text
