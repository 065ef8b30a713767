"""Bad inputs of the worker and event protocol (docs: the table of bad inputs), byte by byte.

Three answers are allowed: a whole batch, a batch with some events left out and counted,
`UndecodableBatch`.
"""

from __future__ import annotations

import contextlib
import random
import struct
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.adapters.event_sources import discovered_sources, event_source
from trunkline.adapters.vllm_events import (
    MAX_DEPTH,
    MAX_EVENTS,
    UndecodableBatch,
    decode_batch,
)
from trunkline.core.directory import Directory
from trunkline.core.events import BlocksRemoved
from trunkline.core.feed import WorkerFeed
from trunkline.core.records import Instant, WorkerId
from trunkline.errors import ConfigError

pack = msgspec.msgpack.encode
REMOVED = {"type": "BlockRemoved", "block_hashes": [1, 2]}
HEAD = b"\x93\xcb" + struct.pack(">d", 1.0)  # [1.0, ...
TAIL = b"\x00"  # ..., 0]


def around(*raw_events: bytes) -> bytes:
    """A batch of events given as bytes."""
    return HEAD + bytes([0x90 | len(raw_events)]) + b"".join(raw_events) + TAIL


def stored(**fields: Any) -> dict[str, Any]:
    whole: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": [1],
        "parent_block_hash": None,
        "token_ids": [7, 8],
        "block_size": 2,
    }
    return whole | fields


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


MALFORMED: dict[str, bytes] = {
    "nothing": b"",
    "truncated": around(pack(REMOVED))[:-4],
    "trailing": around(pack(REMOVED)) + b"\x00",
    "reserved opcode": around(b"\xc1"),
    "no array": pack({"ts": 1.0}),
    "a number": b"\x01",
    "events are no list": pack([1.0, {"a": 1}, 0]),
    "no events": pack([1.0]),
    "time is text": pack(["1.0", [], 0]),
    "time is nil": pack([None, [], 0]),
    "time is NaN": b"\x93\xcb" + struct.pack(">d", float("nan")) + b"\x90\x00",
    "time is infinite": b"\x93\xcb" + struct.pack(">d", float("inf")) + b"\x90\x00",
    "map of 2^32": HEAD + b"\x91\xdf\xff\xff\xff\xff",
    "array of 2^32": HEAD + b"\xdd\xff\xff\xff\xff",
    "array of 2^32 inside": around(b"\x81\xa4type\xdd\xff\xff\xff\xff"),
    "bin of 2^32": around(b"\xc6\xff\xff\xff\xff"),
    "text of 2^32": around(b"\xdb\xff\xff\xff\xff"),
    "duplicate keys": around(b"\x82\xa4type\xb0AllBlocksCleared\xa4type\xb0AllBlocksCleared"),
    "duplicate keys in a long map": around(
        b"\xde\x00\x02\xa4type\xb0AllBlocksCleared\xa4type\xb0AllBlocksCleared"
    ),
    "invalid utf-8 in a value": around(b"\x81\xa4type\xa2\xff\xfe"),
    "invalid utf-8 in a key": around(b"\x81\xa1\xff\xa1a"),
    "extension type": around(b"\x82\xa4type\xb0AllBlocksCleared\xa1x\xd4\x05\x01"),
    "time stamp extension": around(
        b"\x82\xa4type\xb0AllBlocksCleared\xa1x\xd6\xff\x00\x00\x00\x01"
    ),
    "extension in place of hashes": around(
        b"\x82\xa4type\xacBlockRemoved\xacblock_hashes\xd6\xff\x00\x00\x00\x01"
    ),
    "depth over the cap": around(pack({"type": "AllBlocksCleared", "x": nested(MAX_DEPTH - 2)})),
    "depth over the cap in a known field": around(pack(stored(token_ids=nested(MAX_DEPTH)))),
    "depth 1000": around(pack({"type": "AllBlocksCleared", "x": nested(900)})),
    "depth 100000": around(b"\x91" * 100_000 + b"\xc0"),
    "depth 100000 of maps": around(b"\x81\xa1x" * 100_000 + b"\xc0"),
    "too many events": pack([1.0, [["AllBlocksCleared"]] * (MAX_EVENTS + 1), 0]),
}


@pytest.mark.parametrize("payload", MALFORMED.values(), ids=MALFORMED.keys())
def test_what_is_no_batch_is_refused_as_a_whole(payload: bytes) -> None:
    with pytest.raises(UndecodableBatch):
        decode_batch(0, payload)


def test_the_deepest_allowed_nesting_passes() -> None:
    payload = around(pack({"type": "AllBlocksCleared", "x": nested(MAX_DEPTH - 3)}))
    assert len(decode_batch(0, payload).events) == 1


def test_the_largest_allowed_number_of_events_passes() -> None:
    payload = pack([1.0, [["AllBlocksCleared"]] * MAX_EVENTS, 0])
    assert len(decode_batch(0, payload).events) == MAX_EVENTS


BAD_EVENTS: dict[str, Any] = {
    "nil": None,
    "a number": 5,
    "empty list": [],
    "list without a type": [1, 2],
    "empty map": {},
    "type is a number": {"type": 1},
    "no hashes": stored(block_hashes=[]),
    "hashes are nil": stored(block_hashes=None),
    "hashes are text": stored(block_hashes="ab"),
    "a hash is text": stored(block_hashes=["ab"]),
    "a hash is a float": stored(block_hashes=[1.0]),
    "a hash is a bool": stored(block_hashes=[True]),
    "a hash is too short": stored(block_hashes=[b"1234567"]),
    "a hash is too long": stored(block_hashes=[bytes(65)]),
    "parent is text": stored(parent_block_hash="root"),
    "parent is a bool": stored(parent_block_hash=False),
    "parent is a list": stored(parent_block_hash=[1]),
    "tokens are nil": stored(token_ids=None),
    "a token is negative": stored(token_ids=[-1, 2]),
    "a token is 2^32": stored(token_ids=[1, 2**32]),
    "a token is 2^63": stored(token_ids=[1, 2**63]),
    "a token is a float": stored(token_ids=[1.0, 2.0]),
    "a token is a bool": stored(token_ids=[True, False]),
    "a token is a list": stored(token_ids=[[1], [2]]),
    "tokens do not fill the blocks": stored(token_ids=[1, 2, 3]),
    "more blocks than tokens": stored(block_hashes=[1, 2]),
    "block size 0": stored(block_size=0),
    "block size -1": stored(block_size=-1),
    "block size 1e9": stored(block_size=10**9),
    "block size is text": stored(block_size="2"),
    "block size is a float": stored(block_size=2.0),
    "block size is a bool": stored(block_size=True, token_ids=[1]),
    "block size is nil": stored(block_size=None),
    "extras are text": stored(extra_keys="salt"),
    "a block's extras are text": stored(extra_keys=["salt"]),
    "nothing removed": {"type": "BlockRemoved", "block_hashes": []},
    "removed without hashes": {"type": "BlockRemoved"},
    "positional and cut short": ["BlockStored", [1]],
}


@pytest.mark.parametrize("event", BAD_EVENTS.values(), ids=BAD_EVENTS.keys())
def test_an_event_that_makes_no_sense_is_left_out_and_its_neighbours_kept(event: Any) -> None:
    batch = decode_batch(0, pack([1.0, [REMOVED, event, REMOVED], 0]))
    assert (len(batch.events), batch.bad_count) == (2, 1)


@pytest.mark.parametrize(
    "fields",
    [
        {"session_id": list(range(200_000))},
        {"lora_id": list(range(200_000))},
        {"token_ids": list(range(200_000))},
        {"ownership": {"a": {"b": [1]}}, "locality": 7},
        {"medium": ["GPU"]},
        {"lora_name": 7},
        {"kv_cache_spec_sliding_window": "wide"},
    ],
    ids=lambda fields: "-".join(fields),
)
def test_c23_an_odd_or_oversized_field_never_costs_the_removals_beside_it(
    fields: dict[str, Any],
) -> None:
    batch = decode_batch(0, pack([1.0, [stored(**fields), REMOVED, REMOVED], 0]))
    assert sum(isinstance(event, BlocksRemoved) for event in batch.events) == 2


@pytest.mark.parametrize("rank", [None, "0", -5, 2**70 % 2**64, [0], 1.5], ids=str)
def test_any_rank_field_is_taken_or_taken_as_absent(rank: Any) -> None:
    decoded = decode_batch(0, pack([1.0, [REMOVED], rank]))
    assert decoded.rank == (rank if isinstance(rank, int) else None)


def valid_payload() -> bytes:
    run = stored(
        block_hashes=[2**63 + 1, 2],
        parent_block_hash=5,
        token_ids=[70_000, 2, 3, 4],
        lora_name="lora-x",
        extra_keys=[["lora-x", "A" * 43], ["lora-x"]],
    )
    return pack([1.5, [run, {"type": "BlockRemoved", "block_hashes": [1], "medium": "CPU"}] * 4, 0])


@pytest.mark.parametrize("seed", range(4))
def test_c34_mutated_payloads_decode_or_are_refused_and_never_take_long(seed: int) -> None:
    rng = random.Random(seed)
    base = valid_payload()
    refused_count = 0
    for _ in range(5_000):
        data = bytearray(base)
        for _ in range(rng.randint(1, 6)):
            place = rng.randrange(len(data))
            match rng.randrange(4):
                case 0:
                    data[place] = rng.randrange(256)
                case 1:
                    del data[place : place + rng.randint(1, 8)]
                case 2:
                    data[place:place] = rng.randbytes(rng.randint(1, 8))
                case _:
                    data[place] = rng.choice(b"\xc0\xc1\xc4\xc7\xd4\xd6\xdc\xdd\xde\xdf\x80\x90")
            if not data:
                break
        started = time.thread_time()
        try:
            decode_batch(0, bytes(data))
        except UndecodableBatch:
            refused_count += 1
        assert time.thread_time() - started < 2.0, "a hang, on any machine"
    assert 0 < refused_count < 5_000


@given(st.binary(max_size=200))
def test_noise_is_refused_or_decodes_to_no_more_than_it_can_hold(noise: bytes) -> None:
    for payload in (noise, around(noise)):
        with contextlib.suppress(UndecodableBatch):
            batch = decode_batch(7, payload)
            assert batch.seq == 7
            assert len(batch.events) + batch.ignored_count <= len(payload)


def test_a_storm_of_clears_stores_and_removals_leaves_nothing_behind() -> None:
    directory = Directory(max_blocks=1_000)
    directory.join(WorkerId("w"), block_tokens=2)
    feed = WorkerFeed(WorkerId("w"), directory)
    storm = pack([1.0, [REMOVED, ["AllBlocksCleared"], stored(), REMOVED] * 2_000, 0])
    for seq in range(3):
        feed.live(decode_batch(seq, storm), Instant(0.0))
    assert directory.block_count() == 0
    assert feed.stats.cleared == 6_000
    assert feed.stats.unknown_salt == 6_000


# -- discovery -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoint", "expected", "is_bound"),
    [
        ("tcp://*:5557", "tcp://worker:5557", False),
        ("tcp://0.0.0.0:5557", "tcp://worker:5557", False),
        ("tcp://[::]:5557", "tcp://worker:5557", False),
        ("tcp://[fe80::1]:5557", "tcp://worker:5557", False),
        ("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5557", True),
        ("ipc:///tmp/kv", "ipc:///tmp/kv", False),
    ],
)
def test_c101_the_publisher_s_endpoint_says_who_binds_and_a_wildcard_means_the_workers_own_host(
    endpoint: str, expected: str, is_bound: bool
) -> None:
    source = event_source(endpoint, worker_host="worker")
    assert (source.endpoint, source.is_bound_by_us) == (expected, is_bound)


def test_an_ipv6_worker_is_reached_in_brackets() -> None:
    source = event_source("tcp://*:1", worker_host="fd00::1", replay_endpoint="tcp://*:2")
    assert (source.endpoint, source.replay_endpoint) == ("tcp://[fd00::1]:1", "tcp://[fd00::1]:2")


def test_a_replay_is_only_ever_fetched_from_the_worker_s_own_host() -> None:
    source = event_source(
        "tcp://*:1", worker_host="worker", replay_endpoint="tcp://169.254.169.254:80"
    )
    assert source.replay_endpoint == "tcp://worker:80"


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_discovery_reads_both_shapes_and_sorts_by_rank(is_wrapped: bool) -> None:
    listed: Any = [
        {"data_parallel_rank": 1, "endpoint": "tcp://*:2", "replay_endpoint": None, "topic": "kv"},
        {"data_parallel_rank": 0, "endpoint": "tcp://*:1", "replay_endpoint": "tcp://*:3",
         "topic": "kv", "buffer_steps": 50, "hwm": 1, "max_queue_size": 2},
    ]  # fmt: skip
    first, second = discovered_sources(
        {"sources": listed} if is_wrapped else listed, worker_host="w"
    )
    assert (first.rank, first.buffer_steps, first.replay_endpoint) == (0, 50, "tcp://w:3")
    assert (second.rank, second.topic, second.replay_endpoint) == (1, "kv", None)


def test_discovery_reads_what_vllm_answers() -> None:
    settings = {
        "enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5557",
        "replay_endpoint": "tcp://*:5657", "buffer_steps": 10_000, "hwm": 100_000,
        "max_queue_size": 100_000, "topic": "kv",
    }  # fmt: skip
    second = {**settings, "endpoint": "tcp://*:5558", "replay_endpoint": None}
    found = discovered_sources({"1": second, "0": settings}, worker_host="w")
    assert [source.rank for source in found] == [0, 1]
    assert [source.endpoint for source in found] == ["tcp://w:5557", "tcp://w:5558"]
    assert [source.replay_endpoint for source in found] == ["tcp://w:5657", None]
    assert found[0].topic == "kv"


def test_an_engine_that_publishes_nothing_has_no_event_sources() -> None:
    off = {"enable_kv_cache_events": False, "publisher": "null", "endpoint": "tcp://*:5557"}
    assert discovered_sources({}, worker_host="w") == []
    assert discovered_sources({"0": off}, worker_host="w") == []


@pytest.mark.parametrize(
    "answer",
    [
        None,
        {"0": 5},
        {"a": {"endpoint": "tcp://*:1"}},
        {"-1": {"endpoint": "tcp://*:1"}},
        {"99999": {"endpoint": "tcp://*:1"}},
        {"1" * 5_000: {"endpoint": "tcp://*:1"}},
        {"sources": {}},
        [1],
        [{}],
        [{"endpoint": 5}],
        [{"endpoint": "http://w:1"}],
        [{"endpoint": "tcp://*"}],
        [{"endpoint": "tcp://*:0"}],
        [{"endpoint": "tcp://*:99999"}],
        [{"endpoint": "tcp://a:b@c:1"}],
        [{"endpoint": "tcp://*:1", "data_parallel_rank": "0"}],
        [{"endpoint": "tcp://*:1", "data_parallel_rank": -1}],
        [{"endpoint": "tcp://*:1", "topic": 5}],
        [{"endpoint": "tcp://*:1", "replay_endpoint": 5}],
        [{"endpoint": "tcp://*:1"}, {"endpoint": "tcp://*:2"}],
        [{"endpoint": "tcp://*:1", "data_parallel_rank": rank} for rank in range(1_025)],
    ],
    ids=lambda answer: str(answer)[:40],
)
def test_an_odd_discovery_answer_is_refused_with_a_reason(answer: Any) -> None:
    with pytest.raises(ConfigError):
        discovered_sources(answer, worker_host="w")
