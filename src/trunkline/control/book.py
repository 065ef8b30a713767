"""What the registry knows at one revision: organisations, tenants, keys, public prefixes, epochs.

A `Book` is immutable; readers keep a reference as long as they like. A `Draft` is how the next one
is made, by one change or by the replay of a whole log: it refuses what does not fit what is there.
Must never: give an id out a second time, or know a clock. Read `registry.py` next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from trunkline.control.changes import TenantPolicySet
from trunkline.core.credentials import KeyBook, KeyRecord
from trunkline.core.epochs import EpochTable, Subject, SubjectKind
from trunkline.core.identity import ScopeKind
from trunkline.core.overload import Priority
from trunkline.core.publics import MAX_BOOK_TOKENS, MAX_PREFIXES, has_ended
from trunkline.errors import UnknownName

APPROVERS_NEEDED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much the registry takes; all keys have a bound of their own (`credentials.MAX_KEYS`)."""

    orgs: int = 10_000
    tenants: int = 100_000
    tenant_keys: int = 1_000
    """Keys of one tenant that are good, or will be."""
    publics: int = MAX_PREFIXES
    """That have not ended: as many as the data plane takes, so that what is approved is used."""
    public_tokens: int = MAX_BOOK_TOKENS
    """Of these together."""
    raised_users: int = 1_000
    """Users of one tenant that were ever raised; to revoke them, as many again."""
    raised_names: int = 30_000
    """Users, classes, models and adapters together: names that anyone can make up."""
    raised: int = 60_000
    """Everything but the fleet. Workers keep them all, and take 65,536 (`MAX_SUBJECTS` there): at
    more they would lose their leases, and all tenants their caches.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Org:
    """One organisation."""

    org: str
    name: str
    is_shared: bool = False
    """Its tenants may share among themselves, where they opt in as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """What a tenant may use. None is no limit."""

    requests_per_s: float | None = None
    tokens_per_s: float | None = None
    cache_floor_bytes: int = 0
    cache_cap_bytes: int | None = None
    weight: float = 1.0
    priority: Priority = Priority.NORMAL


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """One tenant and its policy."""

    tenant: str
    org: str
    name: str
    default_scope: ScopeKind = ScopeKind.TENANT
    """As its policy says; `Book.default_scope` is what counts."""
    is_shared: bool = False
    quota: Quota = Quota()


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicPrefix:
    """One registered prefix, approved or not yet. Ids, digests and tokens, never text."""

    public_id: str
    name: str
    owner: str
    proposer: str
    approvers: tuple[str, ...] = ()
    people: tuple[str, ...] = ()
    """Who is behind the proposer and the approvers, as of when each acted; see `person_of`."""
    tokens: bytes = field(repr=False)
    """Little-endian u32."""
    token_digest: bytes = field(repr=False)
    block_tokens: int
    model_id: str
    weights_digest: str = ""
    tokenizer_digest: str = ""
    template_digest: str = ""
    audience: frozenset[str] | None = None
    """Ids of organisations; None for all."""
    not_after_ms: int
    reason: str = ""
    is_withdrawn: bool = False

    @property
    def token_count(self) -> int:
        return len(self.tokens) // 4

    def has_ended(self, wall_ms: float) -> bool:
        """Whether it can never be used again."""
        return self.is_withdrawn or has_ended(self.not_after_ms, wall_ms)

    def is_live(self, wall_ms: float) -> bool:
        """Whether it may be used at this wall time."""
        is_approved = len(self.approvers) >= APPROVERS_NEEDED
        return is_approved and not self.has_ended(wall_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Book:
    """Everything that the log says up to `rev`."""

    rev: int = 0
    orgs: Mapping[str, Org] = field(default_factory=dict[str, Org])
    """By id; so for the others."""
    tenants: Mapping[str, Tenant] = field(default_factory=dict[str, Tenant])
    publics: Mapping[str, PublicPrefix] = field(default_factory=dict[str, PublicPrefix])
    """The latest of those that ended included."""
    keys: KeyBook = field(default_factory=KeyBook)
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    """`org/x`, `tenant/x`, `public/x` -> id."""
    retired: frozenset[str] = frozenset()
    """Ids of what was removed or forgotten: never given out again."""
    table: EpochTable = field(default_factory=EpochTable)

    def default_scope(self, tenant: str) -> ScopeKind:
        """What a tenant's requests share by default: `org` only where both sides opted in."""
        record = self.tenants[tenant]
        if record.default_scope is not ScopeKind.ORG:
            return record.default_scope
        is_open = record.is_shared and self.orgs[record.org].is_shared
        return ScopeKind.ORG if is_open else ScopeKind.TENANT

    def key(self, key_id: str) -> KeyRecord | None:
        return self.keys.get(key_id)

    def subject(self, name: str) -> Subject:
        """What `tenant/acme`, `user/acme/alice`, `model/x`, `fleet`, ... stands for.

        Where an id belongs, the name or the id itself will do. Raises UnknownName.
        """
        kind_name, _, rest = name.partition("/")
        try:
            kind = SubjectKind(kind_name)
        except ValueError as error:
            kinds = ", ".join(kind.value for kind in SubjectKind)
            raise UnknownName(f"{name[:80]!r} begins with none of {kinds}") from error
        path = rest
        if kind in (SubjectKind.ORG, SubjectKind.TENANT, SubjectKind.PUBLIC):
            path = self._id_of(kind.value, rest)
        elif kind is SubjectKind.USER:
            tenant, slash, user = rest.partition("/")
            if not slash or not user:
                raise UnknownName(f"{name[:80]!r} is no user: it is user/<tenant>/<name>")
            path = f"{self._id_of('tenant', tenant)}/{user}"
        try:
            return Subject(kind=kind, path=path)
        except ValueError as error:
            raise UnknownName(f"{name[:80]!r} names nothing: {error}") from error

    def name_of(self, subject: Subject) -> str:
        """The words for a subject, as an operator would write it; ids where no name is left."""
        if subject.kind is SubjectKind.ORG and subject.path in self.orgs:
            return f"org/{self.orgs[subject.path].name}"
        if subject.kind is SubjectKind.PUBLIC and subject.path in self.publics:
            return f"public/{self.publics[subject.path].name}"
        tenant, slash, user = subject.path.partition("/")
        is_named = subject.kind in (SubjectKind.TENANT, SubjectKind.USER) and tenant in self.tenants
        if not is_named:
            return str(subject)
        return f"{subject.kind.value}/{self.tenants[tenant].name}{slash}{user}"

    def knows(self, subject: Subject) -> bool:
        """Whether what is behind an id exists, or did. Models, adapters and classes always do."""
        ids: dict[SubjectKind, Mapping[str, object]] = {
            SubjectKind.ORG: self.orgs,
            SubjectKind.TENANT: self.tenants,
            SubjectKind.USER: self.tenants,
            SubjectKind.PUBLIC: self.publics,
        }
        owner = subject.path.partition("/")[0]
        return subject.kind not in ids or owner in ids[subject.kind] or owner in self.retired

    def _id_of(self, kind: str, word: str) -> str:
        found = self.names.get(f"{kind}/{word}")
        if found is not None:
            return found
        ids: Mapping[str, object] = {
            "org": self.orgs,
            "tenant": self.tenants,
            "public": self.publics,
        }[kind]
        if word not in ids:
            raise UnknownName(f"there is no {kind} {word[:80]!r}")
        return word


Check: TypeAlias = Callable[[Book], None]
"""Asked of the book that a change is about to be made to, in the step that commits it: whether it
may still be. Raises the GatewayError that says why not."""


def person_of(record: KeyRecord | None, actor: str) -> str:
    """Who is behind an actor: all keys of one user are one person. `record` is the actor's key."""
    return f"{record.tenant}/{record.user}" if record is not None and record.user else actor


def subject_of(text: str) -> Subject:
    """The subject that a record names by `str(subject)`. Raises ValueError."""
    kind, _, path = text.partition("/")
    return Subject(kind=SubjectKind(kind), path=path)


def quota_of(policy: TenantPolicySet) -> Quota:
    """The quota part of a policy. Raises ValueError where the floor is above the cap."""
    cap_bytes = policy.cache_cap_bytes
    if cap_bytes is not None and cap_bytes < policy.cache_floor_bytes:
        raise ValueError(
            f"the floor of {policy.cache_floor_bytes} bytes is above the cap of {cap_bytes}"
        )
    return Quota(
        requests_per_s=policy.requests_per_s,
        tokens_per_s=policy.tokens_per_s,
        cache_floor_bytes=policy.cache_floor_bytes,
        cache_cap_bytes=cap_bytes,
        weight=policy.weight,
        priority=Priority(policy.priority),
    )
