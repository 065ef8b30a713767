"""The verbs about tenants against a real admin port: what they print, where, and how they end."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from admin_port import serving
from tenant_port import OPERATOR_KEY, TenantPort, serving_tenants

from trunkline import cli, tenant_commands
from trunkline.terminal import seconds_of

KEY_TEXT = re.compile(r"pk_[0-9a-f]{16}_[A-Za-z0-9_-]{43}\n")


class Shell:
    """Runs verbs in this process, as `trunkline` does."""

    def __init__(self, port: TenantPort, capsys: pytest.CaptureFixture[str]) -> None:
        self.port = port
        self._capsys = capsys

    def run(self, *words: str, key: str = OPERATOR_KEY) -> tuple[int, str, str]:
        given = ["--admin-key", key] if key else []
        code = cli.main([*words, "--admin-url", self.port.url, *given])
        out, err = self._capsys.readouterr()
        return code, out, err

    def said(self, *words: str, key: str = OPERATOR_KEY) -> str:
        code, out, err = self.run(*words, key=key)
        assert (code, err) == (0, ""), (out, err)
        return out

    def json(self, *words: str, key: str = OPERATOR_KEY) -> Any:
        return json.loads(self.said(*words, "--json", key=key))


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
        ["KEY", "STATE", "TENANT", "USER", "ROLES", "MODELS", "EXPIRES"]
    )
    assert page.splitlines()[1].split() == (
        [key_id, "live", "acme", "alice", "tenant.user", "all", "never"]
    )
    assert secret not in page
    assert shell.said("keys", "revoke", key_id, "--reason", "lost") == (
        f"key/{key_id} is revoked (revision 4)\n"
    )
    assert shell.said("keys", "revoke", key_id) == f"key/{key_id} was revoked before\n"
    assert "revoked" in shell.said("keys", "list")


def test_more_keys_than_a_page_are_listed_whole(shell: Shell) -> None:
    shell.port.operator.post("/tenants", json={"name": "acme"})
    for _ in range(1_001):
        shell.port.operator.post("/keys", json={"tenant": "acme"})
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


# --- revocations --------------------------------------------------------------------------------


def test_a_revocation_prints_its_receipt(shell: Shell) -> None:
    shell.said("tenants", "add", "acme")
    page = shell.said("revoke", "tenant/acme", "--reason", "contract ended")
    assert page.startswith("tenant/acme: revoked, in force on every holder after ")
    for part in ("acknowledged by 1: gateway", "condemned 2 blocks (bytes: 64 device)"):
        assert part in page
    for part in ("weakest fence: gateway", "weakest erase: namespace", "audit: recorded"):
        assert part in page
    assert shell.said("enable", "tenant/acme") == "tenant/acme is let in again (revision 4)\n"
    assert shell.said("enable", "tenant/acme") == "tenant/acme was not revoked\n"
    assert "model/m: invalidated" in shell.said("invalidate", "model/m")
    rows = [line.split()[:3] for line in shell.said("revocations").splitlines()[1:]]
    assert rows == [["5", "invalidate", "model/m"], ["3", "revoke", "tenant/acme"]]
    assert "revision 3, epoch 1" in shell.said("revocations", "3")


def test_a_revocation_without_an_audit_sink_says_so_and_is_done(shell: Shell) -> None:
    shell.port.sink.is_broken = True
    code, out, err = shell.run("revoke", "model/m", "--reason", "r")
    assert (code, "audit: pending" in out) == (0, True)
    assert "no record of the outcome yet" in err
    code, _, err = shell.run("orgs", "add", "o")
    assert code == 1
    assert "no audit sink" in err or "audit log does not take" in err


# --- audit --------------------------------------------------------------------------------------


def test_the_audit_log_is_shown_and_verified(shell: Shell) -> None:
    for name in ("a", "b", "c"):
        shell.said("orgs", "add", name, "--reason", f"why-{name}")
    page = shell.said("audit", "show", "--kind", "policy").splitlines()
    assert [line.split()[0] for line in page] == ["SEQ", "2", "4", "6"]
    assert page[1].split()[2:5] == ["POLICY", "registry.org-added", "operator"]
    assert page[3].endswith("why-c")
    code, out, err = shell.run("audit", "show", "--after", "1", "--limit", "2")
    assert (code, len(out.splitlines()), err) == (0, 3, "more follow: --after 3\n")
    assert shell.said("audit", "verify").startswith("sound: records 1 to 6, held against 0 signed")


def test_a_tampered_log_is_exit_code_1_online_and_offline(shell: Shell) -> None:
    for name in ("a", "b", "c"):
        shell.said("orgs", "add", name)
    folder = shell.port.folder / "audit"
    (segment,) = folder.glob("audit-*.jsonl")
    whole = segment.read_bytes()
    code, out, err = shell.run("audit", "verify", "--dir", str(folder))
    assert (code, out.splitlines()[0][:23]) == (0, "sound: records 1 to 6, ")
    assert "signatures were not checked" in err
    segment.write_bytes(whole.replace(b"org-added", b"org-edded", 1))
    for words in (["audit", "verify"], ["audit", "verify", "--dir", str(folder)]):
        code, out, _ = shell.run(*words)
        assert code == 1
        assert out.startswith("NOT SOUND at record 1: ")


def test_a_cut_log_is_found_by_the_checkpoints_kept_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving_tenants(tmp_path) as port:
        port.operator.post("/orgs", json={"name": "o"})
    files = ["--dir", str(tmp_path / "audit")]
    files += ["--from-checkpoint", str(tmp_path / "checkpoints.jsonl")]
    files += ["--public-key", str(tmp_path / "sign.key.pub")]
    assert cli.main(["audit", "verify", *files]) == 0
    assert "held against 2 signed checkpoints" in capsys.readouterr().out
    (segment,) = (tmp_path / "audit").glob("audit-*.jsonl")
    lines = segment.read_bytes().splitlines(keepends=True)
    segment.write_bytes(b"".join(lines[:-1]))
    assert cli.main(["audit", "verify", *files]) == 1
    assert "the log ends here; a checkpoint says that it reached 3" in capsys.readouterr().out
    assert cli.main(["audit", "verify", *files[:2]]) == 0, "a chain alone does not show it"


def test_a_checkpoint_file_goes_to_the_gateway_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving_tenants(tmp_path) as port:
        port.operator.post("/orgs", json={"name": "o"})
    kept = tmp_path / "kept.jsonl"
    kept.write_bytes((tmp_path / "checkpoints.jsonl").read_bytes())
    with serving_tenants(tmp_path) as port:
        shell = Shell(port, capsys)
        page = shell.said("audit", "verify", "--from-checkpoint", str(kept))
        assert page.startswith("sound: records 1 to 3")
        kept.write_text(kept.read_text().replace('"seq":"3"', '"seq":"2"'))
        code, out, _ = shell.run("audit", "verify", "--from-checkpoint", str(kept))
        assert (code, "forged" in out) == (1, True)


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
    assert row[:7] == ["support", "live", "acme", "m", "32", "2", "of"]
    assert "public/support: invalidated" in shell.said("public", "withdraw", "support")
    assert shell.json("public", "list")["public"][0]["state"] == "withdrawn"


# --- what goes wrong ----------------------------------------------------------------------------


def test_where_nobody_listens_the_flag_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    assert cli.main(["keys", "list", "--admin-url", url]) == 1
    err = capsys.readouterr().err
    assert (err.count("\n"), "--admin-url" in err, url in err) == (1, True, True)


def test_a_missing_and_a_wrong_key_are_told_apart(shell: Shell) -> None:
    code, _, err = shell.run("keys", "list", key="")
    assert (code, "asks for a key" in err, "--admin-key" in err) == (1, True, True)
    code, _, err = shell.run("keys", "list", key="marked-wrong")
    assert (code, "does not take this key" in err) == (1, True)
    assert "marked-wrong" not in err
    code, _, err = shell.run("keys", "list", key=shell.port.key("acme"))
    assert (code, "has no role for keys.read" in err) == (1, True)


def test_a_gateway_of_one_tenant_says_how_to_switch_on(capsys: pytest.CaptureFixture[str]) -> None:
    with serving("marked-key") as single:
        words = ["keys", "list", "--admin-url", single.url, "--admin-key", "marked-key"]
        assert cli.main(words) == 1
    assert "--auth keys" in capsys.readouterr().err


def test_the_key_comes_from_the_environment_or_a_file_too(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRUNKLINE_ADMIN_API_KEY", OPERATOR_KEY)
    assert shell.said("orgs", "list", key="")
    secret = tmp_path / "operator-key"
    secret.write_text(OPERATOR_KEY + "\n")
    secret.chmod(0o600)
    monkeypatch.setenv("TRUNKLINE_ADMIN_API_KEY", f"@{secret}")
    assert shell.said("orgs", "list", key="")
    monkeypatch.setenv("TRUNKLINE_ADMIN_API_KEY", "wrong")
    assert shell.said("orgs", "list", key=f"@{secret}")
    secret.chmod(0o644)
    code, _, err = shell.run("orgs", "list", key=f"@{secret}")
    assert (code, "chmod 600" in err) == (2, True)


def _server(answer: bytes) -> tuple[str, Callable[[], None]]:
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65_536)
            connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()

    def close() -> None:
        thread.join(10)
        listener.close()

    return f"http://127.0.0.1:{listener.getsockname()[1]}", close


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]",
        b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n\xff\xff\xff\xff\xff\xff\xff\xff\xff",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"",
    ],
)
def test_another_program_at_that_port_is_not_taken_for_a_gateway(
    answer: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    url, close = _server(answer)
    assert cli.main(["keys", "list", "--admin-url", url]) == 1
    close()
    err = capsys.readouterr().err
    assert (err.count("\n"), "--admin-url" in err) == (1, True)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["keys"], ""),
        (["keys", "creat", "--tenant", "a"], "did you mean keys create?"),
        (["keys", "burn"], "the verbs are keys create, keys list, keys revoke"),
        (["keyz"], "did you mean keys?"),
        (["keys", "create"], "--tenant"),
        (["keys", "create", "--tenant", "a", "--role", "root"], "invalid choice: 'root'"),
        (["keys", "create", "--tenant", "a", "--expires", "soon"], "like 30d"),
        (["keys", "create", "--tenant", "a", "--expires", "0d"], "like 30d"),
        (["keys", "create", "--tenant", "a", "--secret", "x"], "is no flag of trunkline keys crea"),
        (["revoke", "tenant/acme"], "--reason"),
        (["revoke"], "SUBJECT"),
        (["audit", "show", "--since", "yesterday"], "is no time"),
        (["audit", "verify", "--dir", "/absent"], "is no folder"),
        (["audit", "verify", "--public-key", "x"], "goes with --dir"),
        (["audit", "verify", "--from-checkpoint", "/absent"], "cannot be read"),
        (["public", "propose", "p"], "--tokens"),
        (["orgs", "policy", "o"], "--shared"),
        (["keys", "list", "--admin-url", "ftp://x"], "does not begin with http"),
        (["keys", "list", "--admin-url", "http://u:p@x"], "scheme, host and port alone"),
        (["keys", "list", "--admin-url", "http://x:99999"], "is no address"),
        (["keys", "list", "--admin-key", "a b"], "no header can carry"),
        (["keys", "list", "--admin-key", "@/absent"], "cannot be read"),
    ],
)
def test_a_mistake_is_exit_code_2_and_says_what_is_right(
    words: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == cli.MISUSED
    assert part in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("[1, 2", None),
        ("1 2 x", "'x' is no token id"),
        ("[-1]", "no token id"),
        ("[1.5]", "no tok"),
    ],
)
def test_token_files_are_read_strictly(
    content: str, part: str | None, shell: Shell, tmp_path: Path
) -> None:
    path = tmp_path / "tokens"
    path.write_text(content)
    words = ["public", "propose", "p", "--tokens", str(path), "--block-tokens", "1"]
    words += ["--model", "m", "--owner", "o", "--audience", "all", "--reason", "r"]
    code, _, err = shell.run(*words)
    assert code == (1 if part is None else 2)
    assert (part or "no organisation 'o'") in err


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("45m", 2_700), ("12h", 43_200), ("30d", 2_592_000)]
)
def test_durations_are_read_with_their_unit(text: str, seconds: int) -> None:
    assert seconds_of(text) == seconds
    assert seconds_of("2w") == 1_209_600


@pytest.mark.parametrize("name", tenant_commands.COMMANDS)
def test_the_help_of_each_verb_teaches_with_examples_that_it_would_take(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([*name.split(), "--help"])
    assert caught.value.code == 0
    page = capsys.readouterr().out
    assert "examples:" in page
    assert "--admin-url" in page
    for example in tenant_commands.COMMANDS[name].examples:
        words = _words_of(example)
        assert words[: len(name.split())] == name.split()
        cli.build_parser(name).read(words[len(name.split()) :])


def _words_of(example: str) -> list[str]:
    """What a shell would hand over of an example."""
    import shlex

    command = example.removeprefix("(umask 077; ").partition(" > ")[0]
    return shlex.split(command)[1:]


def test_a_group_of_verbs_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["keys", "--help"]) == 0
    page = capsys.readouterr().out
    assert "trunkline keys create --tenant acme" in page
    assert cli.main(["keys"]) == cli.MISUSED


def test_what_a_log_holds_does_not_steer_the_terminal(shell: Shell) -> None:
    intent = {"name": "o", "reason": "plain"}
    shell.port.operator.post("/orgs", json=intent, headers={"x-request-id": "\x1b[2J"})
    (segment,) = (shell.port.folder / "audit").glob("audit-*.jsonl")
    segment.write_bytes(segment.read_bytes().replace(b"plain", b"\\u001b[2J"))
    page = shell.said("audit", "show")
    assert "\x1b" not in page
    assert "\\x1b[2J" in page
