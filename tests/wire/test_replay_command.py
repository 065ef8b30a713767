"""`trunkline replay` in one process, its fleet a small server: verdicts, files, refusals."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from answering import CLOCK, VOCAB, Answer, Call, Server, answer_well, events, serving

from trunkline.control.probe import fetch
from trunkline.errors import ConfigError
from trunkline.replay import command, flags
from trunkline.replay.counters import FleetCounters
from trunkline.replay.plan import Fleet, FleetPlan
from trunkline.replay.probe import probe
from trunkline.replay.run import Decode


class ServedFleet:
    """A `Fleet` whose gateway is the small server."""

    def __init__(self, url: str) -> None:
        self.target_urls: Sequence[str] = [url]
        self.api_key = "key"
        self.model = "m"
        self.vocab_size = VOCAB
        self.decode: Decode | None = None
        self.is_stopped = False

    async def counters(self) -> FleetCounters:
        return FleetCounters(transfer_bytes=0, worker_work={"w1": 3.0, "w2": 1.0})

    async def stop(self) -> None:
        self.is_stopped = True


def commanded(
    *words: str, answer: Answer = answer_well, probe_answer: bytes = b""
) -> tuple[int, str, list[ServedFleet]]:
    """Run the whole command; the answer is exit code, report and the fleets it started."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    flags.add_arguments(parser)
    fleets: list[ServedFleet] = []
    out = io.StringIO()

    async def run() -> int:
        async with serving(answer) as server:
            server.probe_answer = probe_answer or server.probe_answer

            async def start(plan: FleetPlan) -> Fleet:
                assert plan.workers == 16
                fleets.append(ServedFleet(server.url))
                return fleets[-1]

            words_with_target = [word.replace("TARGET", server.url) for word in words]
            parts = command.ReplayParts(
                clock=CLOCK,
                start_fleet=start,
                fetch=fetch,
                traces_dir=Path(__file__).parents[2] / "traces",
                out=out,
                err=io.StringIO(),
            )
            return await command.run(parser.parse_args(words_with_target), parts)

    return asyncio.run(asyncio.wait_for(run(), timeout=120.0)), out.getvalue(), fleets


LIGHT = ("W1-smoke", "--requests", "20", "--speed", "200", "--tokens-per-block", "16")


def test_the_command_runs_each_policy_on_a_fresh_fleet_and_writes_its_files(tmp_path: Path) -> None:
    code, text, fleets = commanded(
        *LIGHT,
        "--policies",
        "cache_aware,least_queue",
        "--bar",
        "lost<=0,busiest_over_mean_work<=1.6,requests<=1*baselines.least_queue.requests",
        "--json",
        str(tmp_path / "out.json"),
        "--html",
        str(tmp_path / "report.html"),
    )
    assert code == command.PASSED, text
    assert len(fleets) == 2
    assert all(fleet.is_stopped for fleet in fleets)
    figures = json.loads((tmp_path / "out.json").read_text())
    assert (figures["workload"], figures["requests"], figures["false_hits"]) == ("W1-smoke", 20, 0)
    assert figures["baselines"]["least_queue"]["requests"] == 20
    assert "<svg" in (tmp_path / "report.html").read_text()
    assert "20 answers compared" not in text
    assert "40 answers compared token by token" in text


def test_a_missed_bar_or_a_true_fail_if_makes_the_exit_code_one() -> None:
    for words in (("--bar", "hit_tokens_ratio>=0.99"), ("--fail-if", "requests>=20")):
        code, text, _ = commanded(*LIGHT, "--policies", "cache_aware", *words)
        assert code == command.FAILED
        assert "FAIL" in text


def test_a_false_hit_makes_the_exit_code_one() -> None:
    async def answer(call: Call) -> None:
        call.head()
        for frame in events(call, [token ^ 1 for token in call.right_answer]):
            call.chunk(frame)
        call.end()

    code, text, _ = commanded(*LIGHT, "--policies", "cache_aware", answer=answer)
    assert code == command.FAILED
    assert "FALSE HITS   20" in text


def test_a_running_gateway_is_replayed_against_without_starting_a_fleet() -> None:
    code, text, fleets = commanded(*LIGHT, "--target", "TARGET")
    assert code == command.PASSED, text
    assert not fleets
    assert "target" in text


def test_a_run_without_verification_says_that_nothing_was_checked() -> None:
    _, text, _ = commanded(*LIGHT, "--target", "TARGET", "--no-verify")
    assert "FALSE HITS   not checked" in text
    assert "no answer was checked: --no-verify was given" in text


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (b"401 No", r"http://127\.0\.0\.1:\d+/v1/models answered 401: give .* --api-key"),
        (b"404 No", "answered 404: no OpenAI server there"),
        (b"503 No", "answered 503: the gateway is not ready"),
    ],
)
def test_a_target_that_would_refuse_everything_is_refused_at_once(status: bytes, said: str) -> None:
    refusing = b"HTTP/1.1 %s\r\ncontent-length: 0\r\n\r\n" % status
    with pytest.raises(ConfigError, match=said):
        commanded(*LIGHT, "--target", "TARGET", probe_answer=refusing)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1:1", "127.0.0.1:1 cannot be replayed against: .*ConnectionRefused"),
        ("ftp://127.0.0.1", "is no http:// or https:// address"),
    ],
)
def test_a_target_where_nobody_listens_is_named_with_a_remedy(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        commanded(*LIGHT, "--target", url)


def test_each_target_is_asked_once_with_the_key_before_anything_is_sent() -> None:
    async def run() -> tuple[Server, Server]:
        async with serving(answer_well) as first, serving(answer_well) as second:
            for server in (first, second):
                await probe(f"{server.url}/v1", "marked", fetch)
            return first, second

    for server in asyncio.run(run()):
        (head,) = server.probes
        assert head.startswith("GET /v1/models ")
        assert "authorization: Bearer marked" in head
        assert not server.calls


def test_mistakes_are_refused_before_a_fleet_is_started() -> None:
    asked: list[Call] = []

    async def answer(call: Call) -> None:
        asked.append(call)
        await answer_well(call)

    for words in (
        *(("--bar", "nonsense"), ("--policies", "a,a"), ("--load", "0")),
        *(("--bar", "hit_ratio>1"), ("--fail-if", "baselines.nobody.lost>0")),
        *(("--workers", "0"), ("--speed", "nan"), ("--time-scale", "-1"), ("--target", "ftp://x")),
    ):
        with pytest.raises(ConfigError):
            commanded(*LIGHT, *words, answer=answer)
    assert not asked
