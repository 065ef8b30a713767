"""SGLang's HTTP surface over the same simulated engine: its pages about itself, its flush.

Requests and answers are those of `api.py`, since both engines speak OpenAI's; what differs is how a
gateway finds out what it stands before. Shapes are those of 0.5.23, or of 0.5.18 where `is_old`; as
there, no metrics are served unless asked for. Must never: take a ticket, or split a salt.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from trunkline.worker.api import Api, as_bound


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangSurface:
    """Handlers over one worker."""

    api: Api
    page_tokens: int
    is_old: bool

    def routes(self) -> list[Route]:
        api, either = self.api, ["GET", "POST"]
        return [
            Route("/v1/chat/completions", api.chat, methods=["POST"]),
            Route("/v1/completions", api.completion, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/loads", self.loads),
            Route("/health", api.health),
            Route("/server_info", self.server_info),
            Route("/get_server_info", self.server_info),
            Route("/flush_cache", self.flush, methods=either),
        ]

    async def models(self, request: Request) -> Response:
        reader = self.api.reader
        card = {
            "id": reader.model,
            "object": "model",
            "created": int(self.api.clock.wall()),
            "owned_by": "sglang",
            "root": reader.model,
            "parent": None,
            "max_model_len": reader.context_tokens,
        }
        return JSONResponse({"object": "list", "data": [card]})

    async def loads(self, request: Request) -> Response:
        version = self._version()
        return JSONResponse({"version": version, "loads": [self._load(r) for r in self._ranks()]})

    async def server_info(self, request: Request) -> Response:
        """Of some four hundred settings those that say what a gateway has to know."""
        (rank,) = self.api.ranks
        cache, config = rank.engine.cache, self._event_settings()
        told: dict[str, Any] = {
            "model_path": self.api.reader.model,
            "page_size": self.page_tokens,
            "dp_size": 1,
            "enable_cache_report": self.api.tells_reuse,
            "kv_events_config": None if config is None else json.dumps(config),
            "max_total_num_tokens": cache.capacity * cache.block_tokens,
            "internal_states": [{}],
            "version": self._version(),
        }
        return JSONResponse(told)

    async def flush(self, request: Request) -> Response:
        done = [rank.engine.reset() for rank in self.api.ranks]
        for rank in self.api.ranks:
            rank.labels.resident()
            rank.engine.tell()
        if all(done):
            return Response("Cache flushed.\n")
        return Response("Flush cache failed.\n", status_code=400)

    def _event_settings(self) -> dict[str, Any] | None:
        (rank,) = self.api.ranks
        publisher = rank.publisher
        if publisher is None:
            return None
        return {
            "publisher": "zmq",
            "endpoint": as_bound(publisher.endpoint),
            "replay_endpoint": as_bound(publisher.replay_endpoint),
            "topic": publisher.topic,
            "buffer_steps": publisher.buffer_batches,
        }

    def _ranks(self) -> range:
        return range(len(self.api.ranks))

    def _load(self, index: int) -> dict[str, Any]:
        engine = self.api.ranks[index].engine
        return {
            "dp_rank": index,
            "num_running_reqs": engine.running,
            "num_waiting_reqs": engine.waiting,
            "token_usage": engine.cache.used_share,
        }

    def _version(self) -> str:
        return "0.5.18" if self.is_old else "0.5.23"
