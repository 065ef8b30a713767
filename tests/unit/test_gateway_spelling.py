"""Forbidden names in every spelling; ordinary names in none."""

from __future__ import annotations

import pytest

from trunkline.gateway.contracts import ClientError
from trunkline.gateway.fields import FORBIDDEN
from trunkline.gateway.routes import route_of
from trunkline.gateway.spelling import meant_by, spelled
from trunkline.gateway.strict_json import decode_object

SPELLED = [
    "cache_salt", "CACHE_SALT", "Cache_Salt", "cache%5Fsalt", "c%61che%5fsalt", "cache%255Fsalt",
    "CACHE%5FSALT", "cache_\u017falt",
]  # fmt: skip
OTHERS = ["cache", "cache_salts", "salt", "cache-salt", "100%", "%", "%5F", "", "content", "URL"]


@pytest.mark.parametrize("name", SPELLED)
def test_a_forbidden_name_is_known_in_every_spelling(name: str) -> None:
    assert meant_by(name, FORBIDDEN) == "cache_salt"
    assert spelled({"role": 1, name: 2}, FORBIDDEN) == {name: "cache_salt"}
    body = f'{{"a":[{{"role":1,"{name}":2}}]}}'.encode()
    assert decode_object(body, 64, FORBIDDEN)[1] == "cache_salt"


@pytest.mark.parametrize("name", OTHERS)
def test_other_names_mean_nothing_else(name: str) -> None:
    assert meant_by(name, FORBIDDEN) is None
    assert spelled({"role": 1, name: 2}, FORBIDDEN) == {}


@pytest.mark.parametrize("query", ["cache_salt=x", "a=b&Cache%5Fsalt", "MM_HASHES=1&a=b"])
def test_a_query_may_not_say_what_a_body_may_not(query: str) -> None:
    assert route_of(b"/v1/completions?a=cache_salt") is not None, "a value is no name"
    with pytest.raises(ClientError, match="no query"):
        route_of(b"/v1/completions?" + query.encode())
