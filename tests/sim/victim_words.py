"""What a victim and an attacker say in one pair of runs: scenarios, prompts, and equal homes.

A scenario is drawn from its seed and holds everything but the victim's tokens; `contents_of` draws
those, several times. Read `non_interference.py` next, which runs them and says why homes are equal.
"""

from __future__ import annotations

import random
import re
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from trunkline.adapters.template import load_template
from trunkline.adapters.tokenizer import load_tokenizer
from trunkline.core.identity import ModelIdentity, Scope, ScopeKind, derive_namespace
from trunkline.core.keys import CHECKPOINT_TOKENS, chain
from trunkline.core.placement import HashRing
from trunkline.core.policies import POLICIES
from trunkline.core.records import WallTime, WorkerId
from trunkline.ports.template import ChatTemplate
from trunkline.ports.tokenizer import Tokenizer

MODEL_FOLDER = Path(__file__).resolve().parents[2] / "src" / "trunkline" / "worker" / "model"
MODEL = "trunkline-sim"
ORG, VICTIM, ATTACKER = "0" * 32, "a" * 32, "b" * 32
BLOCK = 16
RUN_S = 2.0
VIRTUAL_NODES = 16
MAX_REDRAWS = 500


# -- what is asked ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request. A prompt is a list of segments; equal numbers are equal tokens."""

    at_s: float
    segments: tuple[int, ...]
    is_chat: bool = False
    is_stream: bool = True
    answer_tokens: int = 1
    wish: str = ""
    user: str = "u"
    cut_tokens: int = 0
    """Tokens left out at the end."""
    raw: str = ""
    """A request that is refused, by its name in `REFUSED`; nothing else of this counts then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Everything of a run but the victim's tokens."""

    seed: int
    policy: str
    worker_count: int
    capacity_blocks: int
    floor_blocks: int
    cap_blocks: int | None
    requests_per_s: float | None
    faults: tuple[str, ...]
    restart_at_s: float | None
    leases_end_at_s: float | None
    """When the workers' leases run out, so that nothing is reused from then on."""
    raised: tuple[float, str] | None
    """When the victim is invalidated or revoked."""
    lengths: tuple[int, ...]
    """Tokens of each of the victim's segments."""
    victim: tuple[Call, ...]
    attacker: tuple[Call, ...]
    is_same_tenant: bool = False
    """The positive control: the attacker is another user of the victim's tenant."""

    @property
    def pins_homes(self) -> bool:
        """Whether where a prompt goes depends on its hash."""
        if self.policy == "consistent_hash":
            return self.worker_count > 1
        return self.policy == "cache_aware" and self.worker_count > 2


def scenario_of(seed: int, policy: str = "") -> Scenario:
    """The scenario of a seed. Eviction, faults, refusals and revocations are drawn, too."""
    draw = random.Random(f"scenario {seed}")
    lengths = tuple(
        draw.randint(2, 8) * BLOCK + draw.choice((0, 0, 5)) for _ in range(2 * CHAIN_SEGMENTS)
    )
    victim = tuple(_victims_call(draw) for _ in range(draw.randint(2, 4)))
    attacker = tuple(_attackers_call(draw, victim) for _ in range(draw.randint(3, 4)))
    floor = draw.choice((0, 16, 24))
    raised = (draw.uniform(0.2, RUN_S), draw.choice(("revoke", "invalidate")))
    made = Scenario(
        seed=seed,
        policy=policy or draw.choice(sorted(POLICIES)),
        worker_count=draw.choice((1, 2, 2, 3)),
        capacity_blocks=draw.choice((36, 48, 256)),
        floor_blocks=floor,
        cap_blocks=draw.choice((None, None, None, floor + 12)),
        requests_per_s=draw.choice((None, None, 2.0)),
        faults=draw.choice(((), (), ("drop-events:0.4",), ("late-events:150",))),
        restart_at_s=draw.choice((None, None, draw.uniform(0.2, RUN_S))),
        leases_end_at_s=draw.choice((None, None, None, None, draw.uniform(0.2, RUN_S))),
        raised=draw.choice((None, None, raised)),
        lengths=lengths,
        victim=victim,
        attacker=attacker,
    )
    if made.pins_homes:
        # One prompt has one home then: no second namespace of the same tokens.
        victim = tuple(replace(call, wish=call.wish.replace("user", "")) for call in victim)
        made = replace(made, victim=victim, raised=None)
    return made


CHAIN_SEGMENTS = 4
"""The victim has two conversations; each of its prompts is the beginning of one."""


def _victims_call(draw: random.Random) -> Call:
    first = draw.choice((0, CHAIN_SEGMENTS))
    return Call(
        at_s=draw.uniform(0.0, RUN_S),
        segments=tuple(range(first, first + draw.randint(1, CHAIN_SEGMENTS))),
        is_chat=first > 0,
        is_stream=draw.random() < 0.6,
        answer_tokens=draw.choice((1, 2, 4)),
        wish=draw.choice(("", "", "", "", "", "", "user", "none")),
    )


_OWN = 1_000
"""Segments from here on are the attacker's own; from `_OTHERS` on, the victim's of other runs."""
_OTHERS = 2_000


def _attackers_call(draw: random.Random, victim: Sequence[Call]) -> Call:
    at_s = draw.uniform(RUN_S / 4, RUN_S + 0.5)
    if draw.random() < 0.12:
        return Call(at_s=at_s, segments=(), raw=draw.choice(sorted(REFUSED)))
    known = draw.choice(victim)
    segments, cut = known.segments, 0
    match draw.choice(("whole", "whole", "cut", "continued", "other", "own")):
        case "cut":
            cut = draw.choice((1, 17, 40))
        case "continued":
            segments = (*segments, _OWN + 1)
        case "other":
            segments = tuple(_OTHERS + one for one in segments)
        case "own":
            segments = (_OWN, _OWN + draw.randint(1, 2))
        case _:
            pass
    return Call(
        at_s=at_s,
        segments=segments,
        cut_tokens=cut,
        is_chat=known.is_chat,
        is_stream=draw.random() < 0.6,
        answer_tokens=draw.choice((1, 2, 4)),
        wish=draw.choice(("", "", "", "", "", "", "user", "none")),
    )


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "no key": ("authorization: Bearer nobody\r\n", {"prompt": [1, 2, 3]}),
    "wider": ("x-cache-scope: org\r\n", {"prompt": [1, 2, 3]}),
    "session": ("x-cache-scope: session\r\nx-trunkline-session: " + "0" * 64 + "\r\n", {}),
    "salt": ("", {"prompt": [1, 2, 3], "stream_options": {"cache_salt": "x"}}),
    "model": ("", {"prompt": [1, 2, 3], "model": "another"}),
    "too long": ("", {"prompt": [7] * 9_000}),
}
"""What an attacker gets an error for: headers, and the body."""


# -- what is said ----------------------------------------------------------------------------------


class Contents:
    """The tokens of every segment. They have equally many digits and letters in every draw: what is
    on the wire is as long.
    """

    def __init__(self, scenario: Scenario, variant: int) -> None:
        self._scenario = scenario
        self._variant = variant
        self._redraws: Counter[tuple[int, bool]] = Counter()
        self._made: dict[tuple[int, bool], list[Any]] = {}
        self.others: Contents = self
        """Those of another run, which the attacker tries as well."""

    def prompt(self, call: Call) -> list[Any]:
        """Token ids, or words of a token each."""
        parts = [item for one in call.segments for item in self._segment(one, call.is_chat)]
        return parts[: len(parts) - call.cut_tokens]

    def redraw(self, number: int, is_chat: bool) -> None:
        """Other tokens for one of the victim's segments."""
        self._redraws[number, is_chat] += 1
        self._made.pop((number, is_chat), None)

    def _segment(self, number: int, is_chat: bool) -> list[Any]:
        if number >= _OTHERS:
            return self.others._segment(number - _OTHERS, is_chat)
        made = self._made.get((number, is_chat))
        if made is None:
            scenario, is_own = self._scenario, number >= _OWN
            name = f"{scenario.seed} {number} {is_chat}"
            if not is_own:
                name += f" {self._variant} {self._redraws[number, is_chat]}"
            length = 3 * BLOCK if is_own else scenario.lengths[number]
            source: Sequence[Any] = _words() if is_chat else range(1_000, 4_000)
            made = self._made[number, is_chat] = random.Random(name).choices(source, k=length)
        return made


def body_of(call: Call, prompt: list[Any]) -> dict[str, Any]:
    body: dict[str, Any] = {"max_tokens": call.answer_tokens, "stream": call.is_stream}
    if call.is_stream:
        body["stream_options"] = {"include_usage": True}
    if call.is_chat:
        return {**body, "messages": [{"role": "user", "content": "".join(prompt)}]}
    return {**body, "prompt": prompt}


def cached_tokens(raw: bytes) -> int:
    """What an answer's usage says was cached; -1 where it says nothing."""
    found = re.findall(rb'"cached_tokens": ?(\d+)', raw)
    return int(found[-1]) if found else -1


@cache
def _words() -> tuple[str, ...]:
    """Words of four letters that are one token each, also side by side."""
    tokenizer = load_tokenizer(MODEL_FOLDER)
    texts = (tokenizer.decode(array("I", [one])) for one in range(tokenizer.vocab_size))
    found = [text for text in texts if len(text) == 5 and text[0] == " " and text[1:].isalpha()]
    return tuple(text for text in found if text.isascii() and text.islower())


# -- equal homes ---------------------------------------------------------------------------------


def contents_of(scenario: Scenario, count: int) -> list[Contents]:
    """The victim's words in so many runs; with the same homes, where that matters."""
    first = Contents(scenario, 0)
    made = [first, *(_drawn(scenario, first, variant) for variant in range(1, count))]
    first.others = made[1]
    return made


def _drawn(scenario: Scenario, first: Contents, variant: int) -> Contents:
    contents = Contents(scenario, variant)
    if not scenario.pins_homes:
        return contents
    homes_of = _homes_in(scenario)
    settled: set[tuple[int, bool]] = set()
    for call in sorted(scenario.victim, key=lambda call: len(call.segments)):
        named = {(number, call.is_chat) for number in call.segments}
        wanted = homes_of(call, first)
        for _ in range(MAX_REDRAWS):
            if homes_of(call, contents) == wanted:
                break
            for number, is_chat in named - settled:
                contents.redraw(number, is_chat)
        else:
            raise AssertionError(f"no tokens found with the homes {wanted}")
        settled |= named
    return contents


def _homes_in(scenario: Scenario) -> Callable[[Call, Contents], list[WorkerId]]:
    """Where a prompt of the victim belongs, by the gateway's own derivation."""
    ring = HashRing(virtual_nodes=VIRTUAL_NODES)
    for number in range(scenario.worker_count):
        ring.add(WorkerId(f"w{number}:1"))
    identity = ModelIdentity(
        model_id=MODEL,
        block_tokens=BLOCK,
        tokenizer_digest=tokenizer().digest,
        template_digest=template().digest,
    )
    scope = Scope(kind=ScopeKind.TENANT, org=ORG, tenant=VICTIM)
    namespace = derive_namespace(root_key(scenario), scope, identity)

    def homes_of(call: Call, contents: Contents) -> list[WorkerId]:
        keys = chain(namespace, _tokens(call, contents.prompt(call)))
        return list(ring.walk(keys[min(len(keys), CHECKPOINT_TOKENS[0] // BLOCK) - 1]))

    return homes_of


def _tokens(call: Call, prompt: list[Any]) -> array[int]:
    if not call.is_chat:
        return array("I", prompt)
    text = template().render(body_of(call, prompt)["messages"], None, {})
    return tokenizer().encode(text, add_special_tokens=False)


def root_key(scenario: Scenario) -> bytes:
    return random.Random(f"root key {scenario.seed}").randbytes(32)


@cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(MODEL_FOLDER)


@cache
def template() -> ChatTemplate:
    return load_template(MODEL_FOLDER, wall=lambda: WallTime(0.0))
