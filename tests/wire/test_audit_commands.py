"""The verbs about the audit log, against a real admin port and on files of a real log."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from shell import Shell
from tenant_port import serving_tenants

from trunkline import cli


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Shell]:
    with serving_tenants(tmp_path) as port:
        yield Shell(port, capsys)


def test_the_audit_log_is_shown_and_verified(shell: Shell) -> None:
    for name in ("a", "b", "c"):
        shell.said("orgs", "add", name, "--reason", f"why-{name}")
    page = shell.said("audit", "show", "--kind", "policy").splitlines()
    assert [line.split()[0] for line in page] == ["SEQ", "2", "4", "6"]
    assert page[1].split()[2:6] == ["POLICY", "registry.org-added", "org/a", "operator"]
    assert page[3].endswith("why-c")
    code, out, err = shell.run("audit", "show", "--after", "1", "--limit", "2")
    assert (code, len(out.splitlines()), err) == (0, 3, "more follow: --after 4\n")
    assert "wanted." not in out
    every = shell.said("audit", "show", "--all")
    assert every.count("wanted.org-added") == 3
    (row,) = shell.said("audit", "show", "--subject", "org/b").splitlines()[1:]
    assert row.split()[:5:4] == ["4", "org/b"]
    code, _, err = shell.run("audit", "show", "--subject", "org/bb")
    assert (code, "org 'bb'" in err or "bb" in err) == (1, True)
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
    assert "signed" not in out, "nobody looked at a signature"
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
    page = capsys.readouterr().out
    assert page.startswith("sound up to its end, record 2, held against 0 signed checkpoints\n")
    assert "1 checkpoint is newer than this copy of the log: copy the checkpoints first" in page
    assert "faulty" not in page
    assert "the log ends here; a checkpoint says that it reached 3" in page
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


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """What a gateway left behind: a log of two records and a checkpoint, which is kept as well."""
    with serving_tenants(tmp_path) as port:
        port.operator.post("/orgs", json={"name": "o"})
    return tmp_path


def verified(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> tuple[int, str]:
    code = cli.main(["audit", "verify", "--dir", str(folder), *words])
    out, err = capsys.readouterr()
    return code, out + err


def test_two_checkpoints_that_contradict_one_another_are_a_fault_wherever_they_stand(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = files / "checkpoints.jsonl"
    (true,) = kept.read_text().splitlines()
    lie = json.dumps({**json.loads(true), "hash": "00" * 32})
    given = ["--from-checkpoint", str(kept)]
    for lines in ([lie, true], [true, lie], [true, lie, true]):
        kept.write_text("".join(f"{line}\n" for line in lines))
        code, page = verified(capsys, files / "audit", *given)
        assert (code, "NOT SOUND at record 3: two kept checkpoints" in page) == (1, True), page


def test_a_wrong_key_a_private_key_and_no_key_are_said_to_be(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = files / "other.pub"
    other.write_text("11" * 32 + "\n")
    given = ["--from-checkpoint", str(files / "checkpoints.jsonl")]
    own = (files / "sign.key.pub").read_text()
    code, page = verified(capsys, files / "audit", *given, "--public-key", str(other))
    assert code == 1
    assert f"signed by another key ({own[:4]}...) than given (1111...)" in page
    moved = files / "mistaken.key"
    moved.write_bytes((files / "sign.key").read_bytes())
    for path in (files / "sign.key", moved):
        code, page = verified(capsys, files / "audit", *given, "--public-key", str(path))
        assert (code, "holds the private key" in page) == (cli.MISUSED, True), page
    beside = ["--public-key", str(files / "sign.key")]
    assert "holds the private key" in verified(capsys, files / "audit", *beside)[1], "by its half"
    code, page = verified(capsys, files / "audit", *given)
    assert code == 0
    assert "2 checkpoints, whose signatures nobody checked" in page
    assert "signed" not in page
    code, page = verified(capsys, files / "audit", *given, "--json")
    assert json.loads(page.partition("signatures were not")[0])["signatures_checked"] is False


def test_a_state_folder_in_place_of_its_log_is_told_from_an_empty_one(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, page = verified(capsys, files)
    assert (code, f"give {files / 'audit'}" in page) == (cli.MISUSED, True)
    (files / "empty").mkdir()
    code, page = verified(capsys, files / "empty")
    assert (code, "holds no audit log" in page) == (cli.MISUSED, True)


def test_what_a_log_holds_does_not_steer_the_terminal(shell: Shell) -> None:
    intent = {"name": "o", "reason": "plain"}
    shell.port.operator.post("/orgs", json=intent, headers={"x-request-id": "\x1b[2J"})
    (segment,) = (shell.port.folder / "audit").glob("audit-*.jsonl")
    segment.write_bytes(segment.read_bytes().replace(b"plain", b"\\u001b[2J"))
    page = shell.said("audit", "show")
    assert "\x1b" not in page
    assert "\\x1b[2J" in page
