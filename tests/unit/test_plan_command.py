"""`trunkline plan LOG` from its flags to its pages."""

from __future__ import annotations

import argparse
import io
import json
import random
import sys
import tracemalloc
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trunkline import cli
from trunkline.adapters.clock import SystemClock
from trunkline.errors import ConfigError, TraceError
from trunkline.plan import command, savings
from trunkline.plan.calls import Call
from trunkline.plan.savings import SHARED, Savings
from trunkline.plan.study import public_prefixes
from trunkline.plan.window import BusiestWindow

TRACES = Path(__file__).resolve().parents[2] / "traces"
AGENTS = TRACES / "smoke_agentic_16s.jsonl.gz"
SYSTEM = "You are a careful assistant of the secret project Heron. " * 40


def plan(*words: object) -> str:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    out = io.StringIO()
    parts = command.PlanParts(
        clock=SystemClock(),
        out=out,
        progress_out=io.StringIO(),
        load_tokenise=lambda _path: lambda text: [ord(letter) for letter in text],
    )
    assert command.run(parser.parse_args([str(word) for word in words]), parts) == 0
    return out.getvalue()


@pytest.fixture(name="log")
def _log(tmp_path: Path) -> Path:
    """Two tenants with one system prompt, and a bad line."""
    draw = random.Random(3)
    lines: list[str] = []
    for number in range(120):
        user = f"question {draw.random()} " * 30
        body = {
            "timestamp": 1_700_000_000 + number / 2,
            "messages": [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": user},
            ],
            "team_id": f"team-{number % 2}",
            "usage": {"prompt_tokens": 500, "completion_tokens": 9},
        }
        lines.append(json.dumps(body))
    lines.insert(7, "not json: Heron")
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_where_nothing_is_shared_no_router_is_said_to_win(tmp_path: Path) -> None:
    """Texts that begin in ways of their own; the ratio of nothing would be 0 % of all."""
    log = tmp_path / "log.jsonl"
    bodies = [{"timestamp": n, "prompt": f"{n} unlike any other {n} " * 40} for n in range(20)]
    log.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    told = " ".join(plan(log, "--workers", 2).split())
    assert "a prefix cache would save nothing here" in told
    assert "makes no difference to what is computed here" in told
    assert "comes first" not in told
    assert "0% less" not in told


def test_one_of_a_thing_is_told_as_one_and_a_short_log_is_not_of_no_time(tmp_path: Path) -> None:
    rows = [
        {"timestamp": number, "input_length": 512, "output_length": 1, "hash_ids": [number]}
        for number in range(4)
    ]
    log = tmp_path / "log.jsonl"
    log.write_text("\n".join([*map(json.dumps, rows), "nonsense"]))
    told = " ".join(plan(log, "--workers", "1").split())
    assert "0.003 s; 1 line left out" in told
    assert "1 workers" not in told


def test_a_plan_says_what_it_means_first_and_what_it_assumes_last(log: Path) -> None:
    page = plan(log, "--workers", "2")
    assert page.index("would save") < page.index("Routing at 2 workers") < page.index("assumed:")
    assert "left out: 1 x not JSON (log.jsonl:8)" in page
    assert "times the prompt tokens that were guessed" in " ".join(page.split())
    assert "A namespace for each tenant costs" in page
    assert "Registering 1 public prefixes would bring back" in page


def test_no_word_of_a_prompt_is_in_any_result(log: Path, tmp_path: Path) -> None:
    html = tmp_path / "plan.html"
    text = plan(log, "--workers", "2", "--html", html) + plan(log, "--workers", "2", "--json")
    for told in (text, html.read_text()):
        assert "Heron" not in told
        assert "team-1" not in told


def test_a_plan_as_json_adds_up(log: Path) -> None:
    found = json.loads(plan(log, "--workers", "2", "--json"))
    assert (found["log"]["requests"], found["log"]["malformed"]) == (120, 1)
    saved = found["savings"]
    for scope, ceiling in saved["ceiling"].items():
        shares = [row[scope] for row in saved["by_cache"]]
        assert shares == sorted(shares)
        assert shares[-1] == ceiling
    (isolation,) = found["isolation"]
    assert isolation["ceiling_cost"] == pytest.approx(
        saved["ceiling"][SHARED] - isolation["ceiling"]
    )
    (prefix,) = found["public_prefixes"]["rows"]
    assert len(SYSTEM) // 4 - 32 < prefix["prefix_tokens"] <= len(SYSTEM) // 4 + 32
    assert (prefix["owners"], prefix["won_of_lost"], prefix["first_line"]) == (2, 1.0, 1)
    routers = [row["router"] for row in found["routing"]["rows"]]
    assert routers[0] == "trunkline"
    assert routers[-1] == "the limit"


def test_what_is_assumed_can_be_said(log: Path) -> None:
    found = json.loads(plan(log, "--cache-blocks", "1000", "--kv-kib-per-token", "64", "--json"))
    assert found["fleet"]["cache_tokens"] == 16_000
    with_tokens = json.loads(plan(log, "--tokenizer-path", log, "--json"))
    assert with_tokens["log"]["prompt_tokens"] > 3 * found["log"]["prompt_tokens"]
    coarse = json.loads(plan(log, "--bytes-per-token", "8", "--json"))
    assert coarse["log"]["prompt_tokens"] < 0.6 * found["log"]["prompt_tokens"]


def test_a_log_of_sessions_says_what_keeping_each_apart_costs() -> None:
    found = json.loads(plan(AGENTS, "--workers", "4", "--json"))
    assert [row["scope"] for row in found["isolation"]] == ["session"]
    assert 0.0 <= found["isolation"][0]["ceiling_cost"] < 0.005
    assert found["goal"]["workers"]["trunkline"] >= 1


def test_the_page_stands_by_itself_and_shows_three_plots(log: Path, tmp_path: Path) -> None:
    html = tmp_path / "plan.html"
    plan(log, "--workers", "2", "--html", html)
    page = html.read_text()
    assert page.count("<figure>") == 3
    for address in ("http://", "https://", "<script", "src="):
        assert address not in page


def test_without_matplotlib_a_page_is_refused_with_the_remedy(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'trunkline\[report\]'"):
        plan(tmp_path / "not-even-looked-at", "--html", tmp_path / "plan.html")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_page_that_cannot_be_written_costs_no_figures(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", str(log), "--workers", "2", "--html", "/dev/full"]) != 0
    said = capsys.readouterr()
    assert "Routing at 2 workers" in said.out
    assert "No space left" in said.err


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--workers", "0"], "--workers is 0"),
        (["--workers", "2000"], "--workers is 2000"),
        (["--cache-gib", "1", "--cache-blocks", "1"], "give one of them"),
        (["--prefill-tokens-per-s", "nan"], "--prefill-tokens-per-s is nan"),
        (["--link-gbit", "0"], "--link-gbit is 0"),
        (["--block-tokens", "1", "--bytes-per-token", "3"], "no multiple of 4"),
        (["--html", "/absent/plan.html"], "/absent is no folder"),
        (["--ttft-goal-ms", "0"], "--ttft-goal-ms is 0"),
    ],
)
def test_flags_out_of_bounds_are_refused_before_anything_is_read(
    words: list[str], part: str
) -> None:
    with pytest.raises(ConfigError, match=part):
        plan(AGENTS, *words)


def test_a_log_that_is_not_there_is_named() -> None:
    with pytest.raises(TraceError, match=r"absent\.jsonl: No such file"):
        plan("absent.jsonl")


def test_the_verbs_of_two_words_stay_beside_the_one_of_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["plan", "public", "W2-smoke", "--tenants", "4"]) == cli.OK
    assert "a namespace a tenant" in capsys.readouterr().out
    assert cli.main(["plan", str(AGENTS), "--workers", "4", "--json"]) == cli.OK
    assert json.loads(capsys.readouterr().out)["log"]["requests"] == 600


# -- memory -------------------------------------------------------------------------------------


def generated(rows: int) -> Iterator[Call]:
    """New prompts for ever, each with a common beginning, and an owner each."""
    draw = random.Random(5)
    common = [draw.getrandbits(64) for _ in range(4)]
    for number in range(rows):
        blocks = array("Q", [*common, *(draw.getrandbits(64) for _ in range(8))])
        yield Call(
            at_ms=float(number),
            tokens=200,
            output_tokens=1,
            blocks=blocks,
            block_tokens=16,
            session=f"s{number // 3}",
        )


def test_memory_does_not_grow_with_the_log() -> None:
    def peak_bytes(rows: int) -> int:
        tried = Savings([100, 1_000], max_blocks=1 << 10)
        window = BusiestWindow(max_calls=200)
        tracemalloc.start()
        for call in generated(rows):
            tried.add(call)
            window.add(call)
        assert tried.calls == rows
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    few, many = peak_bytes(1_000), peak_bytes(10_000)
    assert many < 1.5 * few


@pytest.mark.parametrize(("uses", "scopes"), [(13, [SHARED, "session"]), (12, [SHARED])])
def test_the_calls_that_tell_whose_they_are_have_a_bound_by_their_blocks(
    monkeypatch: pytest.MonkeyPatch, uses: int, scopes: list[str]
) -> None:
    monkeypatch.setattr(savings, "FIRST_USES", uses)
    nobodys, somebodys = generated(2)
    nobodys.session = None
    tried = Savings([100])
    assert len(nobodys.blocks) == 12
    for call in (nobodys, somebodys):
        tried.add(call)
    assert [one.scope for one in tried.found()] == scopes


def test_prefixes_are_sought_only_where_the_log_names_owners() -> None:
    calls: list[Any] = list(generated(30))
    found = public_prefixes(calls, best=3)
    assert found is not None
    assert (found["owners"], found["count"]) == ("session", 10)
    assert found["rows"][0]["prefix_tokens"] == 64
    for call in calls:
        call.session = None
    assert public_prefixes(calls, best=3) is None
