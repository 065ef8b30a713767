"""Whether a feed has a connection of its own, as it tells whoever would hear it over others."""

from __future__ import annotations

import asyncio
import socket

import zmq
import zmq.asyncio
from event_desk import WORKER, Bench, block, payload, run

from trunkline.adapters.clock import SystemClock
from trunkline.adapters.zmq_events import run_feed
from trunkline.core.records import WorkerId
from trunkline.ports.relay import Ear
from trunkline.ports.worker import EventSource


class Links:
    """What the feed says. A `ports.relay.Relays`, and the `Line` of its one worker."""

    def __init__(self) -> None:
        self.is_up = False
        self.made_count = 0

    def open(self, worker: WorkerId, ear: Ear) -> Links:
        assert worker == WORKER
        return self

    def link(self, is_up: bool) -> None:
        self.is_up = is_up
        self.made_count += is_up

    def heard(self, seq: int, payload: bytes) -> None:
        pass

    def close(self) -> None:
        pass


def test_an_old_life_that_hangs_up_late_does_not_part_a_bound_socket_from_the_new_one() -> None:
    async def main(bench: Bench) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:  # free again at once when closed
            port = probe.getsockname()[1]
        source = EventSource(endpoint=f"tcp://127.0.0.1:{port}", is_bound_by_us=True)
        links = Links()
        async with asyncio.TaskGroup() as group:
            following = group.create_task(
                run_feed(
                    source,
                    bench.feed,
                    SystemClock(),
                    bench.actions.append,
                    context=bench.context,
                    relays=links,
                )
            )
            old, new = (bench.publishers.socket(zmq.PUB) for _ in range(2))
            old.connect(source.endpoint)
            await bench.until(lambda: links.made_count == 1)
            new.connect(source.endpoint)
            await bench.until(lambda: links.made_count == 2)
            old.close(linger=0)
            before, seq = bench.feed.stats.batches, 0
            while bench.feed.stats.batches < before + 20:
                await new.send_multipart([b"", seq.to_bytes(8, "big"), payload(block(seq))])
                seq += 1
                await asyncio.sleep(0.01)
            assert links.is_up, "its events come here"
            new.close(linger=0)
            await bench.until(lambda: not links.is_up)
            following.cancel()

    run(main, replay_timeout_ms=50.0)
