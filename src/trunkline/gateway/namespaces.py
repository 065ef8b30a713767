"""The namespaces that requests run under, made when first needed and given back when they are old.

One for each domain (scope and epochs) and block size. The directory learns each one's salt before a
request with it goes out, so that the events of its blocks are understood. Bounded: the one that was
used longest ago goes, and with it what the directory knew under it. Must never: keep a namespace
whose epochs were raised. Read `core/identity.py` for the derivation.
"""

from __future__ import annotations

import base64
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from trunkline.core.epochs import EpochTable, Subject, scoped
from trunkline.core.identity import Epochs, Namespace, Scope
from trunkline.core.records import NamespaceTag
from trunkline.gateway.contracts import Grant

MAX_NAMESPACES = 32_768
"""Half of what a directory takes: what was given back may still be being cleared there."""


class Derive(Protocol):
    """Makes a namespace of the served model."""

    def __call__(self, scope: Scope, epochs: Epochs, block_tokens: int) -> Namespace: ...


class NamespaceIndex(Protocol):
    """What has to know of namespaces: the directory."""

    def admit_namespace(self, namespace: Namespace) -> int: ...

    def retire_namespace(self, tag: NamespaceTag) -> None: ...


@dataclass(frozen=True, slots=True)
class _Kept:
    namespace: Namespace
    subjects: tuple[Subject, ...]


class Namespaces:
    """See the module."""

    def __init__(
        self,
        derive: Derive,
        index: NamespaceIndex,
        *,
        draw: Callable[[int], bytes],
        max_namespaces: int = MAX_NAMESPACES,
    ) -> None:
        """`draw(n)` gives n unguessable bytes."""
        self._derive = derive
        self._draw = draw
        self._index = index
        self._max_namespaces = max_namespaces
        self._kept: OrderedDict[tuple[bytes, int], _Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def namespace(self, grant: Grant, block_tokens: int) -> Namespace | None:
        """The namespace of a grant at one block size; None where nothing may be shared."""
        if grant.scope is None:
            return None
        name = (grant.domain, block_tokens)
        kept = self._kept.get(name)
        if kept is None:
            namespace = self._derive(grant.scope, grant.epochs, block_tokens)
            kept = self._kept[name] = _Kept(namespace, grant.admission.subjects)
            self._index.admit_namespace(namespace)
            if len(self._kept) > self._max_namespaces:
                _, oldest = self._kept.popitem(last=False)
                self._index.retire_namespace(oldest.namespace.tag)
        else:
            self._kept.move_to_end(name)
        return kept.namespace

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
        stale = [name for name, kept in self._kept.items() if _is_stale(kept, table)]
        for name in stale:
            self._index.retire_namespace(self._kept.pop(name).namespace.tag)
        return len(stale)


def _is_stale(kept: _Kept, table: EpochTable) -> bool:
    namespace = kept.namespace
    return scoped(table.epochs_of(kept.subjects), namespace.scope.kind) != namespace.epochs
