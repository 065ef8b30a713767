"""The dashboard of several processes: what is joined, who says who may, and processes that end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
from admin_port import FakeOverview
from browser import chromium, visit
from fleet import processes, text_of, until
from test_parent_admin import Answers, Played, before, run

from trunkline.gateway.overview import (
    Foregone,
    Overview,
    PrefixShown,
    Quantiles,
    WorkerShown,
)
from trunkline.parent_dashboard import ParentDashboard, joined_overview

replaced = msgspec.structs.replace


def times(p50: float, p95: float, p99: float) -> Quantiles:
    return Quantiles(p50=p50, p95=p95, p99=p99)


async def overview() -> Overview:
    return FakeOverview().overview()


def test_numbers_add_up_and_of_times_the_worst_are_told() -> None:
    plain = asyncio.run(overview())
    compared = Foregone(
        looked_at=10,
        span_ms=5.0,
        streamed=4,
        chosen=times(1.0, 5.0, 9.0),
        least_queue=times(2.0, 6.0, 7.0),
        observed=None,
        predicted_of_observed=None,
        saved_ms=20.0,
        saved_ms_each=2.0,
        dearer_share=0.1,
    )
    other = replaced(
        compared, looked_at=30, saved_ms=-4.0, chosen=times(3.0, 4.0, 8.0), dearer_share=0.5
    )
    one = replaced(plain, traffic=replaced(plain.traffic, foregone=compared))
    two = replaced(plain, traffic=replaced(plain.traffic, foregone=other, requests={"5xx": 1}))
    whole = joined_overview([(0, one), (1, two)])
    assert whole.processes == 2
    assert whole.traffic.hit_tokens == 2 * plain.traffic.hit_tokens
    assert whole.traffic.requests == {"2xx": 3, "5xx": 1}
    foregone = whole.traffic.foregone
    assert foregone.chosen == times(3.0, 5.0, 9.0)
    assert (foregone.looked_at, foregone.saved_ms, foregone.saved_ms_each) == (40, 16.0, 0.4)
    assert (foregone.dearer_share, foregone.observed) == (0.4, None)


def test_a_worker_is_shown_as_the_process_sees_it_that_may_not_choose_it() -> None:
    plain = asyncio.run(overview())
    good = WorkerShown(
        worker="w", state="ready", mode="exact", active=2, chosen=5, load_ms=1.0, believed=1.0
    )
    bad = WorkerShown(
        worker="w", state="silent", mode="exact", active=1, chosen=4, load_ms=9.0, believed=0.5
    )
    looks = [(0, replaced(plain, workers=[good])), (1, replaced(plain, workers=[bad]))]
    [row] = joined_overview(looks).workers
    assert (row.state, row.active, row.chosen, row.load_ms, row.believed) == (
        "silent",
        3,
        9,
        9.0,
        0.5,
    )


def test_prefixes_are_the_same_at_all_and_decisions_are_told_by_time() -> None:
    plain = asyncio.run(overview())
    [row] = plain.decisions
    one = replaced(plain, decisions=[replaced(row, request="a", at_ms=3.0)])
    rare = PrefixShown(prefix="cd", tokens=16, requests=1.0, holders=None)
    two = replaced(
        plain, decisions=[replaced(row, request="b", at_ms=4.0)], prefixes=[rare, *plain.prefixes]
    )
    whole = joined_overview([(0, one), (1, two)])
    assert [(each.request, each.process) for each in whole.decisions] == [("b", 1), ("a", 0)]
    assert [(each.prefix, each.requests) for each in whole.prefixes] == [("ab", 4.0), ("cd", 1.0)]


# --- asked over the wire --------------------------------------------------------------------------


def answers(status: int = 200) -> Answers:
    """As a process does that lets this caller in, or does not."""
    look = json.loads(msgspec.json.encode(asyncio.run(overview())))
    seen = {"may": ["workers.read"], "actor": "operator", "has_tenants": False, "look": look}

    def answer(asked: str) -> tuple[int, Any] | None:
        if "snapshot" in asked:
            return (status, seen if status == 200 else {"error": {}})
        return (status, {"decisions": look["decisions"]})

    return answer


@asynccontextmanager
async def page_before(*played: Played) -> AsyncIterator[httpx.AsyncClient]:
    async with before(*played) as (_, admin):
        transport = httpx.ASGITransport(app=ParentDashboard(admin, wants_key=True))
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            yield client


def test_all_processes_are_asked_in_the_name_of_who_watches() -> None:
    first, other = Played(answers()), Played(answers())

    async def test() -> None:
        async with page_before(first, other) as client:
            told = (await client.get("/dashboard/snapshot")).json()
            assert told["look"]["processes"] == 2
            found = (await client.get("/dashboard/decisions?limit=1&text=r")).json()
            assert [row["request"] for row in found["decisions"]] == ["r1"]
            assert (await client.get("/dashboard/door")).json() == {"key": True}
        assert first.asked == other.asked
        assert first.asked[-1] == "GET /dashboard/decisions?limit=1&text=r"

    run(test)


def test_who_may_not_come_in_is_told_so_by_a_process() -> None:
    first = Played(answers(401))

    async def test() -> None:
        async with page_before(first) as client:
            for path in ("snapshot", "events", "decisions"):
                assert (await client.get(f"/dashboard/{path}")).status_code == 401

    run(test)


def test_without_a_process_the_page_is_there_and_its_data_are_not() -> None:
    async def test() -> None:
        async with page_before() as client:
            assert (await client.get("/dashboard")).status_code == 200
            assert (await client.get("/dashboard/events")).status_code == 503

    run(test)


def test_two_real_processes_are_seen_as_one_gateway() -> None:
    with processes() as started, chromium() as browser:
        worker = started.worker("--profile", "tiny")
        gateway = started.gateway([worker.url], "--processes", "2")
        for turn in range(3):
            assert gateway.chat(text_of(40, turn)).status == 200
        with visit(browser, gateway.process.ready["dashboard"]) as seen:
            seen.wait_text("#link-text", "2 processes")
            seen.go("decisions")
            until(lambda: len(seen.rows("decisions")) == 3, "those of both are there")
            seen.page.click("#view-decisions tbody tr")
            seen.wait_text("#detail .candidates tbody", worker.name)
            assert seen.complaints == []
