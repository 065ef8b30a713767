"""Workers that a name stands for."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Sequence
from typing import Any

from trunkline.adapters.workers_dns import WorkersDns
from trunkline.ports.workers import NamedWorker
from virtual_loop import VirtualLoop


def entry(address: str) -> tuple[Any, ...]:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return (family, socket.SOCK_STREAM, 6, "", (address, 8000))


def test_each_address_is_a_worker_and_the_last_good_answer_stays() -> None:
    answers: list[list[str] | Exception] = [
        ["10.0.0.2", "10.0.0.1", "10.0.0.2"],
        socket.gaierror(-2, "Name or service not known"),
        [],
        ["10.0.0.1", "fe80::1%eth0", "fd00::1"],
    ]
    told: list[list[str]] = []
    troubles: list[str] = []
    asked_at: list[float] = []

    async def resolve(host: str, port: int) -> Sequence[tuple[Any, ...]]:
        assert (host, port) == ("engines", 8000)
        asked_at.append(asyncio.get_running_loop().time())
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return [entry(address) for address in answer]

    def tell(named: Sequence[NamedWorker]) -> None:
        assert all(one.is_found for one in named)
        told.append([one.url for one in named])

    async def run() -> None:
        source = WorkersDns("engines", 8000, interval_s=5.0, resolve=resolve)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(source.run(tell, troubles.append))
            while answers:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(1.0)
            task.cancel()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(run())
    assert told == [
        ["http://10.0.0.1:8000", "http://10.0.0.2:8000"],
        ["http://10.0.0.1:8000", "http://[fd00::1]:8000", "http://[fe80::1]:8000"],
    ]
    assert len(troubles) == 2
    pauses = [later - earlier for earlier, later in itertools.pairwise(asked_at)]
    assert all(pause >= 5.0 for pause in pauses), "a bounded rate"


def test_the_machines_own_resolver_is_asked() -> None:
    async def run() -> list[str]:
        found: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()

        def tell(named: Sequence[NamedWorker]) -> None:
            if not found.done():
                found.set_result([one.url for one in named])

        source = WorkersDns("localhost", 8000, interval_s=5.0)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(source.run(tell, lambda why: None))
            urls = await asyncio.wait_for(found, 60.0)
            task.cancel()
        return urls

    assert "http://127.0.0.1:8000" in asyncio.run(run())
