"""A fleet with tenants, as processes, and its callers: for system tests of isolation.

Each caller is an API key that the admin port made. Read `fleet.py` for the processes.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
from fleet import WAIT_S, Answer, Gateway, Processes, stream_usage, until

MODEL = "trunkline-sim"
Result = TypeVar("Result")

MAX_ATTEMPTS = 20

SALTED_PATHS = ("/v1/embeddings", "/v1/messages", "/v1/responses")
"""The simulated worker keeps the salt there; scripted ones do not say what they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """One API key."""

    gateway: Gateway
    key: str = field(repr=False)

    def headers(self, scope: str = "", session: str = "") -> dict[str, str]:
        made = {"authorization": f"Bearer {self.key}"}
        if scope:
            made["x-cache-scope"] = scope
        if session:
            made["x-trunkline-session"] = session
        return made

    def ask(self, shape: Shape, prompt: str, scope: str = "", session: str = "") -> Told:
        """One whole answer, however it is asked for."""
        asked: dict[str, Any] = {"max_tokens": 2, "temperature": 0, "stream": shape.is_stream}
        if shape.is_stream:
            asked["stream_options"] = {"include_usage": True}
        asked |= shape.prompt(prompt)
        answer = self.gateway.client.post(
            shape.path, json=asked, headers=self.headers(scope, session)
        )
        assert answer.status_code == 200, answer.text
        usage = stream_usage(answer) if shape.is_stream else answer.json()["usage"]
        return Told(
            cached=usage["prompt_tokens_details"]["cached_tokens"],
            text=text_in(answer, shape),
            session=answer.headers.get("x-trunkline-session", ""),
            decision=answer.headers["x-trunkline-decision"],
        )

    def answer(self, prompt: str, **more: Any) -> Answer:
        """As it comes, whatever its status."""
        return self.gateway.complete(prompt, self.headers(), **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """An endpoint, and whether its answer is a stream."""

    is_chat: bool
    is_stream: bool

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    def prompt(self, text: str) -> dict[str, Any]:
        if self.is_chat:
            return {"messages": [{"role": "user", "content": text}]}
        return {"prompt": text}

    def __str__(self) -> str:
        return f"{'chat' if self.is_chat else 'text'}{', a stream' if self.is_stream else ''}"


SHAPES = [Shape(is_chat=c, is_stream=s) for c in (False, True) for s in (False, True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a caller learns from an answer."""

    cached: int
    text: str
    session: str
    """Of a session that began with it."""
    decision: str


def text_in(answer: httpx.Response, shape: Shape) -> str:
    if not shape.is_stream:
        choice = answer.json()["choices"][0]
        return choice["message"]["content"] if shape.is_chat else choice["text"]
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    if shape.is_chat:
        return "".join(choice["delta"].get("content") or "" for choice in choices)
    return "".join(choice["text"] for choice in choices)


class Tenants:
    """A gateway that keeps tenants apart, and who asks it."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway

    def caller(self, tenant: str, user: str = "", **more: Any) -> Caller:
        """A new key; the tenant is made where it is not there."""
        body = {"tenant": tenant, "create_tenant": True, "user": user, **more}
        made = until(lambda: self._granted("/keys", body), "the audit log takes it")
        assert made.status_code == 201, made.text
        return Caller(gateway=self.gateway, key=made.json()["key"])

    def _granted(self, path: str, body: dict[str, Any]) -> httpx.Response | None:
        """None while a disk that is busy does not take what is to be granted."""
        answer = self.gateway.admin(path, "POST", json=body)
        return None if answer.status_code == 503 else answer

    def raised(self, verb: str, subject: str) -> dict[str, Any]:
        """The receipt of a revocation or an invalidation."""
        body = {"subject": subject, "reason": "a test"}
        answer = self.gateway.admin(f"/{verb}", "POST", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def enable(self, subject: str) -> None:
        body = {"subject": subject, "reason": "a test"}
        answer = until(lambda: self._granted("/enable", body), "the audit log takes it")
        assert answer.status_code == 200, answer.text

    def matched(self, told: Told) -> int:
        """How many tokens the decision behind an answer expected to be there."""
        answer = self.gateway.admin(f"/decisions/{told.decision}")
        assert answer.status_code == 200, answer.text
        return answer.json()["matched_tokens"]

    def wait_leased(self, count: int) -> None:
        """Until so many workers hold a lease, so that they reuse."""
        until(lambda: self.leased_count() >= count, f"{count} workers hold a lease")

    def while_leased(self, play: Callable[[int], Result]) -> Result:
        """What `play` returns when no worker was without a lease meanwhile.

        On a loaded machine a beat may come so late that a lease runs out. Until the next, a worker
        rightly neither reuses nor keeps anything: then it is played again, told how often before.
        """
        for attempt in itertools.count():
            self.wait_leased(len(self.gateway.workers()))
            before = self._unleased_count()
            result = play(attempt)
            if self._unleased_count() == before:
                return result
            assert attempt < MAX_ATTEMPTS, "hardly ever all workers hold a lease"
        raise AssertionError("unreachable")

    def _unleased_count(self) -> int:
        """Requests that the workers computed for want of a lease."""
        mark = 'trunkline:reuse_refused_total{reason="lease"} '
        pages = [
            httpx.get(f"{row['url']}/metrics", timeout=WAIT_S).text.splitlines()
            for row in self.gateway.workers().values()
        ]
        lines = [line for page in pages for line in page if line.startswith(mark)]
        assert len(lines) == len(pages)
        return sum(int(float(line.removeprefix(mark))) for line in lines)

    def leased_count(self) -> int:
        rows = self.gateway.workers().values()
        return sum(bool(row["detail"]["isolation"].get("lease")) for row in rows)


def tenants(
    started: Processes, urls: Sequence[str], folder: Path, *flags: str, ready: int | None = None
) -> Tenants:
    """A gateway with a state folder of its own in front of workers."""
    state = ("--state-dir", str(folder / "state"), "--tenant-paths", *SALTED_PATHS)
    return Tenants(started.gateway(urls, *state, *flags, ready=ready))


def copy_secrets(state: Path, to: Path) -> None:
    """Those that all gateways of a fleet have, from the state folder of one to that of another."""
    (to / "secrets").mkdir(parents=True, mode=0o700, exist_ok=True)
    for key in ("root", "pepper", "session"):
        name = Path("secrets", f"{key}.key")
        shutil.copy(state / name, to / name)


def reuses(gateway: Gateway) -> bool:
    """Whether it holds a lease on the registry."""
    return gateway.client.get("/readyz").json()["reuse"] == "on"
