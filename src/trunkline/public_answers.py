"""What the verbs about public prefixes ask the admin port, and how they show what it answers.

An approver who has the tokens can have them held against what was proposed, before the approval.
Must never: print a token, or approve what did not match. Read `tenant_answers.py` for the other
verbs, `core/publics.py` for what a prefix is.
"""

from __future__ import annotations

import argparse
import struct
from urllib.parse import quote

from trunkline.admin_client import AdminClient, Json
from trunkline.errors import ConfigError, GatewayError
from trunkline.receipt_text import print_receipt
from trunkline.terminal import OK, Terminal, print_json, print_table, time_text
from trunkline.words import MAX_PUBLIC_LIFE_S, expiry_in, name_in, tokens_in

MAX_BLOCK_TOKENS = 65_536


class TokensDiffer(GatewayError):
    """What was proposed is not what the approver has. Nothing was approved."""

    code = "tokens_differ"


def propose(arguments: argparse.Namespace, client: AdminClient, terminal: Terminal) -> int:
    audience, block_tokens = arguments.audience, arguments.block_tokens
    tokens = tokens_in(arguments.tokens)
    if not 1 <= block_tokens <= MAX_BLOCK_TOKENS:
        raise ConfigError(f"--block-tokens {block_tokens}: allowed are 1 to {MAX_BLOCK_TOKENS}")
    if len(tokens) % block_tokens:
        whole = len(tokens) // block_tokens * block_tokens
        raise ConfigError(
            f"--tokens {arguments.tokens}: {len(tokens)} tokens are not of whole blocks of"
            f" {block_tokens}; give the first {whole}"
        )
    body: Json = {
        "name": name_in(arguments.name, "prefix"),
        "owner": name_in(arguments.owner, "--owner"),
        "model": arguments.model,
        "tokens": tokens,
        "block_tokens": block_tokens,
        "audience": audience
        if audience == "all"
        else [name_in(org, "--audience") for org in audience.split(",")],
        "expires_in_s": expiry_in(arguments.expires, terminal.wall_s(), MAX_PUBLIC_LIFE_S),
        "reason": arguments.reason,
    }
    return _print_one(arguments, client.ask("POST", "/public", body), terminal)


def approve(arguments: argparse.Namespace, client: AdminClient, terminal: Terminal) -> int:
    name = name_in(arguments.name, "prefix")
    if arguments.tokens:
        # By its id: between look and approval, another prefix may get the name.
        name = _checked(name, arguments.tokens, client)["public_id"]
    path = f"/public/{quote(name, safe='')}/approve"
    body = {"reason": arguments.reason}
    return _print_one(arguments, client.ask("POST", path, body), terminal)


def withdraw(arguments: argparse.Namespace, client: AdminClient, terminal: Terminal) -> int:
    path = f"/public/{quote(name_in(arguments.name, 'prefix'), safe='')}"
    receipt = client.ask("DELETE", path, {"reason": arguments.reason})
    return print_receipt(arguments, receipt, client, terminal)


def show_all(arguments: argparse.Namespace, client: AdminClient, terminal: Terminal) -> int:
    prefixes = list(client.pages("/public", "public", {}))
    if arguments.json:
        return print_json({"public": prefixes}, terminal)
    rows = [
        (
            *(p["name"], p["state"], p["owner"], p["model"]),
            *(str(p["tokens_count"]), str(p["block_tokens"])),
            f"{len(p['approvers'])} of {p['approvers_needed']}",
            "all" if p["audience"] is None else ",".join(p["audience"]),
            *(time_text(p["not_after_ms"]), p["token_digest"], p["reason"]),
        )
        for p in prefixes
    ]
    head = ("NAME", "STATE", "OWNER", "MODEL", "TOKENS", "BLOCK", "APPROVED", "AUDIENCE")
    return print_table((*head, "EXPIRES", "DIGEST", "REASON"), rows, terminal)


def _checked(name: str, path: str, client: AdminClient) -> Json:
    """The prefix of this name, of exactly the tokens in the file. Raises TokensDiffer."""
    from trunkline.control.draft import token_digest  # not before it is needed: `--help` is cheap

    tokens = tokens_in(path)
    digest = token_digest(struct.pack(f"<{len(tokens)}I", *tokens)).hex()
    named = [
        prefix
        for prefix in client.pages("/public", "public", {})
        if name in (prefix["name"], prefix["public_id"])
    ]
    if not named:
        raise ConfigError(f"there is no prefix {name}; see `trunkline public list`")
    # Names of prefixes that ended may be in use again: of these, the one that has it now.
    found = next((p for p in named if p["state"] in ("proposed", "live")), named[-1])
    if found["token_digest"] != digest:
        raise TokensDiffer(
            f"{name} was NOT approved: --tokens {path} has {len(tokens)} tokens with the digest"
            f" {digest}, proposed are {found['tokens_count']} with {found['token_digest']}"
        )
    return found


def _print_one(arguments: argparse.Namespace, prefix: Json, terminal: Terminal) -> int:
    if arguments.json:
        return print_json(prefix, terminal)
    missing = prefix["approvers_needed"] - len(prefix["approvers"])
    state = prefix["state"]
    if missing > 0:
        state += f", {missing} more approval{'s' if missing > 1 else ''} needed"
    terminal.say(
        f"{prefix['name']}: {state} ({prefix['tokens_count']} tokens for {prefix['model']}, id"
        f" {prefix['public_id']}, digest {prefix['token_digest']})"
    )
    return OK
