"""One replay: requests leave at the trace's times, whatever the fleet does, and each becomes a
record.

Open loop: a slow fleet does not slow the arrivals. With closed sessions a turn also waits for its
predecessor. The next request is made ready before it is due. Owns the bound on requests in flight;
what waits for a free place is late through *us*, counted as `client_late_ms` and warned of. Read
`results.py` next.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from trunkline.ports.clock import Clock
from trunkline.replay.client import Client, ClientOptions, Target
from trunkline.replay.counters import percentile
from trunkline.replay.progress import Progress
from trunkline.replay.prompts import PromptMaker, PromptOptions
from trunkline.replay.records import Reply, RequestRecord, Verdict, read_decision
from trunkline.replay.traces import TraceRequest

LATE_WARNING_MS = 50.0
"""Above this at p99 the client's own delay is worth a warning."""

Decode = Callable[["array[int]"], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """How a trace is sent."""

    speed: float = 1.0
    """2.0 halves the time between requests."""
    time_scale: float = 1.0
    """Simulated workers are slower by this factor; arrivals are stretched by it too."""
    max_in_flight: int = 1_024
    is_closed_loop: bool = False
    """A session's turn is not sent before its previous one has ended."""
    is_verified: bool = True
    """Compare answers with those of the simulated model; off for real engines."""
    model: str = ""
    """Model to ask for; empty takes the trace's own, or leaves the field out."""
    client: ClientOptions = field(default_factory=ClientOptions)
    prompt: PromptOptions = field(default_factory=PromptOptions)
    decode: Decode | None = None
    """Text of token ids, for workers that send text only; None checks ids alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """Records in the order of sending, and what the user should be warned of."""

    records: Sequence[RequestRecord] = field(repr=False)
    wall_ms: float
    warnings: Sequence[str]
    unchecked: str = ""
    """Why not one answer was checked, and what to do; empty where some were."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ready:
    """A request made ready to be sent."""

    index: int
    due_at_ms: float
    request: TraceRequest
    path: str
    body: bytes = field(repr=False)
    prompt: array[int] | None = field(repr=False)
    """None where the trace carries bodies."""
    output_tokens: int


async def replay_trace(
    requests: Iterable[TraceRequest],
    target_urls: Sequence[str],
    options: ReplayOptions,
    clock: Clock,
    progress: Progress | None = None,
) -> ReplayResult:
    """Send all requests, to the targets in turn, and wait until each has ended. A target may be
    named several times.
    """
    if not target_urls:
        raise ValueError("no target to send to")
    if not options.speed > 0.0 or not options.time_scale > 0.0:
        raise ValueError(f"speed {options.speed}, time scale {options.time_scale}: not above 0")
    if options.max_in_flight < 1:
        raise ValueError(f"max_in_flight {options.max_in_flight} is below 1")
    client_of = {url: Client(Target.parse(url), options.client) for url in target_urls}
    began_at = clock.now()
    replay = _Replay([client_of[url] for url in target_urls], options, progress)
    try:
        records = await replay.run(requests)
    finally:
        for client in client_of.values():
            client.close()
    return ReplayResult(
        records=records,
        wall_ms=clock.now() - began_at,
        warnings=_warnings(records, options),
        unchecked=_unchecked(records, options, has_bodies=replay.has_bodies),
    )


class _Replay:
    """One run under way."""

    def __init__(
        self, clients: list[Client], options: ReplayOptions, progress: Progress | None
    ) -> None:
        self._clients = clients
        self._options = options
        self._progress = progress
        self._maker = PromptMaker(options.prompt)
        self._places = asyncio.Semaphore(options.max_in_flight)
        self._records: dict[int, RequestRecord] = {}
        self._turns: dict[str, asyncio.Event] = {}
        self._began_at_ms = 0.0
        self.has_bodies = False
        """Whether a request came with a body of its own."""

    async def run(self, requests: Iterable[TraceRequest]) -> list[RequestRecord]:
        to_wall = self._options.time_scale / self._options.speed
        first_ms: float | None = None
        self._began_at_ms = _now_ms()
        async with asyncio.TaskGroup() as group:
            for index, request in enumerate(requests):
                first_ms = request.arrival_ms if first_ms is None else first_ms
                due_at_ms = self._began_at_ms + (request.arrival_ms - first_ms) * to_wall
                ready = self._made_ready(index, due_at_ms, request)
                await asyncio.sleep(max(0.0, (due_at_ms - _now_ms()) / 1_000.0))
                await self._places.acquire()
                group.create_task(self._one(ready, *self._session_turn(request)))
        return [self._records[index] for index in sorted(self._records)]

    def _session_turn(
        self, request: TraceRequest
    ) -> tuple[asyncio.Event | None, asyncio.Event | None]:
        """`(end of the previous turn, end of this one)`; both None in an open loop."""
        if not self._options.is_closed_loop or request.session is None:
            return None, None
        before, own = self._turns.get(request.session), asyncio.Event()
        self._turns[request.session] = own
        return before, own

    async def _one(
        self, ready: _Ready, before: asyncio.Event | None, own: asyncio.Event | None
    ) -> None:
        due_at_ms = ready.due_at_ms
        try:
            if before is not None and not before.is_set():
                await before.wait()
                due_at_ms = max(due_at_ms, _now_ms())
            client = self._clients[ready.index % len(self._clients)]
            reply = await client.send(ready.path, ready.body, self._headers(ready))
            record = self._record(ready, due_at_ms, reply)
        finally:
            self._places.release()
            if own is not None:
                self._end_turn(ready.request.session or "", own)
        self._records[ready.index] = record
        if self._progress is not None:
            self._progress.step(is_lost=record.is_lost)

    def _end_turn(self, session: str, own: asyncio.Event) -> None:
        own.set()
        if self._turns.get(session) is own:
            del self._turns[session]

    def _made_ready(self, index: int, due_at_ms: float, request: TraceRequest) -> _Ready:
        model = self._options.model or request.model or ""
        if request.body is not None:
            self.has_bodies = True
            fields, prompt, output_tokens = dict(request.body), None, request.output_tokens
            path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
        else:
            prompt, output_tokens = self._maker.prompt(request), self._maker.output_tokens(request)
            path, fields = "/v1/completions", _completion(prompt, output_tokens)
            if self._options.is_verified:
                fields["return_token_ids"] = True
        fields["stream"] = True
        fields["stream_options"] = {"include_usage": True}
        if model:
            fields["model"] = model
        return _Ready(
            index=index,
            due_at_ms=due_at_ms,
            request=request,
            path=path,
            body=msgspec.json.encode(fields),
            prompt=prompt,
            output_tokens=output_tokens,
        )

    def _headers(self, ready: _Ready) -> dict[str, str]:
        headers = {"x-request-id": f"replay-{ready.index}"}
        session = ready.request.session
        if session and session.isascii() and session.isprintable():
            headers["x-session-id"] = session
        return headers

    def _record(self, ready: _Ready, due_at_ms: float, reply: Reply) -> RequestRecord:
        first, note = reply.first_token_at_ms, read_decision(reply.decision)
        verdict, short = self._judged(ready, reply)
        told = reply.prompt_tokens
        if told is None:
            told = ready.request.input_tokens if ready.prompt is None else len(ready.prompt)
        return RequestRecord(
            index=ready.index,
            arrival_ms=ready.due_at_ms - self._began_at_ms,
            client_late_ms=max(0.0, reply.sent_at_ms - due_at_ms),
            session=ready.request.session,
            lost_reason=reply.lost_reason or short,
            status=reply.status,
            # From when it was due: what waits in this client waits for the system under test.
            ttft_ms=None if first is None else first - min(due_at_ms, reply.sent_at_ms),
            duration_ms=reply.ended_at_ms - reply.sent_at_ms,
            prompt_tokens=told,
            cached_tokens=reply.cached_tokens,
            output_tokens=reply.completion_tokens or len(reply.token_ids),
            verdict=verdict,
            worker=note.worker,
            matched_tokens=note.matched_tokens,
            queue_ms=note.queue_ms,
            reason=note.reason,
        )

    def _judged(self, ready: _Ready, reply: Reply) -> tuple[Verdict, str]:
        """The verdict on what came, and a reason of loss when too little came.

        A broken answer is judged as well: the part that did arrive must be right.
        """
        if not self._options.is_verified or ready.prompt is None:
            return Verdict.UNCHECKED, ""
        expected = self._maker.answer(ready.request, ready.prompt, ready.output_tokens)
        got = reply.token_ids
        if got:
            is_right = got == expected[: len(got)]
            short = f"answer of {len(got)} tokens, asked for {ready.output_tokens}"
            is_whole = len(got) >= ready.output_tokens
            return (Verdict.RIGHT if is_right else Verdict.WRONG), "" if is_whole else short
        if reply.text and self._options.decode is not None:
            whole = self._options.decode(expected)
            is_right = reply.text == whole or (
                bool(reply.lost_reason) and whole.startswith(reply.text)
            )
            return (Verdict.RIGHT if is_right else Verdict.WRONG), ""
        return Verdict.UNCHECKED, ""


def _completion(prompt: array[int], output_tokens: int) -> dict[str, Any]:
    return {
        "prompt": prompt.tolist(),
        "max_tokens": output_tokens,
        "temperature": 0,
    }


def _unchecked(
    records: Sequence[RequestRecord], options: ReplayOptions, *, has_bodies: bool
) -> str:
    if any(record.verdict is not Verdict.UNCHECKED for record in records):
        return ""
    if not options.is_verified:
        return "--no-verify was given; leave it out where the workers are simulated"
    if all(record.is_lost for record in records):
        return "none came; the reasons are below"
    if has_bodies:
        return "the trace brings its own prompts; W1 to W5 have known answers"
    return "the workers sent no token ids; simulated ones (`trunkline worker`) do"


def _warnings(records: Sequence[RequestRecord], options: ReplayOptions) -> list[str]:
    warnings: list[str] = []
    late_ms = sorted(record.client_late_ms for record in records)
    if late_ms and (p99_ms := percentile(late_ms, 0.99)) > LATE_WARNING_MS:
        warnings.append(
            f"the client itself fell behind: requests left up to {late_ms[-1]:.0f} ms late"
            f" (p99 {p99_ms:.0f} ms; {options.max_in_flight:,} may be in flight);"
            " the load was lighter than the trace asks for"
        )
    unchecked = sum(1 for r in records if r.verdict is Verdict.UNCHECKED and not r.is_lost)
    if options.is_verified and unchecked:
        warnings.append(
            f"{unchecked:,} answers could not be checked: the worker sent no token ids,"
            " or the trace carries bodies"
        )
    silent = sum(1 for r in records if r.cached_tokens is None and not r.is_lost)
    if silent:
        warnings.append(
            f"{silent:,} answers did not say how many prompt tokens were cached; they count as 0"
        )
    return warnings


def _now_ms() -> float:
    return asyncio.get_running_loop().time() * 1_000.0
