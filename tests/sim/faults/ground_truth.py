"""Ground truth beside the KV: whose tokens each block really holds, written down as it is computed.

By the tokens themselves and by who really asked, never by a hash, a salt or a ticket: a block that
is bound to another's request, or to other tokens, or after its revocation was acknowledged, is seen
here whatever the product believes. Read `checks.py` for what else is checked.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from faults.callers import Prompts
from faults.crew import Life
from faults.gate import tenant_id
from faults.kv_truth import Content, KvTruth, Owner
from faults.setting import Call, Setting

from trunkline.worker.blocks import BlockState


def owner_of(call: Call) -> Owner:
    match call.wish:
        case "none":
            return None
        case "user":
            return ("user", call.tenant, call.user)
        case _:
            return ("tenant", call.tenant)


@dataclass(slots=True)
class Truth:
    """Of all lives of all workers."""

    setting: Setting
    prompts: Prompts
    violate: Callable[[str, str], None]
    """(invariant, what is wrong)"""
    epoch_of: Callable[[int], int]
    """A tenant's, as committed by now."""
    acked: dict[int, int] = field(default_factory=dict[int, int])
    """Tenant -> the epoch that a receipt proved to be in force."""
    contents: dict[tuple[str, int], dict[int, Content]] = field(
        default_factory=lambda: {}  # noqa: PIE807  # pyright knows its type this way
    )
    hits: int = 0
    bound_blocks: int = 0
    notes: dict[str, int] = field(default_factory=dict[str, int])
    """How often something rare was seen."""
    kv: KvTruth | None = None
    """Where KV moves."""
    _calls: dict[int, Call] = field(default_factory=dict[int, Call])
    _current: dict[str, Call] = field(default_factory=dict[str, Call])

    def __post_init__(self) -> None:
        self._calls = {call.number: call for call in self.setting.calls}
        if self.setting.pulls is not None:
            self.kv = KvTruth(self.setting.block_tokens, self.acked, self.violate)

    def comes(self, worker: str, number: str) -> None:
        """The next that is submitted at this worker is for this call."""
        self._current[worker] = self._calls[int(number)]

    def watch(self, life: Life) -> None:
        """Write down and check all that this life computes and binds."""
        engine, cache = life.engine, life.engine.cache
        contents = self.contents[life.name, life.number] = {}
        asked: dict[int, tuple[array[int], Call]] = {}
        binding: dict[int, tuple[Any, Call]] = {}
        submit, admit = engine.submit, cache.admit
        compute, fault, take = cache.compute, cache.fault, cache.places.take

        def submitted(prompt: array[int], *args: Any, **words: Any) -> Any:
            call = self._current[life.name]
            asked[id(prompt)] = (prompt, call)
            self._check_prompt(call, prompt)
            return submit(prompt, *args, **words)

        def admitted(tokens: array[int], *args: Any, **words: Any) -> Any:
            sequence = admit(tokens, *args, **words)
            call = asked[id(tokens)][1]
            if sequence is not None:
                binding[id(sequence)] = (sequence, call)
                if self.kv is not None:
                    self.kv.came_up(life, sequence, owner_of(call), contents)
                self._check_bound(life, call, sequence, contents)
            return sequence

        def computed(sequence: Any, upto_tokens: int, **words: Any) -> None:
            first = len(sequence.blocks)
            compute(sequence, upto_tokens, **words)
            self._write_down(sequence, first, binding[id(sequence)][1], contents)

        def faulted(sequence: Any) -> Any:
            reason = fault(sequence)
            if reason is not None:
                self._note("second check refuses")
            return reason

        def taken(domain: Any) -> Any:
            block = take(domain)
            if block.state is BlockState.READY:  # who had it loses it
                self._check_evicted(life, block, domain.name, contents)
            return block

        cache.places.take = taken
        cache.fault = faulted
        engine.submit = submitted
        cache.admit = admitted
        cache.compute = computed
        if self.kv is not None:
            self.kv.watch(life)

    def _write_down(
        self, sequence: Any, first: int, call: Call, contents: dict[int, Content]
    ) -> None:
        """The blocks of a sequence from `first` on, which were just computed for this call."""
        epoch = self.epoch_of(call.tenant)
        for index in range(first, len(sequence.blocks)):
            block = sequence.blocks[index]
            if id(block) in contents:
                self._note("block evicted")
            upto = (index + 1) * self.setting.block_tokens
            content = contents[id(block)] = Content(
                generation=block.generation,
                tokens=sequence.tokens[:upto].tobytes(),
                owner=owner_of(call),
                tenant=call.tenant,
                epoch=epoch,
            )
            if self.kv is not None:
                self.kv.computed(block.kv, content)

    def _check_prompt(self, call: Call, prompt: array[int]) -> None:
        """What a worker is asked is what the client asked, and maybe what it was answered."""
        wanted = self.prompts.tokens(call)
        further = prompt[len(wanted) :]
        is_asked = prompt[: len(wanted)] == wanted
        if not is_asked or further != self.prompts.answer(call, len(further)):
            self.violate("I1", f"call {call.number} was sent with other tokens")
        if further:
            self._note("continued")

    def _note(self, what: str) -> None:
        self.notes[what] = self.notes.get(what, 0) + 1

    def _check_bound(
        self, life: Life, call: Call, sequence: Any, contents: dict[int, Content]
    ) -> None:
        owner, size = owner_of(call), life.engine.cache.block_tokens
        self.hits += bool(sequence.blocks)
        self.bound_blocks += len(sequence.blocks)
        for index, block in enumerate(sequence.blocks):
            told = f"block {index} of call {call.number} at {life.name}#{life.number}"
            content = contents.get(id(block))
            if content is None or content.generation != block.generation:
                self.violate("I2", f"{told} was never computed as it is")
                continue
            if content.owner != owner or owner is None:
                self.violate("I7", f"{told} is of {content.owner}, used for {owner}")
            if content.tokens != sequence.tokens[: (index + 1) * size].tobytes():
                self.violate("I1", f"{told} has other tokens")
            if content.epoch < self.acked.get(content.tenant, 0):
                self.violate(
                    "I3",
                    f"{told} is of epoch {content.epoch}, used after the ack of "
                    f"{self.acked[content.tenant]}",
                )

    def _check_evicted(
        self, life: Life, evicted: Any, taker: str, contents: dict[int, Content]
    ) -> None:
        """I8: what is at or below a tenant's floor goes to no other, where anything else is idle.
        (Where nothing is, it was promised before that tenant came.)
        """
        cache = life.engine.cache

        def whose_is(block: Any) -> str:
            content = contents.get(id(block))
            if content is None or content.generation != block.generation:
                return taker  # written in this very step
            return tenant_id(content.tenant)

        has = Counter({domain.name: domain.working for domain in cache.places.domains})
        idle: set[str] = set()
        for block in (block for copies in cache._resident.values() for block in copies):
            whose = whose_is(block)
            has[whose] += 1
            if not block.references and block is not evicted:
                idle.add(whose)
        victim, floor = whose_is(evicted), self.setting.floor_blocks
        if victim == taker or has[victim] > floor:
            return
        if floor:
            self._note("what a floor protects is taken, as nothing else is there")
        if any(whose == taker or has[whose] > floor for whose in idle):
            told = f"a block at {life.name}#{life.number} of who had {has[victim]} of {floor}"
            self.violate("I8", f"{told} made room for another tenant")

    def leading_blocks(self, life: Life, call: Call) -> int:
        """How many of a call's blocks really are resident and usable there, from the first on."""
        cache, size = life.engine.cache, life.engine.cache.block_tokens
        contents = self.contents[life.name, life.number]
        held = [contents[id(block)] for copies in cache._resident.values() for block in copies]
        if self.kv is not None:
            held += self.kv.there(life)
        owner, epoch = owner_of(call), self.epoch_of(call.tenant)
        there = {one.tokens for one in held if one.owner == owner and one.epoch >= epoch}
        tokens = self.prompts.tokens(call)
        count = 0
        while (count + 1) * size < len(tokens) and tokens[: (count + 1) * size].tobytes() in there:
            count += 1
        return count
