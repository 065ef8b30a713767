"""Rare states of pulls, as `rare.py` has them of all else."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from faults.crew import Life

if TYPE_CHECKING:
    from faults.world import World

CATALOGUE = (
    *("pull published", "pull published in part", "answer with pulled blocks"),
    *("pull rejected: digest", "pull rejected: lost", "pull rejected: timeout"),
    *("pull rejected: connect", "pull rejected: protocol", "pull rejected: lease"),
    *("pull rejected: epoch", "pull rejected: grant", "pull rejected: miss"),
    *("pull cancelled: client", "pull cancelled: given-up", "pull ordered with two sources"),
    *("source killed in mid-pull", "target killed in mid-pull"),
    *("source stopped in mid-pull", "target stopped in mid-pull", "revoke in mid-pull"),
    *("pull torn in mid-frame", "bit flipped on a link", "source stops a pull: epoch"),
    *("a prompt waits for another's pull", "a pull waits for what is computed"),
    "a thread waits for room",
)


def notes_ends(world: World) -> None:
    """At the end, of all lives."""
    counts = world.seen.counts
    for life in (*world.earlier, *world.lives.values()):
        storage = life.built.storage
        if storage is None or storage.exchange is None:
            continue
        for (end, reason), count in storage.exchange.pulls.ended.items():
            if end.value != "published":
                counts[f"pull {end.value}: {reason.value if reason else ''}"] += count
            else:
                counts["pull published in part" if reason else "pull published"] += count
        for why, count in storage.exchange.server.figures.ended.items():
            counts[f"source stops a pull: {why.value}"] += count
        counts["answer with pulled blocks"] += bool(life.engine.totals.pulled)
    if world.plane is not None:
        counts["bit flipped on a link"] += world.plane.sockets.flipped
        counts["a thread waits for room"] += world.plane.sockets.full_count
    for what in [what for what, count in counts.items() if not count]:
        del counts[what]


def looks_at(life: Life, counts: Counter[str]) -> None:
    """Now and then."""
    storage = life.built.storage
    if storage is None or storage.exchange is None or life.machine.is_dead:
        return
    if any(call.followers for call in storage.exchange.pulls._coming.values()):
        counts["a prompt waits for another's pull"] += 1
    if storage.exchange.lent.coming.wait_count:
        counts["a pull waits for what is computed"] += 1


def notes_trouble(life: Life, kind: str, counts: Counter[str]) -> None:
    """A worker dies, or stops."""
    exchange = life.built.storage.exchange if life.built.storage else None
    if exchange is None:
        return
    what = {"crash": "killed", "stop": "stopped"}[kind]
    if exchange.server._open_pulls:
        counts[f"source {what} in mid-pull"] += 1
    if exchange.pulls.open_count:
        counts[f"target {what} in mid-pull"] += 1
