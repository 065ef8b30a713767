"""Golden transcripts: commands and what the core answers, to be read by people.

`make golden` writes the expected halves anew; the diff is the review. Commands are in `Desk`.
"""

from __future__ import annotations

import os
import random
from array import array
from pathlib import Path

import pytest

from trunkline.core.cost import CostModel
from trunkline.core.directory import Directory
from trunkline.core.events import AllBlocksCleared, BlocksRemoved, BlocksStored, EventBatch
from trunkline.core.feed import WorkerFeed
from trunkline.core.fleet import Fleet, WorkerState
from trunkline.core.identity import ModelIdentity, Namespace, Scope, ScopeKind, derive_namespace
from trunkline.core.keys import chain
from trunkline.core.profiles import PROFILES
from trunkline.core.records import BootInstant, EngineHash, Instant, Tier, WorkerId
from trunkline.core.routing import Router, RouteRequest

TRANSCRIPTS = sorted((Path(__file__).parent / "transcripts").glob("*.txt"))
BLOCK = 16
RULE = "----"


class Desk:
    """One fleet of the core, worked by commands. A prompt is a name: its blocks follow from it."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.directory = Directory(max_blocks=10_000)
        self.fleet = Fleet(virtual_nodes=64, now=Instant(0.0))
        self.router = Router(
            fleet=self.fleet,
            cost=CostModel(PROFILES["peers-w5"], churn_weight=1.5),
            policy="cache_aware",
            rng=random.Random(0),
        )
        self.feeds: dict[str, WorkerFeed] = {}
        self.seqs: dict[str, int] = {}
        self.tickets = 0
        self.namespaces: dict[str, Namespace] = {}

    def run(self, line: str) -> str:
        """Carry out one command; what it has to say, or an empty string."""
        verb, *words = line.split()
        values = dict(word.split("=", 1) for word in words if "=" in word)
        plain = [word for word in words if "=" not in word]
        return getattr(self, verb.replace("-", "_"))(*plain, **values)

    def add_worker(self, name: str, lease_ms: str = "") -> str:
        worker = WorkerId(name)
        slot = self.directory.join(worker, block_tokens=BLOCK)
        state = WorkerState(worker=worker, slot=slot, block_tokens=BLOCK)
        if lease_ms:
            state.lease_ends_at = BootInstant(self.now_ms + float(lease_ms))
        self.fleet.add(state)
        self.feeds[name] = WorkerFeed(worker, self.directory)
        self.seqs[name] = 0
        return ""

    def remove_worker(self, name: str) -> str:
        self.fleet.remove(WorkerId(name))
        self.directory.leave(WorkerId(name))
        return ""

    def advance(self, ms: str) -> str:
        self.now_ms += float(ms.removesuffix("ms"))
        self.directory.expire(Instant(self.now_ms))
        for feed in self.feeds.values():
            feed.tick(Instant(self.now_ms))
        return ""

    def stored(
        self, name: str, *, prompt: str, blocks: str, tenant: str = "a", lost: str = "no"
    ) -> str:
        """The worker announces the first blocks of a prompt; `lost=yes` loses the message."""
        tokens = prompt_tokens(prompt, int(blocks) * BLOCK)
        event = BlocksStored(
            hashes=array("Q", [engine_hash(tenant, prompt, i) for i in range(int(blocks))]),
            parent=None,
            tokens=tokens,
            block_tokens=BLOCK,
            tier=Tier.DEVICE,
            salt=self._namespace(tenant).salt,
        )
        return self._publish(name, event, lost)

    def removed(self, name: str, *, prompt: str, block: str, tenant: str = "a") -> str:
        hashes = array("Q", [engine_hash(tenant, prompt, int(block))])
        return self._publish(name, BlocksRemoved(hashes=hashes, tier=Tier.DEVICE), "no")

    def cleared(self, name: str) -> str:
        return self._publish(name, AllBlocksCleared(), "no")

    def load(self, name: str, ms: str) -> str:
        """So much prefill is queued at a worker."""
        state = self.fleet.get(WorkerId(name))
        assert state is not None
        self.tickets += 1
        state.queue.start(self.tickets, float(ms.removesuffix("ms")), Instant(self.now_ms))
        return ""

    def route(self, *, prompt: str, tokens: str, tenant: str = "a", predict: str = "no") -> str:
        ids = prompt_tokens(prompt, int(tokens))
        keys = chain(self._namespace(tenant), ids)
        match = self.directory.match(keys)
        most = (len(ids) - 1) // BLOCK
        decision = self.router.route(
            RouteRequest(
                request_id="r",
                prompt_tokens=len(ids),
                matched_tokens=[min(blocks, most) * BLOCK for blocks in match.expected],
                home_key=keys[len(keys) - 1] if len(keys) else None,
            ),
            now=Instant(self.now_ms),
            boot=BootInstant(self.now_ms),
        )
        if decision is None:
            return "no worker is usable"
        if predict == "yes":
            now = Instant(self.now_ms)
            self.directory.predict(decision.worker, keys, now=now, ttl_ms=5_000.0)
        excluded = "".join(
            f"  {worker}:{why.value}" for worker, why in decision.candidates.excluded.items()
        )
        return decision.compact() + (f"; excluded{excluded}" if excluded else "")

    def feed(self, name: str) -> str:
        feed = self.feeds[name]
        return f"{name}: {feed.state.value}, {feed.stats.batches} batches, {feed.stats.gaps} gaps"

    def _publish(
        self, name: str, event: BlocksStored | BlocksRemoved | AllBlocksCleared, lost: str
    ) -> str:
        seq = self.seqs[name]
        self.seqs[name] += 1
        if lost == "yes":
            return ""
        batch = EventBatch(seq=seq, events=(event,), fingerprint=seq)
        actions = self.feeds[name].live(batch, Instant(self.now_ms))
        return "\n".join(f"{name}: {type(action).__name__}" for action in actions)

    def _namespace(self, tenant: str) -> Namespace:
        known = self.namespaces.get(tenant)
        if known is None:
            scope = Scope(kind=ScopeKind.TENANT, org="o", tenant=tenant)
            model = ModelIdentity(model_id="m", block_tokens=BLOCK)
            known = self.namespaces[tenant] = derive_namespace(bytes(32), scope, model)
            self.directory.admit_namespace(known)
        return known


def prompt_tokens(name: str, count: int) -> array[int]:
    return array("I", [1_000 * (ord(name[0]) - 64) + i for i in range(count)])


def engine_hash(tenant: str, prompt: str, index: int) -> EngineHash:
    return EngineHash((ord(tenant[0]) << 32) + (ord(prompt[0]) << 16) + index)


def replayed(text: str) -> str:
    """The transcript with its expected halves made anew."""
    desk, out = Desk(), []
    for paragraph in text.strip().split("\n\n"):
        commands = paragraph.partition(f"\n{RULE}")[0].splitlines()
        said: list[str] = []
        for line in commands:
            if not line.startswith("#"):
                said += [answer for answer in desk.run(line).splitlines() if answer]
        out.append("\n".join([*commands, RULE, *said] if said else commands))
    return "\n\n".join(out) + "\n"


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_the_transcript_reads_as_before(path: Path) -> None:
    told = replayed(path.read_text())
    if os.environ.get("GOLDEN") == "write":
        path.write_text(told)
    assert told == path.read_text()
