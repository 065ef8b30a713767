"""What a worker is, asked of itself: models, cache, event sources; and whether it belongs here.

Owns the questions and the rule that one fleet serves one model. Must never: join anything, or
guess at a model. Read `engine.py` for what engines answer, `member.py` for what is made of it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from trunkline.config import HealthConfig
from trunkline.control.engine import (
    CacheFacts,
    ModelFacts,
    ServerFacts,
    kind_of,
    parse_cache,
    parse_models,
    parse_server_info,
    parse_version,
)
from trunkline.control.views import WorkerSpec
from trunkline.errors import WorkerLost, WorkerTimeout
from trunkline.ports.worker import EngineKind, EventSource

_SHOWN_MODELS = 3
_SGLANG_TAKES_SALTS = (0, 5, 3)
"""Earlier releases ignore the field, and one tenant would find what another one cached. 0.5.3 is
the first that we know to take it, 0.4.9 the last that we know not to.
"""
_SGLANG_TELLS_SALTS = (0, 5, 18)
"""Earlier releases do not say in their events under which salt a block was computed."""

Get = Callable[[str], Awaitable[tuple[int, bytes]]]
FindSources = Callable[[bytes, str], list[EventSource]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What discovery found. `models` are the names it answers to, its own first; never empty."""

    models: tuple[str, ...]
    max_model_len: int | None
    """None where it does not say."""
    cache: CacheFacts
    sources: tuple[EventSource, ...]
    engine: EngineKind = EngineKind.UNKNOWN
    version: str = ""
    """Empty where it does not say."""
    no_events: str = "the worker announces no events"
    """Why there are no sources, where there are none."""
    tokenizer_digest: str = ""
    """Of the tokenizer it says it has; engines do not say."""
    is_exact: bool = True
    """Its blocks are those that we have keys of."""
    takes_salts: bool = True
    """Whether it keeps apart what it computes under different salts, as far as we know."""
    adapters: tuple[str, ...] = ()
    """Those of `models` that name a parent."""


NOTHING = Facts(
    models=(),
    max_model_len=None,
    cache=CacheFacts(block_tokens=None, capacity_blocks=None),
    sources=(),
)
"""Of a worker that was not reached yet."""


class FleetModel:
    """The one model of this gateway: as the settings name it, else that of the first worker.

    Blocks are told apart by model in every key, so a worker of another one would never match, and
    would answer requests meant for this one.
    """

    def __init__(self, name: str = "", also: Sequence[str] = ()) -> None:
        """`also`: further names that its workers may list in its place."""
        self._also = frozenset(also)
        self.name = name
        """Empty until a worker has joined."""
        self.has_joined = False
        """Whether a worker of this model ever was in the fleet."""

    def refusal(self, models: Sequence[str], wanted: str) -> str | None:
        """Why a worker with these models is not taken; None when it is. `wanted` is what it was
        added with, empty for anything.
        """
        serves = "serves " + ", ".join(name[:80] for name in models[:_SHOWN_MODELS])
        if wanted and wanted not in models:
            return f"{serves}; it was added for {wanted}"
        if self.name and self.name not in models and self._also.isdisjoint(models):
            return f"{serves}; this gateway serves {self.name}"
        return None

    def settle(self, models: Sequence[str], wanted: str) -> str:
        """The model's name, which the first worker that joins decides for good."""
        self.has_joined = True
        self.name = self.name or wanted or models[0]
        return self.name


def refusal(facts: Facts, model: FleetModel, wanted: str, *, has_tenants: bool) -> str | None:
    """Why this worker is not taken; None when it is."""
    if has_tenants and not facts.takes_salts:
        return f"SGLang {facts.version} takes no cache_salt: tenants cannot be kept apart there"
    return model.refusal(facts.models, wanted)


def adapters_of(models: Sequence[ModelFacts]) -> tuple[str, ...]:
    """What is served with another one of them as its base."""
    return tuple(model.model_id for model in models if model.parent)


def relisted(facts: Facts, models: Sequence[ModelFacts]) -> Facts:
    """The same worker with the names that it answers to now; as it was where it tells none."""
    names = tuple(model.model_id for model in models) or facts.models
    adapters = adapters_of(models) if models else facts.adapters
    return replace(facts, models=names, adapters=adapters)


async def probed(name: str, health: HealthConfig, get: Get) -> str:
    """What is wrong with its answer to a probe; empty for a good one."""
    path = health.health_check_endpoint
    try:
        status, _ = await get(path)
    except (WorkerLost, WorkerTimeout) as error:
        return str(error)
    return "" if status == 200 else f"{name}{path} answered {status}"


async def ask(
    spec: WorkerSpec, get: Get, find_sources: FindSources, default_block_tokens: int
) -> Facts:
    """Ask a worker what it is. Raises WorkerLost, and what `get` raises."""
    status, body = await get("/v1/models")
    if status != 200:
        raise WorkerLost(f"{spec.name}/v1/models answered {status}")
    models = parse_models(body)
    if not models:
        raise WorkerLost(f"{spec.name}/v1/models lists no model")
    status, metrics = await get("/metrics")
    metrics = metrics if status == 200 else b""
    if kind_of(models, metrics) is EngineKind.SGLANG:
        wanted = spec.block_tokens or default_block_tokens
        return await _ask_sglang(spec, models, get, find_sources, wanted)
    kind, version = kind_of(models, metrics), ""
    if kind is not EngineKind.TRUNKLINE:
        status, told = await get("/version")
        version = parse_version(told) if status == 200 else ""
    status, announced = await get("/kv_event_sources")
    found = find_sources(announced, spec.endpoint.host) if status == 200 else []
    return Facts(
        models=tuple(model.model_id for model in models),
        max_model_len=models[0].max_model_len,
        cache=parse_cache(metrics),
        sources=spec.event_sources or tuple(found),  # who operates it knows the way there
        engine=kind,
        version=version,
        adapters=adapters_of(models),
        tokenizer_digest=models[0].tokenizer_digest,
    )


async def _ask_sglang(
    spec: WorkerSpec,
    models: Sequence[ModelFacts],
    get: Get,
    find_sources: FindSources,
    wanted_tokens: int,
) -> Facts:
    """SGLang tells all of itself on one page, its event settings included."""
    status, body = await get("/server_info")
    if status != 200:
        status, body = await get("/get_server_info")  # its name in older releases
    server = (parse_server_info(body) if status == 200 else None) or ServerFacts()
    found = find_sources(body, spec.endpoint.host) if status == 200 else []
    sources = spec.event_sources or tuple(found)
    no_events = "the worker publishes no events: --kv-events-config turns them on"
    if server.is_before(*_SGLANG_TELLS_SALTS):
        sources = ()
        since = ".".join(map(str, _SGLANG_TELLS_SALTS))
        no_events = f"SGLang {server.version} names no salts in its events; {since} and later do"
    page_tokens = server.page_tokens
    block_tokens = _block_of_pages(page_tokens, wanted_tokens) if page_tokens else None
    if page_tokens != block_tokens:
        sources = tuple(replace(source, page_tokens=page_tokens) for source in sources)
    capacity_blocks = None
    if server.capacity_tokens and block_tokens:
        capacity_blocks = server.capacity_tokens // block_tokens
    return Facts(
        models=tuple(model.model_id for model in models),
        max_model_len=models[0].max_model_len,
        cache=CacheFacts(block_tokens=block_tokens, capacity_blocks=capacity_blocks),
        sources=sources,
        engine=EngineKind.SGLANG,
        version=server.version,
        no_events=no_events,
        takes_salts=not server.is_before(*_SGLANG_TAKES_SALTS),
        adapters=adapters_of(models),
    )


def _block_of_pages(page_tokens: int, wanted_tokens: int) -> int:
    """Whole pages that make up a block: one, where a page is no smaller than the wanted size. Its
    pages may have a single token, and a directory with an entry for each would be of no use.
    """
    return -(-wanted_tokens // page_tokens) * page_tokens
