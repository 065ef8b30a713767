"""What wiring makes of an operator's words about a worker, before anything listens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trunkline.config import Config
from trunkline.errors import ConfigError
from trunkline.worker_specs import spec_reader, worker_spec


@pytest.mark.parametrize(
    ("url", "name", "base_path", "port"),
    [
        ("http://h", "h:80", "", 80),
        ("https://H/w1/", "h:443/w1", "/w1", 443),
        ("http://lb:9/w2", "lb:9/w2", "/w2", 9),
        ("http://[::1]:9", "[::1]:9", "", 9),
    ],
)
def test_a_workers_name_tells_it_from_others_behind_the_same_host(
    url: str, name: str, base_path: str, port: int
) -> None:
    spec = worker_spec(url, "", {})
    endpoint = spec.endpoint
    assert (spec.name, endpoint.base_path, endpoint.port) == (name, base_path, port)
    assert endpoint.host_header == name.removesuffix(base_path)


@pytest.mark.parametrize("key", ["é", "a b", "a\r\nx: y", "a\x7f"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_repeated(key: str) -> None:
    with pytest.raises(ConfigError, match="api_key holds") as caught:
        worker_spec("http://h:1", key, {})
    assert key not in str(caught.value)


@pytest.mark.parametrize(
    ("fragment", "endpoint", "replay"),
    [
        ("events=tcp://h:5557", "tcp://h:5557", None),
        ("events=tcp://*:5557&replay=tcp://*:5558", "tcp://h:5557", "tcp://h:5558"),
        ("events=tcp://other:1&replay=tcp://other:2", "tcp://other:1", "tcp://other:2"),
        ("events=ipc:///run/events", "ipc:///run/events", None),
    ],
)
def test_events_behind_a_workers_url_are_connected_to(
    fragment: str, endpoint: str, replay: str | None
) -> None:
    [source] = worker_spec(f"http://h:1#{fragment}", "", {}).event_sources
    assert (source.endpoint, source.replay_endpoint) == (endpoint, replay)
    assert not source.is_bound_by_us
    assert source.rank is None


def test_an_agent_beside_a_worker_has_an_address_of_its_own_and_not_the_engines_key() -> None:
    spec = worker_spec("http://h:1#agent=http://a:2", "engine's-key", {})
    assert spec.agent is not None
    assert (spec.agent.host, spec.agent.port, spec.agent.api_key) == ("a", 2, "")
    assert spec.event_sources == ()


def test_an_engines_own_tier_is_for_one_tenant() -> None:
    url = "http://h:1#p2p=h:5710"
    one = replace(Config(), auth=replace(Config().auth, auth="off"))
    assert spec_reader(one)(url, "", {}).p2p == ("h", 5710)
    keys = replace(Config(), auth=replace(Config().auth, auth="keys"))
    with pytest.raises(ConfigError, match="one tenant"):
        spec_reader(keys)(url, "", {})


def test_an_event_address_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="event endpoint"):
        worker_spec("http://h:1#events=http://h:2", "", {})
