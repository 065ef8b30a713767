"""What a gateway says of itself as it comes up."""

from __future__ import annotations

import json

import pytest

from trunkline.config import Config, ListenConfig
from trunkline.lifetime import announce


def test_the_urls_it_tells_can_be_asked_also_where_its_address_is_of_ipv6(
    capsys: pytest.CaptureFixture[str],
) -> None:
    listen = ListenConfig(host="::1", port=30_000, admin_host="127.0.0.1", admin_port=29_000)
    announce(Config(listen=listen))
    assert json.loads(capsys.readouterr().out) == {
        "url": "http://[::1]:30000",
        "admin_url": "http://127.0.0.1:29000",
        "dashboard": "http://127.0.0.1:29000/dashboard",
    }
