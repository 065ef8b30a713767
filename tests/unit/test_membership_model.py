"""One fleet serves one model: who decides it, and what becomes of a worker of another."""

from __future__ import annotations

from member_bench import W0, Answers, Bench, bench_test, metrics, until

from trunkline.control.discovery import FleetModel
from trunkline.core.records import WorkerId


@bench_test
async def test_the_first_worker_decides_the_model_and_one_of_another_is_shown_and_left_out(
    bench: Bench,
) -> None:
    await bench.joined()
    stranger = Answers(metrics=metrics())
    stranger.pages["/v1/models"] = b'{"data":[{"id":"n"}]}'
    bench.add(2, stranger)
    await until(lambda: bench.log.count("worker.other_model"))
    view = bench.membership.view("w1:2")
    assert view is not None
    assert (view.reason, view.ranks) == ("serves n; this gateway serves m", ())
    assert bench.membership.served_models() == ["m"]
    stranger.pages["/v1/models"] = b'{"data":[{"id":"n"},{"id":"m"}]}'
    await until(lambda: bench.fleet.get(WorkerId("w1:2")))


@bench_test
async def test_a_worker_that_comes_back_with_another_model_leaves_the_fleet(bench: Bench) -> None:
    answers = await bench.joined()
    answers.pages |= {"/v1/models": b'{"data":[{"id":"n"}]}', "/metrics": metrics(64)}
    await until(lambda: not bench.fleet.states())
    assert not bench.directory.knows(W0)


@bench_test
async def test_a_name_from_the_settings_is_the_model_before_any_worker_joins(bench: Bench) -> None:
    bench.parts.model = FleetModel("alias")
    assert bench.membership.served_models() == ["alias"]
    bench.add()
    await until(lambda: bench.log.count("worker.other_model"))
    assert bench.fleet.states() == []


@bench_test
async def test_a_worker_that_serves_another_model_than_it_was_added_for_is_left_out(
    bench: Bench,
) -> None:
    bench.add(model_id="wanted")
    await until(lambda: bench.log.count("worker.other_model"))
    view = bench.membership.view("w0:1")
    assert view is not None
    assert view.reason == "serves m; it was added for wanted"
    assert bench.membership.served_models() == []


@bench_test
async def test_adapters_that_a_worker_loads_later_are_known_and_unloaded_ones_no_longer(
    bench: Bench,
) -> None:
    assert bench.membership.knows_model("anything"), "nothing is known yet"
    answers = await bench.joined()
    assert bench.membership.knows_model("m")
    assert not bench.membership.knows_model("adapter")
    answers.pages["/v1/models"] = b'{"data":[{"id":"m"},{"id":"adapter"}]}'
    await until(lambda: bench.membership.knows_model("adapter"))
    answers.pages["/v1/models"] = b'{"data":[{"id":"m"}]}'
    await until(lambda: not bench.membership.knows_model("adapter"))
    assert bench.log.count("worker.joined") == 1


@bench_test
async def test_a_worker_that_changes_its_model_as_it_runs_leaves_the_fleet(bench: Bench) -> None:
    answers = await bench.joined()
    answers.pages["/v1/models"] = b"nonsense"
    seen = answers.asked.count("/v1/models")
    await until(lambda: answers.asked.count("/v1/models") > seen + 1)
    assert bench.membership.knows_model("m")
    assert bench.fleet.get(W0)
    answers.pages["/v1/models"] = b'{"data":[{"id":"n"}]}'
    await until(lambda: not bench.fleet.states())


@bench_test
async def test_the_context_of_the_fleet_is_that_of_its_smallest_worker(bench: Bench) -> None:
    assert bench.membership.max_model_len(1_000) == 1_000
    for port, tokens in [(1, b"4096"), (2, b"512"), (3, b"-7")]:
        answers = Answers()
        answers.pages["/v1/models"] = b'{"data":[{"id":"m","max_model_len":' + tokens + b"}]}"
        await bench.joined(port, answers)
    views = [view.max_model_len for view in bench.membership.views()]
    assert views == [4_096, 512, None]
    assert bench.membership.max_model_len(1_000) == 512
    bench.membership.remove("w1:2")
    assert bench.membership.max_model_len(1_000) == 1_000
