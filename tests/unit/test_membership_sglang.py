"""A SGLang server as the membership finds it: what it says of itself, and what is made of that.

The pages have the fields of the releases that they name, read from their sources.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from member_bench import GOOD, W0, Answers, Bench, bench_test, metrics, until

from trunkline.adapters.event_sources import discovered_sources
from trunkline.control.views import Mode
from trunkline.errors import ConfigError
from trunkline.ports.worker import EngineKind, EventSource

MODELS = (
    b'{"object":"list","data":[{"id":"m","object":"model","created":1,"owned_by":"sglang",'
    b'"root":"m","parent":null,"max_model_len":8192}]}'
)
CONFIG: dict[str, Any] = {
    "publisher": "zmq",
    "endpoint": "tcp://*:5557",
    "replay_endpoint": "tcp://*:5657",
    "topic": "kv",
    "buffer_steps": 99,
}


def server_info(version: str = "0.5.23", page_size: int = 64, **more: Any) -> bytes:
    told: dict[str, Any] = {
        "model_path": "m",
        "page_size": page_size,
        "dp_size": 1,
        "kv_events_config": json.dumps(CONFIG),
        "max_total_num_tokens": 64_000,
        "internal_states": [{"last_gen_throughput": 0.0}],
        "version": version,
        **more,
    }
    return json.dumps(told).encode()


def answers(info: bytes | None = None, path: str = "/server_info", **pages: bytes) -> Answers:
    made = Answers()
    made.pages = {**GOOD, "/v1/models": MODELS, path: info or server_info()}
    made.pages |= {"/v1/loads": b'{"loads":[]}', **{f"/{name}": at for name, at in pages.items()}}
    return made


def with_sources(bench: Bench) -> Bench:
    bench.parts.find_sources = lambda body, host: discovered_sources(
        json.loads(body), worker_host=host
    )
    return bench


SOURCE = EventSource(
    endpoint="tcp://w0:5557",
    replay_endpoint="tcp://w0:5657",
    topic="kv",
    rank=0,
    buffer_steps=99,
)


@bench_test
async def test_all_of_it_is_told_by_server_info(bench: Bench) -> None:
    asked = await with_sources(bench).joined(answers=answers())
    view = bench.view()
    assert (view.engine, view.engine_version) == (EngineKind.SGLANG, "0.5.23")
    assert (view.block_tokens, view.capacity_blocks, view.max_model_len) == (64, 1_000, 8_192)
    assert (view.mode, bench.followed) == (Mode.EXACT, [SOURCE])
    assert bench.table.targets[W0].engine is EngineKind.SGLANG
    assert "/kv_event_sources" not in asked.asked


@bench_test
async def test_the_older_name_of_the_page_is_asked_where_there_is_no_newer_one(
    bench: Bench,
) -> None:
    await with_sources(bench).joined(answers=answers(path="/get_server_info"))
    assert (bench.mode(), bench.view().block_tokens) == (Mode.EXACT, 64)


@bench_test
async def test_each_rank_publishes_on_the_port_after_the_one_before_it(bench: Bench) -> None:
    info = server_info(dp_size=4, kv_events={"dp_size": 2, "block_size": 64})
    with_sources(bench).add(answers=answers(info))
    await until(lambda: len(bench.followed) == 2)
    second = replace(SOURCE, endpoint="tcp://w0:5558", replay_endpoint="tcp://w0:5658", rank=1)
    assert bench.followed == [SOURCE, second]


@pytest.mark.parametrize(("page", "block"), [(1, 16), (5, 20), (16, 16), (64, 64)])
def test_small_pages_are_taken_together_to_blocks_of_about_the_wanted_size(
    page: int, block: int
) -> None:
    @bench_test
    async def whole(bench: Bench) -> None:
        await with_sources(bench).joined(answers=answers(server_info(page_size=page)))
        assert bench.state().block_tokens == block
        assert bench.view().capacity_blocks == 64_000 // block
        assert bench.followed[0].page_tokens == (None if page == block else page)

    whole()


@bench_test
async def test_blocks_spread_over_ranks_are_as_wide_as_its_events_say(bench: Bench) -> None:
    info = server_info(page_size=64, kv_events={"block_size": 128})
    await with_sources(bench).joined(answers=answers(info))
    assert bench.view().block_tokens == 128


@bench_test
async def test_a_release_whose_events_name_no_salts_is_approximate_and_told_why(
    bench: Bench,
) -> None:
    await with_sources(bench).joined(answers=answers(server_info("0.5.17")))
    view = bench.view()
    assert (view.mode, bench.followed) == (Mode.APPROXIMATE, [])
    assert view.reason == "SGLang 0.5.17 names no salts in its events; 0.5.18 and later do"


@bench_test
async def test_a_build_that_names_no_release_is_followed(bench: Bench) -> None:
    await with_sources(bench).joined(answers=answers(server_info("main")))
    assert bench.mode() is Mode.EXACT


@bench_test
async def test_without_event_settings_it_is_approximate_and_told_the_flag(bench: Bench) -> None:
    await with_sources(bench).joined(answers=answers(server_info(kv_events_config=None)))
    view = bench.view()
    assert view.mode is Mode.APPROXIMATE
    assert "--kv-events-config" in view.reason


@bench_test
async def test_events_that_the_operator_names_are_followed_in_its_pages(bench: Bench) -> None:
    named = EventSource(endpoint="tcp://relay:1")
    info = server_info(page_size=1, kv_events_config=None)
    await with_sources(bench).joined(answers=answers(info), event_sources=(named,))
    assert bench.followed == [replace(named, page_tokens=1)]


@bench_test
async def test_a_server_that_tells_nothing_of_itself_is_served_all_the_same(bench: Bench) -> None:
    await with_sources(bench).joined(answers=answers(b"[]"))
    view = bench.view()
    assert (view.mode, view.engine_version, view.block_tokens) == (Mode.APPROXIMATE, "", 16)


@bench_test
async def test_a_release_that_takes_no_salt_is_not_taken_where_tenants_are_kept_apart(
    bench: Bench,
) -> None:
    with_sources(bench).parts.keeps_apart = True
    bench.add(answers=answers(server_info("0.4.9")))
    await until(lambda: "cannot be kept apart" in bench.view().reason)
    assert bench.fleet.get(W0) is None
    bench.answers[1].pages["/server_info"] = server_info("0.5.18")
    await until(lambda: bench.fleet.get(W0) is not None)


@bench_test
async def test_the_same_release_serves_one_tenant(bench: Bench) -> None:
    await with_sources(bench).joined(answers=answers(server_info("0.4.9")))
    assert bench.mode() is Mode.APPROXIMATE


@bench_test
async def test_c11_its_load_is_read_where_its_release_tells_it(bench: Bench) -> None:
    asked = await with_sources(bench).joined(answers=answers())
    await until(lambda: bench.view().degraded == ("load",))
    asked.pages["/v1/loads"] = (
        b'{"loads":[{"dp_rank":0,"num_running_reqs":3,"num_waiting_reqs":2,"token_usage":1.0}]}'
    )
    await until(lambda: bench.state().is_full)
    assert bench.view().degraded == ()
    del asked.pages["/v1/loads"]
    asked.pages["/get_load"] = b'[{"dp_rank":0,"num_reqs":5,"num_waiting_reqs":2,"num_tokens":7}]'
    asked.asked.clear()
    await until(lambda: asked.asked.count("/get_load") > 2)
    assert (bench.view().degraded, bench.state().is_full) == ((), False)


@bench_test
async def test_metrics_are_preferred_where_it_was_told_to_have_them(bench: Bench) -> None:
    page = b'sglang:num_running_reqs{tp_rank="0"} 3\nsglang:num_queue_reqs{tp_rank="0"} 2\n'
    asked = await with_sources(bench).joined(answers=answers(metrics=page))
    await until(lambda: asked.asked.count("/metrics") > 3)
    assert "/v1/loads" not in asked.asked


@bench_test
async def test_vllm_behind_the_same_gateway_is_asked_as_before(bench: Bench) -> None:
    asked = await bench.joined(answers=Answers(metrics=metrics()))
    assert bench.view().engine is EngineKind.VLLM
    assert "/server_info" not in asked.asked


@pytest.mark.parametrize(
    "config",
    ['{"publisher":', "3", '{"publisher":"zmq","endpoint":7}', '{"publisher":"zmq","topic":[1]}'],
)
def test_odd_event_settings_are_an_operator_s_error(config: str) -> None:
    with pytest.raises(ConfigError):
        discovered_sources({"kv_events_config": config}, worker_host="w0")


@pytest.mark.parametrize("config", [None, "", '{"publisher":"null"}', "{}"])
def test_events_that_are_off_have_no_source(config: str | None) -> None:
    assert discovered_sources({"kv_events_config": config}, worker_host="w0") == []


@pytest.mark.parametrize(
    ("settings", "endpoint", "is_ours"),
    [
        ({"endpoint": "tcp://127.0.0.1:5557"}, "tcp://127.0.0.1:5557", True),
        ({"endpoint": "tcp://127.0.0.1:5557", "bind": True}, "tcp://w0:5557", False),
        ({"endpoint": "tcp://0.0.0.0:5557"}, "tcp://w0:5557", False),
        ({"endpoint": "ipc:///run/kv"}, "ipc:///run/kv", False),
        ({}, "tcp://w0:5557", False),
    ],
)
def test_its_publisher_binds_where_it_says_so_or_the_address_does(
    settings: dict[str, Any], endpoint: str, is_ours: bool
) -> None:
    config = json.dumps({"publisher": "zmq", **settings})
    (source,) = discovered_sources({"kv_events_config": config}, worker_host="w0")
    assert (source.endpoint, source.is_bound_by_us) == (endpoint, is_ours)
