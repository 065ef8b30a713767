"""Several gateways before one fleet, as processes, with their registry in NATS.

Read `fleet.py` for the processes, `tenants.py` for the callers.
"""

from __future__ import annotations

from pathlib import Path

from fleet import Processes, text_of, until
from tenants import Caller, Tenants, copy_secrets, reuses, tenants

from nats_desk import NatsServer

PROMPT = text_of(40, "shared")


class Fleet:
    """Workers, and gateways before them that share a registry."""

    def __init__(
        self,
        started: Processes,
        server: NatsServer,
        folder: Path,
        workers: int = 1,
        time_scale: int = 1,
        feed: str = "exact",
        event_ring: int = 10_000,
        profile: str = "tiny",
    ) -> None:
        self.started, self.server, self.folder = started, server, folder
        self.profile = ("--profile", profile)
        flags = (*self.profile, "--time-scale", str(time_scale), "--feed", feed)
        flags = (*flags, "--event-ring", str(event_ring))
        self.urls = [worker.url for worker in started.workers(workers, *flags)]
        self.gateways: dict[str, Tenants] = {}

    def begin(self, name: str, *flags: str, is_joined: bool = True) -> Tenants:
        """A gateway of this name, with the secrets of the first."""
        place = self.folder / name
        first = next(iter(self.gateways), None)
        if first is not None and first != name and not place.exists():
            copy_secrets(self.folder / first / "state", place / "state")
        place.mkdir(exist_ok=True)
        control = ("--control", self.server.url, "--control-replicas", "1")
        made = tenants(self.started, self.urls, place, *self.profile, *control, *flags)
        self.gateways[name] = made
        if is_joined:
            until(lambda: reuses(made.gateway), f"{name} has a lease")
        return made

    def at(self, name: str, caller: Caller) -> Caller:
        return Caller(gateway=self.gateways[name].gateway, key=caller.key)


def cached(caller: Caller, prompt: str = PROMPT) -> int:
    answer = caller.answer(prompt)
    assert answer.status == 200, answer.response.text
    return answer.cached
