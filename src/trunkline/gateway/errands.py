"""Requests of the gateway's own: one small prompt to one worker, under a namespace of its choice.

Filling a public prefix, warming a worker up, testing it: whoever asks, the request bears the salt
of its grant, and where the worker has an agent the ticket of it. It goes past line and router, in
nobody's name, and is no more than a token long in its answer. Must never: carry what a client
wrote, or a scope that a tenant can name. Read `filler.py`, `warmup.py` and `examiner.py` for who
sends them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from trunkline.core.epochs import EpochTable, Subject, SubjectKind, domain_of, scoped
from trunkline.core.identity import Scope, ScopeKind
from trunkline.core.principals import Principal
from trunkline.gateway.contracts import Grant
from trunkline.gateway.namespaces import Namespaces
from trunkline.gateway.pulls import PullOrder
from trunkline.gateway.telling import told_headers, transfer_params
from trunkline.ports.worker import Post, Target

COMPLETIONS = "/v1/completions"
_NOBODY = "0" * 32
CANARY = Principal(org=_NOBODY, tenant=_NOBODY, actor="self-test", auth_method="gateway")


@dataclass(frozen=True, slots=True, kw_only=True)
class Errand:
    """One request. `tokens` are its prompt, `more` further fields of its body."""

    target: Target
    block_tokens: int
    grant: Grant
    tokens: array[int] = field(repr=False)
    timeout_ms: float
    model: str = ""
    """Empty for the model itself; else one of its adapters."""
    order: PullOrder | None = None
    """What it is to pull first."""
    more: Mapping[str, Any] = field(default_factory=dict[str, Any])  # JSON


class Errands:
    """Sends them. One for a gateway."""

    def __init__(
        self, *, namespaces: Namespaces, served_model: Callable[[], str], post: Post
    ) -> None:
        self._namespaces = namespaces
        self._served_model = served_model
        self._post = post

    async def run(self, errand: Errand) -> tuple[int, bytes]:
        """Status and body of the answer. Raises WorkerLost, WorkerTimeout."""
        grant, target, size = errand.grant, errand.target, errand.block_tokens
        has_agent = target.agent is not None and target.agent.takes_tickets
        ticket = self._namespaces.ticket(grant, size) if has_agent else ""
        params = transfer_params(target, ticket, errand.order)
        body: dict[str, Any] = {  # JSON
            "cache_salt": self._namespaces.salt(grant, size),
            "model": errand.model or self._served_model(),
            "prompt": errand.tokens.tolist(),
            "max_tokens": 1,
            "temperature": 0,
            **errand.more,
        }
        if params:
            body["kv_transfer_params"] = msgspec.Raw(params)
        return await self._post(
            target.endpoint,
            COMPLETIONS,
            msgspec.json.encode(body),
            timeout_ms=errand.timeout_ms,
            headers=told_headers(target, ticket, errand.order),
        )

    async def ask(
        self, target: Target, path: str, body: Mapping[str, Any], timeout_ms: float
    ) -> tuple[int, bytes]:
        """A question that computes nothing: the model's name is put in. Raises as `run` does."""
        told = msgspec.json.encode({"model": self._served_model(), **body})
        return await self._post(
            target.endpoint, path, told, timeout_ms=timeout_ms, headers=target.headers
        )


def canary_grant(table: EpochTable, served: str, session: str) -> Grant | None:
    """A scope that is nobody's: a session that no principal has, under a name that nobody can
    guess. None while the model or the whole fleet is revoked.
    """
    parts = [Subject(kind=SubjectKind.FLEET)]
    if served:
        parts.append(Subject(kind=SubjectKind.MODEL, path=served))
    subjects = tuple(parts)
    if not table.barred.isdisjoint(subjects):
        return None
    admission = table.admission(subjects)
    scope = Scope(
        kind=ScopeKind.SESSION, org=_NOBODY, tenant=_NOBODY, user="self-test", session=session
    )
    return Grant(
        principal=CANARY,
        scope=scope,
        admission=admission,
        epochs=scoped(admission.epochs, scope.kind),
        domain=domain_of(scope, admission.epochs),
        sees_decisions=False,
    )
