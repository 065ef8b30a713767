"""The verbs about tenants against a real admin port: what they print, where, and how they end."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from shell import Shell
from tenant_port import serving_tenants

from trunkline import cli
from trunkline.admin_client import AdminClient

KEY_TEXT = re.compile(r"pk_[0-9a-f]{16}_[A-Za-z0-9_-]{43}\n")


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Shell]:
    with serving_tenants(tmp_path) as port:
        yield Shell(port, capsys)


# --- keys ---------------------------------------------------------------------------------------


def test_a_new_key_is_alone_on_standard_output(shell: Shell) -> None:
    words = ["keys", "create", "--tenant", "acme", "--create-tenant", "--user", "alice"]
    words += ["--role", "auditor", "--role", "tenant.user", "--model", "m", "--expires", "30d"]
    code, out, err = shell.run(*words, "--class", "ci")
    assert code == 0
    assert KEY_TEXT.fullmatch(out)
    assert "acme/alice" in err
    assert out.strip() not in err
    (row,) = shell.json("keys", "list")["keys"]
    assert (row["roles"], row["models"], row["key_class"]) == (
        ["auditor", "tenant.user"],
        ["m"],
        "ci",
    )
    assert shell.port.client(out.strip()).get("/audit").status_code == 200


def test_keys_are_listed_without_secrets_and_revoked_by_id(shell: Shell) -> None:
    text = shell.port.key("acme", user="alice")
    page = shell.said("keys", "list", "--tenant", "acme")
    key_id, secret = text.split("_", 2)[1:]
    assert page.splitlines()[0].split() == (
        [
            "KEY",
            "STATE",
            "TENANT",
            "USER",
            "ROLES",
            "SCOPE",
            "CLASS",
            "MODELS",
            "ADAPTERS",
            "EXPIRES",
        ]
    )
    assert page.splitlines()[1].split() == (
        [key_id, "live", "acme", "alice", "tenant.user", "policy", "-", "all", "all", "never"]
    )
    assert secret not in page
    assert shell.said("keys", "revoke", key_id, "--reason", "lost") == (
        f"key/{key_id} is revoked (revision 4)\n"
    )
    assert shell.said("keys", "revoke", key_id) == f"key/{key_id} was revoked before\n"
    assert "revoked" in shell.said("keys", "list")


def test_a_whole_key_is_revoked_and_its_secret_goes_no_further(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = shell.port.key("acme", user="alice")
    asked: list[str] = []
    ask = AdminClient.ask

    def listening(client: AdminClient, method: str, path: str, body: Any = None) -> Any:
        asked.append(f"{method} {path} {body}")
        return ask(client, method, path, body)

    monkeypatch.setattr(AdminClient, "ask", listening)
    key_id, secret = text.split("_", 2)[1:]
    assert shell.said("keys", "revoke", text) == f"key/{key_id} is revoked (revision 4)\n"
    assert asked
    assert secret not in " ".join(asked)
    code, out, err = shell.run("keys", "revoke", text[:-1])
    assert (code, secret[:-1] in out + err) == (cli.MISUSED, False)
    code, _, err = shell.run("revoke", text, "--reason", "r")
    assert (code, err) == (2, f"trunkline: for one key: trunkline keys revoke {key_id}\n")


def test_a_list_of_keys_shows_what_each_is_bound_to(shell: Shell) -> None:
    shell.port.key("acme", user="al", adapters=["fr"], key_class="ci", scope="user")
    row = shell.said("keys", "list").splitlines()[1].split()
    assert row[5:] == ["user", "ci", "all", "fr", "never"]


def test_a_key_may_end_on_a_date(shell: Shell) -> None:
    shell.run("keys", "create", "--tenant", "a", "--create-tenant", "--expires", "2033-05-18")
    (row,) = shell.json("keys", "list")["keys"]
    assert abs(row["not_after_ms"] - 1_999_987_200_000) < 60_000


def test_more_keys_than_a_page_are_listed_whole(shell: Shell) -> None:
    for tenant in ("acme", "globex"):  # as one tenant has 1,000 keys at most
        shell.port.operator.post("/tenants", json={"name": tenant})
    for number in range(1_001):
        tenant = "acme" if number % 2 else "globex"
        assert shell.port.operator.post("/keys", json={"tenant": tenant}).status_code == 201
    assert len(shell.json("keys", "list")["keys"]) == 1_001


# --- tenants ------------------------------------------------------------------------------------


def test_tenants_and_organisations_are_added_and_listed(shell: Shell) -> None:
    assert shell.said("orgs", "add", "globex") == "org/globex is there (revision 1)\n"
    assert "tenant/eu is there" in shell.said("tenants", "add", "eu", "--org", "globex")
    assert "tenant/solo is there" in shell.said("tenants", "add", "solo")
    assert "has its new policy" in shell.said("orgs", "policy", "globex", "--shared")
    rows = [line.split() for line in shell.said("orgs", "list").splitlines()[1:]]
    assert [row[:3] for row in rows] == [["globex", "active", "yes"], ["solo", "active", "no"]]
    rows = [line.split() for line in shell.said("tenants", "list").splitlines()[1:]]
    assert [row[:4] for row in rows] == (
        [["eu", "active", "globex", "tenant"], ["solo", "active", "solo", "tenant"]]
    )


def test_a_policy_flag_leaves_the_others_as_they_are(shell: Shell) -> None:
    shell.said("tenants", "add", "acme")
    shell.said("tenants", "policy", "acme", "--requests-per-s", "5", "--cache-cap-bytes", "100")
    shell.said("tenants", "policy", "acme", "--weight", "2", "--scope", "user")
    shell.said("tenants", "policy", "acme", "--cache-cap-bytes", "none")
    (tenant,) = shell.json("tenants", "list")["tenants"]
    policy = tenant["policy"]
    assert (policy["requests_per_s"], policy["weight"], policy["scope"]) == (5.0, 2.0, "user")
    assert policy["cache_cap_bytes"] is None


def test_a_policy_without_flags_is_shown_and_nothing_is_written(shell: Shell) -> None:
    shell.said("tenants", "add", "acme")
    words = ["--cache-cap-bytes", "1.5GiB", "--cache-floor-bytes", "512MB", "--weight", "2"]
    shell.said("tenants", "policy", "acme", *words, "--priority", "low")
    rev = shell.port.registry.book.rev
    page = shell.said("tenants", "policy", "acme").splitlines()
    assert page[0] == "tenant/acme of org/acme, active"
    assert [line.split() for line in page[1:]] == [
        *(["scope", "tenant"], ["shared", "no"], ["requests-per-s", "none"]),
        *(["tokens-per-s", "none"], ["cache-floor-bytes", "512000000"]),
        *(["cache-cap-bytes", "1610612736"], ["weight", "2"], ["priority", "low"]),
    ]
    assert shell.json("tenants", "policy", "acme")["policy"]["weight"] == 2.0
    assert shell.port.registry.book.rev == rev
    code, _, err = shell.run("tenants", "policy", "acme", "--cache-cap-bytes", "1kB")
    assert (code, "above the cap of 1000" in err) == (cli.MISUSED, True)


# --- revocations --------------------------------------------------------------------------------


def test_a_revocation_prints_its_receipt(shell: Shell) -> None:
    shell.said("tenants", "add", "acme")
    page = shell.said("revoke", "tenant/acme", "--reason", "contract ended", "-v")
    assert page.startswith("tenant/acme: revoked, in force after ")
    for part in ("acknowledged by 1: gateway", "condemned 2 blocks (bytes: 64 device)"):
        assert part in page
    for part in ("weakest fence: gateway", "weakest erase: namespace", "audit: recorded"):
        assert part in page
    assert shell.said("enable", "tenant/acme") == "tenant/acme is let in again (revision 4)\n"
    assert shell.said("enable", "tenant/acme") == "tenant/acme was not revoked\n"
    assert "model/m: invalidated" in shell.said("invalidate", "model/m")
    rows = [line.split()[:3] for line in shell.said("revocations").splitlines()[1:]]
    assert rows == [["5", "invalidate", "model/m"], ["3", "revoke", "tenant/acme"]]
    assert "  epoch 1\n" in shell.said("revocations", "3"), "one that is asked for is shown whole"


def test_what_was_done_is_one_line_unless_more_is_asked_for(shell: Shell) -> None:
    page = shell.said("revoke", "model/m", "--reason", "r")
    assert re.fullmatch(
        r"model/m: revoked, in force after [0-9.]+ ms \(revision 1\): 1 acknowledged, 1 request"
        r" ended, 2 blocks condemned\n",
        page,
    )
    assert len(shell.said("invalidate", "model/m", "--verbose").splitlines()) > 5


def test_who_is_shut_out_now_is_listed_and_what_is_not_told_is_said(shell: Shell) -> None:
    for name in ("acme", "eu"):
        shell.said("tenants", "add", name)
    assert "is barred" in shell.run("revocations", "--in-force")[1]
    shell.said("revoke", "tenant/acme", "--reason", "r")
    shell.said("revoke", "org/eu", "--reason", "r")
    code, out, err = shell.run("revocations", "--in-force")
    assert (code, out) == (0, "org/eu\ntenant/acme\n")
    assert "of users, models, adapters, key classes and the fleet" in err
    admin = shell.port.key("acme2", "org.admin")
    assert "may not list organisations" in shell.run("revocations", "--in-force", key=admin)[2]
    shell.said("enable", "tenant/acme")
    assert json.loads(shell.run("revocations", "--in-force", "--json")[1]) == (
        {"in_force": ["org/eu"]}
    )
    assert shell.run("revocations", "3", "--in-force")[0] == cli.MISUSED


def test_the_fleet_is_revoked_only_with_yes(shell: Shell) -> None:
    code, _, err = shell.run("revoke", "fleet", "--reason", "r")
    assert (code, "--yes" in err) == (cli.MISUSED, True)
    assert shell.port.orders == []
    assert shell.said("revoke", "fleet", "--yes", "--reason", "r").startswith("fleet: revoked")
    assert shell.said("enable", "fleet").startswith("fleet is let in again")


def test_a_revocation_without_an_audit_sink_says_so_and_is_done(shell: Shell) -> None:
    shell.port.unplug()
    code, out, err = shell.run("revoke", "model/m", "--reason", "r")
    assert (code, "model/m: revoked" in out) == (0, True)
    assert "no record of the outcome yet" in err
    code, _, err = shell.run("orgs", "add", "o")
    assert code == 1
    assert "no audit sink" in err or "audit log does not take" in err


# --- public prefixes ----------------------------------------------------------------------------


def test_a_prefix_is_proposed_approved_twice_listed_and_withdrawn(
    shell: Shell, tmp_path: Path
) -> None:
    shell.said("orgs", "add", "acme")
    tokens = tmp_path / "prompt.json"
    tokens.write_text(json.dumps(list(range(32))))
    words = ["public", "propose", "support", "--tokens", str(tokens), "--block-tokens", "16"]
    words += ["--model", "m", "--owner", "acme", "--audience", "acme", "--reason", "shared"]
    assert shell.said(*words).startswith("support: proposed, 2 more approvals needed (32 tokens")
    code, _, err = shell.run("public", "approve", "support")
    assert (code, "others than its proposer" in err) == (1, True)
    first, second = (shell.port.key("sec", "security.officer", user=u) for u in ("ann", "bob"))
    assert "1 more approval needed" in shell.said("public", "approve", "support", key=first)
    assert "support: live" in shell.said("public", "approve", "support", key=second)
    row = shell.said("public", "list").splitlines()[1].split()
    assert row[:8] == ["support", "live", "acme", "m", "32", "16", "2", "of"]
    assert (len(row[-2]), row[-1]) == (64, "shared")
    assert "public/support: invalidated" in shell.said("public", "withdraw", "support")
    assert shell.json("public", "list")["public"][0]["state"] == "withdrawn"


def _proposed(shell: Shell, tokens: Path) -> str:
    """Words of a proposal."""
    shell.port.operator.post("/orgs", json={"name": "acme"})
    words = ["public", "propose", "support", "--tokens", str(tokens), "--block-tokens", "16"]
    words += ["--model", "m", "--owner", "acme", "--audience", "all", "--reason", "shared"]
    return shell.said(*words)


def test_an_approval_with_other_tokens_than_the_proposed_ones_is_refused(
    shell: Shell, tmp_path: Path
) -> None:
    tokens, others = tmp_path / "prompt.json", tmp_path / "others.json"
    tokens.write_text(json.dumps(list(range(32))))
    others.write_text(json.dumps([*range(31), 99]))
    _proposed(shell, tokens)
    shell.said("public", "withdraw", "support")
    tokens.write_text(json.dumps(list(range(48))))
    _proposed(shell, tokens)
    ann = shell.port.key("sec", "security.officer", user="ann")
    code, _, err = shell.run("public", "approve", "support", "--tokens", str(others), key=ann)
    assert (code, "was NOT approved" in err) == (1, True)
    assert [p["approvers"] for p in shell.json("public", "list")["public"]] == [[], []]
    page = shell.said("public", "approve", "support", "--tokens", str(tokens), key=ann)
    assert "1 more approval needed (48 tokens" in page
    code, _, err = shell.run("public", "approve", "absent", "--tokens", str(tokens), key=ann)
    assert (code, "there is no prefix absent" in err) == (cli.MISUSED, True)


def test_tokens_that_are_not_of_whole_blocks_are_not_sent(shell: Shell, tmp_path: Path) -> None:
    tokens = tmp_path / "prompt.json"
    tokens.write_text(json.dumps(list(range(33))))
    words = ["public", "propose", "p", "--tokens", str(tokens), "--block-tokens", "16"]
    words += ["--model", "m", "--owner", "acme", "--audience", "all", "--reason", "r"]
    code, _, err = shell.run(*words)
    assert (code, "give the first 32" in err) == (cli.MISUSED, True)
