"""What sources name, held against a membership: C10, C89, C90, C91."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
from member_bench import W0, Answers, Bench, bench_test, metrics, until

from trunkline.config_discovery import DiscoveryConfig
from trunkline.control.roster import Roster
from trunkline.control.views import WorkerSpec
from trunkline.core.decision import Exclusion
from trunkline.core.records import WorkerId
from trunkline.discovery_side import discovery_problems
from trunkline.errors import ConfigError
from trunkline.ports.workers import NamedWorker
from trunkline.worker_specs import worker_spec
from trunkline.worker_url import address_problem


class Nobody:
    """A source that tests speak for."""

    name = "test"

    async def run(self, tell: object, on_trouble: object) -> None: ...


def spec_of(url: str, api_key: str, labels: Mapping[str, str]) -> WorkerSpec:
    return worker_spec(url, api_key, labels)


def rostered(bench: Bench) -> Roster:
    for port in range(1, 10):
        bench.answers[port] = Answers(metrics=metrics())
    return Roster(
        Nobody(),
        bench.membership,
        spec_of,
        address_problem=lambda host, is_found: address_problem(host, is_found, ()),
        hide=lambda _key: None,
        log=bench.log,
    )


def one(port: int, **more: object) -> NamedWorker:
    return NamedWorker(url=f"http://w{port - 1}:{port}", **more)  # type: ignore[arg-type]


def names(bench: Bench) -> list[str]:
    return sorted(view.name for view in bench.membership.views())


@bench_test
async def test_the_fleet_is_what_the_source_says(bench: Bench) -> None:
    roster = rostered(bench)
    roster.take([one(1), one(2)])
    assert names(bench) == ["w0:1", "w1:2"]
    roster.take([one(2), one(3)])
    assert names(bench) == ["w1:2", "w2:3"]
    roster.take([])
    assert names(bench) == []


@bench_test
async def test_c10_what_stays_named_keeps_its_life_its_counter_and_its_index(bench: Bench) -> None:
    roster = rostered(bench)
    roster.take([one(1)])
    await until(lambda: bench.fleet.get(W0))
    state = bench.state()
    state.queue.start(1, 10.0, bench.clock.now())
    for _ in range(100):
        roster.take([one(1), one(2)])
        roster.take([one(1)])
    assert bench.state() is state
    assert state.queue.in_flight_count == 1


@bench_test
async def test_c89_another_pod_at_the_same_address_is_another_worker(bench: Bench) -> None:
    roster = rostered(bench)
    roster.take([one(1, labels=(("pod_uid", "a"),))])
    await until(lambda: bench.fleet.get(W0))
    before = bench.state()
    roster.take([one(1, labels=(("pod_uid", "b"),))])
    await until(lambda: bench.fleet.get(W0) not in (None, before))
    assert bench.view().labels == {"pod_uid": "b"}


@bench_test
async def test_a_worker_that_is_to_drain_drains_and_comes_back(bench: Bench) -> None:
    roster = rostered(bench)
    roster.take([one(1), one(2, is_draining=True)])
    await until(lambda: bench.fleet.get(WorkerId("w1:2")))
    assert bench.view("w1:2").exclusion is Exclusion.DRAINING
    state = bench.state(WorkerId("w1:2"))
    roster.take([one(1), one(2)])
    assert bench.view("w1:2").exclusion is None
    assert bench.state(WorkerId("w1:2")) is state, "it knows what it knew"
    bench.membership.drain("w1:2")  # by an operator: no word of the source, so it stays
    roster.take([one(1), one(2)])
    assert bench.view("w1:2").exclusion is Exclusion.DRAINING


@bench_test
async def test_what_somebody_else_added_is_not_the_sources_to_take_away(bench: Bench) -> None:
    roster = rostered(bench)
    bench.add(1)
    roster.take([one(1), one(2)])
    roster.take([])
    assert names(bench) == ["w0:1"]


@bench_test
async def test_trouble_of_the_source_leaves_its_workers_and_is_told_of_once(bench: Bench) -> None:
    roster = rostered(bench)
    roster.take([one(1)])
    for _ in range(3):
        roster.trouble("not reached")
    assert names(bench) == ["w0:1"]
    assert bench.log.count("workers.source_failed") == 1
    roster.take([one(1)])
    assert bench.log.count("workers.source_well") == 1


@pytest.mark.parametrize(
    ("host", "is_found"),
    [
        ("169.254.169.254", False),
        ("169.254.1.1", True),
        ("[fe80::1]", False),
        ("[fd00:ec2::254]", True),
        ("[::ffff:169.254.169.254]", True),
        ("100.100.100.200", True),
        ("224.0.0.1", True),
        ("127.0.0.1", True),
        ("[::1]", True),
        ("0.0.0.0", True),
    ],
)
def test_an_address_that_can_be_no_worker_is_refused_and_the_others_are_taken(
    host: str, is_found: bool
) -> None:
    @bench_test
    async def run(bench: Bench) -> None:
        roster = rostered(bench)
        bad = NamedWorker(url=f"http://{host}:8000", is_found=is_found)
        for _ in range(3):
            roster.take([bad, one(1)])
        assert names(bench) == ["w0:1"]
        assert bench.log.count("worker.refused") == 1

    run()


def test_loopback_is_for_those_who_wrote_it_or_said_so() -> None:
    assert address_problem("127.0.0.1", False, ()) is None
    assert address_problem("127.0.0.1", True, ("127.0.0.0/8",)) is None
    assert address_problem("10.1.2.3", True, ("10.0.0.0/8", "fd00::/8")) is None
    assert address_problem("fd00::7", True, ("10.0.0.0/8", "fd00::/8")) is None
    assert address_problem("11.1.2.3", False, ("10.0.0.0/8",)) is not None
    assert address_problem("169.254.1.1", False, ("169.254.0.0/16",)) is not None
    assert address_problem("engine-1.svc", True, ()) is None, "a name is not looked up here"


@bench_test
async def test_a_url_that_is_none_is_refused_and_named(bench: Bench) -> None:
    roster = rostered(bench)
    roster.take([NamedWorker(url="ftp://x"), one(1)])
    assert names(bench) == ["w0:1"]
    [why] = [fields["why"] for name, fields in bench.log.events if name == "worker.refused"]
    assert "ftp://x" in str(why)


@bench_test
async def test_c90_random_changes_of_a_source_end_as_it_says(bench: Bench) -> None:
    roster, dice = rostered(bench), random.Random(5)
    for _ in range(300):
        ports = [port for port in range(1, 9) if dice.random() < 0.5]
        draining = {port for port in ports if dice.random() < 0.3}
        roster.take([one(port, is_draining=port in draining) for port in ports])
        assert names(bench) == [f"w{port - 1}:{port}" for port in ports]
        told = {view.name: view.is_draining for view in bench.membership.views()}
        assert told == {f"w{port - 1}:{port}": port in draining for port in ports}


@pytest.mark.parametrize("text", ["app", "app=x,role=y", "app = x", "=x", "app=x y", "app!=x", ""])
def test_c92_a_selector_that_is_not_exact_is_refused(text: str) -> None:
    problems = discovery_problems(DiscoveryConfig(service_discovery=True, selector=(text,)))
    assert problems["selector"]


def test_c92_labels_as_kubernetes_has_them_are_taken() -> None:
    labels = ("app=x", "kubernetes.io/service-name=engines", "tier=", "a_b.c=D-1")
    problems = discovery_problems(DiscoveryConfig(service_discovery=True, selector=labels))
    assert not any(problems.values())


def test_settings_of_discovery_that_make_no_sense_are_refused() -> None:
    wrong = {
        "worker_dns": DiscoveryConfig(worker_dns=("engines",)),
        "worker_networks": DiscoveryConfig(worker_networks=("10.0.0.1/8",)),
        "selector": DiscoveryConfig(selector=("app=x",)),
        "service_discovery": DiscoveryConfig(service_discovery=True),
        "service_discovery_namespace": DiscoveryConfig(service_discovery_namespace="a/b"),
    }
    for name, discovery in wrong.items():
        assert discovery_problems(discovery)[name], name
    with pytest.raises(ConfigError):
        worker_spec("http://w:0", "", {})
