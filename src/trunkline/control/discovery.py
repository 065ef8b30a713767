"""What a worker is, asked of itself: models, cache, event sources; and whether it belongs here.

Owns the questions and the rule that one fleet serves one model. Must never: join anything, or
guess at a model. Read `engine.py` for what engines answer, `member.py` for what is made of it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from trunkline.control.engine import CacheFacts, parse_cache, parse_models
from trunkline.control.views import WorkerSpec
from trunkline.errors import WorkerLost
from trunkline.ports.worker import EventSource

_SHOWN_MODELS = 3

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


class FleetModel:
    """The one model of this gateway: as the settings name it, else that of the first worker.

    Blocks are told apart by model in every key, so a worker of another one would never match, and
    would answer requests meant for this one.
    """

    def __init__(self, name: str = "") -> None:
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
        if self.name and self.name not in models:
            return f"{serves}; this gateway serves {self.name}"
        return None

    def settle(self, models: Sequence[str], wanted: str) -> str:
        """The model's name, which the first worker that joins decides for good."""
        self.has_joined = True
        self.name = self.name or wanted or models[0]
        return self.name


async def ask(spec: WorkerSpec, get: Get, find_sources: FindSources) -> Facts:
    """Ask a worker what it is. Raises WorkerLost, and what `get` raises."""
    status, body = await get("/v1/models")
    if status != 200:
        raise WorkerLost(f"{spec.name}/v1/models answered {status}")
    models = parse_models(body)
    if not models:
        raise WorkerLost(f"{spec.name}/v1/models lists no model")
    status, metrics = await get("/metrics")
    cache = parse_cache(metrics if status == 200 else b"")
    status, announced = await get("/kv_event_sources")
    found = find_sources(announced, spec.endpoint.host) if status == 200 else []
    # An engine that does not announce its events: the operator may have.
    return Facts(
        models=tuple(model.model_id for model in models),
        max_model_len=models[0].max_model_len,
        cache=cache,
        sources=tuple(found) or spec.event_sources,
    )
