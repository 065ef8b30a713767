"""What engines say about themselves, read without trusting it."""

from __future__ import annotations

import pytest

from trunkline.control.engine import (
    MAX_REQUESTS,
    CacheFacts,
    LoadReport,
    ModelFacts,
    ServerFacts,
    kind_of,
    parse_cache,
    parse_json_load,
    parse_metrics_load,
    parse_models,
    parse_server_info,
)
from trunkline.ports.worker import EngineKind

VLLM = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 7.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:cache_config_info{block_size="32",enable_prefix_caching="True",num_gpu_blocks="400"} 1.0
"""


def test_models_and_their_lengths_are_read() -> None:
    body = b'{"object":"list","data":[{"id":"a","max_model_len":4096,"x":1},{"id":"b"}]}'
    assert parse_models(body) == [
        ModelFacts(model_id="a", max_model_len=4096),
        ModelFacts(model_id="b", max_model_len=None),
    ]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"data":{}}',
        b'{"data":[{"id":3}]}',
        b"\xff",
        b"[" * 100_000,
        b'{"data":[3]}',
        b'{"data":[{"id":"\xff"}]}',
    ],
)
def test_odd_model_lists_are_no_models(body: bytes) -> None:
    assert parse_models(body) == []


def test_block_size_and_capacity_come_from_the_cache_config() -> None:
    assert parse_cache(VLLM) == CacheFacts(block_tokens=32, capacity_blocks=400)
    assert parse_cache(b'vllm:cache_config_info{block_size="-3"} 1\n').block_tokens is None
    assert parse_cache(b"nothing").capacity_blocks is None


def test_when_the_process_began_is_told_beside_it() -> None:
    assert parse_cache(VLLM).started_s is None
    page = b"process_start_time_seconds 1.79603e+09\n" + VLLM
    assert parse_cache(page) == parse_cache(VLLM)
    assert parse_cache(page).started_s == 1.79603e9
    assert parse_cache(b"process_start_time_seconds NaN\n").started_s is None


@pytest.mark.parametrize("size", ["0", "65537", "9" * 5_000, "\u0663", "1e3", ""])
def test_a_block_size_that_none_can_have_is_unknown(size: str) -> None:
    page = f'vllm:cache_config_info{{block_size="{size}",num_gpu_blocks="{size}0"}} 1\n'.encode()
    assert parse_cache(page).block_tokens is None


def test_sizes_at_the_bounds_are_believed() -> None:
    page = b'vllm:cache_config_info{block_size="65536",num_gpu_blocks="2147483648"} 1\n'
    assert parse_cache(page) == CacheFacts(block_tokens=65_536, capacity_blocks=1 << 31)


def test_counts_that_none_can_have_are_cut_to_the_bound() -> None:
    page = b"vllm:num_requests_running 1e308\nvllm:num_requests_running 1e308\n"
    report = parse_metrics_load(page + b"vllm:num_requests_waiting -5\n")
    assert report == LoadReport(running=MAX_REQUESTS, waiting=0, memory_ratio=None)
    report = parse_json_load(b'{"server_load": 99999999999999999999999}')
    assert report is not None
    assert report.running == MAX_REQUESTS


def test_a_model_without_a_name_or_with_an_endless_one_is_none() -> None:
    long = b"m" * 257
    assert parse_models(b'{"data":[{"id":""},{"id":"' + long + b'"}]}') == []
    [facts] = parse_models(b'{"data":[{"id":"m","max_model_len":-1}]}')
    assert facts.max_model_len is None


def test_load_is_summed_over_ranks() -> None:
    assert parse_metrics_load(VLLM) == LoadReport(running=4, waiting=7, memory_ratio=0.25)


def test_older_names_of_a_metric_are_known() -> None:
    page = b"vllm:num_requests_running 1\nvllm:gpu_cache_usage_perc 0.5\n"
    report = parse_metrics_load(page)
    assert report is not None
    assert report.memory_ratio == 0.5
    assert report.waiting is None


def test_ranks_add_up_their_requests_and_the_fullest_tells_of_memory() -> None:
    page = b"".join(
        b'sglang:num_running_reqs{dp_rank="%d"} 2\nsglang:token_usage{dp_rank="%d"} 0.%d\n'
        % (rank, rank, 6 + rank)
        for rank in (1, 0)
    )
    report = parse_metrics_load(page)
    assert report == LoadReport(running=4, waiting=None, memory_ratio=0.7)


@pytest.mark.parametrize(
    ("owner", "page", "kind"),
    [
        ("vllm", b"", EngineKind.VLLM),
        ("sglang", b"vllm:num_requests_running 1\n", EngineKind.SGLANG),
        ("trunkline", b"vllm:num_requests_running 1\n", EngineKind.TRUNKLINE),
        ("somebody", b"sglang:num_running_reqs 1\n", EngineKind.SGLANG),
        ("", b"vllm:num_requests_running 1\n", EngineKind.VLLM),
        ("", b"vllm:a 1\nsglang:b 1\n", EngineKind.UNKNOWN),
        ("", b"", EngineKind.UNKNOWN),
    ],
)
def test_an_engine_is_told_by_who_owns_its_model_or_by_its_metrics(
    owner: str, page: bytes, kind: EngineKind
) -> None:
    assert kind_of([ModelFacts(model_id="m", max_model_len=None, owned_by=owner)], page) is kind


@pytest.mark.parametrize("body", [b"", b"[]", b'{"page_size":"x"}', b'{"version":3}', b"[" * 9])
def test_an_odd_server_info_tells_nothing(body: bytes) -> None:
    assert parse_server_info(body) is None


def test_numbers_of_a_server_info_are_bounded_and_its_release_is_compared() -> None:
    facts = parse_server_info(b'{"page_size":0,"max_total_num_tokens":-1,"version":"0.5.9.post2"}')
    assert facts == ServerFacts(version="0.5.9.post2")
    assert facts is not None
    assert (facts.is_before(0, 5, 10), facts.is_before(0, 5, 9)) == (True, False)
    assert not ServerFacts(version="dev").is_before(9, 9, 9)


def test_a_sleeping_engine_says_so() -> None:
    page = b'vllm:num_requests_running 0\nvllm:engine_sleep_state{sleep_state="awake"} 0\n'
    report = parse_metrics_load(page)
    assert report is not None
    assert report.is_asleep


@pytest.mark.parametrize("value", [b"NaN", b"+Inf", b"-Inf", b"1e999", b"--3"])
def test_numbers_that_are_none_are_passed_over(value: bytes) -> None:
    assert parse_metrics_load(b"vllm:num_requests_running " + value + b"\n") is None


def test_a_page_without_load_is_unknown_and_not_idle() -> None:
    assert parse_metrics_load(b"process_cpu_seconds_total 3\n") is None


def test_c11_both_shapes_of_a_load_endpoint_are_read() -> None:
    assert parse_json_load(b'{"server_load": 5}') == LoadReport(
        running=5, waiting=None, memory_ratio=None
    )
    sglang = b'{"loads":[{"num_running_reqs":2,"num_waiting_reqs":1},{"num_running_reqs":4}]}'
    assert parse_json_load(sglang) == LoadReport(running=6, waiting=1, memory_ratio=None)
    assert parse_json_load(sglang[9:-1]) == LoadReport(running=6, waiting=1, memory_ratio=None)
    fuller = b'{"loads":[{"num_running_reqs":2,"token_usage":0.25},{"num_running_reqs":0}]}'
    assert parse_json_load(fuller) == LoadReport(running=2, waiting=0, memory_ratio=0.25)
    older = b'[{"num_reqs":5,"num_waiting_reqs":2}]'
    assert parse_json_load(older) == LoadReport(running=3, waiting=2, memory_ratio=None)


@pytest.mark.parametrize(
    "body", [b"", b"{}", b'{"server_load":"x"}', b"[]", b'{"loads":3}', b"[{}]"]
)
def test_odd_load_answers_are_unknown(body: bytes) -> None:
    assert parse_json_load(body) is None
