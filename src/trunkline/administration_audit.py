"""The audit log as the admin port shows it: pages, the check, and whom a record is about.

Records hold their subject under the audit key alone. Whoever reaches the fleet is shown the name
behind it where the book has it: names are put under the key, many at a time and then remembered,
and looked up. Must never: name a subject to a caller who does not reach it. Read
`control/audit_reader.py` for pages, `administration.py` for who asks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial

from trunkline.administration_reach import own_subject
from trunkline.administration_views import own_record, verification_view
from trunkline.control.audit import AuditLog
from trunkline.control.audit_reader import AuditQuery, AuditReader, Record
from trunkline.control.book import Book, subject_of
from trunkline.core.audit import read_checkpoint
from trunkline.core.epochs import SubjectKind
from trunkline.gateway.backend import AuditOrder, AuditPageView, Call, VerificationView
from trunkline.gateway.permissions import Extent

MAX_NAMED = 100_000
"""Subjects that records are told apart by; those beyond are shown by their pseudonym alone."""

_STEP = 200  # names between two turns of the loop: under a millisecond
_UNBOOKED = ("key/", "worker/")
"""Subjects of records that no epoch is of."""


class AuditDesk:
    """Of one audit log and one registry. Belongs to their event loop."""

    def __init__(self, book: Callable[[], Book], audit: AuditLog, reader: AuditReader) -> None:
        self._book = book
        self._audit = audit
        self._reader = reader
        self._named: dict[str, str] = {}
        """Pseudonym -> subject."""
        self._known: set[str] = set()
        self._learned_from: Book | None = None

    async def page(self, call: Call, order: AuditOrder) -> AuditPageView | None:
        """None where the order names a subject beyond the caller's reach. Raises AuditDown, and
        UnknownName for those who see the whole fleet.
        """
        wanted = _subjects_named(self._book(), call, order.subject) if order.subject else None
        if order.subject and wanted is None:
            return None
        query = AuditQuery(
            limit=order.limit,
            after_seq=order.after_seq,
            kind=order.kind,
            from_ms=order.from_ms,
            to_ms=order.to_ms,
            subjects=None if wanted is None else frozenset(map(self._audit.pseudonym, wanted)),
            has_wanted=order.has_wanted,
        )
        found = await self._reader.page(query, await self._shown_to(call))
        return AuditPageView(
            records=found.records, scanned_from=found.scanned_from, next_after=found.next_after
        )

    async def verify(self, call: Call, checkpoint: object) -> VerificationView:
        """Raises ValueError for what is no checkpoint; AuditDown, Busy."""
        assert call.extent is Extent.FLEET
        extra = [] if checkpoint is None else [read_checkpoint(checkpoint)]
        return verification_view(await self._reader.verify(extra))

    async def _shown_to(self, call: Call) -> Callable[[Record], Record | None]:
        if call.extent is Extent.FLEET:
            book = self._book()
            await self._learn(book)
            return partial(self._with_subject, book)
        caller = call.caller.principal
        assert caller is not None
        assert call.extent is Extent.TENANT, "no table gives an organisation the audit log"
        book = self._book()
        names = frozenset(map(self._audit.pseudonym, _of_tenant(book, caller.tenant)))
        own = frozenset(record.key_id for record in book.keys if record.tenant == caller.tenant)
        return partial(own_record, subjects=names, keys=own)

    def _with_subject(self, book: Book, record: Record) -> Record:
        subject = self._named.get(str(record.get("scope_path_hmac")), "")
        return {**record, "subject": _name_of(book, subject)}

    async def _learn(self, book: Book) -> None:
        """Put the book's names under the audit key, those that are not yet."""
        if book is self._learned_from:
            return
        for number, subject in enumerate(_subjects_of(book)):
            if number % _STEP == 0:
                await asyncio.sleep(0)
            if subject not in self._known and len(self._named) < MAX_NAMED:
                self._known.add(subject)
                self._named[self._audit.pseudonym(subject)] = subject
        self._learned_from = book


def _subjects_of(book: Book) -> Iterator[str]:
    """Everything that a record may be about, as far as the book has it."""
    yield "fleet"
    for org in book.orgs:
        yield f"org/{org}"
    for tenant in book.tenants:
        yield f"tenant/{tenant}"
    for public_id in book.publics:
        yield f"public/{public_id}"
    for subject in book.table.epochs:
        yield str(subject)
    for record in list(book.keys):
        yield f"key/{record.key_id}"
        if record.user:
            yield f"user/{record.tenant}/{record.user}"
        if record.key_class:
            yield f"key_class/{record.key_class}"
        yield from (f"model/{name}" for name in record.models or ())
        yield from (f"adapter/{name}" for name in record.adapters or ())
    for retired in book.retired:
        yield f"tenant/{retired}"
        yield f"org/{retired}"


def _of_tenant(book: Book, tenant: str) -> Iterator[str]:
    """The tenant itself, its keys, and those of its users of whom anything was ever raised."""
    yield f"tenant/{tenant}"
    for record in list(book.keys):
        if record.tenant == tenant:
            yield f"key/{record.key_id}"
    for subject in book.table.epochs:
        if subject.kind is SubjectKind.USER and subject.path.startswith(f"{tenant}/"):
            yield str(subject)


def _subjects_named(book: Book, call: Call, name: str) -> list[str] | None:
    """What records are about that belong to this name; None beyond the caller's reach."""
    if call.extent is Extent.FLEET:
        if name.startswith(_UNBOOKED):
            return [name]
        subject = book.subject(name)
    else:
        found = own_subject(book, call, name)
        if found is None:
            return None
        subject = found
    if subject.kind is SubjectKind.TENANT:
        return list(_of_tenant(book, subject.path))
    return [str(subject)]


def _name_of(book: Book, subject: str) -> str:
    if not subject or subject.startswith(_UNBOOKED):
        return subject
    return book.name_of(subject_of(subject))
