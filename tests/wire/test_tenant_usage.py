"""What tenants ask for: counted by real gateways, and shown to those who may see the tenant."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fleet import WAIT_S, Processes, processes, stream_usage
from tenant_port import TenantPort, serving_tenants
from tenants import Caller, Tenants, tenants
from test_parent_admin import Answers, Played, before, run

NAMES = ("requests", "limited", "prompt_tokens", "reported_tokens", "hit_tokens")
PROMPT = "what both of them ask for " * 12
TRIES = 24
"""Connections by which each of two processes is surely met."""


def counted(*numbers: int) -> dict[str, int]:
    return dict(zip(NAMES, (*numbers, 0, 0, 0, 0, 0), strict=False))


def usage(fleet: Tenants) -> dict[str, dict[str, int]]:
    rows = fleet.gateway.admin("/tenants").json()["tenants"]
    return {row["tenant"]: row["usage"] for row in rows}


def asked_anew(caller: Caller, *, is_stream: bool, tells: bool) -> httpx.Response:
    """Over a connection of its own, which is that of any of the processes."""
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 2, "stream": is_stream}
    if is_stream and tells:
        body["stream_options"] = {"include_usage": True}
    url = f"{caller.gateway.url}/v1/completions"
    return httpx.post(url, json=body, headers=caller.headers(), timeout=WAIT_S)


# --- counted --------------------------------------------------------------------------------------


@pytest.fixture(name="started")
def some_processes() -> Iterator[Processes]:
    with processes() as made:
        yield made


@pytest.mark.parametrize("count", [1, 2])
def test_requests_prompts_and_hits_are_those_of_each_tenant(
    count: int, started: Processes, tmp_path: Path
) -> None:
    worker = started.worker("--profile", "tiny")
    flags = ("--profile", "tiny", "--processes", str(count))
    fleet = tenants(started, [worker.url], tmp_path, *flags)
    callers = {name: fleet.caller(name) for name in ("acme", "globex", "idle")}
    fleet.wait_leased(1)
    requests = dict.fromkeys(callers, 0)
    told: dict[str, list[dict[str, Any]]] = {name: [] for name in callers}
    for turn in range(TRIES):
        name = "globex" if turn % 4 == 3 else "acme"
        is_stream, tells = turn % 2 == 0, turn % 3 != 0
        answer = asked_anew(callers[name], is_stream=is_stream, tells=tells)
        assert answer.status_code == 200, answer.text
        requests[name] += 1
        if tells or not is_stream:
            told[name].append(stream_usage(answer) if is_stream else answer.json()["usage"])
    fleet.gateway.wait_quiet()

    found = usage(fleet)
    prompt_tokens = told["acme"][0]["prompt_tokens"]
    for name, answers in told.items():
        assert found[name] == counted(
            requests[name],
            0,
            requests[name] * prompt_tokens,
            len(answers) * prompt_tokens,
            sum(one["prompt_tokens_details"]["cached_tokens"] for one in answers),
        )
    assert found["acme"]["hit_tokens"] > 0
    assert len(told["acme"]) < requests["acme"], "some do not tell"
    if count == 2:
        served = [fleet.gateway.metric("requests_total", process=number) for number in "01"]
        assert min(served) > 0
    for figure, metric in (("reported_tokens", "prompt"), ("hit_tokens", "reused")):
        assert sum(row[figure] for row in found.values()) == fleet.gateway.metric(
            f"{metric}_tokens_total"
        )
    assert "acme" not in fleet.gateway.admin("/metrics").text, "no series names a tenant"


def test_requests_over_a_rate_are_counted_beside_those_that_were_sent(
    started: Processes, tmp_path: Path
) -> None:
    worker = started.worker("--profile", "tiny")
    fleet = tenants(started, [worker.url], tmp_path, "--profile", "tiny")
    ann = fleet.caller("acme")
    set_policy = fleet.gateway.admin("/tenants/acme/policy", "PUT", json={"requests_per_s": 0.001})
    assert set_policy.status_code == 200
    statuses = [ann.answer(PROMPT).status for _ in range(4)]
    assert statuses == [200, 429, 429, 429]
    row = usage(fleet)["acme"]
    assert (row["requests"], row["limited"]) == (1, 3)


# --- shown ----------------------------------------------------------------------------------------


@pytest.fixture(name="port", scope="module")
def a_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TenantPort]:
    """Two tenants of one organisation and one of another; each has asked for something."""
    with serving_tenants(tmp_path_factory.mktemp("usage")) as port:
        port.operator.post("/tenants", json={"name": "acme", "org": "o1", "create_org": True})
        port.operator.post("/tenants", json={"name": "sister", "org": "o1"})
        port.operator.post("/tenants", json={"name": "globex"})
        for number, row in enumerate(port.operator.get("/tenants").json()["tenants"], 1):
            for _ in range(number):
                port.counts.sent(row["id"], 100)
        port.counts.reported("gone", 50, 20)
        yield port


WHOLE = {"acme": counted(1, 0, 100), "sister": counted(2, 0, 200), "globex": counted(3, 0, 300)}
OTHERS = counted(0, 0, 0, 50, 20)


@pytest.mark.parametrize(
    ("role", "names", "others"),
    [
        ("security.officer", ["acme", "sister", "globex"], OTHERS),
        ("org.admin", ["acme", "sister"], None),
        ("tenant.admin", ["acme"], None),
    ],
)
def test_each_role_sees_what_those_tenants_asked_for_that_it_sees(
    role: str, names: list[str], others: dict[str, int] | None, port: TenantPort
) -> None:
    told = port.client(port.key("acme", role)).get("/tenants").json()
    assert {row["tenant"]: row["usage"] for row in told["tenants"]} == {
        name: WHOLE[name] for name in names
    }
    assert told["others"] == others


def test_the_operator_sees_all_of_it(port: TenantPort) -> None:
    told = port.operator.get("/tenants").json()
    assert {row["tenant"]: row["usage"] for row in told["tenants"]} == WHOLE
    assert told["others"] == OTHERS


@pytest.mark.parametrize("role", ["auditor", "fleet.operator", "fleet.metrics", "tenant.user"])
def test_who_may_not_list_tenants_sees_nothing(role: str, port: TenantPort) -> None:
    answer = port.client(port.key("acme", role)).get("/tenants")
    assert answer.status_code == 403
    assert "prompt_tokens" not in answer.text


# --- several processes ----------------------------------------------------------------------------


def lists(others: dict[str, int] | None, **usages: dict[str, int] | None) -> Answers:
    rows = [{"tenant": name, "id": name, "usage": usage} for name, usage in usages.items()]
    return lambda _: (200, {"tenants": rows, "next": "b", "others": others})


def test_what_processes_count_of_a_tenant_is_added_up_where_all_know_it() -> None:
    first = Played(lists(counted(1), a=counted(1, 0, 10), b=None, c=None))
    other = Played(lists(counted(2, 1), a=counted(2, 1, 5), b=counted(4), c=None, d=counted(9)))

    async def test() -> None:
        async with before(first, other) as (client, _):
            told = (await client.get("/tenants?limit=3")).json()
        assert first.asked == other.asked == ["GET /tenants?limit=3"]
        assert {row["id"]: row["usage"] for row in told["tenants"]} == {
            "a": counted(3, 1, 15),
            "b": None,  # one of them has it among the others
            "c": None,
        }
        assert told["others"] == counted(3, 1)
        assert told["next"] == "b"

    run(test)


def test_who_sees_less_than_the_fleet_is_told_of_no_others_by_any_process() -> None:
    rows = [Played(lists(None, a=counted(1))) for _ in range(2)]

    async def test() -> None:
        async with before(*rows) as (client, _):
            assert (await client.get("/tenants")).json()["others"] is None

    run(test)


def test_who_may_not_list_tenants_is_told_so_by_a_process() -> None:
    async def test() -> None:
        async with before(Played(lambda _: (403, {})), Played(lambda _: (403, {}))) as (client, _):
            assert (await client.get("/tenants")).status_code == 403

    run(test)
