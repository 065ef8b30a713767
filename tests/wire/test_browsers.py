"""Web pages that use the API from a browser, and headers that ids of requests are in."""

from __future__ import annotations

import pytest
from scripted import (
    CHAT,
    FixedPicker,
    Reply,
    answering,
    get,
    json_answer,
    post,
    running,
    wire,
    worker,
)

from trunkline.config import LimitsConfig, ListenConfig

APP, OTHER = "https://app.example", "https://evil.example"
ALLOW = "access-control-allow-origin"
OPEN = ListenConfig(cors_allowed_origins=(APP, "http://localhost:3000"))
PATH = "/v1/chat/completions"
ASKING = (
    "access-control-request-method: POST\r\n"
    "access-control-request-headers: authorization, content-type, x-stainless-os\r\n"
)


def preflight(origin: str, asking: str = ASKING, path: str = PATH) -> bytes:
    return get(path, f"origin: {origin}\r\n{asking}", method="OPTIONS")


async def through(listen: ListenConfig, *raw: bytes) -> list[Reply]:
    async with (
        worker(answering(json_answer(extra=f"{ALLOW}: engine\r\n"))) as w,
        running(FixedPicker(w), listen=listen, limits=LimitsConfig(max_header_bytes=4_096)) as g,
    ):
        return [await g.ask(one) for one in raw]


@wire
async def test_a_page_that_is_named_may_ask_and_read_answers_and_errors() -> None:
    origin = f"origin: {APP}\r\n"
    asked, answer, error, models, missing = await through(
        OPEN,
        preflight(APP),
        post(extra=origin),
        post({**CHAT, "messages": 5}, extra=origin),
        get("/v1/models", origin),
        get("/nothing", origin),
    )
    assert (asked.status, asked.headers[ALLOW]) == (200, APP)
    assert asked.headers["access-control-allow-headers"].endswith("x-stainless-os")
    assert asked.headers["access-control-allow-methods"] == "GET, POST"
    for reply in (error, models, missing):
        assert reply.headers[ALLOW] == APP
        assert "x-request-id" in reply.headers["access-control-expose-headers"]
        assert reply.headers["vary"] == "origin"
    assert (answer.status, error.status, models.status, missing.status) == (200, 400, 200, 404)
    assert [value for name, value in answer.fields if name == ALLOW][-1] == APP
    assert "access-control-allow-credentials" not in answer.headers


@wire
async def test_no_other_page_may_and_without_pages_nothing_is_said_of_them() -> None:
    asked, answer = await through(OPEN, preflight(OTHER), post(extra=f"origin: {OTHER}\r\n"))
    assert (asked.status, asked.headers.get(ALLOW)) == (405, None)
    assert answer.status == 200, "whether a browser shows it to the page is the browser's matter"
    assert APP not in str(answer.headers)
    asked, answer = await through(ListenConfig(), preflight(APP), post(extra=f"origin: {APP}\r\n"))
    assert asked.status == 405
    assert "vary" not in answer.headers


@wire
async def test_any_page_may_where_the_operator_says_so() -> None:
    listen = ListenConfig(cors_allowed_origins=("*",))
    asked, error, plain = await through(
        listen, preflight(OTHER), post(b"{", extra=f"origin: {OTHER}\r\n"), post(b"{")
    )
    assert (asked.headers[ALLOW], error.headers[ALLOW]) == ("*", "*")
    assert ALLOW not in plain.headers


@wire
async def test_what_a_page_wrote_is_echoed_only_where_it_is_a_list_of_names() -> None:
    odd = "access-control-request-method: POST\r\naccess-control-request-headers: {}\r\n"
    for text in ("a;b", "a b", "<script>", "x," * 600, "a: b"):
        (asked,) = await through(OPEN, preflight(APP, odd.format(text)))
        assert asked.headers["access-control-allow-headers"] == "authorization, content-type"
    plain, elsewhere = await through(OPEN, preflight(APP, ""), preflight(APP, path="/metrics"))
    assert (plain.status, elsewhere.status) == (405, 404)


@pytest.mark.parametrize(
    ("headers", "shown"),
    [
        ("x-request-id: first\r\nx-trace-id: second\r\n", "second"),
        ("x-request-id: first\r\n", "first"),
        ("x-correlation-id: third\r\n", None),
        ("x-trace-id: no good name\r\nx-request-id: first\r\n", None),
        ("", None),
    ],
)
def test_an_id_is_in_the_first_header_that_is_there_and_a_bad_one_is_replaced(
    headers: str, shown: str | None
) -> None:
    listen = ListenConfig(request_id_headers=("x-trace-id", "x-request-id"))

    @wire
    async def scenario() -> None:
        answer, error = await through(listen, post(extra=headers), post(b"{", extra=headers))
        for reply in (answer, error):
            name = reply.headers["x-request-id"]
            assert name == shown if shown else len(name) == 32

    scenario()
