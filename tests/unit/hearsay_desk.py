"""A gateway's directory with what it tells others and hears of them, for tests of both."""

from __future__ import annotations

from array import array

from test_load_sync import Air

from hand_clock import HandClock
from trunkline.control.load_sync import LoadSync
from trunkline.core.directory import Directory, Match, StoreOutcome
from trunkline.core.events import BlocksStored
from trunkline.core.hearsay import Hearsay
from trunkline.core.identity import ModelIdentity, Namespace, Scope, ScopeKind, derive_namespace
from trunkline.core.keys import KeyChain, as_tokens, chain
from trunkline.core.records import Slot, Tier, WorkerId

BLOCK = 16
TTL_MS = 5_000.0
W1, W2 = WorkerId("w1:8000"), WorkerId("w2:8000")
MODEL = ModelIdentity(model_id="m", block_tokens=BLOCK)
ACME = Scope(kind=ScopeKind.TENANT, org="o", tenant="acme")
ROOT = b"r" * 32
OURS = derive_namespace(ROOT, ACME, MODEL)


class Desk:
    """One gateway: its directory, and what it tells and hears."""

    def __init__(self, life: str, air: Air, clock: HandClock, namespace: Namespace = OURS) -> None:
        self.clock, self.air, self.namespace = clock, air, namespace
        self.directory = Directory(max_blocks=100_000)
        for worker in (W1, W2):
            self.directory.join(worker, block_tokens=BLOCK)
        self.hearsay = Hearsay(self.directory, lambda worker: TTL_MS if worker != "idle" else 0.0)
        self.sync = LoadSync(life, air, clock)
        self.sync.attach([], [self.hearsay])
        self.numbers = 0

    def chain(self, blocks: int, seed: int = 0) -> KeyChain:
        return chain(self.namespace, tokens(blocks, seed))

    def choose(self, blocks: int, worker: WorkerId = W1, seed: int = 0) -> int:
        """As the picker does; the attempt's number."""
        keys = self.chain(blocks, seed)
        known = self.look(keys).expected[self.slot(worker)]
        self.directory.predict(worker, keys, now=self.clock.now(), ttl_ms=TTL_MS)
        self.numbers += 1
        self.hearsay.say(self.numbers, worker, keys, known)
        return self.numbers

    def beat(self) -> None:
        body = self.sync.word(self.clock.now())
        if body is not None:
            self.air.cry(body)

    def look(self, keys: KeyChain) -> Match:
        """Somebody asks."""
        for region in keys.regions():
            self.directory.admit_namespace(region.namespace)
            self.hearsay.asked(region.namespace.tag, self.clock.now())
        return self.directory.match(keys)

    def expected(self, blocks: int, worker: WorkerId = W1, seed: int = 0) -> int:
        return self.look(self.chain(blocks, seed)).expected[self.slot(worker)]

    def slot(self, worker: WorkerId) -> Slot:
        return self.directory.slot(worker)

    def store(self, blocks: int, worker: WorkerId = W1, seed: int = 0) -> None:
        self.directory.admit_namespace(self.namespace)
        event = BlocksStored(
            hashes=array("Q", range(1, blocks + 1)),
            parent=None,
            tokens=tokens(blocks, seed),
            block_tokens=BLOCK,
            tier=Tier.DEVICE,
            salt=self.namespace.salt,
        )
        assert self.directory.stored(worker, event) is StoreOutcome.STORED


def tokens(blocks: int, seed: int = 0) -> array[int]:
    return as_tokens(range(seed << 20, (seed << 20) + blocks * BLOCK))
