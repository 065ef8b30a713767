"""A bounded store of many owners, in which who keeps most gives way first.

Each owner has a shelf, in the order of last use. At the bound the entry goes that was used longest
ago *of the owner that has most*; of owners with equally many, of the one whose shelf was left alone
longest. So nobody who has less than an equal share loses anything to others, whatever these bring.
All in constant time. Must never: know what is kept. Read `gateway/namespaces.py` for who uses it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Shelves(Generic[Key, Value]):
    """See the module. Grows with `put`; the caller calls `evict` at its bound."""

    def __init__(self) -> None:
        self._shelves: dict[str, OrderedDict[Key, Value]] = {}
        self._by_size: dict[int, OrderedDict[str, None]] = {}
        """Owners by how many entries they have; whose shelf was touched last stands last."""
        self._most = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def count_of(self, owner: str) -> int:
        return len(self._shelves.get(owner, ()))

    def items(self) -> Iterator[tuple[str, Key, Value]]:
        for owner, shelf in self._shelves.items():
            for key, value in shelf.items():
                yield owner, key, value

    def get(self, owner: str, key: Key) -> Value | None:
        """What is kept under this name, which counts as a use; None for nothing."""
        shelf = self._shelves.get(owner)
        found = None if shelf is None else shelf.get(key)
        if shelf is None or found is None:
            return None
        shelf.move_to_end(key)
        self._by_size[len(shelf)].move_to_end(owner)
        return found

    def put(self, owner: str, key: Key, value: Value) -> None:
        """Keep a new entry, as the one used last."""
        shelf = self._shelves.setdefault(owner, OrderedDict())
        assert key not in shelf, "an entry is put once"
        shelf[key] = value
        self._count += 1
        self._resized(owner, len(shelf) - 1, len(shelf))

    def pop(self, owner: str, key: Key) -> Value:
        """Give one entry back. Raises KeyError where it is not kept."""
        shelf = self._shelves[owner]
        value = shelf.pop(key)
        self._count -= 1
        self._resized(owner, len(shelf) + 1, len(shelf))
        if not shelf:
            del self._shelves[owner]
        return value

    def evict(self) -> Value:
        """Give back the entry whose turn it is. There must be one."""
        owner = next(iter(self._by_size[self._most]))
        return self.pop(owner, next(iter(self._shelves[owner])))

    def _resized(self, owner: str, before: int, after: int) -> None:
        """Sizes change by one at a time: the largest is the old one, or next to it."""
        assert abs(before - after) == 1, (before, after)
        if before:
            del self._by_size[before][owner]
            if not self._by_size[before]:
                del self._by_size[before]
        if after:
            self._by_size.setdefault(after, OrderedDict())[owner] = None
        if after > self._most or self._most not in self._by_size:
            self._most = after
