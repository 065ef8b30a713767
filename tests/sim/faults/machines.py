"""Several machines in one process on one virtual clock, each of which can stop or die by itself.

What a machine runs is known by its context: every callback and task that it makes carries the
machine on. So `stop` holds all of it back, as SIGSTOP does, and after `kill` not one more line of
it runs, whatever it was waiting for, as after SIGKILL. In each turn of the loop the machines take
turns in an order drawn from the seed; the callbacks of one machine keep theirs, as asyncio
promises.

A run is the same again for the same seed: tasks are told apart by a count and not by their address,
so that even sets of them are gone through in one order. Read `network.py` for the ways between
machines.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import random
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from trunkline.core.records import BootInstant, Instant, WallTime
from virtual_loop import VirtualLoop

_T = TypeVar("_T")
LAST_S, LAST_ROUNDS = 5.0, 10
"""For what is cancelled at the very end."""


@dataclass(slots=True, eq=False)
class Machine:
    """One process and the machine that it has for itself."""

    name: str
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    is_stopped: bool = False
    was_stopped: bool = False
    """Once at least: what had its time meanwhile is over."""
    is_dead: bool = False
    held: deque[asyncio.Handle] = field(default_factory=deque[asyncio.Handle])
    """What was due while it was stopped."""
    tasks: list[asyncio.Task[Any]] = field(default_factory=list[asyncio.Task[Any]])
    """All it ever began; they live on until the run is over, so that nothing is collected early."""

    def __post_init__(self) -> None:
        self.context.run(_MACHINE.set, self)

    def run(self, work: Callable[..., _T], *args: Any) -> _T:
        """Call it as a part of this machine."""
        return self.context.copy().run(work, *args)

    def holds_back(self, handle: asyncio.Handle) -> bool:
        """Nothing runs on it now: the callback is kept for when it goes on."""
        if self.is_stopped or self.is_dead:
            self.held.append(handle)
            return True
        return False

    def open_tasks(self, is_counted: Callable[[str], bool]) -> int:
        """How many of those whose names are counted are not over."""
        self.tasks = [task for task in self.tasks if not task.done()]
        return sum(is_counted(task.get_name()) for task in self.tasks)


_MACHINE: contextvars.ContextVar[Machine | None] = contextvars.ContextVar("machine", default=None)


def current_machine() -> Machine | None:
    """Whose code is running; None for the world's own."""
    return _MACHINE.get()


class _Handle(asyncio.Handle):
    __slots__ = ("machine",)
    machine: Machine

    def _run(self) -> None:
        if not self.machine.holds_back(self):
            super()._run()


class _TimerHandle(asyncio.TimerHandle):
    __slots__ = ("machine",)
    machine: Machine

    def _run(self) -> None:
        if not self.machine.holds_back(self):
            super()._run()


class _Task(asyncio.Task[Any]):
    """A task whose hash is its number: sets of tasks have the same order in every process."""

    def __init__(self, number: int, *args: Any, **words: Any) -> None:
        self._number = number
        super().__init__(*args, **words)

    def __hash__(self) -> int:
        return self._number


class MachineLoop(VirtualLoop):
    """The loop of all machines."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._dice = random.Random(f"turns {seed}")
        self._task_count = 0
        self.stray_errors: list[str] = []
        """What nobody caught; a product that works leaves none."""
        factory: Any = self._new_task  # what asyncio calls, with less than its type allows
        self.set_task_factory(factory)
        self.set_exception_handler(self._note_error)
        self.machines: dict[Machine, None] = {}
        """All that ever ran something."""

    def stop_machine(self, machine: Machine) -> None:
        """As SIGSTOP: it keeps its connections, and others may still send to it."""
        machine.is_stopped = machine.was_stopped = True

    def resume_machine(self, machine: Machine) -> None:
        """Everything that was due meanwhile happens now."""
        machine.is_stopped = False
        self._ready.extend(machine.held)
        machine.held.clear()

    def kill_machine(self, machine: Machine) -> None:
        machine.is_dead, machine.is_stopped = True, False

    # -- what asyncio calls ------------------------------------------------------------------------

    def call_soon(
        self, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        machine = _machine_in(context)
        if machine is None:
            return super().call_soon(callback, *args, context=context)
        handle = _Handle(callback, args, self, context)
        handle.machine = machine
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """There is one thread."""
        return self.call_soon(callback, *args, context=context)

    def call_at(
        self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        machine = _machine_in(context)
        if machine is None:
            return super().call_at(when, callback, *args, context=context)
        timer = _TimerHandle(when, callback, args, self, context)
        timer.machine = machine
        timers: Any = self._scheduled  # pyright: ignore[reportAttributeAccessIssue] - asyncio's own
        heapq.heappush(timers, timer)
        timer._scheduled = True
        return timer

    def _run_once(self) -> None:
        if len(self._ready) > 1:
            self._take_turns()
        super()._run_once()  # pyright: ignore[reportAttributeAccessIssue] - asyncio's own

    def _take_turns(self) -> None:
        """Which machine is next is chance; what each does, it does in order."""
        queues: dict[Machine | None, deque[asyncio.Handle]] = {}
        for handle in self._ready:
            queues.setdefault(getattr(handle, "machine", None), deque()).append(handle)
        if len(queues) == 1:
            return
        turns = [machine for machine, queue in queues.items() for _ in queue]
        self._dice.shuffle(turns)
        self._ready = deque(queues[machine].popleft() for machine in turns)

    def _new_task(
        self,
        loop: asyncio.AbstractEventLoop,
        work: Coroutine[Any, Any, Any],
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[Any]:
        self._task_count += 1
        task = _Task(self._task_count, work, loop=loop, context=context)
        machine = _machine_in(context)
        if machine is not None:
            if machine not in self.machines:
                self.machines[machine] = None
            machine.tasks.append(task)
        return task

    def _note_error(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.stray_errors.append(f"{context.get('message', '')}: {error!r}")

    def close(self) -> None:
        """Nothing that is left over runs on, or complains that it does not. The dead come back for
        this, to be cancelled in good order.
        """
        self.set_exception_handler(lambda _loop, _context: None)
        for machine in self.machines:
            machine.is_dead = False
            self.resume_machine(machine)
        for _ in range(LAST_ROUNDS):  # what comes to its end may begin something else
            left = [task for task in asyncio.all_tasks(self) if not task.done()]
            if not left:
                break
            for task in left:
                task.cancel()
            self.run_until_complete(asyncio.wait(left, timeout=LAST_S))
        super().close()


def _machine_in(context: contextvars.Context | None) -> Machine | None:
    return _MACHINE.get() if context is None else context.get(_MACHINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineClock:
    """`ports.Clock` of one machine: it began at its own time and runs at its own rate."""

    loop: asyncio.AbstractEventLoop
    rate: float = 1.0
    age_s: float = 0.0

    def now(self) -> Instant:
        return Instant(self.loop.time() * self.rate * 1e3)

    def boot(self) -> BootInstant:
        return BootInstant((self.loop.time() + self.age_s) * self.rate * 1e3)

    def wall(self) -> WallTime:
        return WallTime(wall_of(self.loop))


def wall_of(loop: asyncio.AbstractEventLoop) -> float:
    """All wall clocks agree: nothing is decided by them."""
    return 1.7e9 + loop.time()
