"""Mixed traffic for real engines: shared beginnings, turns, branches, repeats, tenants and users,
many scripts, chats and completions, text and token ids. The same for a seed, but for the answers
that later turns quote.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from fleet import text_of

SCRIPTS = (
    "naïve café, Größe und Straße", "дерево и слово", "你好世界，缓存前缀",
    "東京の天気、ありがとう",
    "안녕하세요", "שלום وسلام", "नमस्ते दुनिया", "🙂👍🏽🚀 — “quoted” ½ µ °C",
    "a\u0301 \u200d \ufeff x\u00a0y",
)  # fmt: skip
SYSTEM_WORDS = (40, 150, 400)
ANSWER_TOKENS = 24
MAX_TURNS = 4
DEEPEST = 60
"""Conversations that are gone on with; older ones rest."""


@dataclass(slots=True)
class Ask:
    """One request: who asks, and what."""

    caller: int
    scope: str
    path: str
    body: dict[str, Any]
    take_answer: Callable[[str], None] = lambda _text: None
    """Called with the answer's text, which later turns quote."""


@dataclass(slots=True)
class _Talk:
    caller: int
    scope: str
    messages: list[dict[str, str]] = field(default_factory=list[dict[str, str]])


def ids(dice: random.Random, count: int) -> list[int]:
    """So many token ids of ordinary words."""
    return [dice.randrange(512, 3_072) for _ in range(count)]


def mixed(seed: int, callers: int) -> Iterator[Ask]:
    """Requests without end; take as many as are wanted."""
    dice = random.Random(seed)
    talks: list[_Talk] = []
    texts: list[Ask] = []
    while True:
        kind = dice.random()
        if kind < 0.2 and texts:
            yield dice.choice(texts)  # word for word again
        elif kind < 0.4:
            asked = _completion(dice, callers)
            texts.append(asked)
            yield asked
        elif kind < 0.6 or not talks:
            talks.append(_opened(dice, callers))
            yield _turn(dice, talks[-1])
        else:
            talk = dice.choice(talks[-DEEPEST:])
            if kind < 0.75:
                talks.append(talk := _branched(dice, talk))
            yield _turn(dice, talk)


def _opened(dice: random.Random, callers: int) -> _Talk:
    system = text_of(dice.choice(SYSTEM_WORDS), "system")
    talk = _Talk(dice.randrange(callers), dice.choice(("", "", "user")))
    talk.messages.append({"role": "system", "content": system})
    return talk


def _branched(dice: random.Random, talk: _Talk) -> _Talk:
    """As far as some turn of it, and then elsewhere; of the same caller."""
    kept = 1 + 2 * dice.randint(0, len(talk.messages) // 2)
    return _Talk(talk.caller, talk.scope, talk.messages[:kept])


def _turn(dice: random.Random, talk: _Talk) -> Ask:
    if len(talk.messages) > 2 * MAX_TURNS:
        del talk.messages[1:]
    said = f"{text_of(dice.randint(3, 60), dice.random())} {dice.choice(SCRIPTS)}"
    asked = [*talk.messages, {"role": "user", "content": said}]

    def take(answer: str) -> None:
        talk.messages[:] = [*asked, {"role": "assistant", "content": answer}]

    body = {"messages": asked, "max_tokens": dice.randint(1, ANSWER_TOKENS)}
    return Ask(talk.caller, talk.scope, "/v1/chat/completions", body, take)


def _completion(dice: random.Random, callers: int) -> Ask:
    document = text_of(dice.choice(SYSTEM_WORDS), f"document {dice.randrange(3)}")
    prompt: Any = f"{document} {dice.choice(SCRIPTS)} {text_of(dice.randint(1, 40), dice.random())}"
    if dice.random() < 0.3:
        common = random.Random(dice.randrange(3))
        prompt = ids(common, dice.choice((31, 32, 33, 96, 200))) + ids(dice, dice.randrange(40))
    body = {"prompt": prompt, "max_tokens": dice.randint(1, ANSWER_TOKENS)}
    return Ask(dice.randrange(callers), "", "/v1/completions", body)
