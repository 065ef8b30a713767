"""What other gateways' indexes got wrong (C28, C36 to C40), on directory, feed and picker."""

from __future__ import annotations

import random
import sys
import threading
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count

from fair_world import asks
from picker_bench import BLOCK, COMPLETE, FAILED, Bench, ids, namespace

from trunkline.core.directory import Directory
from trunkline.core.events import BlocksRemoved, BlocksStored, EventBatch
from trunkline.core.feed import WorkerFeed
from trunkline.core.keys import KeyChain, chain
from trunkline.core.records import EngineHash, Instant, Tier, WorkerId
from trunkline.gateway.contracts import Pick

NAMESPACE = namespace(BLOCK)
T0 = Instant(0.0)


def engine_hashes(keys: KeyChain) -> array[int]:
    return array("Q", [int.from_bytes(keys[n][:8], "big") for n in range(len(keys))])


def stored(tokens: array[int], first_block: int = 0) -> BlocksStored:
    """The run of a prompt's whole blocks, from one on."""
    keys = chain(NAMESPACE, tokens)
    hashes = engine_hashes(keys)
    return BlocksStored(
        hashes=hashes[first_block:],
        parent=EngineHash(hashes[first_block - 1]) if first_block else None,
        tokens=tokens[first_block * BLOCK : len(keys) * BLOCK],
        block_tokens=BLOCK,
        tier=Tier.DEVICE,
        salt=None if first_block else NAMESPACE.salt,
    )


# -- C28: bounded, whatever is asked ---------------------------------------------------------------


def test_c28_unique_long_documents_without_end_stay_within_the_cap_of_their_worker() -> None:
    """Of an approximate worker: all that is known of it are our own decisions."""
    directory = Directory(max_blocks=100_000)
    directory.admit_namespace(NAMESPACE)
    worker = WorkerId("w")
    directory.join(worker, block_tokens=BLOCK, max_predicted=2_000)
    most = 0
    document = chain(NAMESPACE, ids(0))
    for number in range(3_000):
        document = chain(NAMESPACE, ids(64 * BLOCK, first=number * 2_000))
        directory.predict(worker, document, now=Instant(number), ttl_ms=1e12)
        assert directory.predicted_count(worker) <= 2_000
        if number == 500:
            most = directory.memory_bytes()
    assert directory.block_count() <= 2_000
    assert directory.memory_bytes() <= most
    assert directory.match(document).expected == [64], "the latest is what is kept"


# -- C36: one index, whatever happens at once ------------------------------------------------------


def test_c36_eight_threads_leave_each_entry_reachable_from_its_owner_and_back() -> None:
    """In any order, one call at a time: in service all calls come from one loop."""
    directory = Directory(max_blocks=50_000)
    directory.admit_namespace(NAMESPACE)
    workers = [WorkerId(f"w{n}") for n in range(4)]
    for worker in workers:
        directory.join(worker, block_tokens=BLOCK)
    prompts = [ids(8 * BLOCK, first=number % 10 * 1_000) for number in range(40)]
    for number, prompt in enumerate(prompts):
        prompt[-BLOCK] = number  # ten beginnings, each with four ends
    turn = threading.Lock()

    def work(seed: int) -> None:
        dice = random.Random(seed)
        for step in range(1_500):
            worker, prompt = dice.choice(workers), dice.choice(prompts)
            with turn:
                _take_a_step(directory, worker, prompt, step, dice)

    _as_threads(8, work)

    directory.expire(Instant(1e6))
    known = {bytes(key): depth for p in prompts for depth, key in _numbered(chain(NAMESPACE, p))}
    owned: defaultdict[bytes, set[WorkerId]] = defaultdict(set)
    for worker in workers:
        packed = directory.held_keys(worker)
        held = [packed[n : n + 32] for n in range(0, len(packed), 32)]
        assert len(held) == len(set(held)) == directory.held_count(worker)
        assert set(held) <= set(known)
        for key in held:
            owned[key].add(worker)
    assert directory.block_count() == len(owned)
    for prompt in prompts:
        keys = chain(NAMESPACE, prompt)
        match_ = directory.match(keys)
        for worker in workers:
            unbroken = 0
            while unbroken < len(keys) and worker in owned[bytes(keys[unbroken])]:
                unbroken += 1
            assert match_.device[directory.slot(worker)] == unbroken
    for worker in workers:
        directory.clear(worker)
    assert directory.block_count() == 0


def _take_a_step(
    directory: Directory, worker: WorkerId, prompt: array[int], step: int, dice: random.Random
) -> None:
    keys = chain(NAMESPACE, prompt)
    match dice.randrange(8):
        case 0 | 1 | 2:
            directory.stored(worker, stored(prompt))
        case 3 | 4:
            gone = array("Q", [dice.choice(engine_hashes(keys))])
            directory.removed(worker, BlocksRemoved(hashes=gone, tier=Tier.DEVICE))
        case 5:
            directory.predict(worker, keys, now=Instant(step), ttl_ms=50.0)
        case 6 if step % 20 == 0:
            directory.clear(worker)
        case _:
            match_ = directory.match(keys)
            assert max(match_.device) <= match_.block_count


def _as_threads(count: int, work: Callable[[int], None]) -> None:
    """Each is given its number, and they are switched as often as can be; raises what one met."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(count) as pool:
            for end in [pool.submit(work, number) for number in range(count)]:
                end.result()
    finally:
        sys.setswitchinterval(interval_s)


def _numbered(keys: KeyChain) -> list[tuple[int, bytes]]:
    return [(number, bytes(keys[number])) for number in range(len(keys))]


# -- C37: what events write is what every policy reads ---------------------------------------------


def test_c37_events_are_written_to_the_very_index_that_each_policy_reads() -> None:
    prompt = ids(20 * BLOCK)
    holder, other = WorkerId("w1"), WorkerId("w0")
    for policy in ("cache_aware", "consistent_hash", "least_queue", "round_robin"):
        bench = Bench(other, holder, policy=policy)
        bench.directory.admit_namespace(NAMESPACE)
        feed = WorkerFeed(holder, bench.directory, can_replay=False)
        feed.joined(T0)
        feed.live(EventBatch(seq=0, events=(stored(prompt),), fingerprint=0), T0)

        pick = bench.pick(prompt)

        candidates = pick.ticket.decision.candidates
        seen = dict(zip(candidates.workers, candidates.matched_tokens, strict=True))
        assert seen == {other: 0, holder: 19 * BLOCK}, policy
        if policy == "cache_aware":
            assert pick.worker == holder


# -- C38, C39: several gateways --------------------------------------------------------------------

FLEET = [WorkerId(f"w{n}") for n in range(8)]


class Gateways:
    """Gateways over the same workers, which tell all of them what they store."""

    def __init__(self, names: int, *, has_events: bool = True) -> None:
        self.ring: dict[WorkerId, list[EventBatch]] = {worker: [] for worker in FLEET}
        self.feeds: list[dict[WorkerId, WorkerFeed]] = []
        self.all: list[Bench] = []
        self._held: defaultdict[WorkerId, set[int]] = defaultdict(set)
        self._has_events = has_events
        for _ in range(names):
            self.join()

    def join(self) -> Bench:
        """One more, which knows nothing and asks each worker for its ring."""
        bench = Bench(*FLEET, ttl_ms=5e3 if self._has_events else 120e3)
        bench.directory.admit_namespace(NAMESPACE)
        feeds = {worker: WorkerFeed(worker, bench.directory) for worker in FLEET}
        for worker, feed in feeds.items() if self._has_events else ():
            feed.joined(T0)
            replay_id = feed.replay_id
            assert replay_id is not None
            for batch in self.ring[worker]:
                feed.replayed(batch, replay_id, T0)
            feed.replay_ended(replay_id, T0)
        self.feeds.append(feeds)
        self.all.append(bench)
        return bench

    def ask(self, gateway: int, prompt: array[int]) -> WorkerId:
        """One request, to its end; time passes for all."""
        pick = self.all[gateway].pick(prompt)
        self._compute(pick.worker, prompt)
        self.all[gateway].picker.first_byte(pick)
        self.all[gateway].picker.ended(pick, COMPLETE, None)
        for bench in self.all:
            bench.clock.ms += 100.0
            bench.directory.expire(bench.clock.now())
        return pick.worker

    def _compute(self, worker: WorkerId, prompt: array[int]) -> None:
        hashes = engine_hashes(chain(NAMESPACE, prompt))
        held = self._held[worker]
        first = next((n for n, name in enumerate(hashes) if name not in held), len(hashes))
        if first == len(hashes) or not self._has_events:
            return
        held.update(hashes)
        seq = len(self.ring[worker])
        batch = EventBatch(seq=seq, events=(stored(prompt, first),), fingerprint=seq)
        self.ring[worker].append(batch)
        for bench, feeds in zip(self.all, self.feeds, strict=True):
            feeds[worker].live(batch, bench.clock.now(), age_ms=1.0)


def test_c38_a_second_gateway_that_comes_late_chooses_as_the_first_one_does() -> None:
    gateways = Gateways(1)
    dice = random.Random(3)
    shared = [ids(40 * BLOCK, first=number * 10_000) for number in range(60)]
    for _ in range(600):
        prompt = dice.choice(shared)
        gateways.ask(0, prompt[: dice.randrange(4, 40) * BLOCK] + ids(50, dice.randrange(10**6)))
    first, second = gateways.all[0], gateways.join()
    for bench in gateways.all:  # what the first one expects of its own requests is over
        bench.clock.ms += 600_000.0
        bench.directory.expire(bench.clock.now())
    for worker in FLEET:
        assert second.directory.held_keys(worker) == first.directory.held_keys(worker)

    agreed = 0
    for number in range(400):
        warm = dice.choice(shared)[: dice.randrange(10, 40) * BLOCK]
        prompt = warm + ids(40, 10**6 + number) if number % 4 else ids(400, 10**7 + number * 500)
        agreed += _choice(first, prompt) == _choice(second, prompt)
    assert agreed >= 0.95 * 400


def _choice(bench: Bench, prompt: array[int]) -> WorkerId:
    """What would be chosen; the books stay as they are."""
    pick = bench.pick(prompt)
    bench.picker.ended(pick, COMPLETE, None)  # refused by the worker: nothing is expected of it
    return pick.worker


def _sessions_kept(gateways: Gateways, first_tokens: int) -> float:
    """Share of 300 sessions of 10 turns, each turn at any gateway, that met one worker alone."""
    dice = random.Random(11)
    prompts = [ids(first_tokens, first=session * 100_000) for session in range(300)]
    met: list[Counter[WorkerId]] = [Counter() for _ in prompts]
    numbers = count(10**8)
    for _ in range(10):
        for session in dice.sample(range(300), 300):
            worker = gateways.ask(dice.randrange(3), prompts[session])
            met[session][worker] += 1
            prompts[session] += array("I", [next(numbers) for _ in range(50)])
    return sum(len(workers) == 1 for workers in met) / len(met)


def test_c39_sessions_behind_three_gateways_keep_to_their_worker_by_what_workers_tell() -> None:
    assert _sessions_kept(Gateways(3), first_tokens=100) >= 0.99


def test_c39_without_events_sessions_keep_to_their_worker_by_stable_hashing_alone() -> None:
    assert _sessions_kept(Gateways(3, has_events=False), first_tokens=300) >= 0.99


# -- C40: many workers -----------------------------------------------------------------------------


def test_c40_each_of_3000_workers_is_indexed_and_can_be_chosen() -> None:
    names = [WorkerId(f"w{n}") for n in range(3_000)]
    bench = Bench(*names)
    bench.directory.admit_namespace(NAMESPACE)
    for number in (0, 2_047, 2_048, 2_999):
        prompt = ids(600 * BLOCK, first=number * 10_000)
        bench.directory.stored(names[number], stored(prompt))

        pick = bench.pick(prompt)

        assert pick.worker == names[number]
        assert pick.ticket.decision.expected_tokens == 599 * BLOCK
        bench.picker.ended(pick, COMPLETE, None)


# -- F11: one computes, and never for another tenant -----------------------------------------------


def test_f11_a_herd_computes_its_prompt_once_a_worker_and_each_tenant_for_itself() -> None:
    workers = [WorkerId(f"w{n}") for n in range(3)]
    bench = Bench(*workers)
    prompt = ids(200 * BLOCK)
    computed: Counter[tuple[str, WorkerId]] = Counter()
    picks: list[Pick] = []
    for number in range(200):
        asked = asks("ab"[number % 2], prompt)
        pick = bench.picker.pick(asked, frozenset())
        assert isinstance(pick, Pick)
        picks.append(pick)
        if not pick.ticket.decision.matched_tokens:
            computed[asked.grant.principal.tenant, pick.worker] += 1

    assert {tenant for tenant, _ in computed} == {"a", "b"}
    assert set(computed.values()) == {1}
    for pick in picks:
        bench.picker.ended(pick, COMPLETE, None)
    bench.assert_clean()


def test_f11_who_waits_behind_a_prefill_that_fails_is_not_forgotten_and_computes_it() -> None:
    worker = WorkerId("w")
    bench = Bench(worker)
    prompt = ids(200 * BLOCK)
    first, second, third = (bench.pick(prompt) for _ in range(3))

    bench.picker.ended(first, FAILED, None)

    assert bench.expected(worker, prompt) == 200, "the second owes it now"
    bench.picker.ended(second, FAILED, None)
    bench.picker.first_byte(third)
    bench.picker.ended(third, COMPLETE, None)
    assert bench.expected(worker, prompt) == 200
    bench.assert_clean()
