"""What isolation costs: beginnings that others had sent lately, beside a naive twin."""

from __future__ import annotations

from array import array
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from picker_bench import ids, request

from hand_clock import HandClock
from trunkline.core.identity import Scope, ScopeKind
from trunkline.gateway.contracts import OPEN_GRANT, InferenceRequest
from trunkline.gateway.isolation import DEPTHS, LATELY_MS, MAX_OWNERS, IsolationCost


def asked(tokens: array[int], tenant: str, kind: ScopeKind = ScopeKind.TENANT) -> InferenceRequest:
    user = "u" if kind is ScopeKind.USER else ""
    scope = Scope(kind=kind, org="o", tenant=tenant, user=user)
    made = request(tokens)
    made.grant = replace(OPEN_GRANT, scope=scope, domain=f"{kind.value}/{tenant}".encode())
    return made


def cost(clock: HandClock | None = None, max_beginnings: int = 1_000) -> IsolationCost:
    return IsolationCost(clock or HandClock(), seed=7, max_beginnings=max_beginnings)


def lost(counted: IsolationCost, kind: ScopeKind = ScopeKind.TENANT) -> int:
    return counted.lost_tokens[kind]


def test_what_another_tenant_sent_is_lost_and_what_the_own_one_sent_is_not() -> None:
    counted = cost()
    counted.note(asked(ids(2_000), "a"))
    assert lost(counted) == 0
    counted.note(asked(ids(2_000), "b"))
    assert lost(counted) == 1_024
    for tenant in ("a", "b"):
        counted.note(asked(ids(2_000), tenant))
    assert lost(counted) == 1_024
    assert counted.prompt_tokens == 8_000


def test_only_what_lies_beyond_the_own_beginning_is_lost() -> None:
    counted = cost()
    counted.note(asked(ids(5_000), "a"))
    counted.note(asked(ids(300), "b"))
    counted.note(asked(ids(5_000), "b"))
    assert lost(counted) == 256 + (4_096 - 256)


def test_prompts_that_begin_otherwise_and_short_ones_cost_nothing() -> None:
    counted = cost()
    for tenant, tokens in (("a", ids(255)), ("b", ids(255)), ("a", ids(500)), ("b", ids(500, 1))):
        counted.note(asked(tokens, tenant))
    assert lost(counted) == 0


def test_it_is_told_by_the_scope_that_could_not_reuse() -> None:
    counted = cost()
    counted.note(asked(ids(300), "a"))
    counted.note(asked(ids(300), "a", ScopeKind.USER))
    assert (lost(counted, ScopeKind.USER), lost(counted)) == (256, 0)


def test_what_was_sent_long_ago_would_have_gone_from_any_cache() -> None:
    clock = HandClock()
    counted = cost(clock)
    counted.note(asked(ids(300), "a"))
    clock.ms += LATELY_MS + 1.0
    counted.note(asked(ids(300), "b"))
    assert lost(counted) == 0
    clock.ms += LATELY_MS
    counted.note(asked(ids(300), "c"))
    assert lost(counted) == 256, "at the bound it counts"


def test_requests_that_share_nothing_or_are_not_read_are_not_looked_at() -> None:
    counted = cost()
    alone = request(ids(300))
    alone.grant = OPEN_GRANT.unshared()
    counted.note(alone)
    counted.note(request("text"))
    assert (counted.prompt_tokens, len(counted)) == (0, 0)


def test_what_is_kept_is_bounded_and_the_oldest_goes() -> None:
    counted = cost(max_beginnings=4)
    for first in range(10):
        counted.note(asked(ids(300, first), "a"))
    assert len(counted) == 4
    counted.note(asked(ids(300, 9), "b"))
    assert lost(counted) == 256
    counted.note(asked(ids(300, 0), "b"))
    assert lost(counted) == 256
    for number in range(MAX_OWNERS + 5):
        counted.note(asked(ids(300, 100), f"t{number}"))
    assert all(len(owners) <= MAX_OWNERS for owners in counted._seen.values())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2), st.integers(0, 2), st.sampled_from((200, 256, 1_024, 5_000)),
            st.integers(0, 200_000),
        ),
        max_size=30,
    )
)  # fmt: skip
def test_sums_are_those_of_a_list_that_is_scanned(steps: list[tuple[int, int, int, int]]) -> None:
    clock = HandClock()
    counted = cost(clock)
    sent: list[tuple[int, int, int, float]] = []
    wanted = 0
    for tenant, prompt, length, pause_ms in steps:
        clock.ms += pause_ms
        counted.note(asked(ids(length, prompt), str(tenant)))
        lately = [one for one in sent if one[1] == prompt and clock.ms - one[3] <= LATELY_MS]

        def depth(of: list[tuple[int, int, int, float]], length: int) -> int:
            both = [d for d in DEPTHS if d <= length and any(one[2] >= d for one in of)]
            return max(both, default=0)

        own = [one for one in lately if one[0] == tenant]
        wanted += depth(lately, length) - depth(own, length)
        sent.append((tenant, prompt, length, clock.ms))
    assert lost(counted) == wanted
