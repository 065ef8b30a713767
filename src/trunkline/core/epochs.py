"""Epochs: a counter on each thing that can be revoked, and the table of all of them.

The epochs of a request are part of its block keys and of its salt, so that raising one makes all
older names unreachable at once. A table is immutable: a holder swaps one reference, and everything
it decides from then on is under the new one. Must never: lower a revision or an epoch. Read
`freshness.py` for how long a holder may believe its table.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from trunkline.core.identity import Epochs, Scope, ScopeKind
from trunkline.core.principals import Principal

MAX_SUBJECT_BYTES = 512


class SubjectKind(Enum):
    """What can be revoked; the order is that of `Epochs`."""

    FLEET = "fleet"
    ORG = "org"
    TENANT = "tenant"
    USER = "user"
    KEY_CLASS = "key_class"
    PUBLIC = "public"
    MODEL = "model"
    ADAPTER = "adapter"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One thing that can be revoked. `path` is its id; empty for the fleet alone.

    The path of a user is `<tenant id>/<user>`. Raises ValueError for a path that is missing, too
    long or not printable.
    """

    kind: SubjectKind
    path: str = ""

    def __post_init__(self) -> None:
        if (self.kind is SubjectKind.FLEET) is not (not self.path):
            raise ValueError(f"{self.kind.value} with the path {self.path[:80]!r}")
        if len(self.path.encode()) > MAX_SUBJECT_BYTES or not self.path.isprintable():
            raise ValueError(f"the path of a {self.kind.value} is too long or not printable")

    def __str__(self) -> str:
        return f"{self.kind.value}/{self.path}" if self.path else self.kind.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """What one request was admitted under: each part of it that can be revoked, and its epoch."""

    subjects: tuple[Subject, ...]
    epochs: Epochs
    """By every part of the principal, whatever the scope: what the exit fence goes by."""
    rev: int
    """The `changed_rev` of the table."""
    min_rev: int = 0
    """When one of its parts was last raised: who holds a copy of the table must have seen this
    much. What happened to others since is nothing to it.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochTable:
    """All epochs as of one revision of the registry."""

    rev: int = 0
    changed_rev: int = 0
    """The revision of the last change to what is below: the others leave every admission as it is.
    """
    epochs: Mapping[Subject, int] = field(default_factory=dict[Subject, int])
    """Subjects that were never raised are not in it: their epoch is 0."""
    barred: frozenset[Subject] = frozenset()
    """Revoked and not enabled again: new requests are refused."""
    raised_at: Mapping[Subject, int] = field(default_factory=dict[Subject, int])
    """The revision in which each subject was raised last."""
    fences: Mapping[Subject, int] = field(default_factory=dict[Subject, int])
    """The epoch of each subject's last revocation: what was admitted below it may not go out."""

    def raised(self, subject: Subject, epoch: int, *, rev: int, bars: bool) -> EpochTable:
        """The table after an invalidation, or (`bars`) a revocation. Raises ValueError where a
        revision is skipped or an epoch does not grow.
        """
        if epoch <= self.epochs.get(subject, 0):
            raise ValueError(f"the epoch of {subject} does not grow: {epoch}")
        barred = self.barred | {subject} if bars else self.barred
        fences = {**self.fences, subject: epoch} if bars else self.fences
        epochs = {**self.epochs, subject: epoch}
        raised_at = {**self.raised_at, subject: rev}
        return replace(
            self._at(rev),
            changed_rev=rev,
            epochs=epochs,
            raised_at=raised_at,
            barred=barred,
            fences=fences,
        )

    def enabled(self, subject: Subject, *, rev: int) -> EpochTable:
        """The table after a revoked subject was enabled again; its epoch stays raised."""
        return replace(self._at(rev), changed_rev=rev, barred=self.barred - {subject})

    def advanced(self, *, rev: int) -> EpochTable:
        """The table after a change that is none to epochs."""
        return self._at(rev)

    def admit(self, principal: Principal, model: str, adapter: str = "") -> Admission:
        """What a request of `principal` for `model` (and `adapter`) is admitted under.

        Raises PermissionError that names the kind of what is barred.
        """
        subjects = _subjects_of(principal, model, adapter)
        for subject in subjects:
            if subject in self.barred:
                raise PermissionError(subject.kind.value)
        return self.admission(subjects)

    def admission(self, subjects: tuple[Subject, ...]) -> Admission:
        """What stands on these parts, as they are now."""
        return Admission(
            subjects=subjects,
            epochs=self.epochs_of(subjects),
            rev=self.changed_rev,
            min_rev=max((self.raised_at.get(subject, 0) for subject in subjects), default=0),
        )

    def epochs_of(self, subjects: tuple[Subject, ...]) -> Epochs:
        """The present epochs of the parts of one scope path."""
        return Epochs(**{s.kind.value: self.epochs.get(s, 0) for s in subjects})

    def is_current(self, admission: Admission) -> bool:
        """Whether nothing that the admission stands on was revoked or invalidated since."""
        if admission.rev == self.changed_rev:
            return True
        return self.epochs_of(admission.subjects) == admission.epochs

    def may_leave(self, admission: Admission) -> bool:
        """Whether output of what was so admitted may go to its client: the exit fence. What was
        merely invalidated runs to its end.
        """
        if admission.rev == self.changed_rev:
            return True
        return all(
            getattr(admission.epochs, subject.kind.value) >= self.fences.get(subject, 0)
            for subject in admission.subjects
        )

    def _at(self, rev: int) -> EpochTable:
        if rev != self.rev + 1:
            raise ValueError(f"revision {rev} does not follow {self.rev}")
        return replace(self, rev=rev)


_IN_SCOPE: dict[ScopeKind, frozenset[str]] = {
    ScopeKind.SESSION: frozenset({"org", "tenant", "user", "key_class"}),
    ScopeKind.USER: frozenset({"org", "tenant", "user", "key_class"}),
    ScopeKind.TENANT: frozenset({"org", "tenant", "key_class"}),
    ScopeKind.ORG: frozenset({"org"}),
    ScopeKind.PUBLIC: frozenset({"public"}),
}


_ALWAYS = frozenset({"fleet", "model", "adapter"})


def scoped(epochs: Epochs, kind: ScopeKind) -> Epochs:
    """The epochs that a namespace of this kind of scope is derived with; absent parts are 0.

    A tenant's blocks are shared by its users, so the epoch of a user is no part of them.
    """
    counted = _IN_SCOPE[kind] | _ALWAYS
    kept = {name.value: getattr(epochs, name.value) for name in SubjectKind}
    return Epochs(**{name: value for name, value in kept.items() if name in counted})


def subjects_in(subjects: tuple[Subject, ...], kind: ScopeKind) -> tuple[Subject, ...]:
    """Those of an admission whose epochs are part of such a namespace."""
    counted = _IN_SCOPE[kind] | _ALWAYS
    return tuple(subject for subject in subjects if subject.kind.value in counted)


def domain_of(scope: Scope, epochs: Epochs) -> bytes:
    """A short name of all namespaces of one scope under these epochs, whatever the model."""
    parts = (scope.org, scope.tenant, scope.user, scope.session, scope.public_id)
    named = framed(scope.kind.value, *parts) + scoped(epochs, scope.kind).packed()
    return hashlib.blake2b(named, digest_size=16, person=b"domain").digest()


def framed(*parts: str) -> bytes:
    """Parts behind their lengths, so that no two lists of parts look alike."""
    encoded = [part.encode("utf-8", "surrogatepass") for part in parts]
    return b"".join(len(part).to_bytes(4, "little") + part for part in encoded)


def _subjects_of(principal: Principal, model: str, adapter: str) -> tuple[Subject, ...]:
    parts = (
        (SubjectKind.ORG, principal.org),
        (SubjectKind.TENANT, principal.tenant),
        (SubjectKind.USER, principal.user and f"{principal.tenant}/{principal.user}"),
        (SubjectKind.KEY_CLASS, principal.key_class),
        (SubjectKind.MODEL, model),
        (SubjectKind.ADAPTER, adapter),
    )
    named = (Subject(kind=kind, path=path) for kind, path in parts if path)
    return (Subject(kind=SubjectKind.FLEET), *named)
