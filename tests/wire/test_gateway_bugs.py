"""What nobody foresaw, and what comes too late: one request ends, with an answer, books at 0."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable
from dataclasses import replace
from functools import partial

import pytest
from scripted import (
    COMPLETE,
    END,
    FAILED,
    GONE,
    SSE_HEAD,
    STREAM,
    TEST_S,
    FixedPicker,
    Running,
    ScriptedWorker,
    Served,
    answering,
    event,
    get,
    json_answer,
    patient,
    post,
    running,
    staying,
    until,
    wire,
    worker,
)

from trunkline.config import LimitsConfig
from trunkline.core.records import WorkerId
from trunkline.gateway.body import Body
from trunkline.gateway.contracts import AttemptEnd, Endpoint, InferenceRequest, Pick
from trunkline.gateway.lane import Lane
from trunkline.gateway.relay import Relay
from trunkline.gateway.upstream import WorkerConnection


class LanePicker(FixedPicker):
    """Chooses on a lane of two threads, each held until the gate opens."""

    def __init__(self, *workers: ScriptedWorker) -> None:
        super().__init__(*workers)
        self.lane = Lane(2, "test")
        self.gate = threading.Event()
        self.begun_count = 0

    def pick(self, request: InferenceRequest, tried: frozenset[WorkerId]) -> Awaitable[Pick]:
        return self._later(request, tried)

    async def _later(self, request: InferenceRequest, tried: frozenset[WorkerId]) -> Pick:
        await self.lane.run(self._work)
        choice = super().pick(request, tried)
        assert isinstance(choice, Pick)
        return choice

    def _work(self) -> None:
        self.begun_count += 1
        assert self.gate.wait(TEST_S)


@wire
async def test_clients_that_leave_take_their_place_in_line_along_and_running_work_counts() -> None:
    limits = LimitsConfig(max_concurrent_requests=10)
    async with (
        worker(answering(json_answer())) as w,
        running(LanePicker(w), limits=limits) as gateway,
    ):
        picker, counters = gateway.picker, gateway.front.counters
        for _ in range(5):  # five times the bound, and never more than the bound is kept
            clients = [await gateway.client() for _ in range(10 - counters.late_picks)]
            for client in clients:
                await client.send(post())
            await until(lambda: counters.active_requests + counters.late_picks == 10)
            assert (await gateway.ask(post())).status == 429
            await until(lambda: picker.begun_count == 2)
            for client in clients:
                client.reset()
            await gateway.settled()
            await until(lambda: counters.late_picks == 2)
        picker.gate.set()
        await until(lambda: counters.late_picks == 0)
        assert picker.begun_count == 2
        assert picker.ends == []
        assert (await gateway.ask(post())).status == 200
        picker.lane.close()


class BrokenPicker(FixedPicker):
    """Fails in one of its verbs with an error that nobody foresees."""

    where = ""

    def pick(self, request: InferenceRequest, tried: frozenset[WorkerId]) -> Pick | Awaitable[Pick]:
        if self.where == "pick":
            raise ZeroDivisionError("planted")
        choice = super().pick(request, tried)
        assert isinstance(choice, Pick)
        if self.where == "head":  # no header of latin-1 can hold it
            return replace(choice, endpoint=replace(choice.endpoint, api_key="\u2603"))
        return self._later(choice) if self.where == "later" else choice

    async def _later(self, choice: Pick) -> Pick:
        await asyncio.sleep(0)
        super().ended(choice, GONE, None)
        raise ZeroDivisionError("planted")

    def first_byte(self, pick: Pick) -> None:
        super().first_byte(pick)
        if self.where == "first byte":
            raise ZeroDivisionError("planted")

    def ended(self, pick: Pick, end: AttemptEnd, cached_tokens: int | None) -> None:
        super().ended(pick, end, cached_tokens)
        if self.where == "ended":
            raise ZeroDivisionError("planted")


@pytest.mark.parametrize("where", ["pick", "later", "head", "connect"])
def test_an_unforeseen_error_is_answered_logged_and_counted(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    @wire
    async def scenario() -> None:
        async with worker(answering(json_answer())) as w, running(BrokenPicker(w)) as gateway:
            gateway.picker.where = where
            pool = gateway.front.pool
            connect, pool.connect = pool.connect, _broken if where == "connect" else pool.connect
            client = await gateway.client()
            with caplog.at_level(logging.ERROR, "trunkline"):
                await client.send(post())
                reply = await client.reply()
            assert (reply.status, reply.error["code"]) == (500, "internal_error")
            assert "planted" not in reply.body.decode()
            assert [record.message for record in caplog.records] == ["exchange.bug"]
            assert gateway.picker.open_count == 0
            assert gateway.front.counters.worker_failures == 0
            gateway.picker.where, pool.connect = "", connect
            await client.send(post())
            assert (await client.reply()).status == 200
            gateway.bugs_count = 1

    scenario()


async def _broken(endpoint: Endpoint) -> WorkerConnection:
    raise ZeroDivisionError("planted")


@pytest.mark.parametrize("where", ["first byte", "ended"])
def test_an_error_in_the_books_cuts_no_answer(where: str) -> None:
    @wire
    async def scenario() -> None:
        async with worker(answering(json_answer())) as w, running(BrokenPicker(w)) as gateway:
            gateway.picker.where = where
            assert (await gateway.ask(post())).status == 200
            await gateway.settled()
            gateway.bugs_count = 1

    scenario()


@wire
async def test_an_unforeseen_error_inside_a_stream_ends_it_with_an_event() -> None:
    go_on = asyncio.Event()

    async def script(served: Served) -> None:
        await served.request()
        await served.send(SSE_HEAD + event("a"))
        await go_on.wait()
        await served.send(event("b"))
        await served.gone()

    async with worker(script) as w, running(FixedPicker(w)) as gateway:
        client = await gateway.client()
        await client.send(post(STREAM))
        await client.head()
        [exchange] = [one._exchange for one in gateway.connections()]
        assert exchange is not None
        assert isinstance(exchange._relay, Relay)
        exchange._relay._reader = None  # what it asserts of itself holds no more
        go_on.set()
        rest = await client.reader.readuntil(b"0\r\n\r\n")
        assert b'"internal_error"' in rest
        assert b"[DONE]" not in rest
        await gateway.settled()
        assert gateway.picker.ends == [(w.name, GONE, None)]
        gateway.bugs_count = 1


@wire
async def test_a_connection_that_never_comes_nor_fails_is_given_up_by_the_sweep() -> None:
    upstream = patient(connect_timeout_ms=100)
    async with (
        worker(answering(json_answer())) as w,
        running(FixedPicker(w), upstream=upstream) as gateway,
    ):

        async def never(endpoint: Endpoint) -> WorkerConnection:
            return await asyncio.get_running_loop().create_future()

        gateway.front.pool.connect = never
        reply = await gateway.ask(post())
        assert (reply.status, reply.error["code"]) == (502, "worker_lost")
        assert gateway.picker.ends == [(w.name, FAILED, None)]


@wire
async def test_a_pause_whose_timer_is_lost_is_ended_by_the_sweep() -> None:
    async def dies(served: Served) -> None:
        await served.request()
        served.reset()

    async with (
        worker(dies, "w0") as bad,
        worker(answering(json_answer()), "w1") as good,
        running(FixedPicker(bad, good)) as gateway,
    ):
        line = gateway.front.line
        lost = replace(line, call_later=lambda _, __: line.call_later(3_600, lambda: None))
        gateway.front.line = lost
        assert (await gateway.ask(post())).status == 200
        assert [name for name, _, _ in gateway.picker.ends] == [bad.name, good.name]


@wire
async def test_a_stream_whose_first_worker_broke_at_once_leaves_the_queue_of_the_second() -> None:
    """The first token counts where it reached the client, and once for each attempt."""
    async with (
        worker(staying(SSE_HEAD + event("lost") + b"no chunk\r\n"), "w0") as bad,
        worker(answering(SSE_HEAD + event("a") + END), "w1") as good,
        running(FixedPicker(bad, good)) as gateway,
    ):
        reply = await gateway.ask(post(STREAM))
        assert reply.status == 200
        assert len(reply.events) == 2
        assert gateway.picker.first_bytes == [good.name]
        assert [end for _, end, _ in gateway.picker.ends] == [FAILED, COMPLETE]


# -- c72 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["picking", "connecting", "waiting", "streaming"])
def test_c72_an_abort_in_any_phase_frees_the_worker_and_empties_the_book(phase: str) -> None:
    @wire
    async def scenario() -> None:
        gone = asyncio.Event()
        first = SSE_HEAD + event("a") if phase == "streaming" else b""
        async with worker(staying(first, gone)) as w:
            picker = LanePicker(w) if phase == "picking" else FixedPicker(w)
            async with running(picker) as gateway:
                await _abort_in(phase, gateway, w)
                await gateway.settled()
                if isinstance(picker, LanePicker):
                    picker.gate.set()
                await until(lambda: gateway.front.counters.late_picks == 0)
                if phase in {"waiting", "streaming"}:
                    await gone.wait()
                assert picker.open_count == 0
                assert [end for _, end, _ in picker.ends] == [GONE] * (phase != "picking")
                assert gateway.front.pool.idle_count() <= 1
                assert (gateway.log[-1].status, gateway.log[-1].code) == (499, "client_gone")

    scenario()


async def _abort_in(phase: str, gateway: Running, w: ScriptedWorker) -> None:
    """Send a stream's request, see that it is in `phase`, and leave."""
    pool, held = gateway.front.pool, asyncio.Event()
    if phase == "connecting":
        connect = pool.connect

        async def slow(endpoint: Endpoint) -> WorkerConnection:
            held.set()
            return await connect(w.endpoint)

        pool.connect = slow
    client = await gateway.client()
    await client.send(post(STREAM))
    if phase == "picking":
        await until(partial(lambda picker: picker.begun_count == 1, gateway.picker))
    elif phase == "connecting":
        await held.wait()
    elif phase == "waiting":
        await until(lambda: len(w.seen) == 1)
    else:
        await client.head()
    client.reset()


@wire
async def test_a_bug_before_a_worker_is_chosen_is_a_500_and_the_connection_goes_on() -> None:
    def fail(*_: object) -> None:
        raise LookupError("nobody foresaw it")

    async with worker(answering(json_answer())) as w, running(FixedPicker(w)) as gateway:
        client = await gateway.client()
        for place, raw in (
            ("intake.request", post()),
            ("admit_request", post()),
            ("local_answer", get("/health")),
        ):
            with pytest.MonkeyPatch.context() as patch:
                owner, _, name = place.rpartition(".")
                patch.setattr(getattr(gateway.front, owner) if owner else gateway.front, name, fail)
                await client.send(raw)
                reply = await client.reply()
            assert (reply.status, reply.error["code"]) == (500, "internal_error")
            assert "foresaw" not in reply.body.decode()
            gateway.bugs_count += 1
            assert gateway.front.counters.bugs == gateway.bugs_count
        await client.send(post())
        assert (await client.reply()).status == 200
        client.close()
    assert gateway.front.counters.refusals == {"internal_error": 3}


@pytest.mark.parametrize("place", ["let_in", "browsers.route", "Body.take"])
def test_a_bug_in_a_head_or_a_body_is_answered_in_the_routes_dialect_and_ends_the_connection(
    place: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise LookupError("nobody foresaw it")

    @wire
    async def scenario() -> None:
        async with worker(answering(json_answer())) as w, running(FixedPicker(w)) as gateway:
            client = await gateway.client()
            with (
                pytest.MonkeyPatch.context() as patch,
                caplog.at_level(logging.ERROR, "trunkline"),
            ):
                owner, _, name = place.rpartition(".")
                owners = {"": gateway.front, "browsers": gateway.front.browsers, "Body": Body}
                patch.setattr(owners[owner], name, fail)
                await client.send(post(path="/v1/messages", extra="x-request-id: mine\r\n"))
                reply = await client.reply()
            assert (reply.status, reply.error["code"]) == (500, "internal_error")
            assert reply.headers["connection"] == "close"
            assert reply.headers["x-request-id"] == "mine"
            # The route is not known yet where it is being found.
            assert ("request-id" in reply.headers) is (place != "browsers.route")
            assert "foresaw" not in reply.body.decode()
            assert await client.reader.read() == b""
            [record] = caplog.records
            assert (record.message, vars(record)["fields"]["request_id"]) == (
                "exchange.bug",
                "mine",
            )
            assert (gateway.log[-1].status, gateway.log[-1].request_id) == (500, "mine")
            assert gateway.front.counters.refusals == {"internal_error": 1}
            gateway.bugs_count = 1
            assert (await gateway.ask(post())).status == 200

    scenario()
