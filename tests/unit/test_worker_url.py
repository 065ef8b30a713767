"""The URL of a worker: what it may be, how it is named, and what of it is not said again."""

from __future__ import annotations

import pytest

from trunkline import settings
from trunkline.cli import build_parser
from trunkline.errors import ConfigError
from trunkline.worker_specs import worker_spec
from trunkline.worker_url import worker_name, worker_url_problem

EVENTS = "http://a#events=tcp://a:5557&replay=tcp://a:5558"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "worker:8000",
        "ftp://a:1",
        "http://",
        "http://:80",
        "http://a:0",
        "http://a:99999",
        "http://a:b",
        "http://[::1",
        "http://user:pass@a:1",
        "http://a:1?x=1",
        "http://a:1/ x",
        "http://a\n:1",
        "http://" + "a" * 3_000,
        "http://" + "a" * 64 + ":1",
        "http://a..b:1",
        "http://ü:1",
        "http://a:1/é",
        "http://a:1/\r\nx",
        "http://a:1/w@1",
        "http://a:1#x=1",
        "http://a:1#replay=tcp://a:1",
        "http://a:1#events=tcp://a:1&events=tcp://a:2",
        "http://a:1#agent=tcp://a:2",
        "http://a:1#agent=http://a:2/path",
        "http://a:1#agent=http://user@a:2",
        "http://a:1#agent=",
        "http://a:1#p2p=a",
        "http://a:1#p2p=a:0",
        "http://a:1#p2p=a:70000",
        "http://a:1#p2p=http://a:1",
    ],
)
def test_what_cannot_name_a_worker_is_told_why(url: str) -> None:
    assert worker_url_problem(url)


@pytest.mark.parametrize(
    "url",
    [
        *("http://a:1", "https://a", "http://[::1]:80/v", "http://a.:1", EVENTS),
        *("http://a:1#agent=http://a:2", "http://a:1#p2p=[::1]:2", f"{EVENTS}&agent=http://a:2"),
    ],
)
def test_what_can_name_a_worker_has_no_problem(url: str) -> None:
    assert worker_url_problem(url) is None


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("http://h", "h:80"),
        ("https://H/", "h:443"),
        ("http://H:8000/Base/", "h:8000/Base"),
        ("http://[::1]:80/v", "[::1]:80/v"),
        ("http://h:1#events=tcp://h:2", "h:1"),
    ],
)
def test_a_worker_has_one_name_and_its_name_is_an_address_of_it(url: str, name: str) -> None:
    assert worker_name(url) == name
    assert worker_name(f"http://{name}") == name
    assert worker_url_problem(f"http://{name}") is None


@pytest.mark.parametrize(
    "url",
    ["http://user:hidden@a:1", "http://a:1/?key=hidden", "http://a:1#agent=http://u:hidden@b:1"],
)
def test_the_secret_in_a_refused_url_of_a_worker_is_not_said_again(url: str) -> None:
    with pytest.raises(ConfigError, match="a:1") as caught:
        worker_spec(url, "", {})
    with pytest.raises(ConfigError) as refused:
        settings.resolve(vars(build_parser("serve").read(["--worker-urls", url])), {})
    said = f"{refused.value} {caught.value}"
    assert "***" in said
    assert "hidden" not in said
