"""The folder in which one gateway keeps the truth: the registry, the audit log, and their secrets.

    registry.db (+ .lock, .high)   audit/   secrets/root.key  pepper.key  audit.key  audit-sign.key

Secrets are made when first needed, 32 random bytes in hex each, for the owner's eyes only. Whoever
has them can forge keys and read names in the audit log: back them up apart from the registry. Must
never: use a secret that others may read. Read `authority.py` for who uses which.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Sequence
from pathlib import Path

from trunkline.adapters.durable import write_new
from trunkline.errors import ConfigError

_SECRET_BYTES = 32
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class StateDir:
    """Makes the folder where it is not there. Raises ConfigError where it cannot be used."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._secrets = path / "secrets"
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._secrets.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"the state folder {path} cannot be made: {error}; name another with --state-dir"
            ) from error
        mode = stat.S_IMODE(self._secrets.stat().st_mode)
        if mode & 0o077:
            raise ConfigError(
                f"others may look into {self._secrets}; remedy: chmod 700 {self._secrets}"
            )

    @property
    def registry_file(self) -> Path:
        return self.path / "registry.db"

    @property
    def audit_dir(self) -> Path:
        return self.path / "audit"

    @property
    def signing_key_file(self) -> Path:
        return self._secrets / "audit-sign.key"

    def share(self, folder: Path, names: Sequence[str]) -> None:
        """Copy those secrets that are here to a further state folder, where it has none of its own.
        Raises ConfigError.
        """
        other = StateDir(folder)
        for name in names:
            path = other._secrets / f"{name}.key"
            try:
                if (self._secrets / path.name).exists() and not path.exists():
                    write_new(path, self.secret(name).hex(), 0o600)
            except OSError as error:
                raise ConfigError(f"the secret {path} cannot be written: {error}") from error

    def secret(self, name: str) -> bytes:
        """The secret of this name, made now if it was not there. Raises ConfigError."""
        path = self._secrets / f"{name}.key"
        try:
            if not path.exists():
                write_new(path, os.urandom(_SECRET_BYTES).hex(), 0o600)
            if stat.S_IMODE(path.stat().st_mode) & 0o077:
                raise ConfigError(f"others may read {path}; remedy: chmod 600 {path}")
            secret = bytes.fromhex(path.read_text("ascii").strip())
        except (OSError, ValueError) as error:
            raise ConfigError(f"the secret {path} cannot be used: {error}") from error
        if len(secret) != _SECRET_BYTES:
            raise ConfigError(f"the secret {path} has {len(secret)} bytes, needed are 32 (as hex)")
        return secret


def host_name() -> str:
    """What the audit log calls this machine."""
    return socket.gethostname()[:128]


def boot_id() -> str:
    """Which boot of the machine this is, where it says so."""
    try:
        return _BOOT_ID.read_text("ascii").strip()
    except OSError:
        return "unknown"


def is_one_place(one: Path, other: Path) -> bool:
    """Whether two folders are on one disk, so that what happens to it happens to both."""
    return _device_of(one) == _device_of(other)


def _device_of(path: Path) -> int:
    """Of the folder, or of the nearest above it that is there and can be seen."""
    path = path.absolute()
    for place in (path, *path.parents):
        with contextlib.suppress(OSError):
            return place.stat().st_dev
    return 0
