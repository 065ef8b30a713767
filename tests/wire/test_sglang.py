"""The gateway before simulated workers that speak as SGLang does, on real sockets.

Two releases: 0.5.23, here with pages of one token, and 0.5.18, which writes its events as arrays
and replays them without their topic.
"""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from fleet import (
    MODEL_FOLDER,
    WAIT_S,
    Gateway,
    Process,
    Processes,
    free_port,
    processes,
    text_of,
    until,
)
from tenants import SHAPES, Shape, Tenants, tenants

TODAY = ("--engine", "sglang", "--enable-cache-report", "--page-size", "1", "--profile", "tiny")
BEFORE = ("--engine", "sglang-0.5.18", "--enable-cache-report", "--profile", "tiny")
RELEASES = pytest.mark.parametrize("flags", [TODAY, BEFORE], ids=["0.5.23", "0.5.18"])
MODEL = ("--model-path", str(MODEL_FOLDER))
"""Whose tokenizer it has: SGLang serves any model, so that the gateway has to be told."""
WORDS = 200


def repeated(gateway: Gateway, text: str) -> tuple[int, int]:
    """Tokens that were expected to be reused, and that were, of the same request once more."""
    answer = gateway.chat(text)
    assert answer.status == 200, answer.response.text
    return answer.predicted, answer.cached


def learnt(gateway: Gateway, worker: Process, text: str) -> None:
    """Have a prompt computed, and wait until events have told of it."""
    held = gateway.rank(worker)["held_blocks"]
    assert gateway.chat(text).status == 200
    gateway.wait_held(worker, held + 1)


@RELEASES
def test_what_is_expected_is_what_is_reused_and_the_engine_is_shown(flags: tuple[str, ...]) -> None:
    with processes() as started:
        worker = started.worker(*flags)
        gateway = started.gateway([worker.url], *MODEL)
        detail = gateway.worker(worker)["detail"]
        version = "0.5.23" if flags is TODAY else "0.5.18"
        assert (detail["engine"], detail["engine_version"]) == ("sglang", version)
        assert (gateway.worker(worker)["mode"], detail["block_tokens"]) == ("exact", 16)
        assert detail["degraded"] == []
        text = text_of(WORDS, "first")
        learnt(gateway, worker, text)
        predicted, cached = repeated(gateway, text)
        assert predicted == cached > 100
        predicted, cached = repeated(gateway, text_of(WORDS // 2, "first"))
        assert predicted == cached > 50
        assert gateway.rank(worker)["feed_stats"]["bad_events"] == 0


@pytest.fixture
def root_key(tmp_path: Path) -> tuple[str, str]:
    """Flags that give two gateways the same names for the same blocks."""
    file = tmp_path / "root.key"
    file.write_text("ab" * 32)
    file.chmod(0o600)
    return "--root-key-file", str(file)


@RELEASES
def test_a_small_cache_is_followed_through_its_evictions_and_learnt_by_who_comes_late(
    flags: tuple[str, ...], root_key: tuple[str, str]
) -> None:
    with processes() as started:
        worker = started.worker(*flags, "--blocks", "80")
        gateway = started.gateway([worker.url], *MODEL, *root_key)
        texts = [text_of(WORDS, seed) for seed in range(8)]
        for text in texts:
            assert gateway.chat(text).status == 200
        until(lambda: gateway.rank(worker)["feed_stats"]["removed_blocks"] > 0, "some had to go")
        gateway.wait_quiet()
        late = started.gateway(
            [worker.url], *MODEL, *root_key
        )  # knows what events say, and no more
        held = late.rank(worker)["held_blocks"]
        assert 0 < held <= 80
        until(lambda: gateway.rank(worker)["held_blocks"] == held, "both know the same")
        for text in (texts[-1], texts[0]):
            predicted, cached = repeated(late, text)
            assert predicted == cached


@RELEASES
def test_c22_batches_that_were_lost_are_replayed(
    flags: tuple[str, ...], root_key: tuple[str, str]
) -> None:
    with processes() as started:
        worker = started.worker(*flags, "--fault", "drop-events:0.5")
        gateway = started.gateway([worker.url], *MODEL, *root_key)
        texts = [text_of(WORDS, seed) for seed in range(12)]
        for text in texts:
            assert gateway.chat(text).status == 200

        def is_whole() -> bool:
            gateway.chat(text_of(30, gateway.rank(worker)["feed_stats"]["batches"]))
            rank = gateway.rank(worker)
            return rank["feed_state"] == "live" and rank["feed_stats"]["gaps"] > 0

        until(is_whole, "gaps were noticed and filled")
        stats = gateway.rank(worker)["feed_stats"]
        assert (stats["relearned"], stats["undecodable"], stats["replay_failures"]) == (0, 0, 0)
        predicted, cached = repeated(gateway, texts[0])
        assert predicted == cached > 100


@RELEASES
def test_a_restart_is_recognised_by_its_numbers_and_nothing_old_is_expected(
    flags: tuple[str, ...],
) -> None:
    with processes() as started:
        ports = ("--port", str(free_port()), "--events-port", str(free_port()))
        worker = started.worker(*flags, *ports)
        gateway = started.gateway([worker.url], *MODEL)
        text = text_of(WORDS, "before")
        learnt(gateway, worker, text)
        worker.kill()
        worker = started.worker(*flags, *ports)
        until(lambda: gateway.worker(worker)["state"] == "ready", "it is back")
        until(lambda: gateway.rank(worker)["held_blocks"] == 0, "the old life is forgotten")
        assert repeated(gateway, text) == (0, 0)
        gateway.wait_held(worker, 8)
        predicted, cached = repeated(gateway, text)
        assert predicted == cached > 100


@RELEASES
def test_a_flushed_cache_is_forgotten(flags: tuple[str, ...]) -> None:
    with processes() as started:
        worker = started.worker(*flags)
        gateway = started.gateway([worker.url], *MODEL)
        text = text_of(WORDS, "flushed")
        learnt(gateway, worker, text)
        gateway.wait_quiet()
        assert httpx.post(f"{worker.url}/flush_cache", timeout=WAIT_S).status_code == 200
        until(lambda: gateway.rank(worker)["held_blocks"] == 0, "the flush was told")
        assert repeated(gateway, text)[1] == 0


def test_without_its_report_flag_reuse_is_not_told_and_all_else_works() -> None:
    with processes() as started:
        worker = started.worker("--engine", "sglang", "--profile", "tiny")
        gateway = started.gateway([worker.url], *MODEL)
        text = text_of(WORDS, "silent")
        learnt(gateway, worker, text)
        answer = gateway.chat(text)
        assert answer.json["usage"]["prompt_tokens_details"] is None
        assert answer.predicted > 100


def test_its_load_is_known_and_its_own_paths_are_nobody_s() -> None:
    with processes() as started:
        worker = started.worker(*TODAY)
        gateway = started.gateway([worker.url], *MODEL)
        assert gateway.metric("worker_degraded", worker=worker.name) == 0
        for path in ("/generate", "/flush_cache", "/server_info", "/get_server_info"):
            assert gateway.client.post(path, json={"text": "hello"}).status_code == 404


def fenced(started: Processes, folder: Path) -> tuple[Process, Tenants]:
    worker = started.worker(*TODAY)
    paths = ("--tenant-paths", "/v1/messages", "/v1/embeddings", "/v1/responses")
    return worker, tenants(started, [worker.url], folder, *MODEL, *paths)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_two_tenants_share_nothing_and_each_finds_its_own(shape: Shape, tmp_path: Path) -> None:
    with processes() as started:
        worker, fleet = fenced(started, tmp_path)
        alice, bob = fleet.caller("alice"), fleet.caller("bob")
        text = text_of(WORDS, "secret")
        assert alice.ask(shape, text).cached == 0
        fleet.gateway.wait_held(worker, 8)
        told = bob.ask(shape, text)
        assert (told.cached, fleet.matched(told)) == (0, 0)
        again = alice.ask(shape, text)
        assert again.cached == fleet.matched(again) > 100


def test_an_epoch_that_was_raised_makes_the_cache_unreachable(tmp_path: Path) -> None:
    with processes() as started:
        worker, fleet = fenced(started, tmp_path)
        alice = fleet.caller("alice")
        text, shape = text_of(WORDS, "old"), SHAPES[0]
        alice.ask(shape, text)
        fleet.gateway.wait_held(worker, 8)
        fleet.raised("invalidate", "tenant/alice")
        told = alice.ask(shape, text)
        assert (told.cached, fleet.matched(told)) == (0, 0)


@pytest.mark.parametrize("field", ["cache_salt", "extra_key"])
def test_a_salt_of_the_client_s_own_never_gets_through(field: str, tmp_path: Path) -> None:
    with processes() as started:
        worker, fleet = fenced(started, tmp_path)
        alice, bob = fleet.caller("alice"), fleet.caller("bob")
        text = text_of(WORDS, "shared")
        assert alice.answer(text, **{field: "ours"}).status == 200
        fleet.gateway.wait_held(worker, 8)
        answer = bob.answer(text, **{field: "ours"})
        assert (answer.status, answer.cached) == (200, 0)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/embeddings", "/v1/embeddings?x=1"])
def test_paths_that_take_no_salt_are_refused_to_tenants_though_the_operator_lists_them(
    path: str, tmp_path: Path
) -> None:
    with processes() as started:
        _, fleet = fenced(started, tmp_path)
        alice = fleet.caller("alice")
        body = {"input": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        answer = fleet.gateway.client.post(path, json=body, headers=alice.headers())
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "unsalted_path")
