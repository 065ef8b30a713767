"""A picker over a real fleet and directory, for tests of its books and of what it sends."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

from hand_clock import HandClock
from trunkline.core.cost import CostModel
from trunkline.core.directory import Directory
from trunkline.core.fleet import Fleet, WorkerState
from trunkline.core.identity import Epochs, ModelIdentity, Namespace, Scope, derive_namespace
from trunkline.core.keys import chain
from trunkline.core.profiles import profile_named
from trunkline.core.records import WorkerId
from trunkline.core.routing import Router
from trunkline.gateway.contracts import (
    OPEN_GRANT,
    AttemptEnd,
    InferenceRequest,
    Pick,
    Route,
)
from trunkline.gateway.namespaces import Namespaces
from trunkline.gateway.picker import FleetPicker
from trunkline.gateway.receipts import Receipts
from trunkline.gateway.tokenise import PromptTokens
from trunkline.ports.worker import Endpoint, Target

COMPLETE, FAILED, GONE = AttemptEnd.COMPLETE, AttemptEnd.WORKER_FAILED, AttemptEnd.CLIENT_GONE
W0, W1 = WorkerId("w0"), WorkerId("w1")
BLOCK = 16
MAX_TOKENS = 50_000


class Characters:
    """A tokenizer with one token a character."""

    digest = "characters"
    vocab_size = 1 << 21

    def encode(self, text: str, *, add_special_tokens: bool) -> array[int]:
        return array("I", map(ord, text))

    def decode(self, token_ids: array[int]) -> str:
        return "".join(map(chr, token_ids))


class Contents:
    """A template that prints the contents alone."""

    digest = "contents"
    takes_parts = wants_system_first = False
    effort_without_thinking = "none"

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> str:
        return "".join(str(message["content"]) for message in messages)


class Bench:
    """A picker over a real fleet and directory, and what the workers' breakers were told."""

    def __init__(self, *names: WorkerId, policy: str = "cache_aware", ttl_ms: float = 5e3) -> None:
        self.clock = HandClock(ms=1_000.0)
        self.directory = Directory(max_blocks=100_000)
        self.fleet = Fleet(virtual_nodes=16, now=self.clock.now())
        self.told: Counter[tuple[WorkerId, str]] = Counter()
        self.ttl_ms = ttl_ms
        self.picker = FleetPicker(
            fleet=self.fleet,
            directory=self.directory,
            router=Router(
                fleet=self.fleet,
                cost=CostModel(profile_named("tiny"), churn_weight=0.0),
                policy=policy,
                rng=random.Random(5),
            ),
            prompts=PromptTokens(Characters(), Contents(), max_tokens=MAX_TOKENS),
            namespaces=Namespaces(derive, self.directory, draw=bytes),
            clock=self.clock,
            receipts=Receipts(kept=8, is_told=True, key=bytes(32)),
        )
        for name in names:
            self.join(name)

    def join(self, name: WorkerId, *, wants_checkpoints: bool = False) -> None:
        slot = self.directory.join(name, block_tokens=BLOCK)
        self.fleet.add(WorkerState(worker=name, slot=slot, block_tokens=BLOCK))
        self.picker.add_target(
            Target(
                worker=name,
                endpoint=Endpoint(host="127.0.0.1", port=1, host_header="w:1"),
                predicted_ttl_ms=self.ttl_ms,
                wants_checkpoints=wants_checkpoints,
                on_sent=lambda: self.told.update([(name, "sent")]),
                on_ended=lambda end: self.told.update([(name, end.value)]),
            )
        )

    def leave(self, name: WorkerId) -> None:
        self.fleet.remove(name)
        self.directory.leave(name)
        self.picker.remove_target(name)

    def pick(self, prompt: Any, *tried: WorkerId, is_stream: bool = True) -> Pick:
        picked = self.picker.pick(request(prompt, is_stream=is_stream), frozenset(tried))
        assert isinstance(picked, Pick)
        return picked

    def in_flight(self, name: WorkerId) -> int:
        state = self.fleet.get(name)
        return 0 if state is None else state.queue.in_flight_count

    def expected(self, name: WorkerId, tokens: array[int]) -> int:
        """Leading blocks that are expected at a worker."""
        match = self.directory.match(chain(namespace(BLOCK), tokens))
        return match.expected[self.directory.slot(name)]

    def assert_clean(self) -> None:
        """No book remembers an attempt."""
        tickets = self.picker._tickets
        assert len(tickets) == 0
        assert tickets._owing == {}
        assert tickets.due_count <= 64
        for state in self.fleet.states():
            assert state.queue.in_flight_count == 0
            assert state.queue.queue_ms(self.clock.now()) == 0.0


def derive(scope: Scope, epochs: Epochs, block_tokens: int, adapter: str = "") -> Namespace:
    model = ModelIdentity(model_id="m", block_tokens=block_tokens, adapter_digest=adapter)
    return derive_namespace(b"k" * 32, scope, model, epochs)


def namespace(block_tokens: int) -> Namespace:
    """The one of the open grant, which requests have where nothing else is said."""
    assert OPEN_GRANT.scope is not None
    return derive(OPEN_GRANT.scope, OPEN_GRANT.epochs, block_tokens)


def request(prompt: Any, *, is_stream: bool = True, body: bytes = b'{"a":1}') -> InferenceRequest:
    words = prompt.tobytes() if isinstance(prompt, array) else repr(prompt).encode()
    return InferenceRequest(
        request_id=f"r{crc32(words):x}",
        route=Route.COMPLETION if prompt is not None else Route.OTHER,
        method="POST",
        path="/v1/completions",
        body=body,
        is_stream=is_stream,
        prompt=prompt,
    )


def ids(count: int, first: int = 0) -> array[int]:
    return array("I", range(first, first + count))
