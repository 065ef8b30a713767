"""What encrypts KV bytes before they leave memory. `adapters/aes_gcm.py` has the real one."""

from __future__ import annotations

from typing import Protocol


class Sealer(Protocol):
    """Authenticated encryption under a key for each namespace. Safe for threads."""

    @property
    def overhead_bytes(self) -> int:
        """By how much sealed data is longer."""
        ...

    def seal(self, ns: bytes, data: memoryview, associated: bytes) -> bytes | None:
        """None where the namespace's key was destroyed."""
        ...

    def unseal(self, ns: bytes, sealed: bytes, associated: bytes) -> bytes | None:
        """What was sealed; None where the key was destroyed, or anything is not as it was."""
        ...

    def destroy(self, ns: bytes) -> None:
        """Nothing that was sealed for this namespace can be read from now on, by anybody."""
        ...
