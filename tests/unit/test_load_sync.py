"""What gateways tell one another of the work at their workers, and what each makes of it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from hand_clock import HandClock
from trunkline.control import load_sync
from trunkline.control.load_sync import FRESH_MS, MAX_TELLERS, MAX_TOLD_MS, LoadSync
from trunkline.core.fleet import Fleet, WorkerState
from trunkline.core.records import Slot, WorkerId

W1, W2 = WorkerId("w1:8000"), WorkerId("w2:8000")


class Air:
    """All wires are one."""

    def __init__(self) -> None:
        self.ears: list[Callable[[bytes], None]] = []

    async def send(self, body: bytes) -> None:
        self.cry(body)

    def hear(self, on_body: Callable[[bytes], None]) -> None:
        self.ears.append(on_body)

    def cry(self, body: bytes) -> None:
        for on_body in self.ears:
            on_body(body)


class Desk:
    """One gateway: its fleet and its load sync."""

    def __init__(self, life: str, air: Air, clock: HandClock, *, is_turned: bool = False) -> None:
        self.clock = clock
        self.air = air
        self.fleet = Fleet(virtual_nodes=64, now=clock.now())
        workers = [W2, W1] if is_turned else [W1, W2]
        for number, worker in enumerate(workers):
            self.fleet.add(WorkerState(worker=worker, slot=Slot(number), block_tokens=16))
        self.sync = LoadSync(life, air, clock)
        self.sync._fleets = [self.fleet]

    def start(self, ticket: int, ms: float, worker: WorkerId = W1) -> None:
        self.state(worker).queue.start(ticket, ms, self.clock.now())

    def state(self, worker: WorkerId = W1) -> WorkerState:
        state = self.fleet.get(worker)
        assert state is not None
        return state

    def queue_ms(self, worker: WorkerId = W1) -> float:
        return self.state(worker).queue.queue_ms(self.clock.now())

    def beat(self) -> bool:
        """Whether there was anything to tell."""
        body = self.sync.word(self.clock.now())
        if body is not None:
            self.air.cry(body)
        self.sync.settle(self.clock.boot())
        return body is not None


@pytest.fixture(name="desks")
def three_gateways() -> list[Desk]:
    air, clock = Air(), HandClock()
    return [Desk(f"g{number}", air, clock, is_turned=number == 1) for number in range(3)]


def test_all_gateways_predict_the_same_queue(desks: list[Desk]) -> None:
    for number, desk in enumerate(desks):
        desk.start(1, 100.0 * (number + 1))
    desks[2].start(2, 50.0, W2)
    for desk in desks:
        desk.beat()
    assert [desk.queue_ms() for desk in desks] == [600.0] * 3
    assert [desk.queue_ms(W2) for desk in desks] == [50.0] * 3


def test_what_is_told_is_the_own_book_alone_and_does_not_go_round(desks: list[Desk]) -> None:
    desks[0].start(1, 100.0)
    for _ in range(20):
        for desk in desks:
            desk.beat()
    assert [desk.queue_ms() for desk in desks] == [100.0] * 3


def test_what_ended_is_told_once_and_then_there_is_silence(desks: list[Desk]) -> None:
    one, other, _ = desks
    one.start(1, 100.0)
    assert one.beat()
    one.state().queue.end(1, one.clock.now())
    assert one.beat()
    assert other.queue_ms() == 0.0
    assert not one.beat()


def test_a_gateway_that_is_gone_counts_no_more_after_half_a_second(desks: list[Desk]) -> None:
    one, other, _ = desks
    one.start(1, 10_000.0)
    one.beat()
    other.clock.ms += FRESH_MS
    other.beat()
    assert other.queue_ms() == 10_000.0
    other.clock.ms += 1.0
    other.beat()
    assert other.queue_ms() == 0.0


def test_where_the_worker_reports_more_that_counts(desks: list[Desk]) -> None:
    one, other, _ = desks
    one.start(1, 100.0)
    one.beat()
    queue = other.state().queue
    queue.typical_ms = 40.0
    queue.correct(2)
    assert other.queue_ms() == 100.0, "two of 40 ms are less"
    queue.correct(5)
    assert other.queue_ms() == 200.0
    queue.correct(0)
    assert other.queue_ms() == 100.0


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"nonsense",
        msgspec.msgpack.encode(["evil", {"w1:8000": -1.0}]),
        msgspec.msgpack.encode(["evil", {"w1:8000": MAX_TOLD_MS + 1.0}]),
        msgspec.msgpack.encode(["evil", {"w1:8000": float("nan")}]),
        msgspec.msgpack.encode(["evil", {"w1:8000": float("inf")}]),
        msgspec.msgpack.encode(["", {}]),
        msgspec.msgpack.encode(["evil", {"x" * 257: 1.0}]),
    ],
)
def test_what_makes_no_sense_is_refused_and_counted(desks: list[Desk], body: bytes) -> None:
    desks[0].sync.take(body)
    assert desks[0].sync.refused == 1
    assert desks[0].queue_ms() == 0.0


def test_too_many_tellers_or_workers_are_not_taken(
    desks: list[Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = desks[0]
    for number in range(MAX_TELLERS + 3):
        here.sync.take(msgspec.msgpack.encode([f"t{number}", {W1: 1.0}]))
    assert (here.sync.refused, here.queue_ms()) == (3, float(MAX_TELLERS))
    monkeypatch.setattr(load_sync, "MAX_TOLD_WORKERS", 1)
    for worker in (W1, W2):
        here.start(1, 5.0, worker)
    body = here.sync.word(here.clock.now())
    assert body is not None
    assert msgspec.msgpack.decode(body) == ["g0", {W1: 5.0}, []]


def test_homes_are_the_same_at_all_gateways_whatever_order_they_learnt_the_workers_in(
    desks: list[Desk],
) -> None:
    keys = [number.to_bytes(4, "big") * 8 for number in range(0, 1 << 32, 1 << 24)]
    homes = [[desk.fleet.ring.homes(key) for key in keys] for desk in desks]
    assert homes[0] == homes[1] == homes[2]
    assert len({tuple(home) for home in homes[0]}) > 1
