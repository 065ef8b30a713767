"""Streams whose worker dies in the middle: they go on from another one, or say that they cannot."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from mortal import (
    IDS,
    LAST,
    QUICK,
    REFUSES,
    USAGE,
    WANTED,
    Heard,
    Mortal,
    TokenPicker,
    chat,
    completion,
    expected,
    heard,
    prompt_ids,
    text_of_ids,
    through,
    told,
    usage,
)
from scripted import (
    COMPLETE,
    FAILED,
    GONE,
    answering,
    patient,
    post,
    running,
    until,
    wire,
    worker,
)

from trunkline.config import RetryConfig
from trunkline.gateway import mending
from trunkline.gateway.contracts import AttemptEnd
from trunkline.gateway.journal import Delivered, read_journal


def assert_whole(got: Heard, body: dict[str, Any], *, resumes: int = 1) -> None:
    """The answer is the one that a single worker would have given."""
    ids = expected(body)
    assert got.error is None
    assert got.is_done
    assert got.text == text_of_ids(ids)
    assert got.ids == (ids if "return_token_ids" in body else [])
    assert len(got.envelopes) == 1, "one id, time, model and kind"
    assert got.roles == ("messages" in body)
    assert got.reasons == ["length"]
    if "stream_options" in body:
        counts = usage(len(prompt_ids(body)), len(ids))
        assert got.usages == [{**counts, "x_resumes": resumes}]
    else:
        assert got.usages == []


@pytest.mark.parametrize("more", [{}, IDS, USAGE, {**IDS, **USAGE}], ids=lambda m: "+".join(m))
@pytest.mark.parametrize("make", [chat, completion])
def test_a_stream_whose_worker_dies_at_any_token_goes_on_as_if_nothing_was(
    make: Any, more: dict[str, Any]
) -> None:
    @wire
    async def scenario() -> None:
        body = make(**more)
        role = make is chat
        for said in range(1, WANTED):
            first, second = Mortal([said + role], name="a"), Mortal(name="b")
            got, gateway = await through(first, second, body=body)
            assert_whole(got, body)
            assert got.comments == [f": resumed n={said}"]
            ends = [end for _, end, _ in gateway.picker.ends]
            assert ends == [FAILED, COMPLETE]
            assert gateway.front.counters.resumed_streams == 1
            assert gateway.front.counters.broken_streams == 0
            assert gateway.log[-1].attempts == 2
            [asked] = second.bodies
            assert second.paths == ["/v1/completions"]
            assert asked["prompt"] == [*prompt_ids(body), *expected(body)[:said]]
            assert asked["max_tokens"] == WANTED - said

    scenario()


@wire
async def test_a_stream_may_break_twice() -> None:
    for make in (chat, completion):
        body = make(**IDS, **USAGE)
        got, gateway = await through(Mortal([5]), Mortal([3]), Mortal(), body=body)
        assert_whole(got, body, resumes=2)
        assert len(got.comments) == 2
        assert gateway.front.counters.resumed_streams == 2
        assert sum(gateway.front.counters.ttft.view().counts) == 1, "its first token came once"


@wire
async def test_a_stream_is_continued_as_often_as_retries_allow_and_then_says_so() -> None:
    body = chat(**IDS)
    mortals = [Mortal([3]), Mortal([2]), Mortal([2]), Mortal()]
    got, gateway = await through(*mortals, body=body)
    assert got.text == text_of_ids(expected(body)[:6])
    assert not got.is_done
    assert got.error is not None
    assert (got.error["type"], got.error["code"]) == ("upstream_lost", "worker_lost")
    assert (got.error["tokens_delivered"], got.error["retryable"]) == (6, True)
    assert got.error["request_id"] == gateway.log[-1].request_id
    assert gateway.front.counters.broken_streams == 1
    assert mortals[3].bodies == []


@pytest.mark.parametrize("events", [0, 1])
def test_a_stream_that_dies_before_its_first_token_is_asked_for_again(events: int) -> None:
    """With nothing of the answer there, anything can be: constrained output and tools, too."""

    @wire
    async def scenario() -> None:
        tool = {"type": "function", "function": {"name": "f"}}
        for more in ({}, {"tools": [tool]}, {"response_format": {"type": "json_object"}}):
            body = chat(**USAGE, **more)
            second = Mortal(name="b")
            got, _ = await through(Mortal([events], name="a"), second, body=body)
            assert second.bodies == [body]
            assert got.text == text_of_ids(expected(body))
            assert (got.is_done, got.roles, len(got.envelopes), got.comments) == (True, 1, 1, [])
            assert got.usages == [usage(len(prompt_ids(body)), WANTED)]

    scenario()


@pytest.mark.parametrize("make", [chat, completion])
@pytest.mark.parametrize("lacks", [1, 2, 3])
def test_a_stream_that_lacks_only_its_end_gets_it_without_another_worker(
    make: Any, lacks: int
) -> None:
    """Of the finish, the usage and `[DONE]`."""

    @wire
    async def scenario() -> None:
        for more in (USAGE, {**IDS, **USAGE}):
            body = make(**more)
            second = Mortal()
            events = len(Mortal().events(body))
            got, gateway = await through(Mortal([events - lacks]), second, body=body)
            assert second.bodies == []
            assert got.error is None
            assert got.is_done
            assert got.reasons == ["length"]
            assert got.text == text_of_ids(expected(body))
            [counts] = got.usages
            prompt = len(prompt_ids(body))
            assert (counts["prompt_tokens"], counts["completion_tokens"]) == (prompt, WANTED)
            assert [end for _, end, _ in gateway.picker.ends] == [FAILED]

    scenario()


@wire
async def test_a_stream_that_lacks_only_its_last_chunk_gets_it() -> None:
    body = chat()
    events = len(Mortal().events(body))
    got, _ = await through(Mortal([events]), Mortal(), body=body)
    assert_whole(got, body)
    assert got.comments == []


OPPOSED: list[dict[str, Any]] = [
    {"logprobs": True},
    {"presence_penalty": 0.5},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"regex": "a*"}},
    {"tools": [{"type": "function", "function": {"name": "f"}}]},
    {"skip_special_tokens": False},
    {"stream_options": {"continuous_usage_stats": True}},
    {"min_tokens": 3, "stop": "no such text"},
    {"bad_words": ["x"]},
    {"n": 2},
]


@pytest.mark.parametrize("more", OPPOSED, ids=lambda more: next(iter(more)))
def test_what_cannot_be_continued_ends_in_an_error_event(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[Delivered] = []

    def read(forwarded: Sequence[bytes]) -> Delivered:
        reads.append(read_journal(forwarded))
        return reads[-1]

    monkeypatch.setattr(mending, "read_journal", read)

    @wire
    async def scenario() -> None:
        second = Mortal()
        got, gateway = await through(Mortal([4]), second, body=chat(**IDS, **more))
        assert second.bodies == []
        assert not got.is_done
        assert got.error is not None
        assert got.error["tokens_delivered"] == 3
        assert gateway.front.counters.resumed_streams == 0
        assert len(reads) == 1, "many streams may break at once: each is read once"

    scenario()


@wire
async def test_harmless_values_of_the_same_fields_stand_against_nothing() -> None:
    body = chat(
        logprobs=False, presence_penalty=0, n=1, response_format={"type": "text"}, tools=[],
        frequency_penalty=0.0, skip_special_tokens=True, min_tokens=6, seed=5, temperature=0.5,
    )  # fmt: skip
    second = Mortal()
    got, _ = await through(Mortal([5]), second, body=body)
    assert_whole(got, body)
    [asked] = second.bodies
    assert (asked["min_tokens"], asked["seed"], asked["temperature"]) == (2, 9, 0.5)
    assert asked.keys() == {
        "model", "temperature", "prompt", "max_tokens", "stream", "stream_options",
        "return_token_ids", "seed", "min_tokens",
    }  # fmt: skip


@wire
async def test_without_a_tokenizer_a_completion_goes_on_by_the_ids_that_its_client_asked_for() -> (
    None
):
    body = completion(**IDS)
    got, _ = await through(Mortal([5]), Mortal(), body=body, has_tokenizer=False)
    assert_whole(got, body)
    for other in (completion(), chat(), chat(**IDS)):
        got, _ = await through(Mortal([5]), Mortal(), body=other, has_tokenizer=False)
        assert got.error is not None


@wire
async def test_a_stream_longer_than_what_is_kept_is_not_continued() -> None:
    """The bound is `resume_buffer_bytes`; 0 continues nothing, and no more does one without
    retries."""
    body = chat(max_tokens=100)
    events = Mortal().events(body)
    kept = sum(len(event) + len(b"ff\r\n\r\n") for event in events[:60]) - 1
    for retry, dies_at, is_continued in (
        (replace(QUICK, resume_buffer_bytes=kept), 59, True),
        (replace(QUICK, resume_buffer_bytes=kept), 60, False),
        (replace(QUICK, resume_buffer_bytes=0), 10, False),
        (replace(QUICK, disable_retries=True), 10, False),
    ):
        got, _ = await through(Mortal([dies_at]), Mortal(), body=body, retry=retry)
        assert got.is_done is is_continued
        if not is_continued:
            assert got.error is not None
            # Where not all is kept, the event with the role counts, too.
            assert got.error["tokens_delivered"] - dies_at in (-1, 0)


@wire
async def test_the_retry_budget_bounds_continuations() -> None:
    """I12."""
    retry = RetryConfig(
        retry_budget_ratio=0.0, retry_budget_floor_per_s=0.2, retry_initial_backoff_ms=0,
        retry_max_backoff_ms=0,
    )  # fmt: skip
    first, second = Mortal([4] * 10), Mortal()
    async with (
        worker(first.script, "a") as a,
        worker(second.script, "b") as b,
        running(TokenPicker(a, b), retry=retry) as gateway,
    ):
        whole = [(await told(gateway, chat())).is_done for _ in range(10)]
        assert sum(whole) == len(second.bodies) == 2
        assert gateway.front.counters.retries_denied == 8


@wire
async def test_a_worker_that_falls_silent_is_left_and_what_it_says_later_reaches_nobody() -> None:
    """F2: fenced by its attempt."""
    body = chat(**IDS)
    silent, second = Mortal([6], is_silent=True, name="a"), Mortal(name="b")
    upstream = patient(stream_idle_timeout_ms=300)
    async with (
        worker(silent.script, "a") as a,
        worker(second.script, "b") as b,
        running(TokenPicker(a, b), retry=QUICK, upstream=upstream) as gateway,
    ):
        client = await gateway.client()
        await client.send(post(body))
        await until(lambda: len(second.bodies) == 1)
        silent.go_on.set()
        reply = await client.reply()
        assert_whole(heard(reply.body), body)
        await gateway.settled()
        assert gateway.picker.ends[0] == (a.name, AttemptEnd.WORKER_LATE, None)


@pytest.mark.parametrize("what", ["refuses", "dies", "babbles"])
def test_a_second_worker_that_fails_too_is_replaced_while_there_is_a_third(what: str) -> None:
    @wire
    async def scenario() -> None:
        babble = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
        babble += b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\nno chunk\r\n"
        bad = {"refuses": REFUSES, "dies": b"HTTP/1.1 200", "babbles": babble}[what]
        body = chat(**IDS, **USAGE)
        third = Mortal(name="c")
        async with (
            worker(Mortal([4]).script, "a") as a,
            worker(answering(bad) if what != "dies" else Mortal([0]).script, "b") as b,
            worker(third.script, "c") as c,
            running(TokenPicker(a, b, c), retry=QUICK) as gateway,
        ):
            got = await told(gateway, body)
            assert got.text == text_of_ids(expected(body))
            assert got.is_done
            assert [name for name, _, _ in gateway.picker.ends] == ["a", "b", "c"]
            # Of the second one nothing went out: the stream went on once.
            assert gateway.front.counters.resumed_streams == 1
            assert [counts["x_resumes"] for counts in got.usages] == [1]

    scenario()


@wire
async def test_where_no_other_worker_is_there_the_client_is_told_of_the_first_ones_end() -> None:
    got, gateway = await through(Mortal([5]), body=chat(**IDS))
    assert got.error is not None
    assert (got.error["code"], got.error["tokens_delivered"]) == ("worker_lost", 4)
    assert gateway.log[-1].code == "worker_lost"


@wire
async def test_a_client_that_leaves_between_two_workers_leaves_nothing_behind() -> None:
    slow = RetryConfig(retry_initial_backoff_ms=60_000, retry_max_backoff_ms=60_000)
    async with (
        worker(Mortal([5]).script, "a") as a,
        worker(Mortal().script, "b") as b,
        running(TokenPicker(a, b), retry=slow) as gateway,
    ):
        client = await gateway.client()
        await client.send(post(chat()))
        await until(lambda: gateway.picker.ends == [(a.name, FAILED, None)])
        client.reset()
        await gateway.settled()
        assert gateway.log[-1].code == "client_gone"
        assert gateway.picker.open_count == 0


@wire
async def test_a_client_that_leaves_behind_the_seam_is_told_to_the_second_worker() -> None:
    silent = Mortal([3], is_silent=True)
    async with (
        worker(Mortal([5]).script, "a") as a,
        worker(silent.script, "b") as b,
        running(TokenPicker(a, b), retry=QUICK) as gateway,
    ):
        client = await gateway.client()
        await client.send(post(chat()))
        await client.reader.readuntil(b"resumed")
        client.reset()
        await gateway.settled()
        assert gateway.picker.ends == [(a.name, FAILED, None), (b.name, GONE, None)]


@wire
async def test_a_gateway_that_shuts_down_continues_nothing() -> None:
    second = Mortal()
    async with (
        worker(Mortal([5], is_silent=True).script, "a") as a,
        worker(second.script, "b") as b,
        running(TokenPicker(a, b), retry=QUICK) as gateway,
    ):
        client = await gateway.client()
        await client.send(post(chat()))
        await client.reader.readuntil(b'"content"')
        await gateway.front.close()
        rest = await client.reader.read()
        assert b'"no_worker"' in rest
        assert b"[DONE]" not in rest
        assert second.bodies == []


@wire
async def test_many_streams_at_once_each_go_on_as_themselves() -> None:
    """64 streams with prompts of their own; half of their workers' answers die."""
    first, second = Mortal([3, LAST, 7, LAST] * 16), Mortal()
    retry = replace(QUICK, retry_budget_floor_per_s=1_000.0)
    async with (
        worker(first.script, "a") as a,
        worker(second.script, "b") as b,
        running(TokenPicker(a, b), retry=retry) as gateway,
    ):
        bodies = [
            chat(messages=[{"role": "user", "content": f"stream number {number}"}], **IDS)
            for number in range(64)
        ]
        replies = await asyncio.gather(*(gateway.ask(post(body)) for body in bodies))
        for body, reply in zip(bodies, replies, strict=True):
            assert_whole(heard(reply.body), body)
        assert gateway.front.counters.resumed_streams == 32
        assert len(second.bodies) == 32
