"""What a gateway says about a request beside its body: in whose name it may use the cache.

A ticket names the namespace, the epochs it was admitted under and whose they are, the revision that
the worker must have seen, and the quota domain. It is read strictly: one that is not exactly right
is answered 400, never guessed at. Read `fence.py` for what is made of it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from trunkline.core.epochs import Subject, SubjectKind
from trunkline.core.identity import TAG_BYTES
from trunkline.worker.requests import MAX_REGIONS, BadRequest

HEADER = b"x-trunkline-ticket"
MAX_TICKET_BYTES = 16_384
"""Eight subjects of 512 bytes, escaped, and the rest."""
MAX_EPOCH = 2**64 - 1
MAX_REV = 2**63 - 1
MAX_QUOTA_BYTES = 2**53
_DOMAIN = re.compile(r"[A-Za-z0-9._-]{1,64}")
_KINDS = tuple(SubjectKind)
_Kind = TypeVar("_Kind", bound=msgspec.Struct)


class _Wire(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    ns: str
    epochs: list[int]
    rev: int
    tenant: str
    subjects: list[str]
    floor: int = 0
    cap: int | None = None
    regions: list[str] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """One checked ticket."""

    ns: bytes
    """The namespace tag; empty where nothing may be looked up or kept (scope `none`)."""
    subjects: tuple[str, ...]
    epochs: tuple[int, ...]
    """The epoch of each subject."""
    rev: int
    tenant: str
    floor_bytes: int = 0
    cap_bytes: int | None = None
    """None for no cap."""
    regions: tuple[bytes, ...] = field(default=())
    """Namespace tags of the body's `cache_salt_regions`, one for each."""


def ticket_from(headers: Sequence[tuple[bytes, bytes]]) -> Ticket | None:
    """The ticket among raw headers; None where there is none. Raises BadRequest."""
    wire = decoded_header(headers, HEADER, MAX_TICKET_BYTES, _Wire)
    return None if wire is None else _checked(wire)


def decoded_header(
    headers: Sequence[tuple[bytes, bytes]], name: bytes, max_bytes: int, kind: type[_Kind]
) -> _Kind | None:
    """The JSON of a header that may be there once; None where it is not. Raises BadRequest."""
    found = [value for header, value in headers if header == name]
    if not found:
        return None
    if len(found) > 1:
        raise bad_header(name, "there are two")
    if len(found[0]) > max_bytes:
        raise bad_header(name, f"it has {len(found[0])} bytes, at most {max_bytes} are taken")
    try:
        return msgspec.json.decode(found[0], type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise bad_header(name, str(error)) from error


def bad_header(name: bytes, why: str) -> BadRequest:
    return BadRequest(f"{name.decode()}: {why}", name.decode())


def subject_named(text: str) -> Subject:
    """Read back what `str(subject)` gave. Raises ValueError."""
    kind, _, path = text.partition("/")
    subject = Subject(kind=SubjectKind(kind), path=path)
    if str(subject) != text:
        raise ValueError(f"{text[:80]!r} is not how the subject is written")
    return subject


def _checked(wire: _Wire) -> Ticket:
    _within("rev", wire.rev, MAX_REV)
    _within("floor", wire.floor, MAX_QUOTA_BYTES)
    if wire.cap is not None:
        _within("cap", wire.cap, MAX_QUOTA_BYTES)
        if wire.cap < wire.floor:
            raise _bad(f"cap is {wire.cap}, below the floor of {wire.floor}")
    if len(wire.regions) > MAX_REGIONS:
        raise _bad(f"regions has {len(wire.regions)} tags, at most {MAX_REGIONS} are taken")
    subjects, epochs = _subjects(wire)
    if wire.ns and "fleet" not in subjects:
        raise _bad("subjects lacks the fleet")
    return Ticket(
        ns=_tag("ns", wire.ns) if wire.ns else b"",
        subjects=subjects,
        epochs=epochs,
        rev=wire.rev,
        tenant=_domain(wire.tenant),
        floor_bytes=wire.floor,
        cap_bytes=wire.cap,
        regions=tuple(_tag("regions", tag) for tag in wire.regions),
    )


def _subjects(wire: _Wire) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Each subject beside its epoch. An epoch whose subject is not named could not be checked."""
    if len(wire.epochs) != len(_KINDS):
        raise _bad(f"epochs has {len(wire.epochs)} numbers, needed are {len(_KINDS)}")
    for epoch in wire.epochs:
        _within("epochs", epoch, MAX_EPOCH)
    named: dict[SubjectKind, str] = {}
    for text in wire.subjects:
        try:
            kind = subject_named(text).kind
        except ValueError as error:
            raise _bad(f"subjects: {error}") from error
        if kind in named:
            raise _bad(f"subjects names two of the kind {kind.value}")
        named[kind] = text
    epochs = dict(zip(_KINDS, wire.epochs, strict=True))
    for kind, epoch in epochs.items():
        if epoch and kind not in named:
            raise _bad(f"the {kind.value} has the epoch {epoch} and is not among the subjects")
    return tuple(named.values()), tuple(epochs[kind] for kind in named)


def _within(name: str, value: int, high: int) -> None:
    if not 0 <= value <= high:
        raise _bad(f"{name} is {value}, allowed are 0 to {high}")


def _domain(text: str) -> str:
    if not _DOMAIN.fullmatch(text):
        raise _bad("tenant must be 1 to 64 letters, digits, '-', '_' or '.'")
    return text


def _tag(name: str, text: str) -> bytes:
    if len(text) != 2 * TAG_BYTES or any(one not in "0123456789abcdef" for one in text):
        raise _bad(f"{name} must be {2 * TAG_BYTES} hex digits in lower case")
    return bytes.fromhex(text)


def _bad(why: str) -> BadRequest:
    return bad_header(HEADER, why)
