"""Flags, bounds, faults, and what a client may ask of the simulated worker."""

from __future__ import annotations

import argparse
import random
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from trunkline.adapters.template import load_template
from trunkline.adapters.tokenizer import load_tokenizer
from trunkline.errors import ConfigError
from trunkline.ports.publisher import BlockEvent, BlockRemoved, RunStored
from trunkline.worker.cache import BlockCache
from trunkline.worker.faults import Faults, FaultyFeed, parse_faults
from trunkline.worker.labels import LabelBook
from trunkline.worker.options import Feed, Surface, WorkerOptions, add_arguments, options_from
from trunkline.worker.requests import BadRequest, Reader

MODEL_FOLDER = Path(__file__).resolve().parents[2] / "src" / "trunkline" / "worker" / "model"
READER = Reader(
    tokenizer=load_tokenizer(MODEL_FOLDER),
    template=load_template(MODEL_FOLDER),
    model="sim",
    context_tokens=100,
    default_tokens=64,
)
USER = [{"role": "user", "content": "hi"}]


def test_no_flags_give_the_defaults() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert options_from(parser.parse_args([])) == WorkerOptions()


def test_flags_reach_their_fields() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = "--blocks 32 --feed approximate --time-scale 2.5 --fault hang --fault slow:3"
    options = options_from(parser.parse_args([*words.split(), "--wide-hashes"]))
    assert (options.blocks, options.feed, options.time_scale) == (32, Feed.APPROXIMATE, 2.5)
    assert options.wide_hashes
    assert options.faults == Faults(is_hanging=True, slow_factor=3)
    assert options.context_tokens == 512


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"port": 70_000}, "port is 70000, allowed are 0 to 65535"),
        ({"block_size": 24}, "block_size is 24, needed is a multiple of 16"),
        ({"blocks": 2, "max_model_len": 33}, "max_model_len is 33, the cache has 32"),
        ({"profile": "x"}, "profile 'x' is unknown"),
        ({"fault": ("hang:1",)}, "fault 'hang:1' is not one of slow:FACTOR, hang"),
        ({"fault": ("drop-events:2",)}, "fault 'drop-events:2'"),
        ({"fault": ("lose-salt",)}, "fault 'lose-salt'"),
        ({"time_scale": float("nan")}, "time_scale is nan"),
        ({"feed": Feed.DIGEST}, "needs heartbeat_url"),
        ({"events_port": 65_535, "data_parallel_size": 2}, "events_port is 65535"),
    ],
)
def test_a_wrong_option_is_refused_with_its_name_and_bounds(
    wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        WorkerOptions(**wrong)


def test_a_wrong_flag_is_a_mistake_of_the_user() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(ConfigError, match="block_size is 24"):
        options_from(parser.parse_args(["--block-size", "24"]))


def test_keys_are_not_shown() -> None:
    assert "sesame" not in repr(WorkerOptions(heartbeat_key="sesame"))


def test_all_fault_kinds_parse() -> None:
    words = ["slow:2", "hang", "die-after:5", "http-503", "wrong-events", "late-events:20"]
    assert parse_faults([*words, "drop-events:0.5", "no-events"]) == Faults(
        slow_factor=2,
        is_hanging=True,
        die_after_tokens=5,
        is_unavailable=True,
        has_wrong_events=True,
        late_events_ms=20,
        drop_events_rate=0.5,
        has_no_events=True,
    )


class Recorder:
    """An event publisher that only remembers."""

    endpoint = replay_endpoint = topic = ""
    buffer_batches = 0

    def __init__(self) -> None:
        self.batches: list[tuple[list[BlockEvent], bool]] = []

    def publish(self, events: Sequence[BlockEvent], *, is_sent: bool = True) -> None:
        self.batches.append((list(events), is_sent))

    def close(self) -> None: ...


STORED = RunStored(
    hashes=(b"h" * 32,), parent=None, tokens=array("I", [8, 9]), block_tokens=2, salt=None
)


def test_wrong_events_name_other_tokens_of_the_same_block() -> None:
    recorder = Recorder()
    FaultyFeed(recorder, Faults(has_wrong_events=True), random.Random(0)).publish([STORED])
    (told,) = recorder.batches[0][0]
    assert isinstance(told, RunStored)
    assert told.hashes == STORED.hashes
    assert all(a != b for a, b in zip(told.tokens, STORED.tokens, strict=True))


def test_dropped_events_are_kept_for_replays_at_about_the_rate_told() -> None:
    recorder = Recorder()
    feed = FaultyFeed(recorder, Faults(drop_events_rate=0.25), random.Random(7))
    for _ in range(400):
        feed.publish([BlockRemoved(hash=b"x" * 32)])
    assert len(recorder.batches) == 400
    assert 70 < sum(not is_sent for _, is_sent in recorder.batches) < 130


def test_no_events_means_none() -> None:
    recorder = Recorder()
    FaultyFeed(recorder, Faults(has_no_events=True), random.Random(0)).publish([STORED])
    assert recorder.batches == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ["x"]}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
        ({"messages": USER, "n": 2}, "n"),
        ({"messages": USER, "n": True}, "n"),
        ({"messages": USER, "max_tokens": 0}, "max_tokens"),
        ({"messages": USER, "max_tokens": 1.5}, "max_tokens"),
        ({"messages": USER, "max_tokens": 100}, "max_tokens"),
        ({"messages": USER, "cache_salt": ""}, "cache_salt"),
        ({"messages": USER, "cache_salt": 5}, "cache_salt"),
        ({"messages": USER, "stop": [""]}, "stop"),
        ({"messages": USER, "stop": ["a"] * 17}, "stop"),
        ({"messages": USER, "stream": "yes"}, "stream"),
        ({"messages": USER, "stream_options": 1}, "stream_options"),
        ({"messages": USER, "tools": {}}, "tools"),
        ({"messages": USER, "model": "other"}, "model"),
        ({"messages": USER, "chat_template_kwargs": {"messages": []}}, "messages"),
        (
            {"messages": USER, "kv_transfer_params": {"trunkline": {"checkpoints": [1]}}},
            "kv_transfer_params",
        ),
        ({"messages": [{"role": "user", "content": "hi " * 200}]}, "messages"),
    ],
)
def test_a_bad_chat_body_is_refused_with_the_field(body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        READER.generation(body, is_chat=True)
    assert caught.value.param == param
    assert caught.value.status == (404 if param == "model" else 400)


@pytest.mark.parametrize(
    "prompt",
    [None, 5, {}, [], [-1], [4_096], [1.5], [True], ["a", 1], [[1], "a", 2], [[]], ["a"] * 257],
)
def test_a_bad_prompt_is_refused(prompt: Any) -> None:  # any JSON
    with pytest.raises(BadRequest):
        READER.batch({"prompt": prompt})


@pytest.mark.parametrize("prompt", ["hello", [5, 6], [5], ["hello"], [[5, 6]]])
def test_a_prompt_may_be_text_or_ids_or_a_batch_of_one(prompt: Any) -> None:  # any JSON
    [generation] = READER.batch({"prompt": prompt})
    assert generation.wanted_tokens == 16
    assert generation.has_own_end


def test_what_a_gateway_says_of_a_prompt_is_said_of_the_first_of_a_batch_alone() -> None:
    body = {
        "prompt": [[5] * 32, [6] * 32],
        "cache_salt": "own",
        "cache_salt_regions": [[1, "public"]],
        "kv_transfer_params": {"trunkline": {"checkpoints": [[16, "name"]]}},
    }
    first, second = READER.batch(body)
    assert [region.salt for region in first.regions] == ["public"]
    assert first.labels == ((16, "name"),)
    assert (second.regions, second.labels) == ((), ())
    assert first.salt == second.salt == "own"


def test_an_answer_without_a_length_stays_within_the_context() -> None:
    ids = list(range(90))
    assert READER.generation({"prompt": ids}, is_chat=False).wanted_tokens == 10
    assert READER.generation({"prompt": ids, "max_tokens": 10}, is_chat=False).wanted_tokens == 10
    with pytest.raises(BadRequest, match="maximum context length is 100"):
        READER.generation({"prompt": ids, "max_tokens": 11}, is_chat=False)


def _filled(blocks: int) -> tuple[BlockCache, list[bytes]]:
    cache = BlockCache(capacity=blocks, block_tokens=16)
    sequence = cache.admit(array("I", range(16 * blocks - 1)), None, 1)
    assert sequence is not None
    cache.compute(sequence, 16 * blocks - 1)
    cache.release(sequence)
    return cache, sequence.hashes


def test_labels_are_reported_while_their_block_is_resident() -> None:
    cache, hashes = _filled(5)
    book = LabelBook(cache)
    book.attach([(16, "one"), (64, "four"), (20, "no edge"), (160, "too deep")], hashes)
    assert book.resident() == ["one", "four"]
    assert book.is_complete
    assert cache.reset()
    assert book.resident() == []


def test_the_label_used_longest_ago_is_dropped_at_the_bound_and_it_is_said() -> None:
    cache, hashes = _filled(5)
    book = LabelBook(cache, max_kept=2)
    book.attach([(16, "a"), (32, "b")], hashes)
    book.attach([(16, "a")], hashes)
    assert book.is_complete
    book.attach([(48, "c")], hashes)
    assert book.resident() == ["a", "c"]
    assert not book.is_complete


@pytest.mark.parametrize("host", ["localhost", "", "::1", "0.0.0.0", "10.0.0.300"])
def test_c101_the_address_of_pulls_is_one_that_others_can_be_told(host: str) -> None:
    with pytest.raises(ValueError, match="pull_host is"):
        WorkerOptions(pull_host=host)


@pytest.mark.parametrize(
    ("more", "wrong"),
    [
        ({"engine": Surface.SGLANG, "page_size": 3}, "a part of a block"),
        ({"engine": Surface.SGLANG, "page_size": 32}, "a part of a block"),
        ({"page_size": 8}, "need engine sglang"),
        ({"enable_cache_report": True}, "need engine sglang"),
        ({"engine": Surface.SGLANG, "data_parallel_size": 2}, "one rank"),
        ({"engine": Surface.SGLANG, "host_blocks": 8}, "needs the agent"),
    ],
)
def test_what_does_not_go_with_an_engine_is_refused(more: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        WorkerOptions(**more)


def test_sglang_has_no_agent_and_tells_reuse_only_where_it_is_told_to() -> None:
    sglang = WorkerOptions(engine=Surface.SGLANG, page_size=4)
    assert (sglang.has_agent, sglang.tells_reuse, sglang.page_tokens) == (False, False, 4)
    assert WorkerOptions(engine=Surface.SGLANG, enable_cache_report=True).tells_reuse
    assert (WorkerOptions().has_agent, WorkerOptions().tells_reuse) == (True, True)
