"""A worker's feed on a real directory, and the batches that are sent to it, for tests of the feed.

Block `n` always has the tokens (n, n), so that a test names blocks by small numbers.
"""

from __future__ import annotations

from array import array

from trunkline.core.actions import (
    Action,
    RequestReplay,
)
from trunkline.core.directory import Directory
from trunkline.core.events import (
    BlocksRemoved,
    BlocksStored,
    CacheEvent,
    EventBatch,
)
from trunkline.core.feed import FeedLimits, WorkerFeed
from trunkline.core.identity import ModelIdentity, Namespace, Scope, ScopeKind, derive_namespace
from trunkline.core.keys import as_tokens, chain
from trunkline.core.records import EngineHash, Instant, Tier, WorkerId

WORKER = WorkerId("w")
T0 = Instant(0.0)
MODEL = ModelIdentity(model_id="m", block_tokens=2)


def namespace(tenant: str) -> Namespace:
    scope = Scope(kind=ScopeKind.TENANT, org="o", tenant=tenant)
    return derive_namespace(bytes(32), scope, MODEL)


NAMESPACE = namespace("t")
STRANGER = namespace("stranger")


def run(
    *names: int,
    parent: int | None = None,
    salt: str | None = NAMESPACE.salt,
    size: int = 2,
    tier: Tier = Tier.DEVICE,
) -> BlocksStored:
    """A run whose block `n` has the tokens (n, n): its key follows from the names before it."""
    return BlocksStored(
        hashes=array("Q", names),
        parent=None if parent is None else EngineHash(parent),
        tokens=as_tokens(n for n in names for _ in range(size)),
        block_tokens=size,
        tier=tier,
        salt=salt if parent is None else None,
    )


def gone(*names: int, tier: Tier = Tier.DEVICE) -> BlocksRemoved:
    return BlocksRemoved(hashes=array("Q", names), tier=tier)


def batch(seq: int, *events: CacheEvent, life: int = 0, bad_count: int = 0) -> EventBatch:
    return EventBatch(seq=seq, events=events, fingerprint=1_000 * life + seq, bad_count=bad_count)


class Desk:
    """A feed with its directory and the actions so far."""

    def __init__(self, *, can_replay: bool = True, **limits: float) -> None:
        self.directory = Directory(max_blocks=1_000_000)
        self.directory.admit_namespace(NAMESPACE)
        self.directory.join(WORKER, block_tokens=2)
        self.feed = WorkerFeed(
            WORKER,
            self.directory,
            can_replay=can_replay,
            limits=FeedLimits(**limits),  # type: ignore[arg-type] # tests name whole numbers
        )
        self.actions: list[Action] = []

    def live(self, *batches: EventBatch, now: float = 0.0) -> None:
        for one in batches:
            self.actions += self.feed.live(one, Instant(now))

    def replay(self, *batches: EventBatch, now: float = 0.0, is_whole: bool = True) -> None:
        replay_id = self.feed.replay_id
        assert replay_id is not None, "no replay is open"
        for one in batches:
            self.actions += self.feed.replayed(one, replay_id, Instant(now))
        if is_whole:
            self.actions += self.feed.replay_ended(replay_id, Instant(now))

    def tick(self, now: float) -> None:
        self.actions += self.feed.tick(Instant(now))

    def usable(self, *names: int) -> int:
        """Leading blocks that the worker is believed to hold of a prompt."""
        prompt = chain(NAMESPACE, as_tokens(n for n in names for _ in range(2)))
        return self.directory.match(prompt).resident[self.directory.slot(WORKER)]

    def held(self) -> int:
        return self.directory.held_count(WORKER)

    def asked(self) -> list[RequestReplay]:
        return [action for action in self.actions if isinstance(action, RequestReplay)]

    def has(self, kind: type[Action]) -> bool:
        return any(isinstance(action, kind) for action in self.actions)
