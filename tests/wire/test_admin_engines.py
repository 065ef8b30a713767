"""Paths of the admin port that are about all engines at once, before real workers and on a fake."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from admin_port import AdminPort, code_of, order
from fleet import Gateway, Process, Processes, processes, until

pytest_plugins = ["admin_fixtures"]
TINY = ("--profile", "tiny")


@pytest.fixture(scope="module")
def made() -> Iterator[Processes]:
    with processes() as started:
        yield started


@pytest.fixture(scope="module")
def workers(made: Processes) -> list[Process]:
    return made.workers(2, *TINY)


@pytest.fixture(scope="module")
def gateway(made: Processes, workers: list[Process]) -> Gateway:
    return made.gateway([worker.url for worker in workers], *TINY)


def test_metrics_of_all_engines_are_one_page_with_a_label_for_each(
    gateway: Gateway, workers: list[Process]
) -> None:
    page = gateway.admin("/engine_metrics").text
    lines = page.splitlines()
    assert len(lines) == len(set(lines)), "each family has its head once"
    (waiting,) = {line for line in lines if line.startswith("# TYPE vllm:num_requests_waiting ")}
    assert waiting.endswith(" gauge")
    for worker in workers:
        assert any(
            line.startswith(f'vllm:num_requests_waiting{{worker="{worker.name}"') for line in lines
        )


def test_loads_server_and_model_are_told_of_every_worker(
    gateway: Gateway, workers: list[Process]
) -> None:
    urls = {worker.url for worker in workers}
    loads = gateway.admin("/get_loads").json()
    assert loads["total_workers"] == 2
    assert {row["worker"] for row in loads["workers"]} == urls
    assert all(row["load"] == 0 for row in loads["workers"])
    servers = gateway.admin("/get_server_info").json()["workers"]
    assert {row["worker"] for row in servers} == urls
    assert {(row["engine"], row["state"]) for row in servers} == {("trunkline", "ready")}
    (model,) = gateway.admin("/get_model_info").json()["models"]
    assert (model["id"], model["workers"]) == ("trunkline-sim", 2)
    assert model["max_model_len"] > 0


def test_health_generate_has_a_worker_compute_a_token(gateway: Gateway) -> None:
    answer = gateway.admin("/health_generate")
    assert (answer.status_code, answer.json()["status"]) == (200, "ok")


def test_health_generate_is_503_where_nothing_can_be_computed(made: Processes) -> None:
    alone = made.gateway([])
    answer = alone.admin("/health_generate")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_worker")


def test_flush_cache_has_every_engine_drop_its_cache(
    gateway: Gateway, workers: list[Process]
) -> None:
    prompt = "a prompt that is long enough to fill some blocks of any size " * 8
    until(lambda: gateway.complete(prompt).cached > 0, "the prompt is reused")
    gateway.wait_quiet()
    answer = gateway.admin("/flush_cache", "POST")
    assert (answer.status_code, set(answer.json()["flushed"])) == (
        200,
        {worker.name for worker in workers},
    )
    assert gateway.complete(prompt).cached == 0


def test_finish_session_is_answered_and_nothing_of_a_session_was_kept(gateway: Gateway) -> None:
    answer = gateway.admin("/finish_session?session_id=s1", "POST")
    assert answer.json() == {"session_id": "s1", "released": 0}
    assert gateway.admin("/finish_session", "POST").status_code == 400


def test_a_worker_is_told_anew_what_it_is_and_joins_with_that(
    made: Processes, workers: list[Process]
) -> None:
    gateway = made.gateway([worker.url for worker in workers], *TINY)
    name = workers[0].name

    def ask(method: str, body: dict[str, Any]) -> httpx.Response:
        return gateway.admin(f"/workers/{name}", method, json=body)

    told = ask("PATCH", {"labels": {"zone": "a"}})
    assert (told.status_code, told.json()["state"]) == (202, "joining")
    gateway.wait_ready(2)
    assert gateway.workers()[name]["labels"] == {"zone": "a"}
    assert ask("PATCH", {"model_id": "another"}).status_code == 202
    until(lambda: gateway.workers()[name]["state"] == "joining", "it serves no such model")
    assert gateway.workers()[name]["labels"] == {"zone": "a"}, "what was not told stays"
    assert ask("PUT", {}).status_code == 202
    gateway.wait_ready(2)
    assert gateway.workers()[name]["labels"] == {}, "as a whole"
    for method in ("PUT", "PATCH"):
        answer = gateway.admin("/workers/10.9.9.9:1", method, json={})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


@pytest.mark.parametrize(
    ("word", "value"),
    [("priority", 5), ("cost", 2.0), ("bootstrap_port", 9000), ("worker_type", "prefill")],
)
def test_words_that_would_do_nothing_are_refused_and_told_why(
    word: str, value: Any, port: AdminPort
) -> None:
    assert port.client.post("/workers", json=order()).status_code == 202
    for method, path, body in (
        ("POST", "/workers", order(url="http://10.0.0.2:8000")),
        ("PUT", "/workers/10.0.0.1:8000", {}),
        ("PATCH", "/workers/10.0.0.1:8000", {}),
    ):
        answer = port.client.request(method, path, json={**body, word: value})
        assert answer.status_code == 400
        assert f"{word} " in answer.json()["error"]["message"]
        assert "is not offered" in answer.json()["error"]["message"]
    assert len(port.client.get("/workers").json()["workers"]) == 1


def test_a_key_that_is_told_anew_is_never_shown(port: AdminPort) -> None:
    port.client.post("/workers", json=order())
    told = port.client.patch("/workers/10.0.0.1:8000", json={"api_key": "marked-worker-key-2"})
    assert told.status_code == 202
    assert port.backend.orders["10.0.0.1:8000"].api_key == "marked-worker-key-2"
    for path in ("/workers", "/workers/10.0.0.1:8000", "/get_server_info", "/get_loads"):
        assert "marked-worker-key-2" not in port.client.get(path).text
    assert code_of(port.client.patch("/workers/10.0.0.1:8000", content=b"{")) == (
        400,
        "bad_request",
    )


def test_several_processes_all_take_an_amended_worker_and_tell_one_load(
    made: Processes, workers: list[Process]
) -> None:
    gateway = made.gateway([worker.url for worker in workers], *TINY, "--processes", "2")
    name = workers[0].name
    answer = gateway.admin(f"/workers/{name}", "PATCH", json={"labels": {"zone": "b"}})
    assert answer.status_code == 202
    for number in (0, 1):
        rows = gateway.admin(f"/workers?process={number}").json()["workers"]
        assert [row["labels"] for row in rows if row["worker"] == name] == [{"zone": "b"}]
    assert gateway.admin("/get_loads").json()["total_workers"] == 2
    gateway.wait_ready(2)
    assert gateway.admin("/flush_cache", "POST").status_code == 200
