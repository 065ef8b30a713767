"""What lies across the seam of a stream that goes on: stop texts, and what it runs under."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from mortal import (
    IDS,
    QUICK,
    USAGE,
    Mortal,
    TokenPicker,
    chat,
    expected,
    heard,
    text_of_ids,
    through,
)
from scripted import post, running, until, wire, worker

from trunkline.config import RetryConfig

# -- text over the seam ----------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, IDS], ids=["text", "ids"])
@pytest.mark.parametrize("is_included", [False, True])
def test_a_stop_text_that_lies_across_the_seam_ends_the_answer(
    is_included: bool, more: dict[str, Any]
) -> None:
    @wire
    async def scenario() -> None:
        body = chat(**more, **USAGE)
        ids = expected(body)
        text = text_of_ids(ids)
        seam = len(text_of_ids(ids[:5]))
        body["stop"] = ["never said", text[seam - 3 : seam + 3]]
        body["include_stop_str_in_output"] = is_included
        second = Mortal(name="b")
        got, gateway = await through(Mortal([6], name="a"), second, body=body)
        # The first engine does not hold back what may become a stop text: what is out, is out.
        assert got.text == text[: seam + 3 if is_included else seam]
        assert (got.reasons, got.is_done, got.error) == (["stop"], True, None)
        [counts] = got.usages
        assert counts["completion_tokens"] in (6, 7)
        assert gateway.front.pool.idle_count() <= 1
        await until(lambda: gateway.front.counters.open_upstreams <= 1)

    scenario()


@wire
async def test_a_stop_text_behind_the_seam_is_left_to_the_engine() -> None:
    body = chat(**USAGE)
    ids = expected(body)
    body["stop"] = text_of_ids(ids[8:9])
    got, _ = await through(Mortal([4]), Mortal(), body=body)
    assert got.reasons == ["stop"]
    assert got.text == text_of_ids(ids[:8])
    assert got.is_done


# -- what is asked under ---------------------------------------------------------------------------


@wire
async def test_a_stream_whose_epochs_were_raised_meanwhile_is_ended_and_not_continued() -> None:
    second = Mortal()
    async with (
        worker(Mortal([5]).script, "a") as a,
        worker(second.script, "b") as b,
        running(TokenPicker(a, b), retry=QUICK) as gateway,
    ):
        is_current = [True]
        gateway.front.line = replace(gateway.front.line, is_current=lambda _: is_current[0])
        client = await gateway.client()
        await client.send(post(chat()))
        await client.reader.readuntil(b'"content"')
        is_current[0] = False
        reply = await client.reader.readuntil(b"0\r\n\r\n")
        assert b'"worker_lost"' in reply
        assert b"[DONE]" not in reply
        assert second.bodies == []


@wire
async def test_epochs_that_are_raised_while_a_second_worker_is_looked_for_end_the_stream() -> None:
    slow = RetryConfig(retry_initial_backoff_ms=300, retry_max_backoff_ms=300)
    second = Mortal()
    async with (
        worker(Mortal([5]).script, "a") as a,
        worker(second.script, "b") as b,
        running(TokenPicker(a, b), retry=slow) as gateway,
    ):
        is_current = [True]
        gateway.front.line = replace(gateway.front.line, is_current=lambda _: is_current[0])
        client = await gateway.client()
        await client.send(post(chat()))
        await until(lambda: gateway.front.counters.retries == 1)
        is_current[0] = False
        reply = await client.reply()
        got = heard(reply.body)
        assert got.error is not None
        assert second.bodies == []
        await gateway.settled()
