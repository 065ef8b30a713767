"""What shells propose when TAB is pressed, asked of the shells themselves."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence

import pytest

from trunkline.cli import VERBS
from trunkline.completion import SHELLS, flags_of, script
from trunkline.leaf import leaves

SUMMARIES = {name: verb.summary for name, verb in VERBS.items()}
ASK_BASH = """
compopt() { :; }
source /dev/stdin <<< "$SCRIPT"
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _trunkline
printf '%s\\n' "${COMPREPLY[@]}"
"""
needs = {
    shell: pytest.mark.skipif(shutil.which(shell) is None, reason=f"apt install {shell}")
    for shell in SHELLS
}


def bash_proposes(*words: str) -> list[str]:
    done = subprocess.run(
        ["bash", "--norc", "-c", ASK_BASH, "trunkline", *words],
        env={**os.environ, "SCRIPT": script("bash", SUMMARIES)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return [line for line in done.stdout.splitlines() if line]


def fish_proposes(line: str) -> list[str]:
    program = script("fish", SUMMARIES) + f"\ncomplete -C '{line}'"
    done = subprocess.run(
        ["fish", "--no-config", "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    return [found.partition("\t")[0] for found in done.stdout.splitlines()]


@needs["bash"]
def test_bash_proposes_each_verb_and_its_second_word() -> None:
    firsts = {verb.partition(" ")[0] for verb in VERBS}
    assert set(bash_proposes("trunkline", "")) == firsts | {"--help", "--version"}
    assert bash_proposes("trunkline", "ser") == ["serve"]
    seconds = {verb.partition(" ")[2] for verb in VERBS if verb.startswith("keys ")}
    assert set(bash_proposes("trunkline", "keys", "")) == seconds
    assert {"export", "public"} <= set(bash_proposes("trunkline", "plan", ""))


@needs["bash"]
def test_bash_proposes_every_setting_as_a_flag_of_serve() -> None:
    proposed = set(bash_proposes("trunkline", "serve", "--"))
    assert {leaf.flag for leaf in leaves()} <= proposed
    assert {"--config", "--print-config", "--no-strict-fields"} <= proposed
    # What is only taken for the sake of habit is not proposed.
    assert not {alias for leaf in leaves() for alias in leaf.flag_aliases} & proposed
    assert bash_proposes("trunkline", "serve", "--admin-p") == ["--admin-port"]
    assert bash_proposes("trunkline", "serve", "--port", "1", "--polic") == ["--policy"]


@needs["bash"]
def test_bash_proposes_the_values_of_a_flag() -> None:
    (policy,) = [leaf for leaf in leaves() if leaf.name == "policy"]
    values = {*policy.setting.choices, *policy.value_aliases}
    assert set(bash_proposes("trunkline", "serve", "--policy", "")) == values
    assert bash_proposes("trunkline", "serve", "--policy", "round") == ["round_robin", "roundrobin"]
    # `--policy=r` comes as three words.
    assert "random" in bash_proposes("trunkline", "serve", "--policy", "=")
    assert bash_proposes("trunkline", "serve", "--policy", "=", "rand") == ["random"]
    assert bash_proposes("trunkline", "serve", "--port", "") == []
    assert set(bash_proposes("trunkline", "completion", "")) >= set(SHELLS)


@needs["bash"]
def test_bash_proposes_files_where_a_file_is_wanted(tmp_path: object) -> None:
    found = bash_proposes("trunkline", "serve", "--config", f"{tmp_path}"[:-1])
    assert f"{tmp_path}" in found
    found = bash_proposes("trunkline", "plan", "export", "--out", f"{tmp_path}"[:-1])
    assert f"{tmp_path}" in found


@needs["fish"]
def test_fish_proposes_verbs_flags_and_values() -> None:
    assert "serve" in fish_proposes("trunkline ")
    assert "create" in fish_proposes("trunkline keys ")
    assert fish_proposes("trunkline serve --polic") == ["--policy"]
    assert "round_robin" in fish_proposes("trunkline serve --policy ")
    assert "--tenant" in fish_proposes("trunkline keys create --")
    assert "--policy" not in fish_proposes("trunkline keys create --")


@needs["zsh"]
@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("trunkline ser", "trunkline serve "),
        ("trunkline serve --polic", "trunkline serve --policy "),
        ("trunkline serve --policy round_", "trunkline serve --policy round_robin "),
        ("trunkline keys cre", "trunkline keys create "),
        ("trunkline keys create --create-t", "trunkline keys create --create-tenant "),
    ],
)
def test_zsh_completes_what_was_begun(typed: str, completed: str) -> None:
    """At a terminal, as zsh answers nowhere else."""
    setup = "autoload -Uz compinit; compinit -D -u; source =(print -r -- $SCRIPT); PS1=; echo up\n"
    screen = _typed(["zsh", "-f", "-i"], setup, b"up\r\n", typed + "\t", completed.encode())
    assert completed.encode() in screen


def _typed(
    command: Sequence[str],
    setup: str,
    ready: bytes,
    typed: str,
    awaited: bytes,
    limit_s: float = 60,
) -> bytes:
    """What a shell shows of `typed`, once it shows `awaited`."""
    child, terminal = pty.fork()
    if child == 0:
        environment = {"PATH": os.environ["PATH"], "TERM": "dumb", "LC_ALL": "C.UTF-8"}
        environment["SCRIPT"] = script("zsh", SUMMARIES)
        os.execvpe(command[0], list(command), environment)
    try:
        _shown(terminal, setup, ready, limit_s)
        return _shown(terminal, typed, awaited, limit_s)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(terminal)


def _shown(terminal: int, typed: str, awaited: bytes, limit_s: float) -> bytes:
    os.write(terminal, typed.encode())
    screen, ends_at = b"", time.monotonic() + limit_s
    while awaited not in screen and time.monotonic() < ends_at:
        if select.select([terminal], [], [], 1.0)[0]:
            screen += os.read(terminal, 65_536)
            screen = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]|\x07", b"", screen)
    return screen


def test_a_script_runs_nothing_and_is_made_without_what_serving_needs() -> None:
    for shell in SHELLS:
        assert "$(trunkline" not in script(shell, SUMMARIES)
    program = (
        "import sys; from trunkline.cli import main\n"
        "assert main(['completion', 'bash']) == 0\n"
        "heavy = {'uvicorn', 'starlette', 'zmq', 'prometheus_client', 'uvloop', 'tokenizers'}\n"
        "print(*sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (0, "")


def test_every_verb_has_its_help_and_flags_with_choices_name_them() -> None:
    for verb in VERBS:
        names = [name for flag in flags_of(verb) for name in flag.names]
        assert "--help" in names
        assert len(names) == len(set(names))
