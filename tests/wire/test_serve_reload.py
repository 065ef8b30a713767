"""Settings that are read again by a gateway that runs: a signal, or `POST /reload`."""

from __future__ import annotations

import os
import pty
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from fleet import Gateway, Processes, processes, until
from tenants import Tenants, tenants

from trunkline.config import Config
from trunkline.seat import CATCH_UP, NOTE_RELOAD, TAKE_SETTINGS

SETTINGS = """
worker_urls = ["{urls}"]
[limits]
max_payload_size = 4000
[observe]
log_level = "info"
"""


@pytest.fixture
def started() -> Iterator[Processes]:
    with processes() as made:
        yield made


class Settings:
    """A file of settings that a test edits, and the gateway that reads it."""

    def __init__(self, folder: Path, text: str) -> None:
        self.path = folder / "trunkline.toml"
        self.write(text)

    def write(self, text: str) -> None:
        self.path.write_text(text, encoding="utf-8")
        self.path.chmod(0o600)

    def edit(self, old: str, new: str) -> None:
        text = self.path.read_text(encoding="utf-8")
        assert old in text
        self.write(text.replace(old, new))


def served(started: Processes, folder: Path, *flags: str, workers: int = 1) -> tuple[Gateway, Any]:
    urls = [worker.url for worker in started.workers(workers, "--profile", "tiny")]
    settings = Settings(folder, SETTINGS.format(urls='", "'.join(urls)))
    words = ("--config", str(settings.path), "--profile", "tiny", *flags)
    return started.gateway([], *words, ready=workers), settings


def size_limit(gateway: Gateway) -> int:
    return gateway.admin("/config").json()["limits"]["max_payload_size"]


def test_a_signal_reads_the_file_again_and_requests_go_by_it(
    started: Processes, tmp_path: Path
) -> None:
    gateway, settings = served(started, tmp_path)
    assert gateway.chat("x" * 5_000).status == 413
    settings.edit("4000", "9000")
    gateway.process.send(signal.SIGHUP)
    until(lambda: size_limit(gateway) == 9_000, "the file was read again")
    assert gateway.chat("x" * 5_000).status == 200
    assert "config.reloaded changed=max_payload_size" in gateway.process.log()
    # What is shown of its ports is where it listens, whatever the settings say.
    assert gateway.admin("/config").json()["listen"]["port"] == gateway.process.port


def test_a_file_with_a_mistake_is_refused_whole_and_the_error_names_key_and_nearest_name(
    started: Processes, tmp_path: Path
) -> None:
    gateway, settings = served(started, tmp_path)
    settings.edit("max_payload_size = 4000", "max_payload_size = 9000\nmax_payload_sise = 1")
    gateway.process.send(signal.SIGHUP)
    until(lambda: "ERROR   config.refused" in gateway.process.log(), "it is in the log")
    assert "did you mean max_payload_size?" in gateway.process.log()
    answer = gateway.admin("/reload", "POST")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "config_refused")
    told = answer.json()["error"]["message"]
    assert "max_payload_sise" in told
    assert "did you mean max_payload_size?" in told
    assert size_limit(gateway) == 4_000
    settings.edit("\nmax_payload_sise = 1", "")
    assert gateway.admin("/reload", "POST").json()["changed"] == ["max_payload_size"]
    assert size_limit(gateway) == 9_000


def test_workers_that_are_not_allowed_are_a_mistake_and_change_nothing(
    started: Processes, tmp_path: Path
) -> None:
    gateway, settings = served(started, tmp_path, "--worker-networks", "127.0.0.0/8")
    settings.edit("worker_urls = [", 'worker_urls = ["http://10.1.2.3:8000", ')
    settings.edit("4000", "9000")
    answer = gateway.admin("/reload", "POST")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "config_refused")
    assert (len(gateway.workers()), size_limit(gateway)) == (1, 4_000)


def test_what_waits_for_a_restart_is_named_and_the_rest_is_done(
    started: Processes, tmp_path: Path
) -> None:
    gateway, settings = served(started, tmp_path)
    settings.edit("[limits]\n", "[routing]\nvirtual_nodes = 64\n[limits]\nmax_headers = 50\n")
    told = gateway.admin("/reload", "POST").json()
    assert told == {"changed": ["max_headers"], "needs_restart": ["virtual_nodes"]}
    assert gateway.admin("/config").json()["routing"]["virtual_nodes"] == 128
    assert "needs_restart=virtual_nodes" in gateway.process.log()
    assert gateway.admin("/reload", "POST").json()["needs_restart"] == ["virtual_nodes"]


def test_workers_come_and_go_with_the_file_and_those_added_by_hand_stay(
    started: Processes, tmp_path: Path
) -> None:
    gateway, settings = served(started, tmp_path)
    (first,) = gateway.workers()
    named, by_hand = started.workers(2, "--profile", "tiny")
    assert gateway.admin("/workers", "POST", json={"url": by_hand.url}).status_code == 202
    settings.edit(f'["http://{first}"]', f'["{named.url}"]')
    assert gateway.admin("/reload", "POST").json()["changed"] == ["worker_urls"]
    until(lambda: set(gateway.workers()) == {named.name, by_hand.name}, "the workers changed")
    gateway.wait_ready(2)
    assert gateway.chat("hello").status == 200


def test_keys_are_exchanged_while_a_stream_runs(started: Processes, tmp_path: Path) -> None:
    client_key, admin_key = tmp_path / "client", tmp_path / "admin"
    for path, text in ((client_key, "first-client-key"), (admin_key, "first-admin-key")):
        path.write_text(text, encoding="utf-8")
        path.chmod(0o600)
    (worker,) = started.workers(1, "--profile", "tiny", "--time-scale", "20")
    settings = Settings(tmp_path, f'worker_urls = ["{worker.url}"]\n')
    keys = ("--api-key", f"@{client_key}", "--admin-api-key", f"@{admin_key}")
    process = started.begin(
        *("serve", "--config", str(settings.path), "--port", "0", "--admin-port", "0"),
        *("--disable-self-test", "--disable-gray-detection", "--queue-target-ms", "0", *keys),
    )
    process.wait_ready()

    def ask(path: str, key: str, method: str = "GET", **more: Any) -> httpx.Response:
        url = process.ready["admin_url"] + path
        return httpx.request(method, url, headers={"authorization": f"Bearer {key}"}, **more)

    def chat(key: str) -> int:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        headers = {"authorization": f"Bearer {key}"}
        return httpx.post(
            f"{process.url}/v1/chat/completions", json=body, headers=headers, timeout=60
        ).status_code

    until(lambda: chat("first-client-key") == 200, "the worker is there")
    body = {"prompt": "go on", "max_tokens": 200, "stream": True}
    headers = {"authorization": "Bearer first-client-key"}
    with httpx.stream(
        "POST", f"{process.url}/v1/completions", json=body, headers=headers, timeout=60
    ) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data:")
        client_key.write_text("second-client-key", encoding="utf-8")
        admin_key.write_text("second-admin-key", encoding="utf-8")
        told = ask("/reload", "first-admin-key", "POST").json()
        assert told["changed"] == ["api_key", "admin_api_key"]
        assert [chat("first-client-key"), chat("second-client-key")] == [401, 200]
        assert ask("/workers", "first-admin-key").status_code == 401
        assert ask("/workers", "second-admin-key").status_code == 200
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert "second-client-key" not in process.log()
    # To ask for no key any more is another gateway: that waits for a restart.
    settings.write(f'worker_urls = ["{worker.url}"]\n[limits]\nmax_headers = 77\n')
    assert ask("/reload", "second-admin-key", "POST").json()["changed"] == ["max_headers"]


def test_all_processes_take_what_one_signal_to_their_parent_says(
    started: Processes, tmp_path: Path
) -> None:
    gateway, settings = served(started, tmp_path, "--processes", "2")
    assert gateway.admin("/reload", "POST").json() == {"changed": [], "needs_restart": []}
    settings.edit("4000", "9000")
    gateway.process.send(signal.SIGHUP)

    def limits() -> set[int]:
        pages = [gateway.admin(f"/config?process={number}").json() for number in (0, 1)]
        return {page["limits"]["max_payload_size"] for page in pages}

    until(lambda: limits() == {9_000}, "both took it")
    # A process that comes later goes by them, too.
    pid = int(gateway.process.log().rpartition("process=1 pid=")[2].split()[0])
    os.kill(pid, signal.SIGKILL)
    until(lambda: gateway.process.log().count("process.serving process=1") == 2, "it is back")
    assert limits() == {9_000}
    settings.edit("max_payload_size", "max_payload_sise")
    answer = gateway.admin("/reload", "POST")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "config_refused")
    assert limits() == {9_000}


@pytest.mark.parametrize("count", [1, 2])
def test_a_reload_is_the_operators_and_a_tenants_key_has_none_of_it(
    started: Processes, tmp_path: Path, count: int
) -> None:
    urls = [worker.url for worker in started.workers(1, "--profile", "tiny")]
    made = tenants(started, urls, tmp_path, "--profile", "tiny", "--processes", str(count))
    acme = made.caller("acme").headers()
    assert made.gateway.admin("/reload", "POST", headers=acme).status_code == 403
    for path in (TAKE_SETTINGS, CATCH_UP, NOTE_RELOAD):  # what a parent alone may ask of a process
        body = msgspec.json.encode(Config())
        answer = made.gateway.admin(path, "POST", headers=acme, content=body)
        assert answer.status_code == 404
    assert "config.reloaded" not in made.gateway.process.log()
    assert made.gateway.admin("/reload", "POST").status_code == 200


@pytest.mark.parametrize("count", [1, 2])
def test_reloads_are_in_the_audit_log_with_who_wanted_them_and_names_alone(
    started: Processes, tmp_path: Path, count: int
) -> None:
    (worker,) = started.workers(1, "--profile", "tiny")
    text = "[limits]\nmax_payload_size = 4321\n[routing]\nvirtual_nodes = 17\n"
    settings = Settings(tmp_path, text)
    state = ("--state-dir", str(tmp_path / "state"), "--config", str(settings.path))
    gateway = Tenants(
        started.gateway([worker.url], *state, "--profile", "tiny", "--processes", str(count))
    ).gateway

    def records() -> list[dict[str, Any]]:
        """The oldest first."""
        page = gateway.admin("/audit?limit=1000").json()["records"]
        found = [one for one in page if one["action"].endswith("config.reload")]
        return sorted(found, key=lambda one: one["seq"])

    settings.edit("4321", "8765")
    settings.edit("17", "18")
    headers = {"x-request-id": "why"}
    assert gateway.admin("/reload", "POST", headers=headers).status_code == 200
    settings.edit("8765", "9753")
    gateway.process.send(signal.SIGHUP)
    until(lambda: len(records()) == 4, "the signal is on record")
    settings.edit("max_payload_size", "max_payload_sise")
    assert gateway.admin("/reload", "POST").status_code == 409
    until(lambda: len(records()) == 6, "that it was refused is on record")
    found = records()
    assert [one["kind"] for one in found] == ["INTENT", "OUTCOME"] * 3
    assert [one["action"] for one in found] == ["wanted.config.reload", "config.reload"] * 3
    actors = [one["actor"] for one in found]
    assert actors == ["operator"] * 2 + ["SIGHUP"] * 2 + ["operator"] * 2
    results = [(one["result"], one["reason"]) for one in found[1::2]]
    waits = "; waits for a restart: virtual_nodes"
    assert results == [
        ("done", f"changed: max_payload_size{waits}"),
        ("done", f"changed: max_payload_size{waits}"),
        ("refused", "config_error"),
    ]
    assert [one["request_id"] for one in found[:2]] == ["why", "why"]
    said = [(one["action"], one["reason"], one["counts"], one["proof"]) for one in found]
    assert not any(value in str(said) for value in ("8765", "9753"))  # hashes may have any digits


@pytest.mark.parametrize("count", [1, 2])
def test_a_gateway_whose_terminal_is_closed_ends_in_order(count: int) -> None:
    child, terminal = pty.fork()
    if child == 0:
        words = ("serve", "--port", "0", "--admin-port", "0", "--auth", "off")
        more = ("--processes", str(count))
        os.execv(sys.executable, [sys.executable, "-m", "trunkline", *words, *more])
    said = b""
    while b"admin_url" not in said:
        said += os.read(terminal, 65_536)
    os.kill(child, signal.SIGHUP)
    while b"config.reloaded" not in said:
        said += os.read(terminal, 65_536)
    os.close(terminal)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_each_part_of_a_gateway_takes_what_is_live_of_it(
    started: Processes, tmp_path: Path
) -> None:
    gateway, settings = served(started, tmp_path)
    more = "max_json_depth = {depth}\n[health]\nhealth_check_endpoint = '{health}'\n"
    more += "[upstream]\nfirst_byte_timeout_ms = {first_ms}\n"
    more += "[listen]\ncors_allowed_origins = ['{origin}']\nrequest_id_headers = ['{name}']\n"
    plain: dict[str, Any] = {"depth": 64, "health": "/health", "first_ms": 600_000}
    plain |= {"origin": "https://a.example", "name": "x-request-id"}
    whole = settings.path.read_text(encoding="utf-8")

    def reload(**changed: Any) -> None:
        text = more.format(**(plain | changed))
        settings.write(whole.replace("4000\n", f"4000\n{text}"))
        assert gateway.admin("/reload", "POST").status_code == 200

    deep = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}
    headers = {"origin": "https://a.example", "x-other-id": "mine"}

    def ask() -> httpx.Response:
        return gateway.post("/v1/chat/completions", deep, headers).response

    reload()
    first = ask()
    assert (first.status_code, "access-control-allow-origin" in first.headers) == (200, True)
    assert first.headers["x-request-id"] != "mine"
    reload(depth=4, origin="https://b.example", name="x-other-id")
    second = ask()
    assert second.json()["error"]["code"] in ("invalid_json", "too_deep"), second.text
    assert "access-control-allow-origin" not in second.headers
    assert second.headers["x-request-id"] == "mine"
    (name,) = gateway.workers()
    reload(health="/there-is-no-such-path")
    until(lambda: gateway.workers()[name]["state"] == "unhealthy", "it is probed elsewhere")
    reload()
    gateway.wait_ready(1)
    assert ask().status_code == 200
    slow = started.worker("--profile", "tiny", "--time-scale", "1000")
    settings.write(whole.replace(name, slow.name))
    whole = settings.path.read_text(encoding="utf-8")
    reload(first_ms=100)
    gateway.wait_ready(1)
    assert ask().json()["error"]["code"] in ("worker_timeout", "worker_late")


def test_tenants_rates_and_paths_are_those_of_the_file(started: Processes, tmp_path: Path) -> None:
    (worker,) = started.workers(1, "--profile", "tiny")
    settings = Settings(tmp_path, "[limits]\nmax_headers = 90\n")
    state = ("--state-dir", str(tmp_path / "state"), "--config", str(settings.path))
    made = Tenants(started.gateway([worker.url], *state, "--profile", "tiny"))
    caller = made.caller("acme")
    gateway = made.gateway

    def is_refused_by_the_gateway() -> bool:
        """And is not the worker's own 404, which has no such header."""
        answer = gateway.post("/v1/moderations", {"input": "x"}, caller.headers())
        return "x-router-error-code" in answer.response.headers

    def chats() -> int:
        return gateway.chat("some words " * 40, caller.headers()).status

    assert is_refused_by_the_gateway()
    assert [chats() for _ in range(4)] == [200] * 4
    settings.write(
        "[limits]\nrate_limit_tokens_per_second = 10.0\n"
        "[auth]\ntenant_paths = ['/v1/moderations']\n"
    )
    told = gateway.admin("/reload", "POST").json()["changed"]
    assert set(told) == {"max_headers", "rate_limit_tokens_per_second", "tenant_paths"}
    assert 429 in [chats() for _ in range(20)]
    settings.edit("rate_limit_tokens_per_second = 10.0", "rate_limit_tokens_per_second = 0.0")
    assert gateway.admin("/reload", "POST").status_code == 200
    assert [chats() for _ in range(4)] == [200] * 4
    assert not is_refused_by_the_gateway()
