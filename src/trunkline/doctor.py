"""`trunkline doctor`: has a running gateway test its workers, and says what is wrong with each.

One line a finding: what was expected, what was found, what to do. Must never: ask a worker itself,
since the gateway's way to it is what is tested. Read `gateway/examiner.py` for the tests.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from urllib.parse import quote

from trunkline.admin_client import AdminClient, AdminRefused, Json
from trunkline.tenant_answers import client_of
from trunkline.tenant_commands import add_where
from trunkline.terminal import Terminal, print_json, printable

OK, FAILED = 0, 1
AT_ONCE = 8
"""Workers asked about at one time."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "worker", nargs="*", metavar="WORKER", help="only these, by name or URL [all]"
    )
    add_where(parser)


def run(arguments: argparse.Namespace, terminal: Terminal) -> int:
    """Test them; 1 if anything is wrong, or could not be tested to the end."""
    client = client_of(arguments, terminal)
    names = arguments.worker or [row["worker"] for row in client.get("/workers")["workers"]]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        rows = list(pool.map(partial(_checked, client), names))
    is_well = bool(rows) and all(_is_well(row) for row in rows)
    if arguments.json:
        print_json({"ok": is_well, "workers": rows}, terminal)
    else:
        _print(rows, terminal)
    return OK if is_well else FAILED


def _checked(client: AdminClient, name: str) -> Json:
    """A worker's view after its test; of one that cannot be tested, as far as it goes."""
    path = f"/workers/{quote(name, safe='/:@[]')}"
    try:
        return client.ask("POST", f"{path}/check")
    except AdminRefused as refused:
        if refused.answered != 409:
            raise
        return client.get(path)


def _is_well(row: Json) -> bool:
    check = row["detail"]["check"]
    return row["state"] != "joining" and check["status"] == "ok" and not check["unfinished"]


def _print(rows: list[Json], terminal: Terminal) -> None:
    def say(text: str) -> None:
        terminal.say(printable(text))

    if not rows:
        say("no workers: give `trunkline serve` some with --worker-urls, or POST /workers")
    for row in rows:
        check = row["detail"]["check"]
        say(f"{row['worker']}: {_verdict(row)} (mode {row['mode']}, {row['state']})")
        if row["state"] == "joining":
            say(f"  {'wrong':<5}  {'reach':<10}  {row['reason']}")
        if check["unfinished"]:
            text = f"not to its end: {check['unfinished']}; it is repeated later"
            say(f"  {'open':<5}  {'test':<10}  {text}")
        for finding in check["findings"]:
            text = f"expected {finding['expected']}, found {finding['found']}"
            remedy = f"; {finding['remedy']}" if finding["remedy"] else ""
            say(f"  {finding['state']:<5}  {finding['what']:<10}  {text}{remedy}")
    bad = sum(not _is_well(row) for row in rows)
    if rows:
        say(f"{len(rows)} tested, {bad} not as they should be")


def _verdict(row: Json) -> str:
    check = row["detail"]["check"]
    if row["state"] == "joining":
        return "not reached"
    return "not tested" if check["status"] == "unknown" else check["status"]
