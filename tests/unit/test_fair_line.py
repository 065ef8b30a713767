"""The line in front of the picker: who waits, for how long, and what is left behind."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest
from fair_world import LONG, NEVER, Desk, Policy, asks, fresh, prefill_ms, turns
from picker_bench import COMPLETE, FAILED, GONE, W0, W1, ids

from trunkline.errors import Busy, NoWorker
from trunkline.gateway.allowance import RateLimited
from trunkline.gateway.contracts import ClientError, InferenceRequest, Pick, Refusal
from trunkline.gateway.fair_line import MAX_RELEASES, TICK_S, LineFull

# -- who waits -------------------------------------------------------------------------------------


def test_one_tenant_on_an_idle_fleet_never_waits_however_long_its_prompt() -> None:
    desk = Desk(W0, W1)
    for number in range(50):
        picked = desk.pick(asks("a", fresh(number, 49_000)))
        desk.line.first_byte(picked)
        desk.line.ended(picked, COMPLETE, None)
    assert desk.line.accounts.passed == 50
    desk.assert_clean()


def test_requests_pass_while_any_worker_has_room_and_wait_when_none_has() -> None:
    async def run() -> None:
        desk = Desk(W0, W1, room_ms=20.0)
        desk.pick(asks("a", fresh(1)))
        desk.pick(asks("a", fresh(2)))

        waiting = await desk.wait(asks("b", fresh(3)))

        assert (desk.bench.in_flight(W0), desk.bench.in_flight(W1)) == (1, 1)
        assert desk.line.waiting_count == 1
        waiting.cancel()
        await turns()

    asyncio.run(run())


@pytest.mark.parametrize("how", ["first byte", "complete", "failed", "gone"])
def test_who_waits_goes_when_an_attempt_begins_to_answer_or_ends(how: str) -> None:
    async def run() -> None:
        desk = Desk(W0, room_ms=20.0)
        first = desk.pick(asks("a", fresh(1)))
        waiting = await desk.wait(asks("b", fresh(2)))

        if how == "first byte":
            desk.line.first_byte(first)
        else:
            end = {"complete": COMPLETE, "failed": FAILED, "gone": GONE}[how]
            desk.line.ended(first, end, None)
        await turns()

        desk.line.ended(waiting.result(), COMPLETE, None)
        if how == "first byte":
            desk.line.ended(first, COMPLETE, None)
        desk.assert_clean()

    asyncio.run(run())


def test_who_waits_goes_when_a_silent_prefill_is_predicted_to_be_over() -> None:
    """An answer that is not streamed shows its first byte at its end only."""

    async def run() -> None:
        desk = Desk(W0, room_ms=30.0)
        desk.pick(asks("a", fresh(1), is_stream=False))
        desk.pick(asks("a", fresh(2), is_stream=False))
        desk.line._room_ms = 10.0
        waiting = await desk.wait(asks("b", fresh(3)))
        assert desk.timers.due[0][0] == TICK_S

        desk.bench.clock.ms += 2 * prefill_ms(LONG) - 10.0
        desk.timers.fire()
        await turns()
        assert not waiting.done()
        desk.bench.clock.ms += 0.001
        desk.timers.fire()
        await turns()

        assert waiting.result().worker == W0
        assert not desk.timers.due

    asyncio.run(run())


def test_a_further_attempt_of_a_request_does_not_wait_again() -> None:
    async def run() -> None:
        desk = Desk(W0, W1, room_ms=1.0)
        retried = asks("a", fresh(1))
        first = desk.pick(retried)
        desk.pick(asks("a", fresh(2)))
        waiting = await desk.wait(asks("b", fresh(3)))

        again = desk.pick(retried, frozenset({first.worker}))

        assert again.worker != first.worker
        assert not waiting.done()
        waiting.cancel()
        await turns()

    asyncio.run(run())


def test_a_long_prompt_that_is_read_off_the_loop_finds_the_room_that_is_left_then() -> None:
    """64 at once must not all be sent because there was room when they came."""

    async def run() -> None:
        desk = Desk(W0, room_ms=20.0)
        prompts = (f"{n:02d}" + "x" * 33_000 for n in range(8))
        requests = [asks("a", ids(1)) for _ in range(8)]
        for asked, prompt in zip(requests, prompts, strict=True):
            asked.prompt, asked.body = prompt, b'{"prompt":"' + prompt.encode() + b'"}'
        choices = [desk.line.pick(asked, NEVER) for asked in requests]
        tasks = [asyncio.ensure_future(c) for c in choices if not isinstance(c, Pick)]
        assert len(tasks) == 8
        while desk.line.waiting_count + desk.bench.in_flight(W0) < 8:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.001)

        assert desk.bench.in_flight(W0) == 1

        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        desk.bench.picker._prompts.close()

    asyncio.run(run())


def test_workers_above_their_watermark_have_no_room_unless_all_are() -> None:
    async def run() -> None:
        desk = Desk(W0, W1, room_ms=20.0)
        desk.bench.fleet.update(W1, is_full=True)
        desk.pick(asks("a", fresh(1)))
        waiting = await desk.wait(asks("a", fresh(2)))

        desk.bench.fleet.update(W0, is_full=True)
        desk.timers.fire()
        await turns()

        assert waiting.done()

    asyncio.run(run())


def test_without_a_usable_worker_nobody_waits_in_vain() -> None:
    async def run() -> None:
        desk = Desk(W0, room_ms=20.0)
        first = desk.pick(asks("a", fresh(1)))
        waiting = await desk.wait(asks("b", fresh(2)))

        desk.bench.fleet.update(W0, is_healthy=False)
        desk.timers.fire()
        await turns()

        with pytest.raises(NoWorker):
            waiting.result()
        with pytest.raises(NoWorker):
            desk.line.pick(asks("b", fresh(3)), NEVER)
        desk.line.ended(first, FAILED, None)
        desk.assert_clean()

    asyncio.run(run())


def test_who_waits_is_sent_under_the_grant_of_when_it_goes() -> None:
    """And where that is refused by now, it alone is; the next one goes."""
    renewed: list[str] = []

    def renew(asked: InferenceRequest) -> None:
        renewed.append(asked.grant.principal.tenant)
        if asked.grant.principal.tenant == "barred":
            raise ClientError(Refusal(status=403, code="access_revoked", message="no"))

    async def run() -> None:
        desk = Desk(W0, room_ms=20.0, renew=renew)
        first = desk.pick(asks("a", fresh(1)))
        barred = await desk.wait(asks("barred", fresh(2)))
        good = await desk.wait(asks("good", fresh(3)))
        assert renewed == []

        desk.line.ended(first, COMPLETE, None)
        await turns()

        assert renewed == ["barred", "good"]
        with pytest.raises(ClientError):
            barred.result()
        desk.line.ended(good.result(), COMPLETE, None)
        desk.assert_clean()

    asyncio.run(run())


def test_a_turn_of_the_loop_sends_a_bounded_number_and_the_next_one_goes_on() -> None:
    async def run() -> None:
        desk = Desk(W0, room_ms=1_000.0)
        first = desk.pick(asks("a", fresh(1, 49_000)))
        desk.line._room_ms = 100.0
        tasks = [await desk.wait(asks("b", ids(20, n * 50))) for n in range(MAX_RELEASES + 8)]

        desk.line.ended(first, COMPLETE, None)
        await turns()
        assert sum(task.done() for task in tasks) == MAX_RELEASES
        assert desk.timers.due[-1][0] in (0.0, TICK_S)
        desk.timers.fire()
        await turns()

        assert all(task.done() for task in tasks)

    asyncio.run(run())


# -- bounds ----------------------------------------------------------------------------------------


def test_a_tenant_with_as_many_waiting_as_it_may_is_told_when_to_come_again() -> None:
    async def run() -> None:
        desk = Desk(W0, room_ms=1.0, max_waiting_per_tenant=2, target_ms=0.0)
        desk.policies["a"] = Policy(tokens_per_s=10_000.0)
        desk.pick(asks("z", fresh(1)))
        tasks = [await desk.wait(asks("a", fresh(n))) for n in (2, 3)]
        desk.bench.clock.ms += 2_500.0

        with pytest.raises(LineFull) as refused:
            desk.line.pick(asks("a", fresh(4)), NEVER)
        other = await desk.wait(asks("b", fresh(5)))

        assert (refused.value.status, refused.value.retry_after_s) == (429, 3)
        assert desk.line.waiting_count == 3
        assert desk.line.accounts.refused == 1
        desk.bench.clock.ms -= 2_500.0
        quota = desk.allowance._rates("a")
        left = desk.allowance._limits.levels("a", quota, desk.bench.clock.now())[1]
        assert left is not None
        assert left >= 10_000.0 - 2 * LONG, "the refused one was charged"
        for task in (*tasks, other):
            task.cancel()
        await turns()

    asyncio.run(run())


def test_at_the_bound_of_all_the_newest_of_who_has_most_makes_room() -> None:
    async def run() -> None:
        desk = Desk(W0, room_ms=1.0, max_waiting=3)
        desk.pick(asks("z", fresh(1)))
        flood = [await desk.wait(asks("a", fresh(n))) for n in (2, 3, 4)]

        quiet = await desk.wait(asks("b", fresh(5)))

        with pytest.raises(LineFull):
            flood[2].result()
        late = await desk.wait(asks("a", fresh(6)))
        with pytest.raises(LineFull):
            late.result()
        assert [task.done() for task in (*flood[:2], quiet)] == [False] * 3
        assert len(desk.line._arrivals) == desk.line.waiting_count == 3
        for task in (*flood[:2], quiet):
            task.cancel()
        await turns()
        assert desk.line.waiting_count == 0

    asyncio.run(run())


def test_a_wait_that_is_too_long_ends_and_leaves_nothing() -> None:
    async def run() -> None:
        desk = Desk(W0, room_ms=1.0, max_wait_ms=1_000.0)
        first = desk.pick(asks("z", fresh(1)))
        desk.bench.fleet.states()[0].queue.foreign_ms = 1.0  # another gateway's work, for ever
        early = await desk.wait(asks("a", fresh(2)))
        desk.bench.clock.ms += 400.0
        late = await desk.wait(asks("b", fresh(3)))

        desk.bench.clock.ms += 599.0
        desk.timers.fire()
        await turns()
        assert not early.done()
        desk.bench.clock.ms += 1.0
        desk.timers.fire()
        await turns()

        with pytest.raises(Busy, match="1000 ms"):
            early.result()
        assert not late.done()
        late.cancel()
        await turns()
        desk.bench.fleet.states()[0].queue.foreign_ms = 0.0
        desk.line.ended(first, COMPLETE, None)
        desk.timers.fire()
        desk.assert_clean()
        assert not desk.timers.due

    asyncio.run(run())


# -- nothing left behind ---------------------------------------------------------------------------


def test_a_client_that_leaves_while_it_waits_takes_its_place_along() -> None:
    async def run() -> None:
        desk = Desk(W0, room_ms=1.0)
        first = desk.pick(asks("z", fresh(1)))
        waiting = await desk.wait(asks("a", fresh(2)))

        waiting.cancel()
        await turns()

        assert desk.line.waiting_count == 0
        assert desk.line.accounts.left == 1
        desk.line.ended(first, COMPLETE, None)
        desk.assert_clean()

    asyncio.run(run())


def test_a_client_that_leaves_when_its_worker_was_just_chosen_gives_it_back() -> None:
    async def run() -> None:
        desk = Desk(W0, room_ms=1.0)
        first = desk.pick(asks("z", fresh(1)))
        waiting = await desk.wait(asks("a", fresh(2)))

        desk.line.ended(first, COMPLETE, None)
        assert desk.bench.in_flight(W0) == 1
        waiting.cancel()
        await turns()

        assert desk.bench.told[W0, "client-gone"] == 1
        desk.assert_clean()

    asyncio.run(run())


def test_who_left_in_this_turn_is_passed_over_and_the_next_one_goes() -> None:
    async def run() -> None:
        desk = Desk(W0, room_ms=1.0)
        first = desk.pick(asks("z", fresh(1)))
        leaving = await desk.wait(asks("a", fresh(2)))
        staying = await desk.wait(asks("b", fresh(3)))

        leaving.cancel()
        desk.line.ended(first, COMPLETE, None)
        await turns()

        assert leaving.cancelled()
        desk.line.ended(staying.result(), COMPLETE, None)
        desk.assert_clean()

    asyncio.run(run())


class Storm:
    """Starts, first bytes, ends, retries, leavers, time-outs, workers that come and go, drawn."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.desk = Desk(
            W0, W1, room_ms=15.0, max_waiting=20, max_waiting_per_tenant=8, max_wait_ms=150.0
        )
        self.live: list[Pick] = []
        self.waiting: list[asyncio.Task[Pick]] = []
        self.seen: Counter[str] = Counter()

    async def played(self, steps: int) -> Counter[str]:
        """How often each end was seen; when all is over nothing is left behind."""
        desk = self.desk
        for _ in range(steps):
            desk.bench.clock.ms += self.dice.random() * 8.0
            self._step()
            if self.dice.random() < 0.7:
                await turns(self.dice.randrange(3))
                self._collect()
            assert desk.line.waiting_count <= sum(not task.done() for task in self.waiting)
            assert len(desk.timers.due) <= 1
        for task in self.waiting:
            task.cancel()
        await turns()
        self._collect()
        for picked in self.live:
            desk.line.ended(picked, COMPLETE, None)
        await turns()
        desk.timers.fire()
        desk.assert_clean()
        return self.seen

    def _step(self) -> None:
        dice, desk, live = self.dice, self.desk, self.live
        draw = dice.random()
        if draw < 0.5:
            self._ask()
        elif draw < 0.6 and live:
            desk.line.first_byte(live[dice.randrange(len(live))])
        elif draw < 0.85 and live:
            end = dice.choice((COMPLETE, FAILED, GONE))
            desk.line.ended(live.pop(dice.randrange(len(live))), end, None)
        elif draw < 0.9 and self.waiting:
            self.waiting[dice.randrange(len(self.waiting))].cancel()
        elif draw < 0.92:
            desk.bench.fleet.update(dice.choice((W0, W1)), is_healthy=dice.random() < 0.7)
        else:
            desk.timers.fire()

    def _ask(self) -> None:
        dice = self.dice
        tokens = fresh(dice.randrange(40), dice.choice((40, 1_000, LONG)))
        asked = asks("abc"[dice.randrange(3)], tokens, is_stream=dice.random() < 0.5)
        tried = frozenset({W0}) if dice.random() < 0.1 else NEVER
        try:
            choice = self.desk.line.pick(asked, tried)
        except (Busy, NoWorker):
            self.seen["refused"] += 1
            return
        if isinstance(choice, Pick):
            self.seen["passed"] += 1
            self.live.append(choice)
        else:
            self.waiting.append(asyncio.ensure_future(choice))

    def _collect(self) -> None:
        for task in [task for task in self.waiting if task.done()]:
            self.waiting.remove(task)
            if task.cancelled():
                self.seen["left"] += 1
                continue
            error = task.exception()
            self.seen[type(error).__name__ if error else "released"] += 1
            if error is None:
                self.live.append(task.result())


@pytest.mark.parametrize("seed", range(4))
def test_ten_thousand_ends_of_every_kind_leave_nothing_behind(seed: int) -> None:
    async def run() -> Counter[str]:
        return await Storm(seed).played(2_500)

    seen = asyncio.run(run())
    assert set(seen) >= {"passed", "released", "refused", "left", "LineFull"}, seen
    assert min(seen.values()) > 5, seen


def test_after_an_idle_moment_nobody_owes_anybody() -> None:
    async def run() -> None:
        desk = Desk(W0, room_ms=1.0)
        first = desk.pick(asks("z", fresh(1)))
        task = await desk.wait(asks("a", fresh(2)))
        desk.line.ended(first, COMPLETE, None)
        await turns()
        assert desk.line._queue.tenant_count == 1
        desk.line.ended(task.result(), COMPLETE, None)

        desk.pick(asks("b", fresh(3)))

        assert desk.line._queue.tenant_count == 0

    asyncio.run(run())


# -- rates of tokens -------------------------------------------------------------------------------


def test_a_prompt_is_charged_once_when_its_tokens_are_known() -> None:
    desk = Desk(W0, W1)
    desk.policies["a"] = Policy(tokens_per_s=1_000.0)
    asked = asks("a", fresh(1, 1_500))
    desk.allowance.admit("a")
    first = desk.pick(asked)
    desk.pick(asked, frozenset({first.worker}))
    desk.pick(asked)  # salted anew: nobody has been tried
    assert dict(asked.limit_headers) == {
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "2s",
    }
    desk.bench.clock.ms += 499.0
    with pytest.raises(RateLimited) as refused:
        desk.allowance.admit("a")
    assert refused.value.retry_after_s == 1
    desk.bench.clock.ms += 1.0
    desk.allowance.admit("a")


def test_of_many_prompts_that_were_admitted_unread_only_the_first_debt_is_let_through() -> None:
    desk = Desk(W0)
    desk.policies["a"] = Policy(tokens_per_s=1_000.0)
    for _ in range(4):
        desk.allowance.admit("a")
    desk.pick(asks("a", fresh(1, 5_000)))

    with pytest.raises(RateLimited) as refused:
        desk.line.pick(asks("a", fresh(2, 5_000)), NEVER)

    assert refused.value.retry_after_s == 4
    assert desk.bench.in_flight(W0) == 1
