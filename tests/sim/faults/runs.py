"""Runs seeds, prints what a failing one was, and makes it smaller.

    make faults SEED=7                      one seed; its story where something does not hold
    make faults SEED=0-199                  many, and the rare states that they reached
    make faults SEED=7 ARGS='--story --until 6.5'

A failing seed is run again with fewer troubles and calls for as long as the same invariant breaks,
and the command that runs the smallest is printed. Read `world.py` for one run.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from faults.kv_plane import kv_plane
from faults.network import FaultyNet
from faults.rare import CATALOGUE
from faults.setting import Setting, setting_of
from faults.world import World, heard

from trunkline.adapters.clock import SystemClock
from trunkline.replay.progress import Progress

SHRINK_RUNS = 120
COLLECTED_EACH = 200_000
"""Objects made."""
SHOWN_LINES = 200
_Item = TypeVar("_Item")
Break = Callable[[], AbstractContextManager[object]]
"""What is planted while a run is made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What is left of a run."""

    setting: Setting
    digest: str
    violations: tuple[tuple[str, str], ...]
    seen: frozenset[str]
    story: tuple[str, ...]

    @property
    def broken(self) -> str:
        """The first invariant that did not hold; empty where all did."""
        return self.violations[0][0] if self.violations else ""


def played(setting: Setting, plant: Break = nullcontext, *, lines: int = SHOWN_LINES) -> Played:
    """Run it from beginning to end."""
    net = FaultyNet(setting.seed)
    with plant(), _seldom_collecting(), kv_plane(net, setting) as plane:
        world = World(net, setting, plane, lines=lines)
        with heard(world):
            try:
                world.run()
            finally:
                if plane is not None:
                    plane.threads.close()
                net.close()
    return Played(
        setting=setting,
        digest=world.digest,
        violations=tuple(world.violations),
        seen=frozenset(world.seen.counts),
        story=tuple(world.story),
    )


@contextmanager
def _seldom_collecting() -> Generator[None]:
    """A run keeps nearly all it makes until it is over: to look for garbage all the time is a tenth
    of its cost.
    """
    before = gc.get_threshold()
    gc.set_threshold(COLLECTED_EACH)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def run_seed(seed: int, gateways: int = 1) -> Played:
    return played(setting_of(seed, gateways=gateways))


# -- a smaller one ---------------------------------------------------------------------------------


def shrunk(failed: Played, plant: Break = nullcontext, *, runs: int = SHRINK_RUNS) -> Played:
    """The smallest run found in which the same invariant breaks: fewer troubles, and calls."""
    left = [runs]

    def still(setting: Setting) -> Played | None:
        if left[0] <= 0:
            return None
        left[0] -= 1
        again = played(setting, plant)
        return again if any(name == failed.broken for name, _ in again.violations) else None

    best = failed
    for part in ("troubles", "calls"):
        best = _fewer(best, part, still)
    return best


def _fewer(best: Played, part: str, still: Callable[[Setting], Played | None]) -> Played:
    """Leave out halves, then quarters, down to single ones, for as long as that helps."""
    size = max(1, len(getattr(best.setting, part)) // 2)
    while True:
        items = getattr(best.setting, part)
        has_helped = False
        for first in range(0, len(items), size):
            kept = items[:first] + items[first + size :]
            if len(kept) < len(items):
                found = still(replace(best.setting, **{part: kept}))
                if found is not None:
                    best, has_helped = found, True
                    break
        if has_helped:
            continue
        if size == 1:
            return best
        size = max(1, size // 2)


def command_of(setting: Setting) -> str:
    """What runs it again, whole or smaller."""
    whole = setting_of(setting.seed, setting.only, setting.gateway_count)
    words = [f"--gateways {setting.gateway_count}"] if setting.gateway_count > 1 else []
    words += [f"--only {','.join(setting.only)}"] if setting.only else []
    if (setting.pulls is None) is not (whole.pulls is None):
        words.append(f"--pulls {'no' if setting.pulls is None else 'yes'}")
        has_pulls = setting.pulls is not None
        whole = setting_of(setting.seed, setting.only, setting.gateway_count, pulls=has_pulls)
    for part in ("troubles", "calls"):
        wanted, all_of = getattr(setting, part), getattr(whole, part)
        if wanted != all_of:
            numbers = ",".join(str(all_of.index(item)) for item in wanted)
            words.append(f"--{part} {numbers or 'none'}")
    more = f" ARGS='{' '.join(words)}'" if words else ""
    return f"make faults SEED={setting.seed}{more}"


def told(failed: Played) -> str:
    """Everything about a failing run, for whoever has to understand it."""
    setting = failed.setting
    lines = [f"seed {setting.seed} at {_commit()}", setting.head()]
    lines += [f"  {trouble}" for trouble in setting.troubles]
    lines += [f"  {call}" for call in setting.calls] if len(setting.calls) < 10 else []
    lines += failed.story
    lines += [f"!! {invariant}  {what}" for invariant, what in failed.violations]
    lines.append(f"again: {command_of(setting)}")
    return "\n".join(lines)


def explained(failed: Played, plant: Break = nullcontext) -> str:
    """The same with the smallest run that shows it."""
    smaller = shrunk(failed, plant)
    return f"{told(smaller)}\nfirst seen: {command_of(failed.setting)}"


def _commit() -> str:
    try:
        asked = ["git", "rev-parse", "--short", "HEAD"]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "no commit"


# -- many ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Tally:
    """What many runs came to."""

    runs: int = 0
    failed: list[Played] = field(default_factory=list[Played])
    reached: Counter[str] = field(default_factory=Counter[str])

    def take(self, one: Played) -> None:
        self.runs += 1
        self.reached.update(one.seen)
        if one.violations:
            self.failed.append(one)

    @property
    def rare(self) -> list[str]:
        """The states of the catalogue that were reached."""
        return [name for name in CATALOGUE if self.reached[name]]

    def table(self) -> str:
        lines = [f"{self.reached[name]:7d}  {name}" for name in CATALOGUE]
        lines.append(f"{len(self.rare)} of {len(CATALOGUE)} rare states in {self.runs} runs")
        return "\n".join(lines)


def tallied(
    seeds: Iterable[int],
    *,
    jobs: int = 1,
    gateways: int = 1,
    on_run: Callable[[], None] = lambda: None,
) -> Tally:
    tally = Tally()
    for one in _all_of(seeds, jobs, gateways):
        tally.take(one)
        on_run()
    return tally


def _all_of(seeds: Iterable[int], jobs: int, gateways: int) -> Iterator[Played]:
    run = partial(run_seed, gateways=gateways)
    if jobs == 1:
        yield from map(run, seeds)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(run, seeds, chunksize=8)


# -- the command -----------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description="Deterministic simulation with faults.")
    parser.add_argument("seeds", nargs="?", default="1", help="a seed, or FIRST-LAST")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--gateways", type=int, default=1, help="more than one share a registry")
    parser.add_argument("--rare", type=int, default=0, help="fail if fewer rare states came up")
    parser.add_argument("--story", action="store_true", help="tell what happened, failed or not")
    parser.add_argument("--until", type=float, default=1e9, help="no further than this second")
    parser.add_argument("--only", help="these fault kinds in place of those drawn")
    parser.add_argument("--troubles", help="only these of the seed's, by number; or none")
    parser.add_argument("--pulls", choices=("yes", "no"), help="between workers, or none")
    parser.add_argument("--calls", help="only these of the seed's, by number; or none")
    given = parser.parse_args()
    first, _, last = given.seeds.partition("-")
    seeds = range(int(first), int(last or first) + 1)
    if len(seeds) == 1:
        return _one(seeds[0], given)
    progress = Progress(sys.stderr, len(seeds), "seeds", SystemClock())
    tally = tallied(seeds, jobs=given.jobs, gateways=given.gateways, on_run=progress.step)
    progress.end()
    _say(tally.table())
    for failed in tally.failed[:3]:
        _say(explained(failed))
    _say(f"{tally.runs} seeds, {len(tally.failed)} failed")
    if tally.failed:
        _say("failed: " + " ".join(str(failed.setting.seed) for failed in tally.failed))
    return 1 if tally.failed or len(tally.rare) < given.rare else 0


def _one(seed: int, given: argparse.Namespace) -> int:
    only = tuple(given.only.split(",")) if given.only else ()
    pulls = None if given.pulls is None else given.pulls == "yes"
    whole = setting_of(seed, only, given.gateways, pulls=pulls)
    setting = replace(
        whole,
        troubles=_kept(whole.troubles, given.troubles),
        calls=_kept(whole.calls, given.calls),
    )
    one = played(setting, lines=1_000_000 if given.story else SHOWN_LINES)
    if given.story:
        _say("\n".join(line for line in one.story if float(line.split()[0]) <= given.until))
    _say(f"seed {seed}: {one.digest}")
    if not one.violations:
        return 0
    _say(explained(one) if setting == whole else told(one))
    return 1


def _kept(items: tuple[_Item, ...], wanted: str | None) -> tuple[_Item, ...]:
    if wanted is None:
        return items
    numbers: Sequence[str] = [] if wanted == "none" else wanted.split(",")
    return tuple(items[int(number)] for number in numbers)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
