"""The HTTP surface of the simulated engine: vLLM's paths, shapes and errors.

Must never: touch the cache but through `engine.py`. Read `requests.py` for what is accepted and
`answers.py` for what goes back.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from trunkline.ports.clock import Clock
from trunkline.ports.publisher import EventPublisher
from trunkline.ports.tokenizer import Tokenizer
from trunkline.worker.answers import Answer
from trunkline.worker.batches import BatchAnswer, part_of, terms_of_another
from trunkline.worker.blocks import STOCK, Terms
from trunkline.worker.bodies import json_body
from trunkline.worker.engine import Engine
from trunkline.worker.faults import Faults
from trunkline.worker.jobs import Job, QueueFull
from trunkline.worker.labels import LabelBook
from trunkline.worker.messages import MessagesVoice, chat_body
from trunkline.worker.messages import error_body as messages_error
from trunkline.worker.metrics import Metrics
from trunkline.worker.orders import HEADER as PULL_HEADER
from trunkline.worker.orders import order_from
from trunkline.worker.pooling import pooling_routes
from trunkline.worker.pulls import PullCall
from trunkline.worker.requests import BadRequest, Generation, Reader
from trunkline.worker.responses import ResponseStore, ResponsesVoice, asked_of
from trunkline.worker.storage import Storage
from trunkline.worker.ticket import HEADER, bad_header, ticket_from
from trunkline.worker.voices import OpenAiVoice, Said, Voice, error_body

VERSION = "0.32.0+trunkline"
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
    store: ResponseStore = field(default_factory=ResponseStore)
    _served: int = 0
    _pieces: dict[int, str] = field(default_factory=dict[int, str])
    """Text of single tokens, at most one entry for each id of the vocabulary."""

    def routes(self) -> list[Route]:
        post = ["POST"]
        return [
            Route("/v1/chat/completions", self.chat, methods=post),
            Route("/v1/completions", self.completion, methods=post),
            Route("/v1/messages", self.messages, methods=post),
            Route("/v1/messages/count_tokens", self.count_tokens, methods=post),
            Route("/v1/responses", self.responses, methods=post),
            *pooling_routes(self.reader),
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
        return await self._answer(request, await json_body(request))

    async def completion(self, request: Request) -> Response | Answer | BatchAnswer | Hanging:
        body = await json_body(request)
        if (refused := self._refused()) is not None:
            return refused
        batch = self.reader.batch(body)
        if len(batch) == 1:
            return self._submitted(request, batch[0])
        parts: list[Answer] = []
        rank, first = self._rank_for(request), True
        for generation in batch:
            part = self._submitted(request, part_of(generation), rank=rank, is_first=first)
            if not isinstance(part, Answer):
                for begun in parts:
                    begun.engine.abort(begun.job)
                return part
            parts.append(part)
            first = False
        return BatchAnswer(parts=parts, includes_usage=batch[0].includes_usage)

    async def messages(self, request: Request) -> Response | Answer | Hanging:
        body = chat_body(await json_body(request), self.reader.template)
        return await self._answer(request, body, voice_of=MessagesVoice)

    async def responses(self, request: Request) -> Response | Answer | Hanging:
        asked = asked_of(await json_body(request), self.store)
        voice_of = partial(ResponsesVoice, asked=asked, store=self.store)
        return await self._answer(request, asked.chat, voice_of=voice_of, name=asked.name)

    async def count_tokens(self, request: Request) -> Response:
        body = chat_body(await json_body(request), self.reader.template, is_count=True)
        self.reader.check_model(body)
        count = len(self.reader.chat_prompt(body))
        original = {"original_input_tokens": count}
        return JSONResponse({"input_tokens": count, "context_management": original})

    async def health(self, request: Request) -> Response:
        return Response(status_code=200)

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": self.faults.told_version or VERSION})

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
        body = await json_body(request)
        self.reader.check_model(body)
        is_chat = "messages" in body
        read = self.reader.chat_prompt if is_chat else self.reader.completion_prompt
        ids = read(body).tolist()
        limit = self.reader.context_tokens
        return JSONResponse({"count": len(ids), "max_model_len": limit, "tokens": ids})

    async def detokenize(self, request: Request) -> Response:
        body = await json_body(request)
        ids = body.get("tokens")
        if not isinstance(ids, list):
            raise BadRequest("tokens must be a list of token ids", "tokens")
        packed = self.reader.token_ids(cast("list[Any]", ids), "tokens")
        return JSONResponse({"prompt": self.tokenizer.decode(packed)})

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
                "replay_endpoint": None
                if self.faults.has_no_replay
                else rank.publisher.replay_endpoint,
                "buffer_steps": rank.publisher.buffer_batches,
                "hwm": 100_000,
                "max_queue_size": 100_000,
                "topic": rank.publisher.topic,
            }
            for index, rank in enumerate(self.ranks)
            if rank.publisher is not None
        }
        return JSONResponse(sources)

    async def _answer(
        self,
        request: Request,
        body: dict[str, Any],
        *,
        voice_of: Callable[[Said], Voice] = OpenAiVoice,
        name: str = "",
    ) -> Response | Answer | Hanging:
        if (refused := self._refused()) is not None:
            return refused
        generation = self.reader.generation(body, is_chat=True)
        answer = self._submitted(request, generation)
        if not isinstance(answer, Answer):
            return answer
        return replace(answer, voice_of=voice_of, id=name or answer.id)

    def _refused(self) -> Response | Hanging | None:
        if self.faults.is_unavailable:
            return error_response(503, "the worker was told to fail", "ServiceUnavailableError")
        return Hanging() if self.faults.is_hanging else None

    def _submitted(
        self,
        request: Request,
        generation: Generation,
        *,
        rank: Rank | None = None,
        is_first: bool = True,
    ) -> Response | Answer:
        """The answer to one prompt, which is computed from now on. What stands beside the body of
        a batch, but for whose it is, is about its first prompt.
        """
        terms, call = STOCK, None
        if self.takes_tickets:
            terms = self._terms(request, generation, is_first)
            call = self._call(request, terms) if is_first else None
        if self.faults.is_ignoring_salt:
            generation, terms, call = replace(generation, salt=None, regions=()), STOCK, None
        if self.faults.has_no_prefix_cache:
            terms = replace(terms, reuses=False)
        rank = rank or self._rank_for(request)
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
        kind = "chatcmpl" if generation.is_chat else "cmpl"

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

    def _terms(self, request: Request, generation: Generation, is_first: bool) -> Terms:
        ticket = ticket_from(request.headers.raw)
        if not is_first:
            return terms_of_another(Terms(ticket=ticket))
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
    if request.url.path.startswith("/v1/messages"):
        told = messages_error(kind, str(error))
        return Response(told, status_code=error.status, media_type="application/json")
    return error_response(error.status, str(error), kind, error.param)


def as_bound(endpoint: str) -> str:
    """In the engine's words a concrete host means a publisher that connects; ours binds."""
    return f"tcp://{_PUBLISHER_BINDS}:{endpoint.rpartition(':')[2]}"
