"""A gateway hears a worker's events over another one, over calls that are lost, late or damaged."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from test_siblings import Wire

from trunkline.adapters.aes_gcm import LifeCipher
from trunkline.control.relays import (
    APART_MS,
    MAX_BATCH_BYTES,
    MAX_KEPT_BATCHES,
    WANTED_MS,
    GatewayRelays,
    RelayParts,
)
from trunkline.control.sibling_words import Relayed, Seal
from trunkline.core.records import WorkerId
from trunkline.observe import EventLog
from virtual_loop import LoopClock, VirtualLoop

ROOT = b"r" * 32
WORKER = WorkerId("w")
BROKEN = b"broken"
SETTLED_S = APART_MS / 1_000.0 + 1.5


class Gateway:
    """One of them: what its own connection hears, and what it is told. A `ports.relay.Ear`."""

    def __init__(self, name: str, wire: Wire, group: asyncio.TaskGroup, root: bytes = ROOT) -> None:
        self.seal = Seal(root)
        self.drawn = 0
        self.said: list[object] = []
        self.relays = GatewayRelays(
            RelayParts(
                life=name,
                calls=wire,
                seal=self.seal,
                cipher=LifeCipher(root, name),
                clock=LoopClock(asyncio.get_running_loop()),
                log=EventLog("test"),
                begin=lambda work, _name: group.create_task(work),
                others=lambda: 1,
                draw=self._draw,
            )
        )
        self.line = self.relays.open(WORKER, self)

    def _draw(self, size: int) -> bytes:
        self.drawn += 1
        return self.drawn.to_bytes(size, "big")

    def relay_up(self) -> None:
        self.said.append("up")

    def relayed(self, seq: int, payload: bytes) -> None:
        if payload == BROKEN:
            raise ValueError("an ear's own fault")
        self.said.append((seq, payload))

    def relay_down(self) -> None:
        self.said.append("down")

    def hear(self, *seqs: int) -> None:
        for seq in seqs:
            self.line.heard(seq, b"batch %d" % seq)


def batches(*seqs: int) -> list[object]:
    return [(seq, b"batch %d" % seq) for seq in seqs]


Scene = Callable[[Gateway, Gateway, Wire], Coroutine[Any, Any, None]]


def play(scene: Scene, root: bytes = ROOT) -> None:
    """One gateway that hears the worker, and one that cannot."""

    async def all_of_it() -> None:
        wire = Wire()
        async with asyncio.TaskGroup() as group:
            hears, deaf = Gateway("hears", wire, group), Gateway("deaf", wire, group, root)
            hears.line.link(True)
            beside = [group.create_task(one.relays.run()) for one in (hears, deaf)]
            await scene(hears, deaf, wire)
            deaf.line.close()
            for task in beside:
                task.cancel()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(all_of_it())


def test_batches_come_in_order_and_once_from_when_it_listens() -> None:
    async def scene(hears: Gateway, deaf: Gateway, _wire: Wire) -> None:
        hears.hear(0, 1)
        await asyncio.sleep(APART_MS / 1_000.0 - 0.1)
        assert not deaf.relays.listening_count, "a lost connection mostly comes back by itself"
        await asyncio.sleep(SETTLED_S)
        assert deaf.said == ["up"]
        for seq in range(2, 50, 3):
            hears.hear(seq, seq + 1, seq + 2)
            await asyncio.sleep(0.3 * (seq % 7))
        await asyncio.sleep(2.0)
        assert deaf.said[1:] == batches(*range(2, 50))
        assert deaf.relays.stats.heard == hears.relays.stats.told == 48

    play(scene)


def test_many_batches_at_once_come_in_bounded_answers() -> None:
    async def scene(hears: Gateway, deaf: Gateway, wire: Wire) -> None:
        await asyncio.sleep(SETTLED_S)
        before = len(wire.frames)
        for seq in range(8):
            hears.line.heard(seq, bytes([seq]) * 200_000)
        await asyncio.sleep(2.0)
        assert [one[0] for one in deaf.said[1:] if isinstance(one, tuple)] == list(range(8))
        sizes = [len(frame) for frame in wire.frames[before:]]
        assert len([size for size in sizes if size > 200_000]) == 4
        assert max(sizes) < 500_000

    play(scene)


def test_its_own_connection_comes_first() -> None:
    async def scene(hears: Gateway, deaf: Gateway, _wire: Wire) -> None:
        await asyncio.sleep(SETTLED_S)
        deaf.line.link(True)
        hears.hear(0)
        await asyncio.sleep(2.0)
        assert deaf.said == ["up"]
        assert not deaf.relays.listening_count
        deaf.line.link(False)
        await asyncio.sleep(SETTLED_S)
        hears.hear(1)
        await asyncio.sleep(1.0)
        assert deaf.said == ["up", "up", *batches(1)]

    play(scene)


def test_who_hears_it_over_another_gateway_tells_nobody() -> None:
    async def scene(hears: Gateway, deaf: Gateway, _wire: Wire) -> None:
        await asyncio.sleep(SETTLED_S)
        hears.line.link(False)
        await asyncio.sleep(3.0 * SETTLED_S)
        assert deaf.said == ["up", "down"]
        assert hears.said == []
        hears.line.link(True)
        await asyncio.sleep(40.0)
        hears.hear(9)
        await asyncio.sleep(1.0)
        assert deaf.said[2:] == ["up", *batches(9)]

    play(scene)


def test_a_batch_that_was_not_kept_breaks_the_stream_and_none_is_left_out_in_silence() -> None:
    def losing(lose: Callable[[Gateway], None]) -> Scene:
        async def scene(hears: Gateway, deaf: Gateway, _wire: Wire) -> None:
            await asyncio.sleep(SETTLED_S)
            lose(hears)
            await asyncio.sleep(3.0)
            hears.hear(5_000)
            await asyncio.sleep(1.0)
            assert deaf.said[:3] == ["up", "down", "up"]
            assert deaf.said[-1:] == batches(5_000)

        return scene

    play(losing(lambda hears: hears.line.heard(0, bytes(MAX_BATCH_BYTES + 1))))
    play(losing(lambda hears: hears.hear(*range(MAX_KEPT_BATCHES + 1))))


def test_as_many_batches_as_are_kept_do_not_break_it() -> None:
    async def scene(hears: Gateway, deaf: Gateway, _wire: Wire) -> None:
        await asyncio.sleep(SETTLED_S)
        hears.line.heard(0, bytes(MAX_BATCH_BYTES))
        hears.hear(*range(1, MAX_KEPT_BATCHES))
        await asyncio.sleep(3.0)
        assert "down" not in deaf.said
        assert len(deaf.said) == 1 + MAX_KEPT_BATCHES

    play(scene)


def test_lost_and_damaged_answers_break_it_and_it_begins_again() -> None:
    async def scene(hears: Gateway, deaf: Gateway, wire: Wire) -> None:
        await asyncio.sleep(SETTLED_S)
        for damage in (lambda _: None, lambda frame: frame[:-1] + bytes([frame[-1] ^ 1])):
            wire.damage = damage
            hears.hear(0)
            await asyncio.sleep(6.0)
            assert deaf.said[-1] == "down"
            wire.damage = lambda frame: frame
            await asyncio.sleep(40.0)
            assert deaf.said[-1] == "up"
        hears.hear(1)
        await asyncio.sleep(1.0)
        assert deaf.said[-1:] == batches(1)
        assert deaf.seal.refused > 0

    play(scene)


def test_a_gateway_of_another_fleet_is_told_nothing_and_no_frame_shows_a_batch() -> None:
    async def scene(hears: Gateway, deaf: Gateway, wire: Wire) -> None:
        await asyncio.sleep(10.0)
        assert deaf.said == []
        assert hears.seal.refused > 0
        assert not wire.frames

    play(scene, root=b"x" * 32)

    async def seen(hears: Gateway, _deaf: Gateway, wire: Wire) -> None:
        await asyncio.sleep(SETTLED_S)
        hears.hear(7)
        await asyncio.sleep(1.0)
        told = [hears.seal.open(frame) for frame in wire.frames]
        assert any(isinstance(word, Relayed) and word.sealed for word in told)
        assert not any(b"batch 7" in frame for frame in wire.frames)

    play(seen)


def test_an_ear_that_breaks_hears_that_it_hears_no_more_and_begins_again() -> None:
    async def scene(hears: Gateway, deaf: Gateway, _wire: Wire) -> None:
        await asyncio.sleep(SETTLED_S)
        hears.line.heard(0, BROKEN)
        await asyncio.sleep(1.0)
        assert deaf.said == ["up", "down"]
        await asyncio.sleep(2.0 * SETTLED_S)
        hears.hear(1)
        await asyncio.sleep(1.0)
        assert deaf.said[2:] == ["up", *batches(1)]

    play(scene)


def test_nothing_is_kept_once_nobody_listens() -> None:
    async def scene(hears: Gateway, deaf: Gateway, _wire: Wire) -> None:
        await asyncio.sleep(SETTLED_S)
        deaf.line.link(True)
        await asyncio.sleep(WANTED_MS / 1_000.0 + 2.0)
        end = hears.line.kept.end
        hears.hear(*range(10))
        assert hears.line.kept.end == end
        assert not hears.line.waiting

    play(scene)


def test_who_tells_and_is_connected_anew_says_that_the_stream_is_broken_there() -> None:
    async def scene(hears: Gateway, deaf: Gateway, _wire: Wire) -> None:
        await asyncio.sleep(SETTLED_S)
        hears.hear(5)
        await asyncio.sleep(0.5)
        hears.line.link(True)  # another life of the worker, before the old one hung up
        hears.hear(6)
        await asyncio.sleep(SETTLED_S)
        assert deaf.said == ["up", *batches(5), "down", "up"]

    play(scene)
