"""Workers that Kubernetes knows, before a small API server on a real socket. C89."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from kubernetes_api import FakeApi, endpoint, kubernetes
from scripted import until, wire

from trunkline.adapters.kubernetes import WorkersKubernetes
from trunkline.adapters.kubernetes_http import KubernetesApi, in_cluster
from trunkline.errors import ConfigError
from trunkline.ports.workers import NamedWorker

READY, DRAINS = False, True


class Told:
    """What the source told last, and what it complained of."""

    def __init__(self) -> None:
        self.named: list[NamedWorker] | None = None
        self.troubles: list[str] = []

    def tell(self, named: Sequence[NamedWorker]) -> None:
        self.named = list(named)

    @property
    def workers(self) -> dict[str, bool]:
        """Address, and whether it drains."""
        return {one.url.removeprefix("http://"): one.is_draining for one in self.named or ()}


@contextlib.asynccontextmanager
async def following(api: FakeApi, folder: Path, port: int = 0) -> AsyncIterator[Told]:
    token = folder / "token"
    token.write_text(f"{api.token}\n")
    source = WorkersKubernetes(
        KubernetesApi("127.0.0.1", api.port, tls=None, token_file=token),
        namespace="ml",
        selector="app=engine,tier=gpu",
        port=port,
    )
    told = Told()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(source.run(told.tell, told.troubles.append))
        try:
            yield told
        finally:
            task.cancel()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def test_c89_the_set_follows_pods_that_come_are_not_ready_move_and_go(folder: Path) -> None:
    @wire
    async def run() -> None:
        async with kubernetes() as api:
            api.put("s1", endpoint("10.0.0.1", "a"), endpoint("10.0.0.2", "b"))
            async with following(api, folder) as told:
                await until(
                    lambda: told.workers == {"10.0.0.1:8000": READY, "10.0.0.2:8000": READY}
                )
                assert told.named is not None
                assert dict(told.named[0].labels)["pod_uid"] == "a"
                assert all(one.is_found for one in told.named)
                assert api.asked[0]["labelSelector"] == ["app=engine,tier=gpu"]
                api.put("s1", endpoint("10.0.0.1", "a", ready=False), endpoint("10.0.0.2", "b"))
                await until(lambda: told.workers["10.0.0.1:8000"] is DRAINS)
                api.put(
                    "s1", endpoint("10.0.0.9", "a"), endpoint("10.0.0.2", "b", terminating=True)
                )
                await until(
                    lambda: told.workers == {"10.0.0.9:8000": READY, "10.0.0.2:8000": DRAINS}
                )
                api.put("s1", endpoint("10.0.0.9", "c"))  # the same address, another pod
                await until(lambda: dict((told.named or [])[0].labels)["pod_uid"] == "c")
                api.put("s2", endpoint("10.0.0.3", "d"), port=9000)
                await until(lambda: told.workers.get("10.0.0.3:9000") is READY)
                api.drop("s1")
                await until(lambda: told.workers == {"10.0.0.3:9000": READY})
            assert not told.troubles

    run()


@pytest.mark.parametrize("gone_by", ["event", "status"])
def test_a_version_that_is_too_old_is_listed_anew(folder: Path, gone_by: str) -> None:
    @wire
    async def run() -> None:
        async with kubernetes() as api:
            api.put("s1", endpoint("10.0.0.1"))
            api.gone_by = gone_by
            async with following(api, folder) as told:
                await until(lambda: len(api.asked) == 2)
                api.slices.clear()  # nobody tells: that is what is lost with the history
                api.put("s2", endpoint("10.0.0.2"))
                api.forget()
                await until(lambda: told.workers == {"10.0.0.2:8000": READY})
                api.put("s2", endpoint("10.0.0.3"))
                await until(lambda: told.workers == {"10.0.0.3:8000": READY})
            assert not told.troubles, "that is how the protocol has it"

    run()


def test_a_list_of_several_pages_is_one_set_and_bookmarks_are_gone_on_from(folder: Path) -> None:
    @wire
    async def run() -> None:
        async with kubernetes() as api:
            api.page = 2
            for number in range(5):
                api.put(f"s{number}", endpoint(f"10.0.0.{number}", str(number)))
            async with following(api, folder) as told:
                await until(lambda: len(told.workers) == 5)
                await until(lambda: "watch" in api.asked[-1])
                api.bookmark()
                api.put("s0", endpoint("10.0.0.77", "x"))
                await until(lambda: "10.0.0.77:8000" in told.workers)
                assert "10.0.0.0:8000" not in told.workers

    run()


def test_an_endpoint_in_two_slices_is_one_worker_and_as_ready_as_the_better_says(
    folder: Path,
) -> None:
    @wire
    async def run() -> None:
        async with kubernetes() as api:
            api.put("a", endpoint("10.0.0.1", ready=False))
            api.put("b", endpoint("10.0.0.1"))
            api.put("c", endpoint("fd00::1"), addressType="IPv6")
            api.put("d", endpoint("example.org"), addressType="FQDN")
            api.put("e", {"addresses": ["10.0.0.5"]})  # nothing said is ready
            api.put("f", endpoint("10.0.0.6"), ports=[{"name": "grpc", "port": 1}, {"port": 2}])
            async with following(api, folder) as told:
                await until(lambda: told.workers != {})
                assert told.workers == {
                    "10.0.0.1:8000": READY,
                    "[fd00::1]:8000": READY,
                    "10.0.0.5:8000": READY,
                }, "of several ports none is called http"
            async with following(api, folder, port=7) as told:
                await until(lambda: told.workers != {})
                assert "10.0.0.6:7" in told.workers

    run()


def test_while_the_server_is_away_what_it_told_stays_and_a_new_token_is_read(folder: Path) -> None:
    @wire
    async def run() -> None:
        async with kubernetes() as api:
            api.put("s1", endpoint("10.0.0.1"))
            async with following(api, folder) as told:
                await until(lambda: told.workers != {})
                api.is_failing = True
                api.forget()
                await until(lambda: any("503" in why for why in told.troubles))
                api.token = "another-token"
                api.is_failing = False
                await until(lambda: api.refused_count > 0)
                assert told.workers == {"10.0.0.1:8000": READY}
                (folder / "token").write_text("another-token")
                api.put("s1", endpoint("10.0.0.2"))
                await until(lambda: told.workers == {"10.0.0.2:8000": READY})
            assert not any("token" in why for why in told.troubles)

    run()


def test_an_answer_that_is_none_changes_nothing(folder: Path) -> None:
    @wire
    async def run() -> None:
        async with kubernetes() as api:
            api.put("s1", endpoint("10.0.0.1"))
            async with following(api, folder) as told:
                await until(lambda: told.workers != {})
                api.put("s1", endpoint("10.0.0.1"), endpoints="nonsense")
                await until(lambda: bool(told.troubles))
                assert told.workers == {"10.0.0.1:8000": READY}
                api.put("s1", endpoint("10.0.0.2"))
                await until(lambda: told.workers == {"10.0.0.2:8000": READY})

    run()


def test_outside_of_a_cluster_the_settings_say_what_works_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match="--workers-file"):
        in_cluster(folder)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    with pytest.raises(ConfigError, match="service account"):
        in_cluster(folder)
