"""C98: marked secrets and prompts through the main flows at debug level; everything that comes out
is searched for them: logs of gateway and workers, metrics, receipts, traces, every admin page.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jwt
import pytest
from collector import Collector, collecting
from cryptography.hazmat.primitives.asymmetric import ed25519
from fleet import (
    Gateway,
    Process,
    Processes,
    engine_script,
    processes,
    text_of,
    until,
)
from fleet import url_of as port_of
from scripted import json_answer, wire, worker
from tenants import MODEL, Caller, tenants

PROMPT = "MARKEDPROMPT"
WORKER_KEY = "MARKEDWORKERKEY0123456789"
WRONG_KEY = "pk_MARKEDWRONG_0123456789abcdef"
ISSUER = ("--jwt-issuer", "https://issuer.test", "--jwt-audience", "trunkline")
PAGES = (
    *("/metrics", "/workers", "/decisions?limit=1000", "/config", "/revocations", "/tenants"),
    *("/orgs", "/keys", "/audit?limit=1000", "/public", "/list_workers", "/audit/verify"),
)
SIGNER = ed25519.Ed25519PrivateKey.generate()


@dataclass(slots=True)
class Marks:
    """What must appear nowhere, and in what it was."""

    found: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])

    def add(self, name: str, *secrets: str) -> None:
        for secret in secrets:
            assert len(secret) >= 8, f"{name} is too short to be looked for"
            self.found.append((name, secret))

    def assert_absent(self, where: str, text: str) -> None:
        for name, secret in self.found:
            assert secret not in text, f"{name} is in {where}"


@pytest.fixture(scope="module")
def started() -> Iterator[Processes]:
    with processes() as these:
        yield these


def key_set(folder: Path) -> Path:
    """Of the issuer, as a file."""
    public = jwt.get_algorithm_by_name("EdDSA").to_jwk(SIGNER.public_key(), as_dict=True)
    path = folder / "keys.json"
    path.write_text(json.dumps({"keys": [{**public, "kid": "k1", "use": "sig"}]}))
    path.chmod(0o600)
    return path


def token(**changes: Any) -> str:
    now_s = int(time.time())
    claims = {
        "iss": "https://issuer.test", "aud": "trunkline", "sub": "ann", "jti": "j1",
        "org_id": "acme", "tenant_id": "acme", "iat": now_s, "exp": now_s + 600, **changes,
    }  # fmt: skip
    return jwt.encode(claims, SIGNER, algorithm="EdDSA", headers={"kid": "k1"})


def everything_asked(caller: Caller, headers: dict[str, str]) -> None:
    """Good and bad requests, with the marked prompt wherever a client can put one."""
    client = caller.gateway.client
    trace = {"traceparent": f"00-{'5' * 32}-{'6' * 16}-01", "x-session-id": PROMPT}
    message = {"role": "user", "content": f"{PROMPT} {text_of(40, 'x')}"}
    bodies: list[dict[str, Any]] = [
        {"messages": [message]},
        {"messages": [message], "stream": True, "stream_options": {"include_usage": True}},
        {"messages": [message], "temperature": 99},
        {"messages": PROMPT},
        {"messages": [message], "model": PROMPT},
        {"messages": [message], "user": PROMPT, "prompt_cache_key": PROMPT, PROMPT: PROMPT},
        {"messages": [message], "metadata": {"cache_salt": PROMPT}},
        {"messages": [message], "n": 3},
    ]
    for body in bodies:
        asked = {"max_tokens": 2, **body}
        client.post("/v1/chat/completions", json=asked, headers={**headers, **trace})
    client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2}, headers=headers)
    client.post("/v1/embeddings", json={"input": PROMPT}, headers=headers)
    message_call = {"model": MODEL, "max_tokens": 2, "messages": [message]}
    client.post("/v1/messages", json=message_call, headers=headers)
    for raw in (f'{{"prompt":"{PROMPT}', f'{{"a":"{PROMPT}","a":1}}', PROMPT):
        client.post(
            "/v1/completions", content=raw, headers={**headers, "content-type": "application/json"}
        )
    client.get(f"/v1/files/x?secret={PROMPT}", headers=headers)
    for scope in ("session", "user", "none", "org"):
        more = {**headers, "x-cache-scope": scope}
        client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2}, headers=more)


def resumed(caller: Caller, gateway: Gateway, workers: dict[str, Process]) -> None:
    """A stream whose worker is killed in the middle, and goes on elsewhere or ends in an error."""
    body = {"prompt": PROMPT, "max_tokens": 4_000, "stream": True}  # twenty seconds
    with gateway.client.stream(
        "POST", "/v1/completions", json=body, headers=caller.headers()
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        name = next(
            name
            for name, row in gateway.workers().items()
            if row["requests_active"] and name in workers
        )
        workers[name].kill()
        for _ in zip(range(20), lines, strict=False):
            pass


def secrets_in(folder: Path) -> Iterator[str]:
    """The keys of a state folder, as they lie there and as hex and base64 of them."""
    for path in sorted((folder / "state" / "secrets").rglob("*")):
        if not path.is_file():
            continue
        raw = path.read_bytes()
        try:
            text = raw.decode("ascii").strip()
        except UnicodeDecodeError:
            text = ""
        if text and "\n" not in text:
            yield text
        yield raw.hex()
        yield base64.b64encode(raw).decode("ascii").rstrip("=")


def searched(gateway: Gateway, collector: Collector, all_of: list[Process]) -> dict[str, str]:
    """Everything that came out, by where."""
    pages = {path: gateway.admin(path).text for path in PAGES}
    for name in gateway.workers():
        pages[f"/workers/{name}"] = gateway.admin(f"/workers/{name}").text
    kept = json.loads(pages["/decisions?limit=1000"])["decisions"]
    assert kept, "there are receipts to look at"
    for receipt in kept[:50]:
        path = f"/decisions/{receipt['request_id']}"
        pages[path] = gateway.admin(path).text
    assert gateway.process.stop() == 0
    for process in all_of:
        pages[f"log of {process.words[0]} {process.child.pid}"] = process.log()
    pages["traces"] = b"\n".join(collector.raw).decode("latin-1")
    return pages


def repeating(salts: set[str], keys_seen: set[str]) -> Callable[..., Awaitable[bytes]]:
    """An engine that answers with the prompt, and keeps what salts and keys it was sent."""

    async def odd(path: str, headers: dict[str, str], body: bytes) -> bytes:
        if path.startswith("/trunkline/"):
            return json_answer(b"{}", "404 Not Found")  # no agent
        salts.add(json.loads(body).get("cache_salt", ""))
        keys_seen.add(headers.get("authorization", ""))
        usage = {
            "prompt_tokens": 9,
            "completion_tokens": 1,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        answer = {"choices": [{"index": 0, "text": PROMPT, "message": {"content": PROMPT}}]}
        return json_answer(json.dumps({**answer, "usage": usage}).encode())

    return odd


def test_c98_keys_tokens_salts_and_prompts_come_out_nowhere(
    started: Processes, tmp_path: Path
) -> None:
    marks, salts, keys_seen = Marks(), set[str](), set[str]()

    odd = repeating(salts, keys_seen)

    @wire
    async def play() -> None:
        model = {"/v1/models": json.dumps({"data": [{"id": MODEL}]}).encode()}
        with collecting() as collector:
            async with worker(engine_script(odd, model)) as engine:
                await asyncio.to_thread(flows, collector, port_of(engine))

    def flows(collector: Collector, engine_url: str) -> None:
        simulated = started.workers(3, "--profile", "tiny", "--time-scale", "5")
        failing = started.worker("--profile", "tiny", "--fault", "http-503")
        fleet = tenants(
            started, [one.url for one in simulated], tmp_path, "--profile", "tiny",
            "--log-level", "debug", "--log-format", "json", "--otlp-endpoint", collector.url,
            "--policy", "round_robin", *ISSUER, "--jwt-jwks", str(key_set(tmp_path)),
        )  # fmt: skip
        gateway = fleet.gateway
        for url in (failing.url, engine_url):
            order = {"url": url, "api_key": WORKER_KEY}
            assert gateway.admin("/workers", "POST", json=order).status_code == 202
        gateway.wait_ready(5)
        callers = [fleet.caller("acme", "ann"), fleet.caller("bolt", "bob")]
        good, bad = token(), token(aud="MARKED")
        bearer = {"authorization": f"Bearer {good}"}
        marks.add("prompt", PROMPT)
        marks.add("worker key", WORKER_KEY)
        marks.add("wrong key", WRONG_KEY)
        marks.add("token", good, bad, good.rpartition(".")[2], bad.rpartition(".")[2])
        for caller in callers:
            marks.add("key", caller.key, caller.key.split("_", 2)[2])
            everything_asked(caller, caller.headers())
        accepted = gateway.complete(PROMPT, bearer)
        assert accepted.status == 200, accepted.response.text
        everything_asked(callers[0], bearer)
        for refused in (f"Bearer {bad}", f"Bearer {WRONG_KEY}", f"Basic {WRONG_KEY}"):
            everything_asked(callers[0], {"authorization": refused})
        for one in (*simulated, failing):  # so that the engine is asked, which shows its salts
            gateway.admin(f"/workers/{one.name}/drain", "POST")
        everything_asked(callers[0], callers[0].headers())
        gateway.admin(f"/workers/{engine_url.removeprefix('http://')}/drain", "POST")
        for one in simulated:
            gateway.admin(f"/workers/{one.name}/undrain", "POST")
        gateway.wait_ready(3)
        resumed(callers[0], gateway, {one.name: one for one in simulated})
        fleet.raised("invalidate", "tenant/bolt")
        fleet.raised("revoke", "tenant/bolt")
        everything_asked(callers[1], callers[1].headers())
        until(lambda: len(collector.spans) > 50, "traces have arrived")
        marks.add("salt", *(salt for salt in salts if salt))
        marks.add("secret of the gateway", *secrets_in(tmp_path))
        pages = searched(gateway, collector, [gateway.process, *simulated, failing])
        assert "request.finished" in pages[f"log of serve {gateway.process.child.pid}"]
        for where, text in pages.items():
            marks.assert_absent(where, text)

    play()
    assert salts - {""}, "an engine was sent salts"
    assert f"Bearer {WORKER_KEY}" in keys_seen, "and its key"


def test_the_search_finds_what_is_planted() -> None:
    marks = Marks()
    marks.add("prompt", PROMPT)
    marks.assert_absent("a log", "nothing here")
    with pytest.raises(AssertionError, match="prompt is in a log"):
        marks.assert_absent("a log", f"x {PROMPT}y")
