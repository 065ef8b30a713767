"""How `trunkline explain` writes a gain, and what of gains is added up as time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from picker_bench import request
from test_receipts import decision

from trunkline.core.decision import Gain
from trunkline.core.records import Instant
from trunkline.explain import gain_lines, unsigned
from trunkline.gateway.accounts import Accounts


@pytest.mark.parametrize(
    ("ms", "shown"), [(-0.0, "0.0"), (-0.04, "0.0"), (-0.06, "-0.1"), (0.06, "0.1"), (-2.0, "-2.0")]
)
def test_what_is_shown_as_nothing_has_no_sign(ms: float, shown: str) -> None:
    assert f"{unsigned(ms):,.1f}" == shown


def test_only_the_time_of_choices_is_added_up_as_time_saved() -> None:
    accounts = Accounts()
    gain = Gain(saved_prefill_ms=36.0, queue_ms=2.0, transfer_ms=1.0, imbalance_ms=-29.0)
    for _ in range(2):
        accounts.remember(request("p"), replace(decision("r"), gain=gain), None, Instant(0.0))
    assert gain.net_ms == 62.0
    assert accounts.net_saved_ms == 66.0, "the price of imbalance is no time that anybody is spared"


@pytest.mark.parametrize(("imbalance_ms", "net_ms"), [(-29.0, 62.0), (0.0, 33.0)])
def test_a_gain_says_what_of_it_is_time_where_not_all_is(
    imbalance_ms: float, net_ms: float
) -> None:
    terms = {"saved_prefill_ms": 36.0, "queue_ms": 2.0, "transfer_ms": 1.0}
    first, *rest = gain_lines(
        {"net_gain_ms": net_ms, "gain": {**terms, "imbalance_ms": imbalance_ms}}
    )
    assert f"{net_ms:+.1f} ms = saved prefill 36.0" in first
    assert [line.partition(" (")[0] for line in rest] == ["of it, time: +33.0 ms"] * (
        imbalance_ms != 0.0
    )
