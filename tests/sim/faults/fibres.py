"""Threads of machines, each a greenlet on the one thread that the virtual loop runs on.

    product's thread ──blocks──► the loop goes on ──woken, or its time is over──► product's thread

A `Threads` stands where product code has the module `threading`. A thread belongs to the machine
that starts it, as callbacks do: stopped with it, and killed with it wherever it waits. It gives way
where a real one may lose its turn: where it waits, and by chance before it takes a lock. Nothing is
given way to while a lock is held, so a loop never waits for one. Must never: run but from the loop.
Read `machines.py` for machines, `kv_net.py` for sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from types import TracebackType
from typing import Any

from faults.machines import Machine, MachineLoop, current_machine
from greenlet import GreenletExit, getcurrent, greenlet

GIVES_WAY = 0.05
"""How often a thread loses its turn before it takes a lock."""
LONGEST_S = 0.003
"""For so long at most."""


class Fibre:
    """One thread of one machine."""

    def __init__(self, threads: Threads, name: str, work: Callable[[], None]) -> None:
        machine = current_machine()
        assert machine is not None, "threads belong to machines"
        self.name = name
        self.machine = machine
        self.is_over = False
        self.locks_held = 0
        self.ended: list[_Spot] = []
        """Who waits for its end."""
        self._threads = threads
        self._work = work
        # Of its own, since a context is never entered twice.
        self._callbacks = machine.context.copy()
        self._greenlet = greenlet(self._run, parent=threads.hub)
        self._greenlet.gr_context = machine.context.copy()

    def begin(self) -> None:
        self._threads.loop.call_soon(self.go_on, context=self._callbacks)

    def go_on(self) -> None:
        """From the loop: until it waits, or is over."""
        assert getcurrent() is self._threads.hub
        if not self.is_over:
            self._threads.current = self
            self._greenlet.switch()
            self._threads.current = None

    def wait(self, spots: list[_Spot], timeout_s: float | None) -> bool:
        """Until somebody wakes one of these spots that is ours; False where the time was over."""
        threads = self._threads
        assert threads.current is self
        assert not self.locks_held, f"{self.name} waits and holds a lock"
        threads.on_wait(self)
        spot = _Spot(self)
        spots.append(spot)
        timer: asyncio.TimerHandle | None = None
        if timeout_s is not None:
            at_s = threads.loop.time() + timeout_s
            timer = threads.loop.call_at(at_s, spot.time_is_over, context=self._callbacks)
        try:
            self._give_way()
        finally:
            if timer is not None:
                timer.cancel()
            if spot in spots:
                spots.remove(spot)
        return spot.is_woken

    def go_on_soon(self) -> None:
        self._threads.loop.call_soon(self.go_on, context=self._callbacks)

    def end(self) -> None:
        """Its machine is gone for good, and the run is over: nothing of it runs, but what it has to
        leave in order.
        """
        if not self.is_over:
            self._threads.current = self
            self._greenlet.throw(GreenletExit)
            self._threads.current = None
            self.is_over = True

    def _give_way(self) -> None:
        if self._threads.is_over:
            raise GreenletExit
        self._threads.hub.switch()

    def _run(self) -> None:
        try:
            self._work()
        except GreenletExit:
            pass
        except BaseException as error:  # noqa: BLE001  # as the interpreter does for its threads
            self._threads.loop.stray_errors.append(f"thread {self.name}: {error!r}")
        self.is_over = True
        for spot in self.ended:
            spot.wake()


class _Spot:
    """One wait of one thread."""

    __slots__ = ("_fibre", "_is_done", "is_woken")

    def __init__(self, fibre: Fibre) -> None:
        self._fibre = fibre
        self._is_done = False
        self.is_woken = False

    def wake(self) -> None:
        if not self._is_done:
            self._is_done = self.is_woken = True
            self._fibre.go_on_soon()

    def time_is_over(self) -> None:
        if not self._is_done:
            self._is_done = True
            self._fibre.go_on_soon()


def wake_all(spots: Sequence[_Spot]) -> None:
    for spot in list(spots):
        spot.wake()


Spots = list[_Spot]


class Threads:
    """Of all machines of one run; what product code calls stands under `threading`'s names."""

    def __init__(self, loop: MachineLoop, seed: int) -> None:
        self.loop = loop
        self.hub = getcurrent()
        self.current: Fibre | None = None
        self.is_over = False
        self.fibres: list[Fibre] = []
        """All that were ever begun: who is collected early would be ended at a time that depends on
        the collector.
        """
        self.on_wait: Callable[[Fibre], None] = lambda _fibre: None
        """Told of each wait before it."""
        self._dice = random.Random(f"threads {seed}")
        # As in `threading`.
        self.Lock = partial(Lock, self)
        self.Event = partial(Event, self)
        self.Condition = partial(Condition, self)
        self.Thread = partial(Thread, self)

    def here(self) -> Fibre:
        """Which thread is running. The loop itself never waits."""
        assert self.current is not None, "a loop would wait, and all of its machine with it"
        return self.current

    def alive(self, machine: Machine) -> list[str]:
        """The names of a machine's threads that are not over."""
        return [one.name for one in self.fibres if one.machine is machine and not one.is_over]

    def may_give_way(self) -> None:
        """Where another thread could come first."""
        fibre = self.current
        if fibre is None or fibre.locks_held or self.is_over:
            return
        if self._dice.random() < GIVES_WAY:
            secs = self._dice.choice((0.0, self._dice.random() * LONGEST_S))
            fibre.wait([], secs)

    def close(self) -> None:
        """The run is over."""
        self.is_over = True
        for fibre in self.fibres:
            fibre.end()

    def pool(self, max_workers: int, thread_name_prefix: str = "") -> Pool:
        """As `concurrent.futures.ThreadPoolExecutor`."""
        return Pool(self, max_workers, thread_name_prefix)


class Lock:
    """Of one holder."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._is_held = False

    def acquire(self) -> bool:
        self._threads.may_give_way()
        # Whoever holds one does not give way, so nobody ever finds it taken.
        assert not self._is_held, "taken twice by one thread"
        self._is_held = True
        if self._threads.current is not None:
            self._threads.current.locks_held += 1
        return True

    def release(self) -> None:
        assert self._is_held
        self._is_held = False
        if self._threads.current is not None:
            self._threads.current.locks_held -= 1

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.release()


class Event:
    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._is_set = False
        self._spots: Spots = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        wake_all(self._spots)

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set:
            self._threads.here().wait(self._spots, timeout)
        return self._is_set


class Condition:
    def __init__(self, threads: Threads, lock: Lock | None = None) -> None:
        self._threads = threads
        self._lock = lock or Lock(threads)
        self._spots: Spots = []

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        self._lock.release()
        try:
            return self._threads.here().wait(self._spots, timeout)
        finally:
            self._lock.acquire()

    def notify_all(self) -> None:
        wake_all(self._spots)


class Thread:
    def __init__(
        self,
        threads: Threads,
        *,
        target: Callable[..., None],
        args: Sequence[Any] = (),
        name: str = "",
        daemon: bool = False,
    ) -> None:
        """No thread of a machine outlives it, whatever `daemon` says."""
        self._threads = threads
        self._work = lambda: target(*args)
        self._name = name
        self._fibre: Fibre | None = None

    def start(self) -> None:
        assert self._fibre is None, "a thread is started once"
        self._fibre = Fibre(self._threads, self._name, self._work)
        self._threads.fibres.append(self._fibre)
        self._fibre.begin()

    def join(self) -> None:
        assert self._fibre is not None
        if not self._fibre.is_over:
            self._threads.here().wait(self._fibre.ended, None)


class Pool(Executor):
    """Never more than so many threads, and what comes beyond that waits in line."""

    def __init__(self, threads: Threads, max_workers: int, name: str) -> None:
        self._threads = threads
        self._max_workers = max_workers
        self._name = name
        self._running = 0
        self._line: deque[Callable[[], None]] = deque()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def work() -> None:
            try:
                if future.set_running_or_notify_cancel():
                    _carry_out(future, fn, args, kwargs)
            finally:
                self._running -= 1
                self._begin_next()

        self._line.append(work)
        self._begin_next()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """All of it is over by then, or ends with the run."""

    def _begin_next(self) -> None:
        while self._line and self._running < self._max_workers and not self._threads.is_over:
            self._running += 1
            self._threads.Thread(target=self._line.popleft(), name=self._name).start()


def _carry_out(
    future: Future[Any], fn: Callable[..., Any], args: Sequence[Any], words: Mapping[str, Any]
) -> None:
    try:
        result = fn(*args, **words)
    except GreenletExit:
        raise
    except BaseException as error:  # noqa: BLE001  # it is told to who asked
        future.set_exception(error)
    else:
        future.set_result(result)


@contextlib.contextmanager
def put_in_place(modules: Sequence[Any], names: Mapping[str, object]) -> Generator[None]:
    """While it lasts these modules have other things under names that they import."""
    with contextlib.ExitStack() as stack:
        for module in modules:
            for name, other in names.items():
                if name in module.__dict__:
                    stack.callback(setattr, module, name, module.__dict__[name])
                    setattr(module, name, other)
        yield
