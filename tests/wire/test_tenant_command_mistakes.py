"""The verbs about tenants where something is wrong: each says what is right, in one line."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from admin_port import serving
from shell import Shell
from tenant_port import OPERATOR_KEY, serving_tenants

from trunkline import cli, tenant_commands
from trunkline.gateway import answers, routes


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Shell]:
    with serving_tenants(tmp_path) as port:
        yield Shell(port, capsys)


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
    assert "not its admin key" in err
    code, _, err = shell.run("keys", "list", key="pk_0123456789abcdef_" + "a" * 43)
    assert (code, "unknown, expired or revoked" in err, "aaa" in err) == (1, True, False)
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
    assert "from TRUNKLINE_ADMIN_API_KEY" in shell.run("orgs", "list", key="")[2]
    assert shell.said("orgs", "list", key=f"@{secret}")
    secret.chmod(0o644)
    code, _, err = shell.run("orgs", "list", key=f"@{secret}")
    assert (code, "chmod 600" in err) == (2, True)


def test_errors_are_json_on_standard_output_where_json_was_asked_for(shell: Shell) -> None:
    shell.said("orgs", "add", "acme")
    code, out, err = shell.run("orgs", "add", "acme", "--json")
    assert code == 1
    assert json.loads(out)["error"]["code"] == "change_refused", "the gateway's own words"
    assert err.startswith("trunkline: ")
    assert err.count("\n") == 1
    code, out, _ = shell.run("orgs", "list", "--json", key="wrong")
    assert (code, json.loads(out)["error"]["code"]) == (1, "unauthorized")
    code, out, _ = shell.run("revoke", "acme", "--reason", "r", "--json")
    assert (code, json.loads(out)["error"]["code"]) == (cli.MISUSED, "config_error")


def test_errors_of_files_are_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["audit", "verify", "--dir", "/absent", "--json"]) == cli.MISUSED
    out, err = capsys.readouterr()
    assert json.loads(out)["error"]["code"] == "config_error"
    assert err == "trunkline: --dir /absent is no folder\n"


def test_the_client_port_is_recognised(capsys: pytest.CaptureFixture[str]) -> None:
    body = answers.refused(routes.unknown_path(b"/keys"), "request-1").body
    head = f"HTTP/1.1 404 Not Found\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    url, close = _server(head + body)
    assert cli.main(["keys", "list", "--admin-url", url]) == 1
    close()
    err = capsys.readouterr().err
    assert f"{url} is the client port" in err
    assert "--admin-url" in err


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
        thread.join(60)
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
        (["tenants", "delete", "acme"], "trunkline revoke tenant/NAME --reason TEXT"),
        (["tenants", "delete"], "the verbs are tenants list, tenants add, tenants policy"),
        (["keys", "rm", "x"], "trunkline keys revoke ID"),
        (["keys", "list", "--tenant", "Acme Corp"], "did you mean acme-corp?"),
        (["keys", "create", "--tenant", "a", "--expires", "11y"], "at most 3660d"),
        (["keys", "create", "--tenant", "a", "--expires", "2001-01-31"], "is over already"),
        (["tenants", "add", "tenant/acme"], "did you mean acme?"),
        (["tenants", "policy", "a", "--weight", "heavy"], "--weight 'heavy' is no number"),
        (["tenants", "policy", "a", "--weight", "nan"], "is not above 0 and at most 1000"),
        (["tenants", "policy", "a", "--weight", "none"], "takes a number, not none"),
        (["tenants", "policy", "a", "--tokens-per-s", "-1"], "is not above 0"),
        (["tenants", "policy", "a", "--cache-cap-bytes", "10G"], "10GB or 10GiB"),
        (["tenants", "policy", "a", "--cache-cap-bytes", "much"], "a size like 10GB, 512MiB"),
        (["tenants", "policy", "a", "--reason", "r"], "--reason alone changes nothing"),
        (["keys", "revoke", "laptop"], "16 hex digits"),
        (["enable", "tenants/acme"], "did you mean tenant/acme?"),
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
