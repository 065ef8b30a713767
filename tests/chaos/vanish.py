"""A machine that is gone from the network: its packets are dropped, nobody is told. Part of F1.

Each worker runs in a network namespace of its own, behind a bridge, and vanishes when its port of
the bridge goes down. The row runs in a process of its own in a private namespace, which takes
everything with it when it ends, however it ends. Where namespaces are not allowed, links through
the proxy stand still instead: a little kinder, as connections are still taken.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import ground
from deaths import HISTORY_S, STREAMS, WORKERS, judged, mixed_crowd
from fleet import Gateway, Process, processes, until
from links import behind_links
from rows import HEARTBEAT_S, Finding, Row, Stage, Verdict, at_most, percentile

AWAY_S = 8.0 * HEARTBEAT_S
LIMIT_S = 4 * HEARTBEAT_S + ground.PREFILL_S
NETWORK = "10.77.0"
_PRIVATE = "CHAOS_PRIVATE_NETWORK"

_WHEN_PLUGGED = """
until ip -4 -o addr show eth0 2>/dev/null | grep -q inet; do sleep 0.02; done
exec "$@"
"""

Switch = Callable[[int, bool], None]
"""The worker of that index is on the network, or is not."""


def vanishes(stage: Stage) -> list[Finding]:
    """One of four workers is off the network for 8 H, again and again."""
    if _PRIVATE in os.environ:
        with _behind_a_bridge(WORKERS) as (gateway, switch):
            return _vanish(stage, gateway, switch, "packets dropped")
    if may_unshare():
        return _in_private_network(stage)
    with behind_links(WORKERS) as (_, gateway, fleet):

        def links(at: int, is_there: bool) -> None:
            if is_there:
                fleet[at].heal()
            else:
                fleet[at].cut("both")

        return _vanish(stage, gateway, links, "links stand still")


def _vanish(stage: Stage, gateway: Gateway, switch: Switch, how: str) -> list[Finding]:
    dice, gaps_from = stage.dice(), list[float]()
    with mixed_crowd(gateway) as crowd:
        for trial in stage.rounds(20):
            if stage.is_late:
                break
            until(lambda: len(crowd.flowing()) > STREAMS // 3, "streams run")
            time.sleep(HISTORY_S + dice.random())
            at = dice.randrange(WORKERS)
            touched = crowd.running()
            switch(at, False)
            gaps_from.append(time.monotonic())
            time.sleep(AWAY_S)
            switch(at, True)
            ground.wait_back(gateway, WORKERS)
            until(lambda: all(o.ended_s for o in touched), "all that was hit has ended", 120)  # noqa: B023
            stage.say(f"gone {trial + 1} ({how}): {len(crowd.outcomes)} answers")
    hit = [o for o in crowd.outcomes if any(o.sent_s < s < o.ended_s for s in gaps_from)]
    gaps = [o.gap_s for o in hit if o.resumes or o.gap_s > HEARTBEAT_S]
    what = f"{how}: gap in {len(gaps)} streams that were hit, p95"
    return [
        at_most("F1", what, percentile(gaps, 0.95), LIMIT_S, "s"),
        *judged(stage, "F1", crowd.outcomes, title=f"{how}: "),
    ]


def may_unshare() -> bool:
    words = ["unshare", "-n", "-m", "ip", "link", "add", "type", "veth"]
    with contextlib.suppress(OSError):
        return subprocess.run(words, capture_output=True, check=False).returncode == 0
    return False


def _in_private_network(stage: Stage) -> list[Finding]:
    """The same row in a child that has a network for itself."""
    trials = ["--trials", str(stage.trials)] if stage.trials else []
    told = Path(f"/tmp/chaos-vanish-{os.getpid()}.json")
    tool = str(Path(__file__).with_name("chaos.py"))
    words = [
        *("unshare", "-n", "-m", sys.executable, tool, "--only", "F1", "--part", "vanishes"),
        *("--seed", str(stage.seed), "--json", str(told), *trials),
    ]
    child = subprocess.Popen(
        words, stdout=subprocess.DEVNULL, env={**os.environ, _PRIVATE: "1"}, start_new_session=True
    )
    try:
        child.wait()
        found = json.loads(told.read_text())["findings"]
    finally:
        if child.poll() is None:
            child.send_signal(signal.SIGTERM)
            child.wait()
        told.unlink(missing_ok=True)
    return [Finding(**{**one, "verdict": Verdict(one["verdict"])}) for one in found]


@contextlib.contextmanager
def _behind_a_bridge(count: int) -> Iterator[tuple[Gateway, Switch]]:
    """Ours is the private namespace: nothing here has to be taken down."""
    _ip("link", "set", "lo", "up")
    _ip("link", "add", "br0", "type", "bridge")
    _ip("addr", "add", f"{NETWORK}.1/24", "dev", "br0")
    _ip("link", "set", "br0", "up")
    with processes() as started:
        fleet: list[Process] = []
        for at in range(count):
            host = f"{NETWORK}.{10 + at}"
            fleet.append(
                started.begin(
                    *("worker", "--host", host, "--profile", ground.PROFILE),
                    under=("unshare", "-n", "sh", "-c", _WHEN_PLUGGED, "sh"),
                )
            )
            _plug(fleet[-1].child.pid, at, host)
        for worker in fleet:
            worker.wait_ready()

        def port(at: int, is_there: bool) -> None:
            _ip("link", "set", f"port{at}", "up" if is_there else "down")

        yield ground.gateway(started, [worker.url for worker in fleet]), port


def _plug(pid: int, at: int, host: str) -> None:
    """A cable from the bridge to the namespace of this process."""
    own = os.readlink("/proc/self/ns/net")
    until(lambda: os.readlink(f"/proc/{pid}/ns/net") != own, "it has its own network")
    _ip("link", "add", f"port{at}", "type", "veth", "peer", "name", "eth0", "netns", str(pid))
    _ip("link", "set", f"port{at}", "master", "br0", "up")
    inside = ("nsenter", "-t", str(pid), "-n", "ip")
    for words in (
        ("link", "set", "lo", "up"),
        ("addr", "add", f"{host}/24", "dev", "eth0"),
        ("link", "set", "eth0", "up"),
    ):
        subprocess.run((*inside, *words), check=True)


def _ip(*words: str) -> None:
    subprocess.run(("ip", *words), check=True)


ROWS = (
    Row(fault="F1", part="vanishes", title="a worker's machine vanishes", run=vanishes,
        limit_s=1_200),
)  # fmt: skip
