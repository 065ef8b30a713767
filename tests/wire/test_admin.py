"""The admin port on real sockets: workers, bodies and paths, what is shown, what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from admin_port import KEY, AdminPort, code_of, order

from trunkline.gateway import listener
from trunkline.gateway.listener import MAX_BODY_BYTES

pytest_plugins = ["admin_fixtures"]


# --- workers ----------------------------------------------------------------------------------


def test_a_worker_is_added_shown_drained_and_removed(port: AdminPort) -> None:
    client = port.client
    added = client.post("/workers", json=order(model_id="m", labels={"zone": "a"}))
    assert added.status_code == 202
    assert added.json() == {"worker": "10.0.0.1:8000", "state": "joining", "reason": ""}
    shown = client.get("/workers/10.0.0.1:8000").json()
    assert (shown["model_id"], shown["labels"], shown["mode"]) == ("m", {"zone": "a"}, "digest")
    assert client.get("/workers").json() == {"workers": [shown], "total": 1}
    assert client.post("/workers/10.0.0.1:8000/drain").status_code == 202
    assert client.get("/workers/10.0.0.1:8000").json()["state"] == "draining"
    assert client.post("/workers/10.0.0.1:8000/undrain").status_code == 202
    assert client.get("/workers/10.0.0.1:8000").json()["state"] == "ready"
    assert client.delete("/workers/10.0.0.1:8000").json()["state"] == "removed"
    assert code_of(client.get("/workers/10.0.0.1:8000")) == (404, "not_found")


def test_the_older_paths_do_the_same(port: AdminPort) -> None:
    client = port.client
    url = "http://10.0.0.1:8000"
    assert client.post("/add_worker", params={"url": url}).status_code == 202
    assert client.get("/list_workers").json() == {"urls": [url]}
    assert client.post("/remove_worker", params={"url": url}).status_code == 202
    assert client.get("/list_workers").json() == {"urls": []}


def test_a_refusal_of_the_backend_keeps_its_status(port: AdminPort) -> None:
    port.client.post("/workers", json=order())
    assert code_of(port.client.post("/workers", json=order())) == (409, "worker_exists")
    busy = port.client.post("/workers", json=order(url="http://busy:1"))
    assert code_of(busy) == (429, "busy")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b"{}",
        b'{"url": 5}',
        b'{"url": "http://a:1"',
        b'{"url": "http://a:1"} x',
        b'{"url": "http://a:1", "cost": 3}',
        b'{"url": "http://a:1", "worker_type": "prefill"}',
        b'{"url": "http://a:1", "labels": {"a": 1}}',
        b'{"url": "http://a:1", "model_id": "' + b"m" * 300 + b'"}',
        b'{"url": "a:1"}',
        b'{"url": "http://user:pass@a:1"}',
        b'{"url": "file:///etc/passwd"}',
        b'{"url": "\xff"}',
        b'{"url": ' + b"[" * 100_000,
        b'{"zzz": ' + b"[" * 100_000,
    ],
    ids=lambda body: body[:40].decode("latin-1"),
)
def test_a_bad_order_is_400_and_changes_nothing(body: bytes, port: AdminPort) -> None:
    assert code_of(port.client.post("/workers", content=body)) == (400, "bad_request")
    assert port.backend.orders == {}


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [("model", "model_id"), ("label", "labels"), ("api-key", "api_key"), ("Cost", "cost")],
)
def test_a_field_that_is_not_known_is_told_with_the_nearest_that_is(
    wrong: str, meant: str, port: AdminPort
) -> None:
    answer = port.client.post("/workers", json={**order(), wrong: "x"})
    assert code_of(answer) == (400, "bad_request")
    said = answer.json()["error"]["message"]
    assert said.endswith(f"unknown field `{wrong}`, did you mean {meant}?")


@pytest.mark.parametrize("wrong", ["colour", "x" * 100_000, "a`b", "", "\n"])
def test_a_field_that_is_near_to_none_is_told_alone(wrong: str, port: AdminPort) -> None:
    answer = port.client.post("/workers", json={**order(), wrong: "x"})
    assert code_of(answer) == (400, "bad_request")
    assert "did you mean" not in answer.json()["error"]["message"]


@pytest.mark.parametrize("query", ["", "?url=", "?url=a:1", "?url=http://a:1&url=http://b:1"])
def test_a_bad_address_in_the_query_is_400(query: str, port: AdminPort) -> None:
    assert code_of(port.client.post(f"/add_worker{query}")) == (400, "bad_request")


def test_too_many_labels_are_refused_at_the_bound(port: AdminPort) -> None:
    many = {f"k{i}": "v" for i in range(65)}
    assert code_of(port.client.post("/workers", json=order(labels=many)))[0] == 400
    many.popitem()
    assert port.client.post("/workers", json=order(labels=many)).status_code == 202


# --- bodies and paths -------------------------------------------------------------------------


def test_a_body_above_the_bound_is_413_whether_it_tells_its_length_or_not(port: AdminPort) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(MAX_BODY_BYTES // 65_536 + 1):
            yield b" " * 65_536

    for content in (b" " * (MAX_BODY_BYTES + 1), chunks()):
        refused = port.client.post("/workers", content=content)
        assert code_of(refused) == (413, "payload_too_large")


def test_a_body_at_the_bound_is_read(port: AdminPort) -> None:
    raw = json.dumps(order()).encode()
    body = raw + b" " * (MAX_BODY_BYTES - len(raw))
    assert port.client.post("/workers", content=body).status_code == 202


def test_a_body_that_does_not_come_is_408(port: AdminPort, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "BODY_TIMEOUT_S", 0.05)
    answer = port.say(
        b"POST /workers HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n"
        b"authorization: Bearer " + KEY.encode() + b"\r\n\r\n{"
    )
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"request_timeout"' in answer


def test_what_nobody_knows_is_one_shape(port: AdminPort) -> None:
    answers = [
        port.client.request(method, path)
        for method, path in (
            ("GET", "/nothing"),
            ("GET", "/workers/"),
            ("GET", "/workers/w9"),
            ("DELETE", "/workers/w9"),
            ("POST", "/workers/w9/drain"),
            ("POST", "/remove_worker?url=http://w9:1"),
            ("GET", "/decisions/r9999"),
            ("GET", "/health/"),
            ("POST", "/v1/chat/completions"),
        )
    ]
    assert {answer.status_code for answer in answers} == {404}
    assert len({answer.content for answer in answers}) == 1


def test_a_wrong_method_is_405_and_told_which_is_right(port: AdminPort) -> None:
    answer = port.client.put("/heartbeat")
    assert code_of(answer) == (405, "method_not_allowed")
    assert answer.headers["allow"] == "POST"


def test_a_bug_is_500_and_shows_nothing_of_our_insides(port: AdminPort) -> None:
    answer = port.client.post("/workers", json=order(url="http://bug:1"))
    assert code_of(answer) == (500, "internal_error")
    assert "marked" not in answer.text
    assert answer.headers["connection"] == "close", "the server closes it: nobody may reuse it"


# --- what is shown ----------------------------------------------------------------------------


def test_decisions_come_latest_first_bounded_and_by_worker(port: AdminPort) -> None:
    rows = port.client.get("/decisions").json()["decisions"]
    assert len(rows) == 100
    assert rows[0] == {"request_id": "r199", "worker": "w1", "net_gain_ms": None}
    rows = port.client.get("/decisions?limit=2&worker=w2").json()["decisions"]
    assert [row["request_id"] for row in rows] == ["r198", "r196"]
    assert port.client.get("/decisions/r7").json()["request_id"] == "r7"


@pytest.mark.parametrize(
    "query",
    [
        *("limit=0", "limit=-1", "limit=x", "limit=", "limit=10001", "limit=1e3", "limit=٣"),
        *("limit=" + "9" * 5_000, "limit=1&limit=2", "tenant=a"),
    ],
    ids=lambda query: query[:20],
)
def test_a_wrong_parameter_is_400(query: str, port: AdminPort) -> None:
    assert code_of(port.client.get(f"/decisions?{query}")) == (400, "bad_request")


def test_metrics_show_each_worker_until_it_is_removed(port: AdminPort) -> None:
    port.client.post("/workers", json=order())
    page = port.client.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'trunkline_worker_health{worker="10.0.0.1:8000"} 1.0' in page.text
    port.client.delete("/workers/10.0.0.1:8000")
    assert "10.0.0.1" not in port.client.get("/metrics").text


def test_no_page_shows_a_key(port: AdminPort) -> None:
    pages = [port.client.post("/workers", json=order()).text]
    for path in ("/config", "/workers", "/workers/10.0.0.1:8000", "/metrics", "/list_workers"):
        answer = port.client.get(path)
        assert answer.status_code == 200
        pages.append(answer.text)
    pages.append(port.client.post("/workers", json=order(api_key=5)).text)
    assert "marked" not in "".join(pages)
    assert port.client.get("/config").json()["listen"]["admin_api_key"] == "***"
