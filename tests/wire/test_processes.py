"""`trunkline serve --processes N`: one command, one port, one admin port, as real processes."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from fleet import WAIT_S, Gateway, Process, Processes, free_port, processes, until
from tenants import Caller, Tenants, tenants

from trunkline.seat import CATCH_UP

TRIES = 24
"""Connections by which each of two processes is surely met: the kernel draws one for each."""
PROMPT = "all of them know this one " * 12


@pytest.fixture
def started() -> Iterator[Processes]:
    with processes() as made:
        yield made


def two(started: Processes, *flags: str, workers: int = 1, scale: float = 1) -> Gateway:
    """Two processes of one tenant."""
    slow = ("--profile", "tiny", "--time-scale", str(scale))
    urls = [worker.url for worker in started.workers(workers, *slow)]
    return started.gateway(urls, "--processes", "2", "--profile", "tiny", *flags)


def two_with_tenants(started: Processes, folder: Path, *flags: str) -> Tenants:
    urls = [worker.url for worker in started.workers(1, "--profile", "tiny")]
    made = tenants(started, urls, folder, "--profile", "tiny", "--processes", "2", *flags)
    until(lambda: reusing(made.gateway) == 2, "both processes have a lease")
    return made


def reusing(gateway: Gateway) -> int:
    page = gateway.admin("/metrics").text.splitlines()
    lines = [line for line in page if line.startswith("trunkline_gateway_lease_seconds{")]
    return sum(float(line.rpartition(" ")[2]) > 0.0 for line in lines)


def pids(process: Process) -> dict[int, int]:
    """Of the gateways that serve, or did last, by their number."""
    found = re.findall(r"process\.serving process=(\d+) pid=(\d+)", process.log())
    return {int(number): int(pid) for number, pid in found}


def is_refused(gateway: Gateway) -> bool:
    try:
        httpx.get(f"{gateway.url}/health", timeout=WAIT_S)
    except httpx.ConnectError:
        return True
    except httpx.TransportError:
        pass
    return False


def state_of(pid: int) -> str:
    """As the kernel has it; empty where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()[0]
    except OSError:
        return ""


def is_alive(pid: int) -> bool:
    return state_of(pid) not in ("", "Z")


def asked_anew(gateway: Gateway, body: dict[str, object], key: str = "") -> httpx.Response:
    """Over a connection of its own; again where that was reset, as clients do."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    for _ in range(3):
        try:
            return httpx.post(
                f"{gateway.url}/v1/completions", json=body, headers=headers, timeout=WAIT_S
            )
        except (httpx.ReadError, httpx.RemoteProtocolError, httpx.WriteError):
            continue  # a refused connection is not among them
    raise AssertionError("reset three times")


def statuses(caller: Caller, count: int = TRIES) -> set[int]:
    body: dict[str, object] = {"prompt": "x", "max_tokens": 1}
    return {asked_anew(caller.gateway, body, caller.key).status_code for _ in range(count)}


def test_each_process_serves_and_what_one_cached_the_other_finds(started: Processes) -> None:
    gateway = two(started, workers=2)
    body = {"prompt": PROMPT, "max_tokens": 1}
    answers = [asked_anew(gateway, dict(body)) for _ in range(TRIES)]
    assert {answer.status_code for answer in answers} == {200}
    served = [gateway.metric("requests_total", process=number) for number in "01"]
    assert sum(served) == TRIES
    assert min(served) > 0
    assert len({answer.headers["x-trunkline-decision"].split("worker=")[1].split(";")[0]
                for answer in answers}) == 1, "both have the same key for it"  # fmt: skip
    assert gateway.metric("processes_serving") == 2

    found = gateway.admin("/decisions?limit=100").json()["decisions"]
    assert len(found) == TRIES
    assert {row["process"] for row in found} == {0, 1}
    for number in (0, 1):
        mine = gateway.admin(f"/decisions?process={number}").json()["decisions"]
        assert len(mine) == served[number]
        one = gateway.admin(f"/decisions/{mine[0]['request_id']}")
        assert one.json()["request_id"] == mine[0]["request_id"]
    assert gateway.admin("/decisions/nobody").status_code == 404
    assert gateway.admin("/config").json()["listen"]["processes"] == 2
    assert gateway.admin("/config").json()["listen"]["admin_port"] == int(
        gateway.admin_url.rpartition(":")[2]
    )


def test_a_killed_process_is_started_again_and_no_new_request_fails(started: Processes) -> None:
    gateway = two(started, workers=2)
    before = pids(gateway.process)
    added = started.worker("--profile", "tiny")
    assert gateway.admin("/workers", "POST", json={"url": added.url}).status_code == 202
    gone = next(name for name in gateway.workers() if name != added.name)
    assert gateway.admin(f"/workers/{gone}", "DELETE").status_code == 202
    gateway.wait_ready(2)

    signal_to(before[1], signal.SIGKILL)
    asked = 0
    while gateway.metric("process_restarts_total") < 1 or gateway.metric("processes_serving") < 2:
        assert asked_anew(gateway, {"prompt": f"p{asked}", "max_tokens": 1}).status_code == 200
        asked += 1
    for number in range(TRIES):
        answer = asked_anew(gateway, {"prompt": f"q{number}", "max_tokens": 1})
        assert answer.status_code == 200, answer.text
    assert gateway.metric("process_restarts_total") == 1
    assert pids(gateway.process)[1] != before[1]
    assert pids(gateway.process)[0] == before[0]
    assert "process.ended" in gateway.process.log()
    named = [gateway.admin(f"/workers?process={number}").json()["workers"] for number in (0, 1)]
    seen = [{row["worker"] for row in rows} for rows in named]
    assert seen[0] == seen[1], "the new one knows what was changed"
    assert added.name in seen[1]
    assert gone not in seen[1]


def signal_to(pid: int, number: signal.Signals) -> None:
    os.kill(pid, number)


@pytest.mark.nightly
def test_a_process_that_stands_still_is_left_out_then_killed_and_started_again(
    started: Processes,
) -> None:
    gateway = two(started)
    before = pids(gateway.process)
    signal_to(before[1], signal.SIGSTOP)
    until(lambda: state_of(before[1]) == "T", "it stands still")  # no child of ours to wait for
    rows = gateway.workers().values()
    assert [seen["process"] for row in rows for seen in row["detail"]["processes"]] == [0]
    until(lambda: "process.hung" in gateway.process.log(), "it is noticed")
    until(lambda: gateway.metric("process_restarts_total") == 1, "it is killed")
    until(lambda: gateway.metric("processes_serving") == 2, "it is back")
    assert pids(gateway.process)[0] == before[0]
    for number in range(TRIES):
        answer = asked_anew(gateway, {"prompt": f"p{number}", "max_tokens": 1})
        assert answer.status_code == 200


def test_a_key_is_known_and_a_revocation_in_force_at_all_processes_when_it_is_answered(
    started: Processes, tmp_path: Path
) -> None:
    made = two_with_tenants(started, tmp_path)
    ann = made.caller("acme0", "ann")
    for number in range(3):
        ann = ann if number == 0 else made.caller(f"acme{number}", "ann")
        assert statuses(ann) == {200}
        receipt = made.raised("revoke", f"tenant/acme{number}")
        assert statuses(ann) == {403}
        assert any(life.startswith("gateway/") for life in receipt["acked"]), receipt
        assert receipt["fenced"] == []
        made.enable(f"tenant/acme{number}")
        assert statuses(ann) == {200}
    listed = made.gateway.admin("/revocations").json()["revocations"]
    assert [row["rev"] for row in listed] == sorted((row["rev"] for row in listed), reverse=True)
    assert made.gateway.admin(f"/revocations/{listed[0]['rev']}").status_code == 200
    assert made.gateway.admin("/audit/verify").status_code == 200
    key = {"authorization": f"Bearer {ann.key}"}
    assert made.gateway.admin("/workers", headers=key).status_code == 403


@pytest.mark.parametrize("is_hurried", [False, True], ids=["once", "twice"])
def test_sigterm_lets_the_streams_of_all_processes_end_and_a_second_one_breaks_them_off(
    started: Processes, is_hurried: bool
) -> None:
    gateway = two(started)
    count, begun = 8, list[int]()
    tokens = 7_000 if is_hurried else 600

    def stream(number: int) -> str:
        body = {"prompt": f"s{number}", "max_tokens": tokens, "stream": True}
        with (
            httpx.Client(timeout=WAIT_S) as client,
            client.stream("POST", f"{gateway.url}/v1/completions", json=body) as answer,
        ):
            parts = answer.iter_text()
            text = next(parts)
            begun.append(number)
            return text + "".join(parts)

    with ThreadPoolExecutor(count) as pool:
        streams = [pool.submit(stream, number) for number in range(count)]
        until(lambda: len(begun) == count, "all streams have begun")
        gateway.process.send(signal.SIGTERM)
        if is_hurried:
            until(lambda: is_refused(gateway), "the first one is heeded")
            gateway.process.send(signal.SIGTERM)
        texts = [one.result() for one in streams]
    ends = [text.rstrip().endswith("data: [DONE]") for text in texts]
    assert gateway.process.child.wait(WAIT_S) == 0
    assert all(ends) is not is_hurried
    for text, is_whole in zip(texts, ends, strict=True):
        assert is_whole or '"error"' in text
    assert not any(is_alive(pid) for pid in pids(gateway.process).values())


def test_what_keeps_a_process_from_starting_is_said_once_and_ends_all(
    started: Processes, tmp_path: Path
) -> None:
    flags = ("--processes", "3", "--port", "0", "--admin-port", "0", "--auth", "off")
    failed = started.begin("serve", *flags, "--model-path", str(tmp_path / "nowhere"))
    assert failed.child.wait(WAIT_S) == 2
    assert failed.log().count("trunkline: ") == 1
    assert "nowhere" in failed.log()
    assert "Traceback" not in failed.log()


@pytest.mark.parametrize("count", ["1", "2"])
def test_a_port_that_another_gateway_has_is_not_shared_with_it(
    started: Processes, count: str
) -> None:
    gateway = two(started)
    port = str(gateway.process.port)
    flags = ("--port", port, "--admin-port", "0", "--auth", "off")
    second = started.begin("serve", "--processes", count, *flags)
    assert second.child.wait(WAIT_S) == 2
    assert f"port {port} on 127.0.0.1 is in use" in second.log()
    admin = gateway.admin_url.rpartition(":")[2]
    flags = ("--port", str(free_port()), "--admin-port", admin, "--auth", "off")
    third = started.begin("serve", "--processes", count, *flags)
    assert third.child.wait(WAIT_S) == 2
    assert f"port {admin} on 127.0.0.1 is in use" in third.log()


def test_when_the_parent_is_killed_nothing_of_it_stays(started: Processes, tmp_path: Path) -> None:
    made = two_with_tenants(started, tmp_path)
    process = made.gateway.process
    nats = int((tmp_path / "state" / "nats" / "server.pid").read_text("ascii"))
    left = [*pids(process).values(), nats]
    assert all(map(is_alive, left))
    process.kill()
    until(lambda: not any(map(is_alive, left)), "all have ended")


def test_the_registrys_own_server_is_started_again(started: Processes, tmp_path: Path) -> None:
    made = two_with_tenants(started, tmp_path)
    ann = made.caller("acme", "ann")
    pid_file = tmp_path / "state" / "nats" / "server.pid"
    before = int(pid_file.read_text("ascii"))
    signal_to(before, signal.SIGKILL)
    until(lambda: int(pid_file.read_text("ascii") or before) != before, "another one runs")
    assert statuses(ann, 4) == {200}
    until(lambda: made.gateway.metric("registry_revision") > 0 and reusing(made.gateway) == 2,
          "both have their lease again")  # fmt: skip
    bob = made.caller("beta", "bob")
    assert statuses(bob) == {200}
    assert "control.restored" not in made.gateway.process.log()


def test_from_one_process_to_several_and_back(started: Processes, tmp_path: Path) -> None:
    urls = [worker.url for worker in started.workers(1, "--profile", "tiny")]
    alone = tenants(started, urls, tmp_path, "--profile", "tiny")
    ann = alone.caller("acme", "ann")
    assert alone.gateway.process.stop() == 0
    made = two_with_tenants(started, tmp_path)
    assert statuses(Caller(gateway=made.gateway, key=ann.key)) == {200}
    bob = made.caller("beta", "bob")
    assert made.gateway.process.stop() == 0
    alone = tenants(started, urls, tmp_path, "--profile", "tiny")
    for caller in (ann, bob):
        assert statuses(Caller(gateway=alone.gateway, key=caller.key), 1) == {200}
    assert alone.gateway.process.stop() == 0
    (tmp_path / "state" / "p1" / "registry.db.high").write_text("1000 ab\n")
    state = ("--state-dir", str(tmp_path / "state"))
    behind = started.begin("serve", *state, "--port", "0", "--admin-port", "0")
    assert behind.child.wait(WAIT_S) == 2
    assert "revision 1000" in behind.log()


def test_the_ports_of_single_processes_take_nothing_but_from_their_parent(
    started: Processes,
) -> None:
    flags = ("--processes", "2", "--port", "0", "--admin-port", "0", "--auth", "off")
    process = started.begin("serve", *flags, "--admin-api-key", "an-operators-key-of-some-length")
    process.wait_ready()
    gateway = Gateway(process)
    child = pids(process)[0]
    own = [port for port in listening(child) if port != gateway.process.port]
    assert len(own) == 1
    key = {"authorization": "Bearer an-operators-key-of-some-length"}
    refused = httpx.get(f"http://127.0.0.1:{own[0]}/workers", headers=key, timeout=WAIT_S)
    assert refused.status_code == 403
    assert gateway.admin("/workers").status_code == 401
    assert gateway.admin("/workers", headers=key).status_code == 200
    assert gateway.admin("/metrics").status_code == 401
    port = int(process.ready["admin_url"].rpartition(":")[2])
    for path in ("/config", "/workers", CATCH_UP):
        with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as link:
            link.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
            assert link.recv(64).startswith(b"HTTP/1.1 401 "), "nobody is no operator"


def listening(pid: int) -> list[int]:
    inodes = {
        link.readlink().name.removeprefix("socket:[").removesuffix("]")
        for link in Path(f"/proc/{pid}/fd").iterdir()
        if link.is_symlink()
    }
    rows = [line.split() for line in Path("/proc/net/tcp").read_text("ascii").splitlines()[1:]]
    return [
        int(row[1].partition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in inodes
    ]
