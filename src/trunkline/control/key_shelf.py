"""The API keys of a book in the making: added, revoked, and forgotten when they have ended.

A tenant has so many keys and no more, and of those that were revoked or ran out the latest few, so
that no tenant's administrator uses up what all may have. Ids of forgotten keys stay taken. When one
is forgotten makes no difference to whom a key lets in: a replay need not forget the same ones.
Must never: forget a key that is good. Read `draft.py` for who uses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from trunkline.control import changes as log
from trunkline.core import credentials
from trunkline.core.credentials import KeyBook, KeyRecord
from trunkline.core.identity import ScopeKind
from trunkline.core.principals import Role

KEPT_ENDED_KEYS = 100
"""Keys of one tenant that were revoked or ran out, to be shown in lists; the oldest go first."""

_LOOK_EVERY = 32
"""Looking through a tenant's keys at each of its changes would make a replay quadratic."""


class KeyShelf:
    """Keys as of a book, and what becomes of them. `forgotten` grows."""

    def __init__(self, base: KeyBook) -> None:
        self._base = base
        self._changed: dict[str, KeyRecord] = {}
        self.forgotten: set[str] = set()
        """Ids of keys that the base has, or had for a moment."""
        self._by_tenant: dict[str, dict[str, None]] | None = None
        self._count = len(base)

    @property
    def is_changed(self) -> bool:
        return bool(self._changed or self.forgotten)

    def get(self, key_id: str) -> KeyRecord | None:
        if key_id in self.forgotten:
            return None
        return self._changed.get(key_id) or self._base.get(key_id)

    def put(self, record: KeyRecord, *, wall_ms: int, limit: int | None) -> None:
        """A new key. Raises ValueError where its tenant has `limit` good ones already."""
        own = self._own(record.tenant)
        if limit is not None and len(own) >= limit:
            good = sum(not _is_over(self._known(key_id), wall_ms) for key_id in own)
            if good >= limit:
                raise ValueError(f"the tenant has {good} keys, at most {limit} may be good at once")
        self._make_room(wall_ms)
        self._changed[record.key_id] = record
        own[record.key_id] = None
        self._count += 1
        if len(own) > KEPT_ENDED_KEYS and len(own) % _LOOK_EVERY == 0:
            ended = [key_id for key_id in own if _is_over(self._known(key_id), wall_ms)]
            self._forget(ended[: max(0, len(ended) - KEPT_ENDED_KEYS)])

    def revoke(self, record: KeyRecord) -> None:
        self._changed[record.key_id] = replace(record, is_revoked=True)

    def of(self, tenant: str) -> Iterator[KeyRecord]:
        return (self._known(key_id) for key_id in tuple(self._own(tenant)))

    def book(self) -> KeyBook:
        if not self.is_changed:
            return self._base
        if len(self._changed) == 1 and not self.forgotten:
            return self._base.replaced(next(iter(self._changed.values())))
        return KeyBook(self._all())

    def _all(self) -> Iterable[KeyRecord]:
        """In the order they were made."""
        known = {record.key_id: record for record in self._base} | self._changed
        return (record for key_id, record in known.items() if key_id not in self.forgotten)

    def _known(self, key_id: str) -> KeyRecord:
        record = self.get(key_id)
        assert record is not None, "a key that is listed and not there"
        return record

    def _own(self, tenant: str) -> dict[str, None]:
        """Ids of a tenant's keys, oldest first."""
        if self._by_tenant is None:
            self._by_tenant = {}
            for record in self._all():
                self._by_tenant.setdefault(record.tenant, {})[record.key_id] = None
        return self._by_tenant.setdefault(tenant, {})

    def _make_room(self, wall_ms: int) -> None:
        """At the bound of all keys, those that ended longest ago by their making make room."""
        if self._count < credentials.MAX_KEYS:
            return
        ended = [record.key_id for record in self._all() if _is_over(record, wall_ms)]
        self._forget(ended[: max(1, credentials.MAX_KEYS // 64)])

    def _forget(self, key_ids: Iterable[str]) -> None:
        for key_id in key_ids:
            tenant = self._known(key_id).tenant
            del self._own(tenant)[key_id]
            self.forgotten.add(key_id)
            self._count -= 1
            self._changed.pop(key_id, None)


def _is_over(record: KeyRecord, wall_ms: int) -> bool:
    """Whether it can never be good again."""
    ends_ms = record.not_after_ms
    return record.is_revoked or (ends_ms is not None and wall_ms >= ends_ms)


def key_record(change: log.KeyAdded) -> KeyRecord:
    return KeyRecord(
        key_id=change.key_id,
        org=change.org,
        tenant=change.tenant,
        user=change.user,
        roles=frozenset(Role(role) for role in change.roles),
        models=None if change.models is None else frozenset(change.models),
        adapters=None if change.adapters is None else frozenset(change.adapters),
        not_before_ms=change.not_before_ms,
        not_after_ms=change.not_after_ms,
        key_class=change.key_class,
        default_scope=ScopeKind(change.default_scope),
        secret_hash=change.secret_hash,
    )


def key_added(record: KeyRecord) -> log.KeyAdded:
    """The change that adds this key."""
    return log.KeyAdded(
        key_id=record.key_id,
        org=record.org,
        tenant=record.tenant,
        user=record.user,
        roles=tuple(sorted(role.value for role in record.roles)),
        models=None if record.models is None else tuple(sorted(record.models)),
        adapters=None if record.adapters is None else tuple(sorted(record.adapters)),
        not_before_ms=record.not_before_ms,
        not_after_ms=record.not_after_ms,
        key_class=record.key_class,
        default_scope=_scope_name(record.default_scope),
        secret_hash=record.secret_hash,
    )


def _scope_name(kind: ScopeKind) -> log.ScopeName:
    match kind:
        case ScopeKind.PUBLIC:
            raise ValueError("a key has no public scope")
        case ScopeKind.NONE:
            return "none"
        case ScopeKind.SESSION:
            return "session"
        case ScopeKind.USER:
            return "user"
        case ScopeKind.TENANT:
            return "tenant"
        case ScopeKind.ORG:
            return "org"
