"""Tenants from end to end, over real processes: what may be met again, and what a worker is told.

The path matrix: every way by which cache is met again x every endpoint x every scope, with what
lies outside of the scope beside it. Remote pulls, CPU and disk tiers and replicas are rows to come
with those paths. `test_tenants_revoked.py` has revocation under load.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fleet import Processes, engine_script, free_port, processes, text_of, until, url_of
from scripted import json_answer, wire, worker
from tenants import SHAPES, Caller, Shape, Tenants, Told, tenants

from trunkline.gateway.fields import FORBIDDEN

TINY = ("--profile", "tiny")
PROMPT_WORDS = 40


@pytest.fixture(scope="module")
def started() -> Iterator[Processes]:
    with processes() as made:
        yield made


@dataclass(frozen=True, slots=True, kw_only=True)
class People:
    """Two users of one tenant, and one of another."""

    ann: Caller
    bob: Caller
    eve: Caller


def people(held: Tenants) -> People:
    ann, bob = held.caller("acme", "ann"), held.caller("acme", "bob")
    return People(ann=ann, bob=bob, eve=held.caller("globex", "eve"))


@dataclass(slots=True, kw_only=True)
class Cell:
    """One scope on one endpoint: a prompt that only this cell says."""

    scope: str
    shape: Shape
    prompt: str
    people: People
    session: str = ""

    def again(self, attempt: int) -> Cell:
        """The same of a prompt that nobody said before; itself at the first attempt."""
        prompt = f"attempt {attempt} {self.prompt}"
        return replace(self, prompt=prompt, session="") if attempt else self

    def own(self) -> Told:
        """Its owner asks, in its session where it has one."""
        told = self.people.ann.ask(self.shape, self.prompt, self._wish, self.session)
        self.session = self.session or told.session
        return told

    def inside(self) -> Told:
        """Who may meet what the owner left, and is another where the scope has room for one."""
        who = self.people.bob if self.scope == "tenant" else self.people.ann
        return who.ask(self.shape, self.prompt, self._wish, self.session)

    def outside(self) -> list[Told]:
        """Everybody who may not: each asks once a cell, since that leaves something, too."""
        ann, bob, eve = self.people.ann, self.people.bob, self.people.eve
        asks = [(eve, ""), (eve, "user"), (eve, "session"), (ann, "none")]
        asks += {
            "tenant": [(bob, "user")],
            "user": [(bob, "user"), (bob, ""), (ann, "session")],
            "session": [(ann, "session"), (ann, "user"), (bob, "session"), (bob, "")],
        }[self.scope]
        return [who.ask(self.shape, self.prompt, wish) for who, wish in asks]

    @property
    def _wish(self) -> str:
        return "" if self.scope == "tenant" else self.scope

    def __str__(self) -> str:
        return f"{self.scope}, {self.shape}"


def cells(path: str, who: People) -> list[Cell]:
    made: list[Cell] = []
    for scope in ("tenant", "user", "session"):
        for shape in SHAPES:
            prompt = text_of(PROMPT_WORDS, f"{path} {scope} {shape}")
            made.append(Cell(scope=scope, shape=shape, prompt=prompt, people=who))
    return made


def check(held: Tenants, whole: Cell, *, is_new: bool = True) -> None:
    """What its owner leaves is met inside the scope, and by nobody outside."""

    def play(attempt: int) -> Told:
        cell = whole.again(attempt)
        own, inside, outside = cell.own(), cell.inside(), cell.outside()
        if is_new or attempt:
            assert own.cached == 0, f"{cell}: nobody asked before"
        for told in outside:
            assert told.cached == 0, f"{cell}: a hit across scopes"
            assert held.matched(told) == 0, f"{cell}: the directory expected a foreign prefix"
        assert {told.text for told in (own, inside, *outside)} == {own.text}, f"{cell}: the answer"
        return inside

    inside = held.while_leased(play)
    assert inside.cached > 0, f"{whole}: no hit in scope"
    assert held.matched(inside) > 0, f"{whole}: the directory did not expect it"


def test_path_matrix_a_local_hit(started: Processes, tmp_path: Path) -> None:
    simulated = started.workers(2, *TINY)
    held = tenants(started, [process.url for process in simulated], tmp_path, *TINY)
    held.wait_leased(2)
    for cell in cells("local", people(held)):
        check(held, cell)


def test_path_matrix_a_speculative_entry(started: Processes, tmp_path: Path) -> None:
    """Of these workers the directory knows nothing but what it decided itself."""
    simulated = started.workers(2, *TINY, "--feed", "approximate")
    held = tenants(started, [process.url for process in simulated], tmp_path, *TINY)
    held.wait_leased(2)
    for cell in cells("speculative", people(held)):
        check(held, cell)
    assert {row["mode"] for row in held.gateway.workers().values()} == {"approximate"}


def test_path_matrix_resumed_after_a_worker_died(started: Processes, tmp_path: Path) -> None:
    port = str(free_port())
    simulated = started.worker(*TINY, "--port", port)
    held = tenants(started, [simulated.url], tmp_path, *TINY)
    held.wait_leased(1)
    who = people(held)
    all_cells = cells("resumed", who)
    for cell in all_cells:
        held.while_leased(lambda _, cell=cell: cell.own())
    simulated.kill()
    started.worker(*TINY, "--port", port)
    _wait_reuse(held, who.ann)
    for cell in all_cells:
        check(held, cell)  # its cache died with it


def test_path_matrix_resumed_after_the_gateway_died(started: Processes, tmp_path: Path) -> None:
    """Keys, epochs and namespaces are those of before; so is what the worker holds."""
    simulated = started.worker(*TINY)
    before = tenants(started, [simulated.url], tmp_path, *TINY)
    before.wait_leased(1)
    all_cells = cells("gateway", people(before))
    firsts = [before.while_leased(lambda _, cell=cell: cell.own()) for cell in all_cells]
    before.gateway.process.kill()
    held = tenants(started, [simulated.url], tmp_path, *TINY)
    for cell in all_cells:
        cell.people = People(**{
            name: Caller(gateway=held.gateway, key=getattr(cell.people, name).key)
            for name in ("ann", "bob", "eve")
        })  # fmt: skip
    _wait_reuse(held, all_cells[0].people.ann)
    for cell, first in zip(all_cells, firsts, strict=True):
        met = held.while_leased(lambda _, cell=cell: cell.own())
        assert met.cached > 0, f"{cell}: the worker lives on"
        assert met.text == first.text, f"{cell}: the answer"
        check(held, cell, is_new=False)


def _wait_reuse(held: Tenants, caller: Caller) -> None:
    """Until the worker is there (again), holds a lease and reuses."""
    count = iter(range(1_000))

    def reuses() -> bool:
        prompt = text_of(PROMPT_WORDS, f"wait {next(count)}")
        if caller.answer(prompt).status != 200:
            return False
        answer = caller.answer(prompt)
        return answer.status == 200 and answer.cached > 0

    held.gateway.wait_ready(1)
    until(reuses, "the worker reuses")


def test_an_answer_names_no_worker_and_counts_nobodys_requests(
    started: Processes, tmp_path: Path
) -> None:
    """Its id is the request's own, whichever worker answered and whatever it answered before."""
    simulated = started.workers(2, *TINY)
    held = tenants(started, [process.url for process in simulated], tmp_path, *TINY)
    caller = held.caller("acme", "ann")
    for number in range(8):
        headers = {**caller.headers(), "x-request-id": f"mine-{number}"}
        answer = held.gateway.chat(text_of(40, f"id {number}"), headers)
        assert answer.json["id"] == f"chatcmpl-{answer.response.headers['x-request-id']}"
        assert answer.json["id"].startswith(f"chatcmpl-mine-{number}-")
        words = f"{answer.response.headers} {answer.response.text}"
        for process in simulated:
            assert process.name not in words
            assert str(process.port) not in words
    unnamed = [caller.answer("hi").json["id"] for _ in range(2)]
    assert unnamed[0] != unnamed[1]


# -- words that a client may not say ---------------------------------------------------------------

CANARY = "canary-of-a-client"
HEADERS = [
    "x-tenant-id", "x-org-id", "x-smg-target-worker", "x-smg-routing-key", "x-prefiller-host-port",
    "x-kv-cache-source-host-port", "x-upstream-host", "x-data-parallel-rank", "cache-salt",
    "x-cache-salt", "x-trunkline-ticket", "x-trunkline-salt", "x-forwarded-host", "x-api-base",
    "x-trunkline-session", "x-trunkline-decision", "x-user-config",
]  # fmt: skip
SPELLINGS: dict[str, Callable[[str], str]] = {
    "as it is": str,
    "upper case": str.upper,
    "capitals": str.title,
    "escaped": lambda name: name.replace("_", "\\u005f", 1).replace("a", "\\u0061", 1),
    "percent-encoded": lambda name: name.replace("_", "%5F", 1).replace("a", "%61", 1),
}
PATHS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"),
    "/v1/messages",
)


def plain(path: str) -> str:
    """The inside of a sound body."""
    if path in ("/v1/chat/completions", "/v1/messages"):
        return '"messages":[{"role":"user","content":"hi"}],"max_tokens":2'
    return '"prompt":"hi","max_tokens":2' if path == "/v1/completions" else '"input":"hi"'


def bodies(path: str, name: str) -> dict[str, str]:
    """One forbidden field, in all the places where a body has room for one."""
    said, inside = f'"{name}":"{CANARY}"', plain(path)
    made = {
        "at the top": f"{{{inside},{said}}}",
        "first": f"{{{said},{inside}}}",
        "twice": f"{{{said},{inside},{said}}}",
        "in an object": f'{{{inside},"metadata":{{{said}}}}}',
        "deep": f'{{{inside},"metadata":{{"a":[[{{"b":{{{said}}}}}]]}}}}',
        "in what is dropped": f'{{{inside},"extra_body":{{{said}}}}}',
    }
    if path == "/v1/chat/completions":
        message = f'{{"role":"user","content":"hi",{said}}}'
        part = f'{{"type":"text","text":"hi",{said}}}'
        made |= {
            "in a message": f'{{"messages":[{message}]}}',
            "in a part": f'{{"messages":[{{"role":"user","content":[{part}]}}]}}',
        }
    return made


class Echo:
    """A worker that keeps every byte that arrives."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, str], bytes]] = []

    async def answer(self, path: str, headers: dict[str, str], body: bytes) -> bytes:
        if not path.startswith("/v1/"):
            return json_answer(b"{}", "404 Not Found")  # it has no agent
        self.seen.append((path, headers, body))
        return json_answer(b'{"usage":{}}')

    def take(self) -> bytes:
        """What arrived since the last time, as one text."""
        told = [f"{path}{headers}".encode() + body for path, headers, body in self.seen]
        self.seen.clear()
        return b"".join(told)


def refused_or_stripped(reply: httpx.Response, arrived: bytes) -> str:
    """What is wrong with how it was treated; empty for nothing."""
    if reply.status_code in (400, 403):  # 403: a session that is not theirs
        return "" if not arrived else "refused, and it arrived"
    if reply.status_code != 200:
        return f"status {reply.status_code}"
    return "the worker saw it" if CANARY.encode() in arrived else ""


def test_no_forbidden_word_of_a_client_reaches_a_worker_in_any_spelling(
    started: Processes, tmp_path: Path
) -> None:
    """Top-level, nested, given twice, in other cases, escaped and percent-encoded."""

    @wire
    async def scenario() -> None:
        echo = Echo()
        async with worker(engine_script(echo.answer)) as w:
            held = await asyncio.to_thread(tenants, started, [url_of(w)], tmp_path)
            caller = await asyncio.to_thread(held.caller, "acme", "ann")
            async with httpx.AsyncClient(base_url=held.gateway.url) as client:
                wrong = await _try_fields(client, caller, echo)
                wrong += await _try_queries(client, caller, echo)
                wrong += await _try_headers(client, caller, echo)
        assert wrong == [], f"{len(wrong)} came through"

    scenario()


async def _try_fields(client: httpx.AsyncClient, caller: Caller, echo: Echo) -> list[str]:
    wrong: list[str] = []
    headers = {**caller.headers(), "content-type": "application/json"}
    for path in PATHS:
        for name in sorted(FORBIDDEN):
            for spelling, spelled in SPELLINGS.items():
                for place, body in bodies(path, spelled(name)).items():
                    reply = await client.post(path, content=body, headers=headers)
                    why = refused_or_stripped(reply, echo.take())
                    if why:
                        wrong.append(f"{path}: {name}, {spelling}, {place}: {why}")
    return wrong


async def _try_queries(client: httpx.AsyncClient, caller: Caller, echo: Echo) -> list[str]:
    wrong: list[str] = []
    for path in PATHS:
        body = json.loads(f"{{{plain(path)}}}")
        for name in sorted(FORBIDDEN):
            for spelling in ("as it is", "upper case", "percent-encoded"):
                target = f"{path}?a=b&{SPELLINGS[spelling](name)}={CANARY}"
                reply = await client.post(target, json=body, headers=caller.headers())
                why = refused_or_stripped(reply, echo.take())
                if why:
                    wrong.append(f"{target}: {why}")
    return wrong


async def _try_headers(client: httpx.AsyncClient, caller: Caller, echo: Echo) -> list[str]:
    wrong: list[str] = []
    own = list(caller.headers().items())
    for path in PATHS:
        body = json.loads(f"{{{plain(path)}}}")
        for name in HEADERS:
            for given in ([(name, CANARY)], [(name.upper(), CANARY)], [(name, CANARY)] * 2):
                reply = await client.post(path, json=body, headers=[*own, *given])
                why = refused_or_stripped(reply, echo.take())
                if why:
                    wrong.append(f"{path}: {given}: {why}")
    return wrong


def test_every_body_that_reaches_a_worker_bears_the_salt_of_its_caller(
    started: Processes, tmp_path: Path
) -> None:
    """One choke point for all endpoints: two callers never share a salt on any of them, and one
    caller has one.
    """

    @wire
    async def scenario() -> None:
        echo = Echo()
        salts: dict[str, set[str]] = {}
        async with worker(engine_script(echo.answer)) as w:
            held = await asyncio.to_thread(tenants, started, [url_of(w)], tmp_path)
            for tenant in ("acme", "globex"):
                caller = await asyncio.to_thread(held.caller, tenant, "ann")
                async with httpx.AsyncClient(base_url=held.gateway.url) as client:
                    for path in PATHS:
                        body: dict[str, Any] = json.loads(f"{{{plain(path)}}}")
                        reply = await client.post(path, json=body, headers=caller.headers())
                        assert reply.status_code == 200
                seen = {json.loads(body)["cache_salt"] for _, _, body in echo.seen}
                assert all("authorization" not in headers for _, headers, _ in echo.seen)
                assert len(echo.seen) == len(PATHS)
                salts[tenant] = seen
                echo.take()
        assert [len(found) for found in salts.values()] == [1, 1]
        assert salts["acme"] != salts["globex"]

    scenario()
