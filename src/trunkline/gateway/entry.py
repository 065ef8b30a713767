"""What the head of a request settles, before its body: where it goes, who asks, what it is called.

The same for a client of our own (`client.py`) and for one whose bytes another proxy carries
(`delegated.py`). What was settled before a refusal stays, so that it is answered in the dialect of
its route and logged by its name. Must never look at the body. Read `claims.py` next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trunkline.gateway.claims import check_media, claimed_names
from trunkline.gateway.contracts import EVERYBODY, ClientError, Refusal, Route
from trunkline.gateway.head import RequestHead
from trunkline.gateway.routes import Local, route_of, unknown_path
from trunkline.gateway.tracing import Trace

if TYPE_CHECKING:
    from trunkline.gateway.front import Front


class Entry:
    """See the module. Of one request after the other."""

    __slots__ = ("client_id", "principal", "request_id", "route", "trace")

    def __init__(self) -> None:
        self.request_id = ""
        self.client_id = ""
        """What the client wished to call it, where that is no good name."""
        self.route: Route | Local | None = None
        self.principal = EVERYBODY
        self.trace: Trace | None = None

    def begin(self, request_id: str) -> None:
        """Another request; so it is called unless its client has a name for it."""
        self.request_id = request_id
        self.client_id = ""
        self.route = self.trace = None
        self.principal = EVERYBODY

    @property
    def is_anthropic(self) -> bool:
        return isinstance(self.route, Route) and self.route.is_anthropic

    @property
    def route_name(self) -> str:
        return self.route.label if self.route is not None else "none"

    def settle(
        self, front: Front, head: RequestHead, source: str, *, has_body: bool, name_chars: int = 64
    ) -> Route | Local:
        """Raises ClientError. `name_chars`: most of a client's name that is kept before ours."""
        name, self.client_id = claimed_names(head, front.request_id_headers)
        if name:
            self.request_id = name
        self.route = route = front.browsers.route(head, route_of(head.target))
        if route is None:
            raise ClientError(unknown_path(head.target))
        if isinstance(route, Route):
            self.trace = front.tracer.begin(head.headers, route)
        self.principal = principal = front.let_in(head, route, source)
        if name and principal.auth_method != "off":
            # Two tenants may choose one name; what workers and operators see is never the same.
            self.request_id = f"{name[:name_chars]}-{front.new_request_id()[:16]}"
        if head.headers.get(b"upgrade", b"h2c").lower() != b"h2c":  # h2c is an offer, not a demand
            raise ClientError(Refusal(code="no_upgrade", message="upgrades are not offered"))
        if has_body and head.method != "POST":
            text = f"{head.method} takes no body here"
            raise ClientError(Refusal(code="unexpected_body", message=text))
        if head.method == "POST":
            check_media(head, is_read=isinstance(route, Route) and route.takes_json)
        return route
