"""Tests one worker with requests of the gateway's own, and says what came of it.

    tokens     a text and a chat, as /tokenize has them (else as usage counts them), against ours
    cold       a prompt that nobody sent before, under a salt of its own: nothing may be reused
    again      the same: what is reused shows the prefix cache and the size of its blocks
    events     each of its blocks is announced, under that salt, and the directory finds it
    other      the same prompt under another salt: nothing may be reused
    adapter    the same under the first salt with an adapter: nothing may be reused

A few blocks each, one token long in the answer, and none while requests wait there. What it could
not see to the end says nothing. Must never: send what a tenant wrote, or judge (`core/alignment.py`
does). Read `control/selftest.py` for when.
"""

from __future__ import annotations

import asyncio
import functools
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from trunkline.core.alignment import (
    AdapterTrial,
    Examination,
    Reading,
    Sighting,
    State,
    Topic,
    canary_tokens,
    joined,
    judge,
)
from trunkline.core.directory import Directory
from trunkline.core.epochs import EpochTable
from trunkline.core.events import BlocksStored
from trunkline.core.feed import WorkerFeed
from trunkline.core.fleet import Fleet, WorkerState
from trunkline.core.records import WorkerId
from trunkline.core.repair import FeedState
from trunkline.errors import WorkerLost, WorkerTimeout
from trunkline.gateway.contracts import ChatPrompt, Grant, InferenceRequest, Route
from trunkline.gateway.errands import COMPLETIONS, Errand, Errands, canary_grant
from trunkline.gateway.namespaces import Namespaces
from trunkline.gateway.tokenise import PromptTokens
from trunkline.ports.clock import Clock
from trunkline.ports.worker import Target

REQUEST_MS = 10_000.0
CHECK_MS = 40_000.0
"""Of all requests to one rank together."""
EVENTS_MS = 3_000.0
"""Events of an answer come within this, or are taken as not coming."""
BUSY_MS = 250.0
"""A worker with more prefill in front of a request than this is tested later."""
CALM_MS = 5_000.0
"""So long it is waited for."""
LEASE_TRIES = 3
"""Where an agent stands beside the engine nothing is reused until its lease is there."""
MAX_ADAPTERS = 2
MAX_RUNS = 64
AT_ONCE = 8
"""Workers tested at one time."""
_PAUSE_S = 0.02
_NAME_LOOKS = 15
_TRY_PAUSE_S = 1.0

_TEXT = "Naïve café, 12,5 µm:\n\tif x == 3:  # 你好 мир 🙂\n    <b>a & b</b>"
_CHATS: tuple[list[dict[str, Any]], ...] = (
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": _TEXT},
        {"role": "assistant", "content": "No."},
        {"role": "user", "content": "Why?  "},
    ],
    [{"role": "user", "content": _TEXT}],
)
"""The second is for templates that take no system message."""

_Shape = TypeVar("_Shape")


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None

    @property
    def cached(self) -> int | None:
        details = self.usage.prompt_tokens_details if self.usage else None
        return None if details is None else details.cached_tokens


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Unfinished(Exception):
    """Why it does not come to its end."""


@dataclass(slots=True, kw_only=True)
class ExaminerParts:
    """What an examiner works with."""

    errands: Errands
    namespaces: Namespaces
    directory: Directory
    fleet: Fleet
    prompts: PromptTokens
    table: Callable[[], EpochTable]
    served_model: Callable[[], str]
    target_of: Callable[[WorkerId], Target | None]
    clock: Clock
    draw: Callable[[int], bytes] = field(repr=False)


class Examiner:
    """An `Examine` of `ports/worker.py`. One for a gateway."""

    def __init__(self, parts: ExaminerParts) -> None:
        self._parts = parts
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._hashes = HashNames(parts.draw(16).hex(), parts.draw(64))

    async def __call__(
        self,
        ranks: Sequence[tuple[WorkerId, WorkerFeed | None]],
        adapters: Sequence[str],
    ) -> Examination:
        async with self._turns:
            found = [
                (worker, await self._examine(worker, feed, adapters)) for worker, feed in ranks
            ]
        return joined(found)

    async def _examine(
        self, worker: WorkerId, feed: WorkerFeed | None, adapters: Sequence[str]
    ) -> Examination:
        parts = self._parts
        state, target = parts.fleet.get(worker), parts.target_of(worker)
        if state is None or target is None:
            return Examination(unfinished="it left")
        trial = _Trial(parts, state, target, feed)
        try:
            async with asyncio.timeout(CHECK_MS / 1e3):
                await trial.run(adapters[:MAX_ADAPTERS], self._hashes)
        except TimeoutError:
            return Examination(unfinished=f"it took longer than {CHECK_MS / 1e3:g} s")
        except (WorkerLost, WorkerTimeout) as error:
            return Examination(unfinished=str(error))
        except _Unfinished as why:
            # What it makes of a text is known by then, and nothing else is.
            read = [f for f in judge(trial.seen) if f.topic in (Topic.TEXT, Topic.CHAT)]
            wrong = tuple(f for f in read if f.state is State.WRONG)
            return Examination(findings=wrong) if wrong else Examination(unfinished=str(why))
        finally:
            trial.close()
        return Examination(findings=judge(trial.seen), block_tokens=trial.seen.other_block_tokens)


class HashNames:
    """What workers call one and the same block, under one salt of this gateway's life."""

    def __init__(self, session: str, seed: bytes) -> None:
        self.session = session
        self._seed = seed
        self._names: dict[tuple[int, WorkerId], int] = {}

    def tokens(self, block_tokens: int, vocab_size: int) -> array[int]:
        """A block and a token, always the same."""
        seed = self._seed
        ids = (seed[i % len(seed)] * 131 + i for i in range(block_tokens + 1))
        return array("I", (one % min(vocab_size, 4_096) for one in ids))

    def note(self, block_tokens: int, worker: WorkerId, name: int | None, fleet: Fleet) -> str:
        """Remember a name; how it differs from another worker's, empty where it does not."""
        here = {state.worker for state in fleet.states()}
        self._names = {key: known for key, known in self._names.items() if key[1] in here}
        mine = (block_tokens, worker)
        if name is not None:
            self._names[mine] = name
        others = [(k[1], n) for k, n in self._names.items() if k[0] == block_tokens and k != mine]
        if mine not in self._names or not others:
            return ""
        other = next((o for o, n in others if n != self._names[mine]), None)
        return f"another than {other} has" if other else ""


class _Trial:
    """One look at one rank."""

    def __init__(
        self, parts: ExaminerParts, state: WorkerState, target: Target, feed: WorkerFeed | None
    ) -> None:
        self._parts = parts
        self._state = state
        self._target = target
        self._feed = feed
        self._grants: list[Grant] = []
        self._hash: int | None = None
        self._hash_salt = ""
        length = canary_tokens(state.block_tokens, target.max_model_len)
        self.seen = Sighting(
            canary=self._drawn(length),
            block_tokens=state.block_tokens,
            has_events=feed is not None,
            has_digest=target.wants_checkpoints,
            unfollowed="" if parts.prompts.is_exact else "our keys are not of its tokens",
        )

    async def run(self, adapters: Sequence[str], hashes: HashNames) -> None:
        seen, parts = self.seen, self._parts
        if not len(seen.canary):
            raise _Unfinished("its context is shorter than a block")
        await self._calm()
        seen.readings += [await self._read_text(), await self._read_chat()]
        own, other = self._grant(), self._grant()
        salts = [parts.namespaces.salt(grant, seen.block_tokens) for grant in (own, other)]
        seen.salts = frozenset(salts)
        if self._feed is not None:
            self._feed.watch(self._heard)
        for turn in range(LEASE_TRIES if self._target.agent is not None else 1):
            if turn:
                await asyncio.sleep(_TRY_PAUSE_S)
            cold = await self._cached(own)
            seen.cold = cold if turn == 0 else seen.cold
            seen.again = await self._cached(own)
            if seen.again != 0:
                break
        await self._events(own)
        await self._calm()
        seen.other = await self._cached(other)
        for name in adapters:
            seen.adapters.append(
                AdapterTrial(name=name, cached=await self._cached(own, model=name))
            )
        await self._name(hashes)
        if not all(parts.table().is_current(grant.admission) for grant in self._grants):
            raise _Unfinished("epochs were raised meanwhile")
        if self._parts.fleet.get(self._state.worker) is not self._state:
            raise _Unfinished("it lives anew since")
        if seen.again == 0 and self._target.agent is not None:
            raise _Unfinished("it reused nothing; its lease may have been missing")

    def close(self) -> None:
        """Nobody listens any more, and the canaries' namespaces are given back."""
        if self._feed is not None:
            self._feed.watch(None)
        for grant in self._grants:
            self._parts.namespaces.forget(grant, self.seen.block_tokens)

    # -- one request each --------------------------------------------------------------------------

    async def _calm(self) -> None:
        """Nobody's request waits for ours."""
        clock, queue = self._parts.clock, self._state.queue
        ends_at = clock.now() + CALM_MS
        while (ahead_ms := queue.queue_ms(clock.now())) > BUSY_MS:
            if clock.now() > ends_at:
                raise _Unfinished(f"busy: {ahead_ms:.0f} ms of prefill wait there")
            await asyncio.sleep(_PAUSE_S)

    async def _cached(self, grant: Grant, model: str = "") -> int | None:
        """The canary under this grant's salt: tokens reused, None where it does not tell."""
        errand = Errand(
            target=self._target,
            block_tokens=self.seen.block_tokens,
            grant=grant,
            tokens=self.seen.canary,
            timeout_ms=REQUEST_MS,
            model=model,
        )
        status, body = await self._parts.errands.run(errand)
        if status != 200:
            raise _Unfinished(f"{self._state.worker} answered {status} to a prompt of token ids")
        answer = _decoded(body, _Answer)
        if answer is None:
            raise _Unfinished(f"{self._state.worker} answered nonsense")
        return answer.cached

    async def _events(self, grant: Grant) -> None:
        """Until all blocks of the canary are known, or no more come."""
        seen, feed, directory = self.seen, self._feed, self._parts.directory
        if feed is None:
            return
        clock, worker = self._parts.clock, self._state.worker
        keys = self._parts.namespaces.keys(grant, seen.canary, seen.block_tokens)
        assert keys is not None, "the canary has a scope"
        ends_at = clock.now() + EVENTS_MS
        while clock.now() < ends_at and directory.knows(worker):
            seen.known_blocks = directory.told(worker, keys.private)
            if seen.known_blocks >= seen.full_blocks or feed.state is FeedState.BLIND:
                break
            await asyncio.sleep(_PAUSE_S)
        seen.announced_blocks = len({name for run in seen.runs for name in run.hashes})
        seen.was_heard = feed.stats.batches > 0 or feed.stats.stored_blocks > 0
        if feed.state is not FeedState.LIVE:
            seen.stream = f"its event stream is {feed.state.value}" + (
                f": {feed.reason}" if feed.reason else ""
            )

    async def _name(self, hashes: HashNames) -> None:
        """What it calls a block that every worker is asked to name."""
        if self._feed is None or not self.seen.runs:
            return
        parts, size = self._parts, self.seen.block_tokens
        grant = self._grant(hashes.session)
        self._hash_salt = parts.namespaces.salt(grant, size)
        errand = Errand(
            target=self._target,
            block_tokens=size,
            grant=grant,
            tokens=hashes.tokens(size, parts.prompts.vocab_size),
            timeout_ms=REQUEST_MS,
        )
        await parts.errands.run(errand)
        for _ in range(_NAME_LOOKS):
            if self._hash is None:
                await asyncio.sleep(_PAUSE_S)
        self.seen.hash_note = hashes.note(size, self._state.worker, self._hash, parts.fleet)

    def _heard(self, run: BlocksStored) -> None:
        seen = self.seen
        if self._hash_salt and run.salt == self._hash_salt and run.parent is None:
            self._hash = run.hashes[0] if len(run.hashes) else None
            return
        named = {name for one in seen.runs for name in one.hashes}
        is_ours = run.salt in seen.salts or (run.parent is not None and run.parent in named)
        is_alike = (
            run.tokens[: seen.block_tokens] == seen.canary[: len(run.tokens)][: seen.block_tokens]
        )
        if (is_ours or is_alike) and run.adapter is None and len(seen.runs) < MAX_RUNS:
            seen.runs.append(run)

    # -- tokens ------------------------------------------------------------------------------------

    async def _read_text(self) -> Reading:
        ours = self._ours(_TEXT)
        return await self._reading(Topic.TEXT, ours, {"prompt": _TEXT}, COMPLETIONS)

    async def _read_chat(self) -> Reading:
        for messages in _CHATS:
            try:
                ours = self._ours(ChatPrompt(messages=messages))
            except ValueError:
                continue  # our template takes no such messages
            body = {"messages": messages, "add_generation_prompt": True}
            return await self._reading(Topic.CHAT, ours, body, "/v1/chat/completions")
        return Reading(
            topic=Topic.CHAT, ours=None, theirs=None, problem="our own template takes no chat"
        )

    async def _reading(
        self, topic: Topic, ours: array[int] | None, body: dict[str, Any], path: str
    ) -> Reading:
        if self._parts.prompts.is_text:
            return Reading(topic=topic, ours=None, theirs=None, has_tokenizer=False)
        status, raw = await self._parts.errands.ask(self._target, "/tokenize", body, REQUEST_MS)
        told = _decoded(raw, _Tokens) if status == 200 else None
        if told is not None and all(0 <= one < 1 << 32 for one in told.tokens):
            return Reading(topic=topic, ours=ours, theirs=array("I", told.tokens))
        # Under a salt of its own, as nothing of it is to be met again.
        salt = self._parts.namespaces.salt(self._grant(), self.seen.block_tokens)
        more = {"cache_salt": salt, "max_tokens": 1, "temperature": 0}
        status, raw = await self._parts.errands.ask(
            self._target, path, {**body, **more}, REQUEST_MS
        )
        answer = _decoded(raw, _Answer) if status == 200 else None
        count = answer.usage.prompt_tokens if answer and answer.usage else None
        problem = "" if count is not None else f"it answered {status} to it"
        return Reading(topic=topic, ours=ours, theirs=None, their_count=count, problem=problem)

    def _ours(self, prompt: ChatPrompt | str) -> array[int] | None:
        asked = InferenceRequest(
            request_id="self-test",
            route=Route.CHAT if isinstance(prompt, ChatPrompt) else Route.COMPLETION,
            method="POST",
            path=COMPLETIONS,
            body=b"",
            prompt=prompt,
        )
        return self._parts.prompts.tokens(asked)

    def _drawn(self, length: int) -> array[int]:
        """So many tokens of random text: words of hex digits, which any tokenizer has; of no text
        but ids that any has where none is known.
        """
        if self._parts.prompts.is_text:
            return array("I", (100 + byte for byte in self._parts.draw(length)[:length]))
        words = self._parts.draw(2 * length).hex()
        text = " ".join(words[at : at + 4] for at in range(0, len(words), 4))
        tokens = self._ours(text) if length else None
        return array("I") if tokens is None else tokens[:length]

    def _grant(self, session: str = "") -> Grant:
        """A namespace that nobody else has; given back at the end."""
        parts = self._parts
        made = canary_grant(parts.table(), parts.served_model(), session or parts.draw(16).hex())
        if made is None:
            raise _Unfinished("the model is revoked")
        if not session:  # one that is asked for again stays: else its events would be relearnt
            self._grants.append(made)
        parts.namespaces.namespace(made, self._state.block_tokens)
        return made


@functools.cache
def _decoder(kind: type[_Shape]) -> msgspec.json.Decoder[_Shape]:
    return msgspec.json.Decoder(kind)


def _decoded(body: bytes, kind: type[_Shape]) -> _Shape | None:
    try:
        return _decoder(kind).decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
