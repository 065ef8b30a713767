"""`trunkline explain`: the receipt of a request, and the choice for one that is not sent."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fleet import WAIT_S, Gateway, Processes, processes, text_of, until
from tenants import Shape, tenants

TERMS = ("queue_ms", "transfer_ms", "miss_ms", "imbalance_ms", "decode_pressure_ms")
ROUNDING_MS = 0.001 * (len(TERMS) + 1) / 2
"""Each figure of a receipt is rounded to a thousandth."""


@pytest.fixture(scope="module")
def started() -> Iterator[Processes]:
    with processes() as these:
        yield these


@pytest.fixture(scope="module")
def gateway(started: Processes) -> Gateway:
    workers = started.workers(2, "--profile", "tiny")
    return started.gateway([worker.url for worker in workers])


def explain(gateway: Gateway, *words: str, stdin: str = "") -> tuple[int, str]:
    """Exit code and output of `trunkline explain`."""
    url = gateway.process.ready["admin_url"]
    command = [sys.executable, "-m", "trunkline", "explain", *words, "--admin-url", url]
    done = subprocess.run(
        command, input=stdin, capture_output=True, text=True, timeout=2 * WAIT_S, check=False
    )
    return done.returncode, done.stdout + done.stderr


def receipt(gateway: Gateway, request_id: str) -> dict[str, Any]:
    """Once it is known what came true."""

    def found() -> dict[str, Any] | None:
        told = gateway.admin(f"/decisions/{request_id}").json()
        return told if told["outcome"] is not None else None

    return until(found, f"the outcome of {request_id}")


def held(gateway: Gateway) -> tuple[float, ...]:
    """What a request would change."""
    names = ("decisions_total", "requests_total", "directory_blocks", "reported_prompts_total")
    return tuple(gateway.metric(name) for name in names)


def test_the_terms_of_every_candidate_add_up_and_the_loser_is_shown(gateway: Gateway) -> None:
    prompt = text_of(300, "terms")
    gateway.complete(prompt, {"x-request-id": "terms-1"})
    answer = gateway.complete(prompt, {"x-request-id": "terms-2"})
    told = receipt(gateway, "terms-2")
    assert len(told["candidates"]) == 2
    for row in told["candidates"]:
        assert sum(row[term] for term in TERMS) == pytest.approx(row["cost_ms"], abs=ROUNDING_MS)
    gain = told["gain"]
    saved = gain["saved_prefill_ms"] - gain["queue_ms"] - gain["transfer_ms"] - gain["imbalance_ms"]
    assert saved == pytest.approx(told["net_gain_ms"], abs=ROUNDING_MS)
    code, text = explain(gateway, "terms-2")
    assert code == 0, text
    assert "\\n" not in text, "each line is one"
    loser = next(row for row in told["candidates"] if row["worker"] != told["worker"])
    [chosen_line] = [line for line in text.splitlines() if line.startswith("* ")]
    [loser_line] = [line for line in text.splitlines() if line.startswith(f"  {loser['worker']}")]
    assert told["worker"] in chosen_line
    chosen = next(row for row in told["candidates"] if row["worker"] == told["worker"])
    assert chosen_line.split()[-1] == f"{chosen['cost_ms']:,.1f}"
    assert loser_line.split()[-1] == f"{loser['cost_ms']:,.1f}"
    assert f"{answer.cached:,} tokens reused of {told['matched_tokens']:,} predicted" in text


def test_what_was_predicted_is_joined_with_what_came_true(gateway: Gateway) -> None:
    prompt = text_of(300, "joined")
    gateway.complete(prompt, {"x-request-id": "joined-0"})
    answer = gateway.complete(prompt, {"x-request-id": "joined-1"})
    outcome = receipt(gateway, "joined-1")["outcome"]
    assert outcome["end"] == "complete"
    assert (outcome["reused_tokens"], outcome["predicted_tokens"]) == (
        answer.cached,
        answer.predicted,
    )
    assert answer.cached > 0
    assert 0 < outcome["first_byte_ms"] <= outcome["took_ms"]
    assert outcome["predicted_ms"] > 0


def test_requests_that_their_clients_gave_one_id_are_shown_each_by_itself(gateway: Gateway) -> None:
    ids = {"x-request-id": "shared"}
    gateway.complete(text_of(300, "first of two"), ids)
    alone = receipt(gateway, "shared")
    assert "same_id" not in alone
    code, text = explain(gateway, "shared")
    assert (code, text.count("request shared went to")) == (0, 1)
    gateway.complete(text_of(400, "second of two"), ids)
    told = receipt(gateway, "shared")
    assert told["earlier"] == []
    assert told["prompt_tokens"] > alone["prompt_tokens"]
    assert told["same_id"] == [alone]
    code, text = explain(gateway, "shared")
    assert code == 0, text
    assert text.startswith("1 other request had the same id")
    assert text.count("request shared went to") == 2
    assert "an earlier attempt" not in text


def test_a_request_that_is_not_sent_changes_nothing_and_is_answered_as_it_would_be(
    gateway: Gateway, tmp_path: Path
) -> None:
    prompt = text_of(300, "preview")
    sent = gateway.complete(prompt, {"x-request-id": "preview-1"})
    receipt(gateway, "preview-1")
    body = tmp_path / "body.json"
    body.write_text(json.dumps({"prompt": prompt, "max_tokens": 4}))
    before = held(gateway)
    code, text = explain(gateway, "--prompt", str(body), "--json")
    told = json.loads(text)
    assert code == 0
    assert (told["worker"], told["reason"]) == (sent.worker, "cache-hit")
    assert held(gateway) == before
    then = gateway.complete(prompt, {"x-request-id": "preview-2"})
    assert (then.worker, then.predicted) == (told["worker"], told["matched_tokens"])
    code, text = explain(gateway, "--prompt", "-", stdin=prompt)
    assert code == 0
    assert f"this request would go to {sent.worker}" in text
    assert "nothing was sent" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "give a request's id, or --prompt"),
        (("some-id", "--prompt", "x"), "give a request's id, or --prompt"),
        (("some-id", "--tenant", "acme"), "go with --prompt"),
        (("never-seen",), "--decisions-kept"),
        (("--prompt", "/no/such/file"), "cannot be read"),
        (("--prompt", "-"), "is empty"),
        (("--prompt", "PROMPT", "--tenant", "acme"), "serves one tenant"),
        (("--prompt", "PROMPT", "--model", "other"), "`other` is not served here"),
        (("--prompt", "BODY"), "and at most 2"),
    ],
)
def test_what_cannot_be_explained_is_refused_with_the_remedy(
    gateway: Gateway, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    prompt, body = tmp_path / "prompt.txt", tmp_path / "body.json"
    prompt.write_text("a prompt")
    body.write_text(json.dumps({"prompt": "a", "temperature": 7}))
    named = {"PROMPT": str(prompt), "BODY": str(body)}
    code, text = explain(gateway, *(named.get(word, word) for word in words))
    assert code != 0
    assert said in text
    assert len(text.splitlines()) == 1


def test_a_tenants_preview_sees_its_own_cache_alone(started: Processes, tmp_path: Path) -> None:
    workers = started.workers(2, "--profile", "tiny")
    these = tenants(started, [worker.url for worker in workers], tmp_path)
    one, _two = these.caller("acme"), these.caller("globex")
    prompt, body = text_of(300, "tenants"), tmp_path / "body.json"
    body.write_text(json.dumps({"prompt": prompt}))

    def previewed(tenant: str) -> dict[str, Any]:
        words = ("--prompt", str(body), "--tenant", tenant, "--json")
        code, text = explain(these.gateway, *words)
        assert code == 0, text
        return json.loads(text)

    def play(_attempt: int) -> tuple[int, int]:
        one.ask(Shape(is_chat=False, is_stream=False), prompt)
        return previewed("acme")["matched_tokens"], previewed("globex")["matched_tokens"]

    own, foreign = these.while_leased(play)
    assert own > 0
    assert foreign == 0
    records = these.gateway.admin("/audit?limit=1000").json()["records"]
    looks = [one for one in records if one["action"].endswith("decisions.preview")]
    assert {one["kind"] for one in looks} == {"INTENT", "OUTCOME"}
    assert {one["subject"] for one in looks} == {"tenant/acme", "tenant/globex"}
    code, text = explain(these.gateway, "--prompt", str(body), "--tenant", "nobody")
    assert (code != 0, "no such tenant" in text) == (True, True)
    code, text = explain(these.gateway, "--prompt", str(body))
    assert (code != 0, "no such tenant" in text) == (True, True)
