"""Several models: a worker joins the one that it serves, and requests go by the model they name."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from member_bench import Answers, metrics, named, play, until
from member_bench import Bench as OneBench

from trunkline.control.discovery import FleetModel
from trunkline.control.fleets import Fleets
from trunkline.control.membership import MAX_WORKERS
from trunkline.core.records import WorkerId
from trunkline.errors import ConfigError
from trunkline.gateway.by_model import ByModel
from trunkline.gateway.contracts import ClientError, InferenceRequest, Pick, Route
from trunkline.ports.worker import AttemptEnd, Endpoint


def serving(*names: str) -> Answers:
    rows = ",".join(f'{{"id":"{name}"}}' for name in names)
    answers = Answers(metrics=metrics())
    answers.pages["/v1/models"] = f'{{"data":[{rows}]}}'.encode()
    return answers


class Bench:
    """Models a (also called alpha) and b."""

    def __init__(self) -> None:
        self.of = {"a": OneBench(), "b": OneBench()}
        self.answers: dict[int, Answers] = {}
        for name, one in self.of.items():
            one.answers = self.answers
            one.parts.model = FleetModel(name, ("alpha",) if name == "a" else ())
        self.fleets = Fleets(
            {name: one.membership for name, one in self.of.items()},
            {"a": "a", "alpha": "a", "b": "b"},
            fetch=self.of["a"].fetch,
            timeout_ms=1_000.0,
        )
        for one in self.of.values():
            one.parts.on_other = self.fleets.serves_another

    def add(self, port: int, *names: str, **spec: Any) -> str:
        self.answers[port] = serving(*names)
        return self.fleets.add(named(port, **spec))

    def workers(self, model: str) -> list[str]:
        return [str(state.worker) for state in self.of[model].fleet.states()]


def bench_test(test: Callable[[Bench], Awaitable[None]]) -> Callable[[], None]:
    @functools.wraps(test)
    def run() -> None:
        async def scenario() -> None:
            bench = Bench()
            memberships = [one.membership for one in bench.of.values()]
            async with asyncio.timeout(10.0), memberships[0], memberships[1], bench.fleets:
                await test(bench)

        play(scenario)

    del run.__wrapped__
    return run


@bench_test
async def test_d36_a_worker_joins_the_model_that_it_serves_under_any_of_its_names(
    bench: Bench,
) -> None:
    assert not bench.fleets.is_starting()
    bench.add(1, "b")
    bench.add(2, "alpha", "lora")
    assert bench.fleets.is_starting()
    await until(lambda: bench.workers("a") and bench.workers("b"))
    assert (bench.workers("a"), bench.workers("b")) == (["w1:2"], ["w0:1"])
    assert [view.name for view in bench.fleets.views()] == ["w0:1", "w1:2"]
    assert bench.fleets.meaning("alpha") == ("a", "")
    assert bench.fleets.meaning("lora") == ("a", "lora"), "an adapter follows its base"
    assert bench.fleets.meaning("c") == ("", "")
    assert not bench.fleets.knows_model("c")
    assert [name for name, _ in bench.fleets.lengths(10)] == ["a", "b"]
    assert not bench.fleets.is_starting()


@bench_test
async def test_a_worker_that_serves_none_of_ours_is_shown_with_the_reason_and_asked_again(
    bench: Bench,
) -> None:
    bench.add(1, "other")
    await until(lambda: "serves other" in bench.fleets.views()[0].reason)
    assert "a, b" in bench.fleets.views()[0].reason
    assert bench.fleets.drain("w0:1")
    bench.answers[1].pages["/v1/models"] = b'{"data":[{"id":"b"}]}'
    await until(lambda: bench.workers("b"))
    assert bench.fleets.views()[0].is_draining


@bench_test
async def test_a_worker_that_comes_to_serve_another_model_moves_there(bench: Bench) -> None:
    bench.add(1, "a")
    await until(lambda: bench.workers("a"))
    bench.answers[1].pages["/v1/models"] = b'{"data":[{"id":"b"}]}'
    await until(lambda: bench.workers("b"))
    assert bench.workers("a") == []


@bench_test
async def test_a_worker_that_was_added_for_a_model_stays_with_it(bench: Bench) -> None:
    with pytest.raises(ConfigError, match="is no model here"):
        bench.add(1, "c", model_id="c")
    bench.add(1, "b", model_id="a")
    await until(lambda: "it was added for a" in bench.fleets.views()[0].reason)
    assert bench.workers("b") == []
    assert bench.fleets.remove("w0:1")
    assert not bench.fleets.remove("w0:1")
    assert bench.fleets.views() == []


@bench_test
async def test_one_more_worker_than_the_bound_is_refused(bench: Bench) -> None:
    assert len(bench.fleets._places) == 0
    for port in range(1, MAX_WORKERS + 1):
        bench.fleets._places[str(port)] = bench.fleets._places.get("x")  # type: ignore[assignment]  # only their count matters
    with pytest.raises(ConfigError, match="4096 workers"):
        bench.add(1, "a")
    bench.fleets._places.clear()


# -- requests --------------------------------------------------------------------------------------


class _Picker:
    def __init__(self, name: str, *, is_late: bool) -> None:
        self.name = name
        self.is_late = is_late
        self.told: list[str] = []

    def pick(self, request: InferenceRequest, tried: frozenset[WorkerId]) -> Pick | Awaitable[Pick]:
        endpoint = Endpoint(host="w", port=1, host_header="w:1")
        made = Pick(worker=WorkerId(self.name), endpoint=endpoint, body=b"")

        async def later() -> Pick:
            return made

        return later() if self.is_late else made

    def first_byte(self, pick: Pick) -> None:
        self.told.append("first byte")

    def pulled(self, pick: Pick, told: bytes) -> None:
        self.told.append("pulled")

    def ended(self, pick: Pick, end: AttemptEnd, cached_tokens: int | None) -> None:
        self.told.append("ended")


def _request(model: str) -> InferenceRequest:
    return InferenceRequest(
        request_id="r", route=Route.CHAT, method="POST", path="/v1/x", body=b"{}", model=model
    )


@pytest.mark.parametrize("is_late", [False, True])
def test_d36_each_request_and_what_becomes_of_it_goes_to_the_picker_of_its_model(
    is_late: bool,
) -> None:
    pickers = {name: _Picker(name, is_late=is_late) for name in ("a", "b")}
    names = {"a": "a", "b": "b", "lora": "b"}
    both = ByModel(pickers, lambda name: names.get(name, ""))

    async def run() -> None:
        found = both.pick(_request("lora"), frozenset())
        pick = found if isinstance(found, Pick) else await found
        assert pick.worker == "b"
        both.first_byte(pick)
        both.pulled(pick, b"")
        both.ended(pick, AttemptEnd.COMPLETE, None)

    asyncio.run(run())
    assert pickers["b"].told == ["first byte", "pulled", "ended"]
    assert pickers["a"].told == []
    with pytest.raises(ClientError) as unknown:
        both.pick(_request("c"), frozenset())
    assert unknown.value.refusal.status == 404
    with pytest.raises(ClientError, match="model is missing; this gateway serves a, b"):
        both.pick(_request(""), frozenset())
