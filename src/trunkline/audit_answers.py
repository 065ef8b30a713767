"""What the verbs about the audit log ask, and how they show it: pages of records, and a check.

Must never: call a log sound that was not checked, or say that something is signed where no
signature was looked at. Read `tenant_answers.py` for the other verbs.
"""

from __future__ import annotations

import argparse

from trunkline.admin_client import AdminClient, Json
from trunkline.errors import ConfigError
from trunkline.leaf import read_bounded
from trunkline.terminal import Terminal, print_json, print_table, time_text, wall_ms_of

OK, FAILED = 0, 1
MAX_CHECKPOINTS_BYTES = 64 << 20


def show(arguments: argparse.Namespace, client: AdminClient, terminal: Terminal) -> int:
    query: Json = {
        "limit": arguments.limit,
        "after": arguments.after,
        "kind": arguments.kind.upper(),
        "from_ms": wall_ms_of(arguments.since, "--since"),
        "to_ms": wall_ms_of(arguments.until, "--until"),
        "subject": arguments.subject,
        "wanted": "yes" if arguments.all else "no",
    }
    page = client.get("/audit", query)
    if arguments.json:
        return print_json(page, terminal)
    rows = [
        (
            *(str(r["seq"]), time_text(r["ts_wall"]), r["kind"], r["action"], _subject(r)),
            *(r["actor"] or "-", str(r["rev"] or "-"), r["result"] or "-", r["reason"] or "-"),
        )
        for r in page["records"]
    ]
    head = ("SEQ", "TIME", "KIND", "ACTION", "SUBJECT", "ACTOR", "REV", "RESULT", "REASON")
    print_table(head, rows, terminal)
    if page["next_after"] is not None:
        terminal.note(f"more follow: --after {page['next_after']}")
    elif arguments.after is None and page["scanned_from"] > 1:
        terminal.note(f"looked at from record {page['scanned_from']} on; older ones: --after 0")
    return OK


def _subject(record: Json) -> str:
    """Whom a record is about; the beginning of its pseudonym where nobody knows any more."""
    pseudonym = str(record.get("scope_path_hmac") or "")
    return record.get("subject") or (f"({pseudonym[:8]}...)" if pseudonym else "-")


def verify(arguments: argparse.Namespace, client: AdminClient, terminal: Terminal) -> int:
    if arguments.public_key:
        raise ConfigError("--public-key goes with --dir: a gateway checks by the key it signs with")
    query: Json = {}
    if arguments.from_checkpoint:
        query["checkpoint"] = _newest_checkpoint(arguments.from_checkpoint)
    return print_verification(arguments, client.get("/audit/verify", query), terminal)


def print_verification(arguments: argparse.Namespace, found: Json, terminal: Terminal) -> int:
    """The outcome of a check; exit code 1 where the log is not what was written, or where that
    cannot be said of its end.
    """
    code = OK if found["sound"] else FAILED
    if arguments.json:
        print_json(found, terminal)
        return code
    places: list[Json] = found["sinks"]
    if found["sound"]:
        others = [f"{sink['sink']} is {sink['state']}" for sink in places if not _is_sound(sink)]
        where = f" in {len(places) - len(others)} of {len(places)} places ({', '.join(others)})"
        terminal.say(
            f"sound{where if others else ''}: records {found['first_seq']} to {found['last_seq']},"
            f" held against {_checkpoints(found)}\n  the last one is {found['last_hash']}"
        )
    elif found.get("newer_checkpoints"):
        _say_short(found, terminal)
        return code
    else:
        terminal.say(f"NOT SOUND{_faulty(places)} at record {found['fault_seq']}: {found['fault']}")
    for sink in places:
        why = f" ({sink['why']})" if sink["why"] else ""
        terminal.say(f"  {sink['sink']}: {sink['state']}{why}")
    if any(map(_is_sound, places)) and any(sink["state"] == "faulty" for sink in places):
        terminal.note("move the folder that is faulty away: it is filled anew from the sound one")
    return code


def _say_short(found: Json, terminal: Terminal) -> None:
    """A log that ends before a checkpoint: a copy that was taken before it, or one that was cut."""
    count = found["newer_checkpoints"]
    are = "checkpoint is" if count == 1 else "checkpoints are"
    terminal.say(
        f"sound up to its end, record {found['last_seq']}, held against {_checkpoints(found)}\n"
        f"  {count} {are} newer than this copy of the log: copy the checkpoints first, then the"
        f" folder\n  if they were copied in that order, the log was cut: {found['fault']}"
    )


def _checkpoints(found: Json) -> str:
    count = found["checkpoints"]
    noun = "checkpoint" if count == 1 else "checkpoints"
    if found.get("signatures_checked", True):
        return f"{count} signed {noun}"
    return f"{count} {noun}, whose signatures nobody checked"


def _faulty(places: list[Json]) -> str:
    if len(places) == 1:
        return ""
    count = sum(sink["state"] == "faulty" for sink in places)
    return f" in {count} of {len(places)} places,"


def _is_sound(sink: Json) -> bool:
    return sink["state"] == "sound"


def _newest_checkpoint(path: str) -> str:
    """The last whole line of a file of checkpoints."""
    raw, _ = read_bounded(path, MAX_CHECKPOINTS_BYTES, "--from-checkpoint: file")
    lines = [line for line in raw.split(b"\n")[:-1] if line.strip()]
    if not lines or not lines[-1].isascii() or len(lines[-1]) > 4_096:
        raise ConfigError(f"{path} holds no checkpoint")
    return lines[-1].decode("ascii")
