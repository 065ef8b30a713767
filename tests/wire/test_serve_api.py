"""A real gateway before real (simulated) workers, as clients, operators and attackers meet it."""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fleet import (
    KEY,
    MODEL,
    STOP_S,
    TINY,
    WAIT_S,
    Gateway,
    Process,
    Processes,
    at_once,
    engine_script,
    free_port,
    text_of,
    until,
    url_of,
    user,
)
from scripted import json_answer, wire, worker

from trunkline.native import IMPLEMENTATION

pytest_plugins = ["one_worker"]


@pytest.fixture
def client(locked: Gateway) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{locked.url}/v1", api_key=KEY, max_retries=0)


# -- the openai package ----------------------------------------------------------------------------


def test_the_openai_client_chats(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hello"}], max_tokens=5
    )
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].message.content
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 5


def test_the_openai_client_completes_a_batch_as_each_prompt_alone(client: openai.OpenAI) -> None:
    prompts = [text_of(60, "batch"), text_of(50, "other")]
    both = client.completions.create(model=MODEL, prompt=prompts, max_tokens=6)
    alone = [client.completions.create(model=MODEL, prompt=one, max_tokens=6) for one in prompts]
    assert [choice.index for choice in both.choices] == [0, 1]
    assert [choice.text for choice in both.choices] == [one.choices[0].text for one in alone]
    assert both.usage is not None
    assert both.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in alone if one.usage)
    streamed = {0: "", 1: ""}
    chunks = client.completions.create(model=MODEL, prompt=prompts, max_tokens=6, stream=True)
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        streamed[choice.index] += choice.text
    assert list(streamed.values()) == [choice.text for choice in both.choices]


def test_a_picture_is_a_part_of_the_prompt_that_caches_know_by_its_data(
    client: openai.OpenAI,
) -> None:
    def asked(data: str, question: str) -> tuple[int, int]:
        picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
        parts: Any = [{"type": "text", "text": text_of(60, "pictures")}, picture]
        parts.append({"type": "text", "text": question})
        messages: Any = [{"role": "user", "content": parts}]
        used = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=2).usage
        assert used is not None
        assert used.prompt_tokens_details is not None
        return used.prompt_tokens, used.prompt_tokens_details.cached_tokens or 0

    question = text_of(60, "what is it")
    asked("AAAA", question)
    tokens, same = asked("AAAA", question)
    _, other = asked("AAAB", question)
    assert same > tokens - 32, "all but what ends in the middle of a block"
    assert 64 < other < same - 64, "the text before it, and nothing behind it"


def test_the_openai_client_streams_what_it_gets_whole(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": text_of(40, "stream")}]
    whole = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=20)
    pieces: list[str] = []
    used = 0
    for chunk in client.chat.completions.create(
        model=MODEL,
        messages=messages,
        max_tokens=20,
        stream=True,
        stream_options={"include_usage": True},
    ):
        pieces += [choice.delta.content or "" for choice in chunk.choices]
        used = chunk.usage.completion_tokens if chunk.usage else used
    assert "".join(pieces) == whole.choices[0].message.content
    assert used == 20


def test_the_openai_client_completes_texts_and_token_ids(client: openai.OpenAI) -> None:
    for prompt in ("once upon a time", [11, 12, 13, 14]):
        reply = client.completions.create(model=MODEL, prompt=prompt, max_tokens=3)
        assert reply.choices[0].text


def test_the_openai_client_lists_the_models_of_the_workers(client: openai.OpenAI) -> None:
    listed = list(client.models.list())
    assert [model.id for model in listed] == [MODEL]
    assert client.models.retrieve(MODEL) == listed[0]
    with pytest.raises(openai.NotFoundError) as unknown:
        client.models.retrieve("org/other")
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")


def test_the_openai_client_without_the_v1_of_its_base_is_told_so(locked: Gateway) -> None:
    short = openai.OpenAI(base_url=locked.url, api_key="x", max_retries=0)
    with pytest.raises(openai.NotFoundError, match="did you mean /v1/models"):
        short.models.list()


def test_the_openai_client_gets_an_embedding_through_a_path_we_do_not_read(
    client: openai.OpenAI,
) -> None:
    reply = client.embeddings.create(model=MODEL, input="a text", encoding_format="float")
    assert len(reply.data[0].embedding) == 64


@pytest.mark.parametrize(
    ("error", "field"),
    [
        (openai.BadRequestError, {"temperature": 99}),
        (openai.BadRequestError, {"max_tokens": 200_000}),
        (openai.BadRequestError, {"messages": []}),
        (openai.NotFoundError, {"model": "no-such-model"}),
    ],
    ids=["ours", "ours-length", "ours-messages", "the-workers"],
)
def test_the_openai_client_raises_the_error_that_it_is(
    client: openai.OpenAI, error: type[openai.APIStatusError], field: dict[str, Any]
) -> None:
    asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **field}
    with pytest.raises(error) as caught:
        client.chat.completions.create(**asked)
    assert caught.value.message


def test_the_openai_client_with_a_wrong_key_is_told_so(locked: Gateway) -> None:
    stranger = openai.OpenAI(base_url=f"{locked.url}/v1", api_key="sk-other", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    assert locked.metric("auth_refusals_total", reason="wrong") >= 1


def test_c96_the_openai_client_hears_of_an_empty_fleet_as_unavailable(started: Processes) -> None:
    empty = started.gateway([], ready=0)
    nobody = openai.OpenAI(base_url=f"{empty.url}/v1", api_key="x", max_retries=0)
    with pytest.raises(openai.InternalServerError) as caught:
        nobody.completions.create(model=MODEL, prompt="hi")
    assert caught.value.status_code == 503
    ready = empty.client.get("/readiness")
    assert (ready.status_code, ready.json()["status"]) == (503, "no_workers")
    assert empty.client.get("/liveness").status_code == 200


# -- isolation -------------------------------------------------------------------------------------


def test_gateways_with_other_root_keys_share_nothing_on_one_worker(
    started: Processes, simulated: Process, gateway: Gateway
) -> None:
    other = started.gateway([simulated.url], *TINY)
    prompt = text_of(200, "root keys")
    gateway.chat(prompt)
    assert gateway.chat(prompt).cached > 0
    foreign = other.chat(prompt)
    assert (foreign.predicted, foreign.cached) == (0, 0)
    assert other.chat(prompt).cached > 0


def test_gateways_with_the_same_root_key_share_and_the_second_learns_from_events(
    started: Processes, simulated: Process, tmp_path: Path
) -> None:
    key_file = tmp_path / "root.key"
    key_file.write_text(secrets.token_hex(32))
    key_file.chmod(0o600)
    one, two = (
        started.gateway([simulated.url], *TINY, "--root-key-file", str(key_file)) for _ in "12"
    )
    prompt = text_of(200, "shared root key")
    held = two.rank(simulated)["held_blocks"]
    first = one.chat(prompt, max_tokens=1)
    blocks = (first.prompt_tokens - 1) // 16
    two.wait_held(simulated, held + blocks)
    shared = two.chat(prompt)
    assert shared.predicted == shared.cached == blocks * 16
    late = started.gateway([simulated.url], *TINY, "--root-key-file", str(key_file))
    again = late.chat(prompt)
    assert again.predicted == again.cached == blocks * 16, "the past is learnt from the replay"


CLIENT_WORDS = {"cache_salt": "mine", "kv_transfer_params": {"do_remote_prefill": True}}
ESCAPED = rb'{"prompt":"hi","max_tokens":2,"cache\u005fsalt":"mine","\u006bv_transfer_params":{}}'


def test_salts_and_tenants_that_a_client_writes_never_reach_a_worker(started: Processes) -> None:
    @wire
    async def scenario() -> None:
        seen: list[tuple[dict[str, str], Any]] = []

        async def answer(path: str, headers: dict[str, str], body: bytes) -> bytes:
            seen.append((headers, json.loads(body)))
            return json_answer(b'{"usage":{}}')

        async with worker(engine_script(answer)) as w:
            gateway = await asyncio.to_thread(started.gateway, [url_of(w)])
            async with httpx.AsyncClient(base_url=gateway.url) as client:
                forged = {"x-tenant-id": "other", "x-data-parallel-rank": "7", "cache-salt": "m"}
                chat, text = user("hi", **CLIENT_WORDS), {"prompt": "hi", **CLIENT_WORDS}
                for path, body in (("chat/completions", chat), ("completions", text)):
                    reply = await client.post(f"/v1/{path}", json=body, headers=forged)
                    assert reply.status_code == 200
                escaped = {"content-type": "application/json"}
                reply = await client.post("/v1/completions", content=ESCAPED, headers=escaped)
                assert reply.status_code == 200
                other = {"input": "hi", "model": "m", **CLIENT_WORDS}
                reply = await client.post("/v1/embeddings", json=other, headers=forged)
                assert reply.status_code == 200
                nested = user("hi", metadata={"cache_salt": "mine"})
                reply = await client.post("/v1/chat/completions", json=nested)
                assert reply.status_code == 400
        assert len(seen) == 4
        salts = {body.pop("cache_salt") for _, body in seen}
        assert len(salts) == 1
        assert len(salts.pop()) == 43, "ours"
        for headers, body in seen:
            assert "kv_transfer_params" not in body
            assert not {"x-tenant-id", "x-data-parallel-rank", "cache-salt"} & headers.keys()

    scenario()


# -- bad requests, long requests -------------------------------------------------------------------


def test_c84_a_hundred_oversize_prompts_are_refused_and_no_breaker_opens(
    started: Processes,
) -> None:
    small = started.worker(*TINY, "--max-model-len", "256")
    gateway = started.gateway([small.url], *TINY, "--max-model-len", "1024")
    beyond_worker = [user(text_of(60, number), max_tokens=200) for number in range(50)]
    beyond_gateway = [user(text_of(900, number)) for number in range(50)]
    answers = asyncio.run(at_once(gateway, [*beyond_worker, *beyond_gateway]))
    assert [answer.status for answer in answers] == [400] * 100
    assert {answer.error["code"] for answer in answers[:50]} == {400}, "the worker's own words"
    assert {answer.error["code"] for answer in answers[50:]} == {"context_length_exceeded"}
    row = gateway.worker(small)
    assert (row["breaker"], row["state"]) == ("closed", "ready")
    assert gateway.rank(small)["predicted_blocks"] == 0, "nothing is expected of the refused"
    assert gateway.chat("hi").status == 200
    assert gateway.metric("worker_cb_state") == 0


POLL = """
import http.client, select, sys, time
client = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]))
answered_count = 0
print("begun", flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    client.request("GET", "/health")
    assert client.getresponse().read()
    answered_count += 1
    time.sleep(0.005)
print(answered_count)
"""


@pytest.mark.slow
@pytest.mark.skipif(IMPLEMENTATION == "pure", reason="the Python twins need 40 ms a long prompt")
def test_c105_long_prompts_do_not_hold_up_short_answers(gateway: Gateway) -> None:
    """16 prompts of 100k tokens as text, while another process polls /health. `benchmarks/stall.py`
    has the bar in ms.
    """
    bodies = [{"prompt": text_of(39_000, ("c105", n)), "max_tokens": 1} for n in range(16)]
    words = [sys.executable, "-c", POLL, gateway.url.rpartition(":")[2]]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stdin=subprocess.PIPE) as poller:
        assert poller.stdout is not None
        assert poller.stdin is not None
        assert poller.stdout.readline() == b"begun\n"
        answers = asyncio.run(at_once(gateway, bodies, "/v1/completions"))
        poller.stdin.close()
        answered_count = int(poller.stdout.readline())
    assert {answer.status for answer in answers} == {200}
    assert min(answer.prompt_tokens for answer in answers) >= 100_000
    assert answered_count > 24, "a loop that tokenises answers once for each of the 16 prompts"


# -- operators -------------------------------------------------------------------------------------


def test_a_worker_named_twice_is_taken_once_and_another_key_for_it_is_a_conflict(
    started: Processes, simulated: Process
) -> None:
    gateway = started.gateway([], ready=0)
    order = {"url": simulated.url, "labels": {"zone": "a"}}
    first = gateway.admin("/workers", "POST", json=order)
    assert (first.status_code, first.json()["state"]) == (202, "joining")
    gateway.wait_ready(1)
    same = gateway.admin("/workers", "POST", json=order)
    assert (same.status_code, same.json()["state"]) == (202, "ready")
    for changed in (
        {"api_key": "k"},
        {"labels": {}},
        {"url": simulated.url.replace("http:", "https:")},
    ):
        reply = gateway.admin("/workers", "POST", json={**order, **changed})
        assert reply.status_code == 409
        assert reply.json()["error"]["code"] == "worker_exists"
    assert gateway.worker(simulated)["labels"] == {"zone": "a"}
    assert gateway.admin(f"/workers/{simulated.name}", "DELETE").status_code == 202
    assert gateway.workers() == {}
    assert gateway.admin("/workers", "POST", json={**order, "labels": {}}).status_code == 202


def test_a_drained_worker_gets_nothing_new_and_finishes_what_it_has(started: Processes) -> None:
    slow = started.worker("--profile", "fifo:5,0.01,20")
    gateway = started.gateway([slow.url], *TINY)
    with gateway.client.stream(
        "POST", "/v1/chat/completions", json=user("hi", stream=True, max_tokens=20)
    ) as response:
        lines = response.iter_lines()
        next(lines)
        assert gateway.admin(f"/workers/{slow.name}/drain", "POST").status_code == 202
        assert gateway.chat("hi").status == 503
        assert "data: [DONE]" in list(lines)
    assert gateway.worker(slow)["state"] == "draining"


CLIENT_MARK = "sk-MARKEDCLIENTKEY00"
ADMIN_MARK = "sk-MARKEDADMINKEY000"
WORKER_MARK = "sk-MARKEDWORKERKEY00"
TEXT_MARK = "MARKEDPROMPTTEXT"
MARKS = (CLIENT_MARK, ADMIN_MARK, WORKER_MARK, TEXT_MARK)


def marked_requests(gateway: Gateway) -> None:
    """Good and bad requests, with marks wherever a client can put them."""
    headers = {"authorization": f"Bearer {CLIENT_MARK}"}
    bodies: list[Any] = [
        user(f"{TEXT_MARK} {text_of(50, 1)}"),
        user(TEXT_MARK, stream=True),
        user(TEXT_MARK, temperature=99),
        {"messages": TEXT_MARK},
        {"messages": [{"role": TEXT_MARK, "content": "x"}]},
        user(TEXT_MARK, metadata={"cache_salt": TEXT_MARK}),
        user(TEXT_MARK, model=TEXT_MARK),
        user(TEXT_MARK, user=TEXT_MARK, prompt_cache_key=TEXT_MARK),
    ]
    for body in bodies:
        gateway.post("/v1/chat/completions", body, headers)
    gateway.complete([TEXT_MARK], headers)
    wrong = {"authorization": f"Bearer {CLIENT_MARK}x", "x-session-id": TEXT_MARK}
    gateway.post("/v1/embeddings", {"input": TEXT_MARK}, headers)
    gateway.post("/v1/embeddings", {"input": TEXT_MARK}, wrong)
    for raw in (f'{{"prompt":"{TEXT_MARK}', f'{{"a":"{TEXT_MARK}","a":1}}', TEXT_MARK):
        gateway.client.post("/v1/completions", content=raw, headers=headers)
    gateway.client.get(f"/v1/files/x?secret={CLIENT_MARK}", headers=headers)


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_c98_keys_and_prompts_appear_nowhere(started: Processes, log_format: str) -> None:
    flags = ("--api-key", CLIENT_MARK, "--admin-api-key", ADMIN_MARK, "--log-level", "debug")
    process = started.begin(
        "serve", "--port", "0", "--admin-port", "0", "--log-format", log_format, *flags,
        "--cb-failure-threshold", "2", "--decision-header", "--health-check-interval-secs", "0.1",
    )  # fmt: skip
    process.wait_ready()
    gateway = Gateway(process)
    operator = {"authorization": f"Bearer {ADMIN_MARK}"}
    failing = started.worker(*TINY, "--fault", "http-503")
    working = started.worker(*TINY)
    dead = f"http://127.0.0.1:{free_port()}"
    for url in (failing.url, working.url, dead):
        order = {"url": url, "api_key": WORKER_MARK}
        reply = gateway.admin("/workers", "POST", json=order, headers=operator)
        assert reply.status_code == 202

    def page(path: str) -> str:
        return gateway.admin(path, headers=operator).text

    until(lambda: page("/workers").count('"ready"') == 2, "two workers joined")
    marked_requests(gateway)
    working.kill()
    marked_requests(gateway)
    gateway.admin(f"/workers/{working.name}", headers={"authorization": f"Bearer {WORKER_MARK}"})
    bad_beat = {"worker": working.name, "boot_nonce": TEXT_MARK}
    gateway.admin("/heartbeat", "POST", json=bad_beat, headers=operator)
    pages = {path: page(path) for path in ("/config", "/workers", "/decisions", "/metrics")}
    assert json.loads(pages["/decisions"])["decisions"], "there is something to look at"
    assert process.stop() == 0
    pages["log"] = process.log()
    assert "worker.joined" in pages["log"]
    for name, text in pages.items():
        for mark in MARKS:
            assert mark not in text, f"{mark} in {name}"


# -- the end ---------------------------------------------------------------------------------------


def test_sigterm_lets_a_stream_finish_and_takes_nothing_new(started: Processes) -> None:
    slow = started.worker("--profile", "fifo:5,0.01,200")
    gateway = started.gateway([slow.url], *TINY)
    port = int(gateway.url.rpartition(":")[2])
    with gateway.client.stream(
        "POST", "/v1/chat/completions", json=user("hi", stream=True, max_tokens=30)
    ) as response:
        lines = response.iter_lines()
        next(lines)
        gateway.process.child.terminate()
        until(lambda: is_refused(port), "new connections are refused")
        assert gateway.process.child.poll() is None
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert len(rest) >= 30
    assert gateway.process.child.wait(STOP_S) == 0
    assert "Traceback" not in gateway.process.log()


def is_refused(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=WAIT_S).close()
    except ConnectionRefusedError:
        return True
    return False
