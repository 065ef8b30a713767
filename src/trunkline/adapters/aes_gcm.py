"""AES-256-GCM for KV bytes on disk: one key for each namespace, in this process only.

Keys are drawn, not derived: a derived key could be derived again, so that destroying it would prove
nothing. They are never written anywhere; what an earlier process sealed is unreadable, and the disk
tier begins empty. Must never: use a nonce twice under a key. Read `ports/sealer.py` for who asks.
"""

from __future__ import annotations

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
