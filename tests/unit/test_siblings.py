"""Gateways tell one another what workers hold, over calls that are lost, late, damaged or false."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from feed_desk import NAMESPACE, WORKER, Desk, batch, gone, namespace, run

from trunkline.control import siblings
from trunkline.control.sibling_words import (
    MAX_FRAME_BYTES,
    Ask,
    Made,
    Offer,
    Piece,
    Seal,
    heard,
    told,
)
from trunkline.control.siblings import MAX_ANSWERS, MAX_SNAPSHOTS, SiblingParts, Siblings, Side
from trunkline.core.epochs import EpochTable, Subject, SubjectKind
from trunkline.core.events import EventBatch
from trunkline.core.handover import Lineage
from trunkline.core.keys import as_tokens, chain
from trunkline.core.records import NamespaceTag
from trunkline.observe import EventLog
from trunkline.ports.board import Answer
from trunkline.ports.store import StoreDown
from virtual_loop import LoopClock, VirtualLoop

ROOT = b"r" * 32
Damage = Callable[[bytes], bytes | None]


@dataclass
class Wire:
    """All gateways' calls, in one process; answers may be damaged, or lost."""

    heard: list[Callable[[bytes, Answer], None]] = field(default_factory=list)
    damage: Damage = lambda frame: frame
    frames: list[bytes] = field(default_factory=list)

    async def call(self, body: bytes, wait_s: float) -> bytes:
        first: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        answers = self.frames

        async def answer(body: bytes) -> None:
            answers.append(body)
            damaged = self.damage(body)
            if damaged is not None and not first.done():
                first.set_result(damaged)

        for on_call in list(self.heard):
            on_call(body, answer)
        try:
            async with asyncio.timeout(wait_s):
                return await first
        except TimeoutError as error:
            raise StoreDown("nobody answers") from error

    def answer(self, on_call: Callable[[bytes, Answer], None]) -> None:
        self.heard.append(on_call)


@dataclass
class Names:
    """The namespaces of one gateway."""

    desk: Desk
    known: dict[NamespaceTag, str] = field(default_factory=lambda: {NAMESPACE.tag: "t"})

    def lineage(self, tag: NamespaceTag) -> Lineage | None:
        name = self.known.get(tag)
        if name is None:
            return None
        made = namespace(name)
        subjects = (Subject(kind=SubjectKind.TENANT, path=name),)
        return Lineage(
            tag=made.tag,
            scope=made.scope,
            epochs=made.epochs,
            adapter="",
            block_tokens=2,
            subjects=subjects,
        )

    def take_in(self, told: Lineage, table: EpochTable) -> bool:
        made = namespace(told.scope.tenant)
        if made.tag == told.tag and table.epochs_of(told.subjects) == told.epochs:
            self.known[made.tag] = told.scope.tenant
            self.desk.directory.admit_namespace(made)
        return made.tag == told.tag

    def know(self, name: str) -> None:
        self.known[namespace(name).tag] = name
        self.desk.directory.admit_namespace(namespace(name))


class Gateway:
    """One of them, with what it heard of one worker."""

    def __init__(self, name: str, wire: Wire, group: asyncio.TaskGroup, root: bytes = ROOT) -> None:
        self.desk = Desk(can_replay=False)
        self.names = Names(self.desk)
        self.table = EpochTable()
        self.block_tokens = 2
        side = Side(
            directory=self.desk.directory,
            names=self.names,
            feeds={WORKER: self.desk.feed},
            block_tokens=lambda _worker: self.block_tokens,
        )
        self.clock = LoopClock(asyncio.get_running_loop())
        self.seal = Seal(root)

        def begin(work: Coroutine[Any, Any, None], _name: str) -> object:
            return group.create_task(work)

        self.siblings = Siblings(
            SiblingParts(
                life=name,
                calls=wire,
                seal=self.seal,
                clock=self.clock,
                log=EventLog("test"),
                begin=begin,
                others=lambda: 1,
                table=lambda: self.table,
                draw=lambda size: name.encode().ljust(size, b"x")[:size],
            ),
            [side],
        )

    def hear(self, *batches: EventBatch) -> None:
        self.desk.live(*batches, now=self.clock.now())

    async def tick(self) -> None:
        while True:
            await asyncio.sleep(0.02)
            self.desk.tick(self.clock.now())


HISTORY = (
    batch(0, run(1, 2, 3)),
    batch(1, run(7), run(20, salt=namespace("other").salt)),
    batch(2, run(8, parent=3)),
)


def play(
    scene: Callable[[Gateway, Gateway, Wire], Coroutine[Any, Any, None]],
    root: bytes = ROOT,
    *,
    history: Sequence[EventBatch] = HISTORY,
) -> None:
    """One that heard all, and one that has only just come and heard the last batch."""

    async def all_of_it() -> None:
        wire = Wire()
        async with asyncio.TaskGroup() as group:
            knows, late = Gateway("knows", wire, group), Gateway("late", wire, group, root)
            knows.names.know("other")
            knows.hear(*history)
            late.hear(HISTORY[-1])
            beside = [
                group.create_task(work)
                for one in (knows, late)
                for work in (one.tick(), one.siblings.run())
            ]
            await scene(knows, late, wire)
            for task in beside:
                task.cancel()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(all_of_it())


def depth(gateway: Gateway, tenant: str, *names: int) -> int:
    prompt = chain(namespace(tenant), as_tokens(n for n in names for _ in range(2)))
    directory = gateway.desk.directory
    return directory.match(prompt).resident[directory.slot(WORKER)]


def test_who_comes_late_knows_all_and_the_namespaces_too() -> None:
    async def scene(knows: Gateway, late: Gateway, _wire: Wire) -> None:
        await asyncio.sleep(1.0)
        assert late.siblings.stats.taken == knows.siblings.stats.told == 1
        assert (depth(late, "t", 1, 2, 3, 8), depth(late, "other", 20)) == (4, 1)
        for one in (knows, late):
            one.hear(batch(3, run(9, parent=8), gone(7)))
            await asyncio.sleep(0.1)
            assert (depth(one, "t", 1, 2, 3, 8, 9), depth(one, "t", 7)) == (5, 0)
        await asyncio.sleep(120.0)
        assert late.siblings.stats.taken == 1, "nothing is missing any more"

    play(scene)


def test_batches_that_come_meanwhile_are_all_applied_once() -> None:
    async def scene(knows: Gateway, late: Gateway, wire: Wire) -> None:
        seq = 3

        def more(frame: bytes) -> bytes:
            nonlocal seq
            for one in (knows, late):
                one.hear(batch(seq, run(100 + seq)))
            seq += 1
            return frame

        wire.damage = more
        await asyncio.sleep(2.0)
        assert late.siblings.stats.taken == 1
        for one in (knows, late):
            one.desk.tick(one.clock.now())
            assert [depth(one, "t", 100 + at) for at in range(3, seq)] == [1] * (seq - 3)

    play(scene)


@pytest.mark.parametrize("kind", [Offer, Made, Piece])
def test_what_is_damaged_on_its_way_changes_nothing(kind: type) -> None:
    async def scene(knows: Gateway, late: Gateway, wire: Wire) -> None:
        def flip(frame: bytes) -> bytes:
            is_meant = isinstance(knows.seal.open(frame), kind)
            return frame[:-1] + bytes([frame[-1] ^ 1]) if is_meant else frame

        wire.damage = flip
        await asyncio.sleep(30.0)
        assert (late.siblings.stats.taken, late.desk.held()) == (0, 0)
        assert late.siblings.stats.failed > 0
        late.hear(batch(3, run(9)))
        assert depth(late, "t", 9) == 1, "it goes on with what it hears"

    play(scene)


@pytest.mark.parametrize("kind", [Offer, Made, Piece])
def test_an_answer_that_never_comes_costs_time_alone(kind: type) -> None:
    async def scene(knows: Gateway, late: Gateway, wire: Wire) -> None:
        wire.damage = lambda frame: None if isinstance(knows.seal.open(frame), kind) else frame
        await asyncio.sleep(20.0)
        assert late.siblings.stats.taken == 0
        wire.damage = lambda frame: frame
        await asyncio.sleep(200.0)
        assert (late.siblings.stats.taken, depth(late, "t", 1, 2, 3, 8)) == (1, 4)

    play(scene)


def test_an_old_answer_answers_nothing() -> None:
    async def scene(knows: Gateway, late: Gateway, wire: Wire) -> None:
        await asyncio.sleep(1.0)
        assert late.siblings.stats.taken == 1
        old = list(wire.frames)
        late.desk.directory.clear(WORKER)
        late.desk.feed.standstill.end()
        late.siblings._parts = type(late.siblings._parts)(  # another number to each question
            **{
                name: getattr(late.siblings._parts, name)
                for name in late.siblings._parts.__slots__
                if name != "draw"
            },
            draw=lambda size: b"n" * size,
        )
        by_kind = {type(late.seal.open(frame)): frame for frame in old}
        wire.damage = lambda frame: by_kind[type(late.seal.open(frame))]
        late.hear(batch(9, run(9)))  # a gap: something is missing again
        await asyncio.sleep(30.0)
        assert late.siblings.stats.taken == 1

    play(scene)


def test_a_gateway_with_another_secret_neither_tells_nor_is_told() -> None:
    async def scene(knows: Gateway, late: Gateway, wire: Wire) -> None:
        await asyncio.sleep(30.0)
        assert (knows.siblings.stats.told, late.siblings.stats.taken, wire.frames) == (0, 0, [])
        assert knows.seal.refused > 0

    play(scene, root=b"q" * 32)


def test_a_gateway_that_lacks_a_namespace_lets_one_that_lacks_none_tell_first() -> None:
    async def scene(knows: Gateway, late: Gateway, wire: Wire) -> None:
        async with asyncio.TaskGroup() as group:
            lacks = Gateway("lacks", wire, group)
            lacks.hear(*HISTORY)
            wire.heard.reverse()  # it is asked first
            await asyncio.sleep(1.5)
            assert (knows.siblings.stats.told, lacks.siblings.stats.told) == (1, 0)
            assert (depth(late, "t", 1, 2, 3, 8), depth(late, "other", 20)) == (4, 1)

    play(scene)


def test_a_gateway_that_lacks_a_namespace_tells_where_no_other_does() -> None:
    async def scene(knows: Gateway, late: Gateway, _wire: Wire) -> None:
        knows.hear(batch(3, run(40, salt=namespace("nobody").salt)))
        late.hear(batch(3, run(40, salt=namespace("nobody").salt)))
        await asyncio.sleep(1.5)
        assert (late.siblings.stats.taken, depth(late, "t", 1, 2, 3, 8)) == (1, 4)

    play(scene)


def test_what_one_has_a_doubt_of_it_does_not_tell() -> None:
    async def scene(knows: Gateway, late: Gateway, _wire: Wire) -> None:
        knows.hear(batch(3, run(31, parent=30)))  # an orphan
        late.hear(batch(3, run(31, parent=30)))
        await asyncio.sleep(4.0)
        assert (knows.siblings.stats.told, late.siblings.stats.taken) == (0, 0)
        await asyncio.sleep(60.0)
        assert late.siblings.stats.taken == 1, "it was given up"

    play(scene)


def test_another_life_of_the_worker_is_not_taken_for_this_one() -> None:
    async def scene(knows: Gateway, late: Gateway, _wire: Wire) -> None:
        late.desk.live(batch(0, run(1), life=5), batch(1, life=5), now=late.clock.now())
        late.desk.live(*(batch(seq, life=5) for seq in (2, 4, 5)), now=late.clock.now())
        knows.hear(batch(3), batch(4), batch(5))
        await asyncio.sleep(30.0)
        assert (late.siblings.stats.taken, depth(late, "t", 1, 2)) == (0, 0)
        assert late.siblings.stats.failed > 0

    play(scene)


@pytest.mark.parametrize("is_back", [False, True])
def test_a_worker_may_leave_while_it_is_told_of(is_back: bool) -> None:
    async def scene(_knows: Gateway, late: Gateway, wire: Wire) -> None:
        directory = late.desk.directory

        def leave(frame: bytes) -> bytes:
            if isinstance(late.seal.open(frame), Piece) and directory.knows(WORKER):
                directory.leave(WORKER)
                if is_back:
                    directory.join(WORKER, block_tokens=2)
            return frame

        wire.damage = leave
        await asyncio.sleep(10.0)
        assert (late.siblings.stats.taken, late.siblings.stats.failed) == (0, 1)
        assert not is_back or directory.held_count(WORKER) == 0

    play(scene)


def test_blocks_of_another_size_are_another_matter() -> None:
    async def scene(knows: Gateway, late: Gateway, _wire: Wire) -> None:
        knows.block_tokens = 16
        await asyncio.sleep(10.0)
        assert (knows.siblings.stats.told, late.siblings.stats.taken) == (0, 0)

    play(scene)


def test_a_namespace_whose_epoch_was_raised_here_is_not_known_by_anothers_word() -> None:
    async def scene(_knows: Gateway, late: Gateway, _wire: Wire) -> None:
        tenant = Subject(kind=SubjectKind.TENANT, path="other")
        late.table = EpochTable().raised(tenant, 1, rev=1, bars=True)
        await asyncio.sleep(2.0)
        assert late.siblings.stats.taken == 1
        assert (depth(late, "t", 1, 2, 3), depth(late, "other", 20)) == (3, 0)
        assert not late.desk.directory.knows_namespace(namespace("other").tag)
        late.hear(batch(3, run(21, parent=20)))
        assert late.desk.feed.parked_count == 0, "what descends from it waits for nobody"

    play(scene)


def test_what_nobody_fetches_is_forgotten_and_bounded() -> None:
    async def scene(knows: Gateway, late: Gateway, wire: Wire) -> None:
        wire.damage = lambda frame: None if isinstance(knows.seal.open(frame), Piece) else frame
        for _ in range(300):
            await asyncio.sleep(1.0)
            assert len(knows.siblings._snapshots) <= MAX_SNAPSHOTS
        late.desk.feed.standstill.end()
        late.desk.directory.leave(WORKER)
        await asyncio.sleep(60.0)
        assert not knows.siblings._snapshots

    play(scene)


@pytest.mark.parametrize(("first", "told_count"), [(0, 1), (1, 1), (2, 0)])
def test_who_knows_no_more_than_who_asks_tells_nothing(first: int, told_count: int) -> None:
    async def scene(knows: Gateway, late: Gateway, _wire: Wire) -> None:
        await asyncio.sleep(10.0)
        assert knows.siblings.stats.told == late.siblings.stats.taken == told_count

    play(scene, history=HISTORY[first:])


def test_what_is_told_of_one_worker_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    async def scene(knows: Gateway, late: Gateway, wire: Wire) -> None:
        await asyncio.sleep(1.0)
        pieces = [frame for frame in wire.frames if isinstance(knows.seal.open(frame), Piece)]
        sizes.append(sum(map(len, pieces)))

    play(scene)
    for bound, told_size in ((sizes[0], sizes[0]), (sizes[0] - 1, 0)):
        monkeypatch.setattr(siblings, "MAX_SNAPSHOT_BYTES", bound)
        play(scene)
        assert sizes[-1] == told_size


def test_namespaces_beyond_the_bound_of_a_piece_are_not_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(siblings, "MAX_LINEAGE_BYTES", 0)

    async def scene(_knows: Gateway, late: Gateway, _wire: Wire) -> None:
        await asyncio.sleep(1.0)
        assert late.siblings.stats.taken == 1
        assert (depth(late, "t", 1, 2, 3, 8), depth(late, "other", 20)) == (4, 0)

    play(scene)


def test_only_so_many_questions_are_answered_at_a_time() -> None:
    async def scene(knows: Gateway, _late: Gateway, _wire: Wire) -> None:
        ask = Ask(life="x", number="n", worker=WORKER, block_tokens=2, seq=0, knows_since=1)
        answered, may_end = 0, asyncio.Event()

        async def answer(body: bytes) -> None:
            nonlocal answered
            answered += bool(body)
            await may_end.wait()

        for _ in range(3 * MAX_ANSWERS):
            knows.siblings._heard(knows.seal.close(ask), answer)
        await asyncio.sleep(0.1)
        assert answered == MAX_ANSWERS
        may_end.set()
        await asyncio.sleep(0.1)
        knows.siblings._heard(knows.seal.close(ask), answer)
        await asyncio.sleep(0.1)
        assert answered == MAX_ANSWERS + 1

    play(scene)


def test_words_have_bounds() -> None:
    seal = Seal(ROOT)
    offer = Offer(number="n", life="l")
    assert seal.open(seal.close(offer)) == offer
    assert seal.open(b"") is None
    huge = Piece(number="n", index=0, packed=bytes(MAX_FRAME_BYTES))
    assert seal.open(seal.close(huge)) is None
    assert seal.open(seal.close(Offer(number="", life="l"))) is None
    assert seal.open(seal.close(Offer(number="n", life="l" * 513))) is None
    assert seal.refused == 4


def test_a_lineage_that_makes_no_sense_is_none() -> None:
    desk = Desk()
    lineage = Names(desk).lineage(NAMESPACE.tag)
    assert lineage is not None
    word = told(lineage)
    assert heard(word) == lineage
    assert heard(msgspec.structs.replace(word, scope=("odd", *word.scope[1:]))) is None
    assert heard(msgspec.structs.replace(word, subjects=(("tenant", ""),))) is None
