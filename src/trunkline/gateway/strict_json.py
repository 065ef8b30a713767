"""JSON bodies, read so that no second reader can see anything else in them.

Owns the rules that the decoder does not have: no duplicate keys however they are spelled, a bounded
depth, no NUL, no negative zero as an integer. Must never repair. Read `intake.py` next.

The body is decoded once, in C. Duplicate keys, which the decoder drops silently, are found by
counting: each quote of the text either delimits a decoded string or key, or stands escaped inside
one. So

    quotes in the text = 2 x (keys + strings) + quotes inside decoded strings
                         - quotes spelled `\\u0022`

holds exactly where nothing was dropped. Decoding keeps the interpreter lock, so that a thread would
not help: what would take long is refused before, by counting what stands outside strings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, TypeGuard

import msgspec

from trunkline.gateway.answers import quoted
from trunkline.gateway.contracts import ClientError, Refusal
from trunkline.gateway.spelling import is_plain, spelled

_DECODER = msgspec.json.Decoder()
_SLICES = msgspec.json.Decoder(dict[str, msgspec.Raw])
_AT_BYTE = re.compile(r"\(byte ([0-9]+)\)")
# Outside strings of sound JSON: a number, not the exponent of one.
_NEGATIVE_ZERO = re.compile(rb"-0(?<![eE]-0)(?:\.0*+)?(?:[eE][+-]?[0-9]++)?+(?![.0-9eE])")


def is_object(value: Any) -> TypeGuard[dict[str, Any]]:  # any decoded JSON value
    return type(value) is dict


def is_list(value: Any) -> TypeGuard[list[Any]]:  # any decoded JSON value
    return type(value) is list


_SMALL_BYTES = 256 << 10
"""A body up to here is never worth counting first: its worst case costs some 60 ms."""

MAX_MARKS = 100_000
"""Most brackets, braces and colons outside strings. 10,000 messages with parts have half as many;
without a bound, 8 MiB of `[[],[],...` hold the loop for two seconds."""

MAX_STRINGS = 100_000
"""Most strings, names included. 10,000 messages with parts have 70,000; 8 MiB of `"",` hold the
loop for 140 ms."""

MAX_ITEMS = 500_000
"""Most commas outside strings: two prompts of the longest contexts, as token ids. 8 MiB of `1,`
hold the loop for 100 ms."""


_FEW_QUOTES = 64
"""Bytes for each quote, at least, where taking one out (20 ns) costs less than the bytes."""


class Survey:
    """What one walk over a decoded value saw. Level by level, so that depth costs no stack."""

    __slots__ = ("_forbidden", "_max_depth", "found", "keys", "quotes", "strings")

    def __init__(self, max_depth: int, forbidden: frozenset[str]) -> None:
        self._max_depth = max_depth
        self._forbidden = forbidden
        self.keys = 0
        self.strings = 0
        self.quotes = 0
        self.found: str | None = None
        """A forbidden key below the top level."""

    def walk(self, root: dict[str, Any]) -> None:
        level: list[Any] = [root]
        depth = 0
        while level:
            depth += 1
            if depth > self._max_depth:
                text = f"the body nests deeper than {self._max_depth} levels"
                raise ClientError(Refusal(code="too_deep", message=text))
            below: list[Any] = []
            for node in level:
                if is_object(node):
                    self._keys(node, depth)
                    self._values(node.values(), below)
                elif not _are_integers(node):  # token ids come by the hundred thousand
                    self._values(node, below)
            level = below

    def _keys(self, node: dict[str, Any], depth: int) -> None:
        self.keys += len(node)
        names = "".join(node)
        if '"' in names:
            self.quotes += names.count('"')
        if "\0" in names:
            raise _nul()
        if depth > 1 and not (self._forbidden.isdisjoint(node) and is_plain(names)):
            found = spelled(node, self._forbidden)
            if found:
                self.found = min(found.values())

    def _values(self, values: Iterable[Any], below: list[Any]) -> None:
        for value in values:
            if type(value) is str:
                self.strings += 1
                if '"' in value:  # finding none is ten times faster than counting none
                    self.quotes += value.count('"')
                if "\0" in value:
                    raise _nul()
            elif type(value) is dict or type(value) is list:
                below.append(value)


def _are_integers(values: list[Any]) -> bool:
    return bool(values) and type(values[0]) is int and set(map(type, values)) == {int}


def decode_object(
    body: bytes, max_depth: int, forbidden: frozenset[str]
) -> tuple[dict[str, Any], str | None]:
    """The JSON object in `body`, and the first forbidden key found below its top level, if any."""
    if len(body) > _SMALL_BYTES:
        _refuse_complex(body)
    try:
        decoded = _DECODER.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ValueError) as error:
        raise ClientError(_why_malformed(body, error)) from error
    if not is_object(decoded):
        raise ClientError(Refusal(code="invalid_json", message="the body is not a JSON object"))
    root = decoded
    survey = Survey(max_depth, forbidden)
    survey.walk(root)
    expected = 2 * (survey.keys + survey.strings) + survey.quotes
    if not _has_quotes(body, expected - (_spelled_quotes(body) if survey.quotes else 0)):
        raise _duplicate(body)
    if len(root) > 1 and len({name.casefold() for name in root}) != len(root):
        raise ClientError(Refusal(code="duplicate_key", message="two keys differ in case alone"))
    return root, survey.found


def has_negative_zero(body: bytes) -> bool:
    """Whether some number of the body is -0, which readers take for an integer or not."""
    if b"-0" not in body:
        return False
    return any(_NEGATIVE_ZERO.search(piece) is not None for piece in _outside(body))


def without(body: bytes, names: frozenset[str]) -> bytes:
    """The same object less some top-level fields; all other values byte for byte as they came."""
    slices = _SLICES.decode(body)
    return msgspec.json.encode({name: raw for name, raw in slices.items() if name not in names})


def _refuse_complex(body: bytes) -> None:
    """Before it is decoded: that alone would take too long."""
    escaped = body.count(b'\\"') - body.count(b"\\\\")  # at least so many quotes delimit nothing
    are_strings_few = body.count(b'"') - escaped <= 2 * MAX_STRINGS
    if are_strings_few and _marks(body) <= MAX_MARKS and body.count(b",") <= MAX_ITEMS:
        return
    bare = _bare(body)
    if bare.count(b'"') > 2 * MAX_STRINGS:
        raise _complex(f"{MAX_STRINGS} strings")
    structure = b"".join(bare.split(b'"')[::2])
    if _marks(structure) > MAX_MARKS:
        raise _complex(f"{MAX_MARKS} brackets, braces and colons")
    if structure.count(b",") > MAX_ITEMS:
        raise _complex(f"{MAX_ITEMS} items")


def _complex(limit: str) -> ClientError:
    text = f"the body has more than {limit}"
    return ClientError(Refusal(code="too_complex", message=text))


def _marks(text: bytes) -> int:
    return text.count(b"[") + text.count(b"{") + text.count(b":")


def _bare(body: bytes) -> bytes:
    """Without escaped backslashes and quotes: each quote left begins or ends a string."""
    if b"\\" not in body:
        return body
    return body.replace(b"\\\\", b"").replace(b'\\"', b"")


def _outside(body: bytes) -> list[bytes]:
    """What stands between the strings. For as many of them as `_refuse_complex` lets through."""
    return _bare(body).split(b'"')[::2]


def _has_quotes(body: bytes, count: int) -> bool:
    """Whether there are just so many. Where they are few, taking them out finds each by `memchr`,
    and is ten times faster than `bytes.count`, which looks at every byte.
    """
    if count * _FEW_QUOTES > len(body):
        return body.count(b'"') == count
    return len(body) - len(body.replace(b'"', b"", count + 1)) == count


def _spelled_quotes(body: bytes) -> int:
    """How many quotes are written `\\u0022`."""
    if b"u0022" not in body:
        return 0
    return body.replace(b"\\\\", b"").count(b"\\u0022")


def _duplicate(body: bytes) -> ClientError:
    """The refusal of a body in which the decoder dropped a key. Names it where that is cheap."""
    if len(body) <= _SMALL_BYTES:
        json.loads(body, object_pairs_hook=_distinct)
    return ClientError(Refusal(code="duplicate_key", message="a key is given more than once"))


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                text = f"the key {quoted(name)} is given more than once"
                raise ClientError(Refusal(code="duplicate_key", message=text))
            seen.add(name)
    return entries


def _why_malformed(body: bytes, error: Exception) -> Refusal:
    if isinstance(error, RecursionError):
        return Refusal(code="too_deep", message="the body nests too deeply")
    text = str(error)
    try:
        body.decode()
    except UnicodeDecodeError as broken:
        return Refusal(code="invalid_utf8", message=f"the body is not UTF-8 at byte {broken.start}")
    if re.search(rb"\\u[dD][89a-fA-F]", body) is not None:
        return Refusal(code="invalid_utf8", message="a string holds half a surrogate pair")
    at_byte = _AT_BYTE.search(text)
    if at_byte is not None:
        return Refusal(code="invalid_json", message=f"malformed JSON at byte {at_byte[1]}")
    if "range" in text:
        return Refusal(code="invalid_json", message="the body holds a number that is out of range")
    return Refusal(code="invalid_json", message=f"the JSON ends early, at byte {len(body)}")


def _nul() -> ClientError:
    return ClientError(Refusal(code="invalid_utf8", message="a string holds the NUL character"))
