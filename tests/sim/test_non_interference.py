"""Nothing that an attacker sees depends on what a victim says: pairs of runs, byte for byte.

`PAIRS=10000` (what `make nightly` says) makes that many pairs in place of 2,000. One seed again:
`PYTHONPATH=tests python tests/sim/non_interference.py SEED`.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace

import pytest
from non_interference import view, views
from victim_words import Call, Contents, Scenario, cached_tokens, contents_of, scenario_of

from trunkline.core.policies import POLICIES

PAIRS = int(os.environ.get("PAIRS", "2000"))
VARIANTS = 4
"""Pairs of one scenario: its first run, and each of so many others."""
CALM = {
    "worker_count": 1,
    "capacity_blocks": 256,
    "cap_blocks": None,
    "requests_per_s": None,
    "faults": (),
    "restart_at_s": None,
    "leases_end_at_s": None,
    "raised": None,
}


def calm(**changes: object) -> Scenario:
    """The victim asks, and then the attacker asks the very same, and nothing goes wrong."""
    asked = Call(at_s=0.1, segments=(0, 1))
    attack = (replace(asked, at_s=1.0), replace(asked, at_s=1.5, cut_tokens=17))
    more = {**CALM, "victim": (asked,), "attacker": attack, **changes}
    return replace(scenario_of(7, "cache_aware"), **more)


@pytest.mark.slow
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_an_attacker_sees_the_same_whatever_the_victim_says(policy: str) -> None:
    """Status, headers, body, usage, order, times, errors and Retry-After; eviction, quotas, lost
    events, restarts, ended leases and revocations are in it.
    """
    scenarios = -(-PAIRS // (len(POLICIES) * VARIANTS))
    seen: Counter[str] = Counter()
    for seed in range(scenarios):
        scenario = scenario_of(seed, policy)
        first, *others = views(scenario, 1 + VARIANTS)
        for other in others:
            assert other.attacker == first.attacker, seed
            assert other.victim_times == first.victim_times, f"seed {seed}: the load was another"
        seen["victim's hits"] += any(cached > 0 for cached in first.victim_cached)
        seen["attacker's hits"] += any(cached > 0 for cached in first.attacker_cached)
        for call, answer in zip(scenario.attacker, first.attacker, strict=True):
            seen[f"status {b''.join(data for _, data in answer)[9:12].decode()}"] += 1
            seen["refused probes"] += bool(call.raw)
    at_least = scenarios // 25
    for what in ("victim's hits", "attacker's hits", "refused probes", "status 200", "status 429"):
        assert seen[what] > at_least, f"hardly any {what}, so that equality says little: {seen}"


def test_another_user_of_the_victims_tenant_sees_what_was_said_before() -> None:
    """The positive control: where cache is shared, the same harness sees it, in the answer and in
    its time.
    """
    first, second = views(calm(is_same_tenant=True))
    assert first.attacker_cached[0] > 0
    assert second.attacker_cached[0] == 0
    assert first.attacker[0][-1][0] < second.attacker[0][-1][0], "a hit is sooner at its end"


def test_under_all_that_can_happen_many_pairs_of_one_tenant_differ() -> None:
    """The control over the very scenarios of the test above, with all that stands in the way."""
    differing = 0
    for seed in range(60):
        first, second = views(replace(scenario_of(seed), is_same_tenant=True))
        differing += first.attacker != second.attacker
    assert differing >= 20, "a third of the scenarios can tell"


def test_a_victim_that_loads_other_workers_is_noticed() -> None:
    """What the harness holds equal matters: where the second run's prompts have other homes, its
    load shows. That something changed shows then, and not what.
    """
    differing = 0
    for seed in range(60):
        scenario = replace(scenario_of(seed, "consistent_hash"), worker_count=3)
        first, second = Contents(scenario, 0), Contents(scenario, 1)
        differing += view(scenario, first, first).attacker != view(scenario, second, first).attacker
    assert differing > 0


def test_a_run_is_the_same_again_to_the_byte_and_the_microsecond() -> None:
    for seed in range(10):
        scenario = scenario_of(seed)
        first = contents_of(scenario, 2)[0]
        assert view(scenario, first, first) == view(scenario, first, first)


def test_cached_tokens_are_read_where_an_answer_tells_them() -> None:
    assert cached_tokens(b'{"usage":{"prompt_tokens_details":{"cached_tokens":64}}}') == 64
    assert cached_tokens(b'{"error":{}}') == -1
