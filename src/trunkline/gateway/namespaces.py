"""The namespaces that requests run under, made when first needed and given back when they are old.

One for each domain (scope and epochs) and block size. The directory learns each one's salt before a
request with it goes out, so that the events of its blocks are understood. Bounded: of the tenant
that has most, the one that was used longest ago goes, and with it what the directory knew under it.
So sessions and users of one tenant push out its own namespaces, and those of others only where it
has no more than they (`core/shelves.py`). What an organisation shares, and each public prefix, are
owners of their own beside the tenants. Must never: keep a namespace whose epochs were raised. Read
`core/identity.py` for the derivation.
"""

from __future__ import annotations

import base64
import json
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from trunkline.core.epochs import (
    Admission,
    EpochTable,
    Subject,
    SubjectKind,
    domain_of,
    scoped,
    subjects_in,
)
from trunkline.core.handover import Lineage
from trunkline.core.identity import Epochs, Namespace, Scope
from trunkline.core.keys import KeyChain, chain
from trunkline.core.publics import two_zone_chain
from trunkline.core.records import NamespaceTag, Slot
from trunkline.core.shelves import Shelves
from trunkline.gateway.contracts import Grant
from trunkline.gateway.publics import PublicPrefixes

MAX_NAMESPACES = 32_768
"""Half of what a directory takes: what was given back may still be being cleared there."""


class Derive(Protocol):
    """Makes a namespace of the served model, or of one of its adapters."""

    def __call__(
        self, scope: Scope, epochs: Epochs, block_tokens: int, adapter: str
    ) -> Namespace: ...


class NamespaceIndex(Protocol):
    """What has to know of namespaces: the directory."""

    def admit_namespace(self, namespace: Namespace) -> int: ...

    def retire_namespace(self, tag: NamespaceTag) -> bool: ...


class CacheQuota(Protocol):
    """What a tenant may hold of a worker's cache, in bytes."""

    @property
    def cache_floor_bytes(self) -> int: ...
    @property
    def cache_cap_bytes(self) -> int | None: ...


@dataclass(slots=True)
class _Kept:
    namespace: Namespace
    subjects: tuple[Subject, ...]
    ticket: tuple[Admission, CacheQuota | None, str] | None = None
    """For which admission and quota, and its text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stakes:
    """What blocks of one namespace stand on, as a ticket says it."""

    ns: bytes
    subjects: tuple[str, ...]
    epochs: tuple[int, ...]
    """The epoch of each subject."""
    rev: int
    """Which revision of the registry must have been seen."""


def _no_quota(_tenant: str) -> None:
    """Where nobody's share is bounded."""


@dataclass(slots=True)
class PromptKeys:
    """The keys of one prompt at one block size."""

    private: KeyChain
    """All under the caller's own namespace."""
    zoned: KeyChain | None = None
    """The beginning under a public namespace, where the prompt has such a one."""
    public: Admission | None = None
    """What the public beginning stands on."""
    zoned_slots: set[Slot] = field(default_factory=set[Slot])
    """Workers where the public beginning lies ready, and counts."""

    def at(self, slot: Slot) -> KeyChain:
        """What a request to this worker goes by."""
        if self.zoned is not None and slot in self.zoned_slots:
            return self.zoned
        return self.private


class Namespaces:
    """See the module."""

    def __init__(
        self,
        derive: Derive,
        index: NamespaceIndex,
        *,
        draw: Callable[[int], bytes],
        quota_of: Callable[[str], CacheQuota | None] = _no_quota,
        max_namespaces: int = MAX_NAMESPACES,
    ) -> None:
        """`draw(n)` gives n unguessable bytes; `quota_of(tenant id)` what it may hold: the same
        object as long as nothing changed.
        """
        self._derive = derive
        self._quota_of = quota_of
        self._draw = draw
        self._index = index
        self._max_namespaces = max_namespaces
        self._kept = Shelves[tuple[bytes, str, int], _Kept]()
        self._names: dict[NamespaceTag, tuple[str, tuple[bytes, str, int]]] = {}
        """Under which owner and name each is kept."""
        self.publics: PublicPrefixes | None = None
        """None where there is one tenant: nothing is shared, as all is."""

    def __len__(self) -> int:
        return len(self._kept)

    def namespace(self, grant: Grant, block_tokens: int) -> Namespace | None:
        """The namespace of a grant at one block size; None where nothing may be shared."""
        if grant.scope is None:
            return None
        return self._keep(grant, grant.scope, block_tokens).namespace

    def keys(self, grant: Grant, tokens: array[int], block_tokens: int) -> PromptKeys | None:
        """The keys of a prompt; None where nothing may be reused."""
        private = self.namespace(grant, block_tokens)
        if private is None:
            return None
        keys = PromptKeys(chain(private, tokens))
        start = self.publics.start(grant, tokens, block_tokens) if self.publics else None
        public = self.namespace(start.grant, block_tokens) if start else None
        if start is not None and public is not None:
            keys.zoned = two_zone_chain(public, private, tokens, start.blocks)
            keys.public = start.grant.admission
        return keys

    def ticket(self, grant: Grant, block_tokens: int, public: Namespace | None = None) -> str:
        """What a worker with an agent is told of a request: `x-trunkline-ticket`, one line of JSON.

        It names whose cache may be used, the epochs and whose they are, the revision that must have
        been seen, and the tenant's share of the cache; with `public`, whose the beginning is.
        """
        quota = self._quota_of(grant.principal.tenant)
        if grant.scope is None:
            admission = grant.admission
            return _ticket(grant, "", admission.epochs, admission.subjects, quota)
        kept = self._keep(grant, grant.scope, block_tokens)
        namespace = kept.namespace
        subjects = subjects_in(grant.admission.subjects, namespace.scope.kind)
        if public is not None:
            name = Subject(kind=SubjectKind.PUBLIC, path=public.scope.public_id)
            epochs = replace(namespace.epochs, public=public.epochs.public)
            text = _ticket(grant, namespace.tag.hex(), epochs, (*subjects, name), quota)
            return f'{text[:-1]},"regions":["{public.tag.hex()}"]}}'
        known = kept.ticket
        if known is None or known[0] is not grant.admission or known[1] is not quota:
            text = _ticket(grant, namespace.tag.hex(), namespace.epochs, subjects, quota)
            known = kept.ticket = (grant.admission, quota, text)
        return known[2]

    def forget(self, grant: Grant, block_tokens: int) -> None:
        """Give a namespace back that nobody will ask for again."""
        assert grant.scope is not None, "nothing was made for it"
        owner, name = _owner(grant.scope), (grant.domain, grant.adapter, block_tokens)
        if self._kept.get(owner, name) is not None:
            self._retire(self._kept.pop(owner, name))

    def keeps(self, grant: Grant, block_tokens: int) -> bool:
        """Whether the grant's namespace is in use: false once one of its epochs was raised."""
        if grant.scope is None:
            return False
        return (
            self._kept.get(_owner(grant.scope), (grant.domain, grant.adapter, block_tokens))
            is not None
        )

    def stakes(self, grant: Grant, block_tokens: int) -> Stakes | None:
        """The same for what may be pulled on behalf of a request; None where nothing is shared."""
        if grant.scope is None:
            return None
        namespace = self._keep(grant, grant.scope, block_tokens).namespace
        subjects = subjects_in(grant.admission.subjects, namespace.scope.kind)
        return Stakes(
            ns=namespace.tag,
            subjects=tuple(str(subject) for subject in subjects),
            epochs=tuple(getattr(namespace.epochs, subject.kind.value) for subject in subjects),
            rev=grant.admission.min_rev,
        )

    def _keep(self, grant: Grant, scope: Scope, block_tokens: int) -> _Kept:
        name = (grant.domain, grant.adapter, block_tokens)
        owner = _owner(scope)
        kept = self._kept.get(owner, name)
        if kept is None:
            namespace = self._derive(scope, grant.epochs, block_tokens, grant.adapter)
            kept = _Kept(namespace, grant.admission.subjects)
            self._put(owner, name, kept)
        return kept

    def _put(self, owner: str, name: tuple[bytes, str, int], kept: _Kept) -> None:
        self._kept.put(owner, name, kept)
        self._names[kept.namespace.tag] = owner, name
        self._index.admit_namespace(kept.namespace)
        if len(self._kept) > self._max_namespaces:
            self._retire(self._kept.evict())

    def _retire(self, kept: _Kept) -> None:
        del self._names[kept.namespace.tag]
        self._index.retire_namespace(kept.namespace.tag)

    # -- what gateways tell one another ------------------------------------------------------------

    def lineage(self, tag: NamespaceTag) -> Lineage | None:
        """What a namespace that is kept was made of; None for another."""
        named = self._names.get(tag)
        kept = None if named is None else self._kept.get(*named)
        if named is None or kept is None:
            return None
        _, (_, adapter, block_tokens) = named
        return Lineage(
            tag=tag,
            scope=kept.namespace.scope,
            epochs=kept.namespace.epochs,
            adapter=adapter,
            block_tokens=block_tokens,
            subjects=kept.subjects,
        )

    def take_in(self, told: Lineage, table: EpochTable) -> bool:
        """Know a namespace that another gateway knows, as if a request had come for it; whether it
        is known. Not one that we derive otherwise, or of which an epoch was raised, and none where
        another would have to go for it.
        """
        if told.tag in self._names:
            return True
        name = (domain_of(told.scope, told.epochs), told.adapter, told.block_tokens)
        owner = _owner(told.scope)
        if len(self._kept) >= self._max_namespaces or self._kept.get(owner, name) is not None:
            return False
        namespace = self._derive(told.scope, told.epochs, told.block_tokens, told.adapter)
        kept = _Kept(namespace, told.subjects)
        if namespace.tag != told.tag or _is_stale(kept, table):
            return False
        self._put(owner, name, kept)
        return True

    def salt(self, grant: Grant, block_tokens: int) -> str:
        """What an engine is given as salt: where nothing may be shared, one of its own for each
        request, that nobody will send again.
        """
        namespace = self.namespace(grant, block_tokens)
        if namespace is not None:
            return namespace.salt
        return base64.urlsafe_b64encode(self._draw(32)).rstrip(b"=").decode("ascii")

    def retire_stale(self, table: EpochTable) -> int:
        """Give back every namespace of which an epoch was raised; how many these were."""
        stale = [
            (owner, name) for owner, name, kept in self._kept.items() if _is_stale(kept, table)
        ]
        for owner, name in stale:
            self._retire(self._kept.pop(owner, name))
        return len(stale)


def _owner(scope: Scope) -> str:
    return scope.tenant or scope.org or scope.public_id


def _is_stale(kept: _Kept, table: EpochTable) -> bool:
    """Keys of any class share a namespace until one of their classes is raised: that one leaves."""
    namespace = kept.namespace
    subjects = kept.subjects
    if not namespace.epochs.key_class:
        subjects = tuple(s for s in subjects if s.kind is not SubjectKind.KEY_CLASS)
    return scoped(table.epochs_of(subjects), namespace.scope.kind) != namespace.epochs


def _ticket(
    grant: Grant,
    tag: str,
    epochs: Epochs,
    subjects: tuple[Subject, ...],
    quota: CacheQuota | None,
) -> str:
    told: dict[str, object] = {
        "ns": tag,
        "epochs": [getattr(epochs, kind.value) for kind in SubjectKind],
        "rev": grant.admission.min_rev,
        "tenant": grant.principal.tenant,
        "subjects": [str(subject) for subject in subjects],
    }
    if quota is not None and quota.cache_floor_bytes:
        told["floor"] = quota.cache_floor_bytes
    if quota is not None and quota.cache_cap_bytes is not None:
        told["cap"] = quota.cache_cap_bytes
    return json.dumps(told, separators=(",", ":"))
