"""A seed is the same run again, to the byte, in any process; and a failing one gets smaller."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from faults.machines import Machine
from faults.network import FaultyNet, FaultyPipe
from faults.runs import Played, command_of, played, run_seed, shrunk
from faults.setting import Trouble, setting_of

from trunkline.worker.fence import Fence

HERE = Path(__file__).resolve().parent
SEEDS = "3-8"
_RUN = """
import sys
from faults.runs import run_seed
first, last = map(int, sys.argv[1].split("-"))
for seed in range(first, last + 1):
    print(seed, run_seed(seed).digest)
"""


def digests(hash_seed: str) -> str:
    """As another process has them, whose sets and strings are in another order."""
    path = f"{HERE}:{HERE.parent}"
    env = {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": path, "PATH": "/usr/bin:/bin"}
    asked = [sys.executable, "-c", _RUN, SEEDS]
    return subprocess.run(asked, capture_output=True, text=True, check=True, env=env).stdout


@pytest.mark.slow
def test_a_seed_is_the_same_run_in_every_process() -> None:
    """Every byte that arrives anywhere is in the digest, with its time, and all that is logged."""
    first = digests("1")
    assert first == digests("4711")
    assert len(first.splitlines()) == 6
    assert first.splitlines()[0] == f"3 {run_seed(3).digest}"


def test_another_seed_is_another_run() -> None:
    assert run_seed(3).digest != run_seed(4).digest


def test_a_setting_is_the_same_again_and_says_all_of_itself() -> None:
    assert setting_of(11) == setting_of(11)
    shown = setting_of(11).head()
    for name in ("seed=11", "worker_count=", "policy=", "kinds=", "calls=", "troubles="):
        assert name in shown


class _Unchecked(AbstractContextManager[None]):
    """Workers use what they hold unread: a planted fault for this file."""

    def __enter__(self) -> None:
        self._real = Fence.fault
        Fence.fault = lambda *_: None  # pyright: ignore[reportAttributeAccessIssue]

    def __exit__(self, *_: object) -> None:
        Fence.fault = self._real


def first_failing() -> Played:
    for seed in range(60):
        failed = played(setting_of(seed, ("corrupt",), pulls=False), _Unchecked)
        if failed.violations:
            return failed
    raise AssertionError("the planted fault was not found")


@pytest.mark.slow
def test_a_failing_seed_gets_smaller_until_it_shows_the_fault_alone() -> None:
    failed = first_failing()
    smaller = shrunk(failed, _Unchecked, runs=60)
    assert any(name == failed.broken for name, _ in smaller.violations)
    assert len(smaller.setting.troubles) == 1
    assert len(smaller.setting.calls) <= 4, "one that fills a block and one that reads it"
    assert played(smaller.setting, _Unchecked).digest == smaller.digest
    assert not played(smaller.setting).violations, "without the fault it holds"
    assert "ARGS='--only corrupt" in command_of(smaller.setting)


def test_the_command_of_a_smaller_run_names_what_is_left_of_it() -> None:
    whole = setting_of(5)
    smaller = replace(whole, calls=whole.calls[3:5], troubles=whole.troubles[1:2])
    assert command_of(smaller) == "make faults SEED=5 ARGS='--troubles 1 --calls 3,4'"


def test_a_whole_seed_needs_no_more_than_its_number() -> None:
    assert command_of(setting_of(5)) == "make faults SEED=5"
    without = replace(setting_of(5), calls=())
    assert command_of(without) == "make faults SEED=5 ARGS='--calls none'"


# -- machines --------------------------------------------------------------------------------------


class _Ears(asyncio.Protocol):
    def __init__(self, heard: list[Any], loop: FaultyNet) -> None:
        self._heard = heard
        self._loop = loop

    def data_received(self, data: bytes) -> None:
        self._heard.append((round(self._loop.time(), 3), data))

    def connection_lost(self, exc: Exception | None) -> None:
        self._heard.append((round(self._loop.time(), 3), type(exc).__name__))


async def _talk(net: FaultyNet, work: Any) -> list[Any]:
    """A machine that listens, a client that says something each 100 ms, and what goes wrong."""
    heard: list[Any] = []
    machine = Machine("m")
    machine.run(net.listen, "m", 1, lambda: _Ears(heard, net))
    pipe, _ = await net.create_connection(lambda: _Ears([], net), "m", 1)
    for number in range(5):
        if number == 1:
            work(net, machine)
        pipe.write(b"%d" % number)
        await asyncio.sleep(0.1)
    await asyncio.sleep(2.0)
    return heard


def talk(work: Any) -> list[Any]:
    net = FaultyNet(1)
    try:
        return net.run_until_complete(_talk(net, work))
    finally:
        net.close()


def test_a_machine_that_is_stopped_hears_all_of_it_when_it_goes_on() -> None:
    def stop(net: FaultyNet, machine: Machine) -> None:
        net.stop_machine(machine)
        net.call_later(1.0, net.resume_machine, machine)

    heard = talk(stop)
    assert [data for _, data in heard] == [b"0", b"1", b"2", b"3", b"4"]
    assert [at_s >= 1.1 for at_s, _ in heard] == [False, True, True, True, True]


def test_what_a_cut_holds_back_arrives_after_it_in_order() -> None:
    heard = talk(lambda net, _machine: net.cut("client", "m", 0.25))
    assert [data for _, data in heard] == [b"0", b"1", b"2", b"3", b"4"]
    assert [at_s for at_s, _ in heard[1:4]] == [0.35, 0.35, 0.35]


def test_a_dead_machine_runs_no_line_more() -> None:
    heard = talk(lambda net, machine: net.die(machine))
    assert [data for _, data in heard] == [b"0"]


class _Answers(asyncio.Protocol):
    """Says something when it is cancelled, as an answer that is cut off does."""

    def __init__(self, written: list[bytes]) -> None:
        self._written = written

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, FaultyPipe)
        transport.on_written = self._written.append
        self._task = asyncio.get_running_loop().create_task(self._answer(transport))

    async def _answer(self, pipe: FaultyPipe) -> None:
        pipe.write(b"first")
        try:
            await asyncio.Event().wait()
        finally:
            pipe.write(b"last")


def test_a_dead_machine_says_nothing_when_all_is_cleared_away() -> None:
    """Else its clients seem to get tokens, long after a revocation was acknowledged (I3)."""

    async def answered(net: FaultyNet) -> None:
        machine = Machine("m")
        machine.run(net.listen, "m", 1, lambda: _Answers(written))
        await net.create_connection(lambda: _Ears([], net), "m", 1)
        await asyncio.sleep(0.1)
        net.die(machine)

    net, written = FaultyNet(1), list[bytes]()
    net.run_until_complete(answered(net))
    net.close()
    assert written == [b"first"]


def test_a_reset_is_heard_at_both_ends() -> None:
    heard = talk(lambda net, _machine: net.reset(next(iter(net.ground.pipes))))
    assert [data for _, data in heard] == [b"0", "ConnectionResetError"]


def test_trouble_is_told_in_words() -> None:
    assert "kind='stop'" in str(Trouble(at_s=1.0, kind="stop", who=2))
