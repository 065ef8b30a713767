"""The bars that a change must pass, for each workload at each load (docs/routing.md, acceptance).

Bars are written in the language of `replay/bars.py` over the figures of `figures.py`; `baselines.*`
are round robin and least queue in the same run. They hold for the undisturbed run of the default
policy.
"""

from __future__ import annotations

from trunkline.replay.bars import Bar, parse_bars

ALWAYS = "false_hits==0,lost==0,directory_agrees==1"

_CHAT = (
    "prefill_tokens<={share}*baselines.round_robin.prefill_tokens,"
    "prefill_tokens<={share}*baselines.least_queue.prefill_tokens,"
    "busiest_over_mean_work<=1.06"
)

BARS: dict[tuple[str, float], str] = {
    ("W1", 1.0): f"hit_tokens_ratio>=0.303,ttft_ms.p95<=9500,{_CHAT.format(share=0.76)}",
    ("W1", 1.4): f"hit_tokens_ratio>=0.293,ttft_ms.p95<=9900,{_CHAT.format(share=0.77)}",
    ("W2", 1.0): "hit_tokens_ratio>=0.94,ttft_ms.p95<=1400,busiest_over_mean_work<=1.2",
    ("W3", 1.0): "hit_tokens_ratio>=0.515,ttft_ms.p95<=8400",
    ("W4", 1.0): "ttft_ms.p95<=1.02*baselines.least_queue.ttft_ms.p95,hit_tokens_ratio>=0.306,"
    "busiest_over_mean_work<=1.08,hot_prefix_holders>=16",
    ("W5", 1.0): "hit_tokens_ratio>=0.87,ttft_ms.p95<=170,ttft_ms.p99<=290",
}


def bars_for(workload: str, load: float) -> list[Bar]:
    """The bars of a workload at a load; those that always hold where none are set."""
    special = BARS.get((workload, load), "")
    return parse_bars(f"{special},{ALWAYS}" if special else ALWAYS)
