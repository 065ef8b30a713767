"""The directory beside a naive twin: dicts of sets and counters, one per worker."""

from __future__ import annotations

from array import array
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from trunkline.core.directory import Directory, StoreOutcome
from trunkline.core.events import BlocksRemoved, BlocksStored
from trunkline.core.identity import ModelIdentity, Scope, ScopeKind, derive_namespace
from trunkline.core.keys import KeyChain, as_tokens, chain
from trunkline.core.records import BlockKey, EngineHash, Instant, Tier, WorkerId

MODEL = ModelIdentity(model_id="m", block_tokens=2)
NAMESPACES = [
    derive_namespace(bytes(32), Scope(kind=ScopeKind.TENANT, org="o", tenant=tenant), MODEL)
    for tenant in ("a", "b")
]
WORKERS = [WorkerId(f"w{number}") for number in range(3)]
DEPTH = 4
# A prompt is a namespace and a variant; prompts of one namespace share their first two blocks.
PROMPTS = [(number, variant) for number in range(2) for variant in range(2)]

workers = st.sampled_from(WORKERS)
prompts = st.sampled_from(PROMPTS)
NEAR = (Tier.DEVICE, Tier.HOST)
tiers = st.sampled_from([*NEAR, Tier.DISK])


def tokens_of(prompt: tuple[int, int], depth: int) -> list[int]:
    return [depth, prompt[1] if depth >= 2 else 0]


def chain_of(prompt: tuple[int, int]) -> KeyChain:
    tokens = as_tokens(t for depth in range(DEPTH) for t in tokens_of(prompt, depth))
    return chain(NAMESPACES[prompt[0]], tokens)


CHAINS = {prompt: chain_of(prompt) for prompt in PROMPTS}


def name(prompt: tuple[int, int], depth: int) -> EngineHash:
    """The engine's hash: a function of namespace and content, as in a real engine."""
    variant = prompt[1] if depth >= 2 else 0
    return EngineHash(100 + 20 * prompt[0] + 10 * variant + depth)


class NaiveWorker:
    """What one worker holds: copies of (block, tier), and when predictions end."""

    def __init__(self) -> None:
        self.copies: Counter[tuple[EngineHash, Tier]] = Counter()
        self.keys: dict[EngineHash, BlockKey] = {}
        self.predicted: dict[BlockKey, float] = {}
        self.predicted_until = 0.0
        self.is_trusted = True

    def forget(self) -> None:
        self.predicted_until = 0.0
        self.copies.clear()
        self.keys.clear()
        self.predicted.clear()

    def resident(self, *wanted: Tier) -> set[BlockKey]:
        return {
            self.keys[h] for (h, tier), count in self.copies.items() if count and tier in wanted
        }


class DirectoryMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.directory = Directory(max_blocks=10_000)
        self.naive: dict[WorkerId, NaiveWorker] = {}
        for namespace in NAMESPACES:
            self.directory.admit_namespace(namespace)

    @rule(worker=workers)
    def join(self, worker: WorkerId) -> None:
        before = self.directory.incarnation(worker) if self.directory.knows(worker) else 0
        self.directory.join(worker, block_tokens=2)
        assert self.directory.incarnation(worker) > before
        self.naive[worker] = NaiveWorker()

    @rule(worker=workers)
    def leave(self, worker: WorkerId) -> None:
        self.directory.leave(worker)
        self.naive.pop(worker, None)

    @rule(worker=workers)
    def restart(self, worker: WorkerId) -> None:
        if worker in self.naive:
            before = self.directory.incarnation(worker)
            assert self.directory.restart(worker) > before
            self.naive[worker].forget()

    @rule(worker=workers)
    def clear(self, worker: WorkerId) -> None:
        if worker in self.naive:
            self.directory.clear(worker)
            self.naive[worker].forget()

    @rule(worker=workers, is_trusted=st.booleans())
    def trust(self, worker: WorkerId, is_trusted: bool) -> None:
        if worker in self.naive:
            self.directory.trust(worker, is_trusted)
            self.naive[worker].is_trusted = is_trusted

    @rule(
        worker=workers,
        prompt=prompts,
        tier=tiers,
        first=st.integers(0, DEPTH - 1),
        count=st.integers(1, DEPTH),
    )
    def store(
        self, worker: WorkerId, prompt: tuple[int, int], tier: Tier, first: int, count: int
    ) -> None:
        naive = self.naive.get(worker)
        if naive is None:
            return
        depths = range(first, min(first + count, DEPTH))
        parent = None if first == 0 else name(prompt, first - 1)
        outcome = self.directory.stored(
            worker,
            BlocksStored(
                hashes=array("Q", [name(prompt, depth) for depth in depths]),
                parent=parent,
                tokens=as_tokens(t for depth in depths for t in tokens_of(prompt, depth)),
                block_tokens=2,
                tier=tier,
                salt=NAMESPACES[prompt[0]].salt,
            ),
        )
        if parent is not None and parent not in naive.keys:
            assert outcome is StoreOutcome.UNKNOWN_PARENT
            return
        assert outcome is StoreOutcome.STORED
        for depth in depths:
            naive.copies[name(prompt, depth), tier] += 1
            naive.keys[name(prompt, depth)] = CHAINS[prompt][depth]

    @rule(worker=workers, prompt=prompts, tier=tiers, depths=st.lists(st.integers(0, DEPTH - 1)))
    def remove(
        self, worker: WorkerId, prompt: tuple[int, int], tier: Tier, depths: list[int]
    ) -> None:
        naive = self.naive.get(worker)
        if naive is None:
            return
        known_count = 0
        for depth in depths:
            block = name(prompt, depth)
            if naive.copies[block, tier]:
                known_count += 1
                before = naive.resident(*NEAR)
                naive.copies[block, tier] -= 1
                for gone in before - naive.resident(*NEAR):
                    naive.predicted.pop(gone, None)
                if not any(naive.copies[block, other] for other in Tier):
                    del naive.keys[block]
        removed = BlocksRemoved(hashes=array("Q", [name(prompt, d) for d in depths]), tier=tier)
        assert self.directory.removed(worker, removed) == known_count

    @rule(worker=workers, prompt=prompts, ttl_ms=st.sampled_from([10.0, 100.0]))
    def predict(self, worker: WorkerId, prompt: tuple[int, int], ttl_ms: float) -> None:
        naive = self.naive.get(worker)
        if naive is None:
            return
        self.directory.predict(worker, CHAINS[prompt], now=Instant(self.now), ttl_ms=ttl_ms)
        # One worker's predictions end in the order they were made, taken back or not.
        until = naive.predicted_until = max(self.now + ttl_ms, naive.predicted_until)
        for depth in range(DEPTH):
            naive.predicted[CHAINS[prompt][depth]] = until

    @rule(worker=workers, prompt=prompts)
    def unpredict(self, worker: WorkerId, prompt: tuple[int, int]) -> None:
        self.directory.unpredict(worker, CHAINS[prompt])
        if worker in self.naive:
            for depth in range(DEPTH):
                self.naive[worker].predicted.pop(CHAINS[prompt][depth], None)

    @rule(ms=st.sampled_from([5.0, 50.0]))
    def expire(self, ms: float) -> None:
        self.now += ms
        self.directory.expire(Instant(self.now))
        for naive in self.naive.values():
            naive.predicted = {k: t for k, t in naive.predicted.items() if t > self.now}

    @invariant()
    def every_prompt_matches_as_in_the_twin(self) -> None:
        for prompt in PROMPTS:
            match = self.directory.match(CHAINS[prompt])
            for worker, naive in self.naive.items():
                slot = self.directory.slot(worker)
                device = naive.resident(Tier.DEVICE)
                resident = naive.resident(*Tier)
                expected = naive.resident(*NEAR) | naive.predicted.keys()
                found = (match.device[slot], match.resident[slot], match.expected[slot])
                if naive.is_trusted or not naive.keys:
                    assert found == tuple(leading(s, prompt) for s in (device, resident, expected))
                else:
                    assert found == (0, 0, 0)
            assert sum(map(bool, match.expected)) <= len(self.naive)

    @invariant()
    def every_entry_has_an_owner_and_every_owner_its_entries(self) -> None:  # C36
        known: set[BlockKey] = set()
        for worker, naive in self.naive.items():
            resident = naive.resident(*Tier)
            assert self.directory.held_keys(worker) == b"".join(sorted(resident))
            assert self.directory.held_count(worker) == len(naive.keys)
            assert self.directory.predicted_count(worker) == len(naive.predicted)
            known |= resident | naive.predicted.keys()
        assert self.directory.block_count() == len(known)


def leading(keys: set[BlockKey], prompt: tuple[int, int]) -> int:
    depth = 0
    while depth < DEPTH and CHAINS[prompt][depth] in keys:
        depth += 1
    return depth


TestDirectory = DirectoryMachine.TestCase
TestDirectory.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
