"""Two models behind one gateway, each with its own tokenizer, template and workers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from fleet import MODEL_FOLDER, Gateway, Processes, processes, until
from tenants import Caller, tenants

TINY = ("--profile", "tiny")
TEXT = "The cache keeps what was computed, and the next request begins where it ended. " * 12


def two_models(started: Processes, folder: Path) -> tuple[list[str], Path]:
    """Workers of models `a` (as it is) and `b` (fewer merges, so other ids; another template), and
    the settings that name both.
    """
    shutil.copytree(MODEL_FOLDER, folder, dirs_exist_ok=True)
    definition = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    definition["model"]["merges"] = definition["model"]["merges"][:900]
    (folder / "tokenizer.json").write_text(json.dumps(definition), "utf-8")
    template = (folder / "chat_template.jinja").read_text("utf-8")
    (folder / "chat_template.jinja").write_text(
        template.replace("assistant\\n", "assistant of b:\\n"), "utf-8"
    )
    settings = folder / "trunkline.toml"
    settings.write_text(
        f'[[models]]\nname = "a"\nmodel_path = "{MODEL_FOLDER}"\n'
        f'[[models]]\nname = "b"\nserved_names = ["beta"]\nmodel_path = "{folder}"\n'
    )
    urls = [
        started.worker(*TINY, "--model", "a").url,
        started.worker(*TINY, "--model", "b", "--model-path", str(folder)).url,
        started.worker(*TINY, "--model", "a").url,
    ]
    return urls, settings


def wait_all_ready(gateway: Gateway) -> None:
    until(
        lambda: all(row["state"] == "ready" for row in gateway.workers().values()),
        "every worker found its model",
    )


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Processes, Gateway]]:
    with processes() as started:
        urls, settings = two_models(started, tmp_path_factory.mktemp("b"))
        gateway = started.gateway(urls, *TINY, "--config", str(settings))
        wait_all_ready(gateway)
        yield started, gateway


def test_d36_each_model_is_read_with_its_own_tokenizer_and_hits_its_own_cache(
    both: tuple[Processes, Gateway],
) -> None:
    _, gateway = both
    counts: dict[str, int] = {}
    for model in ("a", "b"):
        first = gateway.chat(TEXT, model=model, max_tokens=1)
        again = gateway.chat(TEXT, model=model, max_tokens=1)
        assert (first.status, again.status) == (200, 200)
        assert gateway.workers()[again.worker]["model_id"] == model
        usage = again.json["usage"]
        counts[model] = usage["prompt_tokens"]
        reused = usage["prompt_tokens_details"]["cached_tokens"]
        assert reused == (usage["prompt_tokens"] - 1) // 16 * 16
        expected = gateway.admin("/decisions").json()["decisions"][0]
        assert expected["prompt_tokens"] == usage["prompt_tokens"], "counted as the worker does"
        assert expected["matched_tokens"] == reused
    assert counts["b"] > counts["a"], "fewer merges are more tokens"
    assert gateway.metric("over_claims_total") == 0
    for name, row in gateway.workers().items():
        assert row["mode"] == "exact"
        engine = row["detail"]["engine"]
        assert gateway.metric("worker_info", worker=name, model=row["model_id"], engine=engine) == 1


def test_all_models_are_listed_and_no_other_is_served(both: tuple[Processes, Gateway]) -> None:
    _, gateway = both
    listed = gateway.client.get("/v1/models").json()["data"]
    assert [row["id"] for row in listed] == ["a", "b"]
    assert gateway.chat(TEXT, model="c").status == 404
    unnamed = gateway.chat(TEXT)
    assert (unnamed.status, unnamed.json["error"]["code"]) == (400, "missing_model")
    too_high = gateway.complete([5_000_000], model="b")
    assert too_high.status == 400
    assert "vocabulary" in too_high.json["error"]["message"]


def test_readiness_names_the_model_that_nobody_serves(both: tuple[Processes, Gateway]) -> None:
    _, gateway = both
    told = gateway.client.get("/readiness").json()
    assert (told["status"], told["detail"]) == ("ready", "3 usable")
    name = next(name for name, row in gateway.workers().items() if row["model_id"] == "b")
    assert gateway.admin(f"/workers/{name}", method="DELETE").status_code < 300
    until(
        lambda: gateway.client.get("/readiness").json()["detail"] == "2 usable; none for b",
        "b is out",
    )
    assert gateway.chat(TEXT, model="b", max_tokens=1).status == 503
    assert gateway.chat(TEXT, model="a", max_tokens=1).status == 200


def test_tenants_are_apart_on_each_model_and_what_ends_on_one_model_lives_on_the_other(
    tmp_path: Path,
) -> None:
    with processes() as started:
        urls, settings = two_models(started, tmp_path / "b")
        held = tenants(started, urls, tmp_path, *TINY, "--config", str(settings))
        wait_all_ready(held.gateway)
        acme, globex = held.caller("acme"), held.caller("globex")

        def play(attempt: int) -> dict[str, list[int]]:
            """Tokens reused, a model: said first, again, by the other tenant, after the order."""
            text = f"attempt {attempt} {TEXT}"
            told = {
                model: [cached(who, model, text) for who in (acme, acme, globex)]
                for model in ("a", "b")
            }
            held.raised("invalidate", "model/b")
            held.wait_leased(len(urls))
            for model in ("a", "b"):
                told[model].append(cached(acme, model, text))
            return told

        for model, (first, again, other, after) in held.while_leased(play).items():
            assert (first, other) == (0, 0), model
            assert again > 0, model
            assert after == (again if model == "a" else 0), model


def test_a_key_for_one_model_is_told_of_no_other(tmp_path: Path) -> None:
    with processes() as started:
        urls, settings = two_models(started, tmp_path / "b")
        held = tenants(started, urls, tmp_path, *TINY, "--config", str(settings))
        wait_all_ready(held.gateway)
        only_b = held.caller("acme", models=["b"])
        assert only_b.answer(TEXT, model="b", max_tokens=1).status == 200
        refused, unknown = (only_b.answer(TEXT, model=name, max_tokens=1) for name in ("a", "zz"))
        assert refused.status == unknown.status == 404
        told = json.dumps(refused.error).replace(refused.error["request_id"], "R")
        assert told.replace("`a`", "M") == json.dumps(unknown.error).replace(
            unknown.error["request_id"], "R"
        ).replace("`zz`", "M")


def cached(who: Caller, model: str, text: str) -> int:
    answer = who.answer(text, model=model, max_tokens=1)
    assert answer.status == 200, answer.json
    return answer.cached
