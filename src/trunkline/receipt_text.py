"""A receipt in words: one line for what was done, all of it on demand.

What is weaker than it looks is said without being asked: engines that no agent watches are fenced
by the salt alone, and keep old bytes. Must never: sound more complete than the receipt is. Read
`tenant_answers.py` for who prints it.
"""

from __future__ import annotations

import argparse
from typing import Protocol

from trunkline.admin_client import AdminClient, AdminRefused, Json
from trunkline.terminal import OK, Terminal, print_json

_PAST = {"revoke": "revoked", "invalidate": "invalidated"}
_FENCES = {
    "worker": "worker (each block is checked at its use)",
    "gateway": "gateway (nobody sends the old salt again)",
}
_ERASES = {
    "namespace": "namespace (just these blocks)",
    "whole": "whole (only a worker's whole cache at once)",
    "restart": "restart (bytes stay until a worker is drained and restarted)",
}


def print_receipt(
    arguments: argparse.Namespace, receipt: Json, client: AdminClient, terminal: Terminal
) -> int:
    """As the command asked for it."""
    if receipt["audit"] != "recorded":
        terminal.note(
            "trunkline: it is in force, but the audit log has no record of the outcome yet; it is"
            " written when a sink is back"
        )
    if arguments.json:
        return print_json(receipt, terminal)
    lines_of = detail_lines if arguments.verbose else summary_lines
    terminal.say("\n".join(lines_of(receipt, stock_count_by(receipt, client))))
    return OK


def summary_lines(receipt: Json, stock_count: int | None) -> list[str]:
    """What was done, in one line, and one more for each thing that is not as it should be.

    `stock_count`: engines without an agent; None where that is not known.
    """
    parts = [f"{receipt['acked_count']} acknowledged"]
    if receipt["fenced_count"]:
        parts.append(f"{receipt['fenced_count']} fenced by the end of their lease")
    parts.append(f"{_count(receipt['aborted'], 'request')} ended")
    parts.append(f"{_count(receipt['condemned_blocks'], 'block')} condemned")
    line = f"{_headline(receipt)}: {', '.join(parts)}"
    return [line, *_reservations(receipt, stock_count)]


def detail_lines(receipt: Json, stock_count: int | None) -> list[str]:
    """All that it holds."""
    bytes_by_tier = ", ".join(f"{n} {tier}" for tier, n in receipt["condemned_bytes"].items())
    acked, fenced = receipt["acked"], receipt["fenced"]
    names = f": {', '.join(acked)}" if acked else ""
    silent = f": {', '.join(fenced)}" if fenced else ""
    return [
        _headline(receipt),
        *_reservations(receipt, stock_count),
        f"  epoch {receipt['epoch']}",
        f"  acknowledged by {receipt['acked_count']}{names}",
        f"  fenced by the end of their lease: {receipt['fenced_count']}{silent}",
        f"  weakest fence: {_FENCES.get(receipt['fence'], receipt['fence'])}",
        f"  weakest erase: {_ERASES.get(receipt['erase'], receipt['erase'])}",
        f"  ended {_count(receipt['aborted'], 'request')}, condemned"
        f" {_count(receipt['condemned_blocks'], 'block')} (bytes: {bytes_by_tier or 'none'})",
        f"  audit: {receipt['audit']}",
        *(_erasure(erasure) for erasure in receipt["erasures"]),
    ]


class Asking(Protocol):
    """Of `AdminClient`, what is needed here."""

    def get(self, path: str) -> Json: ...


def stock_count_by(receipt: Json, client: Asking) -> int | None:
    """How many workers are stock engines now, where the receipt says that there are any and this
    caller may see workers.
    """
    if receipt["erase"] != "restart":
        return 0
    try:
        workers = client.get("/workers")["workers"]
    except AdminRefused:
        return None
    kinds = [worker["detail"].get("isolation", {}) for worker in workers]
    return sum(kind.get("erase") == "restart" for kind in kinds) or None


def _headline(receipt: Json) -> str:
    done = _PAST.get(receipt["verb"], receipt["verb"])
    return (
        f"{receipt['subject']}: {done}, in force after {receipt['ms']:.1f} ms (revision"
        f" {receipt['rev']})"
    )


def _reservations(receipt: Json, stock_count: int | None) -> list[str]:
    if receipt["erase"] != "restart":
        return []
    count = "some workers" if stock_count is None else _count(stock_count, "worker")
    if receipt["fence"] == "gateway":
        return [f"  fenced by the salt alone: {count} (their bytes stay until they restart)"]
    return [f"  not erased before a restart: {count}"]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _erasure(erasure: Json) -> str:
    at = f" at {erasure['holder']}" if erasure["holder"] else ""
    return (
        f"  erased{at}: {_count(erasure['blocks'], 'block')}{'' if erasure['done'] else ' so far'}"
    )
