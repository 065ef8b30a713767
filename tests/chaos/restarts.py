"""A gateway that is killed under load and started anew: does it find the caches again? F17.

Its directory is in memory alone: what it knows afterwards comes from the workers' replay rings, or
from a gateway beside it. Many prefixes, each asked for now and then, so that a gateway which knows
nothing cannot learn them again in time by its own routing.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import ground
from crowd import Ask, Crowd, Outcome
from fleet import Gateway, Process, Processes, free_port, processes, until
from rows import HEARTBEAT_S, Finding, Row, Stage, at_least, at_most, none_of
from tenants import copy_secrets

from nats_desk import NatsServer, nats_server

WORKERS = 3
FAMILIES = 240
SHARED_TOKENS = 512
RATE_PER_S = 12.0
WARM_RATE_PER_S = 30.0
BEFORE_S = 15.0
WINDOW_S = 5.0
SHORT_RING = 32
"""Batches: a worker overwrites it several times before the kill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What the gateway has to find its way back by."""

    name: str
    ring: int = 10_000
    tenants: int = 0
    has_sibling: bool = False


@dataclass(slots=True, kw_only=True)
class Scene:
    """What is running."""

    gateway: Gateway
    again: list[str]
    """What the killed gateway was started with, and is again."""
    keys: list[str] = field(default_factory=list[str])
    urls: list[str] = field(default_factory=list[str])
    other: str = ""
    """Another gateway, which is asked in turn until the kill: it must know the tenants, too."""

    def asked(self, turn: int) -> list[str]:
        return [self.other] if self.other and turn % 2 else [self.gateway.url]


def restart(setting: Setting, stage: Stage) -> list[Finding]:
    """kill -9 of a gateway under load, and the same command again."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        started = stack.enter_context(processes())  # ended before the folder goes
        fleet = ground.workers(started, WORKERS, "--event-ring", str(setting.ring))
        server = stack.enter_context(nats_server(folder / "nats")) if setting.has_sibling else None
        scene = _begun(setting, started, fleet, folder, server)
        crowds = [stack.enter_context(crowd) for crowd in _crowds(setting, scene)]
        time.sleep(FAMILIES / WARM_RATE_PER_S + 1.0)
        for crowd in crowds:
            crowd.rate_per_s = RATE_PER_S / len(crowds)
        before_s = stage.phase_s(BEFORE_S)
        time.sleep(before_s)
        before = hit_share(_since(crowds, time.monotonic() - before_s))
        known = _held(scene.gateway)
        scene.other = ""
        scene.gateway.process.kill()
        killed_s = time.monotonic()
        scene.gateway = ground.gateway(started, scene.urls, *scene.again)
        ready_s = time.monotonic()
        again = _held(scene.gateway)
        back_s, first = _until_back(stage, crowds, before, ready_s)
        outcomes = [outcome for crowd in crowds for outcome in crowd.outcomes]
    after = [outcome for outcome in outcomes if outcome.sent_s > ready_s and outcome.status]
    stage.say(
        f"{setting.name}: {again} of {known} blocks known when ready, hit share {before:.3f}"
        f" before, {first:.3f} in the first {WINDOW_S:.0f} s"
    )
    title = f"{setting.name}: "
    return [
        at_least("F17", title + "hit share before the kill", 100 * before, 50.0, "%"),
        at_most("F17", title + "ready again after", ready_s - killed_s, 5.0, "s"),
        at_most("F17", title + "hit tokens at 95 % of before again after", back_s,
                30 * HEARTBEAT_S, "s"),
        none_of("F17", title + "false hits: other tokens than the model's",
                sum(o.is_wrong for o in outcomes), len(outcomes)),
        none_of("F17", title + "requests after it without their whole answer",
                sum(not o.is_whole for o in after), len(after)),
    ]  # fmt: skip


def _begun(
    setting: Setting,
    started: Processes,
    fleet: Sequence[Process],
    folder: Path,
    server: NatsServer | None,
) -> Scene:
    urls = [worker.url for worker in fleet]
    ports = ["--port", str(free_port()), "--admin-port", str(free_port())]
    if not setting.tenants:
        root = folder / "root.key"
        root.write_text("5a" * 32)
        root.chmod(0o600)
        words = [*ports, "--root-key-file", str(root)]
        return Scene(gateway=ground.gateway(started, urls, *words), again=words, urls=urls)
    control = ["--control", server.url, "--control-replicas", "1"] if server else []
    words = [*ports, "--state-dir", str(folder / "one"), *control]
    scene = Scene(gateway=ground.gateway(started, urls, *words), again=words, urls=urls)
    if server is not None:
        copy_secrets(folder / "one", folder / "other")
        other = ground.gateway(started, urls, "--state-dir", str(folder / "other"), *control)
        scene.other = other.url
    scene.keys = [_key(scene.gateway, f"tenant{at}") for at in range(setting.tenants)]
    return scene


def _key(gateway: Gateway, tenant: str) -> str:
    body = {"tenant": tenant, "create_tenant": True, "user": ""}
    made = until(
        lambda: (said := gateway.admin("/keys", "POST", json=body)).status_code == 201 and said,
        "a key is made",
    )
    return made.json()["key"]


def _crowds(setting: Setting, scene: Scene) -> Iterator[Crowd]:
    """One of each tenant, with prefixes of its own."""
    keys = scene.keys or [""]
    own = FAMILIES // len(keys)

    def asked(base: int, number: int, turn: int) -> Ask:
        dice = random.Random(f"{setting.name} {base} {number} {turn}")
        family = turn if turn < own else dice.randrange(own)  # each once, then as it comes
        return Ask(prompt=_prompt(base + family, dice), tokens=2)

    for at, key in enumerate(keys):
        make = partial(asked, at * own)
        yield Crowd(scene.asked, make, rate_per_s=WARM_RATE_PER_S / len(keys), key=key)


def _prompt(family: int, dice: random.Random) -> tuple[int, ...]:
    shared = random.Random(f"family {family}")
    ids = [shared.randrange(500, 4_000) for _ in range(SHARED_TOKENS)]
    return (*ids, *(dice.randrange(500, 4_000) for _ in range(16)))


def _since(crowds: Sequence[Crowd], began_s: float) -> list[Outcome]:
    return [outcome for crowd in crowds for outcome in crowd.since(began_s)]


def hit_share(outcomes: Sequence[Outcome]) -> float:
    """Of the prompt tokens of those that were answered."""
    told = [o.usage for o in outcomes if o.usage]
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in told)
    return cached / max(1, sum(usage["prompt_tokens"] for usage in told))


def _held(gateway: Gateway) -> int:
    rows = gateway.workers().values()
    return sum(rank["held_blocks"] for row in rows for rank in row["detail"]["ranks"])


def _until_back(
    stage: Stage, crowds: Sequence[Crowd], before: float, ready_s: float
) -> tuple[float, float]:
    """Seconds until hits are as before (infinite for never), and the share of the first window."""
    first, share, began_s = 0.0, 0.0, ready_s
    while time.monotonic() < ready_s + 60 * HEARTBEAT_S:
        began_s = time.monotonic()
        time.sleep(WINDOW_S)
        share = hit_share(_since(crowds, began_s))
        first = first or share
        stage.say(f"hit share {before:.3f} before, {share:.3f} now")
        if share >= 0.95 * before:
            return time.monotonic() - ready_s, first
    return float("inf"), first


SETTINGS = (
    Setting(name="one tenant, ring whole"),
    Setting(name="one tenant, ring overwritten", ring=SHORT_RING),
    Setting(name="tenants, ring whole", tenants=4),
    Setting(name="tenants, ring overwritten", tenants=4, ring=SHORT_RING),
    Setting(name="tenants, ring overwritten, a gateway beside it", tenants=4, ring=SHORT_RING,
            has_sibling=True),
)  # fmt: skip

# Where nobody is left who knows, a goal is missed that no gateway can reach: shown when asked for.
ROWS = tuple(
    Row(
        fault="F17",
        part=setting.name.replace(",", "").replace(" ", "-"),
        title=f"kill -9 of a gateway under load: {setting.name}",
        run=partial(restart, setting),
        limit_s=300.0,
        is_only_when_named=setting.ring == SHORT_RING and not setting.has_sibling,
    )
    for setting in SETTINGS
)
