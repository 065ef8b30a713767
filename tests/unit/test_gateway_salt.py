"""Nothing that could make a worker compute leaves without our salt, and none of the client's."""

from __future__ import annotations

import json
from typing import Any

import pytest
from picker_bench import BLOCK, W0, Bench, ids, namespace, request

from trunkline.gateway.contracts import ClientError, InferenceRequest, Pick, Route
from trunkline.gateway.counters import Counters
from trunkline.gateway.head import RequestHead
from trunkline.gateway.intake import Intake
from trunkline.gateway.routes import route_of

UNREAD = ["/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/new"]


def read(path: str, body: bytes, *, is_json: bool = True) -> InferenceRequest:
    intake = Intake(
        max_json_depth=64, strict_fields=False, max_model_len=4_096, counters=Counters()
    )
    route = route_of(path.encode())
    assert isinstance(route, Route)
    kind = b"application/json" if is_json else b"text/plain"
    head = RequestHead(
        method="POST", target=path.encode(), minor=1, headers={b"content-type": kind},
        content_length=len(body), is_chunked=False, keeps_alive=True,
    )  # fmt: skip
    return intake.request(head, route, body, "r")


def sent(asked: InferenceRequest) -> bytes:
    picked = Bench(W0).picker.pick(asked, frozenset())
    assert isinstance(picked, Pick)
    return picked.body


@pytest.mark.parametrize("path", UNREAD)
@pytest.mark.parametrize("theirs", ["cache_salt", "cache\\u005fsalt"])
def test_an_unread_endpoint_gets_our_salt_and_never_the_clients(path: str, theirs: str) -> None:
    body = f'{{"input":"x","{theirs}":"theirs","n":{{"m":[1]}}}}'.encode()
    arrived: dict[str, Any] = json.loads(sent(read(path, body)))
    assert arrived.pop("cache_salt") == namespace(BLOCK).salt
    assert arrived == {"input": "x", "n": {"m": [1]}}


@pytest.mark.parametrize("body", [b"{}", b' {"input":[]}', b"\r\n\t{ }"])
def test_an_object_is_salted_whatever_its_label_says(body: bytes) -> None:
    arrived = json.loads(sent(read("/v1/embeddings", body, is_json=False)))
    assert arrived == {**json.loads(body), "cache_salt": namespace(BLOCK).salt}


def test_an_object_under_another_label_is_read_as_strictly() -> None:
    with pytest.raises(ClientError) as caught:
        read("/v1/embeddings", b'{"a":{"cache_salt":"x"}}', is_json=False)
    assert caught.value.refusal.code == "forbidden_field"


@pytest.mark.parametrize("coding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32-be"])
def test_an_object_in_another_coding_is_refused_under_any_label(coding: str) -> None:
    for is_json in (True, False):
        with pytest.raises(ClientError) as caught:
            read("/v1/embeddings", ' {"cache_salt":"x"}'.encode(coding), is_json=is_json)
        assert caught.value.refusal.status == 400


@pytest.mark.parametrize("body", [b"", b"--boundary\r\n{}", b"\x00\xff", b"[1]"])
def test_what_is_no_object_goes_out_as_it_came(body: bytes) -> None:
    assert sent(read("/v1/audio/transcriptions", body, is_json=False)) == body


def test_each_block_size_has_a_salt_of_its_own() -> None:
    bench = Bench(W0)
    state = bench.fleet.get(W0)
    assert state is not None
    state.block_tokens = 2 * BLOCK
    picked = bench.picker.pick(read("/v1/embeddings", b"{}"), frozenset())
    assert isinstance(picked, Pick)
    assert json.loads(picked.body) == {"cache_salt": namespace(2 * BLOCK).salt}


def test_a_read_prompt_is_salted_whoever_made_its_request() -> None:
    assert b"cache_salt" in sent(request(ids(20)))
