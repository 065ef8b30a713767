"""`trunkline doctor` before planted mistakes: each is found with its remedy, and nothing beside."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fleet import WAIT_S, Gateway, Process, Processes, processes, text_of, until
from several import Fleet
from tenants import reuses, tenants

from nats_desk import nats_server

TINY = ("--profile", "tiny")
IDLE = ("--keepalive-idle-ms", "3000")
"""The doctor waits for so long."""


@pytest.fixture(scope="module")
def started() -> Iterator[Processes]:
    with processes() as these:
        yield these


def doctor(*words: str) -> tuple[int, list[dict[str, str]]]:
    """Exit code and findings."""
    command = [sys.executable, "-m", "trunkline", "doctor", "--json", *words]
    environment = {name: value for name, value in os.environ.items() if "TRUNKLINE" not in name}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=2 * WAIT_S, check=False, env=environment
    )
    assert done.returncode in (0, 1), done.stderr
    told = json.loads(done.stdout)
    assert told["ok"] is (done.returncode == 0)
    return done.returncode, told["findings"]


def wrong(findings: list[dict[str, str]]) -> list[dict[str, str]]:
    return [one for one in findings if one["state"] == "wrong"]


def asked(gateway: Gateway, *words: str) -> tuple[int, list[dict[str, str]]]:
    return doctor(*words, "--admin-url", gateway.admin_url)


# -- before a start --------------------------------------------------------------------------------


class Desk:
    """A settings file and what it names, all in order."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.state.mkdir(mode=0o700)
        self.key = folder / "root.key"
        self.key.write_text("ab" * 32)
        self.key.chmod(0o600)
        self.settings: dict[str, dict[str, Any]] = {
            "": {"worker_urls": ["http://127.0.0.1:9"]},
            "listen": {"port": 0, "admin_port": 0},
            "auth": {"state_dir": str(self.state)},
            "model": {"root_key_file": str(self.key)},
        }

    def set(self, section: str, **values: Any) -> None:
        self.settings.setdefault(section, {}).update(values)

    def doctor(self) -> tuple[int, list[dict[str, str]]]:
        lines: list[str] = []
        for section, values in self.settings.items():
            lines += [f"[{section}]"] if section else []
            lines += [f"{name} = {json.dumps(value)}" for name, value in values.items()]
        path = self.folder / "trunkline.toml"
        path.write_text("\n".join(lines))
        return doctor("--config", str(path))


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def is_found(desk: Desk, what: str, found: str, remedy: str) -> None:
    """This is wrong, and nothing else."""
    code, findings = desk.doctor()
    [one] = wrong(findings)
    assert (code, one["what"]) == (1, what)
    assert found in one["found"]
    assert remedy in one["remedy"]


def test_settings_that_are_in_order_have_no_finding(desk: Desk) -> None:
    assert desk.doctor() == (0, [])


def test_a_misspelt_key_is_named_with_the_one_that_was_meant(desk: Desk) -> None:
    desk.set("limits", max_payload_sise=1_000_000)
    is_found(desk, "settings", "max_payload_sise", "did you mean max_payload_size?")


def test_all_that_is_refused_of_a_file_is_said_at_once(desk: Desk) -> None:
    desk.set("limits", max_payload_sise=1_000_000, max_headers="many", idle_timeout_ms=1)
    desk.set("upstrem", connect_timeout_ms=5, first_byte_timeout_ms=5)
    code, findings = desk.doctor()
    found = [one["found"] for one in findings]
    assert code == 1
    assert len(found) == 4
    for named in ("max_payload_sise", "max_headers", "idle_timeout_ms", "[upstrem]"):
        assert any(named in text for text in found)


def test_a_file_that_is_none_is_a_finding(tmp_path: Path) -> None:
    code, [one] = doctor("--config", str(tmp_path / "none.toml"))
    assert (code, one["what"]) == (1, "settings")
    assert "cannot be read" in one["found"]


def test_an_admin_port_beyond_loopback_without_a_key(desk: Desk) -> None:
    desk.set("listen", admin_host="0.0.0.0")
    is_found(desk, "admin port", "reachable from other machines", "--admin-api-key")


def test_a_client_port_beyond_loopback_where_nobody_is_asked(desk: Desk) -> None:
    desk.set("listen", host="0.0.0.0")
    desk.set("auth", auth="off")
    is_found(desk, "client port", "whoever reaches it is served", "--auth keys")


def test_a_state_folder_that_others_may_look_into(desk: Desk) -> None:
    desk.state.chmod(0o755)
    is_found(desk, "state folder", "others may look into it", f"chmod 700 {desk.state}")


def test_a_state_folder_that_is_none(desk: Desk) -> None:
    desk.set("auth", state_dir=str(desk.key / "state"))
    is_found(desk, "state folder", "is no folder", "--state-dir")


def test_a_key_that_everyone_may_read(desk: Desk) -> None:
    desk.key.chmod(0o644)
    is_found(desk, "secret", "everyone may read", "chmod 600")


def test_a_port_that_another_process_listens_on(desk: Desk) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen(1)
        desk.set("listen", port=other.getsockname()[1])
        is_found(desk, "port", "another process listens there", "--port")


def test_time_outs_that_contradict_each_other(desk: Desk) -> None:
    desk.set("upstream", connect_timeout_ms=5_000, first_byte_timeout_ms=4_000)
    is_found(desk, "time-outs", "4000 ms", "raise upstream.first_byte_timeout_ms")


def test_a_registry_that_is_not_there_one_without_jetstream_and_a_good_one(
    desk: Desk, tmp_path: Path
) -> None:
    desk.set("control", control=["nats://127.0.0.1:9"], control_replicas=1)
    is_found(desk, "registry", "nobody who says so", "nats-server")
    with nats_server(tmp_path / "off", is_streaming=False) as server:
        desk.set("control", control=[server.url])
        is_found(desk, "registry", "it is off", "-js")
    with nats_server(tmp_path / "on") as server:
        desk.set("control", control=[server.url])
        code, findings = desk.doctor()
        assert code == 0
        notes = {(one["state"], one["found"].partition(":")[0]) for one in findings}
        assert notes == {("note", "1"), ("note", "none is asked")}
        desk.set("control", control=[server.url] * 2)
        is_found(desk, "registry", "reuse at every gateway", "--control-replicas 3")


# -- while it runs ---------------------------------------------------------------------------------


def test_a_good_set_up_has_no_finding(started: Processes) -> None:
    workers = started.workers(2, *TINY)
    gateway = started.gateway([w.url for w in workers], *IDLE, "--no-disable-self-test")
    until(lambda: asked(gateway) == (0, []), "the self-tests are over")
    for worker in workers:
        worker.stop()


PLANTED = {
    "events": (("--feed", "approximate"), "it announces none", "--kv-events-config"),
    "isolation": (("--fault", "ignore-salt"), "48 of 57", "cache_salt"),
    "reuse": (("--fault", "no-prefix-cache"), "keeps no prefixes", "--enable-prefix-caching"),
    "model": (("--model", "another"), "serves another", "--served-model-name"),
    "keep-alive": (("--fault", "keep-alive:100"), "closed after", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE"),
    "clock": (("--fault", "clock-off:3600"), "s fast", "chrony"),
    "version": (("--fault", "told-version:0.9.1"), "0.9.1", "one release everywhere"),
    "context": (("--max-model-len", "4096"), "4096", "--max-model-len"),
    "replay": (("--fault", "no-replay"), "none: what is missed", "replay_endpoint"),
}
"""What is wrong with one worker each: its flags, and what its line has to say."""
FOLLOWS = ("isolation", "block keys")
"""Whose cache knows no salts names none in its events."""


def test_what_is_wrong_with_each_worker_is_found_and_of_the_others_nothing(
    started: Processes,
) -> None:
    begun = {
        what: started.begin("worker", *TINY, *flags) for what, (flags, _, _) in PLANTED.items()
    }
    good = started.worker(*TINY, "--model", "trunkline-sim")
    for process in begun.values():
        process.wait_ready()
    flags = (*IDLE, "--served-model-name", "trunkline-sim")
    gateway = started.gateway(
        [good.url, *(p.url for p in begun.values())], *flags, ready=len(PLANTED)
    )
    code, findings = asked(gateway)
    assert code == 1
    seen = [one for one in wrong(findings) if one["what"] != FOLLOWS[1]]
    assert {(one["subject"], one["what"]) for one in seen} == {
        (process.name, what) for what, process in begun.items()
    }
    [follows] = [one for one in wrong(findings) if one["what"] == FOLLOWS[1]]
    assert follows["subject"] == begun[FOLLOWS[0]].name
    for one in seen:
        _, found, remedy = PLANTED[one["what"]]
        assert found in one["found"], one
        assert remedy in one["remedy"], one
    assert asked(gateway, good.url) == (0, [])
    code, findings = asked(gateway, begun["clock"].name)
    assert (code, [one["what"] for one in wrong(findings)]) == (1, ["clock"])
    _end([good, *begun.values()])


def test_a_template_other_than_the_workers(started: Processes, tmp_path: Path) -> None:
    template = tmp_path / "other.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    worker = started.worker(*TINY)
    gateway = started.gateway([worker.url], *IDLE, "--chat-template", str(template))
    code, findings = asked(gateway)
    [one] = wrong(findings)
    assert (code, one["what"], one["subject"]) == (1, "chat", worker.name)
    assert "--chat-template" in one["remedy"]
    worker.stop()


def test_gateways_with_tenants_and_one_registry_in_order_then_without_it_and_without_a_sink(
    started: Processes, tmp_path: Path
) -> None:
    with nats_server(tmp_path / "nats") as server:
        fleet = Fleet(started, server, tmp_path)
        copy = tmp_path / "copy"
        gateway = fleet.begin("a", *IDLE, "--audit-copy-dir", str(copy)).gateway
        fleet.begin("b", *IDLE)
        until(lambda: gateway.metric("gateways_other") == 1, "it knows of the other")
        code, findings = asked(gateway)
        assert (code, wrong(findings)) == (0, [])
        server.stop()
        until(lambda: gateway.metric("gateway_lease_seconds") == 0, "its lease is over")
        code, findings = asked(gateway)
        [one] = wrong(findings)
        assert (code, one["what"], one["found"].partition(":")[0]) == (1, "registry", "none")
        server.start()
        until(lambda: reuses(gateway), "it has a lease again")
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where a folder should be")
    flags = ("--audit-copy-dir", str(blocked / "copy"))
    lame = tenants(started, fleet.urls, tmp_path / "lame", *IDLE, *flags).gateway
    code, findings = asked(lame)
    [one] = wrong(findings)
    assert (code, one["what"], one["found"].partition(":")[0]) == (1, "audit", "1")


def _end(workers: list[Process]) -> None:
    for worker in workers:
        worker.begin_stop()
    for worker in workers:
        worker.stop()


def test_c57_a_worker_that_falls_silent_and_one_that_breaks_its_promises_raise_alarms(
    started: Processes,
) -> None:
    """Each is a metric, a line in the log when it begins and when it ends, and a finding."""
    begun = {
        "silent": started.begin("worker", *TINY, "--fault", "no-events"),
        "over-claims": started.begin("worker", *TINY, "--fault", "no-prefix-cache"),
    }
    for process in begun.values():
        process.wait_ready()
    gateway = started.gateway([p.url for p in begun.values()], *IDLE)
    silent, broken = begun["silent"], begun["over-claims"]
    gateway.admin(f"/workers/{silent.name}/drain", "POST")
    for number in range(40):  # what it computed is announced, and never reused
        gateway.chat(text_of(60, number % 2))
    gateway.admin(f"/workers/{broken.name}/drain", "POST")
    gateway.admin(f"/workers/{silent.name}/undrain", "POST")
    for number in range(4):
        gateway.chat(text_of(60, number))

    def is_on(kind: str) -> bool:
        return gateway.metric("alarm", kind=kind, worker=begun[kind].name) == 1

    until(lambda: is_on("over-claims") and is_on("silent"), "both alarms are on")
    assert gateway.metric("alarm") == 2
    for kind, process in begun.items():
        [alarm] = gateway.worker(process)["detail"]["alarms"]
        assert (alarm["kind"], alarm["rank"]) == (kind, process.name)
    code, findings = asked(gateway)
    alarms = {one["subject"]: one["found"] for one in findings if one["what"] == "alarm"}
    assert code == 1
    assert "over-claims for" in alarms[broken.name]
    assert "no events since start" in alarms[silent.name]
    lines = [line for line in gateway.process.log().splitlines() if " alarm." in line]
    assert len(lines) == 2, "one line each, not one a second"
    gateway.admin(f"/workers/{silent.name}", "DELETE")
    until(lambda: gateway.metric("alarm", worker=silent.name) == 0, "its alarm is over")
    until(lambda: "alarm.ended kind=silent" in gateway.process.log(), "that is written down")
    assert f'kind="silent",worker="{silent.name}"' not in gateway.admin("/metrics").text
    _end(list(begun.values()))
