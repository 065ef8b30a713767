"""Two workers with host memory that pull from each other, and the test as their gateway."""

from __future__ import annotations

import itertools
import json
import secrets
import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from fleet import Process, Processes, processes, until
from single import WAIT_S, cached, ids, right

from trunkline.core.transfer import Grant, keys_digest, kv_chain

BLOCK = 16
BLOCK_BYTES = 1_024
NS = "5" * 32
SALT = "s" * 43
SUBJECTS = ["fleet", "org/o", "tenant/t", "model/m"]
KEY = bytes(range(32))
BLOCKS = 8
LONG = BLOCKS * BLOCK
PROMPT = list(range(1_000, 1_000 + LONG + 6))
Json = dict[str, Any]

FLAGS = ("--profile", "tiny", "--blocks", "64", "--host-blocks", "512")


@dataclass
class Member:
    """One worker: its leases are kept, and it is asked as a gateway asks."""

    process: Process
    fleet: Pair
    http: httpx.Client = field(init=False)
    told: Json = field(init=False)
    """Its newest answer to a lease."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.http = httpx.Client(base_url=self.process.url, timeout=WAIT_S)
        self.told = self._lease(None)
        self.renew()

    def renew(self, *, is_fresh: bool = False) -> None:
        """A lease from its last ask on; from now on where that is to be fresh."""
        with self.lock:
            if is_fresh:
                self.told = self._lease(None)
            rev, epochs = self.fleet.rev, self.fleet.epochs
            grant = {"ask": self.told["ask"], "rev": rev, "ttl_ms": 3_000, "epochs": epochs}
            self.told = self._lease(grant)

    def _lease(self, grant: Json | None) -> Json:
        answer = self.http.post("/trunkline/lease", json={"grant": grant})
        assert answer.status_code == 200, answer.text
        return answer.json()

    @property
    def pull(self) -> Json:
        return self.told["pull"]

    def ask(
        self, prompt: list[int] = PROMPT, headers: dict[str, str] | None = None, **more: Any
    ) -> httpx.Response:
        """The answer is right, whatever happens. A late beat of ours does not count."""
        for member in list(self.fleet.members):
            member.renew(is_fresh=True)
        body = {"prompt": prompt, "max_tokens": 8, "return_token_ids": True, "cache_salt": SALT}
        headers = self.fleet.ticket() | (headers or {})
        answer = self.http.post("/v1/completions", json=body | more, headers=headers)
        assert answer.status_code == 200, answer.text
        if not more.get("stream"):
            assert ids(answer.json()) == right(prompt)
        return answer

    def cached(self, prompt: list[int] = PROMPT, headers: dict[str, str] | None = None) -> int:
        return cached(self.ask(prompt, headers).json())

    def revoke(self, subject: str, verb: str = "revoke") -> Json:
        body = {
            "rev": self.fleet.rev,
            "subject": subject,
            "epoch": self.fleet.epochs[subject],
            "verb": verb,
        }
        answer = self.http.post("/trunkline/revoke", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def metric(self, name: str, **labels: str) -> float:
        total = 0.0
        for line in self.http.get("/metrics").text.splitlines():
            series, _, value = line.rpartition(" ")
            family, _, rest = series.partition("{")
            if family == name and all(f'{k}="{v}"' in rest for k, v in labels.items()):
                total += float(value)
        return total

    def crowd_out(self) -> None:
        """What was on the device is not there any more."""
        for first in (100, 1_500):
            prompt = [first + index % 900 for index in range(64 * BLOCK - 20)]
            body = {"prompt": prompt, "max_tokens": 8}
            assert self.http.post("/v1/completions", json=body).status_code == 200


@dataclass
class Pair:
    """Their epochs, and who may pull what."""

    rev: int = 1
    epochs: dict[str, int] = field(default_factory=dict[str, int])
    members: list[Member] = field(default_factory=list[Member])
    started: Processes = field(default_factory=Processes)
    flags: tuple[str, ...] = ()

    def join(self, *flags: str) -> Member:
        member = Member(self.started.worker(*self.flags, *flags), self)
        self.members.append(member)
        return member

    def restart(self, member: Member, *flags: str) -> Member:
        """The next life of a worker, at the same address."""
        self.members.remove(member)
        member.process.kill()
        return self.join("--port", str(member.process.port), *flags)

    def raise_epoch(self, subject: str) -> None:
        self.rev += 1
        self.epochs[subject] = self.epochs.get(subject, 0) + 1

    def ticket(self, **changes: Any) -> dict[str, str]:
        kinds = ("fleet", "org", "tenant", "user", "key_class", "public", "model", "adapter")
        by_kind = {subject.partition("/")[0]: subject for subject in SUBJECTS}
        epochs = [self.epochs.get(by_kind.get(kind, ""), 0) for kind in kinds]
        made: Json = {
            "ns": NS,
            "epochs": epochs,
            "rev": self.rev,
            "tenant": "a" * 32,
            "subjects": SUBJECTS,
        }
        return {"x-trunkline-ticket": json.dumps(made | changes)}

    def grant(
        self,
        source: Member,
        destination: Member,
        /,
        *,
        prompt: list[int] = PROMPT,
        blocks: tuple[int, int] = (0, 8),
        key: bytes = KEY,
        salt: str = SALT,
        **changes: Any,
    ) -> str:
        first, last = blocks
        packed = kv_chain(salt, array("I", prompt), BLOCK)[32 * first : 32 * last]
        made: Json = {
            "source": source.pull["worker"],
            "source_incarnation": source.pull["incarnation"],
            "destination": destination.pull["worker"],
            "destination_incarnation": destination.pull["incarnation"],
            "ns": bytes.fromhex(NS),
            "subjects": tuple(SUBJECTS),
            "epochs": tuple(self.epochs.get(subject, 0) for subject in SUBJECTS),
            "rev": self.rev,
            "layout": bytes.fromhex(source.pull["layout"]),
            "first_block": first,
            "block_count": last - first,
            "keys": keys_digest(packed),
            "max_bytes": (last - first) * source.pull["block_bytes"],
            "deadline_ms": int(time.time() * 1_000) + 30_000,
            "nonce": secrets.token_bytes(16),
        }
        return Grant(**made | changes).signed(key)

    def order(self, source: Member, grant: str, /, **changes: Any) -> dict[str, str]:
        """The header that asks for a pull."""
        made = {
            "grant": grant,
            "host": source.pull["host"],
            "port": source.pull["port"],
            "local": source.pull["local"],
            "source": source.pull["worker"],
        }
        return {"x-trunkline-pull": json.dumps(made | changes)}


def pulled(answer: httpx.Response) -> Json:
    return json.loads(answer.headers["x-trunkline-pulled"])


_numbers = itertools.count()


def new_prompt() -> list[int]:
    """Nobody has seen it before."""
    first = 1_000 + next(_numbers) * 7
    return [first + index * 3 % 1_000 for index in range(LONG + 6)]


def ready(source: Member, prompt: list[int]) -> None:
    """The source has the prompt's blocks in host memory, whatever its lease did meanwhile."""
    until(lambda: source.cached(prompt) == LONG, "the source has the prompt")


def staged(member: Member) -> float:
    return member.metric("trunkline:staged_bytes")


def host_bytes(member: Member) -> float:
    return member.metric("trunkline:tier_bytes", tier="host")


def raw(member: Member, prompt: list[int], headers: Any) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 1, "cache_salt": SALT}
    return member.http.post("/v1/completions", json=body, headers=headers)


@contextmanager
def pair(
    folder: Path, *more: str, source: tuple[str, ...] = (), has_key: bool = True
) -> Iterator[tuple[Pair, Member, Member]]:
    """A source and a destination. Their leases are renewed by a thread, as a gateway does."""
    key_file = folder / "transfer.key"
    key_file.write_text(KEY.hex())
    key_file.chmod(0o600)
    keyed = ("--transfer-key-file", str(key_file)) if has_key else ()
    flags = (*FLAGS, *keyed, "--pull-patience-ms", "20000", *more)
    with processes() as started, _kept_alive(Pair(started=started, flags=flags)) as fleet:
        yield fleet, fleet.join(*source), fleet.join()


@contextmanager
def _kept_alive(fleet: Pair) -> Iterator[Pair]:
    over = threading.Event()

    def beat() -> None:
        while not over.wait(0.5):
            for member in list(fleet.members):
                with suppress(httpx.HTTPError):  # one is stopped or killed on purpose
                    member.renew()

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield fleet
    finally:
        over.set()
        thread.join()
        for member in fleet.members:
            member.http.close()
