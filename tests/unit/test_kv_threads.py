"""The block store under real threads: an engine, pulls, readers and a revoker at the same time."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest

from kv_desk import SIZE, SOON, Desk, DiskDesk, chain, content, fill, manifests_at, owner
from trunkline.core.transfer import Reason
from trunkline.kv import Kept, Staging

TENANTS = [owner("a"), owner("b"), owner("c")]
PROMPTS = [(whose, chain(whose, 1_000 * number, 3)) for whose in TENANTS for number in range(3)]
ROUNDS = 300
REFUSED = (Reason.FULL, Reason.CHAIN, Reason.EPOCH)


@dataclass
class Crew:
    """Threads whose first failure is the test's."""

    failures: list[BaseException] = field(default_factory=list[BaseException])
    threads: list[threading.Thread] = field(default_factory=list[threading.Thread])

    def add(self, work: Callable[[Random], None], seed: int) -> None:
        def run() -> None:
            try:
                draw = Random(seed)
                for _ in range(ROUNDS):
                    work(draw)
            except BaseException as failure:  # noqa: BLE001  # told by `work_off`
                self.failures.append(failure)

        self.threads.append(threading.Thread(target=run, daemon=True))

    def work_off(self) -> None:
        for thread in self.threads:
            thread.start()
        for thread in self.threads:
            thread.join(120)
            assert not thread.is_alive()
        if self.failures:
            raise self.failures[0]


def put(desk: Desk, draw: Random) -> None:
    whose, places = draw.choice(PROMPTS)
    for place in places:
        outcome = desk.store.put(place, whose, content(place))
        assert isinstance(outcome, Kept) or outcome in REFUSED


def read(desk: Desk, draw: Random, load_until: float | None) -> None:
    whose, places = draw.choice(PROMPTS)
    assert 0 <= desk.hits(places, whose, load_until=load_until) <= 3


def pull(desk: Desk, source: Desk, draw: Random) -> None:
    whose, places = draw.choice(PROMPTS)
    staging = desk.store.stage(whose, places, until=SOON)
    if not isinstance(staging, Staging):
        assert staging is Reason.STAGING_FULL
        return
    fill(staging)
    is_damaged = draw.random() < 0.3
    if is_damaged:
        staging.buffer(1)[draw.randrange(SIZE)] ^= 1
    if draw.random() < 0.2:
        assert desk.store.abandon(staging.token)
        return
    published = desk.store.publish(staging.token, manifests_at(source.store, places, whose))
    assert published.count <= (1 if is_damaged else 3)


def check_at_the_end(desk: Desk) -> None:
    """Nothing is left over, and every byte is somewhere."""
    while desk.store.erase(64):
        pass
    desk.check_sums()
    figures = desk.store.figures()
    assert figures.staged_bytes == figures.writing_bytes == figures.pinned_bytes == 0
    assert figures.moving_bytes == figures.leaving_bytes == figures.quarantined_bytes == 0
    assert (figures.conflicts, figures.spoilt) == (0, 0)
    for whose, places in PROMPTS:
        desk.hits(places, whose)


def full_source() -> Desk:
    source = Desk(host_blocks=64)
    for whose, places in PROMPTS:
        source.put(places, whose)
    return source


@pytest.mark.parametrize("seed", range(3))
def test_engine_pulls_and_readers_share_a_store_without_a_wrong_byte(seed: int) -> None:
    desk, source, crew = Desk(host_blocks=10, staging_blocks=6), full_source(), Crew()
    for number in range(2):
        crew.add(lambda draw: put(desk, draw), 10 * seed + number)
        crew.add(lambda draw: read(desk, draw, None), 10 * seed + 3 + number)
        crew.add(lambda draw: pull(desk, source, draw), 10 * seed + 6 + number)
    crew.work_off()
    check_at_the_end(desk)


def test_the_same_with_a_disk_below(tmp_path: Path) -> None:
    desk = DiskDesk(root=tmp_path, host_blocks=8, staging_blocks=6, disk_blocks=12)
    source, crew = full_source(), Crew()
    crew.add(lambda draw: put(desk, draw), 1)
    crew.add(lambda draw: put(desk, draw), 2)
    crew.add(lambda draw: read(desk, draw, SOON), 3)
    crew.add(lambda draw: pull(desk, source, draw), 4)
    crew.work_off()
    desk.settle()
    check_at_the_end(desk)
    assert len(desk.files()) == desk.store.figures().disk_bytes // SIZE
    desk.store.close()


def test_nothing_of_a_revoked_tenant_is_found_or_published_after_the_revocation_returned(
    tmp_path: Path,
) -> None:
    desk = DiskDesk(root=tmp_path, host_blocks=8, staging_blocks=6, disk_blocks=12)
    source, crew = full_source(), Crew()
    revoked, (whose, places) = threading.Event(), PROMPTS[0]

    def check(draw: Random) -> None:
        was_revoked = revoked.is_set()
        pins = desk.pin(places, whose, load_until=SOON)
        assert not (was_revoked and pins.blocks)
        for place, block in zip(places, pins.blocks, strict=False):
            assert bytes(block.data) == content(place)
        desk.store.unpin(pins.token)

    def pull_mine(draw: Random) -> None:
        was_revoked = revoked.is_set()
        staging = desk.store.stage(whose, places, until=SOON)
        if isinstance(staging, Staging):
            fill(staging)
            manifests = manifests_at(source.store, places, whose)
            count = desk.store.publish(staging.token, manifests).count
            assert not (was_revoked and count)

    def put_mine(draw: Random) -> None:
        was_revoked = revoked.is_set()
        outcome = desk.store.put(places[0], whose, content(places[0]))
        assert not (was_revoked and isinstance(outcome, Kept))

    rounds = itertools.count()

    def revoke(draw: Random) -> None:
        if next(rounds) == ROUNDS // 3:
            desk.judge.epochs["tenant/a"] = 1
            desk.store.condemn(desk.judge.is_stale)
            revoked.set()
        desk.store.erase(2)

    crew.add(check, 1)
    crew.add(pull_mine, 2)
    crew.add(put_mine, 3)
    crew.add(lambda draw: put(desk, draw), 4)
    crew.add(revoke, 5)
    crew.work_off()
    assert revoked.is_set()
    desk.settle()
    while desk.store.erase(64):
        pass
    desk.settle()
    assert all(manifest.owner != whose for _, manifest in desk.store.resident())
    desk.check_sums()
    desk.store.close()


def test_two_writers_of_one_block_at_once_leave_one_of_them_whole() -> None:
    desk = Desk(host_blocks=64)
    crew, (whose, places) = Crew(), PROMPTS[0]
    contents = [bytes([number]) * SIZE for number in range(2)]
    kept: list[bytes] = []

    def write(data: bytes) -> None:
        if isinstance(desk.store.put(places[0], whose, data), Kept):
            kept.append(data)

    crew.add(lambda draw: write(contents[0]), 1)
    crew.add(lambda draw: write(contents[1]), 2)
    crew.work_off()
    assert len(set(kept)) == 1
    pins = desk.pin(places[:1], whose)
    assert bytes(pins.blocks[0].data) == kept[0]
    desk.store.unpin(pins.token)
    assert desk.store.figures().conflicts == len(desk.alarms) == ROUNDS
    desk.check_sums()
