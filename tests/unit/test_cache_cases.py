"""Known mistakes of cache-aware routers, each as a check on the picker and its keys."""

from __future__ import annotations

import json
from array import array
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from picker_bench import BLOCK, COMPLETE, W0, W1, Bench, derive, ids, namespace, request

from trunkline.core.decision import Exclusion, Plan
from trunkline.core.events import BlocksStored
from trunkline.core.identity import Epochs, Scope, ScopeKind
from trunkline.core.keys import KeyChain, chain
from trunkline.core.records import Tier, WorkerId
from trunkline.errors import NoWorker
from trunkline.gateway.contracts import OPEN_GRANT, InferenceRequest, Pick
from trunkline.ports.worker import Target

SCOPE = Scope(kind=ScopeKind.TENANT, org="o", tenant="t")


def picked(bench: Bench, asked: InferenceRequest) -> Pick:
    pick = bench.picker.pick(asked, frozenset())
    assert isinstance(pick, Pick)
    return pick


def matched(pick: Pick) -> int:
    return pick.ticket.decision.matched_tokens


def test_c51_the_chains_of_two_salts_and_of_none_have_no_key_in_common() -> None:
    tokens = ids(160)
    scopes = [replace(SCOPE, tenant=name) for name in ("a", "b", "none")]
    chains = [chain(derive(scope, Epochs(), BLOCK), tokens) for scope in scopes]
    keys = [{bytes(one[i]) for i in range(len(one))} for one in chains]
    assert [len(one) for one in keys] == [10, 10, 10]
    assert not keys[0] & keys[1]
    assert not (keys[0] | keys[1]) & keys[2]
    assert len({one.namespace.salt for one in chains}) == 3


def test_c52_base_and_adapters_are_disjoint_by_name_whatever_their_numbers_are() -> None:
    chains: list[KeyChain] = [
        chain(derive(SCOPE, Epochs(), BLOCK, name), ids(160)) for name in ("", "lora-x", "lora-y")
    ]
    assert len({bytes(one[i]) for one in chains for i in range(len(one))}) == 30
    bench = Bench(W0)
    for _ in range(2):
        for name in ("", "lora-x", "lora-y"):
            asked = request(ids(160))
            asked.grant = replace(OPEN_GRANT, adapter=name)
            pick = picked(bench, asked)
            assert json.loads(pick.body)["cache_salt"] == derive(
                OPEN_GRANT.scope or SCOPE, Epochs(), BLOCK, name
            ).salt  # fmt: skip
            bench.picker.ended(pick, COMPLETE, None)


def adapter_request(name: str) -> InferenceRequest:
    asked = request(ids(160))
    asked.grant = replace(OPEN_GRANT, adapter=name)
    return asked


def serving(bench: Bench, worker: WorkerId, *models: str) -> None:
    target = bench.picker.target(worker)
    assert isinstance(target, Target)
    bench.picker.add_target(replace(target, models=frozenset(models)))


def test_a_request_for_an_adapter_goes_only_to_workers_that_have_it() -> None:
    bench = Bench(W0, W1)
    serving(bench, W0, "m")
    serving(bench, W1, "m", "fr")
    for _ in range(8):
        pick = picked(bench, adapter_request("fr"))
        assert pick.worker == W1
        assert pick.ticket.decision.candidates.excluded == {W0: Exclusion.ADAPTER}
        bench.picker.ended(pick, COMPLETE, None)
    with pytest.raises(NoWorker):
        bench.picker.pick(adapter_request("fr"), frozenset({W1}))
    with pytest.raises(NoWorker):
        bench.picker.pick(adapter_request("it"), frozenset())
    assert picked(bench, adapter_request("")).ticket.decision.candidates.excluded == {}


def test_where_a_worker_does_not_say_what_it_serves_it_may_be_asked() -> None:
    bench = Bench(W0)
    assert picked(bench, adapter_request("fr")).worker == W0


def hold(bench: Bench, worker: WorkerId, tokens: array[int], blocks: int) -> None:
    if blocks:
        event = BlocksStored(
            hashes=array("Q", range(1, blocks + 1)), parent=None,
            tokens=tokens[: blocks * BLOCK], block_tokens=BLOCK, tier=Tier.DEVICE,
            salt=namespace(BLOCK).salt,
        )  # fmt: skip
        bench.directory.stored(worker, event)


def test_c56_the_holder_is_chosen_for_what_it_holds_and_the_receipt_says_so() -> None:
    """The worker that routing would take without the cache is the other one."""
    for tokens in (ids(320), ids(320, 5_000), ids(320, 9_000)):
        blind = Bench(W0, W1).pick(tokens).worker
        holder = W1 if blind == W0 else W0
        bench = Bench(W0, W1)
        bench.directory.admit_namespace(namespace(BLOCK))
        hold(bench, holder, tokens, 12)
        decision = bench.pick(tokens).ticket.decision
        assert (decision.worker, decision.plan) == (holder, Plan.LOCAL)
        assert decision.matched_tokens == 12 * BLOCK
        columns = decision.candidates
        assert dict(zip(columns.workers, columns.matched_tokens, strict=True))[blind] == 0


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_d37_the_longest_prefix_wins_in_whatever_order_it_was_told_of(data: Any) -> None:
    names = [WorkerId(f"w{number}") for number in range(4)]
    counts = data.draw(st.lists(st.integers(0, 12), min_size=4, max_size=4, unique=True))
    order = data.draw(st.permutations(names))
    tokens, held = ids(16 * BLOCK), dict(zip(names, counts, strict=True))
    bench = Bench(*order)
    bench.directory.admit_namespace(namespace(BLOCK))
    for name in data.draw(st.permutations(names)):
        hold(bench, name, tokens, held[name])
    decision = bench.pick(tokens).ticket.decision
    assert decision.worker == max(held, key=held.__getitem__)
    assert decision.matched_tokens == max(counts) * BLOCK
