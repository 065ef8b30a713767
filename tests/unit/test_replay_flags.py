"""Flags of `trunkline replay`: help that explains, bounds, and a command that makes it again."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

import pytest

from trunkline.cli import build_parser, main
from trunkline.errors import ConfigError
from trunkline.replay import demo, flags
from trunkline.replay.workloads import SMOKE_WORKLOADS, WORKLOADS

EVERY_FLAG = [
    *("W1", "--requests", "20", "--seed", "7", "--tokens-per-block", "16"),
    *("--max-output-tokens", "4", "--traces-dir", "my traces", "--format", "openai"),
    *("--block-tokens", "64", "--time-divisor", "1000", "--spread-ticks", "--load", "0.3"),
    *("--rate", "2.5", "--speed", "1.1", "--time-scale", "0.0625", "--sessions", "closed"),
    *("--max-in-flight", "64", "--timeout-s", "30", "--policies", "cache_aware,random"),
    *("--workers", "3", "--feed", "digest", "--link-gbit", "100"),
    *(
        "--host-factor",
        "2",
        "--max-copies",
        "3",
        "--target",
        "http://a:1",
        "--target",
        "http://b:2",
    ),
    *("--model", "it's mine", "--vocab-size", "100", "--no-verify", "--bar", "lost==0"),
    *("--bar", "ttft_ms.p95<=1.02*baselines.random.ttft_ms.p95", "--fail-if", "false_hits>0"),
    *("--json", "out.json", "--html=-dash.html"),
]


def parse(words: list[str]) -> argparse.Namespace:
    return build_parser("replay").read(words)


def test_the_command_in_the_report_makes_the_same_run_again() -> None:
    given = parse(EVERY_FLAG)
    again = shlex.split(flags.command_line(given))
    assert again[:2] == ["trunkline", "replay"]
    assert parse(again[2:]) == given


def test_every_flag_is_in_the_test_above() -> None:
    actions = flags.add_arguments(argparse.ArgumentParser())
    given = vars(parse(EVERY_FLAG))
    left_out = [one.dest for one in actions if given[one.dest] == one.default]
    assert left_out == ["api_key"]


def test_a_plain_run_is_a_short_command() -> None:
    assert flags.command_line(parse([])) == "trunkline replay W5"


def test_the_tour_can_be_made_again_as_a_replay() -> None:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    tour = demo.replay_arguments(parser.parse_args(["--workers", "4"]))
    assert parse(shlex.split(flags.command_line(tour))[2:]) == tour


def test_a_key_is_never_part_of_the_command() -> None:
    line = flags.command_line(parse(["--target", "http://a:1", "--api-key", "marked-secret"]))
    assert "marked-secret" not in line
    assert "--api-key '***'" in line


@pytest.mark.parametrize("verb", ["replay", "simulate"])
def test_help_has_a_line_for_each_workload_and_three_examples(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    lines = capsys.readouterr().out.splitlines()
    for workload in {**WORKLOADS, **SMOKE_WORKLOADS}.values():
        told = [line for line in lines if line.split()[:1] == [workload.name]]
        assert len(told) == 1
        assert workload.sentence in told[0]
    assert sum(line.startswith(f"  trunkline {verb} ") for line in lines) >= 3


@pytest.mark.parametrize("verb", ["replay", "simulate"])
def test_every_number_in_the_help_has_a_unit_and_shows_its_default(verb: str) -> None:
    for action in build_parser(verb)._actions:
        if action.type in (int, float):
            assert action.metavar not in (None, "N"), action.dest
            assert "[" in (action.help or ""), action.dest


@pytest.mark.parametrize("verb", ["replay", "simulate"])
def test_the_figures_can_be_listed_without_a_run(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([verb, "--figures"])
    assert caught.value.code == 0
    assert "\n  hit_tokens_ratio\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--load", "0"], "--load is 0, a number above 0"),
        (["--time-scale", "nan"], "--time-scale is nan"),
        (["--speed", "inf"], "--speed is inf"),
        (["--timeout-s", "-1"], "--timeout-s is -1"),
        (["--workers", "0"], "--workers is 0, at least 1"),
        (["--max-in-flight", "0"], "--max-in-flight is 0"),
    ],
)
def test_numbers_out_of_bounds_are_refused_by_name(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        flags.check(parse(words))


def test_files_that_cannot_be_written_are_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="its folder does not exist"):
        flags.check(parse(["--html", str(tmp_path / "absent" / "x.html")]))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--link-gbit", "0"], "--link-gbit is 0"),
        (["--link-gbit", "10001"], "--link-gbit is 10001"),
        (["--host-factor", "-1"], "--host-factor is -1"),
        (["--host-factor", "1001"], "--host-factor is 1001"),
        (["--link-gbit", "25", "--host-factor", "0"], "--link-gbit needs a --host-factor"),
    ],
)
def test_flags_of_movement_have_bounds(words: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        flags.check(parse(words))
