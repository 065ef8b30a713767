"""The command line: help that teaches, errors of one line, exit codes that scripts can trust."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from trunkline import cli, reference
from trunkline.errors import ConfigError, NoWorker, TraceError
from trunkline.settings import MAX_REFUSALS

HELP_CPU_BUDGET_S = 0.3
"""Some four times what it takes; that nothing heavy is imported is the sharper test."""


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == cli.OK
    page = capsys.readouterr().out
    for name in cli.VERBS:
        assert f"\n  {name} " in page


def test_no_verb_shows_the_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == cli.MISUSED
    assert "verbs:" in capsys.readouterr().out


def test_help_of_serve_ends_with_examples_and_shows_defaults_with_units(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["serve", "--help"])
    assert caught.value.code == 0
    page = " ".join(capsys.readouterr().out.split())
    assert "[8388608 bytes]" in page
    assert "[1000 ms]" in page
    assert "also --prometheus-port" in page
    assert "roundrobin" in page
    assert page.index("examples:") > page.index("--log-format")
    assert page.startswith("usage: trunkline serve [--worker-urls URL ...] [options]")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["serv"], "did you mean serve?"),
        (["conquer"], "the verbs are serve"),
        (["serve", "--porst", "1"], "did you mean --port?"),
        (["serve", "--porst", "1", "--hots=a"], "nor is any of these known: --hots"),
        (["version", *["--x"] * (cli.MAX_NAMED + 9)], "known: --x, --x, --x, --x, --x, --x, --x\n"),
        (["serve", "--port"], "expected one argument"),
        (["serve", "--port", "x"], "is not a whole number"),
        (["serve", "extra"], "one word too many"),
        (["serve", "--config", "/absent.toml"], "cannot be read"),
        (["serve", "--cache-threshold", "0.5"], "has no thresholds"),
        (["version", "--loud"], "see trunkline version --help"),
        (["simulate", "W1", "--loud", "2"], "--loud is no flag of trunkline simulate; did you"),
        (["replay", "--prometheus-port", "1"], "see trunkline replay --help"),
        (["replay", "--policies", "cache_awar"], "no policy 'cache_awar'; did you mean cache_awa"),
        (["replay", "--policies", "clever"], "no policy 'clever'; known are cache_aware, round_"),
        (["replay", "W99"], "known are W1, W2"),
        (["docs", "--out", "/absent"], "is no folder"),
    ],
)
def test_a_mistake_is_one_line_on_stderr_and_exit_code_2(
    words: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == cli.MISUSED
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("trunkline: ")
    assert err.count("\n") == 1
    assert part in err


def test_a_mistake_in_a_settings_file_says_who_shows_all_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "my.toml"
    file.write_text("[listen]\nport = 'x'\nhosts = 'y'\n")
    assert cli.main(["serve", "--print-config", "--config", str(file)]) == cli.MISUSED
    assert capsys.readouterr().err.endswith(f"`trunkline doctor --config {file}` shows all\n")


def test_all_that_is_wrong_with_the_settings_is_named_a_line_each_up_to_a_bound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "my.toml"
    file.write_text("[listen]\nport = 'x'\nhosts = 'y'\n[limits]\nmax_headers = 0\n")
    monkeypatch.setenv("TRUNKLINE_SEEDS", "7")
    monkeypatch.setenv("TRUNKLINE_LOG_LEVEL", "loud")
    words = ["serve", "--print-config", "--config", str(file), "--processes", "0"]
    assert cli.main(words) == cli.MISUSED
    *lines, last = capsys.readouterr().err.splitlines()
    parts = ["listen.port", "hosts", "limits.max_headers", "log_level", "SEEDS", "listen.processes"]
    assert [part in line for part, line in zip(parts, lines, strict=True)] == [True] * len(parts)
    assert all(line.startswith("trunkline: ") for line in lines)
    assert last == f"trunkline: `trunkline doctor --config {file}` shows all"
    many = "".join(f"unknown_{number} = 1\n" for number in range(MAX_REFUSALS + 4))
    file.write_text(f"[listen]\n{many}")
    assert cli.main(["serve", "--print-config", "--config", str(file)]) == cli.MISUSED
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == MAX_REFUSALS + 2
    assert lines[-2] == "trunkline: and 6 more"


def test_what_contradicts_itself_is_named_whole_too(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--port", "7", "--admin-port", "7", "--auth", "off", "--api-key", "k"]
    assert cli.main(["serve", "--print-config", *words]) == cli.MISUSED
    lines = capsys.readouterr().err.splitlines()
    assert ["listen.admin_port" in lines[0], "auth.auth" in lines[1]] == [True, True]


def test_version_says_which_core_is_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == cli.OK
    line = capsys.readouterr().out
    assert line.startswith("trunkline ")
    assert "core" in line


def test_print_config_shows_the_source_of_each_setting(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRUNKLINE_SEED", "7")
    words = ["serve", "--print-config", "--port", "8080", "--api-key", "marked-secret"]
    assert cli.main(words) == cli.OK
    page = capsys.readouterr().out
    assert "port = 8080  # flag --port" in page
    assert "seed = 7  # environment TRUNKLINE_SEED" in page
    assert "marked-secret" not in page


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module that stands for the rest of the program, behind the verb `worker`."""
    module = ModuleType("standin")

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--port", type=int)

    module.add_arguments = add_arguments  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "standin", module)
    standin = cli.Verb(
        summary="", run="standin:run", options="standin:add_arguments", examples=("x",)
    )
    monkeypatch.setattr(cli, "VERBS", {"worker": standin})
    return module


def test_a_verb_gets_its_arguments_and_gives_the_exit_code(verb: ModuleType) -> None:
    verb.run = lambda arguments: arguments.port  # type: ignore[attr-defined]
    assert cli.main(["worker", "--port", "1"]) == 1
    assert cli.main(["worker", "--port", "0"]) == 0


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("listen.port is wrong"), 2),
        (TraceError("trace.jsonl line 3: no timestamp"), 2),
        (OSError(98, "Address already in use"), 2),
        (NoWorker("none\nat all"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_each_kind_of_error_has_its_exit_code(
    error: BaseException, code: int, verb: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(_arguments: argparse.Namespace) -> int:
        raise error

    verb.run = run  # type: ignore[attr-defined]
    assert cli.main(["worker"]) == code
    assert capsys.readouterr().err.count("\n") == (code != 130)


def test_a_bug_keeps_its_traceback(verb: ModuleType) -> None:
    def run(_arguments: argparse.Namespace) -> int:
        raise AssertionError("lease went backwards")

    verb.run = run  # type: ignore[attr-defined]
    with pytest.raises(AssertionError):
        cli.main(["worker"])


def test_docs_writes_the_page_and_check_tells_when_it_is_stale(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path)
    assert cli.main(["docs", "--check", "--out", folder]) == cli.FAILED
    assert "run `trunkline docs`" in capsys.readouterr().err
    assert cli.main(["docs", "--out", folder]) == cli.OK
    assert (tmp_path / "configuration.md").read_text(encoding="utf-8") == reference.page()
    assert cli.main(["docs", "--check", "--out", folder]) == cli.OK


def test_the_module_runs_as_a_program_and_help_is_cheap() -> None:
    program = (
        "import sys, time; from trunkline.cli import main\n"
        "try: main(['serve', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'uvicorn', 'starlette', 'msgspec', 'zmq', 'prometheus_client', 'asyncio'}\n"
        "print(time.process_time(), *sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    # The least of three: another process on the machine may slow one of them.
    runs = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        for _ in range(3)
    ]
    words = [run.stderr.split() for run in runs]
    assert all(len(line) == 1 for line in words), words[0]
    assert min(float(line[0]) for line in words) < HELP_CPU_BUDGET_S

    done = subprocess.run([sys.executable, "-m", "trunkline", "nonsense"], capture_output=True)
    assert done.returncode == 2


def test_a_reader_that_leaves_early_ends_the_program_quietly() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "trunkline", "serve", "--print-config"]
    buffered = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, env=buffered)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")
