"""Key sets of an issuer: what gets in, where from, and that a failure keeps the old one."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from trunkline.adapters.clock import SystemClock
from trunkline.adapters.jwks import (
    ALGORITHMS,
    MAX_JWKS_BYTES,
    MAX_KEY_COUNT,
    Jwks,
    JwksProblem,
    JwksSource,
    checked_algorithms,
    jwks_source,
    read_key_set,
)
from trunkline.errors import ConfigError

Json = dict[str, Any]  # Any: JSON


def public(key: Any, algorithm: str, kid: str = "k", **more: Any) -> Json:  # Any: kinds of keys
    made = jwt.get_algorithm_by_name(algorithm).to_jwk(key.public_key(), as_dict=True)
    return {**made, "kid": kid} | more


RSA_KEY = rsa.generate_private_key(public_exponent=65_537, key_size=2_048)
EC_KEY = ec.generate_private_key(ec.SECP256R1())
P384_KEY = ec.generate_private_key(ec.SECP384R1())
ED_KEY = ed25519.Ed25519PrivateKey.generate()
RSA_JWK = public(RSA_KEY, "RS256", "rsa")
EC_JWK = public(EC_KEY, "ES256", "ec")
ED_JWK = public(ED_KEY, "EdDSA", "ed")


def document(*keys: Json) -> bytes:
    return json.dumps({"keys": list(keys)}).encode()


def pairs(raw: bytes, algorithms: frozenset[str] = ALGORITHMS) -> set[tuple[str, str]]:
    return set(read_key_set(raw, algorithms).keys)


def test_each_key_stands_under_the_pinned_algorithms_that_fit_it() -> None:
    both = frozenset({"RS256", "PS256", "ES256"})
    raw = document(RSA_JWK, EC_JWK, ED_JWK, public(P384_KEY, "ES384", "p384"))
    assert pairs(raw, both) == {("rsa", "RS256"), ("rsa", "PS256"), ("ec", "ES256")}
    assert ("p384", "ES384") in pairs(raw)
    assert ("p384", "ES256") not in pairs(raw)
    assert ("ed", "EdDSA") in pairs(raw)


def test_a_key_that_names_its_algorithm_is_for_no_other() -> None:
    assert pairs(document(RSA_JWK | {"alg": "PS512"})) == {("rsa", "PS512")}


@pytest.mark.parametrize(
    "passed_over",
    [
        EC_JWK | {"use": "enc"},
        {"kty": "OKP", "crv": "X25519", "x": "AAAA", "kid": "x"},
        {"kty": "future", "kid": "f"},
        EC_JWK | {"alg": "HS256"},
        {name: value for name, value in EC_JWK.items() if name != "kid"},
        EC_JWK | {"kid": 5},
        EC_JWK | {"kid": ""},
        EC_JWK | {"kty": ["EC"]},
    ],
)
def test_keys_for_other_uses_are_passed_over(passed_over: Json) -> None:
    assert {kid for kid, _ in pairs(document(RSA_JWK, passed_over))} == {"rsa"}


SMALL_RSA = rsa.generate_private_key(public_exponent=65_537, key_size=1_024)
PRIVATE = jwt.get_algorithm_by_name("RS256").to_jwk(RSA_KEY, as_dict=True)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"{}",
        b'{"keys": {}}',
        b'{"keys": [5]}',
        b'{"keys": []}',
        b"\xff",
        b"[" * 60_000,
        b'{"keys": [' + b"[" * 50_000,
        document(RSA_JWK, {"kty": "oct", "k": "c2VjcmV0", "kid": "o"}),
        document({**PRIVATE, "kid": "p"}),
        document(RSA_JWK, RSA_JWK),
        document(public(SMALL_RSA, "RS256")),
        document(RSA_JWK, EC_JWK | {"x": "!!"}),
        document(RSA_JWK, EC_JWK | {"y": EC_JWK["x"]}),
        document(RSA_JWK, RSA_JWK | {"kid": "2", "n": 7}),
        document(*(EC_JWK | {"kid": str(n)} for n in range(MAX_KEY_COUNT + 1))),
        document(RSA_JWK | {"x5c": ["A" * MAX_JWKS_BYTES]}),
    ],
    ids=range(18),
)
def test_a_set_that_is_none_or_holds_what_it_must_not_is_refused(raw: bytes) -> None:
    with pytest.raises(JwksProblem):
        read_key_set(raw, ALGORITHMS)


def test_as_many_keys_as_are_allowed_are_read() -> None:
    raw = document(*(EC_JWK | {"kid": str(n)} for n in range(MAX_KEY_COUNT)))
    assert len(pairs(raw)) == MAX_KEY_COUNT


@pytest.mark.parametrize(
    "names", [(), ("none",), ("HS256",), ("RS256", "HS512"), ("rs256",), ("ES256K",)]
)
def test_only_asymmetric_algorithms_can_be_pinned(names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="allowed are"):
        checked_algorithms(names)


@pytest.mark.parametrize(
    "where",
    [
        "http://issuer.example/keys",
        "http://10.0.0.1/keys",
        "https://user:secret@issuer.example/keys",
        "https:///keys",
        "https://issuer.example:99999/keys",
        "ftp://127.0.0.1/keys",
        "file:///etc/passwd",
        "https://issuer.example/a b",
        "https://issuer.example/\r\nx: y",
        "http://127.0.0.1.evil.example/keys",
        "http://127.0.0.1@evil.example/keys",
    ],
)
def test_a_url_that_is_neither_https_nor_on_loopback_is_refused(where: str) -> None:
    with pytest.raises(ConfigError):
        jwks_source(where)


def keeper(source: JwksSource, **intervals: float) -> Jwks:
    return Jwks(source, ALGORITHMS, SystemClock(), **intervals)


class TestFile:
    """A JWKS in a file."""

    def test_it_is_read(self, tmp_path: Path) -> None:
        path = tmp_path / "keys.json"
        path.write_bytes(document(RSA_JWK))
        kept = keeper(jwks_source(str(path)))
        assert asyncio.run(kept.refresh())
        assert kept.current.kids == {"rsa"}
        assert (kept.generation, kept.problem) == (1, "")

    def test_one_that_others_can_write_is_not(self, tmp_path: Path) -> None:
        path = tmp_path / "keys.json"
        path.write_bytes(document(RSA_JWK))
        path.chmod(0o666)
        kept = keeper(jwks_source(str(path)))
        assert not asyncio.run(kept.refresh())
        assert "writable by everybody" in kept.problem

    def test_a_set_that_breaks_leaves_the_old_one_in_force(self, tmp_path: Path) -> None:
        path = tmp_path / "keys.json"
        path.write_bytes(document(RSA_JWK))
        kept = keeper(jwks_source(str(path)))

        async def changes() -> None:
            assert await kept.refresh()
            path.write_bytes(b"{")
            assert not await kept.refresh()
            path.unlink()
            assert not await kept.refresh()

        asyncio.run(changes())
        assert kept.current.kids == {"rsa"}
        assert (kept.generation, kept.refreshes, kept.failures) == (1, 3, 2)
        assert str(path) in kept.problem

    def test_the_same_bytes_again_are_no_new_set(self, tmp_path: Path) -> None:
        path = tmp_path / "keys.json"
        path.write_bytes(document(RSA_JWK))
        kept = keeper(jwks_source(str(path)))

        async def changes() -> list[int]:
            seen: list[int] = []
            for raw in (document(RSA_JWK), document(RSA_JWK), document(EC_JWK)):
                path.write_bytes(raw)
                await kept.refresh()
                seen.append(kept.generation)
            return seen

        assert asyncio.run(changes()) == [1, 1, 2]
        assert kept.current.kids == {"ec"}


class Server:
    """An HTTP server on loopback whose answers a test writes."""

    def __init__(self) -> None:
        self.answer: tuple[int, bytes, str] = (200, document(RSA_JWK), "")
        self.paths: list[str] = []
        self.is_holding = False
        self.is_free = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.paths.append(self.path)
                if outer.is_holding:
                    outer.is_free.wait(30)
                status, body, location = outer.answer
                self.send_response(status)
                if location:
                    self.send_header("location", location)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/keys?v=1"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))
        self.thread.start()

    def close(self) -> None:
        self.is_free.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


class TestUrl:
    """A JWKS behind a URL."""

    def test_it_is_fetched(self, server: Server) -> None:
        kept = keeper(jwks_source(server.url))
        assert asyncio.run(kept.refresh())
        assert kept.current.kids == {"rsa"}
        assert server.paths == ["/keys?v=1"]

    @pytest.mark.parametrize("status", [201, 204, 301, 302, 307, 404, 500])
    def test_any_answer_but_200_is_a_failure_and_no_redirect_is_followed(
        self, server: Server, status: int
    ) -> None:
        server.answer = (status, b"" if status == 204 else document(EC_JWK), "/other")
        kept = keeper(jwks_source(server.url))
        assert not asyncio.run(kept.refresh())
        assert server.paths == ["/keys?v=1"]
        assert f"answered {status}" in kept.problem

    def test_more_than_the_cap_is_a_failure_and_is_not_read_to_its_end(
        self, server: Server
    ) -> None:
        server.answer = (200, document(RSA_JWK) + b" " * (4 << 20), "")
        kept = keeper(jwks_source(server.url))
        assert not asyncio.run(kept.refresh())
        assert f"{MAX_JWKS_BYTES + 1} bytes" in kept.problem

    def test_a_set_of_just_the_cap_is_read(self, server: Server) -> None:
        raw = document(RSA_JWK)
        server.answer = (200, raw + b" " * (MAX_JWKS_BYTES - len(raw)), "")
        assert asyncio.run(keeper(jwks_source(server.url)).refresh())

    def test_nobody_there_is_a_failure_that_keeps_the_old_set(self, server: Server) -> None:
        kept = keeper(jwks_source(server.url))
        assert asyncio.run(kept.refresh())
        server.close()
        assert not asyncio.run(kept.refresh())
        assert kept.current.kids == {"rsa"}

    def test_a_server_that_hangs_is_given_up_and_leaves_no_thread_behind(
        self, server: Server
    ) -> None:
        server.is_holding = True
        kept = keeper(jwks_source(server.url, timeout_s=0.1))

        async def refresh() -> None:
            await kept.refresh()
            # The thread ends with the connection, not when its own time is up (five seconds).
            executor_end = asyncio.get_running_loop().shutdown_default_executor()
            await asyncio.wait_for(executor_end, 4.0)

        asyncio.run(refresh())
        assert "did not come within" in kept.problem


class Counted:
    """A source that says when it was read."""

    name = "counted"

    def __init__(self) -> None:
        self.readings: list[float] = []
        self.is_failing = False
        self.read_now = asyncio.Event()

    async def read(self) -> bytes:
        self.readings.append(asyncio.get_running_loop().time())
        self.read_now.set()
        if self.is_failing:
            raise JwksProblem("is failing")
        return document(RSA_JWK)


def test_a_wanted_kid_has_it_read_early_but_not_more_often_than_allowed() -> None:
    async def run() -> list[float]:
        source = Counted()
        kept = keeper(source, refresh_s=60.0, min_refresh_s=0.05)
        task = asyncio.create_task(kept.keep())
        for _ in range(3):
            await asyncio.wait_for(source.read_now.wait(), 60.0)
            source.read_now.clear()
            for _ in range(100):
                kept.want()
                await asyncio.sleep(0)
            kept.want()
        task.cancel()
        return source.readings

    readings = asyncio.run(run())
    assert len(readings) == 3
    gaps = [later - earlier for earlier, later in itertools.pairwise(readings)]
    assert min(gaps) >= 0.045


def test_a_failure_is_tried_again_before_the_next_turn() -> None:
    async def run() -> None:
        source = Counted()
        source.is_failing = True
        kept = keeper(source, refresh_s=60.0, min_refresh_s=0.01)
        task = asyncio.create_task(kept.keep())
        await asyncio.wait_for(source.read_now.wait(), 60.0)
        source.read_now.clear()
        source.is_failing = False
        await asyncio.wait_for(source.read_now.wait(), 60.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
