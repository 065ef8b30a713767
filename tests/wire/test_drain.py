"""Workers that go: drained by an operator, or told to end themselves. F7."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections.abc import Iterator

import httpx
import pytest
from fleet import STOP_S, WAIT_S, Gateway, Process, Processes, processes, text_of, until, user
from test_serve_faults import Load

SLOW = ("--profile", "fifo:5,0.01,50")
TINY = ("--profile", "tiny")


@pytest.fixture
def started() -> Iterator[Processes]:
    with processes() as these:
        yield these


class Stream:
    """One long stream, read by a thread of its own."""

    def __init__(self, url: str, tokens: int) -> None:
        self.lines: list[str] = []
        self.is_broken = False
        self._thread = threading.Thread(target=self._read, args=(url, tokens))
        self._thread.start()
        until(lambda: len(self.lines) > 3, "the stream has begun")

    def _read(self, url: str, tokens: int) -> None:
        body = user("long", stream=True, max_tokens=tokens)
        path = f"{url}/v1/chat/completions"
        try:
            with (
                httpx.Client(timeout=WAIT_S) as client,
                client.stream("POST", path, json=body) as reply,
            ):
                self.lines += (line for line in reply.iter_lines() if line)
        except httpx.HTTPError:
            self.is_broken = True

    def end(self) -> str:
        """Its last line."""
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        return self.lines[-1]


def drain(gateway: Gateway, process: Process, query: str = "") -> None:
    answer = gateway.admin(f"/workers/{process.name}/drain{query}", "POST")
    assert (answer.status_code, answer.json()["state"]) == (202, "draining")


def test_a_drain_with_a_grace_ends_what_runs_then_and_takes_the_worker_off_the_list(
    started: Processes,
) -> None:
    worker = started.worker(*SLOW)
    gateway = started.gateway([worker.url], *TINY)
    stream = Stream(gateway.url, 4_000)
    drain(gateway, worker, "?grace_secs=1")
    assert gateway.chat("new").status == 503
    told = json.loads(stream.end().removeprefix("data: "))
    assert (told["error"]["code"], stream.is_broken) == ("worker_lost", False)
    until(lambda: not gateway.workers(), "the worker has left")
    assert "worker.drained" in gateway.process.log()
    assert gateway.admin(f"/workers/{worker.name}/undrain", "POST").status_code == 404
    answer = gateway.admin("/workers", "POST", json={"url": worker.url})
    assert answer.status_code == 202, "it may come again"
    gateway.wait_ready(1)
    assert gateway.chat("new").status == 200


def test_a_drain_without_a_grace_ends_nothing_and_undrain_takes_it_back(
    started: Processes,
) -> None:
    worker, other = started.workers(2, *TINY)
    gateway = started.gateway([worker.url, other.url], *TINY)
    drain(gateway, worker)
    for number in range(8):
        assert gateway.chat(text_of(20, number)).worker == other.name
    drain(gateway, other, "?grace_secs=3600")
    answer = gateway.admin(f"/workers/{worker.name}/undrain", "POST")
    assert (answer.status_code, answer.json()["state"]) == (202, "ready")
    for number in range(8):
        assert gateway.chat(text_of(20, number)).worker == worker.name
    for wrong in ("-1", "x", "1e9"):
        path = f"/workers/{worker.name}/drain?grace_secs={wrong}"
        assert gateway.admin(path, "POST").status_code == 400


def test_f7_a_rolling_restart_of_all_workers_fails_no_request(started: Processes) -> None:
    """Each ends by itself on SIGTERM, when its answers have ended, and begins anew."""
    workers = started.workers(3, *TINY, "--drain-grace-ms", "60000")
    gateway = started.gateway([one.url for one in workers], *TINY)
    load = Load(gateway)

    def roll() -> None:
        for number, worker in enumerate(workers):
            assert worker.stop() == 0
            again = started.worker(*TINY, "--port", str(worker.port), "--drain-grace-ms", "60000")
            workers[number] = again
            gateway.wait_ready(3)

    asyncio.run(load.run(6, roll))
    assert set(load.statuses) == {200}
    assert (load.cut_streams, load.whole_streams > 0) == (0, True)
    gateway.wait_quiet()


def test_a_worker_that_is_told_to_end_finishes_its_answers_unless_it_is_told_again(
    started: Processes,
) -> None:
    patient, hurried = started.workers(2, *SLOW, "--drain-grace-ms", "3600000")
    whole = Stream(patient.url, 60)
    cut = Stream(hurried.url, 4_000)
    for worker in (patient, hurried):
        worker.send(signal.SIGTERM)
    assert whole.end() == "data: [DONE]"
    assert patient.child.wait(STOP_S) == 0
    until(lambda: refuses(hurried), "nobody is taken any more")
    assert hurried.child.poll() is None
    hurried.send(signal.SIGTERM)
    assert hurried.child.wait(STOP_S) == 0
    assert "[DONE]" not in cut.end()


def refuses(process: Process) -> bool:
    try:
        httpx.get(f"{process.url}/health", timeout=WAIT_S)
    except httpx.ConnectError:
        return True
    return False
