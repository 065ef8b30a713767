"""Reports say everything, hide nothing, and need nothing but themselves."""

from __future__ import annotations

import io
import math
import random
import re
import sys
from dataclasses import replace

import pytest

from hand_clock import HandClock
from trunkline.errors import ConfigError
from trunkline.replay.bars import check_bars, parse_bars
from trunkline.replay.page import render_page
from trunkline.replay.progress import Progress
from trunkline.replay.records import RequestRecord, Verdict
from trunkline.replay.report import PolicyRun, Report, render_text
from trunkline.replay.results import RunFacts, summarise


def run(policy: str, hit: float, ttft_ms: float, verdict: Verdict = Verdict.RIGHT) -> PolicyRun:
    draw = random.Random(1)
    records = [
        RequestRecord(
            index=i,
            arrival_ms=i * 10.0,
            client_late_ms=0.0,
            session=None,
            lost_reason="" if i else "status 503: <busy>",
            status=200,
            ttft_ms=draw.lognormvariate(math.log(ttft_ms), 0.5),
            duration_ms=500.0,
            prompt_tokens=1_000,
            cached_tokens=int(1_000 * hit),
            output_tokens=4,
            verdict=verdict,
            worker=f"w{i % 4}",
            matched_tokens=None,
            queue_ms=None,
        )
        for i in range(800)
    ]
    facts = RunFacts(workload="W1", policy=policy, wall_ms=8_000.0)
    return PolicyRun(summary=summarise(records, facts), records=records)


def report(**changes: object) -> Report:
    runs = [run("cache_aware", 0.8, 50.0), run("least_queue", 0.4, 200.0)]
    base = Report(
        title="trunkline replay W1: 800 requests",
        runs=runs,
        checks=check_bars(parse_bars("hit_tokens_ratio>=0.75"), runs[0].summary.as_dict()),
        warnings=["cache_aware: <b>late</b>"],
        command="trunkline replay W1",
    )
    return replace(base, **changes)  # type: ignore[arg-type]  # any field of Report


def test_the_text_shows_policies_side_by_side_with_ratios_to_least_queue() -> None:
    text = render_text(report())
    (line,) = [line for line in text.splitlines() if line.startswith("hit tokens")]
    assert line.split() == ["hit", "tokens", "80.0", "%", "x2.00", "40.0", "%"]
    assert "PASS  hit_tokens_ratio>=0.75  (measured 0.8)" in text
    assert "lost under cache_aware: 1 x status 503: <busy>" in text
    assert text.rstrip().endswith("PASS")
    assert max(map(len, text.splitlines())) <= 100


def test_what_was_won_is_said_in_one_sentence_and_so_is_a_loss() -> None:
    assert (
        "Against least_queue, cache_aware: computed 67% fewer prompt tokens"
        " and gave the first token 75% sooner on average."
        in " ".join(render_text(report()).split())
    )
    lost = report(runs=[run("cache_aware", 0.2, 400.0), run("least_queue", 0.4, 200.0)])
    assert "computed 33% more prompt tokens" in render_text(lost)
    assert "100% later" in " ".join(render_text(lost).split())


def test_a_difference_of_nothing_is_called_none() -> None:
    same = report(runs=[run("cache_aware", 0.4, 200.0), run("least_queue", 0.4, 200.0)])
    text = " ".join(render_text(same).split())
    assert "no difference in prompt tokens computed and no difference in mean TTFT." in text
    assert "0%" not in text
    sooner = report(runs=[run("cache_aware", 0.4, 100.0), run("least_queue", 0.4, 200.0)])
    text = " ".join(render_text(sooner).split())
    assert "no difference in prompt tokens computed; gave the first token 50% sooner" in text


def test_columns_line_up() -> None:
    lines = render_text(report()).splitlines()
    head = next(line for line in lines if "cache_aware" in line and "least_queue" in line)
    end = head.index("least_queue") + len("least_queue")
    rows = [line for line in lines if line.startswith(("hit", "TTFT", "requests", "lost  "))]
    assert len(rows) >= 7
    assert all(len(line) == end for line in rows)


def test_false_hits_stand_in_a_box_of_their_own_and_fail_the_run() -> None:
    assert "FALSE HITS   0" in render_text(report())
    bad = report(runs=[run("cache_aware", 0.8, 50.0, Verdict.WRONG)])
    assert "FALSE HITS   800" in render_text(bad)
    assert not bad.is_passed
    assert render_text(bad).rstrip().endswith("FAIL")


def test_unchecked_answers_are_not_sold_as_no_false_hits() -> None:
    unchecked = report(runs=[run("cache_aware", 0.8, 50.0, Verdict.UNCHECKED)])
    assert "no answer was checked" in render_text(unchecked)


def test_where_nothing_was_checked_the_report_says_why_and_shows_no_number() -> None:
    why = "--no-verify was given; leave it out where the workers are simulated"
    unchecked = replace(run("cache_aware", 0.8, 50.0, Verdict.UNCHECKED), unchecked=why)
    text = render_text(report(runs=[unchecked]))
    assert "FALSE HITS   not checked" in text
    assert f"no answer was checked: {why}" in text
    assert max(map(len, text.splitlines())) <= 100
    page = render_page(report(runs=[unchecked]))
    assert ">not checked</b>" in page
    assert why in page


def test_a_missed_bar_or_a_run_without_answers_fails() -> None:
    figures = report().runs[0].summary.as_dict()
    assert not report(checks=check_bars(parse_bars("lost<=0"), figures)).is_passed
    facts = RunFacts(workload="W1", policy="cache_aware", wall_ms=1.0)
    assert not report(runs=[PolicyRun(summary=summarise([], facts))], checks=()).is_passed


def test_what_nobody_measured_shows_as_a_dash() -> None:
    (line,) = [x for x in render_text(report()).splitlines() if x.startswith("KV memory")]
    assert line.split() == ["KV", "memory", "-", "-"]


def test_the_page_needs_no_other_file_and_runs_no_script() -> None:
    page = render_page(report())
    assert page.count("<svg") == 3
    assert "http" not in page
    assert "//" not in re.sub(r"/\*.*?\*/", "", page)
    assert not re.search(r"<(script|link|img|iframe|object|embed|base)\b|@import", page)
    assert all(target.startswith("#") for target in re.findall(r'(?:href|src)="([^"]*)', page))
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", page))


def test_the_page_follows_light_and_dark_down_to_the_plots() -> None:
    page = render_page(report())
    assert "prefers-color-scheme: dark" in page
    plots = "".join(re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL))
    assert "var(--series-0)" in plots
    assert "var(--ink)" in plots
    assert not re.findall(r"(?:stroke|fill): #(?!ffffff)\w+", plots), "no fixed colour is left"


def test_texts_are_escaped_on_the_page() -> None:
    page = render_page(report())
    assert "<b>late</b>" not in page
    assert "&lt;b&gt;late" in page
    assert "status 503: &lt;busy&gt;" in page


def test_the_page_survives_a_run_without_answers() -> None:
    facts = RunFacts(workload="W1", policy="cache_aware", wall_ms=1.0)
    page = render_page(report(runs=[PolicyRun(summary=summarise([], facts))], checks=()))
    assert "No plots" in page


def test_without_matplotlib_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'trunkline\[report\]'"):
        render_page(report())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines_without_terminal(step_ms: float) -> list[str]:
    """What a run of 1,000 requests writes into a file, one request each `step_ms`."""
    stream, clock = io.StringIO(), HandClock()
    progress = Progress(stream, 1_000, "cache_aware", clock)
    for index in range(1_000):
        clock.ms += step_ms
        progress.step(is_lost=index == 5)
    progress.end()
    return stream.getvalue().splitlines()


def test_progress_writes_a_line_each_tenth_where_there_is_no_terminal() -> None:
    lines = lines_without_terminal(step_ms=200.0)
    assert len(lines) == 10
    assert "100%  1,000/1,000, 1 lost" in lines[-1]


@pytest.mark.parametrize(("run_s", "count"), [(0.0, 1), (9.0, 1), (20.0, 2), (45.0, 5)])
def test_progress_of_a_short_run_writes_no_more_than_a_line_in_ten_seconds(
    run_s: float, count: int
) -> None:
    lines = lines_without_terminal(step_ms=run_s)
    assert len(lines) == count
    assert "100%  1,000/1,000" in lines[-1]


def test_progress_redraws_one_line_on_a_terminal_and_not_too_often() -> None:
    stream, clock = Terminal(), HandClock()
    progress = Progress(stream, 1_000, "cache_aware", clock)
    for _ in range(1_000):
        clock.ms += 1.0
        progress.step()
    progress.end()
    progress.end()
    text = stream.getvalue()
    assert text.count("\n") == 1
    assert 10 <= text.count("\r") <= 13


def test_progress_of_a_file_is_told_in_its_bytes_and_ends_full() -> None:
    stream, clock = Terminal(), HandClock()
    progress = Progress(stream, 10, "reading", clock, " KiB")
    for count in (0, 5 << 10, 5 << 10, 99 << 10, 99 << 10, 99 << 10):
        clock.ms += 200.0
        progress.reach_bytes(count)
    progress.fill()
    text = stream.getvalue()
    assert (text.count("5/10 KiB"), text.count("10/10 KiB")) == (1, 2)
    assert text.count("\n") == 1
