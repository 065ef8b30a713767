"""Names that mean a forbidden one, however they are spelled: in other letters, percent-encoded.

Owns what counts as the same name. An engine may read names more kindly than JSON does, and so may
whatever stands between. Must never: take long for ordinary names. Read `fields.py` for the list.
"""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import unquote

_MAX_QUOTINGS = 4


def meant_by(name: str, forbidden: frozenset[str]) -> str | None:
    """Which of the forbidden names this one spells; None for none of them."""
    if name in forbidden:
        return name
    for _ in range(_MAX_QUOTINGS):
        if "%" not in name:
            break
        name = unquote(name)
    bare = name.casefold()
    return bare if bare in forbidden else None


def spelled(names: Iterable[str], forbidden: frozenset[str]) -> dict[str, str]:
    """Those names that spell a forbidden one, and which."""
    if not forbidden.isdisjoint(names) or not is_plain("".join(names)):
        found = ((name, meant_by(name, forbidden)) for name in names)
        return {name: meant for name, meant in found if meant is not None}
    return {}


def is_plain(names: str) -> bool:
    """Whether these names, joined, can spell nothing but themselves: the quick way out."""
    return names.isascii() and names.islower() and "%" not in names
