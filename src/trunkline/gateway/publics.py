"""Registered public prefixes, as the data plane uses them: which one a prompt begins with.

Whoever is in the audience hits a public prefix wherever the filler has it ready; nobody else's
request fills it, is told of it, or changes where it lies. Must never: make anything public that was
not registered. Read `core/publics.py` for the match, `filler.py` for who fills.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from trunkline.core.identity import ModelIdentity
from trunkline.core.publics import PublicBook, PublicPrefix
from trunkline.gateway.contracts import Grant


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicStart:
    """So many leading blocks of a prompt are of a registered prefix, under this grant."""

    grant: Grant
    blocks: int


class PublicPrefixes:
    """All that are registered now. Swapped as a whole when the registry changes."""

    def __init__(
        self,
        identity: Callable[[int], ModelIdentity],
        wall_ms: Callable[[], float],
        grant_of: Callable[[str], Grant | None],
    ) -> None:
        """`identity(block_tokens)` is that of the served model, without an adapter;
        `grant_of(public id)` what its blocks are kept under now, None where it is revoked.
        """
        self._identity = identity
        self._wall_ms = wall_ms
        self._grant_of = grant_of
        self._book = PublicBook()

    def swap(self, book: PublicBook) -> None:
        self._book = book

    def __len__(self) -> int:
        return len(self._book)

    def start(self, grant: Grant, tokens: array[int], block_tokens: int) -> PublicStart | None:
        """What of a prompt is public to this caller; None for nothing."""
        if not len(self._book) or grant.adapter:
            return None
        found = self._book.match(
            tokens,
            org=grant.principal.org,
            model=self._identity(block_tokens),
            now_ms=self._wall_ms(),
        )
        public = self._grant_of(found.prefix.public_id) if found else None
        if found is None or public is None:
            return None
        return PublicStart(grant=public, blocks=found.blocks)

    def live(self, block_tokens: int) -> Iterator[tuple[PublicPrefix, Grant]]:
        """Those of the served model that are in their term, for the filler."""
        model = self._identity(block_tokens)
        now_ms = self._wall_ms()
        for prefix in self._book:
            grant = self._grant_of(prefix.public_id)
            if grant is not None and prefix.is_of(model) and not prefix.has_ended(now_ms):
                yield prefix, grant
