"""What the verbs about tenants ask the admin port, and how they show what it answers.

Text is for people and may change; `--json` is the gateway's own answer, for programs. A key's text
goes to standard output alone, once, so that it can be redirected into a file. Must never: decide
anything, or write a secret anywhere else. Read `tenant_commands.py` for the flags.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from urllib.parse import quote

from trunkline import audit_answers, public_answers
from trunkline.admin_client import KEY_VARIABLE, AdminClient, AdminRefused, Json
from trunkline.errors import ConfigError, GatewayError
from trunkline.receipt_text import print_receipt
from trunkline.terminal import Terminal, print_json, print_table, time_text
from trunkline.words import (
    MAX_KEY_LIFE_S,
    MAX_RATE,
    MAX_WEIGHT,
    bytes_in,
    expiry_in,
    key_id_in,
    name_in,
    number_in,
    subject_in,
)

OK, FAILED = 0, 1
MAX_CHECKPOINTS_BYTES = 64 << 20


def run(arguments: argparse.Namespace, terminal: Terminal) -> int:
    """Carry out one verb of `tenant_commands.COMMANDS`; its exit code."""
    client = client_of(arguments, terminal)
    return _RUNS[arguments.command](arguments, client, terminal)


def client_of(arguments: argparse.Namespace, terminal: Terminal) -> AdminClient:
    """Of the gateway that `add_where`'s flags name. Raises ConfigError."""
    key, source = arguments.admin_key, "--admin-key"
    if key is None:
        key, source = terminal.environ.get(KEY_VARIABLE, ""), KEY_VARIABLE
    return AdminClient(arguments.admin_url, key, source)


def error_object(error: GatewayError) -> Json:
    """What the gateway said, or of what never reached it the same in its shape."""
    if isinstance(error, AdminRefused):
        return error.answer
    kind = "invalid_request_error" if isinstance(error, ConfigError) else "unavailable"
    told = {"message": str(error), "type": kind, "param": None, "code": error.code}
    return {"error": told}


# -- keys ------------------------------------------------------------------------------------------


def _keys_create(arguments: argparse.Namespace, client: AdminClient, terminal: Terminal) -> int:
    body: Json = {
        "tenant": name_in(arguments.tenant, "--tenant"),
        "org": name_in(arguments.org, "--org") if arguments.org else "",
        "create_tenant": arguments.create_tenant,
        "user": arguments.user,
        "models": arguments.model,
        "adapters": arguments.adapter,
        "key_class": arguments.key_class,
        "scope": arguments.scope,
        "reason": arguments.reason,
    }
    if arguments.role:
        body["roles"] = list(dict.fromkeys(arguments.role))
    if arguments.expires:
        now_s = terminal.wall_s()
        body["expires_in_s"] = expiry_in(arguments.expires, now_s, MAX_KEY_LIFE_S)
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
    if arguments.tenant:
        name_in(arguments.tenant, "--tenant")
    keys = list(client.pages("/keys", "keys", {"tenant": arguments.tenant}))
    if arguments.json:
        return print_json({"keys": keys}, terminal)
    rows = [
        (
            *(key["key_id"], key["state"], key["tenant"], key["user"] or "-"),
            ",".join(key["roles"]),
            *(key["scope"] or "policy", key["key_class"] or "-"),
            *("all" if key[part] is None else ",".join(key[part]) for part in _PARTS),
            time_text(key["not_after_ms"]) if key["not_after_ms"] else "never",
        )
        for key in keys
    ]
    head = ("KEY", "STATE", "TENANT", "USER", "ROLES", "SCOPE", "CLASS", "MODELS", "ADAPTERS")
    return print_table((*head, "EXPIRES"), rows, terminal)


_PARTS = ("models", "adapters")
"""What a key may be bound to."""


def _keys_revoke(arguments: argparse.Namespace, client: AdminClient, terminal: Terminal) -> int:
    path = f"/keys/{key_id_in(arguments.key_id)}"
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
    body = {"name": name_in(arguments.name, "organisation"), "reason": arguments.reason}
    return _print_done(arguments, client.ask("POST", "/orgs", body), "is there", "", terminal)


def _orgs_policy(arguments: argparse.Namespace, client: AdminClient, terminal: Terminal) -> int:
    body = {"shared": arguments.shared, "reason": arguments.reason}
    name = name_in(arguments.name, "organisation")
    done = client.ask("PUT", f"/orgs/{_part(name)}/policy", body)
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
            *_used(tenant["usage"]),
        )
        for tenant in tenants
    ]
    head = ("TENANT", "STATE", "ORG", "SHARES", "REQ/S", "TOK/S", "FLOOR BYTES", "CAP BYTES")
    return print_table((*head, "REQUESTS", "PROMPT TOKENS", "HITS"), rows, terminal)


def _used(usage: Json | None) -> tuple[str, str, str]:
    """What a tenant has asked for, and the share of it that was reused where answers told."""
    if usage is None:
        return "-", "-", "-"
    told = usage["reported_tokens"]
    hits = f"{100 * usage['hit_tokens'] / told:.1f} %" if told else "-"
    return f"{usage['requests']}", f"{usage['prompt_tokens']}", hits


def _tenants_add(arguments: argparse.Namespace, client: AdminClient, terminal: Terminal) -> int:
    body = {
        "name": name_in(arguments.name, "tenant"),
        "org": name_in(arguments.org, "--org") if arguments.org else "",
        "create_org": arguments.create_org,
        "reason": arguments.reason,
    }
    return _print_done(arguments, client.ask("POST", "/tenants", body), "is there", "", terminal)


def _tenants_policy(arguments: argparse.Namespace, client: AdminClient, terminal: Terminal) -> int:
    """A policy is set as a whole; what no flag names stays as it is. Without a flag it is shown."""
    name = name_in(arguments.name, "tenant")
    wanted = _wanted_policy(arguments)
    if not wanted and arguments.reason:
        raise ConfigError("--reason alone changes nothing; see trunkline tenants policy --help")
    tenants = client.pages("/tenants", "tenants", {})
    known = next((t for t in tenants if name in (t["tenant"], t["id"])), None)
    if known is None:
        raise ConfigError(f"there is no tenant {name}; see `trunkline tenants list`")
    if not wanted:
        return _show_policy(arguments, known, terminal)
    body: Json = {**known["policy"], **wanted, "reason": arguments.reason}
    floor_bytes, cap_bytes = body["cache_floor_bytes"], body["cache_cap_bytes"]
    if cap_bytes is not None and floor_bytes > cap_bytes:
        raise ConfigError(
            f"the floor of {floor_bytes} bytes would be above the cap of {cap_bytes}: give"
            " --cache-floor-bytes or --cache-cap-bytes as well"
        )
    done = client.ask("PUT", f"/tenants/{_part(name)}/policy", body)
    return _print_done(arguments, done, "has its new policy", "", terminal)


def _wanted_policy(arguments: argparse.Namespace) -> Json:
    """What flags say. Raises ConfigError for what the gateway would not take."""
    given: Json = {
        name: getattr(arguments, name)
        for name in _POLICY_FIELDS
        if getattr(arguments, name) is not None
    }
    for name, text in given.items():
        flag = "--" + name.replace("_", "-")
        if name in ("scope", "shared", "priority"):
            continue
        if text == "none" and name in ("weight", "cache_floor_bytes"):
            raise ConfigError(f"{flag} takes a number, not none")
        if text == "none":
            given[name] = None
        elif name.endswith("_bytes"):
            given[name] = bytes_in(text, flag)
        else:
            given[name] = number_in(text, flag, MAX_WEIGHT if name == "weight" else MAX_RATE)
    return given


_POLICY_FIELDS = (
    *("scope", "shared", "requests_per_s", "tokens_per_s"),
    *("cache_floor_bytes", "cache_cap_bytes", "weight", "priority"),
)


def _show_policy(arguments: argparse.Namespace, tenant: Json, terminal: Terminal) -> int:
    if arguments.json:
        return print_json(tenant, terminal)
    policy = tenant["policy"]
    terminal.say(f"tenant/{tenant['tenant']} of org/{tenant['org']}, {tenant['state']}")
    shown = {**policy, "shared": _yes(policy["shared"])}
    for name in _POLICY_FIELDS:
        value = shown[name]
        text = value if isinstance(value, str) else _limit(value)
        terminal.say(f"  {name.replace('_', '-'):<18} {text}")
    if tenant["effective_scope"] != policy["scope"]:
        terminal.say(f"  as its organisation has it, it shares: {tenant['effective_scope']}")
    return OK


# -- revocations -----------------------------------------------------------------------------------


def _revoke(arguments: argparse.Namespace, client: AdminClient, terminal: Terminal) -> int:
    subject = subject_in(arguments.subject)
    if arguments.command == "revoke" and subject == "fleet" and not arguments.yes:
        raise ConfigError(
            "revoke fleet shuts out every tenant until `trunkline enable fleet`: say --yes; to make"
            " only what is cached unreachable, use `trunkline invalidate fleet`"
        )
    body = {"subject": subject, "reason": arguments.reason}
    receipt = client.ask("POST", f"/{arguments.command}", body)
    return print_receipt(arguments, receipt, client, terminal)


def _enable(arguments: argparse.Namespace, client: AdminClient, terminal: Terminal) -> int:
    body = {"subject": subject_in(arguments.subject), "reason": arguments.reason}
    done = client.ask("POST", "/enable", body)
    return _print_done(arguments, done, "is let in again", "was not revoked", terminal)


def _revocations(arguments: argparse.Namespace, client: AdminClient, terminal: Terminal) -> int:
    if arguments.in_force:
        return _in_force(arguments, client, terminal)
    if arguments.rev is not None:
        receipt = client.get(f"/revocations/{arguments.rev}")
        arguments.verbose = True  # who asks for one wants all of it
        return print_receipt(arguments, receipt, client, terminal)
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


def _in_force(arguments: argparse.Namespace, client: AdminClient, terminal: Terminal) -> int:
    """Who is barred now, as far as the gateway tells."""
    if arguments.rev is not None:
        raise ConfigError("--in-force takes no REV")
    barred = [
        f"{kind}/{one[kind]}"
        for kind in ("org", "tenant")
        for one in _all_of(f"{kind}s", client, terminal)
        if one["state"] == "revoked"
    ]
    terminal.note(
        "trunkline: the gateway lists barred organisations and tenants alone; of users, models,"
        " adapters, key classes and the fleet, the audit log tells: trunkline audit show"
    )
    if arguments.json:
        return print_json({"in_force": barred}, terminal)
    terminal.say("\n".join(barred) if barred else "no organisation or tenant is barred")
    return OK


def _all_of(name: str, client: AdminClient, terminal: Terminal) -> list[Json]:
    """A whole list; empty, with a note, where this caller may not see it."""
    try:
        return list(client.pages(f"/{name}", name, {}))
    except AdminRefused as error:
        if error.answered != 403 or name != "orgs":
            raise
        terminal.note("trunkline: this key may not list organisations: tenants alone are shown")
        return []


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
    "audit show": audit_answers.show,
    "audit verify": audit_answers.verify,
    "public propose": public_answers.propose,
    "public approve": public_answers.approve,
    "public list": public_answers.show_all,
    "public withdraw": public_answers.withdraw,
}
