"""What the verbs about tenants ask the admin port, and how they show what it answers.

Text is for people and may change; `--json` is the gateway's own answer, for programs. A key's text
goes to standard output alone, once, so that it can be redirected into a file. Must never: decide
anything, or write a secret anywhere else. Read `tenant_commands.py` for the flags.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from urllib.parse import quote

from trunkline.admin_client import KEY_VARIABLE, AdminClient, Json
from trunkline.errors import ConfigError
from trunkline.leaf import read_bounded
from trunkline.terminal import (
    Terminal,
    print_json,
    print_table,
    seconds_of,
    time_text,
    tokens_in,
    wall_ms_of,
)

OK, FAILED = 0, 1
MAX_CHECKPOINTS_BYTES = 64 << 20


def run(arguments: argparse.Namespace, terminal: Terminal) -> int:
    """Carry out one verb of `tenant_commands.COMMANDS`; its exit code."""
    key = arguments.admin_key
    client = AdminClient(
        arguments.admin_url, terminal.environ.get(KEY_VARIABLE, "") if key is None else key
    )
    return _RUNS[arguments.command](arguments, client, terminal)


# -- keys ------------------------------------------------------------------------------------------


def _keys_create(arguments: argparse.Namespace, client: AdminClient, terminal: Terminal) -> int:
    body: Json = {
        "tenant": arguments.tenant,
        "org": arguments.org,
        "create_tenant": arguments.create_tenant,
        "user": arguments.user,
        "models": arguments.model,
        "adapters": arguments.adapter,
        "key_class": arguments.key_class,
        "quota_class": arguments.quota_class,
        "scope": arguments.scope,
        "reason": arguments.reason,
    }
    if arguments.role:
        body["roles"] = list(dict.fromkeys(arguments.role))
    if arguments.expires:
        body["expires_in_s"] = seconds_of(arguments.expires)
    made = client.ask("POST", "/keys", body)
    if arguments.json:
        return print_json(made, terminal)
    view = made["view"]
    terminal.say(made["key"])
    until = time_text(view["not_after_ms"]) if view["not_after_ms"] else "it is revoked"
    whose = f"{view['tenant']}/{view['user']}" if view["user"] else view["tenant"]
    terminal.note(
        f"key {view['key_id']} of {whose} ({', '.join(view['roles'])}), good until {until};"
        " it is shown this once"
    )
    return OK


def _keys_list(arguments: argparse.Namespace, client: AdminClient, terminal: Terminal) -> int:
    keys = list(client.pages("/keys", "keys", {"tenant": arguments.tenant}))
    if arguments.json:
        return print_json({"keys": keys}, terminal)
    rows = [
        (
            *(key["key_id"], key["state"], key["tenant"], key["user"] or "-"),
            ",".join(key["roles"]),
            "all" if key["models"] is None else ",".join(key["models"]),
            time_text(key["not_after_ms"]) if key["not_after_ms"] else "never",
        )
        for key in keys
    ]
    head = ("KEY", "STATE", "TENANT", "USER", "ROLES", "MODELS", "EXPIRES")
    return print_table(head, rows, terminal)


def _keys_revoke(arguments: argparse.Namespace, client: AdminClient, terminal: Terminal) -> int:
    path = f"/keys/{_part(arguments.key_id)}"
    return _print_done(
        arguments,
        client.ask("DELETE", path, {"reason": arguments.reason}),
        "is revoked",
        "was revoked before",
        terminal,
    )


# -- organisations and tenants ---------------------------------------------------------------------


def _orgs_list(arguments: argparse.Namespace, client: AdminClient, terminal: Terminal) -> int:
    orgs = list(client.pages("/orgs", "orgs", {}))
    if arguments.json:
        return print_json({"orgs": orgs}, terminal)
    rows = [(org["org"], org["state"], _yes(org["shared"]), org["id"]) for org in orgs]
    return print_table(("ORG", "STATE", "SHARED", "ID"), rows, terminal)


def _orgs_add(arguments: argparse.Namespace, client: AdminClient, terminal: Terminal) -> int:
    body = {"name": arguments.name, "reason": arguments.reason}
    return _print_done(arguments, client.ask("POST", "/orgs", body), "is there", "", terminal)


def _orgs_policy(arguments: argparse.Namespace, client: AdminClient, terminal: Terminal) -> int:
    body = {"shared": arguments.shared, "reason": arguments.reason}
    done = client.ask("PUT", f"/orgs/{_part(arguments.name)}/policy", body)
    return _print_done(arguments, done, "has its new policy", "", terminal)


def _tenants_list(arguments: argparse.Namespace, client: AdminClient, terminal: Terminal) -> int:
    tenants = list(client.pages("/tenants", "tenants", {}))
    if arguments.json:
        return print_json({"tenants": tenants}, terminal)
    rows = [
        (
            *(tenant["tenant"], tenant["state"], tenant["org"], tenant["effective_scope"]),
            _limit(tenant["policy"]["requests_per_s"]),
            _limit(tenant["policy"]["tokens_per_s"]),
            f"{tenant['policy']['cache_floor_bytes']}",
            _limit(tenant["policy"]["cache_cap_bytes"]),
        )
        for tenant in tenants
    ]
    head = ("TENANT", "STATE", "ORG", "SHARES", "REQ/S", "TOK/S", "FLOOR BYTES", "CAP BYTES")
    return print_table(head, rows, terminal)


def _tenants_add(arguments: argparse.Namespace, client: AdminClient, terminal: Terminal) -> int:
    body = {
        "name": arguments.name,
        "org": arguments.org,
        "create_org": arguments.create_org,
        "reason": arguments.reason,
    }
    return _print_done(arguments, client.ask("POST", "/tenants", body), "is there", "", terminal)


def _tenants_policy(arguments: argparse.Namespace, client: AdminClient, terminal: Terminal) -> int:
    """A policy is set as a whole; what no flag names stays as it is."""
    tenants = client.pages("/tenants", "tenants", {})
    known = next((t for t in tenants if arguments.name in (t["tenant"], t["id"])), None)
    if known is None:
        raise ConfigError(f"there is no tenant {arguments.name}; see `trunkline tenants list`")
    body: Json = {**known["policy"], "reason": arguments.reason}
    for name in ("scope", "shared"):
        if getattr(arguments, name) is not None:
            body[name] = getattr(arguments, name)
    for name in ("requests_per_s", "tokens_per_s", "weight"):
        _set_number(body, name, getattr(arguments, name), float)
    for name in ("cache_floor_bytes", "cache_cap_bytes"):
        _set_number(body, name, getattr(arguments, name), int)
    done = client.ask("PUT", f"/tenants/{_part(arguments.name)}/policy", body)
    return _print_done(arguments, done, "has its new policy", "", terminal)


def _set_number(body: Json, name: str, text: str | None, kind: Callable[[str], object]) -> None:
    if text is None:
        return
    flag = "--" + name.replace("_", "-")
    if text == "none":
        if name in ("weight", "cache_floor_bytes"):
            raise ConfigError(f"{flag} takes a number, not none")
        body[name] = None
        return
    try:
        body[name] = kind(text)
    except ValueError:
        raise ConfigError(f"{flag} {text} is no number") from None


# -- revocations -----------------------------------------------------------------------------------


def _revoke(arguments: argparse.Namespace, client: AdminClient, terminal: Terminal) -> int:
    body = {"subject": arguments.subject, "reason": arguments.reason}
    receipt = client.ask("POST", f"/{arguments.command}", body)
    return _print_receipt(arguments, receipt, terminal)


def _enable(arguments: argparse.Namespace, client: AdminClient, terminal: Terminal) -> int:
    body = {"subject": arguments.subject, "reason": arguments.reason}
    done = client.ask("POST", "/enable", body)
    return _print_done(arguments, done, "is let in again", "was not revoked", terminal)


def _revocations(arguments: argparse.Namespace, client: AdminClient, terminal: Terminal) -> int:
    if arguments.rev is not None:
        receipt = client.get(f"/revocations/{arguments.rev}")
        return _print_receipt(arguments, receipt, terminal)
    found = client.get("/revocations", {"limit": 1_000})
    if arguments.json:
        return print_json(found, terminal)
    rows = [
        (
            *(str(r["rev"]), r["verb"], r["subject"], str(r["acked_count"])),
            *(str(r["fenced_count"]), str(r["condemned_blocks"]), f"{r['ms']:.1f}"),
            "yes" if r["erasures"] and all(e["done"] for e in r["erasures"]) else "not yet",
        )
        for r in found["revocations"]
    ]
    head = ("REV", "VERB", "SUBJECT", "ACKED", "FENCED", "BLOCKS", "MS", "ERASED")
    return print_table(head, rows, terminal)


def _print_receipt(arguments: argparse.Namespace, receipt: Json, terminal: Terminal) -> int:
    if receipt["audit"] != "recorded":
        terminal.note(
            "trunkline: it is in force, but the audit log has no record of the outcome yet; it is"
            " written when a sink is back"
        )
    if arguments.json:
        return print_json(receipt, terminal)
    bytes_by_tier = ", ".join(f"{n} {tier}" for tier, n in receipt["condemned_bytes"].items())
    acked, fenced = receipt["acked"], receipt["fenced"]
    names = f": {', '.join(acked)}" if acked else ""
    silent = f": {', '.join(fenced)}" if fenced else ""
    lines = [
        f"{receipt['subject']}: {_PAST[receipt['verb']]}, in force on every holder after"
        f" {receipt['ms']:.1f} ms (revision {receipt['rev']}, epoch {receipt['epoch']})",
        f"  acknowledged by {receipt['acked_count']}{names}",
        f"  fenced by the end of their lease: {receipt['fenced_count']}{silent}",
        f"  weakest fence: {_FENCES.get(receipt['fence'], receipt['fence'])}",
        f"  weakest erase: {_ERASES.get(receipt['erase'], receipt['erase'])}",
        f"  aborted {receipt['aborted']} requests, condemned {receipt['condemned_blocks']} blocks"
        f" (bytes: {bytes_by_tier or 'none'})",
        f"  audit: {receipt['audit']}",
    ]
    lines += [
        f"  erased{' at ' + e['holder'] if e['holder'] else ''}: {e['blocks']} blocks"
        f"{'' if e['done'] else ' so far'}"
        for e in receipt["erasures"]
    ]
    terminal.say("\n".join(lines))
    return OK


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


# -- audit -----------------------------------------------------------------------------------------


def _audit_show(arguments: argparse.Namespace, client: AdminClient, terminal: Terminal) -> int:
    query: Json = {
        "limit": arguments.limit,
        "after": arguments.after,
        "kind": arguments.kind.upper(),
        "from_ms": wall_ms_of(arguments.since, "--since"),
        "to_ms": wall_ms_of(arguments.until, "--until"),
    }
    page = client.get("/audit", query)
    if arguments.json:
        return print_json(page, terminal)
    rows = [
        (
            *(str(r["seq"]), time_text(r["ts_wall"]), r["kind"], r["action"], r["actor"] or "-"),
            *(str(r["rev"] or "-"), r["result"] or "-", r["reason"] or "-"),
        )
        for r in page["records"]
    ]
    head = ("SEQ", "TIME", "KIND", "ACTION", "ACTOR", "REV", "RESULT", "REASON")
    print_table(head, rows, terminal)
    if page["next_after"] is not None:
        terminal.note(f"more follow: --after {page['next_after']}")
    elif arguments.after is None and page["scanned_from"] > 1:
        terminal.note(f"looked at from record {page['scanned_from']} on; older ones: --after 0")
    return OK


def _audit_verify(arguments: argparse.Namespace, client: AdminClient, terminal: Terminal) -> int:
    if arguments.public_key:
        raise ConfigError("--public-key goes with --dir: a gateway checks by the key it signs with")
    query: Json = {}
    if arguments.from_checkpoint:
        query["checkpoint"] = _newest_checkpoint(arguments.from_checkpoint)
    return print_verification(arguments, client.get("/audit/verify", query), terminal)


def print_verification(arguments: argparse.Namespace, found: Json, terminal: Terminal) -> int:
    """The outcome of a check; exit code 1 where the log is not what was written."""
    code = OK if found["sound"] else FAILED
    if arguments.json:
        print_json(found, terminal)
        return code
    if found["sound"]:
        terminal.say(
            f"sound: records {found['first_seq']} to {found['last_seq']}, held against"
            f" {found['checkpoints']} signed checkpoints\n"
            f"  the last one is {found['last_hash']}"
        )
    else:
        terminal.say(f"NOT SOUND at record {found['fault_seq']}: {found['fault']}")
    for sink in found["sinks"]:
        why = f" ({sink['why']})" if sink["why"] else ""
        terminal.say(f"  {sink['sink']}: {sink['state']}{why}")
    return code


def _newest_checkpoint(path: str) -> str:
    """The last whole line of a file of checkpoints."""
    raw, _ = read_bounded(path, MAX_CHECKPOINTS_BYTES, "--from-checkpoint: file")
    lines = [line for line in raw.split(b"\n")[:-1] if line.strip()]
    if not lines or not lines[-1].isascii() or len(lines[-1]) > 4_096:
        raise ConfigError(f"{path} holds no checkpoint")
    return lines[-1].decode("ascii")


# -- public prefixes -------------------------------------------------------------------------------


def _public_propose(arguments: argparse.Namespace, client: AdminClient, terminal: Terminal) -> int:
    audience = arguments.audience
    body: Json = {
        "name": arguments.name,
        "owner": arguments.owner,
        "model": arguments.model,
        "tokens": tokens_in(arguments.tokens),
        "block_tokens": arguments.block_tokens,
        "audience": audience if audience == "all" else audience.split(","),
        "expires_in_s": seconds_of(arguments.expires),
        "reason": arguments.reason,
    }
    return _print_public(arguments, client.ask("POST", "/public", body), terminal)


def _public_approve(arguments: argparse.Namespace, client: AdminClient, terminal: Terminal) -> int:
    path = f"/public/{_part(arguments.name)}/approve"
    return _print_public(
        arguments, client.ask("POST", path, {"reason": arguments.reason}), terminal
    )


def _public_withdraw(arguments: argparse.Namespace, client: AdminClient, terminal: Terminal) -> int:
    path = f"/public/{_part(arguments.name)}"
    receipt = client.ask("DELETE", path, {"reason": arguments.reason})
    return _print_receipt(arguments, receipt, terminal)


def _public_list(arguments: argparse.Namespace, client: AdminClient, terminal: Terminal) -> int:
    prefixes = list(client.pages("/public", "public", {}))
    if arguments.json:
        return print_json({"public": prefixes}, terminal)
    rows = [
        (
            *(p["name"], p["state"], p["owner"], p["model"], str(p["tokens_count"])),
            f"{len(p['approvers'])} of {p['approvers_needed']}",
            "all" if p["audience"] is None else ",".join(p["audience"]),
            time_text(p["not_after_ms"]),
        )
        for p in prefixes
    ]
    head = ("NAME", "STATE", "OWNER", "MODEL", "TOKENS", "APPROVED", "AUDIENCE", "EXPIRES")
    return print_table(head, rows, terminal)


def _print_public(arguments: argparse.Namespace, prefix: Json, terminal: Terminal) -> int:
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


def _part(name: str) -> str:
    """A name as one part of a path."""
    return quote(name, safe="")


def _yes(value: object) -> str:
    return "yes" if value else "no"


def _limit(value: float | None) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _print_done(
    arguments: argparse.Namespace, done: Json, text: str, unchanged: str, terminal: Terminal
) -> int:
    if done["audit"] != "recorded":
        terminal.note("trunkline: it is in force; its audit record waits for a sink")
    if arguments.json:
        return print_json(done, terminal)
    revision = f" (revision {done['rev']})" if done["rev"] is not None else ""
    terminal.say(f"{done['what']} {text if done['rev'] is not None else unchanged}{revision}")
    return OK


Run = Callable[[argparse.Namespace, AdminClient, Terminal], int]

_RUNS: Mapping[str, Run] = {
    "keys create": _keys_create,
    "keys list": _keys_list,
    "keys revoke": _keys_revoke,
    "orgs list": _orgs_list,
    "orgs add": _orgs_add,
    "orgs policy": _orgs_policy,
    "tenants list": _tenants_list,
    "tenants add": _tenants_add,
    "tenants policy": _tenants_policy,
    "revoke": _revoke,
    "invalidate": _revoke,
    "enable": _enable,
    "revocations": _revocations,
    "audit show": _audit_show,
    "audit verify": _audit_verify,
    "public propose": _public_propose,
    "public approve": _public_approve,
    "public list": _public_list,
    "public withdraw": _public_withdraw,
}
