"""A worker's events over another gateway, where this one's own connection to them is down.

    here  no connection for three seconds ──listen──► all gateways: who hears it, answers
          as over a new connection ◄──batches──┐
          └──listen from there on──► the first─┘  at once, or as some come, or empty after a second

It asks for the next batches each time, so that the slower side sets the pace. Who tells keeps what
it hears only while somebody listens, and only of its own connection: nothing goes round. What came
before is handed over as to any gateway that begins late (`siblings.py`). Batches have prompts'
tokens in them: they are encrypted under the fleet's root secret, beside the seal of all words.

Must never: tell of what was heard from a gateway, or call a stream unbroken of which a batch was
not kept. Read `sibling_words.py` for the words, `ports/relay.py` for who listens.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from trunkline.control.sibling_words import Listen, Relayed, Seal
from trunkline.core.records import Instant, WorkerId
from trunkline.core.repair import Pause
from trunkline.observe import EventLog
from trunkline.ports.board import Answer, Calls
from trunkline.ports.clock import Clock
from trunkline.ports.relay import Ear
from trunkline.ports.store import StoreDown

APART_MS = 3_000.0
"""Without a connection: one that was lost mostly comes back by itself."""
LOOK_S = 0.5
HOLD_MS = 1_000.0
"""A question waits at most so long for a batch, and is answered with none then."""
CALL_S = 3.0
WANTED_MS = 10_000.0
"""After the last question, batches are not kept any more."""
FIRST_PAUSE_MS, MOST_PAUSE_MS = 1_000.0, 30_000.0
MAX_LISTENING = 64
"""Workers that this gateway hears over others, each a question at a time."""
MAX_KEPT_BATCHES, MAX_KEPT_BYTES = 1_024, 2 << 20
"""Of a worker. Who has not fetched them by then hears that the stream is broken."""
MAX_BATCH_BYTES = 512 << 10
"""A larger one is not told of: the stream is broken there."""
MAX_ANSWER_BYTES = 256 << 10
"""Beyond it an answer ends; the rest goes with the next one. Below what a frame may have, even
with one batch of the largest behind it.
"""
MAX_WAITING = 16
"""Questions about one worker; further ones are not heard."""

_Batches = tuple[tuple[int, bytes], ...]
_DECODER = msgspec.msgpack.Decoder(_Batches)


class Cipher(Protocol):
    """Encrypts under the fleet's root secret, for each life of a gateway with a key of its own."""

    def encrypt(self, data: bytes) -> bytes:
        """As this life."""
        ...

    def decrypt(self, life: str, sealed: bytes) -> bytes | None:
        """None for what that life did not encrypt."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayParts:
    """What a gateway among others works with."""

    life: str
    calls: Calls
    seal: Seal
    cipher: Cipher
    clock: Clock
    log: EventLog
    begin: Callable[[Coroutine[Any, Any, None], str], object]
    """Begin a task of ours."""
    others: Callable[[], int]
    """How many other gateways there are."""
    draw: Callable[[int], bytes]
    """`draw(n)`: n unguessable bytes."""


@dataclass(slots=True, kw_only=True)
class RelayStats:
    """For metrics, from the beginning of this life."""

    heard: int = 0
    """Batches that came over other gateways."""
    told: int = 0
    """Batches that were told to others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    question: Listen
    answer: Answer
    until: Instant


class _Kept:
    """The last batches of one worker, numbered from when somebody first listened."""

    def __init__(self) -> None:
        self.end = 0
        """The number of the next one."""
        self._batches: deque[tuple[int, bytes]] = deque()
        self._size_bytes = 0

    def add(self, seq: int, payload: bytes) -> None:
        self.end += 1
        if len(payload) > MAX_BATCH_BYTES:
            self.clear()
            return
        self._batches.append((seq, payload))
        self._size_bytes += len(payload)
        while len(self._batches) > MAX_KEPT_BATCHES or self._size_bytes > MAX_KEPT_BYTES:
            self._size_bytes -= len(self._batches.popleft()[1])

    def clear(self) -> None:
        self._batches.clear()
        self._size_bytes = 0

    def since(self, number: int) -> Sequence[tuple[int, bytes]] | None:
        """Those from this number on, as many as one answer has; None where some are gone."""
        first = self.end - len(self._batches)
        if not first <= number <= self.end:
            return None
        found: list[tuple[int, bytes]] = []
        size_bytes = 0
        for index in range(number - first, len(self._batches)):
            found.append(self._batches[index])
            size_bytes += len(found[-1][1])
            if size_bytes > MAX_ANSWER_BYTES:
                break
        return found


class _Line:
    """One worker here. A `ports.relay.Line`."""

    def __init__(self, relays: GatewayRelays, worker: WorkerId, ear: Ear, now: Instant) -> None:
        self.worker, self.ear = worker, ear
        self.is_up = self.is_closed = self.is_listening = False
        self.apart_since = now
        self.kept = _Kept()
        self.wanted_until = Instant(0.0)
        self.waiting: deque[_Waiting] = deque()
        self._relays = relays

    def link(self, is_up: bool) -> None:
        if self.is_up:
            self.kept.clear()  # what is missed now is not known, nor whose life comes next
            self.kept.end += 1
            if not is_up:
                self.apart_since = self._relays.now()
        self.is_up = is_up

    def heard(self, seq: int, payload: bytes) -> None:
        if self._relays.now() < self.wanted_until:
            self.kept.add(seq, payload)
            if self.waiting:
                self._relays.tell_soon(self)

    def close(self) -> None:
        self.is_closed = True
        self._relays.forget(self)


class GatewayRelays:
    """Of one gateway; a `ports.relay.Relays`. Give it a task for `run`."""

    def __init__(self, parts: RelayParts) -> None:
        self._parts = parts
        self._lines: dict[WorkerId, _Line] = {}
        self._due: set[_Line] = set()
        """That have something to tell."""
        self.stats = RelayStats()
        parts.calls.answer(self._asked)

    def now(self) -> Instant:
        return self._parts.clock.now()

    def open(self, worker: WorkerId, ear: Ear) -> _Line:
        line = self._lines[worker] = _Line(self, worker, ear, self.now())
        return line

    def forget(self, line: _Line) -> None:
        if self._lines.get(line.worker) is line:
            del self._lines[line.worker]

    @property
    def listening_count(self) -> int:
        """Workers that are heard over others, or are to be."""
        return sum(line.is_listening for line in self._lines.values())

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            now = self.now()
            for line in list(self._lines.values()):
                while line.waiting and line.waiting[0].until <= now:
                    self._answer(line, line.waiting.popleft())
                if self._is_apart(line, now) and self.listening_count < MAX_LISTENING:
                    line.is_listening = True
                    self._parts.begin(self._listened(line), f"events of {line.worker}")

    # -- listening -------------------------------------------------------------------------------

    def _is_apart(self, line: _Line, now: Instant) -> bool:
        is_idle = not line.is_up and not line.is_listening
        return is_idle and now - line.apart_since >= APART_MS and self._parts.others() > 0

    async def _listened(self, line: _Line) -> None:
        try:
            await self._listen(line)
        except Exception as error:  # noqa: BLE001  # of one worker: it must not end the gateway
            self._parts.log.error("feed.relay_failed", cause=error, worker=line.worker)
            line.apart_since = self.now()
            line.ear.relay_down()  # whatever it had heard, it hears no more
        finally:
            line.is_listening = False

    async def _listen(self, line: _Line) -> None:
        """Until our own connection is made, or nobody listens here any more."""
        pause = Pause(FIRST_PAUSE_MS, MOST_PAUSE_MS)
        life, number_next = "", 0
        while not line.is_up and not line.is_closed:
            told = await self._asked_for(line, life, number_next)
            if line.is_up or line.is_closed:
                break
            batches = None if told is None else self._read(told)
            if told is None or batches is None:
                if life:
                    line.ear.relay_down()
                    self._parts.log.info("feed.relay_lost", worker=line.worker)
                life = ""
                await asyncio.sleep(pause.take() / 1_000.0)
                continue
            if not life:
                pause.reset()
                line.ear.relay_up()
                self._parts.log.info("feed.relayed", worker=line.worker, life=told.life)
            for seq, payload in batches:
                self.stats.heard += 1
                line.ear.relayed(seq, payload)
            life, number_next = told.life, told.number_next

    async def _asked_for(self, line: _Line, life: str, number_next: int) -> Relayed | None:
        parts = self._parts
        question = Listen(
            life=parts.life,
            number=parts.draw(16).hex(),
            to=life,
            worker=line.worker,
            number_next=number_next,
        )
        try:
            answer = parts.seal.open(await parts.calls.call(parts.seal.close(question), CALL_S))
        except StoreDown:
            return None
        if not isinstance(answer, Relayed) or answer.number != question.number:
            return None
        return answer if life in ("", answer.life) else None

    def _read(self, told: Relayed) -> _Batches | None:
        """None where the stream is broken."""
        if told.is_broken:
            return None
        if not told.sealed:
            return ()
        plain = self._parts.cipher.decrypt(told.life, told.sealed)
        try:
            return None if plain is None else _DECODER.decode(plain)
        except msgspec.DecodeError:
            return None  # another version's

    # -- telling ---------------------------------------------------------------------------------

    def _asked(self, frame: bytes, answer: Answer) -> None:
        word = self._parts.seal.open(frame)
        if not isinstance(word, Listen) or word.life == self._parts.life:
            return
        line = self._lines.get(WorkerId(word.worker))
        is_meant = not word.to or word.to == self._parts.life
        if line is None or not line.is_up or not is_meant or len(line.waiting) >= MAX_WAITING:
            return
        now = self.now()
        if now >= line.wanted_until:
            line.kept.clear()
            line.kept.end += 1  # whoever listened before has missed some
        line.wanted_until = Instant(now + WANTED_MS)
        waiting = _Waiting(question=word, answer=answer, until=Instant(now + HOLD_MS))
        if word.to and word.number_next == line.kept.end:
            line.waiting.append(waiting)
        else:
            self._answer(line, waiting)

    def tell_soon(self, line: _Line) -> None:
        """Batches that come in one turn of the loop go in one answer."""
        if line not in self._due:
            self._due.add(line)
            asyncio.get_running_loop().call_soon(self._tell, line)

    def _tell(self, line: _Line) -> None:
        self._due.discard(line)
        while line.waiting:
            self._answer(line, line.waiting.popleft())

    def _answer(self, line: _Line, waiting: _Waiting) -> None:
        question, kept = waiting.question, line.kept
        batches = kept.since(question.number_next) if question.to else ()
        told = tuple(batches or ())
        self.stats.told += len(told)
        parts = self._parts
        word = Relayed(
            number=question.number,
            life=parts.life,
            is_broken=batches is None or not line.is_up,
            number_next=question.number_next + len(told) if question.to else kept.end,
            sealed=parts.cipher.encrypt(msgspec.msgpack.encode(told)) if told else b"",
        )
        parts.begin(self._sent(waiting.answer, parts.seal.close(word)), "an answer to a gateway")

    async def _sent(self, answer: Answer, frame: bytes) -> None:
        try:
            await answer(frame)
        except Exception as error:  # noqa: BLE001  # of one answer: it must not end the gateway
            self._parts.log.error("feed.relay_failed", cause=error)
