"""Ed25519 for the audit log's checkpoints: the secret in a file, the public key beside it.

The file holds the 32-byte seed in hex and must not be readable by others; `<name>.pub` holds the
public key in hex, which is what a verifier needs and may be given to anyone. Must never: show the
seed. Read `ports/audit.py` for who asks.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
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
    def from_file(cls, path: Path, signers: Collection[str] = ()) -> Ed25519Check:
        """The public key that `Ed25519Signer` wrote. Raises ValueError that names the file.

        Both halves look alike. With the ids of keys that are known to have signed, or with the
        public half beside it, a secret one is known for what it is.
        """
        try:
            content = bytes.fromhex(path.read_text("ascii").strip())
            check = cls(content)
        except (ValueError, OSError) as error:
            raise ValueError(f"{path} holds no public key: {error}") from error
        public_path = path.with_name(path.name + ".pub")
        if Ed25519Signer(content).key_id in {*signers, _text_of(public_path)}:
            raise ValueError(
                f"{path} holds the private key: a check takes the public one ({public_path.name});"
                " whoever has the private one can forge checkpoints"
            )
        return check

    def is_signed(self, message: bytes, signature: bytes) -> bool:
        try:
            self._key.verify(signature, message)
        except InvalidSignature:
            return False
        return True


def _text_of(path: Path) -> str:
    try:
        return path.read_text("ascii").strip()
    except (OSError, ValueError):
        return ""


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
