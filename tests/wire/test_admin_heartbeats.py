"""Heartbeats on the admin port: whose they are, and which are taken."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from admin_port import KEY, WORKER_KEY, AdminPort, beat, code_of, order

pytest_plugins = ["admin_fixtures"]


@pytest.fixture
def worker(port: AdminPort) -> Callable[..., httpx.Response]:
    """Sends heartbeats of a joined worker, with the worker's own key."""
    port.client.post("/workers", json=order())

    def send(content: bytes | None = None, key: str = WORKER_KEY, **fields: Any) -> httpx.Response:
        raw = json.dumps(beat(**fields)).encode() if content is None else content
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.post(f"{port.url}/heartbeat", content=raw, headers=headers)

    return send


def test_a_heartbeat_with_the_workers_key_is_taken(
    worker: Callable[..., httpx.Response], port: AdminPort
) -> None:
    answer = worker()
    assert answer.json() == {"worker": "10.0.0.1:8000", "counter": 1}
    (taken,) = port.backend.beats
    assert taken.checkpoints == (bytes(32),)
    assert (taken.memory, taken.load, taken.block_tokens, taken.is_complete) == (0.5, 1.5, 16, True)


def test_a_workers_key_opens_nothing_else(port: AdminPort) -> None:
    port.client.post("/workers", json=order())
    answer = httpx.get(f"{port.url}/workers", headers={"authorization": f"Bearer {WORKER_KEY}"})
    assert answer.status_code == 401


def test_a_workers_key_does_not_speak_for_another_worker(
    worker: Callable[..., httpx.Response], port: AdminPort
) -> None:
    port.client.post("/workers", json=order(url="http://10.0.0.2:8000", api_key="other-key"))
    assert worker(worker="10.0.0.2:8000").status_code == 401
    assert port.backend.beats == []


def test_strangers_cannot_tell_known_workers_from_unknown_ones_nor_good_beats_from_bad(
    worker: Callable[..., httpx.Response],
) -> None:
    answers = [
        worker(key="wrong"),
        worker(key=""),
        worker(key="wrong", worker="nobody"),
        worker(key="wrong", memory=-1),
        worker(key="wrong", content=b"{"),
    ]
    assert {(answer.status_code, answer.content) for answer in answers} == {
        (401, answers[0].content)
    }


def test_the_operators_key_may_send_any_heartbeat_and_learns_of_unknown_workers(
    worker: Callable[..., httpx.Response],
) -> None:
    assert worker(key=KEY).status_code == 200
    assert code_of(worker(key=KEY, worker="nobody")) == (404, "not_found")


@pytest.mark.parametrize(
    "content",
    [
        json.dumps(beat(counter=2, memory=float("nan"))),
        json.dumps(beat(counter=2, load=float("inf"))),
        json.dumps(beat(counter=2, memory=-0.1)),
        json.dumps(beat(counter=2, memory=1e18)),
        json.dumps(beat(counter=2, load=1e18)),
        json.dumps(beat(counter=2, load=-1)),
        json.dumps(beat(counter=2, load="1")),
        json.dumps(beat(counter=-1)),
        json.dumps(beat(counter=2**53)),
        json.dumps(beat(counter=10**400)),
        json.dumps(beat(counter=2.5)),
        json.dumps(beat(counter=True)),
        json.dumps(beat(counter=2, boot_nonce="")),
        json.dumps(beat(counter=2, block_size=0)),
        json.dumps(beat(counter=2, complete=1)),
        json.dumps(beat(counter=2, checkpoints=["AA=="])),
        json.dumps(beat(counter=2, checkpoints=["!"])),
        json.dumps(beat(counter=2, checkpoints=[5])),
        json.dumps(beat(counter=2, checkpoints=None)),
        json.dumps(beat(counter=2, tenant="a")),
        *(
            json.dumps({name: value for name, value in beat(counter=2).items() if name != left})
            for left in beat()
            if left != "worker"
        ),
        "",
        "[]",
        "{",
    ],
)
def test_a_bad_heartbeat_is_400_and_the_last_good_one_is_kept(
    content: str, worker: Callable[..., httpx.Response], port: AdminPort
) -> None:
    assert worker().status_code == 200
    assert code_of(worker(key=KEY, content=content.encode())) == (400, "bad_request")
    assert [taken.counter for taken in port.backend.beats] == [1]


@pytest.mark.parametrize("counter", [5, 4, 0])
def test_a_replayed_or_late_heartbeat_is_400_and_the_last_good_one_is_kept(
    counter: int, worker: Callable[..., httpx.Response], port: AdminPort
) -> None:
    assert worker(counter=5).status_code == 200
    assert code_of(worker(counter=counter)) == (400, "heartbeat_refused")
    assert [taken.counter for taken in port.backend.beats] == [5]


def test_too_many_checkpoints_are_refused_at_the_bound(
    worker: Callable[..., httpx.Response],
) -> None:
    key = base64.b64encode(bytes(32)).decode()
    assert worker(checkpoints=[key] * 4_097).status_code == 401, "a bad beat proves nobody"
    assert code_of(worker(key=KEY, checkpoints=[key] * 4_097)) == (400, "bad_request")
    assert worker(checkpoints=[key] * 4_096).status_code == 200


def test_on_a_keyless_port_a_worker_with_a_key_must_still_use_it(open_port: AdminPort) -> None:
    open_port.client.post("/workers", json=order())
    assert open_port.client.post("/heartbeat", json=beat()).status_code == 401
    open_port.client.post("/workers", json=order(url="http://10.0.0.2:8000", api_key=""))
    answer = open_port.client.post("/heartbeat", json=beat(worker="10.0.0.2:8000"))
    assert answer.status_code == 200
    assert open_port.client.post("/heartbeat", json=beat(worker="w9")).status_code == 404
