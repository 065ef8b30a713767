"""What is made of the answers of several processes: rows and workers, one answer of many.

Pure. Must never: leave out what one of them sees, where they differ. Read `parent_admin.py` for who
asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

PROCESS = "process"


def in_turns(parts: Sequence[Sequence[Any]]) -> Iterable[Any]:
    """The first of each, the second of each, and so on."""
    for place in range(max(map(len, parts), default=0)):
        yield from (part[place] for part in parts if place < len(part))


def joined_workers(answers: Sequence[tuple[int, dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row a worker, in the order in which they are met."""
    seen: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for number, answer in answers:
        for row in answer["workers"]:
            seen.setdefault(row["worker"], []).append((number, row))
    return [joined_worker(rows) for rows in seen.values()]


def joined_worker(rows: Sequence[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
    """What the processes see of one worker: the first that may not choose it, else the first; with
    the requests of all, and what each sees in `detail.processes`.
    """
    shown = next((row for _, row in rows if row["state"] != "ready"), rows[0][1])
    seen = [
        {PROCESS: number}
        | {name: row[name] for name in ("state", "mode", "reason", "breaker", "requests_active")}
        for number, row in rows
    ]
    reuse = [row["detail"].get("reuse", {}) for _, row in rows]
    reused = {name: sum(one.get(name, 0) for one in reuse) for name in reuse[0]}
    return shown | {
        "requests_active": sum(row["requests_active"] for _, row in rows),
        "queue_ms": max(row["queue_ms"] for _, row in rows),
        "detail": shown["detail"] | {"processes": seen} | ({"reuse": reused} if reused else {}),
    }


def joined_loads(answers: Sequence[tuple[int, dict[str, Any]]]) -> list[dict[str, Any]]:
    """What all processes have at a worker, added up."""
    seen: dict[str, dict[str, Any]] = {}
    for _, answer in answers:
        for row in answer["workers"]:
            known = seen.setdefault(row["worker"], {**row, "load": 0, "queue_ms": 0.0})
            known["load"] += row["load"]
            known["queue_ms"] = max(known["queue_ms"], row["queue_ms"])
    return list(seen.values())


def joined_tenants(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The first one's list, with what all count of each tenant added up."""
    first = answers[0]
    seen: dict[str, list[dict[str, int] | None]] = {}
    for row in chain.from_iterable(answer["tenants"] for answer in answers):
        seen.setdefault(row["id"], []).append(row["usage"])
    rows = [{**row, "usage": _added_up(seen[row["id"]])} for row in first["tenants"]]
    others = _added_up([answer["others"] for answer in answers])
    return {**first, "tenants": rows, "others": others}


def _added_up(counts: Sequence[dict[str, int] | None]) -> dict[str, int] | None:
    """None where one of them has it among the others, or nobody may see it."""
    known = [count for count in counts if count is not None]
    if len(known) < len(counts):
        return None
    return {name: sum(count[name] for count in known) for name in known[0]}


def joined_decision(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What several processes have of one id: requests of their own each, the latest first."""
    found = [one for answer in answers for one in (answer, *answer.get("same_id", []))]
    rows = [{name: row[name] for name in row if name != "same_id"} for row in found]
    latest, *others = sorted(rows, key=lambda row: row["at"], reverse=True)
    return {**latest, "same_id": others}
