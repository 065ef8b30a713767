"""Keys, models, request ids and the answers that the gateway gives itself; no secret in a log."""

from __future__ import annotations

import logging

from scripted import (
    CHAT,
    FixedPicker,
    answering,
    get,
    json_answer,
    post,
    running,
    wire,
    worker,
)

from trunkline.gateway.authenticate import StaticKey
from trunkline.gateway.contracts import EVERYBODY
from trunkline.gateway.front import Readiness
from trunkline.gateway.tenancy import Tenancy


def under_key(api_key: str) -> Tenancy:
    return Tenancy(
        authenticate=StaticKey(api_key, EVERYBODY).principal,
        has_lease=lambda: True,
        session_key=bytes(32),
        draw=bytes,
    )


@wire
async def test_keys_are_asked_for_on_the_api_and_nowhere_else() -> None:
    tenancy = under_key("sk-right")
    wrong = ["", "Bearer", "bearer", "Bearer ", "Bearer sk-wrong", "Basic sk-right", "sk-right",
             "Bearer sk-right ' OR 1=1", "Bearer %s%n", "Bearer sk-righ", "Bearer sk-rightx",
             "Bearer \xff"]  # fmt: skip
    async with (
        worker(answering(json_answer())) as w,
        running(FixedPicker(w), tenancy=tenancy) as gateway,
    ):
        shapes: set[tuple[str, ...]] = set()
        for key in wrong:
            extra = f"authorization: {key}\r\n" if key else ""
            for raw in (post(extra=extra), get("/v1/models", extra), get("/v1/files", extra)):
                reply = await gateway.ask(raw)
                assert reply.status == 401
                assert reply.headers["www-authenticate"] == "Bearer"
                error = {**reply.error, "request_id": ""}
                assert ("none was sent" in error["message"]) == (not key)
                if key:
                    shapes.add(tuple(sorted(map(str, error.items()))))
        assert len(shapes) == 1
        for name in ("bearer", "BEARER", "Bearer "):
            loose = f"authorization: {name} sk-right \t\r\n"
            assert (await gateway.ask(post(extra=loose))).status == 200
        right = "authorization: Bearer sk-right\r\n"
        assert (await gateway.ask(post(extra=right))).status == 200
        assert (await gateway.ask(get("/v1/models", right))).status == 200
        assert (await gateway.ask(get("/health"))).status == 200
        assert (await gateway.ask(get("/nothing"))).status == 404


@wire
async def test_a_model_that_no_worker_serves_is_not_found_in_the_shape_of_the_api() -> None:
    served: set[str] = set()
    async with (
        worker(answering(json_answer())) as w,
        running(FixedPicker(w), knows_model=lambda name: not served or name in served) as gateway,
    ):
        assert (await gateway.ask(post({**CHAT, "model": "other"}))).status == 200  # unknown yet
        served.add("m")
        for path in ("/v1/chat/completions", "/v1/embeddings"):
            assert (await gateway.ask(post(path=path))).status == 200
            reply = await gateway.ask(post({**CHAT, "model": "x" * 200}, path=path))
            assert reply.status == 404
            assert (reply.error["code"], reply.error["param"]) == ("model_not_found", "model")
            assert "x" * 50 in reply.error["message"]
            assert "x" * 65 not in reply.error["message"]
        nameless = {"messages": CHAT["messages"]}
        assert (await gateway.ask(post(nameless))).status == 200
        assert gateway.front.counters.refusals == {"model_not_found": 2}


@wire
async def test_one_model_is_told_to_those_to_whom_it_is_listed() -> None:
    rows = [{"id": "m"}, {"id": "org/m"}]
    async with running(FixedPicker(), models=lambda _who: rows) as gateway:
        for path in ("/v1/models/m", "/v1/models/org/m", "/v1/models/org%2Fm"):
            reply = await gateway.ask(get(path))
            assert (reply.status, reply.json) == (200, rows[path != "/v1/models/m"])
        for name in ("other", "x" * 200, "m/"):
            reply = await gateway.ask(get(f"/v1/models/{name}"))
            assert (reply.status, reply.error["code"]) == (404, "model_not_found")
            assert "x" * 65 not in reply.error["message"]
        refused = await gateway.ask(post(path="/v1/models/m"))
        assert (refused.status, refused.headers["allow"]) == (405, "GET, HEAD")
        assert gateway.front.counters.refusals == {"model_not_found": 3, "method_not_allowed": 1}


@wire
async def test_the_slip_of_a_base_url_is_named_and_admin_paths_look_like_any_other() -> None:
    async with running(FixedPicker()) as gateway:
        reply = await gateway.ask(post(path="/chat/completions"))
        assert reply.error["message"].endswith("did you mean /v1/chat/completions?")
        reply = await gateway.ask(post(path="/v1/v1/messages"))
        assert (reply.status, reply.error["code"]) == (404, "not_found")
        assert reply.error["message"].endswith("did you mean /v1/messages?")
        shapes: set[tuple[str, ...]] = set()
        for path in ("/workers", "/metrics", "/nothing", "/keys"):
            reply = await gateway.ask(get(path))
            error = {**reply.error, "request_id": ""}
            shapes.add(tuple(str(value).replace(path, "") for value in error.values()))
        assert len(shapes) == 1


@wire
async def test_the_local_answers() -> None:
    ready = [False]
    async with running(
        FixedPicker(), readiness=lambda: Readiness(is_ready=ready[0], is_reuse_on=True)
    ) as gateway:
        for path in ("/health", "/liveness", "/live", "/healthz"):
            assert (await gateway.ask(get(path))).status == 200
        assert (await gateway.ask(get("/readiness"))).status == 503
        ready[0] = True
        assert (await gateway.ask(get("/readyz"))).json["reuse"] == "on"
        assert (await gateway.ask(get("/version"))).json == {"version": "0.0.0-test"}
        assert (await gateway.ask(get("/v1/models"))).json["object"] == "list"
        client = await gateway.client()
        await client.send(get("/health", method="HEAD") + get("/health"))
        head = await client.reply(has_body=False)
        assert (head.status, head.headers["content-length"]) == (200, "15")
        assert (await client.reply()).body == b'{"status":"ok"}'
        client.close()


@wire
async def test_an_empty_pool_is_503_with_a_time_to_come_back() -> None:
    async with running(FixedPicker()) as gateway:
        reply = await gateway.ask(post())
        assert (reply.status, reply.error["code"]) == (503, "no_worker")
        assert "retry-after" in reply.headers


@wire
async def test_request_ids_are_kept_where_they_are_sound_and_replaced_where_not() -> None:
    async with worker(answering(json_answer())) as w, running(FixedPicker(w)) as gateway:
        kept = await gateway.ask(post(extra="x-request-id: a-B_1.2:3\r\n"))
        assert kept.headers["x-request-id"] == "a-B_1.2:3"
        kept = await gateway.ask(post(extra="x-request-id:  a-B \t \r\n"))
        assert kept.headers["x-request-id"] == "a-B"
        for bad in ("x" * 65, "a b", "\xff\xfe", "a\tb", '"><script>'):
            reply = await gateway.ask(post(extra=f"x-request-id: {bad}\r\n"))
            assert len(reply.headers["x-request-id"]) == 32
            record = gateway.log[-1]
            assert record.client_request_id
            assert len(record.client_request_id) <= 64
            assert record.client_request_id.isascii()
            assert record.client_request_id.isprintable()


@wire
async def test_c98_secrets_and_prompts_reach_no_log_and_no_counter() -> None:
    """C98."""
    records: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(self.format(record))

    handler = Keep(level=logging.DEBUG)
    root = logging.getLogger()
    before = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        tenancy = under_key("sk-MARKED")
        async with (
            worker(answering(json_answer())) as w,
            running(FixedPicker(w), tenancy=tenancy) as gateway,
        ):
            body = {**CHAT, "messages": [{"role": "user", "content": "MARKED prompt"}]}
            for raw in (
                post(body, extra="authorization: Bearer sk-MARKED\r\n"),
                post(body, extra="authorization: Bearer sk-MARKED-wrong\r\n"),
                post(b'{"MARKED', extra="authorization: Bearer sk-MARKED\r\n"),
                post(body, path="/v1/chat/completions?key=MARKED",
                     extra="authorization: Bearer sk-MARKED\r\n"),
                get("/v1/models", "cookie: MARKED\r\nauthorization: Bearer sk-MARKED\r\n"),
            ):  # fmt: skip
                await gateway.ask(raw)
            seen = repr((records, gateway.log, gateway.front.counters, gateway.picker.requests))
    finally:
        root.removeHandler(handler)
        root.setLevel(before)
    kept = seen.replace("path='/v1/chat/completions?key=MARKED'", "")  # the request itself
    assert "MARKED" not in kept
    assert len(gateway.log) == 5
