"""An engine around the connector's two halves, driven in the order in which vLLM's scheduler and
worker drive them: everything that passes between the halves is pickled on its way.

Its KV is made from tokens, so that a block in the wrong place is seen. `tests/vllm` holds the real
engine's side of the same order.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hand_clock import HandClock
from trunkline.connectors.agent import Belief
from trunkline.connectors.keeper import Keeper, KeeperTerms
from trunkline.connectors.messages import Loaded, StepPlan, StepReport
from trunkline.connectors.plan import Planner
from trunkline.core.eviction import make_evictor
from trunkline.core.freshness import Freshness, Grant, Taken
from trunkline.core.transfer import Grant as PullGrant
from trunkline.core.transfer import hash_scheme, keys_digest, kv_chain
from trunkline.kv.client import Puller
from trunkline.kv.judge import PullHost, StoreJudge
from trunkline.kv.pulls import PullOptions
from trunkline.kv.records import Component, Layout
from trunkline.kv.server import PullServer, ServerOptions
from trunkline.kv.store import BlockStore, StoreOptions
from trunkline.kv.wire import Identity

BLOCK = 4
KEY = b"k" * 32
SUBJECTS = ("fleet", "org/o", "tenant/t", "model/m")
EPOCHS = [1, 2, 3, 0, 0, 0, 7, 0]
"""In the order of the kinds: fleet, org, tenant, user, key class, public, model, adapter."""
KNOWN = {"fleet": 1, "org/o": 2, "tenant/t": 3, "model/m": 7, "tenant/u": 5}
SALT = "s" * 43
_Record = TypeVar("_Record")
PATIENCE_S = 30.0
"""A test that waits longer than this has found a bug: nothing here takes so long."""


def layout(model: str = "m1", block_tokens: int = BLOCK, size_bytes: int = 192) -> Layout:
    parts = (Component(name="kv0", size_bytes=size_bytes), Component(name="kv1", size_bytes=64))
    return Layout(
        model=model, adapter="", tokenizer="", rope="r", dtype="f32", kv_format="k", tp_rank=0,
        tp_size=1, block_tokens=block_tokens, components=parts, chunk_bytes=128,
    )  # fmt: skip


def told(*, ns: str = "ab" * 16, tenant: str = "tenant/t", epoch: int = 3, **more: Any) -> Any:
    """What a gateway says in `kv_transfer_params`; `pull` may be among `more`."""
    subjects = [subject if subject != "tenant/t" else tenant for subject in SUBJECTS]
    epochs = [*EPOCHS[:2], epoch, *EPOCHS[3:]]
    ticket = {"ns": ns, "epochs": epochs, "rev": 9, "tenant": "t1", "subjects": subjects}
    ticket |= {name: more.pop(name) for name in ("floor", "cap", "rev") if name in more}
    return {"trunkline": {"ticket": ticket, **more}}


@dataclass(slots=True, kw_only=True)
class Request:
    """`plan.EngineRequest`."""

    request_id: str
    tokens: list[int]
    cache_salt: str | None = SALT
    kv_transfer_params: dict[str, Any] | None = field(default_factory=told)
    lora_request: Any = None
    mm_features: Any = ()
    prompt_embeds: Any = None
    resumable: bool = False
    num_computed_tokens: int = 0

    @property
    def all_token_ids(self) -> Sequence[int]:
        return self.tokens


@dataclass(slots=True, kw_only=True)
class Ran:
    """What became of one request."""

    promised_blocks: int
    """What the engine counted on, beyond what its device had."""
    brought_blocks: int
    """Of these, on the device and right."""
    asked: int
    """How often it was asked what can be brought."""


class Memory:
    """`keeper.Device` in plain memory."""

    def __init__(self, blocks: int, size_bytes: int) -> None:
        self.blocks = [bytearray(size_bytes) for _ in range(blocks)]

    def read(self, block_id: int, into: bytearray) -> None:
        into[:] = self.blocks[block_id]

    def write(self, block_id: int, data: bytearray) -> None:
        self.blocks[block_id][:] = data


class Engine:
    """One engine of one rank."""

    def __init__(
        self,
        name: str = "e1",
        *,
        host_blocks: int = 32,
        staging_blocks: int = 16,
        kind: Layout | None = None,
        clock: Any = None,
        max_loads: int = 8,
        is_leased: bool = True,
        max_pull_ms: float = 5_000.0,
        stall_ms: float = 2_000.0,
    ) -> None:
        self.clock = clock or HandClock()
        self.layout = kind or layout()
        size = self.layout.block_bytes
        self.freshness = Freshness(f"life-of-{name}")
        belief = Belief(freshness=self.freshness, boot=self.clock.boot)
        self.belief = belief
        self.device = Memory(256, size)
        self._ids = iter(range(1, 256))
        self._held: dict[str, list[int]] = {}
        self.identity = Identity(
            worker=name,
            incarnation=self.freshness.boot_nonce,
            scheme=hash_scheme(self.layout.block_tokens),
        )
        draws = iter(range(1, 1_000_000))

        def draw(count: int) -> bytes:
            seed = f"{name} {next(draws)}".encode()
            return hashlib.blake2b(seed, digest_size=32).digest()[:count]

        self.draw = draw
        self.store = BlockStore(
            self.layout,
            StoreOptions(host_bytes=host_blocks * size, staging_bytes=staging_blocks * size),
            clock=self.clock,
            judge=StoreJudge(belief),
            make_order=lambda: make_evictor("lru", capacity_bytes=host_blocks * size),
            draw=draw,
        )
        host = PullHost(belief)
        self.puller = Puller(
            self.store, self.layout, self.identity, KEY, self.clock,
            PullOptions(stall_ms=stall_ms), host=host, draw=draw,
        )  # fmt: skip
        self.server = PullServer(
            self.store, self.layout, self.identity, KEY, self.clock,
            ServerOptions(is_local_offered=False), host=host, draw=draw,
        )  # fmt: skip
        self.planner = Planner(
            block_tokens=self.layout.block_tokens, transfer_key=KEY, max_loads=max_loads
        )
        self.keeper = Keeper(
            self.store,
            self.device,
            belief,
            self.clock,
            KeeperTerms(
                block_tokens=self.layout.block_tokens,
                max_loads=max_loads,
                max_pull_ms=max_pull_ms,
                saved_ms=1.0,
                device_share=host_blocks / 256,
            ),
            puller=self.puller,
            transfer_key=KEY,
        )
        if is_leased:
            self.lease()

    def lease(self, *, rev: int = 9, **epochs: int) -> None:
        grant = Grant(
            ask=self.freshness.ask(self.clock.boot()), rev=rev, ttl_ms=3_000.0, epochs=KNOWN
        )
        assert self.freshness.take(grant) is Taken.ARMED

    def close(self) -> None:
        self.keeper.close()
        if self.server.address[1]:
            self.server.close()

    # -- as the engine does it ---------------------------------------------------------------------

    def step(self, **scheduled: int) -> StepReport:
        """One step: so many tokens of each request are computed."""
        plan = self.planner.step(scheduled, lambda request_id: self._held[request_id])
        plan = _carried(plan, StepPlan)
        self.keeper.begin(plan)
        self.keeper.save(plan.saves)
        report = _carried(self.keeper.drain(), StepReport)
        self.planner.learn(report)
        return report

    def load(self, request: Request, found: int, here: int = 0) -> Loaded:
        """Make room for what was found, and step until it is loaded."""
        size = self.layout.block_tokens
        ids = self._hold(request, here + found // size)
        self.planner.allocated(request.request_id, ids, found)
        return self.await_load(request.request_id)

    def await_load(self, request_id: str) -> Loaded:
        ends_at = time.monotonic() + PATIENCE_S
        while time.monotonic() < ends_at:
            for loaded in self.step().loaded:
                if loaded.load.request_id == request_id:
                    return loaded
            time.sleep(0.001)
        raise AssertionError(f"the load of {request_id} does not end")

    def run(
        self, request: Request, *, on_device: int = 0, during: Callable[[], None] | None = None
    ) -> Ran:
        """A request from its beginning to its end; `on_device` leading blocks are there already.
        `during` is called when its load has begun.
        """
        size = self.layout.block_tokens
        self.planner.begin(request)
        self._hold(request, on_device)
        self._compute(request, 0, on_device)
        asked, found = 1, self.planner.matched(request.request_id, on_device * size)
        while found is None:
            self.step()
            asked += 1
            found = self.planner.matched(request.request_id, on_device * size)
        brought = 0
        if found:
            if during is not None:
                self._hold(request, on_device + found // size)
                during()
            brought = self.load(request, found, on_device).blocks
        ready = on_device + brought
        self._check(request, ready)
        whole = len(request.tokens) // size
        self._hold(request, whole)
        self._compute(request, ready, whole)
        request.num_computed_tokens = ready * size
        self.step(**{request.request_id: len(request.tokens) - ready * size})
        request.num_computed_tokens = len(request.tokens)
        self.planner.finished(request.request_id)
        self.step()
        return Ran(promised_blocks=found // size, brought_blocks=brought, asked=asked)

    def _hold(self, request: Request, blocks: int) -> list[int]:
        held = self._held.setdefault(request.request_id, [])
        while len(held) < blocks:
            held.append(next(self._ids))
        return held

    def _compute(self, request: Request, begin: int, end: int) -> None:
        for index in range(begin, end):
            block_id = self._held[request.request_id][index]
            self.device.blocks[block_id][:] = self.content(request, index)

    def _check(self, request: Request, blocks: int) -> None:
        """No false hit: what is taken for computed is what would have been."""
        for index in range(blocks):
            block_id = self._held[request.request_id][index]
            assert self.device.blocks[block_id] == self.content(request, index), index

    def content(self, request: Request, index: int) -> bytes:
        upto = array("I", request.tokens[: (index + 1) * self.layout.block_tokens]).tobytes()
        seed = hashlib.blake2b(upto, digest_size=32).digest()
        return (seed * (self.layout.block_bytes // 32 + 1))[: self.layout.block_bytes]

    # -- as the gateway does it --------------------------------------------------------------------

    def order(
        self, source: Engine, request: Request, first: int, last: int, **changes: Any
    ) -> dict[str, Any]:
        """What a request is sent with to pull blocks of its prompt from another engine."""
        size = self.layout.block_tokens
        keys = kv_chain(request.cache_salt or "", array("I", request.tokens), size)
        said: dict[str, Any] = {
            "source": source.identity.worker,
            "source_incarnation": source.identity.incarnation,
            "destination": self.identity.worker,
            "destination_incarnation": self.identity.incarnation,
            "ns": bytes.fromhex("ab" * 16),
            "subjects": SUBJECTS,
            "epochs": (1, 2, 3, 7),
            "rev": 9,
            "layout": self.layout.digest,
            "first_block": first,
            "block_count": last - first,
            "keys": keys_digest(keys[first * 32 : last * 32]),
            "max_bytes": (last - first) * self.layout.block_bytes,
            "deadline_ms": int(self.clock.wall() * 1e3 + 20_000),
            "nonce": self.draw(16),
        }
        host, port = source.server.address
        return {
            "grant": PullGrant(**(said | changes)).signed(KEY),
            "host": host,
            "port": port,
            "local": "",
            "source": source.identity.worker,
        }

    def ended(self) -> list[tuple[str, str | None, int]]:
        """How pulls ended, as the gateway is told."""
        answers = [json.loads(one["told"]) for one in self.keeper.take_told()]
        return [(one["end"], one["reason"], one["blocks"]) for one in answers]


def _carried(record: _Record, kind: type[_Record]) -> _Record:
    read = pickle.loads(pickle.dumps(record))
    assert isinstance(read, kind)
    return read
