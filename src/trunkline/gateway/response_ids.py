"""Names of responses that say, to us alone, which worker gave them and under which namespace.

A response can be gone on with by naming it, and only the worker that gave it has it. We choose the
name, and make it so that it can be recognised: no table is kept, and every gateway of a fleet knows
it. A name bears a keyed digest under the salt of the caller's namespace, epochs included: one of
another tenant, or from before a revocation, is unknown. Must never: let a worker look for what the
caller may not have. Read `picker.py` for who asks.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable

from trunkline.core.fleet import Fleet
from trunkline.core.records import WorkerId
from trunkline.gateway.contracts import ClientError, Grant, InferenceRequest, Refusal, Route
from trunkline.gateway.namespaces import Namespaces

_NONCE_BYTES = 12
_MAC_BYTES = 16
_NAME = re.compile(r"resp_([0-9a-f]{24})([0-9a-f]{32})")


class ResponseIds:
    """See the module."""

    def __init__(self, fleet: Fleet, namespaces: Namespaces) -> None:
        self._fleet = fleet
        self._namespaces = namespaces

    def name(self, request: InferenceRequest, salt: str, worker: WorkerId, attempt: int) -> str:
        """What this attempt's response is to be called; empty where it is none."""
        if request.route is not Route.RESPONSES:
            return ""
        drawn = f"{request.request_id}/{attempt}".encode()
        nonce = hashlib.blake2b(drawn, digest_size=_NONCE_BYTES, person=b"response").digest()
        return f"resp_{nonce.hex()}{_mac(salt, worker, nonce).hex()}"

    def elsewhere(self, request: InferenceRequest) -> frozenset[WorkerId]:
        """Workers that cannot have what the request goes on with; none where it goes on with
        nothing. Raises ClientError for a response that is not the caller's.
        """
        if not request.previous_response:
            return frozenset()
        workers = [(state.worker, state.block_tokens) for state in self._fleet.states()]
        keeper = self._keeper(request.previous_response, request.grant, workers)
        if keeper is not None:
            return frozenset(worker for worker, _ in workers if worker != keeper)
        if request.grant.principal.auth_method == "off":
            return frozenset()  # given before us, perhaps: its worker will know it
        text = "there is no such response of yours"
        raise ClientError(
            Refusal(
                status=404,
                code="previous_response_not_found",
                message=text,
                param="previous_response_id",
            )
        )

    def _keeper(
        self, named: str, grant: Grant, workers: Iterable[tuple[WorkerId, int]]
    ) -> WorkerId | None:
        parts = _NAME.fullmatch(named)
        if parts is None or grant.scope is None:
            return None
        nonce, mac = bytes.fromhex(parts[1]), bytes.fromhex(parts[2])
        salts: dict[int, str] = {}
        for worker, block_tokens in workers:
            if block_tokens not in salts:
                salts[block_tokens] = self._namespaces.salt(grant, block_tokens)
            if hmac.compare_digest(mac, _mac(salts[block_tokens], worker, nonce)):
                return worker
        return None


def _mac(salt: str, worker: WorkerId, nonce: bytes) -> bytes:
    key = salt.encode("ascii")
    said = nonce + worker.encode()
    return hashlib.blake2b(said, digest_size=_MAC_BYTES, key=key, person=b"response").digest()
