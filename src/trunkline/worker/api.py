"""The HTTP surface of the simulated engine: vLLM's paths, shapes and errors.

Must never: touch the cache but through `engine.py`. Read `requests.py` for what is accepted and
`answers.py` for what goes back.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from trunkline.ports.clock import Clock
from trunkline.ports.publisher import EventPublisher
from trunkline.ports.tokenizer import Tokenizer
from trunkline.worker.answers import Answer, error_body
from trunkline.worker.blocks import STOCK, Terms
from trunkline.worker.bodies import read_body
from trunkline.worker.engine import Engine
from trunkline.worker.faults import Faults
from trunkline.worker.jobs import Job, QueueFull
from trunkline.worker.labels import LabelBook
from trunkline.worker.metrics import Metrics
from trunkline.worker.orders import HEADER as PULL_HEADER
from trunkline.worker.orders import order_from
from trunkline.worker.pulls import PullCall
from trunkline.worker.requests import BadRequest, Generation, Reader
from trunkline.worker.storage import Storage
from trunkline.worker.ticket import HEADER, bad_header, ticket_from

VERSION = "0.32.0+trunkline"
_MAX_BODY_BYTES = 64 << 20
_EMBEDDING_WIDTH = 64
_MAX_NAME_CHARACTERS = 256
# Said in place of a host in an announced endpoint; the socket itself is bound to the worker's host.
_PUBLISHER_BINDS = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One data-parallel rank."""

    engine: Engine
    labels: LabelBook
    publisher: EventPublisher | None


@dataclass(slots=True, kw_only=True)
class Api:
    """Handlers over the ranks of one worker."""

    ranks: Sequence[Rank]
    reader: Reader
    tokenizer: Tokenizer
    faults: Faults
    metrics: Metrics
    clock: Clock
    id_prefix: str
    takes_tickets: bool = False
    """Off, a request's ticket and regions are as unknown here as to a stock engine."""
    storage: Storage | None = None
    """None where nothing is behind the device."""
    tells_reuse: bool = True
    """Whether usage says how much of a prompt was cached."""
    _served: int = 0
    _pieces: dict[int, str] = field(default_factory=dict[int, str])
    """Text of single tokens, at most one entry for each id of the vocabulary."""

    def routes(self) -> list[Route]:
        post = ["POST"]
        return [
            Route("/v1/chat/completions", self.chat, methods=post),
            Route("/v1/completions", self.completion, methods=post),
            Route("/v1/embeddings", self.embeddings, methods=post),
            Route("/v1/models", self.models),
            Route("/health", self.health),
            Route("/ping", self.health, methods=["GET", "POST"]),
            Route("/version", self.version),
            Route("/load", self.load),
            Route("/metrics", self.scrape),
            Route("/tokenize", self.tokenize, methods=post),
            Route("/detokenize", self.detokenize, methods=post),
            Route("/reset_prefix_cache", self.reset, methods=post),
            Route("/kv_event_sources", self.event_sources),
        ]

    async def chat(self, request: Request) -> Response | Answer | Hanging:
        return await self._answer(request, is_chat=True)

    async def completion(self, request: Request) -> Response | Answer | Hanging:
        return await self._answer(request, is_chat=False)

    async def health(self, request: Request) -> Response:
        return Response(status_code=200)

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": VERSION})

    async def load(self, request: Request) -> Response:
        busy = sum(rank.engine.running + rank.engine.waiting for rank in self.ranks)
        return JSONResponse({"server_load": busy})

    async def scrape(self, request: Request) -> Response:
        return Response(self.metrics.rendered(), media_type="text/plain; version=0.0.4")

    async def models(self, request: Request) -> Response:
        card = {
            "id": self.reader.model,
            "object": "model",
            "created": int(self.clock.wall()),
            "owned_by": "trunkline",
            "root": self.reader.model,
            "parent": None,
            "max_model_len": self.reader.context_tokens,
            "trunkline_tokenizer": self.tokenizer.digest,
        }
        return JSONResponse({"object": "list", "data": [card]})

    async def tokenize(self, request: Request) -> Response:
        body = await _json_body(request)
        self.reader.check_model(body)
        is_chat = "messages" in body
        read = self.reader.chat_prompt if is_chat else self.reader.completion_prompt
        ids = read(body).tolist()
        limit = self.reader.context_tokens
        return JSONResponse({"count": len(ids), "max_model_len": limit, "tokens": ids})

    async def detokenize(self, request: Request) -> Response:
        body = await _json_body(request)
        ids = body.get("tokens")
        if not isinstance(ids, list):
            raise BadRequest("tokens must be a list of token ids", "tokens")
        packed = self.reader.token_ids(cast("list[Any]", ids), "tokens")
        return JSONResponse({"prompt": self.tokenizer.decode(packed)})

    async def embeddings(self, request: Request) -> Response:
        """A deterministic vector for each input; it means nothing."""
        body = await _json_body(request)
        self.reader.check_model(body)
        given = body.get("input")
        inputs: list[Any] = cast("list[Any]", given) if isinstance(given, list) else [given]
        if not inputs or not all(isinstance(one, str | list) for one in inputs):
            raise BadRequest("input must be a text or a list of texts", "input")
        data = [
            {"object": "embedding", "index": index, "embedding": _embedding(one)}
            for index, one in enumerate(inputs)
        ]
        return JSONResponse({"object": "list", "model": self.reader.model, "data": data})

    async def reset(self, request: Request) -> Response:
        if self.storage is not None:
            # All ranks share it: none is emptied while another one works.
            if any(rank.engine.running for rank in self.ranks):
                return JSONResponse({"success": False})
            self.storage.tier.reset()
        # Every rank is asked, also after one that is busy.
        done = [rank.engine.reset() for rank in self.ranks]
        for rank in self.ranks:
            rank.labels.resident()
        return JSONResponse({"success": all(done)})

    async def event_sources(self, request: Request) -> Response:
        sources = {
            str(index): {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": as_bound(rank.publisher.endpoint),
                "replay_endpoint": rank.publisher.replay_endpoint,
                "buffer_steps": rank.publisher.buffer_batches,
                "hwm": 100_000,
                "max_queue_size": 100_000,
                "topic": rank.publisher.topic,
            }
            for index, rank in enumerate(self.ranks)
            if rank.publisher is not None
        }
        return JSONResponse(sources)

    async def _answer(self, request: Request, *, is_chat: bool) -> Response | Answer | Hanging:
        body = await _json_body(request)
        if self.faults.is_unavailable:
            return error_response(503, "the worker was told to fail", "ServiceUnavailableError")
        if self.faults.is_hanging:
            return Hanging()
        generation = self.reader.generation(body, is_chat=is_chat)
        terms, call = STOCK, None
        if self.takes_tickets:
            terms = self._terms(request, generation)
            call = self._call(request, terms)
        if self.faults.is_ignoring_salt:
            generation, terms, call = replace(generation, salt=None, regions=()), STOCK, None
        if self.faults.has_no_prefix_cache:
            terms = replace(terms, reuses=False)
        rank = self._rank_for(request)
        if call is None and self._waits_for_kv(rank, generation, terms):
            call = PullCall(None)
        try:
            job = rank.engine.submit(
                generation.prompt, generation.salt, generation.wanted_tokens, terms, call
            )
        except QueueFull as full:
            return error_response(503, str(full), "ServiceUnavailableError")
        self._served += 1
        storage = self.storage
        kind = "chatcmpl" if is_chat else "cmpl"

        def label(generation: Generation, job: Job) -> None:
            assert job.sequence is not None
            rank.labels.attach(generation.labels, job.sequence.hashes)

        return Answer(
            request=generation,
            engine=rank.engine,
            job=job,
            id=f"{kind}-{self._name_of(request)}",
            created_s=int(self.clock.wall()),
            model=self.reader.model,
            piece_of=self._piece,
            on_started=label,
            pulls=storage.exchange.pulls if storage and storage.exchange else None,
            lifts=storage.lifts if storage else None,
            tells_reuse=self.tells_reuse and not self.faults.has_no_usage_details,
        )

    def _name_of(self, request: Request) -> str:
        """As the caller named the request; else by this life and a count, for direct callers."""
        given = request.headers.get("x-request-id", "")
        if 0 < len(given) <= _MAX_NAME_CHARACTERS:
            return given
        return f"{self.id_prefix}-{self._served:x}"

    def _terms(self, request: Request, generation: Generation) -> Terms:
        ticket = ticket_from(request.headers.raw)
        regions = generation.regions
        if ticket is not None and len(ticket.regions) != len(regions):
            raise BadRequest(
                f"{HEADER.decode()}: regions has {len(ticket.regions)} tags, "
                f"cache_salt_regions has {len(regions)}",
                "cache_salt_regions",
            )
        return Terms(ticket=ticket, regions=regions)

    def _call(self, request: Request, terms: Terms) -> PullCall | None:
        order = order_from(request.headers.raw)
        if order is None:
            return None
        if terms.ticket is None:
            raise bad_header(PULL_HEADER, "it needs a ticket beside it")
        return PullCall(order)

    def _waits_for_kv(self, rank: Rank, asked: Generation, terms: Terms) -> bool:
        """Whether what it can reuse lies on disk, or is on its way here for somebody else."""
        storage, cache = self.storage, rank.engine.cache
        if storage is None:
            return False
        exchange, lifts = storage.exchange, storage.lifts
        if exchange and exchange.pulls.is_coming(cache, asked.prompt, asked.salt, terms):
            return True
        return lifts is not None and lifts.is_wanted(cache, asked.prompt, asked.salt, terms)

    def _rank_for(self, request: Request) -> Rank:
        """As told by the header; else the least busy, the first of equals."""
        named = request.headers.get("x-data-parallel-rank")
        if named is None:
            return min(self.ranks, key=lambda rank: rank.engine.running + rank.engine.waiting)
        if not (named.isascii() and named.isdigit() and int(named) < len(self.ranks)):
            raise BadRequest(f"X-data-parallel-rank must be 0 to {len(self.ranks) - 1}")
        return self.ranks[int(named)]

    def _piece(self, token: int) -> str:
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self.tokenizer.decode(array("I", [token]))
        return piece


class Hanging:
    """Never answers; ends when the client leaves."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        while message["type"] != "http.disconnect":
            message = await receive()


def error_response(status: int, message: str, kind: str, param: str | None = None) -> Response:
    """An error in the shape that OpenAI's clients read."""
    return JSONResponse(error_body(status, message, kind, param), status_code=status)


async def on_bad_request(request: Request, error: Exception) -> Response:
    """Exception handler of the application."""
    assert isinstance(error, BadRequest)
    kind = "NotFoundError" if error.status == 404 else "BadRequestError"
    return error_response(error.status, str(error), kind, error.param)


def as_bound(endpoint: str) -> str:
    """In the engine's words a concrete host means a publisher that connects; ours binds."""
    return f"tcp://{_PUBLISHER_BINDS}:{endpoint.rpartition(':')[2]}"


async def _json_body(request: Request) -> dict[str, Any]:
    raw = await read_body(request, _MAX_BODY_BYTES)
    try:
        return msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadRequest("the body is not a JSON object") from error


def _embedding(value: str | list[Any]) -> list[float]:
    packed = json.dumps(value).encode("utf-8")
    return [byte / 127.5 - 1 for byte in hashlib.shake_128(packed).digest(_EMBEDDING_WIDTH)]
