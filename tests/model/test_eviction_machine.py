"""Evictors beside a naive twin: a plain dict, every rule told by a scan over all blocks."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trunkline.core.eviction import Evictor, Policy, make_evictor, order_makers
from trunkline.core.residents import Residents

KEYS = [bytes([number]) for number in range(16)]
ROOT = b"root"


def parent_of(key: bytes) -> bytes:
    """A fixed tree of depth four, so that every chain has forks."""
    return bytes([(key[0] - 1) // 2]) if key[0] else ROOT


def path_to(key: bytes) -> list[bytes]:
    path = [key]
    while path[-1] != KEYS[0]:
        path.append(parent_of(path[-1]))
    return path[::-1]


@dataclass
class Known:
    """What the twin knows of a block."""

    used_at: int
    holds: int = 0
    copies: int = 0


class EvictorMachine(RuleBasedStateMachine):
    """The same operations on both; what each policy must keep is checked after every step."""

    policy = Policy.LRU

    def __init__(self) -> None:
        super().__init__()
        self.evictor: Evictor = make_evictor(self.policy.value, capacity_bytes=6, copied_worth=0.5)
        self.known: dict[bytes, Known] = {}
        self.now = 0

    def may_go(self) -> list[bytes]:
        parents = {parent_of(key) for key in self.known}
        return [k for k, known in self.known.items() if k not in parents and not known.holds]

    @rule(key=st.sampled_from(KEYS), copies=st.sampled_from([0, 0, 2]))
    def add(self, key: bytes, copies: int) -> None:
        if key not in self.known:
            self.evictor.add(key, parent_of(key), size_bytes=1, saved_ms=1.0, copies=copies)
            self.now += 1
            self.known[key] = Known(used_at=self.now, copies=copies)

    @rule(key=st.sampled_from(KEYS))
    def use(self, key: bytes) -> None:
        self.evictor.touch(path_to(key))
        for each in reversed(path_to(key)):
            if each in self.known:
                self.now += 1
                self.known[each].used_at = self.now

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.known)))
        self.evictor.hold(key)
        self.known[key].holds += 1

    @precondition(lambda self: any(known.holds for known in self.known.values()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = sorted(key for key, known in self.known.items() if known.holds)
        key = data.draw(st.sampled_from(held))
        self.evictor.release(key)
        self.known[key].holds -= 1

    @rule(key=st.sampled_from(KEYS), copies=st.sampled_from([0, 1, 3]))
    def set_copies(self, key: bytes, copies: int) -> None:
        self.evictor.set_copies(key, copies)
        if key in self.known:
            self.known[key].copies = copies

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def remove_any(self, data: st.DataObject) -> None:
        """A block that was revoked goes whatever holds it or comes after it."""
        key = data.draw(st.sampled_from(sorted(self.known)))
        self.evictor.remove(key)
        del self.known[key]

    @rule()
    def evict(self) -> None:
        victim = self.evictor.victim()
        if victim is not None:
            self.evictor.remove(victim)
            del self.known[victim]

    @invariant()
    def the_victim_is_a_leaf_that_nobody_holds(self) -> None:
        victim, may_go = self.evictor.victim(), self.may_go()
        assert (victim in may_go) if may_go else (victim is None)

    @invariant()
    def asking_twice_changes_nothing(self) -> None:
        assert self.evictor.victim() == self.evictor.victim()


class LruMachine(EvictorMachine):
    """Exactly the least recently used leaf, with ages of copied ones counted double."""

    policy = Policy.LRU

    @invariant()
    def the_victim_is_the_oldest(self) -> None:
        ages = {
            key: (self.now - self.known[key].used_at + 1) * (2 if self.known[key].copies else 1)
            for key in self.may_go()
        }
        victim = self.evictor.victim()
        if victim is not None:
            assert ages[victim] == max(ages.values())
            # Of equals the copied one goes; no two others are equal.
            equals = [key for key, age in ages.items() if age == ages[victim]]
            assert len(equals) == 1 or self.known[victim].copies


class S3FifoMachine(EvictorMachine):
    policy = Policy.S3FIFO


class WTinyLfuMachine(EvictorMachine):
    policy = Policy.WTINYLFU


class GdsfMachine(EvictorMachine):
    policy = Policy.GDSF


class ReuseMachine(EvictorMachine):
    policy = Policy.REUSE


class TournamentMachine(EvictorMachine):
    policy = Policy.TOURNAMENT


class ReorderMachine(EvictorMachine):
    """The order is exchanged for another one at any moment."""

    def __init__(self) -> None:
        super().__init__()
        self.makers = order_makers(0.5)
        self.residents = Residents(self.makers[Policy.LRU](6))
        self.evictor = self.residents

    @rule(policy=st.sampled_from(sorted(set(Policy) - {Policy.TOURNAMENT}, key=str)))
    def reorder(self, policy: Policy) -> None:
        self.residents.reorder(self.makers[policy](6))
        assert all(key in self.residents for key in self.known)
        assert len(self.residents) == len(self.known)


STEPS = settings(max_examples=60, stateful_step_count=60)
TestLru = LruMachine.TestCase
TestS3Fifo = S3FifoMachine.TestCase
TestWTinyLfu = WTinyLfuMachine.TestCase
TestGdsf = GdsfMachine.TestCase
TestReuse = ReuseMachine.TestCase
TestTournament = TournamentMachine.TestCase
TestReorder = ReorderMachine.TestCase
for case in (
    *(TestLru, TestS3Fifo, TestWTinyLfu, TestGdsf, TestReuse, TestTournament, TestReorder),
):
    case.settings = STEPS
