"""What the admin port needs of the rest of the gateway, and the records that go to and fro.

`operations.py` implements `AdminBackend` over fleet and decision book, `administration.py` the
`TenancyBackend` over registry, revoker and audit log. Outcomes are values: None is "nobody knows
that name" (404), `Refused` carries its own status. Must never hold a key of a worker in a record
that goes out, nor an API key's secret in any but the one that answers its making. Read `admin.py`
next.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeVar

from trunkline.core.identity import ScopeKind
from trunkline.core.principals import Principal, Role
from trunkline.core.records import BlockKey, WorkerId
from trunkline.gateway.permissions import Act, Extent
from trunkline.gateway.preview import PreviewOrder
from trunkline.gateway.tenant_counts import TenantCount
from trunkline.gateway.tenant_views import OrgView, Policy, TenantView

WorkerCondition = Literal[
    "joining",
    "checking",
    "warming",
    "ready",
    "asleep",
    "unhealthy",
    "draining",
    "breaker-open",
    "silent",
    "suspect",
    "ejected",
    "lease-expired",
    "isolation-failed",
]
"""`ready` may be chosen now; the others may not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOrder:
    """A worker to be joined. `url` is well-formed; whether it is allowed the backend decides."""

    url: str
    model_id: str = ""
    """It joins only if it serves this one; empty for whatever the gateway serves."""
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    api_key: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJob:
    """What became of an order, so far. `GET /workers/{id}` tells the rest."""

    worker: WorkerId
    state: WorkerCondition | Literal["removed", "reset"]
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """One worker as operators see it. `detail` takes what else is worth showing, never a key."""

    worker: WorkerId
    url: str
    state: WorkerCondition
    mode: Literal["exact", "approximate", "digest", "blind"]
    reason: str = ""
    """Why it is in this state and mode, where that needs saying."""
    model_id: str = ""
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    breaker: Literal["closed", "open", "half-open"] = "closed"
    requests_active: int = 0
    queue_ms: float = 0.0
    detail: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """News of a digest-mode worker, in bounds. If complete, `checkpoints` is all it holds."""

    worker: WorkerId
    boot_nonce: str
    counter: int
    checkpoints: tuple[BlockKey, ...] = field(repr=False)
    is_complete: bool
    memory: float
    """Share of KV memory in use, 0 to 1."""
    load: float
    """Share of its capacity in use; above 1 while requests wait."""
    block_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Why an order was not taken: 400 wrong, 403 not allowed, 409 conflicts, 503 not now."""

    status: Literal[400, 403, 409, 503]
    code: str
    message: str


class AdminBackend(Protocol):
    """The gateway behind the admin port. All methods are called on its event loop."""

    async def workers(self) -> Sequence[WorkerView]:
        """All of them, in a fixed order."""
        ...

    async def worker(self, worker: WorkerId) -> WorkerView | None: ...

    async def add_worker(self, order: WorkerOrder) -> WorkerJob | Refused:
        """Begin to join a worker; answers at once, with `joining`."""
        ...

    async def remove_worker(self, worker: WorkerId) -> WorkerJob | Refused | None:
        """Forget it: no new requests, those in flight end. `worker` may also be its URL."""
        ...

    async def drain_worker(
        self, worker: WorkerId, grace_secs: int | None
    ) -> WorkerJob | Refused | None:
        """No new requests; it stays listed. With a grace it leaves when nothing runs there any
        more, or that is over.
        """
        ...

    async def undrain_worker(self, worker: WorkerId) -> WorkerJob | Refused | None:
        """Requests again."""
        ...

    async def check_worker(self, worker: WorkerId) -> WorkerView | Refused | None:
        """Test it now; its view with what came of it."""
        ...

    async def reset_worker(self, worker: WorkerId) -> WorkerJob | Refused | None:
        """Have its engine drop its prefix cache, and forget what it held."""
        ...

    async def decisions(
        self, *, limit: int, worker: WorkerId | None
    ) -> Sequence[Mapping[str, Any]]:
        """The latest first, as `Receipt.as_dict` has them."""
        ...

    async def decision(self, request_id: str) -> Mapping[str, Any] | None:
        """The latest of that id, with what came true, and earlier attempts; `same_id`: others."""
        ...

    async def preview(self, order: PreviewOrder) -> Mapping[str, Any] | Refused:
        """The decision that a request would get now. Raises NoWorker."""
        ...

    async def heartbeat_key(self, worker: WorkerId) -> str | None:
        """What this worker proves itself with: its api_key, empty for none; None if unknown."""
        ...

    async def heartbeat(self, beat: Heartbeat) -> str | None:
        """Take it, or say why not (old life, counter not higher); then nothing has changed."""
        ...


# -- tenants ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who is at the admin port. Without a principal it is the operator."""

    principal: Principal | None
    source: str
    """Where the connection comes from."""
    request_id: str = ""

    @property
    def roles(self) -> frozenset[Role] | None:
        return None if self.principal is None else self.principal.roles

    @property
    def actor(self) -> str:
        return "operator" if self.principal is None else self.principal.actor


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call that its caller may make, as far as `extent` reaches."""

    caller: Caller
    act: Act
    extent: Extent
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageOrder:
    """Which part of a list: up to `limit` behind the one called `after`."""

    limit: int
    after: str = ""


Item = TypeVar("Item", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page(Generic[Item]):
    """Part of a list."""

    items: Sequence[Item]
    next: str | None = None
    """The `after` of what follows; None at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyOrder:
    """A key to be made."""

    tenant: str
    org: str = ""
    """Where the tenant has to be made; or checked against where it is."""
    create_tenant: bool = False
    user: str = ""
    roles: frozenset[Role] = frozenset({Role.TENANT_USER})
    models: frozenset[str] | None = None
    adapters: frozenset[str] | None = None
    expires_in_s: int | None = None
    not_before_ms: int = 0
    key_class: str = ""
    scope: ScopeKind | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyView:
    """One key, without anything that could help to guess it."""

    key_id: str
    org: str
    tenant: str
    state: Literal["live", "early", "expired", "revoked"]
    user: str
    roles: Sequence[str]
    models: Sequence[str] | None
    adapters: Sequence[str] | None
    not_before_ms: int
    not_after_ms: int | None
    key_class: str
    scope: ScopeKind | None
    """Narrower than its tenant's; None for what the tenant's policy says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewKeyView:
    """The answer to the making of a key: the only place where its text ever is."""

    key: str = field(repr=False)
    view: KeyView
    rev: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A change that is durable. `audit` is `pending` where its record waits for a sink."""

    rev: int | None
    """None where nothing had to be changed."""
    what: str
    audit: Literal["recorded", "pending"] = "recorded"


@dataclass(frozen=True, slots=True, kw_only=True)
class ErasureView:
    """What holders have physically erased. `holder` is empty where all are added up."""

    holder: str
    done: bool
    blocks: int
    bytes: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiptView:
    """What a revocation proves. Holders are named to those alone who see the whole fleet."""

    rev: int
    subject: str
    verb: str
    epoch: int
    state: Literal["effective"]
    acked_count: int
    fenced_count: int
    acked: Sequence[str] | None
    fenced: Sequence[str] | None
    fence: str
    erase: str
    aborted: int
    condemned_blocks: int
    condemned_bytes: Mapping[str, int]
    ms: float
    audit: str
    erasures: Sequence[ErasureView]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditOrder:
    """Which records: behind `after_seq` (None: the last `limit`), of one kind and time if given."""

    limit: int
    after_seq: int | None = None
    kind: str = ""
    from_ms: int | None = None
    to_ms: int | None = None
    subject: str = ""
    """Only what is about it (a tenant: and its keys and users); empty for all."""
    has_wanted: bool = True
    """Whether the records are among them that stand before a change, of what is wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditPageView:
    """Records in order, of a bounded part of the log that begins at `scanned_from`. More follow
    where `next_after` is not None, also when these are few.
    """

    records: Sequence[Mapping[str, object]]
    scanned_from: int
    next_after: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkView:
    """One place that keeps the log."""

    sink: str
    state: Literal["sound", "faulty", "out"]
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationView:
    """What a check of the whole log found."""

    sound: bool
    first_seq: int
    last_seq: int
    last_hash: str
    checkpoints: int
    fault_seq: int | None
    fault: str
    sinks: Sequence[SinkView]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicOrder:
    """A prefix that is to be shared."""

    name: str
    owner: str
    """Name of the organisation that answers for it."""
    tokens: bytes = field(repr=False)
    """Little-endian u32."""
    block_tokens: int
    model: str
    audience: Sequence[str] | None
    """Names of organisations; None for all."""
    expires_in_s: int
    weights_digest: str = ""
    tokenizer_digest: str = ""
    template_digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicView:
    """One public prefix: its digest and length, not its tokens."""

    public_id: str
    name: str
    state: Literal["proposed", "live", "expired", "withdrawn"]
    owner: str
    proposer: str
    approvers: Sequence[str]
    approvers_needed: int
    model: str
    token_digest: str
    tokens_count: int
    block_tokens: int
    audience: Sequence[str] | None
    not_after_ms: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetChange:
    """What is about to happen to which worker, as its caller names it."""

    verb: Literal["add", "change", "drain", "undrain", "remove", "reset"]
    worker: str


Outcome = TypeVar("Outcome")


class TenancyBackend(Protocol):
    """Tenants, keys, revocations, audit and public prefixes behind the admin port.

    What lies outside of a call's extent is None, as what does not exist. Methods raise errors of
    `errors.py`, `ChangeRefused` and `AuditDown` before all; the port answers with their status.
    """

    def principal(self, authorization: bytes, source: str) -> Principal | None:
        """Whose API key this is, now and not revoked in any part; None for nobody's."""
        ...

    def refused(self, caller: Caller | None, action: str, source: str, why: str) -> None:
        """Somebody was told no (None: nobody knows who): sampled into the audit log."""
        ...

    async def change_fleet(
        self, call: Call, change: FleetChange, carry_out: Callable[[], Awaitable[Outcome]]
    ) -> Outcome:
        """Carry it out, with its intent in the audit log before and its outcome behind. Raises
        AuditDown, and has done nothing then.
        """
        ...

    async def look(
        self, call: Call, tenant: str, carry_out: Callable[[], Awaitable[Outcome]]
    ) -> Outcome:
        """Into what a tenant has cached, on record in the same way. Raises AuditDown."""
        ...

    async def orgs(self, call: Call, page: PageOrder) -> Page[OrgView] | None: ...
    async def add_org(self, call: Call, name: str) -> Done: ...
    async def set_org_policy(self, call: Call, name: str, *, shared: bool) -> Done | None: ...
    async def tenants(self, call: Call, page: PageOrder) -> Page[TenantView] | None: ...

    def others(self, call: Call) -> TenantCount | None:
        """Of all tenants that are not counted one by one; None for who sees less than the fleet."""
        ...

    async def add_tenant(
        self, call: Call, name: str, *, org: str, create_org: bool
    ) -> Done | None: ...

    async def set_tenant_policy(self, call: Call, name: str, policy: Policy) -> Done | None: ...

    async def keys(self, call: Call, page: PageOrder, *, tenant: str) -> Page[KeyView] | None: ...
    async def create_key(self, call: Call, order: KeyOrder) -> NewKeyView | None: ...
    async def revoke_key(self, call: Call, key_id: str) -> Done | None: ...

    async def revoke(self, call: Call, subject: str) -> ReceiptView | None: ...
    async def invalidate(self, call: Call, subject: str) -> ReceiptView | None: ...
    async def enable(self, call: Call, subject: str) -> Done | None: ...
    async def receipts(self, call: Call, limit: int) -> Sequence[ReceiptView]: ...
    async def receipt(self, call: Call, rev: int) -> ReceiptView | None: ...

    async def audit(self, call: Call, order: AuditOrder) -> AuditPageView | None: ...

    async def verify_audit(self, call: Call, checkpoint: object) -> VerificationView:
        """`checkpoint`: one more to hold the log against, as JSON has it; None for none. Raises
        ValueError for what is no checkpoint.
        """
        ...

    async def publics(self, call: Call, page: PageOrder) -> Page[PublicView] | None: ...
    async def propose_public(self, call: Call, order: PublicOrder) -> PublicView: ...
    async def approve_public(self, call: Call, name: str) -> PublicView | None: ...
    async def withdraw_public(self, call: Call, name: str) -> ReceiptView | None: ...
