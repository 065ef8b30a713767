"""What the data plane counts: when it counts it, and that no client makes the counters grow."""

from __future__ import annotations

import asyncio
import random

from scripted import (
    CHAT,
    END,
    SSE_HEAD,
    STREAM,
    FixedPicker,
    answering,
    event,
    in_two,
    json_answer,
    post,
    running,
    until,
    wire,
    worker,
)

from trunkline.config import RetryConfig
from trunkline.gateway.contracts import Route
from trunkline.gateway.counters import Counters
from trunkline.gateway.metrics import Histogram


def count_of(histogram: Histogram) -> int:
    return sum(histogram.view().counts)


@wire
async def test_c82_ttft_is_counted_at_the_first_token_and_not_at_the_end() -> None:
    """The worker sends the rest only when the first token was counted."""
    go_on = asyncio.Event()
    first = SSE_HEAD + event("a")
    async with (
        worker(in_two(first, go_on, event("b") + event("c") + END)) as w,
        running(FixedPicker(w)) as gateway,
    ):
        counters = gateway.front.counters
        asking = asyncio.create_task(gateway.ask(post(STREAM)))
        await until(lambda: count_of(counters.ttft) == 1)
        assert count_of(counters.tpot) == count_of(counters.durations[Route.CHAT]) == 0
        go_on.set()
        assert (await asking).is_whole
        assert count_of(counters.ttft) == 1
        assert count_of(counters.tpot) == count_of(counters.durations[Route.CHAT]) == 1
        [record] = gateway.log
        assert record.ttft_ms is not None
        per_event_s = counters.tpot.view().total
        took_s = counters.durations[Route.CHAT].view().total
        assert 0.0 < 3 * per_event_s <= took_s, "three events and the end behind the first"


@wire
async def test_comments_and_answers_that_are_no_streams_have_no_time_a_token() -> None:
    async with worker(answering(json_answer())) as w, running(FixedPicker(w)) as gateway:
        await gateway.ask(post())
        counters = gateway.front.counters
        assert count_of(counters.tpot) == 0
        assert count_of(counters.durations[Route.CHAT]) == count_of(counters.ttft) == 1


@wire
async def test_a_stream_that_breaks_counts_its_first_token_and_no_pace() -> None:
    go_on = asyncio.Event()
    async with (
        worker(in_two(SSE_HEAD + event("a"), go_on, event("b") + b"zz\r\n")) as w,
        running(FixedPicker(w), retry=RetryConfig(disable_retries=True)) as gateway,
    ):
        counters = gateway.front.counters
        asking = asyncio.create_task(gateway.ask(post(STREAM)))
        await until(lambda: count_of(counters.ttft) == 1)
        go_on.set()
        await asking
        await gateway.settled()
        assert (count_of(counters.ttft), count_of(counters.tpot)) == (1, 0)
        assert counters.broken_streams == 1


def series_of(counters: Counters) -> list[str]:
    """The label values that the counters hold."""
    labels = [label for pair in counters.requests for label in pair]
    return [*labels, *counters.refusals, *counters.dropped_fields]


@wire
async def test_c94_100_000_names_that_clients_make_up_add_no_series() -> None:
    """Models, paths, tenants and fields, fifty new ones with each of 2,000 requests."""
    draw = random.Random(94)

    def name() -> str:
        return f"n{draw.getrandbits(64):016x}"

    def odd() -> bytes:
        body = {**CHAT, "model": name(), "user": name(), **{name(): 1 for _ in range(45)}}
        headers = f"x-tenant-id: {name()}\r\nx-session-id: {name()}\r\nx-request-id: {name()}\r\n"
        path = draw.choice(("/v1/chat/completions", f"/v1/{name()}", f"/{name()}"))
        return post(body, path=path, extra=headers)

    known = ("good", "m")
    async with (
        worker(answering(json_answer())) as w,
        running(FixedPicker(w), knows_model=lambda model: model in known) as gateway,
    ):
        for _ in range(2_000):
            await gateway.ask(odd())
        await gateway.ask(post())
        counters = gateway.front.counters
        assert sum(counters.requests.values()) == 2_001
        assert counters.requests["chat", "2xx"] == 1, "what is known keeps its label"
        assert counters.dropped_fields["unknown"] >= 25_000
        assert len(series_of(counters)) < 40
        assert not [
            label for label in series_of(counters) if label.startswith("n") and "0" in label
        ]
