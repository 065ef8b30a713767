"""What a gateway says about a request beside its prompt: in whose name it may use a cache.

A ticket names the namespace, the epochs it was admitted under and whose they are, the revision that
the worker must have seen, and the quota domain. It is read strictly: one that is not exactly right
is a ValueError, never guessed at. Read `judge.py` for what is made of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import msgspec

from trunkline.core.epochs import Subject, SubjectKind
from trunkline.core.identity import TAG_BYTES
from trunkline.core.transfer import Grant
from trunkline.kv.records import Owner

MAX_TICKET_BYTES = 16_384
"""Eight subjects of 512 bytes, escaped, and the rest."""
MAX_EPOCH = 2**64 - 1
MAX_REV = 2**63 - 1
MAX_QUOTA_BYTES = 2**53
MAX_REGIONS = 8
_DOMAIN = re.compile(r"[A-Za-z0-9._-]{1,64}")
_KINDS = tuple(SubjectKind)
_PUBLIC = f"{SubjectKind.PUBLIC.value}/"
_FLEET = SubjectKind.FLEET.value


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

    def is_over(self, grant: Grant) -> bool:
        """Whether a grant stands on what the ticket stands on: for a public beginning on a part of
        that, as the rest is the caller's own; for the caller's own blocks on all of it, but for
        the public part.
        """
        told = set(zip(self.subjects, self.epochs, strict=True))
        granted = set(zip(grant.subjects, grant.epochs, strict=True))
        if not granted <= told or _FLEET not in grant.subjects:
            return False
        if grant.ns in self.regions:
            return any(subject.startswith(_PUBLIC) for subject in grant.subjects)
        return all(subject.startswith(_PUBLIC) for subject, _ in told - granted)

    def owner_of(self, grant: Grant) -> Owner:
        """Whose pulled blocks will be here. What is public is charged to nobody."""
        return Owner(
            ns=grant.ns,
            subjects=grant.subjects,
            epochs=grant.epochs,
            domain=self.tenant if grant.ns == self.ns else "",
        )


def read_ticket(raw: bytes) -> Ticket:
    """The ticket in a JSON text. Raises ValueError."""
    if len(raw) > MAX_TICKET_BYTES:
        raise ValueError(f"it has {len(raw)} bytes, at most {MAX_TICKET_BYTES} are taken")
    try:
        return _checked(msgspec.json.decode(raw, type=_Wire))
    except RecursionError as error:
        raise ValueError(str(error)) from error


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
            raise ValueError(f"cap is {wire.cap}, below the floor of {wire.floor}")
    if len(wire.regions) > MAX_REGIONS:
        raise ValueError(f"regions has {len(wire.regions)} tags, at most {MAX_REGIONS} are taken")
    subjects, epochs = _subjects(wire)
    if wire.ns and _FLEET not in subjects:
        raise ValueError("subjects lacks the fleet")
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
        raise ValueError(f"epochs has {len(wire.epochs)} numbers, needed are {len(_KINDS)}")
    for epoch in wire.epochs:
        _within("epochs", epoch, MAX_EPOCH)
    named: dict[SubjectKind, str] = {}
    for text in wire.subjects:
        try:
            kind = subject_named(text).kind
        except ValueError as error:
            raise ValueError(f"subjects: {error}") from error
        if kind in named:
            raise ValueError(f"subjects names two of the kind {kind.value}")
        named[kind] = text
    epochs = dict(zip(_KINDS, wire.epochs, strict=True))
    for kind, epoch in epochs.items():
        if epoch and kind not in named:
            raise ValueError(
                f"the {kind.value} has the epoch {epoch} and is not among the subjects"
            )
    return tuple(named.values()), tuple(epochs[kind] for kind in named)


def _within(name: str, value: int, high: int) -> None:
    if not 0 <= value <= high:
        raise ValueError(f"{name} is {value}, allowed are 0 to {high}")


def _domain(text: str) -> str:
    if not _DOMAIN.fullmatch(text):
        raise ValueError("tenant must be 1 to 64 letters, digits, '-', '_' or '.'")
    return text


def _tag(name: str, text: str) -> bytes:
    if len(text) != 2 * TAG_BYTES or any(one not in "0123456789abcdef" for one in text):
        raise ValueError(f"{name} must be {2 * TAG_BYTES} hex digits in lower case")
    return bytes.fromhex(text)
