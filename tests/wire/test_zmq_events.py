"""The event subscriber against real ZeroMQ sockets: late join, gaps, late replays, restarts,
floods.
"""

from __future__ import annotations

import asyncio
import socket
from array import array
from typing import Any

import pytest
import zmq
import zmq.asyncio
from event_desk import (
    NAMESPACE,
    WORKER,
    Bench,
    WirePublisher,
    block,
    gone,
    payload,
    run,
)

from trunkline.adapters.clock import SystemClock
from trunkline.adapters.event_publisher import ZmqEventPublisher
from trunkline.adapters.vllm_events import MAX_PAYLOAD_BYTES
from trunkline.adapters.zmq_events import (
    MAX_MESSAGE_BYTES,
    MAX_REPLAY_HWM,
    RECEIVE_HWM,
    TURN_BYTES,
)
from trunkline.core.actions import FeedFailed, FeedUntrusted, WorkerRestarted
from trunkline.core.feed import FeedState
from trunkline.core.records import Tier
from trunkline.ports.publisher import RunStored
from trunkline.ports.worker import EventSource


def test_c21_a_gateway_that_starts_late_learns_what_the_ring_still_holds() -> None:
    async def main(bench: Bench) -> None:
        publisher = WirePublisher()
        for number in range(20):
            await publisher.publish(payload(block(number)))
        async with bench.following(publisher.source()):
            await bench.until(lambda: bench.held() == 20)
            await bench.subscribed(publisher)
            assert bench.directory.is_trusted(WORKER)
            await publisher.publish(payload(gone(3)))
            await bench.until(lambda: bench.held() == 19)
        await publisher.close()

    run(main)


def test_c22_lost_batches_are_fetched_and_applied_in_order() -> None:
    async def main(bench: Bench) -> None:
        publisher = WirePublisher()
        async with bench.following(publisher.source()):
            await bench.subscribed(publisher)
            first_lost = await publisher.publish(payload(block(1), block(2)), skip=True)
            await publisher.publish(payload(gone(1)), skip=True)
            await publisher.publish(payload(block(3)))
            await bench.until(lambda: bench.held() == 2)
            assert bench.feed.stats.gaps >= 1
            assert bench.feed.stats.relearned == 0
            # Asked one earlier than what is missing: the answer must begin with a batch we know.
            assert publisher.asked[-1] == first_lost - 1
            await bench.until(lambda: bench.feed.state is FeedState.LIVE)
        await publisher.close()

    run(main)


def test_c22_a_replay_that_begins_too_late_makes_the_worker_untrusted_and_then_relearns() -> None:
    async def main(bench: Bench) -> None:
        publisher = WirePublisher(ring=3)
        async with bench.following(publisher.source()):
            await bench.subscribed(publisher)
            await publisher.publish(payload(block(1)))
            await bench.until(lambda: bench.held() == 1)
            await publisher.publish(payload(gone(1)), skip=True)
            for number in range(10, 18):
                await publisher.publish(payload(block(number)), skip=True)
            await publisher.publish(payload(block(18)))
            await bench.until(
                lambda: bench.has(FeedUntrusted) and bench.feed.stats.late_replays > 0
            )
            await bench.until(lambda: bench.held() == 3)  # what the ring of three still told
            await bench.until(lambda: bench.feed.state is FeedState.LIVE)
            assert bench.directory.is_trusted(WORKER)
        await publisher.close()

    run(main)


def test_a_replay_that_never_answers_ends_by_its_deadline() -> None:
    async def main(bench: Bench) -> None:
        publisher = WirePublisher(is_mute=True)
        async with bench.following(publisher.source()):
            await bench.until(lambda: bench.feed.stats.replay_failures >= 1)
            while bench.held() == 0:
                await publisher.publish(payload(block(publisher.next_seq)))
                await asyncio.sleep(0.01)
            await bench.until(lambda: bench.feed.state is FeedState.LIVE)
            assert bench.directory.is_trusted(WORKER)
        await publisher.close()

    run(main, replay_timeout_ms=100.0)


def test_a_publisher_that_begins_anew_is_noticed_though_its_numbers_fit() -> None:
    async def main(bench: Bench) -> None:
        publisher = WirePublisher()
        async with bench.following(publisher.source()):
            await bench.subscribed(publisher)
            await publisher.publish(payload(block(1)))
            await bench.until(lambda: bench.held() == 1)
            ports, count = publisher.ports, publisher.next_seq
            await publisher.close()
            successor = WirePublisher(ports=ports)
            for number in range(count):  # the new life is just as far, unseen
                await successor.publish(payload(block(100 + number), ts=1.0), skip=True)
            await bench.until(lambda: bench.has(WorkerRestarted))
            await bench.until(lambda: bench.held() == count)
            assert bench.feed.stats.restarts == 1
            await successor.close()

    run(main)


def test_a_publisher_that_is_gone_is_doubted_until_it_is_heard_again() -> None:
    async def main(bench: Bench) -> None:
        publisher = WirePublisher()
        async with bench.following(publisher.source()):
            await bench.subscribed(publisher)
            await publisher.publish(payload(block(1)))
            await bench.until(lambda: bench.held() == 1)
            assert bench.feed.next_tick is None
            ports, ring = publisher.ports, list(publisher.ring)
            await publisher.close()
            await bench.until(lambda: bench.feed.next_tick is not None)
            assert bench.held() == 1, "what it told is kept, and counts for less and less"
            back = WirePublisher(ports=ports)
            for _, known in ring:
                await back.publish(known, skip=True)
            await bench.until(lambda: bench.feed.next_tick is None)
            assert bench.held() == 1
            await back.close()

    run(main)


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"", b"\0" * 8],
        [b"", b"\0" * 8, b"", b""],
        *[[b"", b"\0" * size, b"x"] for size in range(21) if size != 8],
    ],
    ids=lambda frames: "-".join(str(len(frame)) for frame in frames) or "none",
)
def test_c34_frames_of_a_wrong_shape_are_counted_and_the_next_event_is_applied(
    frames: list[bytes],
) -> None:
    async def main(bench: Bench) -> None:
        publisher = WirePublisher()
        async with bench.following(publisher.source()):
            await bench.subscribed(publisher)
            before, gaps = bench.feed.stats.undecodable, bench.feed.stats.gaps
            await publisher.send(*(frames or [b""]))
            await publisher.publish(payload(block(7)))
            await bench.until(lambda: bench.held() == 1)
            assert bench.feed.stats.undecodable == before + 1
            # No number is read out of such frames: it would look like a gap or another life.
            assert (bench.feed.stats.gaps, bench.feed.stats.restarts) == (gaps, 0)
        await publisher.close()

    run(main)


def test_a_payload_that_is_no_batch_costs_that_batch_only() -> None:
    async def main(bench: Bench) -> None:
        publisher = WirePublisher()
        async with bench.following(publisher.source()):
            await bench.subscribed(publisher)
            await publisher.publish(b"\xc1 nonsense")
            await publisher.publish(payload(block(7)))
            await bench.until(lambda: bench.held() == 1)
            await bench.until(lambda: bench.feed.state is FeedState.LIVE)
            assert bench.feed.stats.relearned == 1
        await publisher.close()

    run(main)


def test_a_message_over_the_payload_s_limit_is_a_gap_and_one_far_over_ends_the_connection() -> None:
    async def main(bench: Bench) -> None:
        publisher = WirePublisher(ring=2)
        async with bench.following(publisher.source()):
            await bench.subscribed(publisher)
            undecodable = bench.feed.stats.undecodable
            await publisher.publish(bytes(MAX_PAYLOAD_BYTES + 1))
            await publisher.publish(payload(block(7)))
            await bench.until(lambda: bench.held() == 1)
            assert bench.feed.stats.undecodable > undecodable
            await bench.until(lambda: bench.feed.state is FeedState.LIVE)
            undecodable = bench.feed.stats.undecodable
            replays = bench.feed.stats.replays
            await publisher.send(b"", bytes(8), bytes(MAX_MESSAGE_BYTES + 1))
            await bench.until(lambda: bench.feed.stats.replays > replays)  # the new connection's
            await bench.subscribed(publisher)
            assert bench.feed.stats.undecodable == undecodable, "it never came in"
        await publisher.close()

    run(main)


@pytest.mark.parametrize(("asked", "given"), [(50, 66), (1 << 24, MAX_REPLAY_HWM + 16)])
def test_what_waits_in_sockets_is_bounded_whatever_a_worker_announces(
    asked: int, given: int
) -> None:
    async def main(bench: Bench) -> None:
        made: list[Any] = []
        bench.context = _Recording()
        object.__setattr__(bench.context, "made", made)
        publisher = WirePublisher(is_mute=True)
        async with bench.following(publisher.source(buffer_steps=asked)):
            await bench.until(lambda: bool(publisher.asked))
            bounds = {int(one.type): one.getsockopt(zmq.RCVHWM) for one in made}
            assert (bounds[zmq.SUB], bounds[zmq.DEALER]) == (RECEIVE_HWM, given)
            assert all(
                one.getsockopt(zmq.MAXMSGSIZE) == MAX_MESSAGE_BYTES
                for one in made
                if one.type in (zmq.SUB, zmq.DEALER)
            )
        await publisher.close()

    run(main)


def test_a_flood_of_events_leaves_the_loop_to_others() -> None:
    async def main(bench: Bench) -> None:
        publisher = WirePublisher(ring=10)
        most = 0
        async with bench.following(publisher.source()):
            await bench.subscribed(publisher)
            many = payload(*(block(number) for number in range(200)))
            for _ in range(300):
                await publisher.publish(many)
            before = last = bench.feed.stats.batches
            while last < before + 250:
                await asyncio.sleep(0)
                most, last = max(most, bench.feed.stats.batches - last), bench.feed.stats.batches
            assert bench.feed.stats.stored_blocks > 0
        assert 0 < most <= TURN_BYTES // len(many) + 1, "batches between two turns of the loop"
        await publisher.close()

    run(main)


def test_a_socket_that_cannot_be_had_is_reported_and_harms_nobody() -> None:
    async def main(bench: Bench) -> None:
        publisher, other = WirePublisher(), Bench()
        bench.context, none = other.context, bench.context  # as a gateway's feeds share one
        none.term()
        source = EventSource(endpoint="tcp://203.0.113.9:1", is_bound_by_us=True)
        async with other.following(publisher.source()):
            await other.subscribed(publisher)
            async with bench.following(source):
                await bench.until(lambda: bench.has(FeedFailed))
                await publisher.publish(payload(block(7)))
                await other.until(lambda: other.held() == 1)
        assert not other.has(FeedFailed)
        await publisher.close()
        other.publishers.destroy(linger=0)

    run(main)


def test_a_publisher_that_connects_is_awaited_on_a_bound_socket() -> None:
    async def main(bench: Bench) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:  # free again at once when closed
            port = probe.getsockname()[1]
        source = EventSource(endpoint=f"tcp://127.0.0.1:{port}", is_bound_by_us=True)
        async with bench.following(source):
            live = bench.publishers.socket(zmq.PUB)
            live.connect(source.endpoint)
            seq = 0
            while bench.held() == 0:
                await live.send_multipart([b"", seq.to_bytes(8, "big"), payload(block(seq))])
                seq += 1
                await asyncio.sleep(0.01)
            assert not bench.has(FeedFailed)
            live.close(linger=0)

    run(main, replay_timeout_ms=50.0)


class _Recording(zmq.Context[zmq.Socket[bytes]]):
    """Keeps every socket it makes, so that none is closed by the garbage collector instead."""

    made: list[Any]

    def socket(self, *args: Any, **kwargs: Any) -> Any:
        one = super().socket(*args, **kwargs)
        self.made.append(one)
        return one


def test_cancelling_a_feed_closes_its_sockets() -> None:
    async def main(bench: Bench) -> None:
        made: list[Any] = []
        bench.context = _Recording()
        object.__setattr__(bench.context, "made", made)
        publisher = WirePublisher(is_mute=True)  # a replay stays open
        async with bench.following(publisher.source()):
            await bench.until(lambda: bool(publisher.asked))
        were_closed = [one.closed for one in made]
        for one in made:  # or ending the context would wait for ever, and hide what is asserted
            one.close(linger=0)
        await publisher.close()
        assert len(were_closed) >= 2, "the subscription and the replay"
        assert all(were_closed)

    run(main)


def test_c29_a_dead_subscriber_costs_a_publisher_its_ring_and_learns_anew_what_is_left() -> None:
    async def main(bench: Bench) -> None:
        publisher = ZmqEventPublisher(SystemClock(), buffer_batches=50)
        dead = bench.publishers.socket(zmq.SUB)
        dead.setsockopt(zmq.RCVHWM, 1)
        dead.subscribe(b"")
        dead.connect(publisher.endpoint)
        try:
            for number in range(20_000):
                publisher.publish([_stored(number)])
            assert len(publisher._kept) == 50
            source = EventSource(
                endpoint=publisher.endpoint,
                replay_endpoint=publisher.replay_endpoint,
                topic=publisher.topic,
            )
            async with bench.following(source):
                await bench.until(lambda: bench.held() == 50)
                assert bench.feed.stats.late_replays == 1
        finally:
            publisher.close()

    run(main)


def _stored(number: int) -> RunStored:
    return RunStored(
        hashes=(number.to_bytes(32, "big"),),
        parent=None,
        tokens=array("I", [number, 0]),
        block_tokens=2,
        tier=Tier.DEVICE,
        salt=NAMESPACE.salt,
    )
