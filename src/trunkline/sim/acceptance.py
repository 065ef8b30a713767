"""The bars that a change must pass, for each workload at each load (docs/routing.md, acceptance).

Bars are written in the language of `replay/bars.py` over the figures of `figures.py`; `baselines.*`
are other runs of the same requests: round robin, least queue, ours without pulls (`without_pulls`)
and ours without the hot prefix (`calm`). They hold for the undisturbed run of the default
policy.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    ("W6", 1.0): "ttft_ms.p99<=1.5*baselines.calm.ttft_ms.p99,"
    "ttft_ms.p99<baselines.least_queue.ttft_ms.p99,hot_copies.most<=16",
}
"""By workload and load, where nothing is pulled and there is no host tier."""

_NEVER_WORSE = "ttft_ms.p95<=baselines.without_pulls.ttft_ms.p95"
PULL_BARS: dict[tuple[str, float, float], str] = {
    ("W1", 25.0, 8.0): "hit_tokens_ratio>=0.36,ttft_ms.p95<baselines.without_pulls.ttft_ms.p95",
    ("W3", 25.0, 8.0): "hit_tokens_ratio>=0.63,ttft_ms.p95<baselines.without_pulls.ttft_ms.p95",
    ("W1", 100.0, 0.0): "hit_tokens_ratio>=0.328,ttft_ms.p95<=9000",
    ("W2", 100.0, 0.0): "ttft_ms.p95<=1080",
    ("W3", 100.0, 0.0): "ttft_ms.p95<=8150",
    ("W4", 100.0, 0.0): "hit_tokens_ratio>=0.312,ttft_ms.p95<=3400",
    **{(workload, 25.0, 0.0): _NEVER_WORSE for workload in ("W1", "W2", "W4")},
    ("W3", 25.0, 0.0): "ttft_ms.p95<=1.005*baselines.without_pulls.ttft_ms.p95",
    **{("W6", gbit, 0.0): BARS["W6", 1.0] for gbit in (25.0, 100.0, 400.0)},
}
"""By workload, Gbit/s of the links, and times of host over device memory; at load 1.0 and 128 KiB
of KV a token. W4 lies 4 % above what moving computed blocks for nothing would reach
(docs/routing.md);
on W3 single placements move p95 by 1 %, with and without pulls.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a workload was run with."""

    load: float = 1.0
    link_gbit: float | None = None
    host_factor: float = 0.0


def bars_for(workload: str, setting: Setting) -> list[Bar]:
    """The bars of a workload in a setting; those that always hold where none are set."""
    if setting.link_gbit is not None:
        key = (workload, setting.link_gbit, setting.host_factor)
        special = PULL_BARS.get(key, "") if setting.load == 1.0 else ""
    else:
        special = "" if setting.host_factor else BARS.get((workload, setting.load), "")
    return parse_bars(f"{special},{ALWAYS}" if special else ALWAYS)
