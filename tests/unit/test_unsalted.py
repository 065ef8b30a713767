"""Where tenants are kept apart, nothing goes to an engine that would not keep to the salt there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from picker_bench import W0, Bench, ids, request

from trunkline.control.engine import parse_version, release_of
from trunkline.core.records import WorkerId
from trunkline.gateway.contracts import OPEN_GRANT, ClientError, InferenceRequest, Route
from trunkline.gateway.telling import require_apart
from trunkline.ports.worker import Endpoint, EngineKind, Target

LATE = ["/v1/messages", "/v1/responses", "/v1/embeddings", "/v1/rerank", "/score", "/rerank/?x=1"]
ALWAYS = ["/v1/chat/completions", "/v1/completions"]
FORMS = ["/v1/audio/transcriptions", "/v1/audio/translations"]


def target(kind: EngineKind, version: str = "") -> Target:
    endpoint = Endpoint(host="127.0.0.1", port=1, host_header="w")
    return Target(worker=WorkerId("w"), endpoint=endpoint, engine=kind, release=release_of(version))


@pytest.mark.parametrize("path", LATE)
@pytest.mark.parametrize(
    ("kind", "version", "keeps"),
    [
        (EngineKind.VLLM, "0.32.0", True), (EngineKind.VLLM, "0.33.1rc2.dev7+g1", True),
        (EngineKind.VLLM, "1.0.0", True), (EngineKind.VLLM, "0.31.9", False),
        (EngineKind.VLLM, "0.1.dev1+g12", False), (EngineKind.VLLM, "", False),
        (EngineKind.UNKNOWN, "0.32.0", True), (EngineKind.UNKNOWN, "", False),
        (EngineKind.TRUNKLINE, "", True),
    ],
)  # fmt: skip
def test_paths_that_took_no_salt_once_are_kept_apart_by_releases_that_do(
    path: str, kind: EngineKind, version: str, keeps: bool
) -> None:
    assert target(kind, version).keeps_salt(path) is keeps


@pytest.mark.parametrize("kind", EngineKind)
def test_chats_are_kept_apart_by_every_engine_and_forms_by_none(kind: EngineKind) -> None:
    assert all(target(kind).keeps_salt(path) for path in ALWAYS)
    assert not any(target(kind, "0.32.0").keeps_salt(path) for path in FORMS)


def asked(path: str = "/v1/messages", **more: Any) -> InferenceRequest:
    someone = replace(OPEN_GRANT.principal, auth_method="key")
    grant = replace(OPEN_GRANT, principal=someone)
    made = replace(request(ids(3)), path=path, route=Route.MESSAGES, grant=grant)
    return replace(made, **more)


def code(what: InferenceRequest, where: Target, *, is_salted: bool = True) -> str:
    try:
        require_apart(what, where, is_salted=is_salted)
    except ClientError as error:
        return f"{error.refusal.status} {error.refusal.code}"
    return ""


def test_a_tenant_is_refused_where_the_engine_does_not_say_that_it_keeps_the_salt() -> None:
    old, new = target(EngineKind.VLLM, "0.31.0"), target(EngineKind.VLLM, "0.32.0")
    assert code(asked(), old) == "403 unsalted_path"
    assert code(asked(), new) == ""
    assert code(asked(is_vouched_for=True), old) == "", "the operator's word"
    assert code(asked(is_vouched_for=True), target(EngineKind.SGLANG)) == "403 unsalted_path"
    assert code(asked(grant=OPEN_GRANT), old) == "", "where all are one tenant"
    assert code(asked(route=Route.COUNT_TOKENS), old) == "", "nothing is computed"
    assert code(asked(), new, is_salted=False) == "415 unsalted_body"


def test_the_picker_asks_before_anything_is_sent() -> None:
    bench = Bench(W0)
    with pytest.raises(ClientError) as caught:
        bench.picker.pick(asked(), frozenset())
    assert caught.value.refusal.code == "unsalted_path"
    bench.assert_clean()


@pytest.mark.parametrize(
    ("body", "version"),
    [
        (b'{"version":"0.32.0"}', "0.32.0"), (b"{}", ""), (b"[]", ""), (b"\xff", ""),
        (b'{"version":1}', ""),
    ],
)  # fmt: skip
def test_a_version_is_what_the_engine_says_or_nothing(body: bytes, version: str) -> None:
    assert parse_version(body) == version
