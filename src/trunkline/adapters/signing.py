"""Ed25519 for the audit log's checkpoints: the secret in a file, the public key beside it.

The file holds the 32-byte seed in hex and must not be readable by others; `<name>.pub` holds the
public key in hex, which is what a verifier needs and may be given to anyone. Must never: show the
seed. Read `ports/audit.py` for who asks.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from trunkline.adapters.durable import write_new

SEED_BYTES = 32


class Ed25519Check:
    """Whether checkpoints are signed by the holder of the secret of one public key."""

    def __init__(self, public_key: bytes) -> None:
        """Raises ValueError for what is no public key."""
        self.key_id = public_key.hex()
        self._key = Ed25519PublicKey.from_public_bytes(public_key)

    @classmethod
    def from_file(cls, path: Path) -> Ed25519Check:
        """The public key that `Ed25519Signer` wrote. Raises ValueError that names the file."""
        try:
            return cls(bytes.fromhex(path.read_text("ascii").strip()))
        except (ValueError, OSError) as error:
            raise ValueError(f"{path} holds no public key: {error}") from error

    def is_signed(self, message: bytes, signature: bytes) -> bool:
        try:
            self._key.verify(signature, message)
        except InvalidSignature:
            return False
        return True


class Ed25519Signer:
    """`ports.audit.Signer`."""

    def __init__(self, seed: bytes) -> None:
        """Raises ValueError for a seed that is not 32 bytes."""
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.public_key = self._key.public_key().public_bytes_raw()
        self._check = Ed25519Check(self.public_key)
        self.key_id = self._check.key_id

    @classmethod
    def from_file(cls, path: Path) -> Ed25519Signer:
        """The signer of a key file, which is made where there is none. Raises ValueError that names
        the file and the remedy.
        """
        try:
            if not path.exists():
                write_new(path, os.urandom(SEED_BYTES).hex(), 0o600)
            if stat.S_IMODE(path.stat().st_mode) & 0o077:
                raise ValueError(f"others may read it; remedy: chmod 600 {path}")
            signer = cls(bytes.fromhex(path.read_text("ascii").strip()))
            public_path = path.with_name(path.name + ".pub")
            if not public_path.exists():
                write_new(public_path, signer.public_key.hex(), 0o644)
        except (ValueError, OSError) as error:
            raise ValueError(f"{path} cannot be used as a signing key: {error}") from error
        return signer

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message)

    def is_signed(self, message: bytes, signature: bytes) -> bool:
        return self._check.is_signed(message, signature)
