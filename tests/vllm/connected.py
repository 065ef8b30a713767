"""Two engines with our connector, and a gateway's part played by hand: leases, tickets, grants.

By hand, so that a test decides what is pulled, from where, and what goes wrong on the way: a source
can be put behind a `Wire` that damages, holds back or cuts what passes. `test_connector.py` has the
real gateway before the same engines as well.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import secrets
import select
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_engines import BLOCK_TOKENS, MODEL, Engine

from trunkline.core.transfer import KV_KEY_BYTES, Grant, keys_digest, kv_chain

SOURCES = Path(__file__).resolve().parents[2] / "src"
BEAT_S = 0.7
KINDS = ("fleet", "org", "tenant", "user", "key_class", "public", "model", "adapter")
REPORT_S = 20.0


def can_load(python: str) -> str:
    """Why the engines' environment cannot load the connector; empty where it can."""
    words = [python, "-c", "import trunkline.connectors.keeper, trunkline.connectors.agent"]
    environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
    asked = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    return asked.stderr.strip().splitlines()[-1] if asked.returncode else ""


def flags(agent_port: int, key_file: Path, host_gib: float = 0.5) -> tuple[str, ...]:
    """What loads the connector into an engine."""
    config = {
        "kv_connector": "TrunklineConnector",
        "kv_connector_module_path": "trunkline.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "host_gib": host_gib,
            "agent_port": agent_port,
            "transfer_key_file": str(key_file),
            "max_pull_ms": 20_000.0,
        },
    }
    return ("--kv-transfer-config", json.dumps(config), "--num-gpu-blocks-override", "400")


@dataclass(frozen=True, slots=True)
class Tenant:
    """Somebody, and the namespace that is theirs under an epoch."""

    name: str
    epoch: int = 0

    @property
    def salt(self) -> str:
        digest = hashlib.sha256(f"{self.name} {self.epoch}".encode()).hexdigest()
        return digest[:43]

    @property
    def ns(self) -> bytes:
        return hashlib.sha256(f"ns {self.salt}".encode()).digest()[:16]

    @property
    def subjects(self) -> tuple[str, ...]:
        return ("fleet", f"tenant/{self.name}")

    @property
    def epochs(self) -> tuple[int, ...]:
        return (0, self.epoch)


@dataclass(slots=True)
class Told:
    """One answer of an engine."""

    text: str
    cached_tokens: int
    ms: float


@dataclass(slots=True)
class Member:
    """An engine, its agent, and what the agent told with its last lease."""

    engine: Engine
    agent_port: int
    pull: dict[str, Any] = field(default_factory=dict[str, Any])
    ask: str = ""
    ended: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    """By our name of the pull."""

    @property
    def agent(self) -> str:
        return f"http://127.0.0.1:{self.agent_port}"

    def figures(self) -> dict[str, Any]:
        return _get(f"{self.agent}/trunkline/figures")

    def tokens(self, source: str) -> int:
        return self.figures()["tokens"][source]


class Connected:
    """Leases are renewed while it is open."""

    def __init__(self, engines: Sequence[tuple[Engine, int]], transfer_key: bytes) -> None:
        self.members = [Member(engine, port) for engine, port in engines]
        self._key = transfer_key
        self._rev = 1 << 40
        """Above that of any gateway that was here before: a worker never goes back."""
        self._epochs: dict[str, int] = {}
        self._lock = threading.Lock()
        self._ends = threading.Event()
        self._beats = threading.Thread(target=self._beat, daemon=True)

    def open(self) -> None:
        for _ in range(2):  # the first says what is asked, the second grants it
            for member in self.members:
                self._lease(member)
        self._beats.start()

    def close(self) -> None:
        self._ends.set()
        self._beats.join()

    def _beat(self) -> None:
        while not self._ends.wait(BEAT_S):
            for member in self.members:
                with suppress(OSError):
                    self._lease(member)

    def _lease(self, member: Member) -> None:
        with self._lock:
            grant = None
            if member.ask:
                grant = {
                    "ask": member.ask,
                    "rev": self._rev,
                    "ttl_ms": 3_000.0,
                    "epochs": self._epochs,
                }
            told = _post(f"{member.agent}/trunkline/lease", {"grant": grant})
            member.ask, member.pull = told["ask"], told["pull"]
            for one in told["pulled"]:
                member.ended[one["name"]] = json.loads(one["told"])

    def raise_epoch(self, tenant: Tenant) -> tuple[Tenant, list[dict[str, Any]]]:
        """Revoke it: its next epoch, and what each engine's agent acknowledged."""
        with self._lock:
            self._rev += 1
            raised = Tenant(tenant.name, tenant.epoch + 1)
            subject = f"tenant/{tenant.name}"
            self._epochs[subject] = raised.epoch
            body = {"rev": self._rev, "subject": subject, "epoch": raised.epoch, "verb": "revoke"}
            return raised, [
                _post(f"{member.agent}/trunkline/revoke", body) for member in self.members
            ]

    # -- requests ----------------------------------------------------------------------------------

    def ask(
        self,
        member: Member,
        tokens: Sequence[int],
        tenant: Tenant,
        order: dict[str, Any] | None = None,
        *,
        count: int = 8,
    ) -> Told:
        epochs = dict(zip(tenant.subjects, tenant.epochs, strict=True))
        by_kind = {name.partition("/")[0]: epoch for name, epoch in epochs.items()}
        ticket = {
            "ns": tenant.ns.hex(),
            "epochs": [by_kind.get(kind, 0) for kind in KINDS],
            "rev": 0,
            "tenant": tenant.name,
            "subjects": list(tenant.subjects),
        }
        body = {
            "model": MODEL,
            "prompt": list(tokens),
            "max_tokens": count,
            "temperature": 0,
            "cache_salt": tenant.salt,
            "kv_transfer_params": {"trunkline": {"ticket": ticket, **(order or {})}},
        }
        began = time.monotonic()
        told = _post(f"{member.engine.url}/v1/completions", body)
        ms = (time.monotonic() - began) * 1e3
        details = told["usage"]["prompt_tokens_details"] or {}
        return Told(told["choices"][0]["text"], details.get("cached_tokens") or 0, ms)

    def order(
        self,
        lends: Member,
        pulls: Member,
        tokens: Sequence[int],
        tenant: Tenant,
        *,
        port: int | None = None,
        **changes: Any,
    ) -> dict[str, Any]:
        """What a request is sent with to pull all whole blocks of a prompt; `port` of a wire."""
        blocks = (len(tokens) - 1) // BLOCK_TOKENS
        keys = kv_chain(tenant.salt, array("I", tokens), BLOCK_TOKENS)
        there, here = lends.pull, pulls.pull
        said: dict[str, Any] = {
            "source": there["worker"],
            "source_incarnation": there["incarnation"],
            "destination": here["worker"],
            "destination_incarnation": here["incarnation"],
            "ns": tenant.ns,
            "subjects": tenant.subjects,
            "epochs": tenant.epochs,
            "rev": 0,
            "layout": bytes.fromhex(here["layout"]),
            "first_block": 0,
            "block_count": blocks,
            "keys": keys_digest(keys[: blocks * KV_KEY_BYTES]),
            "max_bytes": blocks * there["block_bytes"],
            "deadline_ms": int(time.time() * 1e3) + 20_000,
            "nonce": secrets.token_bytes(16),
        }
        name = secrets.token_hex(8)
        return {
            "name": name,
            "pull": {
                "grant": Grant(**(said | changes)).signed(self._key),
                "host": there["host"],
                "port": port or there["port"],
                "local": "" if port else there["local"],
                "source": there["worker"],
            },
        }

    def ended(self, member: Member, order: dict[str, Any]) -> dict[str, Any]:
        """How a pull ended, as a lease told."""
        ends_at = time.monotonic() + REPORT_S
        while time.monotonic() < ends_at:
            told = member.ended.get(order["name"])
            if told is not None:
                return told
            time.sleep(0.05)
        raise AssertionError(f"nothing is told of {order['name']}: {member.ended}")


class Wire:
    """Between a source and who pulls from it: passes everything on, but for what is done to it."""

    def __init__(
        self,
        port: int,
        *,
        flips_at: int | None = None,
        stops_at: int | None = None,
        cuts_at: int | None = None,
    ) -> None:
        """Of what the source sends: the bit to flip, where nothing goes on, where it ends."""
        self._to = port
        self._flips_at, self._stops_at, self._cuts_at = flips_at, stops_at, cuts_at
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._ends = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._ends.set()
        self._listener.close()

    def _accept(self) -> None:
        while not self._ends.is_set():
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._carry, args=(near,), daemon=True).start()

    def _carry(self, near: socket.socket) -> None:
        passed = 0
        with near, socket.create_connection(("127.0.0.1", self._to)) as far, suppress(OSError):
            while not self._ends.is_set():
                ready, _, _ = select.select([near, far], [], [], 0.1)
                for end in ready:
                    data = bytearray(end.recv(1 << 16))
                    if not data:
                        return
                    if end is near:
                        far.sendall(data)
                        continue
                    at = self._flips_at
                    if at is not None and passed <= at < passed + len(data):
                        data[at - passed] ^= 1
                    passed += len(data)
                    if self._cuts_at is not None and passed > self._cuts_at:
                        return
                    if self._stops_at is not None and passed > self._stops_at:
                        self._ends.wait()
                        return
                    near.sendall(data)


def forget_device(engine: Engine) -> None:
    """The engine's own cache is emptied; what our connector keeps stays."""
    _post(f"{engine.url}/reset_prefix_cache", None)


def prompt(tokens: int, seed: object) -> list[int]:
    """Random ids; one more than whole blocks of them, which is always computed."""
    dice = random.Random(str(seed))
    return [dice.randrange(10, 4_000) for _ in range(tokens + 1)]


def _post(url: str, body: Any) -> Any:
    data = b"" if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            raw = answer.read()
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{url}: {error.code} {error.read()[:500]!r}") from error
    return json.loads(raw) if raw else None


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.loads(answer.read())
