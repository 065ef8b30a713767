"""The folder of a disk tier: one file a block, written whole or not at all, swept at start.

    <root>/<incarnation>/<hex name>          complete: renamed into place after fsync
    <root>/<incarnation>/<hex name>.part     being written

Each process has a folder of its own and holds a lock on it; a folder whose lock is free was left by
a process that died, and goes. Everything is named relative to open directories, links are not
followed, and only names of our own making are touched. Every function may block for ever: the disk
tier calls them in its thread. Must never: hold plain KV. Read `disk.py` next.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
from contextlib import suppress
from pathlib import Path
from typing import Protocol

NAME_HEX = 64
_PART = ".part"
_FOLDER = re.compile(r"[0-9a-f]{32}")
_FILE = re.compile(rf"[0-9a-f]{{{NAME_HEX}}}(?:\.part)?")
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_ATTEMPTS = 8
"""At taking a folder that another process's sweep took for left over."""


class Files(Protocol):
    """What the disk tier does with files. Each may raise OSError, and each may block."""

    def write(self, name: str, data: bytes) -> None: ...

    def read(self, name: str, size_bytes: int) -> bytes | None:
        """All of it; None where it is missing, or longer or shorter than that."""
        ...

    def remove(self, name: str) -> None:
        """Also where it is not there."""
        ...

    def sweep(self) -> int:
        """Remove what dead processes left; how many folders."""
        ...

    def close(self) -> None:
        """Remove everything of this process."""
        ...


class FolderFiles:
    """`Files` below `root`, in the folder of this incarnation."""

    def __init__(self, root: Path, incarnation: str) -> None:
        """`incarnation` is 32 hex digits nobody else uses. Raises OSError."""
        assert _FOLDER.fullmatch(incarnation)
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder_name = incarnation
        self._root = os.open(root, _OPEN_FOLDER)
        self._folder = self._take_folder()

    def write(self, name: str, data: bytes) -> None:
        assert _FILE.fullmatch(name)
        part = name + _PART
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(part, flags, 0o600, dir_fd=self._folder)
        try:
            try:
                rest = memoryview(data)
                while rest:
                    rest = rest[os.write(handle, rest) :]
                os.fsync(handle)
            finally:
                os.close(handle)
            os.rename(part, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except OSError:
            with suppress(OSError):
                os.unlink(part, dir_fd=self._folder)
            raise

    def read(self, name: str, size_bytes: int) -> bytes | None:
        # Not blocking, so that something else than a file of ours is known for what it is.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            handle = os.open(name, flags, dir_fd=self._folder)
        except FileNotFoundError:
            return None
        try:
            state = os.fstat(handle)
            if not stat.S_ISREG(state.st_mode) or state.st_size != size_bytes:
                return None
            pieces: list[bytes] = []
            missing = size_bytes
            while missing:
                piece = os.read(handle, missing)
                if not piece:
                    return None
                pieces.append(piece)
                missing -= len(piece)
            return b"".join(pieces)
        finally:
            os.close(handle)

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._folder)

    def sweep(self) -> int:
        swept = 0
        for name in sorted(os.listdir(self._root)):
            if name != self._folder_name and _FOLDER.fullmatch(name):
                swept += self._sweep_folder(name)
        return swept

    def close(self) -> None:
        self._empty(self._folder)
        with suppress(OSError):
            os.rmdir(self._folder_name, dir_fd=self._root)
        os.close(self._folder)
        os.close(self._root)

    def _take_folder(self) -> int:
        """Make it and lock it. A sweep between the two removes it: once more then."""
        for _ in range(_MAX_ATTEMPTS):
            with suppress(FileExistsError):
                os.mkdir(self._folder_name, 0o700, dir_fd=self._root)
            try:
                folder = os.open(self._folder_name, _OPEN_FOLDER, dir_fd=self._root)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                here = os.stat(self._folder_name, dir_fd=self._root, follow_symlinks=False)
                if here.st_ino == os.fstat(folder).st_ino:
                    return folder
            except (BlockingIOError, FileNotFoundError):
                pass
            os.close(folder)
        raise OSError(f"{self._folder_name}: somebody else holds this folder of the disk tier")

    def _sweep_folder(self, name: str) -> bool:
        try:
            folder = os.open(name, _OPEN_FOLDER, dir_fd=self._root)
        except OSError:
            return False
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._empty(folder)
            os.rmdir(name, dir_fd=self._root)
        except OSError:
            return False
        finally:
            os.close(folder)
        return True

    @staticmethod
    def _empty(folder: int) -> None:
        for name in os.listdir(folder):
            if _FILE.fullmatch(name):
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=folder)
