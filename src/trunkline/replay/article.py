"""W5: the workload of the seed article, generated.

Chat sessions of 2 to 8 turns over 64 system prompts, at a steady 47 requests a second. Each prompt
is the system prompt, the user's turns so far and the workers' answers so far. Sessions are under
way at time 0 and cut at the end, so that the rate has no ramp. Owns the free parameters; they were
fitted to three ceilings on hit tokens (an endless cache 92.7 %, 40,000 blocks 89.0 %, 2,500 blocks
34.5 %), checked by tests/unit/test_replay_article.py. Read `workloads.py` next.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from trunkline.replay.traces import PartKind, PromptPart, TraceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ArticleShape:
    """The numbers of the workload. Those in the first group are given, the others fitted."""

    requests: int = 10_000
    span_ms: float = 214_000.0
    min_turns: int = 2
    max_turns: int = 8
    system_prompts: int = 64
    min_system_tokens: int = 1_200
    max_system_tokens: int = 4_600
    zipf_exponent: float = 1.0
    think_ms: float = 13_000.0
    answer_tokens: int = 64
    block_tokens: int = 16

    user_mean_tokens: float = 160.0
    """Length of a user's turn: `min_user_tokens` plus an exponential part."""
    min_user_tokens: int = 16
    answer_ms: float = 750.0
    """From a turn's arrival to the end of its answer, before the user thinks."""
    warm_ms: float = 300_000.0
    """Sessions start this long before time 0; only what arrives from 0 on is kept."""
    seed: int = 30
    """Among 40 seeds the one whose mean prompt (3,557 tokens) and ceilings lie closest to the
    reference.
    """


@dataclass(slots=True)
class _Session:
    """A session while it is being written: its parts so far and the ids of its own full blocks."""

    number: int
    system: int
    system_tokens: int
    parts: list[PromptPart]
    tokens: int
    block_ids: list[int] = field(default_factory=list[int])


class _BlockIds:
    """Gives a number to each distinct block; a prompt's blocks are shared inside its system prompt
    only.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._system_ids: dict[tuple[int, int], int] = {}
        self._next = 0

    def of(self, session: _Session) -> tuple[int, ...]:
        """Ids of all blocks of the session's prompt as it stands; a partial last block gets a
        fresh one.
        """
        full = session.tokens // self._block_tokens
        while len(session.block_ids) < full:
            session.block_ids.append(self._full_id(session, len(session.block_ids)))
        if session.tokens % self._block_tokens:
            return (*session.block_ids, self._fresh())
        return tuple(session.block_ids)

    def _full_id(self, session: _Session, index: int) -> int:
        if (index + 1) * self._block_tokens > session.system_tokens:
            return self._fresh()
        key = (session.system, index)
        if key not in self._system_ids:
            self._system_ids[key] = self._fresh()
        return self._system_ids[key]

    def _fresh(self) -> int:
        self._next += 1
        return self._next - 1


def article_requests(shape: ArticleShape | None = None) -> list[TraceRequest]:
    """The workload, sorted by time; the same for the same shape."""
    chosen = shape or ArticleShape()
    draw = random.Random(chosen.seed)
    system_tokens = _system_lengths(chosen, draw)
    turns = [turn for start in _starts(chosen, draw) for turn in _turns(chosen, draw, start)]
    kept = sorted(turn for turn in turns if turn[0] >= 0.0)[: chosen.requests]
    assert len(kept) == chosen.requests, f"{len(kept)} turns are too few for {chosen.requests}"
    scale = chosen.span_ms / kept[-1][0]
    writer = _Writer(chosen, system_tokens)
    return [
        replace(writer.request(session_number, turn), arrival_ms=at_ms * scale)
        for at_ms, session_number, turn in kept
    ]


class _Writer:
    """Writes the prompts of sessions turn by turn. A session's draws depend on its number alone."""

    def __init__(self, shape: ArticleShape, system_tokens: list[int]) -> None:
        self._shape = shape
        self._system_tokens = system_tokens
        self._weights = [
            1.0 / rank**shape.zipf_exponent for rank in range(1, len(system_tokens) + 1)
        ]
        self._blocks = _BlockIds(shape.block_tokens)
        self._sessions: dict[int, tuple[_Session, random.Random]] = {}

    def request(self, number: int, turn: int) -> TraceRequest:
        if number not in self._sessions:
            self._sessions[number] = self._begun(number)
        session, draw = self._sessions[number]
        while _user_turns(session) <= turn:
            self._add_turn(session, draw)
        return TraceRequest(
            arrival_ms=0.0,
            input_tokens=session.tokens,
            output_tokens=self._shape.answer_tokens,
            block_ids=self._blocks.of(session),
            block_tokens=self._shape.block_tokens,
            session=f"s{number}",
            parts=tuple(session.parts),
        )

    def _begun(self, number: int) -> tuple[_Session, random.Random]:
        draw = random.Random(self._shape.seed * 1_000_003 + number)
        system = draw.choices(range(len(self._weights)), self._weights)[0]
        tokens = self._system_tokens[system]
        part = PromptPart(kind=PartKind.SYSTEM, key=system, tokens=tokens)
        return _Session(number, system, tokens, [part], tokens), draw

    def _add_turn(self, session: _Session, draw: random.Random) -> None:
        shape, turn = self._shape, _user_turns(session)
        key = session.number * 16 + turn
        if turn > 0:
            session.parts.append(
                PromptPart(kind=PartKind.ANSWER, key=key, tokens=shape.answer_tokens)
            )
            session.tokens += shape.answer_tokens
        extra = draw.expovariate(1.0 / (shape.user_mean_tokens - shape.min_user_tokens))
        user_tokens = shape.min_user_tokens + round(extra)
        session.parts.append(PromptPart(kind=PartKind.USER, key=key, tokens=user_tokens))
        session.tokens += user_tokens


def _user_turns(session: _Session) -> int:
    return len(session.parts) // 2


def _system_lengths(shape: ArticleShape, draw: random.Random) -> list[int]:
    """Evenly spaced lengths in a drawn order, so that popular prompts are neither all short nor
    all long.
    """
    step = (shape.max_system_tokens - shape.min_system_tokens) / (shape.system_prompts - 1)
    lengths = [round(shape.min_system_tokens + step * rank) for rank in range(shape.system_prompts)]
    draw.shuffle(lengths)
    return lengths


def _starts(shape: ArticleShape, draw: random.Random) -> Iterator[tuple[int, float]]:
    """Poisson session starts at the rate that makes the wanted number of requests."""
    mean_turns = (shape.min_turns + shape.max_turns) / 2.0
    per_ms = shape.requests / shape.span_ms / mean_turns
    at_ms, number = -shape.warm_ms, 0
    while at_ms < shape.span_ms * 1.1:
        at_ms += draw.expovariate(per_ms)
        yield number, at_ms
        number += 1


def _turns(
    shape: ArticleShape, draw: random.Random, start: tuple[int, float]
) -> Iterator[tuple[float, int, int]]:
    """`(time, session, turn)` of one session's turns."""
    number, at_ms = start
    for turn in range(draw.randint(shape.min_turns, shape.max_turns)):
        yield at_ms, number, turn
        at_ms += shape.answer_ms + draw.expovariate(1.0 / shape.think_ms)
