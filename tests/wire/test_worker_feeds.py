"""What the simulated worker tells of its cache: events, replays, and the heartbeats of a digest."""

from __future__ import annotations

import asyncio
import base64
import http.server
import json
import queue
import threading
import time
from array import array
from typing import Any

import msgspec
import zmq
from fleet import until
from single import (
    PROMPT,
    VOCAB,
    WAIT_S,
    cached,
    ids,
    replayed,
    right,
    worker,
)

from trunkline.adapters.clock import SystemClock
from trunkline.adapters.event_publisher import ZmqEventPublisher
from trunkline.ports.publisher import CacheCleared, RunStored
from trunkline.worker.heartbeat import post

# --- events ---


def test_a_whole_ring_is_replayed_to_one_who_reads_it_late() -> None:
    """Else its end is lost, too, and whoever asked waits for that until it gives up."""
    publisher = ZmqEventPublisher(SystemClock(), buffer_batches=3_000)
    context = zmq.Context()
    try:
        for number in range(3_000):
            tokens = array("I", range(number, number + 1_024))
            stored = RunStored(
                hashes=(bytes(32),), parent=None, tokens=tokens, block_tokens=1_024, salt=None
            )
            publisher.publish([stored])
        late, next_one = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
        late.rcvhwm, late.rcvbuf = 1, 4_096
        for asking, start in ((late, 0), (next_one, 3_000)):
            asking.connect(publisher.replay_endpoint)
            asking.send_multipart([b"", start.to_bytes(8, "big")])
            if asking is late:
                assert late.poll(WAIT_S * 1_000)
        assert next_one.poll(WAIT_S * 1_000), "one is served after the other"
        for number in range(3_000):
            assert late.poll(WAIT_S * 1_000), f"batch {number} was dropped"
            assert int.from_bytes(late.recv_multipart()[2], "big") == number
        assert late.poll(WAIT_S * 1_000), "the end was dropped"
        assert late.recv_multipart()[2] == b"\xff" * 8
    finally:
        context.destroy(linger=0)
        publisher.close()


def test_live_events_carry_the_tokens_and_the_salt_of_what_was_cached() -> None:
    with worker() as running:
        context = zmq.Context()
        socket = context.socket(zmq.SUB)
        socket.subscribe(b"")
        socket.connect(running.events)
        received: list[list[bytes]] = []

        def try_again() -> bool:
            # A subscription takes a moment; what is published before it is not received.
            running.complete([len(received), time.monotonic_ns() % VOCAB, *PROMPT], cache_salt="s")
            if socket.poll(50):
                received.append(socket.recv_multipart())
            return bool(received)

        until(try_again, "an event")
        context.destroy(linger=0)
        topic, number, payload = received[0]
        seconds, (event,), rank = msgspec.msgpack.decode(payload)
        assert topic == b"kv-events"
        assert len(number) == 8
        assert (rank, event["type"], event["block_size"]) == (0, "BlockStored", 16)
        assert abs(seconds - time.time()) < 60
        assert event["token_ids"][2:] == PROMPT[: len(event["token_ids"]) - 2]
        assert len(event["token_ids"]) == 16 * len(event["block_hashes"])
        assert event["extra_keys"][0] == ["s"]
        assert event["parent_block_hash"] is None


def test_a_replay_begins_at_the_number_asked_for() -> None:
    with worker("--wide-hashes") as running:
        for first in range(5):
            running.complete([first, *PROMPT])
        batches = replayed(running.replay)
        assert [number for number, _ in batches] == list(range(5))
        assert [event["token_ids"][0] for _, (_, (event,), _) in batches] == list(range(5))
        assert {len(name) for _, b in batches for name in b[1][0]["block_hashes"]} == {32}
        assert replayed(running.replay, 3) == batches[3:]
        assert replayed(running.replay, 9) == []


def test_a_replay_of_more_than_is_kept_begins_later() -> None:
    publisher = ZmqEventPublisher(SystemClock(), buffer_batches=3)
    for _ in range(5):
        publisher.publish([CacheCleared()])
    numbers = [number for number, _ in replayed(publisher.replay_endpoint)]
    publisher.close()
    assert numbers == [2, 3, 4]


def test_nonsense_on_the_replay_socket_is_ignored() -> None:
    publisher = ZmqEventPublisher(SystemClock())
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(publisher.replay_endpoint)
    for frames in ([b""], [b"", b"short"], [b"", b"1" * 8, b"more"], [b"x"] * 40):
        socket.send_multipart(frames)
    publisher.publish([CacheCleared()])
    socket.send_multipart([b"", bytes(8)])  # answers come in the order of the requests
    assert socket.poll(WAIT_S * 1_000)
    assert [socket.recv_multipart()[2] for _ in range(2)] == [bytes(8), b"\xff" * 8]
    context.destroy(linger=0)
    publisher.close()


def test_a_reset_is_told_with_the_next_batch_and_refused_while_busy() -> None:
    with worker("--time-scale", "20") as running:
        running.complete(PROMPT)
        assert running.http.post("/reset_prefix_cache").json() == {"success": True}
        assert len(replayed(running.replay)) == 1
        assert cached(running.complete(PROMPT)) == 0
        kinds = [[event["type"] for event in batch[1]] for _, batch in replayed(running.replay)]
        assert kinds == [["BlockStored"], ["AllBlocksCleared", "BlockStored"]]
        body = {"prompt": PROMPT, "max_tokens": 500, "stream": True}
        with running.http.stream("POST", "/v1/completions", json=body) as answer:
            parts = answer.iter_bytes()  # closes the answer when it is dropped
            next(parts)
            assert running.http.post("/reset_prefix_cache").json() == {"success": False}


def test_evictions_are_told_block_by_block() -> None:
    with worker("--blocks", "8") as running:
        for first in range(4):
            running.complete([first, *PROMPT], 1)
        stored: list[int] = []
        removed: list[int] = []
        for _, batch in replayed(running.replay):
            for event in batch[1]:
                into = stored if event["type"] == "BlockStored" else removed
                into += event["block_hashes"]
        assert len(stored) - len(removed) == 8
        assert set(removed) < set(stored)
        # The tail of the oldest prefix goes first.
        assert removed[0] == stored[3]


def test_ranks_have_caches_and_event_streams_of_their_own() -> None:
    with worker("--data-parallel-size", "2") as running:

        def cached_on(rank: str) -> int:
            body = {"prompt": PROMPT, "max_tokens": 1}
            headers = {"X-data-parallel-rank": rank}
            return cached(running.http.post("/v1/completions", json=body, headers=headers).json())

        assert [cached_on(rank) for rank in "1101"] == [0, 64, 0, 64]
        body = {"prompt": PROMPT}
        for bad in ("2", "-1", "x"):
            answer = running.http.post(
                "/v1/completions", json=body, headers={"X-data-parallel-rank": bad}
            )
            assert answer.status_code == 400
        sources = running.http.get("/kv_event_sources").json()
        assert list(sources) == ["0", "1"]
        assert len({source["endpoint"] for source in sources.values()}) == 2


# --- digest feed ---


class Gateway(http.server.BaseHTTPRequestHandler):
    """Takes heartbeats."""

    received: queue.Queue[tuple[str | None, Any]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.received.put((self.headers["authorization"], json.loads(body)))
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002  the library's name


def test_heartbeats_report_labels_while_their_blocks_are_resident() -> None:
    handler = type("Handler", (Gateway,), {"received": queue.Queue()})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    received: queue.Queue[tuple[str | None, Any]] = handler.received  # pyright: ignore[reportAttributeAccessIssue]
    label = base64.b64encode(b"k" * 32).decode()
    flags = ("--heartbeat-url", f"http://127.0.0.1:{server.server_port}/beat", "--worker-id", "w1")
    more = ("--heartbeat-key", "sesame", "--heartbeat-interval-ms", "50", "--feed", "digest")
    try:
        with worker(*flags, *more) as running:
            assert running.events == ""
            assert running.http.get("/kv_event_sources").json() == {}
            key, first = received.get(timeout=WAIT_S)
            assert key == "Bearer sesame"
            assert (first["worker"], first["counter"], first["checkpoints"]) == ("w1", 1, [])
            assert (first["complete"], first["block_size"]) == (True, 16)
            hint = {"trunkline": {"checkpoints": [[64, label], [1024, "deeper"]]}}
            running.complete(PROMPT, kv_transfer_params=hint)
            beats = iter(lambda: received.get(timeout=WAIT_S)[1], None)
            told = next(beat for beat in beats if beat["checkpoints"])
            assert told["checkpoints"] == [label]
            assert told["boot_nonce"] == first["boot_nonce"]
            assert told["counter"] > first["counter"]
            assert 0 <= told["memory"] <= 1
            assert 0 <= told["load"] <= 1
            running.http.post("/reset_prefix_cache")
            assert next(beat for beat in beats if not beat["checkpoints"])["complete"]
    finally:
        server.shutdown()
        server.server_close()


def test_a_gateway_that_is_away_does_not_stop_the_worker() -> None:
    flags = ("--feed", "digest", "--heartbeat-interval-ms", "10")
    with worker(*flags, "--heartbeat-url", "http://127.0.0.1:9/beat") as running:
        for first in range(10):
            prompt = [first, *PROMPT]
            assert ids(running.complete(prompt)) == right(prompt)


def test_a_heartbeat_counts_as_accepted_with_a_status_below_300_only() -> None:
    with worker() as running:
        url = str(running.http.base_url)
        assert asyncio.run(post(f"{url}/health", "key", b"{}", WAIT_S)) is False
        assert asyncio.run(post(f"{url}/ping?a=b", "key", b"{}", WAIT_S)) is True
    assert asyncio.run(post(f"{url}/ping", "key", b"{}", WAIT_S)) is False
