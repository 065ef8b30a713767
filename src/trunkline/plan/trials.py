"""What is tried on one stretch, each trial alone: on several cores where that is worth it.

Cost: a process takes 0.4 s to begin and holds the stretch again, so that short stretches are tried
here, and long ones in four processes at most. What comes out is the same. Read `study.py` for what
is tried.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing import active_children, get_context, parent_process
from threading import Thread
from typing import TypeVar

from trunkline.plan.window import Stretch

MAX_PROCESSES = 4
"""Of some 100 MB each."""
FEW_CALLS = 4_000
"""As many are tried in the time that a process takes to begin."""

Found = TypeVar("Found")
Trial = Callable[[Stretch], Found]
"""A function of a module, or a partial of one: it may go to another process."""


def tried(
    stretch: Stretch, trials: Mapping[str, Trial[Found]], step: Callable[[], None]
) -> dict[str, Found]:
    """What each found, by name. `step` is called when one has ended; those that are first take
    longest, if the caller knows.
    """
    found: dict[str, Found] = {}
    processes = min(_cores(), MAX_PROCESSES, len(trials))
    if processes > 1 and len(stretch) >= FEW_CALLS:
        with suppress(BrokenProcessPool):  # one was killed: what it owes is tried here
            _try_beside(stretch, trials, step, processes, found)
    for name, trial in trials.items():
        if name not in found:
            found[name] = trial(stretch)
            step()
    return {name: found[name] for name in trials}


def _try_beside(
    stretch: Stretch,
    trials: Mapping[str, Trial[Found]],
    step: Callable[[], None],
    processes: int,
    found: dict[str, Found],
) -> None:
    pool = ProcessPoolExecutor(
        processes, mp_context=get_context("spawn"), initializer=_begin, initargs=(stretch,)
    )
    before = set(active_children())
    try:
        names = {pool.submit(_run, trial): name for name, trial in trials.items()}
        for ended in as_completed(names):
            found[names[ended]] = ended.result()
            step()
    except BaseException:
        for child in set(active_children()) - before:
            child.terminate()  # nobody waits for what they are at
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# -- in a process beside ---------------------------------------------------------------------------

_given: list[Stretch] = []


def _begin(stretch: Stretch) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends all of them, without a word
    Thread(target=_end_with_parent, daemon=True).start()
    _given.append(stretch)


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # killed: nobody is left to take what is found


def _run(trial: Trial[Found]) -> Found:
    return trial(_given[0])
