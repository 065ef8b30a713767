"""The notices of gateways, in the bucket that holds their registry: `holder.<name>`.

They are put into the same stream as the log, so that which came first is the same for everybody.
The servers may drop a notice a week after its life ended; nothing is decided by that. The first
gateway leaves a digest of the secrets that all of them need to share. Must never: put a secret
itself there. Read `control/gateways.py` for what the order is for.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Sequence

from trunkline.adapters.nats_bucket import BucketConflict, NatsBucket
from trunkline.errors import ConfigError
from trunkline.ports.board import Notice

KEPT_S = 7 * 24 * 3_600
"""Long beyond any lease, so that no jump of a server's clock takes a notice that counts."""
_SECRETS_KEY = "fleet.secrets"


class NatsBoard:
    """`ports.board.Board`. `secrets` (name, value) are those that every gateway must have alike."""

    def __init__(self, bucket: NatsBucket, secrets: Sequence[tuple[str, bytes]]) -> None:
        self._bucket = bucket
        self._secrets = list(secrets)

    async def join(self) -> None:
        await self._bucket.connect()
        ours = b"\n".join(_shown(name, value) for name, value in self._secrets)
        held = await self._bucket.newest(_SECRETS_KEY)
        if held is None:
            try:
                await self._bucket.put(_SECRETS_KEY, ours, behind=(_SECRETS_KEY, 0))
            except BucketConflict:
                held = await self._bucket.newest(_SECRETS_KEY)
        if held is not None and not hmac.compare_digest(held.value, ours):
            theirs = set(held.value.split(b"\n"))
            other = [name for name, value in self._secrets if _shown(name, value) not in theirs]
            raise ConfigError(
                f"this gateway's secrets are not the fleet's ({', '.join(other)}): copy"
                " secrets/root.key, pepper.key and session.key from the state folder of one that"
                " runs, or the file that root_key_file names there"
            )

    async def post(self, name: str, body: bytes) -> int:
        return await self._bucket.put(f"holder.{name}", body, ttl_s=KEPT_S)

    async def after(self, seq: int) -> Notice | None:
        held = await self._bucket.after(seq, "holder.*")
        if held is None:
            return None
        return Notice(seq=held.seq, name=held.key.removeprefix("holder."), body=held.value)

    def listen(self, on_record: Callable[[], None], on_notice: Callable[[], None]) -> None:
        def heard(key: str) -> None:
            if not key.startswith("holder."):
                on_record()
            if not key.startswith("log."):
                on_notice()

        self._bucket.listen(heard)


def _shown(name: str, value: bytes) -> bytes:
    digest = hashlib.blake2b(value, digest_size=16, person=b"fleet-secret").hexdigest()
    return f"{name} {digest}".encode("ascii")
