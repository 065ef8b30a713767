"""What a worker is told of an attempt beside the client's own words: whose cache it may use, what
to pull, which labels to report.

    agent in front of the engine      headers x-trunkline-ticket, x-trunkline-pull
    connector inside the engine       kv_transfer_params.trunkline {"ticket", "name", "pull"}
    the engine's own p2p tier         kv_transfer_params.remote_kv_source

`intake.py` has removed whatever the client wrote there, and guarantees a JSON object. Must never:
tell an engine without an agent more than its salt. Read `picker.py` for who asks.
"""

from __future__ import annotations

import base64

from trunkline.core.keys import KeyChain
from trunkline.gateway.contracts import ClientError, InferenceRequest, Refusal
from trunkline.gateway.pulls import PullOrder
from trunkline.ports.worker import EngineKind, Target

TICKET_HEADER = "x-trunkline-ticket"


def require_apart(request: InferenceRequest, target: Target, *, is_salted: bool) -> None:
    """Raises ClientError for what cannot bear our salt there, where there is more than one
    tenant. `is_salted`: its body does. The operator's word counts of engines that do not say what
    they do.
    """
    if request.grant.principal.auth_method == "off" or not request.route.computes:
        return
    is_vouched_for = request.is_vouched_for and target.engine is not EngineKind.SGLANG
    if not (is_vouched_for or target.keeps_salt(request.path)):
        text = f"this path cannot be kept apart by tenant on {target.engine.value}"
        raise ClientError(Refusal(status=403, code="unsalted_path", message=text))
    if request.body and not is_salted:
        text = "where tenants are kept apart, this path takes JSON objects only"
        raise ClientError(Refusal(status=415, code="unsalted_body", message=text))


def told_headers(
    target: Target, ticket: str, order: PullOrder | None
) -> tuple[tuple[str, str], ...]:
    """Headers of an attempt there. `ticket` is empty where it takes none."""
    if not ticket or target.is_told_in_body:
        return target.headers
    pull = () if order is None else (order.header,)
    return (*target.headers, (TICKET_HEADER, ticket), *pull)


def transfer_params(target: Target, ticket: str, order: PullOrder | None) -> bytes:
    """`kv_transfer_params` for it as JSON; empty where it is told nothing in the body."""
    ours: list[str] = []
    if ticket and target.is_told_in_body:
        said = f'"ticket":{ticket}'
        if order is not None and not order.p2p:
            said += f',"name":"{order.name}","pull":{order.header[1]}'
        ours.append(f'"trunkline":{{{said}}}')
    if order is not None and order.p2p:
        ours.append(f'"remote_kv_source":{order.p2p}')
    return f"{{{','.join(ours)}}}".encode() if ours else b""


def salted(
    body: bytes,
    salt: str,
    keys: KeyChain | None,
    target: Target,
    params: bytes = b"",
    response: str = "",
) -> bytes:
    """The body with our salt in front, and what else the worker is told there. `response`: what
    that is to be called; empty where it is none.
    """
    start = body.index(b"{") + 1
    ours = b'"cache_salt":"' + salt.encode("ascii") + b'"'
    if keys is not None and keys.public is not None:
        ours += f',"cache_salt_regions":[[{keys.public_blocks},"{keys.public.salt}"]]'.encode()
    if keys is not None and target.wants_checkpoints:
        labels = ",".join(
            f'[{tokens},"{base64.b64encode(key).decode("ascii")}"]'
            for tokens, key in keys.checkpoints()
        )
        params = params or f'{{"trunkline":{{"checkpoints":[{labels}]}}}}'.encode()
    if params:
        ours += b',"kv_transfer_params":' + params
    if response:
        ours += f',"request_id":"{response}"'.encode()
    separator = b"" if body[start:].lstrip().startswith(b"}") else b","
    return body[:start] + ours + separator + body[start:]
