"""`trunkline doctor`: what is wrong with a set-up, and what to do about each of it.

Without `--config` it has a running gateway test its workers and say what else only it can know;
with it, it looks at what can be known before a start. One line a finding. Must never: ask a worker
itself, since the gateway's way to it is what is tested. Read `checkup.py` for what a gateway looks
at, `doctor_here.py` for what is looked at here.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from urllib.parse import quote

from trunkline.admin_client import AdminClient, AdminRefused, Json
from trunkline.tenant_answers import client_of
from trunkline.tenant_commands import add_where
from trunkline.terminal import Terminal, print_json, printable
from trunkline.worker_url import worker_name, worker_url_problem

OK, FAILED = 0, 1
_AWAY = ("joining", "unhealthy", "silent")
"""States in which a worker's last test is of what it was before."""
NOT_ASKED = "workers were not asked; `trunkline doctor` without --config does, by a running gateway"
AT_ONCE = 8
"""Workers asked about at one time."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "worker", nargs="*", metavar="WORKER", help="only these, by name or URL [all]"
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="look at this settings file, and at what it names, before a gateway is started with"
        " it; neither a gateway nor workers are asked: without --config, a running gateway does",
    )
    add_where(parser)


def run(arguments: argparse.Namespace, terminal: Terminal) -> int:
    """1 if anything is wrong, or could not be tested to the end. Raises ConfigError, and what the
    admin client raises.
    """
    if arguments.config:
        from trunkline.doctor_here import ailments_before

        found = [one.as_dict() for one in ailments_before(arguments.config, terminal.environ)]
        return _end([], found, arguments, terminal)
    client = client_of(arguments, terminal)
    names = arguments.worker or [row["worker"] for row in client.get("/workers")["workers"]]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        rows = list(pool.map(partial(_checked, client), names))
    findings = client.get("/doctor")["findings"]
    if arguments.worker:
        wanted = {_named(name) for name in names}
        findings = [one for one in findings if one["subject"] in wanted]
    return _end(rows, findings, arguments, terminal)


def _end(
    rows: Sequence[Json],
    findings: Sequence[Json],
    arguments: argparse.Namespace,
    terminal: Terminal,
) -> int:
    is_well = all(_is_well(row) for row in rows) and not any(map(_is_wrong, findings))
    is_well = is_well and (bool(rows) or bool(arguments.config))
    if arguments.json:
        told: Json = {"ok": is_well, "workers": list(rows), "findings": list(findings)}
        print_json(told | ({"note": NOT_ASKED} if arguments.config else {}), terminal)
    else:
        for line in page(rows, findings, has_gateway=not arguments.config):
            terminal.say(printable(line))
    return OK if is_well else FAILED


def _named(given: str) -> str:
    """A worker by its name, as the gateway has it."""
    url = given if "://" in given else f"http://{given}"
    return given if worker_url_problem(url) else worker_name(url)


def _checked(client: AdminClient, name: str) -> Json:
    """A worker's view after its test; of one that cannot be tested, as far as it goes."""
    path = f"/workers/{quote(name, safe='/:@[]')}"
    try:
        return client.ask("POST", f"{path}/check")
    except AdminRefused as refused:
        if refused.answered == 404:
            raise AdminRefused(_of_unknown(name), 404, refused.answer) from refused
        if refused.answered != 409:
            raise
        return client.get(path)


def _of_unknown(name: str) -> str:
    is_file = name.endswith(".toml") or Path(name).is_file()
    hint = f"; a settings file is looked at with --config {name}" if is_file else ""
    return (
        f"no worker called {name} is known, or not to this key: give one by its name or URL, as"
        f" `trunkline doctor` alone lists them{hint}"
    )


def _is_wrong(finding: Json) -> bool:
    return finding["state"] == "wrong"


def _is_well(row: Json) -> bool:
    check = row["detail"]["check"]
    return row["state"] != "joining" and check["status"] == "ok" and not check["unfinished"]


def page(rows: Sequence[Json], findings: Sequence[Json], *, has_gateway: bool) -> list[str]:
    """What is shown of workers and findings, as `GET /workers` and `GET /doctor` have them."""
    lines: list[str] = []
    if has_gateway and not rows:
        lines.append("no workers: give `trunkline serve` some with --worker-urls, or POST /workers")
    of_rows: dict[str, list[Json]] = {row["worker"]: [] for row in rows}
    for finding in findings:
        of_rows.get(finding["subject"], []).append(finding)
    for row in rows:
        mine = of_rows[row["worker"]]
        lines.append(f"{row['worker']}: {_verdict(row, mine)} (mode {row['mode']}, {row['state']})")
        if _is_fresh(row):  # what it passed before it went away says nothing of it now
            tests = row["detail"]["check"]["findings"]
            lines += [_line(one) for one in tests if one["state"] == "ok"]
        lines += map(_line, mine)
    for finding in findings:
        if finding["subject"] not in of_rows:
            lines += [f"{finding['subject']}:", _line(finding)]
    if not has_gateway:
        lines.append(f"note: {NOT_ASKED}")
    verdicts = [_verdict(row, of_rows[row["worker"]]) for row in rows]
    bad = sum(verdict not in ("ok", "open") for verdict in verdicts)
    tested = f"{len(rows)} tested, {bad} not as they should be; " if rows else ""
    wrong = sum(map(_is_wrong, findings))
    lines.append(f"{tested}{wrong or 'no'} finding{'' if wrong == 1 else 's'} to be mended")
    return lines


def _line(finding: Json) -> str:
    text = f"expected {finding['expected']}, found {finding['found']}"
    remedy = f"; {finding['remedy']}" if finding["remedy"] else ""
    return f"  {finding['state']:<5}  {finding['what']:<10}  {text}{remedy}"


def _is_fresh(row: Json) -> bool:
    """Its last test is of the worker as it is now."""
    check = row["detail"]["check"]
    return row["state"] not in _AWAY and not check["unfinished"]


def _verdict(row: Json, findings: Sequence[Json]) -> str:
    """The worst of all that is known of it."""
    check = row["detail"]["check"]
    if row["state"] == "joining":
        return "not reached"
    states = {check["status"], *(one["state"] for one in findings)}
    if "wrong" in states:
        return "wrong"
    if "unknown" in states or not _is_fresh(row):
        return "not tested"
    return "open" if "open" in states else "ok"
