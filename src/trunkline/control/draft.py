"""The next book in the making: every rule that a change must keep, in one place.

Copies a table only when a change touches it, and once for a whole replay. Every refusal is a
ValueError with the value and what stands against it; `registry.py` says what that means there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import assert_never

from trunkline.control import changes as log
from trunkline.control.book import (
    APPROVERS_NEEDED,
    Book,
    Limits,
    Org,
    PublicPrefix,
    Tenant,
    person_of,
    quota_of,
    subject_of,
)
from trunkline.control.key_shelf import KeyShelf, key_record
from trunkline.core.epochs import EpochTable, Subject, SubjectKind
from trunkline.core.identity import ScopeKind
from trunkline.core.publics import MAX_AUDIENCE

MAX_PUBLIC_DAYS = 90
KEPT_ENDED_PUBLICS = 100
"""Public prefixes that ran out or were withdrawn, to be shown in lists; the oldest go first."""

_DAY_MS = 86_400_000
_MADE_UP = frozenset(
    {SubjectKind.USER, SubjectKind.KEY_CLASS, SubjectKind.MODEL, SubjectKind.ADAPTER}
)
"""Kinds of subjects that exist as soon as somebody names them."""


class Draft:
    """A book that changes, until it is taken as `book()`. Use it no further after a ValueError.

    Without `limits` it replays a log that exists: that is read whatever the limits are now, and
    what an earlier version let in that would be refused today counts for nothing.
    """

    def __init__(self, base: Book, limits: Limits | None) -> None:
        self._base = base
        self._limits = limits
        self._orgs: Mapping[str, Org] = base.orgs
        self._tenants: Mapping[str, Tenant] = base.tenants
        self._publics: Mapping[str, PublicPrefix] = base.publics
        self._names: Mapping[str, str] = base.names
        self._retired: set[str] | frozenset[str] = base.retired
        self._keys = KeyShelf(base.keys)
        self._table = base.table

    @property
    def rev(self) -> int:
        return self._table.rev

    def book(self) -> Book:
        return Book(
            rev=self._table.rev,
            orgs=self._orgs,
            tenants=self._tenants,
            publics=self._publics,
            keys=self._keys.book(),
            names=self._names,
            retired=frozenset(self._retired),
            table=self._table,
        )

    def apply(self, entry: log.Entry) -> None:
        """Take one more change. Raises ValueError where it does not fit."""
        change = entry.change
        rev = self._table.rev + 1
        match change:
            case log.EpochRaised():
                self._table = self._raised(change, rev)
            case log.SubjectEnabled():
                self._table = self._enabled(change, rev)
            case log.KeyAdded() | log.KeyRevoked():
                self._apply_to_keys(change, entry.intent)
                self._table = self._table.advanced(rev=rev)
            case log.PublicProposed() | log.PublicApproved() | log.PublicWithdrawn():
                self._apply_to_publics(change, entry.intent)
                self._table = self._table.advanced(rev=rev)
            case log.RevisionLost():
                self._table = self._table.advanced(rev=rev)
            case _:
                self._apply_to_tenants(change)
                self._table = self._table.advanced(rev=rev)
        assert self._table.rev == rev

    def _apply_to_tenants(
        self,
        change: log.OrgAdded
        | log.OrgRemoved
        | log.OrgPolicySet
        | log.TenantAdded
        | log.TenantRemoved
        | log.TenantPolicySet,
    ) -> None:
        match change:
            case log.OrgAdded():
                self._take_name("org", change.name, change.org)
                self._put_org(Org(org=change.org, name=change.name))
            case log.OrgPolicySet():
                self._put_org(replace(self._org(change.org), is_shared=change.is_shared))
            case log.OrgRemoved():
                self._remove_org(self._org(change.org))
            case log.TenantAdded():
                self._org(change.org)
                self._take_name("tenant", change.name, change.tenant)
                self._put_tenant(Tenant(tenant=change.tenant, org=change.org, name=change.name))
            case log.TenantPolicySet():
                self._set_policy(change)
            case log.TenantRemoved():
                self._remove_tenant(self._tenant(change.tenant))
            case _:
                assert_never(change)

    def _apply_to_keys(self, change: log.KeyAdded | log.KeyRevoked, intent: log.Intent) -> None:
        found, is_replay = self._keys.get(change.key_id), self._limits is None
        if isinstance(change, log.KeyRevoked):
            if found is not None and not found.is_revoked:
                self._keys.revoke(found)
            elif not (is_replay and change.key_id in self._retired):
                raise ValueError(f"there is no live key {change.key_id[:40]}")
            return
        if found is not None or change.key_id in self._retired:
            raise ValueError(f"key id {change.key_id} is taken")
        if self._tenant(change.tenant).org != change.org:
            raise ValueError(f"tenant {change.tenant} is not of organisation {change.org}")
        limit = None if self._limits is None else self._limits.tenant_keys
        self._keys.put(key_record(change), wall_ms=intent.wall_ms, limit=limit)
        self._retire_ids(self._keys.forgotten)

    def _apply_to_publics(
        self,
        change: log.PublicProposed | log.PublicApproved | log.PublicWithdrawn,
        intent: log.Intent,
    ) -> None:
        if isinstance(change, log.PublicProposed):
            self._org(change.owner)
            for org in change.audience or ():
                self._org(org)
            self._propose(_proposed(change, intent), intent)
            return
        prefix = self._publics.get(change.public_id)
        if prefix is None and self._limits is None and change.public_id in self._retired:
            return  # an earlier version kept it longer
        if prefix is None or prefix.is_withdrawn:
            raise ValueError(f"there is no public prefix {change.public_id}")
        if isinstance(change, log.PublicWithdrawn):
            names = self._own_names()
            del names[f"public/{prefix.name}"]
            self._put_public(replace(prefix, is_withdrawn=True))
        elif self._limits is not None or self._person(intent) not in prefix.people:
            self._put_public(_approved(prefix, intent, self._person(intent)))
            self._require_publics_fit(prefix, intent.wall_ms)

    def _propose(self, prefix: PublicPrefix, intent: log.Intent) -> None:
        """What ran out or was withdrawn gives its place to the new one, and its name."""
        namesake = self._publics.get(self._names.get(f"public/{prefix.name}", ""))
        if namesake is not None and namesake.has_ended(intent.wall_ms):
            del self._own_names()[f"public/{prefix.name}"]
            self._put_public(replace(namesake, is_withdrawn=True))
        self._take_name("public", prefix.name, prefix.public_id)
        ended = [p for p in self._publics.values() if p.has_ended(intent.wall_ms)]
        for oldest in ended[: max(0, len(ended) - KEPT_ENDED_PUBLICS)]:
            self._forget_public(oldest)
        self._put_public(replace(prefix, people=(self._person(intent),)))
        self._require_publics_fit(prefix, intent.wall_ms)

    def _require_publics_fit(self, prefix: PublicPrefix, wall_ms: int) -> None:
        """That the data plane takes it beside all others that may be in use."""
        if self._limits is None:
            return
        in_use = [other for other in self._publics.values() if not other.has_ended(wall_ms)]
        _require(len(in_use), self._limits.publics, "public prefixes")
        token_count = sum(other.token_count for other in in_use)
        _require(token_count, self._limits.public_tokens, "tokens of public prefixes")
        _require(
            len(prefix.audience or ()),
            MAX_AUDIENCE,
            f"organisations in the audience of {prefix.name}",
        )

    def _forget_public(self, prefix: PublicPrefix) -> None:
        self._publics = {**self._publics}
        del self._publics[prefix.public_id]
        if self._names.get(f"public/{prefix.name}") == prefix.public_id:
            del self._own_names()[f"public/{prefix.name}"]
        self._retire_ids({prefix.public_id})

    def _person(self, intent: log.Intent) -> str:
        return person_of(self._keys.get(intent.actor), intent.actor)

    def _raised(self, change: log.EpochRaised, rev: int) -> EpochTable:
        subject = self._known(change.subject)
        # An epoch never above its revision is what lets a restored backup name one that is above
        # all that were lost: the first revision behind them.
        if change.epoch > rev:
            raise ValueError(f"epoch {change.epoch} of {subject} is above its revision {rev}")
        if self._limits is not None and subject not in self._table.epochs:
            _require_room(self._table, subject, self._limits, bars=change.bars)
        if change.bars is not (change.verb == "revoke"):
            raise ValueError(f"{change.verb} of {subject} with bars={change.bars}")
        return self._table.raised(subject, change.epoch, rev=rev, bars=change.bars)

    def _enabled(self, change: log.SubjectEnabled, rev: int) -> EpochTable:
        subject = self._known(change.subject)
        if subject not in self._table.barred:
            raise ValueError(f"{subject} is not revoked")
        return self._table.enabled(subject, rev=rev)

    def _known(self, text: str) -> Subject:
        subject = subject_of(text)
        owner = subject.path.partition("/")[0]
        ids: dict[SubjectKind, Mapping[str, object]] = {
            SubjectKind.ORG: self._orgs,
            SubjectKind.TENANT: self._tenants,
            SubjectKind.USER: self._tenants,
            SubjectKind.PUBLIC: self._publics,
        }
        if subject.kind in ids and owner not in ids[subject.kind] and owner not in self._retired:
            raise ValueError(f"{text[:80]} is not known")
        return subject

    def _remove_org(self, org: Org) -> None:
        if any(tenant.org == org.org for tenant in self._tenants.values()):
            raise ValueError(f"organisation {org.name} has tenants")
        self._require_barred(Subject(kind=SubjectKind.ORG, path=org.org), f"org/{org.name}")
        owned = [
            p.name for p in self._publics.values() if p.owner == org.org and not p.is_withdrawn
        ]
        if owned:
            raise ValueError(f"organisation {org.name} answers for the public prefix {owned[0]}")
        self._retire("org", org.name, org.org)
        self._orgs = {**self._orgs}
        del self._orgs[org.org]

    def _remove_tenant(self, tenant: Tenant) -> None:
        name = f"tenant/{tenant.name}"
        self._require_barred(Subject(kind=SubjectKind.TENANT, path=tenant.tenant), name)
        self._retire("tenant", tenant.name, tenant.tenant)
        self._tenants = {**self._tenants}
        del self._tenants[tenant.tenant]
        for record in self._keys.of(tenant.tenant):
            if not record.is_revoked:
                self._keys.revoke(record)

    def _require_barred(self, subject: Subject, name: str) -> None:
        if subject not in self._table.barred:
            raise ValueError(f"{name} is in use: revoke it before it is removed")

    def _set_policy(self, change: log.TenantPolicySet) -> None:
        tenant = replace(
            self._tenant(change.tenant),
            default_scope=ScopeKind(change.default_scope),
            is_shared=change.is_shared,
            quota=quota_of(change),
        )
        if tenant.default_scope is ScopeKind.ORG and not tenant.is_shared:
            raise ValueError(f"tenant {tenant.name} has the scope org without opting in")
        self._put_tenant(tenant)

    def _take_name(self, kind: str, name: str, new_id: str) -> None:
        tables = (self._orgs, self._tenants, self._publics)
        if new_id in self._retired or any(new_id in table for table in tables):
            raise ValueError(f"id {new_id} was given out before")
        key = f"{kind}/{name}"
        if key in self._names:
            raise ValueError(f"{key} exists")
        self._own_names()[key] = new_id

    def _retire(self, kind: str, name: str, old_id: str) -> None:
        del self._own_names()[f"{kind}/{name}"]
        self._retire_ids({old_id})

    def _retire_ids(self, ids: set[str]) -> None:
        """They are never given out again."""
        if ids <= self._retired:
            return
        if isinstance(self._retired, frozenset):
            self._retired = set(self._retired)
        self._retired |= ids

    # The tables are the base's own until the first change; then they are ours to write.

    def _own_names(self) -> dict[str, str]:
        if self._names is self._base.names or not isinstance(self._names, dict):
            self._names = dict(self._names)
        return self._names

    def _put_org(self, org: Org) -> None:
        if self._orgs is self._base.orgs or not isinstance(self._orgs, dict):
            self._orgs = dict(self._orgs)
        self._orgs[org.org] = org
        if self._limits is not None:
            _require(len(self._orgs), self._limits.orgs, "organisations")

    def _put_tenant(self, tenant: Tenant) -> None:
        if self._tenants is self._base.tenants or not isinstance(self._tenants, dict):
            self._tenants = dict(self._tenants)
        self._tenants[tenant.tenant] = tenant
        if self._limits is not None:
            _require(len(self._tenants), self._limits.tenants, "tenants")

    def _put_public(self, prefix: PublicPrefix) -> None:
        if self._publics is self._base.publics or not isinstance(self._publics, dict):
            self._publics = dict(self._publics)
        self._publics[prefix.public_id] = prefix

    def _org(self, org: str) -> Org:
        if org not in self._orgs:
            raise ValueError(f"there is no organisation {org}")
        return self._orgs[org]

    def _tenant(self, tenant: str) -> Tenant:
        if tenant not in self._tenants:
            raise ValueError(f"there is no tenant {tenant}")
        return self._tenants[tenant]


def _require(count: int, limit: int, what: str) -> None:
    if count > limit:
        raise ValueError(f"{count} {what}, at most {limit}")


def _require_room(table: EpochTable, subject: Subject, limits: Limits, *, bars: bool) -> None:
    """Whether one more may have an epoch: it stays in the table of every holder for good."""
    if subject.kind is SubjectKind.FLEET:
        return
    kinds = [raised.kind for raised in table.epochs]
    if subject.kind is SubjectKind.USER:
        begin = subject.path.partition("/")[0] + "/"
        own = sum(s.kind is SubjectKind.USER and s.path.startswith(begin) for s in table.epochs)
        allowed = 2 * limits.raised_users if bars else limits.raised_users
        if own >= allowed:
            raise ValueError(
                f"{own} users of the tenant were revoked or invalidated, at most {allowed} may:"
                " do it to the tenant as a whole"
            )
    named = sum(kind in _MADE_UP for kind in kinds)
    if subject.kind in _MADE_UP and named >= limits.raised_names:
        raise ValueError(
            f"{named} users, classes, models and adapters were revoked or invalidated, at most"
            f" {limits.raised_names} may: do it to a tenant, or to the fleet"
        )
    if len(kinds) >= limits.raised:
        raise ValueError(
            f"{len(kinds)} subjects were revoked or invalidated, at most {limits.raised} may: do"
            " it to the fleet"
        )


def token_digest(tokens: bytes) -> bytes:
    """What a proposal names its exact tokens by: BLAKE2b-256 of their bytes."""
    return hashlib.blake2b(tokens, digest_size=32, person=b"public-tokens").digest()


def _proposed(change: log.PublicProposed, intent: log.Intent) -> PublicPrefix:
    block_bytes = 4 * change.block_tokens
    if len(change.tokens) % block_bytes != 0:
        raise ValueError(
            f"a prefix of {len(change.tokens) // 4} tokens is not of whole blocks of"
            f" {change.block_tokens}"
        )
    if change.token_digest != token_digest(change.tokens):
        raise ValueError("the digest is not that of the tokens")
    longest_ms = intent.wall_ms + MAX_PUBLIC_DAYS * _DAY_MS
    if not intent.wall_ms < change.not_after_ms <= longest_ms:
        raise ValueError(f"a public prefix ends within {MAX_PUBLIC_DAYS} days, and not before now")
    return PublicPrefix(
        public_id=change.public_id,
        name=change.name,
        owner=change.owner,
        proposer=intent.actor,
        tokens=change.tokens,
        token_digest=change.token_digest,
        block_tokens=change.block_tokens,
        model_id=change.model_id,
        weights_digest=change.weights_digest,
        tokenizer_digest=change.tokenizer_digest,
        template_digest=change.template_digest,
        audience=None if change.audience is None else frozenset(change.audience),
        not_after_ms=change.not_after_ms,
        reason=intent.reason,
    )


def _approved(prefix: PublicPrefix, intent: log.Intent, person: str) -> PublicPrefix:
    """With one more approval. Decided here, in the commit, so that it holds however many come at
    once.
    """
    name = prefix.name
    if prefix.has_ended(intent.wall_ms):
        raise ValueError(f"public prefix {name} has run out")
    if len(prefix.approvers) >= APPROVERS_NEEDED:
        raise ValueError(f"public prefix {name} has its {APPROVERS_NEEDED} approvers")
    if person == prefix.people[0]:
        raise ValueError(
            f"{name} is approved by others than its proposer: {APPROVERS_NEEDED} are needed, each"
            " with a key of their own"
        )
    if person in prefix.people:
        raise ValueError(f"{name} was approved by you already: another person has to")
    approvers = (*prefix.approvers, intent.actor)
    return replace(prefix, approvers=approvers, people=(*prefix.people, person))
