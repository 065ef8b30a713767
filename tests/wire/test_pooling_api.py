"""Embeddings, scores, tokens and sound through a real gateway: passed on as they came, under our
salt, spread by load.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fleet import MODEL, TINY, Gateway, Process, Processes, engine_script, url_of
from scripted import json_answer, until, wire, worker
from tenants import tenants

pytest_plugins = ["one_worker"]


INPUTS: list[Any] = ["a text", ["a", "b"], [1, 2, 3], [[1, 2], [3]], ["x" * 3_000]]


def test_c79_the_openai_client_embeds_every_documented_shape(gateway: Gateway) -> None:
    client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0)
    for given in INPUTS:
        reply = client.embeddings.create(model=MODEL, input=given, encoding_format="float")
        is_many = isinstance(given, list) and not isinstance(given[0], int)
        assert len(reply.data) == (len(given) if is_many else 1)
        assert reply.usage.prompt_tokens > 0


PART = {"type": "text", "text": "\u00e9\\u0041 \U0001f600"}
SHAPES = [
    ("/v1/embeddings", '"input":"a text"'), ("/v1/embeddings", '"input":[1,  2,3]'),
    ("/v1/embeddings", '"input":[[1],[2,3]]'), ("/v1/embeddings", '"input":["\\u00e9","b"]'),
    ("/v1/embeddings", '"input":[{"content":[{"type":"text","text":"x"}]}]'),
    ("/v1/embeddings", f'"messages":[{{"role":"user","content":[{json.dumps(PART)}]}}]'),
    ("/v1/embeddings", '"input":"x","dimensions":8,"encoding_format":"base64","user":"u"'),
    ("/v1/rerank", '"query":"q","documents":["a","b"],"top_n":1'),
    ("/rerank", '"query":"q","documents":[{"text":"a"}]'),
    ("/v1/score", '"text_1":"q","text_2":["a","b"]'), ("/score", '"queries":"q","documents":"a"'),
]  # fmt: skip


def test_c44_c79_bodies_arrive_byte_for_byte_behind_our_salt(started: Processes) -> None:
    @wire
    async def scenario() -> None:
        seen: list[bytes] = []

        async def answer(path: str, headers: dict[str, str], body: bytes) -> bytes:
            seen.append(body)
            return json_answer(b'{"data":[]}')

        async with worker(engine_script(answer)) as w:
            gateway = await asyncio.to_thread(started.gateway, [url_of(w)])
            headers = {"content-type": "application/json"}
            async with httpx.AsyncClient(base_url=gateway.url, headers=headers) as client:
                for path, inside in SHAPES:
                    reply = await client.post(path, content=f"{{{inside}}}".encode())
                    assert reply.status_code == 200, reply.text
                knobs = '"input":"x","request_id":"r","priority":-9,"prompt_cache_key":"k"'
                await client.post("/v1/embeddings", content=f"{{{knobs}}}".encode())
        for (_, inside), body in zip(SHAPES, seen, strict=False):
            salt, _, rest = body.partition(b",")
            assert len(json.loads(salt + b"}")["cache_salt"]) == 43
            assert rest == inside.encode() + b"}"
        assert set(json.loads(seen[-1])) == {"cache_salt", "input"}

    scenario()


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/v1/score", "/tokenize"])
@pytest.mark.parametrize("name", ["cache_salt", "kv_transfer_params", "mm_hashes", "user_config"])
def test_no_nesting_hides_what_no_client_may_set(gateway: Gateway, path: str, name: str) -> None:
    body = {"input": "x", "prompt": "x", "query": "x", "documents": [{"a": [{name: "mine"}]}]}
    reply = gateway.client.post(path, json=body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "forbidden_field")


def test_scores_and_ranks_come_back(gateway: Gateway) -> None:
    asked = {"query": "q", "documents": ["a", "b", "c"], "top_n": 2}
    ranked = gateway.client.post("/v1/rerank", json=asked).json()["results"]
    assert len(ranked) == 2
    assert gateway.client.post("/rerank", json=asked).json()["results"] == ranked
    scored = gateway.client.post("/v1/score", json={"text_1": "q", "text_2": ["a", "b"]})
    assert len(scored.json()["data"]) == 2


def test_tokens_are_told_and_nothing_is_kept(gateway: Gateway, simulated: Process) -> None:
    text = " ".join(f"word{number}" for number in range(60))
    told = gateway.client.post("/tokenize", json={"prompt": text}).json()
    back = gateway.client.post("/detokenize", json={"tokens": told["tokens"]}).json()
    assert text in back["prompt"]
    first = gateway.complete(told["tokens"])
    assert (first.prompt_tokens, first.cached) == (told["count"], 0), "telling filled no cache"


def test_a_form_with_sound_goes_through_byte_for_byte(gateway: Gateway, simulated: Process) -> None:
    files = {"file": ("a.wav", b"RIFF\x00\xff\r\n{}" * 100, "audio/wav")}
    request = httpx.Request(
        "POST", f"{gateway.url}/v1/audio/transcriptions", files=files, data={"model": MODEL}
    )
    raw, kind = request.read(), {"content-type": request.headers["content-type"]}
    through = gateway.client.post("/v1/audio/transcriptions", content=raw, headers=kind)
    direct = httpx.post(f"{simulated.url}/v1/audio/transcriptions", content=raw, headers=kind)
    assert through.status_code == 200
    assert through.content == direct.content
    other = raw.replace(MODEL.encode(), b"no-such-model")
    unknown = gateway.client.post("/v1/audio/transcriptions", content=other, headers=kind)
    assert unknown.status_code == 404, "the model that the form names is not served"


def test_tenants_get_what_can_bear_a_salt_and_no_forms(
    started: Processes, simulated: Process, tmp_path: Path
) -> None:
    fleet = tenants(started, [simulated.url], tmp_path, *TINY)
    post, headers = fleet.gateway.client.post, fleet.caller("alice").headers()
    assert post("/v1/embeddings", json={"input": "x"}, headers=headers).status_code == 200
    asked = {"query": "q", "documents": ["a"]}
    assert post("/v1/rerank", json=asked, headers=headers).status_code == 200
    assert post("/tokenize", json={"prompt": "x"}, headers=headers).status_code == 200
    refused = post("/v1/audio/transcriptions", files={"file": b"x"}, headers=headers)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "unsalted_path")
    for path in ("/tokenize", "/v1/embeddings", "/rerank", "/v1/audio/transcriptions"):
        assert post(path, json={}).status_code == 401


def test_c02_embeddings_are_spread_over_the_fleet_by_what_they_cost(started: Processes) -> None:
    @wire
    async def scenario() -> None:
        async def slow(path: str, headers: dict[str, str], body: bytes) -> bytes:
            await release.wait()
            return json_answer(b'{"data":[]}')

        release = asyncio.Event()
        async with worker(engine_script(slow)) as one, worker(engine_script(slow)) as two:
            urls = [url_of(one), url_of(two)]
            gateway = await asyncio.to_thread(started.gateway, urls)
            async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
                body = {"input": ["same text " * 400] * 4}
                asked = [
                    asyncio.create_task(client.post("/v1/embeddings", json=body)) for _ in range(20)
                ]

                def counts() -> list[int]:
                    return [sum("POST" in seen[0] for seen in w.seen) for w in (one, two)]

                await until(lambda: sum(counts()) == 20)
                assert min(counts()) >= 8, "their cost is in the books"
                release.set()
                assert {reply.status_code for reply in await asyncio.gather(*asked)} == {200}

    scenario()
