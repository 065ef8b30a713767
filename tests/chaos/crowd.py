"""Clients that ask all the time, in a thread of their own, and note exactly what they were told.

An answer is judged by what the simulated model must say: each token is a function of all before it.
Must never retry by itself, but as a balancer does: elsewhere, where a gateway took no byte of it.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast
from urllib.parse import urlsplit

import httptools

from trunkline.core.simkv import answer_tokens
from trunkline.core.sse import EventSplitter

VOCABULARY = 4_096
PATIENCE_S = 90.0
"""Longer than any deadline of the gateway that these rows touch: who waits longer was forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request: a completion behind token ids, so that its whole answer is known."""

    prompt: tuple[int, ...]
    tokens: int
    is_stream: bool = True
    is_resumable: bool = True

    def body(self) -> bytes:
        fields: dict[str, Any] = {
            "model": "trunkline-sim",
            "prompt": list(self.prompt),
            "max_tokens": self.tokens,
            "stream": self.is_stream,
            "return_token_ids": True,
        }
        if self.is_stream:
            fields["stream_options"] = {"include_usage": True}
        if not self.is_resumable:
            fields["frequency_penalty"] = 0.5  # counts what was generated: nobody can go on
        return json.dumps(fields).encode()

    def truth(self) -> list[int]:
        return answer_tokens(array("I", self.prompt), self.tokens, VOCABULARY).tolist()


@dataclass(slots=True)
class Outcome:
    """What one client was told."""

    ask: Ask
    sent_s: float
    status: int = 0
    worker: str = ""
    """As the decision says."""
    ids: list[int] = field(default_factory=list[int])
    heard_s: list[float] = field(default_factory=list[float])
    """When each event with tokens came."""
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    resumes: int = 0
    is_done: bool = False
    problem: str = ""
    """Why the HTTP message did not end as it should."""
    ended_s: float = 0.0
    tried: int = 0
    """Gateways that refused the connection."""
    body: bytearray = field(default_factory=bytearray)

    @property
    def is_whole(self) -> bool:
        """All of the right answer, once."""
        return self.is_done and not self.problem and not self.error and self.is_right

    @property
    def is_right(self) -> bool:
        return self.ids == self.ask.truth()

    @property
    def is_wrong(self) -> bool:
        """It was told a token that the model did not say there."""
        return self.ids != self.ask.truth()[: len(self.ids)]

    @property
    def is_told(self) -> bool:
        """It was told clearly that there is no answer, in a message that ends properly."""
        error = self.error
        if not error or not error.get("message"):
            return False
        is_clear = self.status >= 400 or bool(error.get("request_id"))
        return is_clear and not self.problem and not self.is_done

    @property
    def is_lost(self) -> bool:
        """Neither answered nor told."""
        return not self.is_whole and not self.is_told

    @property
    def first_token_s(self) -> float:
        return (self.heard_s[0] if self.heard_s else self.ended_s) - self.sent_s

    @property
    def gap_s(self) -> float:
        """Longest silence between two events with tokens."""
        pairs = zip(self.heard_s, self.heard_s[1:], strict=False)
        return max((late - early for early, late in pairs), default=0.0)

    def words(self) -> str:
        """For progress, where something went wrong."""
        right = self.ask.truth()
        same = next((i for i, (a, b) in enumerate(zip(self.ids, right, strict=False)) if a != b), 0)
        where = f", wrong from {same}" if self.is_wrong else ""
        return (
            f"status {self.status}, {len(self.ids)} of {self.ask.tokens} tokens{where}, "
            f"resumes {self.resumes}, done {self.is_done}, {self.problem or 'ended'}, {self.error}"
        )

    def take(self, data: bytes, now_s: float) -> None:
        """One event of a stream."""
        if data == b"[DONE]":
            self.is_done = True
            return
        self._read(json.loads(data), now_s)

    def take_whole(self) -> None:
        """An answer that was no stream."""
        try:
            event = json.loads(bytes(self.body))
        except ValueError:
            self.problem = self.problem or "not JSON"
            return
        self.is_done = self.status == 200 and "choices" in event
        self._read(event, self.ended_s)

    def _read(self, event: dict[str, Any], now_s: float) -> None:
        self.error = event.get("error") or self.error
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices", ()):
            ids = choice.get("token_ids")
            if ids:
                self.ids.extend(ids)
                self.heard_s.append(now_s)


class _Wire(asyncio.Protocol):
    """One connection that carries one exchange."""

    def __init__(self, outcome: Outcome, request: bytes, ended: asyncio.Future[None]) -> None:
        self._outcome = outcome
        self._request = request
        self._ended = ended
        self._parser = httptools.HttpResponseParser(self)
        self._splitter = EventSplitter()
        self._is_stream = False
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, ValueError) as error:
            self._end(f"not HTTP: {error}"[:80])

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("reset" if exc is not None else "closed in the middle")

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-trunkline-decision":
            words = value.decode("latin-1").split("; ")
            known = dict(word.split("=", 1) for word in words if "=" in word)
            self._outcome.worker = known.get("worker", "")
        elif name.lower() == b"content-type":
            self._is_stream = value.startswith(b"text/event-stream")

    def on_headers_complete(self) -> None:
        self._outcome.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        outcome = self._outcome
        if not self._is_stream:
            outcome.body += body
            return
        outcome.resumes += body.count(b": resumed")
        now_s = time.monotonic()
        for data in self._splitter.feed(body):
            outcome.take(data, now_s)

    def on_message_complete(self) -> None:
        self._outcome.ended_s = time.monotonic()
        if not self._is_stream:
            self._outcome.take_whole()
        self._end("")

    def _end(self, problem: str) -> None:
        if self._ended.done():
            return
        self._outcome.ended_s = time.monotonic()
        self._outcome.problem = problem
        self._ended.set_result(None)
        if self._transport is not None:
            self._transport.abort()


async def exchange(
    ask: Ask, urls: Sequence[str], now: Outcome | None = None, key: str = ""
) -> Outcome:
    """One request to the first of these gateways that takes the connection."""
    outcome = now or Outcome(ask, time.monotonic())
    asker = f"authorization: Bearer {key}\r\n" if key else ""
    loop = asyncio.get_running_loop()
    body = ask.body()
    try:
        async with asyncio.timeout(PATIENCE_S):
            for url in urls:
                where = urlsplit(url)
                head = (
                    f"POST /v1/completions HTTP/1.1\r\nhost: {where.netloc}\r\n"
                    f"{asker}content-type: application/json\r\n"
                    f"content-length: {len(body)}\r\n\r\n"
                )
                ended: asyncio.Future[None] = loop.create_future()
                wire = _Wire(outcome, head.encode() + body, ended)
                try:
                    await loop.create_connection(
                        lambda w=wire: w, where.hostname or "", where.port or 80
                    )
                except OSError:
                    outcome.tried += 1
                    continue
                await ended
                return outcome
            outcome.problem = "no gateway took the connection"
    except TimeoutError:
        outcome.problem = f"nothing more within {PATIENCE_S:.0f} s"
    outcome.ended_s = time.monotonic()
    return outcome


Maker = Callable[[int, int], Ask]
"""Client and turn -> what it asks."""


class Crowd:
    """Clients in a thread. Closed loop: each asks again when it was answered; or, with a rate, open
    loop: so many requests a second, whatever becomes of them.
    """

    def __init__(
        self,
        urls: Sequence[str] | Callable[[int], Sequence[str]],
        make: Maker,
        *,
        clients: int = 0,
        rate_per_s: float = 0.0,
        key: str = "",
    ) -> None:
        assert bool(clients) is not bool(rate_per_s)
        self._urls = urls if callable(urls) else lambda _turn: urls
        self._make = make
        self._clients = clients
        self._key = key
        self.rate_per_s = rate_per_s
        """May be changed while it runs."""
        self._is_over = False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._open: dict[int, Outcome] = {}
        self._count = 0
        self.outcomes: list[Outcome] = []
        """Of the exchanges that have ended."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._thread.join()

    def flowing(self) -> list[Outcome]:
        """Exchanges that have got a part of their answer."""
        return [outcome for outcome in self.running() if outcome.ids]

    def running(self) -> list[Outcome]:
        return list(self._open.values())

    def taken(self) -> list[Outcome]:
        """Those that have ended since it was last asked; they are forgotten."""
        count = len(self.outcomes)
        ended = self.outcomes[:count]
        del self.outcomes[:count]
        return ended

    def since(self, began_s: float, until_s: float = float("inf")) -> list[Outcome]:
        """Ended ones that were sent in that time."""
        return [o for o in list(self.outcomes) if began_s <= o.sent_s < until_s]

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            if self._clients:
                for number in range(self._clients):
                    group.create_task(self._again_and_again(number))
                return
            due_s, turn = time.monotonic(), 0
            while not self._is_over:
                group.create_task(self._once(turn, turn))
                turn += 1
                due_s = max(due_s + 1.0 / self.rate_per_s, time.monotonic() - 1.0)
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))

    async def _again_and_again(self, number: int) -> None:
        turn = 0
        while not self._is_over:
            outcome = await self._once(number, turn)
            turn += 1
            if outcome.error or outcome.problem:
                await asyncio.sleep(0.05)  # as clients do; who is refused at once would only spin

    async def _once(self, number: int, turn: int) -> Outcome:
        outcome = Outcome(self._make(number, turn), time.monotonic())
        self._count += 1
        key = self._count
        self._open[key] = outcome
        try:
            await exchange(outcome.ask, self._urls(turn), outcome, self._key)
        finally:
            del self._open[key]
        self.outcomes.append(outcome)
        return outcome
