"""The records that the parts of the data plane hand to one another.

`intake.py` makes an `InferenceRequest` of a client's message; a `Picker` answers with a `Pick`;
`exchange.py` carries it out and tells the picker how it went. Read `front.py` next.
"""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from trunkline.core.epochs import Admission, EpochTable, domain_of
from trunkline.core.identity import Epochs, Scope, ScopeKind
from trunkline.core.pace import Pace
from trunkline.core.principals import Principal
from trunkline.core.records import Instant, WorkerId
from trunkline.errors import GatewayError
from trunkline.ports.tokenizer import Tokenizer
from trunkline.ports.worker import AttemptEnd as AttemptEnd
from trunkline.ports.worker import Endpoint as Endpoint
from trunkline.ports.worker import Stay

if TYPE_CHECKING:
    from trunkline.gateway.tracing import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a client's message is not served. `code` is a constant of ours, safe as a label."""

    status: int = 400
    code: str
    message: str
    param: str | None = None
    """The field at fault, where one can be named."""


class ClientError(GatewayError):
    """The client's message is at fault; the same message would fail anywhere."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class Route(Enum):
    """What a client path is to us."""

    CHAT = "chat"
    COMPLETION = "completion"
    MESSAGES = "messages"
    """Anthropic's `/v1/messages`."""
    RESPONSES = "responses"
    COUNT_TOKENS = "count_tokens"
    """`/v1/messages/count_tokens`: nothing is computed or kept."""
    EMBEDDINGS = "embeddings"
    SCORES = "scores"
    """`/v1/rerank`, `/v1/score` and their older names."""
    TOKENIZE = "tokenize"
    """`/tokenize` and `/detokenize`: nothing is computed or kept."""
    AUDIO = "audio"
    """`/v1/audio/transcriptions` and `translations`: forms, passed on byte for byte."""
    OTHER = "other"
    """Any other `/v1/*`: routed by load alone. Buffered up to `max_payload_size`; a JSON object
    loses the forbidden fields and gets our salt, all else goes through byte for byte."""

    # Worked out once for each member: all of it is asked of every request.
    def __init__(self, name: str) -> None:
        self.label = name
        """In metrics."""
        self.is_anthropic = name in {"messages", "count_tokens"}
        """Its answers, errors included, are in Anthropic's shapes."""
        self.can_resume = name in {"chat", "completion"}
        """A stream that broke can go on from another worker: its events are understood."""
        self.tells_reuse = self.can_resume or name in {"messages", "responses"}
        """The usage in its answers says how much of the prompt was reused."""
        self.computes = name not in {"count_tokens", "tokenize"}
        """A worker computes its prompt, and so reads and fills a cache."""
        self.takes_json = name not in {"other", "audio"}
        """It takes JSON and nothing else."""
        self.is_weighed = name in {"embeddings", "scores", "tokenize", "audio"}
        """Its body is weighed, and not read: a guess of what it costs is all that is known."""
        self.is_read = name != "other" and not self.is_weighed
        """What its body says is known: its prompt, its model, how long its answer may be."""

    __hash__ = object.__hash__  # Enum's own is a function in Python


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """Input of the chat template. `messages` and `tools` are decoded JSON, checked for shape."""

    messages: list[dict[str, Any]] = field(repr=False)
    tools: list[dict[str, Any]] | None = field(default=None, repr=False)
    template_options: dict[str, Any] = field(default_factory=dict[str, Any], repr=False)
    """`add_generation_prompt`, `continue_final_message`, ...: what the engine lets a client set."""
    is_anthropic: bool = False
    """Made of another dialect, and still to be fitted to the template."""
    thinks_not: bool = False
    """In that dialect, thinking was switched off."""
    unknown: str = ""
    """What an engine makes of it that is not known here; empty where all of it is."""
    has_media: bool = False
    """It has parts that are no text."""


Prompt: TypeAlias = "ChatPrompt | str | array[int]"
"""Messages, a text, or token ids (u32)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What one request runs under; made by the tenancy when it is admitted, shared by many."""

    principal: Principal
    scope: Scope | None
    """Whose cache it may use; None where nothing may be reused and nothing kept."""
    admission: Admission
    epochs: Epochs
    """Those that count in `scope`."""
    domain: bytes
    """Names the namespaces of `scope` under these epochs; empty for none."""
    adapter: str = ""
    """Name of the adapter it runs with; empty for the model itself."""
    sees_decisions: bool
    """Whether its answers may tell of workers and of what was predicted."""

    def unshared(self) -> Grant:
        """The same caller, with nothing to reuse and nothing to keep."""
        return replace(self, scope=None, epochs=Epochs(), domain=b"")


EVERYBODY = Principal(org="default", tenant="default", actor="everybody", auth_method="off")
"""The one caller there is where nobody is asked who they are."""

_OPEN_SCOPE = Scope(kind=ScopeKind.TENANT, org=EVERYBODY.org, tenant=EVERYBODY.tenant)

OPEN_GRANT = Grant(
    principal=EVERYBODY,
    scope=_OPEN_SCOPE,
    admission=EpochTable().admit(EVERYBODY, ""),
    epochs=Epochs(),
    domain=domain_of(_OPEN_SCOPE, Epochs()),
    sees_decisions=True,
)


@dataclass(slots=True, kw_only=True)
class InferenceRequest:
    """One accepted request. `body` is what the client sent, less what is never forwarded."""

    request_id: str
    route: Route
    method: str
    path: str
    body: bytes = field(repr=False)
    grant: Grant = OPEN_GRANT
    wish: ScopeKind | None = None
    """The narrower scope that the client wished for."""
    in_session: str = ""
    """The session whose cache it uses; empty for none."""
    also_under: Admission | None = None
    """What else its answer stands on: the public prefix that this attempt reads."""
    has_begun: bool = False
    """The first bytes of its answer have gone out."""
    had_turn: bool = False
    """The line in front of the fleet let it pass and charged it: further attempts do not wait."""
    is_counted: bool = False
    """It is among the requests of its tenant: further attempts are not."""
    model: str = ""
    is_stream: bool = False
    prompt: Prompt | None = field(default=None, repr=False)
    """None where nothing is known of the prompt: routed by load alone."""
    max_tokens: int | None = None
    began_session: str = ""
    """A session that began with this request: its name is told in the answer."""
    session: str | None = None
    """Affinity hint of the client, inside its own namespace; never identity."""
    is_object: bool = False
    """`body` is a JSON object: it goes out with our salt, whether its prompt was read or not."""
    further_tokens: int = 0
    """Estimate of what is to be computed beside `prompt`: the rest of a batch, and copies."""
    adds_special_tokens: bool | None = None
    """As the client said; None leaves it to the endpoint."""
    deadline: Instant | None = None
    """When the client gives up on its first byte; None where it did not say."""
    max_retries: int | None = None
    """Further attempts that the client wishes at most."""
    approximate: str = ""
    """Why its tokens, once it is read, are not quite those that a worker computes, as a label of
    ours; empty where they are.
    """
    keep_ms: float = 0.0
    """How long its client asks that what it computes be kept; 0 for no longer than usual."""
    previous_response: str = ""
    """The response that it goes on from; empty for none."""
    outlives_answer: bool = False
    """Its worker would go on with it when its answer is over, or its client is gone."""
    is_vouched_for: bool = False
    """The operator says that engines keep to the salt on its path."""
    browser_headers: tuple[tuple[str, str], ...] = ()
    """What its answer says to a browser; nothing to all others."""
    limit_headers: tuple[tuple[str, str], ...] = ()
    """What its answer tells of its tenant's rate limits; empty where there are none."""
    trace: Trace | None = None
    """Its place in a trace, shared by all attempts; None where it has none."""
    identity: object = field(default_factory=object, repr=False, compare=False)
    """The same in all its attempts, and of no other request: ids are chosen by clients."""

    @property
    def trace_id(self) -> str:
        """For the log; empty where it is in no trace."""
        return "" if self.trace is None else self.trace.trace_id

    @property
    def is_alone(self) -> bool:
        """Nothing that was computed before can be reused for it, not even by its own choices."""
        is_one = isinstance(self.prompt, array) and not self.further_tokens
        return is_one and self.grant.scope is None


def _nothing_ahead() -> float:
    return 0.0


@dataclass(slots=True, kw_only=True)
class Pick:
    """One choice of worker for one attempt."""

    worker: WorkerId
    endpoint: Endpoint
    body: bytes = field(repr=False)
    """What to send: the request's body with our salt and, where needed, our transfer hint."""
    headers: tuple[tuple[str, str], ...] = ()
    """Headers to add to the upstream request."""
    decision_header: str = ""
    """Compact decision for `x-trunkline-decision`; empty where it is switched off."""
    ticket: Any = None
    """The picker's own book-keeping, handed back unread."""
    by: Picker | None = None
    """Whose it is, where there are several."""
    tokenizer: Tokenizer | None = None
    """The model's, where it is known and the request's prompt is tokens of it: a stream that breaks
    can be continued with it.
    """
    stay: Stay | None = None
    """Whether its worker is still with us; None where it always is."""
    pace: Pace | None = None
    """What its worker's life is known by; None where nobody holds that against it."""
    first_token_ms: float | None = None
    """How long its first token may take; None for what the settings say."""
    ahead_ms: Callable[[], float] = _nothing_ahead
    """Predicted prefill that its worker has in front of it now, its own included."""


class Picker(Protocol):
    """Chooses a worker for each attempt and keeps the books. Directory and routing lie behind."""

    def pick(self, request: InferenceRequest, tried: frozenset[WorkerId]) -> Pick | Awaitable[Pick]:
        """Choose a worker that was not tried yet. Awaitable while a long prompt is tokenised; an
        awaitable that is cancelled leaves nothing behind.

        Raises NoWorker (503) when none is usable, Busy (429) when all are full, and ClientError or
        ValueError for a prompt that cannot be served. On success the attempt counts as in flight
        until `ended`.
        """
        ...

    def first_byte(self, pick: Pick) -> None:
        """The worker's answer has begun (status below 300): prefill is over."""
        ...

    def pulled(self, pick: Pick, told: bytes) -> None:
        """The worker's answer has begun, and says what became of what it was told to pull."""
        ...

    def ended(self, pick: Pick, end: AttemptEnd, cached_tokens: int | None) -> None:
        """Exactly once for each pick. `cached_tokens` is what the worker's usage said, if any."""
        ...
