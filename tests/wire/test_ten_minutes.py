"""The script that takes a newcomer to the first routed request, and README, which says the same."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from loopback import free_port

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "examples" / "ten_minutes.sh"
TITLE = "## In your own fleet, in ten minutes"
LIMIT_S = 300.0
DEFAULT_PORTS = {"PORT": "30000", "ADMIN_PORT": "29000", "WORKER_PORTS": "8000 8001"}


def run(folder: Path, **given: str) -> subprocess.CompletedProcess[str]:
    environment = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}
    environment |= {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "TMPDIR": str(folder),
    }
    return subprocess.run(
        [str(SCRIPT)],
        env=environment | given,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def is_listening(port: str) -> bool:
    with socket.socket() as other:
        return other.connect_ex(("127.0.0.1", int(port))) == 0


def commands_said(out: str) -> list[str]:
    return [line.removeprefix("$ ") for line in out.splitlines() if line.startswith("$ ")]


def commands_of_readme() -> list[str]:
    section = (REPOSITORY / "README.md").read_text("utf-8").partition(TITLE)[2]
    block = re.search(r"```sh\n(.*?)```", section, re.DOTALL)
    assert block is not None, f"README has no commands under {TITLE!r}"
    joined = re.sub(r" *\\\n *", " ", block[1])
    lines = (re.sub(r"\s+# .*$", "", line) for line in joined.splitlines())
    return [line for line in lines if line]


@pytest.fixture
def ports() -> dict[str, str]:
    found = {name: str(free_port()) for name in ("PORT", "ADMIN_PORT")}
    return found | {"WORKER_PORTS": f"{free_port()} {free_port()}"}


def test_the_script_leads_to_a_routed_and_explained_request_by_the_commands_of_readme(
    tmp_path: Path, ports: dict[str, str]
) -> None:
    done = run(tmp_path, **ports)
    assert done.returncode == 0, done.stderr + done.stdout
    assert '"cached_tokens":32' in done.stdout, "the second answer used what the first had left"
    assert "cache-hit" in done.stdout
    assert "32 tokens reused of 32 predicted" in done.stdout
    (found,) = re.findall(r"^request (\w+) went to", done.stdout, re.MULTILINE)

    text = "\n".join(dict.fromkeys(commands_said(done.stdout)))  # what is asked twice is one line
    text = text.replace(f" --port {ports['PORT']} --admin-port {ports['ADMIN_PORT']}", "")
    text = text.replace(f" --admin-url http://127.0.0.1:{ports['ADMIN_PORT']}", "")
    for name, default in DEFAULT_PORTS.items():
        for given, usual in zip(ports[name].split(), default.split(), strict=True):
            text = text.replace(given, usual)
    assert text.replace(found, "REQUEST_ID").splitlines() == commands_of_readme()

    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
    left = [port for name in ports for port in ports[name].split() if is_listening(port)]
    assert left == [], "nothing that it started runs on"


def test_workers_that_do_not_answer_are_named_with_what_to_look_at(
    tmp_path: Path, ports: dict[str, str]
) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    done = run(tmp_path, WORKERS=url, **ports)
    assert done.returncode == 1
    assert f"{url}/health does not answer; is the engine up, and reachable" in done.stderr


@pytest.mark.parametrize("name", list(DEFAULT_PORTS))
def test_what_answers_at_a_port_already_is_not_taken_for_its_own_and_nothing_is_started(
    tmp_path: Path, ports: dict[str, str], name: str
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", int(ports[name].split()[-1])))
        taken.listen()
        done = run(tmp_path, **ports)
    assert done.returncode == 1
    assert f"port {ports[name].split()[-1]} on 127.0.0.1 is in use" in done.stderr
    assert "PORT and ADMIN_PORT take others" in done.stderr
    assert commands_said(done.stdout) == []
