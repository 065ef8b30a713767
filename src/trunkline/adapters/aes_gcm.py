"""AES-256-GCM for KV bytes on disk: one key for each namespace, in this process only. And for what
gateways tell one another of prompts: one key for each life of a gateway.

Keys of the first are drawn, not derived: a derived key could be derived again, so that destroying
it would prove nothing. They are never written anywhere; what an earlier process sealed is
unreadable, and the disk tier begins empty. Must never: use a nonce twice under a key. Read
`ports/sealer.py` and `control/relays.py` for who asks.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict, deque

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

MAX_NAMESPACES = 65_536
"""Keys, and destroyed ones, that are kept. Beyond it the key that was used least recently is
destroyed: what it sealed is a miss."""
_NONCE_BYTES = 12
_TAG_BYTES = 16


class _Key:
    __slots__ = ("cipher", "sealed_count")

    def __init__(self) -> None:
        self.cipher = AESGCM(AESGCM.generate_key(bit_length=256))
        self.sealed_count = 0


class AesGcmSealer:
    """`ports.Sealer`. Sealed data is nonce, ciphertext, tag."""

    def __init__(self, *, max_namespaces: int = MAX_NAMESPACES) -> None:
        self._lock = threading.Lock()
        self._max_namespaces = max_namespaces
        self._keys: OrderedDict[bytes, _Key] = OrderedDict()
        self._destroyed: set[bytes] = set()
        self._destroyed_order: deque[bytes] = deque()

    @property
    def overhead_bytes(self) -> int:
        return _NONCE_BYTES + _TAG_BYTES

    def seal(self, ns: bytes, data: memoryview, associated: bytes) -> bytes | None:
        with self._lock:
            if ns in self._destroyed:
                return None
            key = self._keys.get(ns)
            if key is None:
                if len(self._keys) >= self._max_namespaces:
                    self._keys.popitem(last=False)
                key = self._keys[ns] = _Key()
            self._keys.move_to_end(ns)
            # A count is unique as the key lives no longer than the process.
            key.sealed_count += 1
            nonce = key.sealed_count.to_bytes(_NONCE_BYTES, "big")
        return nonce + key.cipher.encrypt(nonce, data, associated)

    def unseal(self, ns: bytes, sealed: bytes, associated: bytes) -> bytes | None:
        with self._lock:
            key = self._keys.get(ns)
            if key is not None:
                self._keys.move_to_end(ns)
        if key is None or len(sealed) < self.overhead_bytes:
            return None
        try:
            return key.cipher.decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], associated)
        except InvalidTag:
            return None

    def destroy(self, ns: bytes) -> None:
        with self._lock:
            self._keys.pop(ns, None)
            if ns in self._destroyed:
                return
            if len(self._destroyed_order) >= self._max_namespaces:
                self._destroyed.discard(self._destroyed_order.popleft())
            self._destroyed.add(ns)
            self._destroyed_order.append(ns)


class LifeCipher:
    """`control.relays.Cipher`: keys are derived from the fleet's root secret, so that every gateway
    has them, and a nonce is a count in one life, whose name is never drawn twice.
    """

    def __init__(self, root_key: bytes, life: str) -> None:
        self._root_key = root_key
        self._own = self._of(life)
        self._count = 0
        self._other: tuple[str, AESGCM] = (life, self._own)
        """Of whom something came last."""

    def encrypt(self, data: bytes) -> bytes:
        self._count += 1
        nonce = self._count.to_bytes(_NONCE_BYTES, "big")
        return nonce + self._own.encrypt(nonce, data, None)

    def decrypt(self, life: str, sealed: bytes) -> bytes | None:
        if self._other[0] != life:
            self._other = (life, self._of(life))
        if len(sealed) < _NONCE_BYTES + _TAG_BYTES:
            return None
        try:
            return self._other[1].decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], None)
        except InvalidTag:
            return None

    def _of(self, life: str) -> AESGCM:
        hashed = hashlib.blake2b(digest_size=32, key=self._root_key, person=b"relayed events")
        hashed.update(life.encode())
        return AESGCM(hashed.digest())
