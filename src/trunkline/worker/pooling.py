"""What the simulated engine answers beside generated text: embeddings, scores, what was heard.

Deterministic, and meaning nothing. Must never: look at the cache. Read `api.py` for the rest of the
surface.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from trunkline.worker.bodies import MAX_BODY_BYTES, json_body, read_body
from trunkline.worker.requests import BadRequest, Reader

_EMBEDDING_WIDTH = 64
_DOCUMENT_FIELDS = ("documents", "text_2", "data_2", "items")
_QUERY_FIELDS = ("query", "queries", "text_1", "data_1")


def pooling_routes(reader: Reader) -> list[Route]:
    surface, post = _Pooling(reader), ["POST"]
    scored = [Route(path, surface.score, methods=post) for path in ("/v1/score", "/score")]
    ranked = [Route(path, surface.rerank, methods=post) for path in ("/v1/rerank", "/rerank")]
    heard = [
        Route(f"/v1/audio/{name}", surface.hear, methods=post)
        for name in ("transcriptions", "translations")
    ]
    return [Route("/v1/embeddings", surface.embed, methods=post), *scored, *ranked, *heard]


@dataclass(frozen=True, slots=True)
class _Pooling:
    reader: Reader

    async def embed(self, request: Request) -> Response:
        body = await self._body(request)
        given = body.get("input") if "messages" not in body else [json.dumps(body["messages"])]
        inputs = _inputs(given)
        data = [
            {"object": "embedding", "index": index, "embedding": _embedding(one)}
            for index, one in enumerate(inputs)
        ]
        return self._told(data, inputs, "list")

    async def score(self, request: Request) -> Response:
        _, scores, inputs = self._scored(await self._body(request))
        data = [{"object": "score", "index": i, "score": one} for i, one in enumerate(scores)]
        return self._told(data, inputs, "list")

    async def rerank(self, request: Request) -> Response:
        body = await self._body(request)
        documents, scores, inputs = self._scored(body)
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        results = [
            {"index": i, "document": {"text": documents[i]}, "relevance_score": scores[i]}
            for i in order[: body.get("top_n") or len(order)]
        ]
        usage = {"total_tokens": sum(map(_size, inputs))}
        told = {"id": "rerank-1", "model": self.reader.model, "usage": usage, "results": results}
        return JSONResponse(told)

    async def hear(self, request: Request) -> Response:
        raw = await read_body(request, MAX_BODY_BYTES)
        if not request.headers.get("content-type", "").startswith("multipart/form-data"):
            raise BadRequest("a form is needed", "file")
        return JSONResponse({"text": hashlib.blake2b(raw, digest_size=8).hexdigest()})

    async def _body(self, request: Request) -> dict[str, Any]:
        body = await json_body(request)
        self.reader.check_model(body)
        return body

    def _scored(self, body: dict[str, Any]) -> tuple[list[Any], list[float], list[Any]]:
        documents = _inputs(_first(body, _DOCUMENT_FIELDS))
        query = _first(body, _QUERY_FIELDS)
        scores = [abs(_embedding([query, document])[0]) for document in documents]
        return documents, scores, [*_inputs(query), *documents]

    def _told(self, data: list[dict[str, Any]], inputs: list[Any], kind: str) -> Response:
        tokens = sum(map(_size, inputs))
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        told = {"object": kind, "model": self.reader.model, "data": data, "usage": usage}
        return JSONResponse(told)


def _first(body: dict[str, Any], names: tuple[str, ...]) -> Any:  # any JSON
    for name in names:
        if name in body:
            return body[name]
    raise BadRequest(f"{names[0]} is missing", names[0])


def _inputs(given: Any) -> list[Any]:  # any JSON
    """One input or many; token ids are one."""
    inputs = cast("list[Any]", given) if isinstance(given, list) else [given]
    if inputs and all(isinstance(one, int) for one in inputs):
        inputs = [inputs]
    if not inputs or not all(isinstance(one, str | list | dict) for one in inputs):
        raise BadRequest("input must be a text, token ids, or a list of either", "input")
    return inputs


def _size(one: Any) -> int:  # any JSON
    return len(cast("list[Any]", one)) if isinstance(one, list) else len(str(one)) // 4 + 1


def _embedding(value: Any) -> list[float]:  # any JSON
    packed = json.dumps(value).encode("utf-8")
    return [byte / 127.5 - 1 for byte in hashlib.shake_128(packed).digest(_EMBEDDING_WIDTH)]
