"""What several processes were asked and answered, and the one answer that is made of it.

Must never: answer for a process that was not asked. Read `parent_admin.py` for who asks,
`parent_joins.py` for how rows are joined.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import parse_qs, unquote

from starlette.responses import Response

from trunkline.control.probe import Told
from trunkline.gateway.listener import json_response, problem_response
from trunkline.parent_joins import (
    PROCESS,
    in_turns,
    joined_decision,
    joined_loads,
    joined_tenants,
    joined_worker,
    joined_workers,
)

PROCESS_HEADER = "x-trunkline-process"
_PASSED_BACK = (b"content-type", b"retry-after", b"www-authenticate", b"allow", b"cache-control")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request, as it is passed on."""

    method: str
    target: str
    """Path and query."""
    headers: tuple[tuple[bytes, bytes], ...] = field(default=(), repr=False)
    body: bytes = field(default=b"", repr=False)
    source: str = ""
    is_our_own: bool = False
    """Asked in the operator's name. What is passed on has its sender's credential, or none."""

    @property
    def path(self) -> str:
        return unquote(self.target.partition("?")[0])

    @property
    def query(self) -> dict[str, list[str]]:
        return parse_qs(self.target.partition("?")[2], keep_blank_values=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What one process answered."""

    number: int
    told: Told
    is_cut: bool = False
    """It is there and answered more than is read: `told` says so in its place."""

    @property
    def is_good(self) -> bool:
        return self.told.status < 300

    @property
    def json(self) -> dict[str, Any]:
        return cast("dict[str, Any]", json.loads(self.told.body))


def passed_back(heard: Heard) -> Response:
    headers = {
        name.decode("latin-1"): value.decode("latin-1")
        for name, value in heard.told.headers
        if name in _PASSED_BACK
    }
    headers[PROCESS_HEADER] = str(heard.number)
    return Response(heard.told.body, heard.told.status, headers)


def cut(process: int, max_bytes: int) -> Heard:
    """Whoever asked is told so; it is no reason to take the process for ended."""
    text = f"process {process} answers more than {max_bytes} bytes, too many to pass on"
    problem = problem_response(502, text, "answer_too_long")
    headers = [(b"content-type", problem.headers["content-type"].encode())]
    told = Told(status=problem.status_code, headers=headers, body=bytes(problem.body))
    return Heard(number=process, told=told, is_cut=True)


def label(process: int) -> bytes:
    return f'{PROCESS}="{process}"'.encode()


def away(why: str) -> Response:
    response = problem_response(503, why, "process_away")
    response.headers["retry-after"] = "1"
    return response


def first_good(heard: Sequence[Heard]) -> Response:
    """The first that knows; else what the first says."""
    if not heard:
        return away("the processes that were asked ended; ask again")
    return passed_back(next((each for each in heard if each.is_good), heard[0]))


def known(asked: Asked, heard: Sequence[Heard]) -> Response:
    """What those know that know it: requests of one id may have been at several."""
    good = [each for each in heard if each.is_good]
    if len(good) < 2 or not asked.path.startswith("/decisions/"):
        return first_good(heard)
    return json_response(joined_decision([each.json for each in good]))


def worst(heard: Sequence[Heard]) -> Response:
    """The first refusal, as the change is not everywhere then; else what the first says."""
    if not heard:
        return away("the processes that were asked ended; ask again")
    return passed_back(next((each for each in heard if not each.is_good), heard[0]))


def header_of(heard: Sequence[Heard], name: bytes) -> str:
    found = (value for key, value in heard[0].told.headers if key == name)
    return next(found, b"").decode("latin-1")


def joined(root: str, asked: Asked, heard: Sequence[Heard]) -> Any:  # as JSON has it
    answers = [(each.number, each.json) for each in heard]
    if root == "/workers" and asked.path == "/workers":
        rows = joined_workers(answers)
        return {"workers": rows, "total": len(rows)}
    if root == "/workers":
        return joined_worker(answers)
    if root == "/get_loads":
        loads = joined_loads(answers)
        return {"workers": loads, "total_workers": len(loads)}
    if root == "/tenants":
        return joined_tenants([answer for _, answer in answers])
    name = root[1:]
    rows = [[{**row, PROCESS: number} for row in answer[name]] for number, answer in answers]
    if root == "/revocations":
        found = sorted((row for part in rows for row in part), key=lambda row: -row["rev"])
    else:
        found = list(in_turns(rows))
    limit = (asked.query.get("limit") or ["100"])[0]
    return {**answers[0][1], name: found[: int(limit)]}
