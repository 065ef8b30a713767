"""A store that has pushed two blocks to disk, and files with faults that a test sets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kv_desk import SIZE, DiskDesk, chain, owner
from trunkline.kv.files import Files

A = owner("a")
B = owner("b")
OLD = chain(A, 0, 2)
NEW = chain(A, 100, 2)


class Planted:
    """Files with a fault that a test sets."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self.before_write: Callable[[str], None] = lambda name: None
        self.before_read: Callable[[str], None] = lambda name: None
        self.before_remove: Callable[[str], None] = lambda name: None
        self.on_read: Callable[[bytes], bytes] = lambda data: data

    def write(self, name: str, data: bytes) -> None:
        self.before_write(name)
        self._files.write(name, data)

    def read(self, name: str, size_bytes: int) -> bytes | None:
        self.before_read(name)
        data = self._files.read(name, size_bytes)
        return data if data is None else self.on_read(data)

    def remove(self, name: str) -> None:
        self.before_remove(name)
        self._files.remove(name)

    def sweep(self) -> int:
        return self._files.sweep()

    def close(self) -> None:
        self._files.close()


def desk_with_old_below(root: Path, **options: object) -> DiskDesk:
    """Two blocks in memory that pushed two older ones to disk."""
    desk = DiskDesk(root=root, host_blocks=2, **options)  # type: ignore[arg-type]
    desk.put_through(OLD, A)
    desk.put_through(NEW, A)
    assert desk.store.figures().disk_bytes == 2 * SIZE
    return desk


def assert_true(is_so: bool) -> None:
    assert is_so
