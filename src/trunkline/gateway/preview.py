"""Where a request would go now, without being sent: what `trunkline explain --prompt` asks.

The same reading, namespace and choice as for a client's request; nothing is charged, predicted or
remembered. Must never: show a prompt, or be reached by a client. Read `picker.py` for the choice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from trunkline.core.decision import Decision
from trunkline.core.principals import Principal, Role
from trunkline.gateway.answers import unknown_model
from trunkline.gateway.contracts import (
    EVERYBODY,
    ClientError,
    InferenceRequest,
    Refusal,
    Route,
)
from trunkline.gateway.intake import Intake
from trunkline.gateway.picker import FleetPicker
from trunkline.gateway.tenancy import Tenancy

_PATHS = {Route.CHAT: "/v1/chat/completions", Route.COMPLETION: "/v1/completions"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviewOrder:
    """Who would ask for what. An empty tenant is the only one there is."""

    tenant: str = ""
    user: str = ""
    is_chat: bool
    body: bytes = field(repr=False)
    """A request's body, JSON."""


class Preview:
    """One a gateway."""

    def __init__(
        self,
        *,
        intake: Intake,
        tenancy: Tenancy,
        org_and_tenant: Callable[[str], tuple[str, str] | None] | None,
        knows_model: Callable[[str], bool],
        picker_of: Callable[[str], FleetPicker | None],
    ) -> None:
        """`org_and_tenant(name)`: the ids of a tenant; None for one that is not known. It is None
        where everybody is one tenant. `knows_model(name)`: whether a worker serves it;
        `picker_of(name)`: who chooses for it; None for none of several.
        """
        self._intake = intake
        self._tenancy = tenancy
        self._org_and_tenant = org_and_tenant
        self._knows_model = knows_model
        self._picker_of = picker_of

    async def decision(self, order: PreviewOrder) -> Decision:
        """Raises ClientError for what could not be asked, NoWorker."""
        route = Route.CHAT if order.is_chat else Route.COMPLETION
        request = InferenceRequest(
            request_id="preview",
            route=route,
            method="POST",
            path=_PATHS[route],
            body=order.body,
        )
        principal = self._principal(order)
        self._intake.fill(request)
        if request.model and not self._knows_model(request.model):
            raise ClientError(unknown_model(request.model))
        self._tenancy.admit_request(principal, request, None, None)
        picker = self._picker_of(request.model)
        if picker is None:
            raise ClientError(unknown_model(request.model))
        return await picker.preview(request)

    def _principal(self, order: PreviewOrder) -> Principal:
        if self._org_and_tenant is None:
            if order.tenant or order.user:
                text = "this gateway serves one tenant, which has no name"
                raise ClientError(Refusal(code="unknown_tenant", message=text, param="tenant"))
            return EVERYBODY
        found = self._org_and_tenant(order.tenant)
        if found is None:
            text = "no such tenant; `trunkline tenants list` names them"
            raise ClientError(Refusal(code="unknown_tenant", message=text, param="tenant"))
        org, tenant = found
        asked = Principal(
            org=org,
            tenant=tenant,
            user=order.user,
            actor="preview",
            auth_method="key",  # whose scope is its tenant's
            roles=frozenset({Role.TENANT_USER}),
        )
        return self._tenancy.as_of_now(asked)
