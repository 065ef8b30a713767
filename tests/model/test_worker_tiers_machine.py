"""Device, host memory and events of the simulated worker beside sets of what was ever computed."""

from __future__ import annotations

from array import array
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trunkline.core.records import Tier
from trunkline.core.simkv import answer_tokens
from trunkline.kv.tickets import Ticket
from trunkline.ports.publisher import BlockEvent, BlockRemoved, CacheCleared, RunStored
from trunkline.worker.blocks import KvSequence, Terms
from worker_tenants import BLOCK, BLOCK_BYTES, EPOCHS, SUBJECTS, Store, ticket, tokens

CAPACITY = 12
HOST = 14
TENANTS: tuple[str, ...] = ("a", "b")
ASKED = st.tuples(st.sampled_from(TENANTS), st.integers(0, 5), st.integers(1, 7))
"""Whose prompt, which, and how many blocks."""
Key = tuple[str, int, tuple[int, ...]]
"""Tenant, its epoch, and the tokens up to the end of a block."""


class Worker(RuleBasedStateMachine):
    """Two tenants, each with an epoch of its own, a few prompts that share beginnings."""

    def __init__(self) -> None:
        super().__init__()
        self.store = Store(capacity=CAPACITY, host=HOST)
        self.epochs: dict[str, int] = dict.fromkeys(TENANTS, 0)
        self.rev = 9
        self.computed: set[Key] = set()
        self.told: dict[Tier, dict[bytes, int]] = {Tier.DEVICE: {}, Tier.HOST: {}}
        """Copies of each block, as somebody knows who goes by the events."""
        self.running: list[tuple[KvSequence, str, int]] = []
        self.lease()

    @rule()
    def lease(self) -> None:
        raised = {f"tenant/{name}": epoch for name, epoch in self.epochs.items()}
        self.store.lease(self.rev, **raised)

    @rule(asked=st.lists(ASKED, max_size=3))
    def ask_without_a_lease(self, asked: list[tuple[str, int, int]]) -> None:
        self.store.boot_ms += 3_001
        self.ask(asked)

    @rule(asked=st.lists(ASKED, min_size=1, max_size=8))
    def ask_under_a_lease(self, asked: list[tuple[str, int, int]]) -> None:
        self.lease()
        self.ask(asked)

    def ask(self, asked: list[tuple[str, int, int]]) -> None:
        for tenant, first, length in asked:
            self._request(tenant, first, length)

    def _request(self, tenant: str, first: int, length: int) -> None:
        prompt = _prompt(first, length)
        sequence = self.store.cache.admit(prompt, self._salt(tenant), 1, self._terms(tenant))
        if sequence is None:
            return
        self._judge(sequence, tenant, prompt)
        self.store.cache.compute(sequence, len(prompt))
        self._finish(sequence, tenant)

    @precondition(lambda self: len(self.running) < 2)
    @rule(tenant=st.sampled_from(TENANTS), first=st.integers(0, 2), length=st.integers(1, 4))
    def begin(self, tenant: str, first: int, length: int) -> None:
        prompt = _prompt(first, length)
        sequence = self.store.cache.admit(prompt, self._salt(tenant), 1, self._terms(tenant))
        if sequence is not None:
            self._judge(sequence, tenant, prompt)
            self.running.append((sequence, tenant, self.epochs[tenant]))

    @precondition(lambda self: self.running)
    @rule()
    def finish(self) -> None:
        sequence, tenant, epoch = self.running.pop(0)
        self.store.cache.compute(sequence, len(sequence.tokens))
        self._finish(sequence, tenant, epoch)

    @rule(tenant=st.sampled_from(TENANTS))
    def revoke(self, tenant: str) -> None:
        self.epochs[tenant] += 1
        self.rev += 1
        subject, epoch = f"tenant/{tenant}", self.epochs[tenant]
        self.store.fence.freshness.obey(self.rev, subject, epoch)
        self.store.cache.condemn(
            lambda stamp: _is_below(stamp.subjects, stamp.epochs, subject, epoch), None
        )
        self.store.behind.condemn(
            lambda owner: _is_below(owner.subjects, owner.epochs, subject, epoch)
        )

    @rule(limit=st.integers(1, 8))
    def erase(self, limit: int) -> None:
        self.store.cache.erase(limit)
        self.store.behind.store.erase(limit)

    @rule()
    def crowd(self) -> None:
        if not self.running:
            self.store.crowd_out()

    @invariant()
    def bytes_are_conserved(self) -> None:
        figures = self.store.behind.store.figures()
        assert figures.host_bytes <= HOST * BLOCK_BYTES
        assert figures.staged_bytes == figures.pinned_bytes == 0
        assert figures.conflicts == figures.spoilt == 0
        if not self.running:
            assert self.store.cache.places.free_count == CAPACITY

    @invariant()
    def events_tell_what_is_there(self) -> None:
        for event in [
            *self.store.cache.take_events(),
            *self.store.behind._notices.take(self.store.behind.store.take_events()),
        ]:
            self._hear(event)
        there = [manifest for _, manifest in self.store.behind.store.resident()]
        assert {manifest.place.key for manifest in there} <= self.told[Tier.HOST].keys()
        for owner in {manifest.owner for manifest in there}:
            assert (
                owner.epochs[owner.subjects.index(f"tenant/{owner.domain}")]
                == (self.epochs[owner.domain])
            )

    def _hear(self, event: BlockEvent) -> None:
        assert not isinstance(event, CacheCleared)
        if isinstance(event, BlockRemoved):
            copies = self.told[event.tier]
            copies[event.hash] -= 1
            if not copies[event.hash]:
                del copies[event.hash]
        elif isinstance(event, RunStored):
            assert len(event.tokens) == len(event.hashes) * BLOCK
            copies = self.told[event.tier]
            for name in event.hashes:
                copies[name] = copies.get(name, 0) + 1
                assert event.tier is Tier.DEVICE or copies[name] == 1

    def _judge(self, sequence: KvSequence, tenant: str, prompt: array[int]) -> None:
        """Whatever is hit was computed by the same tenant, in its present epoch."""
        for index in range(len(sequence.blocks)):
            assert self._key(tenant, self.epochs[tenant], prompt, index) in self.computed
        if sequence.blocks:
            assert self.store.fence.freshness.is_valid(self.store.boot())

    def _finish(self, sequence: KvSequence, tenant: str, epoch: int | None = None) -> None:
        epoch = self.epochs[tenant] if epoch is None else epoch
        for index in range(len(sequence.tokens) // BLOCK):
            self.computed.add(self._key(tenant, epoch, sequence.tokens, index))
        if self.store.cache.fault(sequence) is None:
            answer = self.store.cache.answer(sequence, 4, 4_096)
            assert answer == _right(sequence.tokens)
        self.store.cache.release(sequence)

    def _key(self, tenant: str, epoch: int, prompt: array[int], index: int) -> Key:
        return tenant, epoch, tuple(prompt[: (index + 1) * BLOCK])

    def _terms(self, tenant: str) -> Terms:
        return Terms(ticket=self._ticket(tenant))

    def _salt(self, tenant: str) -> str:
        """As for real, the epoch is part of it."""
        return f"{tenant}{self.epochs[tenant]}"

    def _ticket(self, tenant: str) -> Ticket:
        made = ticket(ns=self._salt(tenant).encode().ljust(16, b"-"), tenant=tenant, rev=9)
        subjects = tuple(f"tenant/{tenant}" if s == "tenant/t" else s for s in SUBJECTS)
        epochs = tuple(
            self.epochs[tenant] if s == "tenant/t" else e
            for s, e in zip(SUBJECTS, EPOCHS, strict=True)
        )
        return replace(made, subjects=subjects, epochs=epochs)


def _prompt(first: int, length: int) -> array[int]:
    """Prompts of one `first` begin alike."""
    return tokens(length * BLOCK + 3, first=300 + 500 * first)


def _right(prompt: array[int]) -> array[int]:
    return answer_tokens(prompt, 4, 4_096)


def _is_below(subjects: tuple[str, ...], epochs: tuple[int, ...], subject: str, epoch: int) -> bool:
    return any(s == subject and e < epoch for s, e in zip(subjects, epochs, strict=True))


TestWorker = Worker.TestCase
TestWorker.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
