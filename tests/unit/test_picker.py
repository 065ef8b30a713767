"""The picker's books: whatever happens to an attempt, what it left behind is gone at its end."""

from __future__ import annotations

import asyncio
import json
import random
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trunkline.core.cost import CostModel
from trunkline.core.directory import Directory
from trunkline.core.fleet import Fleet, WorkerState
from trunkline.core.identity import ModelIdentity, Namespace, Scope, ScopeKind, derive_namespace
from trunkline.core.keys import KeyChain, chain
from trunkline.core.profiles import profile_named
from trunkline.core.records import BootInstant, Instant, WallTime, WorkerId
from trunkline.core.routing import Router
from trunkline.errors import NoWorker
from trunkline.gateway.contracts import (
    AttemptEnd,
    ChatPrompt,
    ClientError,
    InferenceRequest,
    Pick,
    Route,
)
from trunkline.gateway.picker import FleetPicker, NamespaceSource
from trunkline.gateway.tickets import MAX_SIBLINGS
from trunkline.gateway.tokenise import INLINE_BYTES, PromptTokens
from trunkline.ports.worker import Endpoint, Target

COMPLETE, FAILED, GONE = AttemptEnd.COMPLETE, AttemptEnd.WORKER_FAILED, AttemptEnd.CLIENT_GONE
W0, W1 = WorkerId("w0"), WorkerId("w1")
BLOCK = 16
MAX_TOKENS = 50_000


class ManualClock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.ms = 1_000.0

    def now(self) -> Instant:
        return Instant(self.ms)

    def boot(self) -> BootInstant:
        return BootInstant(self.ms)

    def wall(self) -> WallTime:
        return WallTime(self.ms / 1_000.0)


class Characters:
    """A tokenizer with one token a character."""

    digest = "characters"
    vocab_size = 1 << 21

    def encode(self, text: str, *, add_special_tokens: bool) -> array[int]:
        return array("I", map(ord, text))

    def decode(self, token_ids: array[int]) -> str:
        return "".join(map(chr, token_ids))


class Contents:
    """A template that prints the contents alone."""

    digest = "contents"

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> str:
        return "".join(str(message["content"]) for message in messages)


class Bench:
    """A picker over a real fleet and directory, and what the workers' breakers were told."""

    def __init__(self, *names: WorkerId, policy: str = "cache_aware", ttl_ms: float = 5e3) -> None:
        self.clock = ManualClock()
        self.directory = Directory(max_blocks=100_000)
        self.fleet = Fleet(virtual_nodes=16, now=self.clock.now())
        self.told: Counter[tuple[WorkerId, str]] = Counter()
        self.ttl_ms = ttl_ms
        self.picker = FleetPicker(
            fleet=self.fleet,
            directory=self.directory,
            router=Router(
                fleet=self.fleet,
                cost=CostModel(profile_named("tiny"), churn_weight=0.0),
                policy=policy,
                rng=random.Random(5),
            ),
            prompts=PromptTokens(Characters(), Contents(), max_tokens=MAX_TOKENS),
            namespaces=NamespaceSource(namespace),
            clock=self.clock,
            decisions_kept=8,
            shows_decisions=True,
        )
        for name in names:
            self.join(name)

    def join(self, name: WorkerId, *, wants_checkpoints: bool = False) -> None:
        slot = self.directory.join(name, block_tokens=BLOCK)
        self.fleet.add(WorkerState(worker=name, slot=slot, block_tokens=BLOCK))
        self.picker.add_target(
            Target(
                worker=name,
                endpoint=Endpoint(host="127.0.0.1", port=1, host_header="w:1"),
                predicted_ttl_ms=self.ttl_ms,
                wants_checkpoints=wants_checkpoints,
                on_sent=lambda: self.told.update([(name, "sent")]),
                on_ended=lambda end: self.told.update([(name, end.value)]),
            )
        )

    def leave(self, name: WorkerId) -> None:
        self.fleet.remove(name)
        self.directory.leave(name)
        self.picker.remove_target(name)

    def pick(self, prompt: Any, *tried: WorkerId, is_stream: bool = True) -> Pick:
        picked = self.picker.pick(request(prompt, is_stream=is_stream), frozenset(tried))
        assert isinstance(picked, Pick)
        return picked

    def in_flight(self, name: WorkerId) -> int:
        state = self.fleet.get(name)
        return 0 if state is None else state.queue.in_flight_count

    def expected(self, name: WorkerId, tokens: array[int]) -> int:
        """Leading blocks that are expected at a worker."""
        match = self.directory.match(chain(namespace(BLOCK), tokens))
        return match.expected[self.directory.slot(name)]

    def assert_clean(self) -> None:
        """No book remembers an attempt."""
        tickets = self.picker._tickets
        assert len(tickets) == 0
        assert tickets._owing == {}
        assert tickets.due_count <= 64
        for state in self.fleet.states():
            assert state.queue.in_flight_count == 0
            assert state.queue.queue_ms(self.clock.now()) == 0.0


def namespace(block_tokens: int) -> Namespace:
    return derive_namespace(
        b"k" * 32,
        Scope(kind=ScopeKind.TENANT, org="o", tenant="t"),
        ModelIdentity(model_id="m", block_tokens=block_tokens),
    )


def request(prompt: Any, *, is_stream: bool = True, body: bytes = b'{"a":1}') -> InferenceRequest:
    return InferenceRequest(
        request_id=f"r{random.Random(repr(prompt)).getrandbits(32):x}",
        route=Route.COMPLETION if prompt is not None else Route.OTHER,
        method="POST",
        path="/v1/completions",
        body=body,
        is_stream=is_stream,
        prompt=prompt,
    )


def ids(count: int, first: int = 0) -> array[int]:
    return array("I", range(first, first + count))


# -- load accounting -------------------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["start", "first byte", "complete", "fail", "leave", "drop", "join"]),
        st.integers(0, 2**16),
    ),
    max_size=60,
)


@given(steps=STEPS)
@settings(max_examples=150)
def test_c06_counters_equal_the_live_requests_at_each_step(steps: list[tuple[str, int]]) -> None:
    """Starts, first bytes, ends, errors, leaving clients and leaving workers in any order."""
    bench = Bench(W0, W1)
    live: list[tuple[Pick, WorkerState]] = []
    ends = {"complete": COMPLETE, "fail": FAILED, "leave": GONE}
    for step, draw in steps:
        bench.clock.ms += draw % 7
        if step == "start":
            prompt = ids(BLOCK * (draw % 5) + 1, draw % 3)
            try:
                picked = bench.pick(prompt, is_stream=bool(draw % 2))
            except NoWorker:
                assert not bench.fleet.states()
            else:
                live.append((picked, picked.ticket.state))
        elif step == "first byte" and live:
            bench.picker.first_byte(live[draw % len(live)][0])
        elif step in ends and live:
            picked, _ = live.pop(draw % len(live))
            bench.picker.ended(picked, ends[step], 0)
        elif step == "drop" and bench.fleet.get(W0) is not None:
            bench.leave(W0)
        elif step == "join" and bench.fleet.get(W0) is None:
            bench.join(W0)
        counted = Counter(id(state) for _, state in live)
        for state in {id(s): s for _, s in live}.values():
            assert state.queue.in_flight_count == counted[id(state)]
        for state in bench.fleet.states():
            assert state.queue.in_flight_count == counted[id(state)]
        assert len(bench.picker._tickets) == len(live)
    for picked, _ in live:
        bench.picker.ended(picked, GONE, None)
    bench.assert_clean()


def test_c07_ten_thousand_requests_with_failures_leave_nothing_behind() -> None:
    bench = Bench(W0, W1)
    dice = random.Random(3)
    live: list[Pick] = []
    for number in range(10_000):
        bench.clock.ms += 0.3
        live.append(bench.pick(ids(33, number % 50), is_stream=number % 3 > 0))
        if dice.random() < 0.7:
            bench.picker.first_byte(live[dice.randrange(len(live))])
        while len(live) > 40:
            picked = live.pop(dice.randrange(len(live)))
            draw = dice.random()
            end = FAILED if draw < 0.3 else GONE if draw < 0.4 else COMPLETE
            bench.picker.ended(picked, end, 16)
        assert len(bench.picker._tickets) == len(live)
    for picked in live:
        bench.picker.ended(picked, FAILED, None)
    bench.assert_clean()
    assert len(bench.picker.decisions) == 8
    sent = sum(bench.told[name, "sent"] for name in (W0, W1))
    ended = sum(count for (_, what), count in bench.told.items() if what != "sent")
    assert sent == ended == 10_000


def test_c08_a_second_end_of_one_attempt_is_a_bug_and_never_a_second_decrement() -> None:
    bench = Bench(W0)
    first, second = bench.pick(ids(20)), bench.pick(ids(20))
    bench.picker.ended(first, FAILED, None)
    with pytest.raises(AssertionError, match="ended twice"):
        bench.picker.ended(first, FAILED, None)
    assert bench.in_flight(W0) == 1
    bench.picker.ended(second, COMPLETE, None)
    bench.assert_clean()


def test_c09_a_retry_moves_the_charge_to_the_second_worker() -> None:
    bench = Bench(W0, W1)
    first = bench.pick(ids(40))
    other = W1 if first.worker == W0 else W0
    assert (bench.in_flight(first.worker), bench.in_flight(other)) == (1, 0)
    bench.picker.ended(first, FAILED, None)
    second = bench.pick(ids(40), first.worker)
    assert second.worker == other
    assert (bench.in_flight(first.worker), bench.in_flight(other)) == (0, 1)
    bench.picker.ended(second, COMPLETE, 0)
    bench.assert_clean()


def test_an_attempt_that_outlives_its_worker_is_charged_to_nobody_else() -> None:
    bench = Bench(W0)
    picked = bench.pick(ids(40))
    bench.leave(W0)
    bench.join(W0)
    assert bench.in_flight(W0) == 0
    bench.picker.ended(picked, FAILED, None)
    bench.assert_clean()


def test_no_worker_is_said_when_all_were_tried() -> None:
    bench = Bench(W0, W1)
    with pytest.raises(NoWorker):
        bench.pick(ids(40), W0, W1)
    bench.assert_clean()


# -- prefills that give no sign --------------------------------------------------------------------


def test_an_unstreamed_prefill_counts_as_over_when_it_was_predicted_to_be() -> None:
    bench = Bench(W0)
    bench.pick(ids(20_000), is_stream=False)  # 1 + 0.005 * 20,000 = 101 ms
    state = bench.fleet.get(W0)
    assert state is not None
    bench.clock.ms += 100.0
    assert state.queue.queue_ms(bench.clock.now()) == pytest.approx(1.0)
    bench.clock.ms += 2.0
    bench.pick(ids(17, 30_000), is_stream=False)
    assert (state.queue.in_flight_count, state.queue.stream_count) == (2, 1)


def test_a_long_unstreamed_prefill_does_not_hold_back_the_short_ones_of_other_workers() -> None:
    bench = Bench(W0, W1)
    long = bench.pick(ids(40_000), is_stream=False)
    short = bench.pick(ids(17, 50_000), long.worker, is_stream=False)
    bench.clock.ms += 5.0
    bench.pick(ids(17, 60_000), short.worker, is_stream=False)
    assert short.ticket.is_prefilled
    assert not long.ticket.is_prefilled


def test_ended_prefills_do_not_wait_in_memory_for_the_time_they_were_due() -> None:
    bench = Bench(W0, ttl_ms=0.0)
    for number in range(2_000):
        picked = bench.pick(ids(2_000, number * 3_000), is_stream=False)
        bench.picker.ended(picked, COMPLETE, None)
        assert bench.picker._tickets.due_count <= 66


# -- what is expected of an attempt ----------------------------------------------------------------


def test_a_failed_attempt_takes_back_what_it_alone_was_to_fill() -> None:
    bench = Bench(W0)
    picked = bench.pick(ids(10 * BLOCK + 1))
    assert bench.expected(W0, ids(10 * BLOCK)) == 10
    bench.picker.ended(picked, FAILED, None)
    assert bench.expected(W0, ids(10 * BLOCK)) == 0


def test_a_failed_attempt_leaves_what_was_expected_before_it() -> None:
    """One failure must not erase a system prompt that thousands have filled."""
    bench = Bench(W0)
    filled = bench.pick(ids(10 * BLOCK + 1))
    bench.picker.first_byte(filled)
    bench.picker.ended(filled, COMPLETE, 0)
    longer = ids(10 * BLOCK) + ids(5 * BLOCK + 1, 7_000)
    picked = bench.pick(longer)
    assert bench.expected(W0, longer) == 15
    bench.picker.ended(picked, FAILED, None)
    assert bench.expected(W0, longer) == 10


def test_a_failed_repeat_of_a_prompt_takes_nothing_back() -> None:
    bench = Bench(W0)
    for end in (COMPLETE, FAILED):
        picked = bench.pick(ids(10 * BLOCK))
        if end is COMPLETE:
            bench.picker.first_byte(picked)
        bench.picker.ended(picked, end, None)
    assert bench.expected(W0, ids(10 * BLOCK)) == 10


def test_what_a_sibling_in_flight_fills_stays_expected_until_it_fails_too() -> None:
    bench = Bench(W0)
    shared = ids(10 * BLOCK)
    first = bench.pick(shared + ids(3 * BLOCK + 1, 7_000))
    second = bench.pick(shared + ids(3 * BLOCK + 1, 8_000))
    bench.picker.ended(first, FAILED, None)
    assert bench.expected(W0, shared + ids(3 * BLOCK, 7_000)) == 10
    assert bench.expected(W0, shared + ids(3 * BLOCK, 8_000)) == 13
    bench.picker.ended(second, FAILED, None)
    assert bench.expected(W0, shared) == 0


@pytest.mark.parametrize(("strangers", "expected_blocks"), [(-1, 5), (0, 0)])
def test_only_the_oldest_in_flight_are_asked_what_they_share(
    strangers: int, expected_blocks: int
) -> None:
    """At the bound less is expected than could be, and nothing that is not there."""
    bench = Bench(W0)
    first = bench.pick(ids(81))
    for number in range(MAX_SIBLINGS + strangers):
        bench.pick(ids(20, 1_000 * (number + 1)))
    bench.pick(ids(81))
    bench.picker.ended(first, FAILED, None)
    assert bench.expected(W0, ids(80)) == expected_blocks


def test_a_client_that_leaves_before_the_first_byte_takes_its_expectations_along() -> None:
    bench = Bench(W0)
    early, late = bench.pick(ids(81)), bench.pick(ids(81, 5_000))
    bench.picker.first_byte(late)
    bench.picker.ended(early, GONE, None)
    bench.picker.ended(late, GONE, None)
    assert bench.expected(W0, ids(80)) == 0
    assert bench.expected(W0, ids(80, 5_000)) == 5


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_prompt_that_the_worker_refuses_is_not_expected_there(is_stream: bool) -> None:
    """A 400 is a complete answer, and computed nothing."""
    bench = Bench(W0)
    picked = bench.pick(ids(81), is_stream=is_stream)
    bench.clock.ms += 1_000.0
    bench.pick(ids(20, 9_000))  # until then an unstreamed one is taken for prefilled
    bench.picker.ended(picked, COMPLETE, None)
    assert bench.expected(W0, ids(80)) == 0


def test_an_attempt_of_an_earlier_life_takes_nothing_from_the_next() -> None:
    bench = Bench(W0)
    old = bench.pick(ids(81))
    bench.leave(W0)
    bench.join(W0)
    new = bench.pick(ids(81))
    bench.picker.first_byte(new)
    bench.picker.ended(new, COMPLETE, 0)
    bench.picker.ended(old, FAILED, None)
    assert bench.expected(W0, ids(80)) == 5


CHAINS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 6), st.sampled_from([COMPLETE, FAILED, GONE])),
    min_size=1,
    max_size=12,
)


@given(plans=CHAINS, order=st.randoms(use_true_random=False))
@settings(max_examples=150)
def test_expectations_are_those_of_the_filled_and_the_open_whatever_fails(
    plans: list[tuple[int, int, AttemptEnd]], order: random.Random
) -> None:
    """The naive model: a block is expected where an attempt has it that is open or that filled it.
    All attempts are open at once, and end in any order.
    """
    bench = Bench(W0)
    open_picks = [
        (bench.pick(ids(2 * BLOCK) + ids(depth * BLOCK + 1, 1_000 * branch)), end)
        for branch, depth, end in plans
    ]
    order.shuffle(open_picks)
    filled: list[KeyChain] = []
    while open_picks:
        picked, end = open_picks.pop()
        if end is COMPLETE:
            bench.picker.first_byte(picked)
            filled.append(picked.ticket.keys)
        bench.picker.ended(picked, end, None)
        expected = [*(other.ticket.keys for other, _ in open_picks), *filled]
        distinct = {keys[index] for keys in expected for index in range(len(keys))}
        assert bench.directory.predicted_count(W0) == len(distinct)
        for keys in expected:
            assert bench.directory.match(keys).expected[bench.directory.slot(W0)] == len(keys)


# -- calibration -----------------------------------------------------------------------------------


def test_a_slow_answer_to_a_known_prompt_moves_the_scale_of_its_worker() -> None:
    bench = Bench(W0)
    picked = bench.pick(ids(4_000))
    bench.clock.ms += 200.0
    bench.picker.first_byte(picked)
    assert picked.ticket.state.queue.scale > 1.0


def test_a_stream_of_an_unknown_prompt_says_nothing_about_speed() -> None:
    bench = Bench(W0)
    state = bench.fleet.get(W0)
    assert state is not None
    for _ in range(50):
        picked = bench.pick(None)
        bench.clock.ms += 20_000.0
        bench.picker.first_byte(picked)
        bench.picker.ended(picked, COMPLETE, None)
    assert state.queue.scale == 1.0
    assert bench.picker.accounts.unread_prompts == 50


# -- long prompts, odd bodies ----------------------------------------------------------------------


def test_a_long_prompt_is_awaited_and_a_client_that_left_meanwhile_costs_nothing() -> None:
    bench = Bench(W0)

    async def scenario() -> None:
        picked = bench.picker.pick(request("x", body=b"{%b}" % (b" " * INLINE_BYTES)), frozenset())
        assert not isinstance(picked, Pick)
        late = await picked
        bench.picker.ended(late, GONE, None)

    asyncio.run(scenario())
    bench.assert_clean()
    assert bench.directory.predicted_count(W0) == 0
    assert bench.told == {(W0, "sent"): 1, (W0, "client-gone"): 1}


@pytest.mark.parametrize("length", [MAX_TOKENS, INLINE_BYTES])
def test_a_prompt_at_the_context_limit_is_taken_and_one_token_more_is_refused(length: int) -> None:
    bench = Bench(W0)
    bench.picker._prompts = PromptTokens(Characters(), Contents(), max_tokens=length)

    async def pick(count: int) -> Pick:
        message = {"role": "user", "content": "x" * count}
        picked = bench.picker.pick(request(ChatPrompt(messages=[message])), frozenset())
        return picked if isinstance(picked, Pick) else await picked

    async def scenario() -> None:
        assert (await pick(length)).ticket.decision.prompt_tokens == length
        with pytest.raises(ClientError, match=f"has {length + 1} tokens") as caught:
            await pick(length + 1)
        assert caught.value.refusal.code == "context_length_exceeded"
        assert len(bench.picker._tickets) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":"x"}',
        b'  \r\n\t{"prompt":"{"}',
        b"{ }",
        b'{\n "prompt" : [1], "a" : {"b" : {}} }',
        '{"prompt":"\u00e9\U0001f600"}'.encode(),
    ],
)
@pytest.mark.parametrize("wants_checkpoints", [False, True])
def test_our_salt_goes_into_any_object_and_changes_nothing_else(
    body: bytes, wants_checkpoints: bool
) -> None:
    bench = Bench()
    bench.join(W0, wants_checkpoints=wants_checkpoints)
    asked = request(ids(300), body=body)
    picked = bench.picker.pick(asked, frozenset())
    assert isinstance(picked, Pick)
    sent = json.loads(picked.body)
    assert sent.pop("cache_salt") == namespace(BLOCK).salt
    if wants_checkpoints:
        [[tokens, label]] = sent.pop("kv_transfer_params")["trunkline"]["checkpoints"]
        assert (tokens, len(label)) == (256, 44)
    assert sent == json.loads(body)
    assert asked.body == body, "a retry salts the client's own bytes again"


def test_a_prompt_shorter_than_a_block_is_salted_too() -> None:
    bench = Bench(W0)
    picked = bench.pick(ids(1))
    assert json.loads(picked.body)["cache_salt"] == namespace(BLOCK).salt
    assert picked.ticket.decision.matched_tokens == 0


def test_an_unknown_prompt_is_sent_as_it_came() -> None:
    bench = Bench(W0)
    assert bench.pick(None).body == b'{"a":1}'


def test_an_empty_prompt_promises_nothing() -> None:
    bench = Bench(W0)
    assert bench.pick(array("I")).ticket.decision.matched_tokens == 0
