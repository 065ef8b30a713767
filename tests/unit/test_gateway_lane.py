"""The threads beside the loop: what is in line, what runs, and what a leaver still costs."""

from __future__ import annotations

import asyncio
import threading
from array import array
from functools import partial

import pytest
from picker_bench import Contents, request

from trunkline.gateway.contracts import ChatPrompt
from trunkline.gateway.lane import Lane
from trunkline.gateway.tokenise import INLINE_BYTES, INLINE_MESSAGES, PromptTokens


class Gate:
    """Work that goes on only when told to; remembers what was begun."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.open = threading.Event()

    def work(self, number: int) -> int:
        self.begun.append(number)
        assert self.open.wait(60), "the test never opened the gate"
        return number


async def begun(gate: Gate, count: int) -> None:
    """Until threads work on so many: starting one takes as long as it takes."""
    while len(gate.begun) < count:  # noqa: ASYNC110 - a thread tells of it
        await asyncio.sleep(0.001)


async def ticks() -> None:
    for _ in range(20):
        await asyncio.sleep(0.001)


def test_the_lane_works_on_as_many_as_it_has_threads_and_in_order() -> None:
    async def scenario() -> None:
        lane, gate = Lane(2, "test"), Gate()
        tasks = [asyncio.create_task(lane.run(partial(gate.work, n))) for n in range(5)]
        await begun(gate, 2)
        await ticks()
        assert sorted(gate.begun) == [0, 1]
        gate.open.set()
        assert await asyncio.gather(*tasks) == [0, 1, 2, 3, 4]
        lane.close()

    asyncio.run(scenario())


def test_who_leaves_the_line_is_never_worked_for_and_what_runs_is_waited_for() -> None:
    async def scenario() -> None:
        lane, gate = Lane(1, "test"), Gate()
        tasks = [asyncio.create_task(lane.run(partial(gate.work, n))) for n in range(100)]
        await begun(gate, 1)
        for task in tasks[:99]:
            task.cancel()
        await ticks()
        assert [task.done() for task in tasks] == [False, *[True] * 98, False]
        gate.open.set()
        assert await tasks[99] == 99
        assert gate.begun == [0, 99]
        assert tasks[0].cancelled()
        lane.close()

    asyncio.run(scenario())


def test_an_error_on_a_thread_reaches_whoever_asked_and_frees_the_turn() -> None:
    async def scenario() -> None:
        lane = Lane(1, "test")
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                await lane.run(lambda: 1 // 0)
        assert await lane.run(lambda: 7) == 7
        lane.close()

    asyncio.run(scenario())


class Recording:
    """A tokenizer that notes the thread it works on and whether special tokens are added."""

    digest = "recording"
    vocab_size = 100

    def __init__(self) -> None:
        self.calls: list[tuple[bool, bool]] = []

    def encode(self, text: str, *, add_special_tokens: bool) -> array[int]:
        is_on_loop = threading.current_thread() is threading.main_thread()
        self.calls.append((is_on_loop, add_special_tokens))
        return array("I", [1])

    def decode(self, token_ids: array[int]) -> str:
        return ""


def tokenised(prompt: ChatPrompt | str, body_bytes: int, adds: bool | None = None) -> list[bool]:
    """Whether it was done on the loop, and whether special tokens were added."""
    recording = Recording()

    async def scenario() -> None:
        tokens = PromptTokens(recording, Contents())
        asked = request(prompt, body=b"x" * body_bytes)
        asked.adds_special_tokens = adds
        if tokens.tokens(asked) is None:
            await tokens.tokens_later(asked)
        tokens.close()

    asyncio.run(scenario())
    [(is_on_loop, has_special)] = recording.calls
    return [is_on_loop, has_special]


def chat(count: int) -> ChatPrompt:
    return ChatPrompt(messages=[{"role": "user", "content": "hi"}] * count)


@pytest.mark.parametrize(
    ("prompt", "body_bytes", "is_on_loop"),
    [
        ("x", INLINE_BYTES, True), ("x", INLINE_BYTES + 1, False),
        (chat(INLINE_MESSAGES), 10, True), (chat(INLINE_MESSAGES + 1), 10, False),
        (chat(1), INLINE_BYTES, True), (chat(1), INLINE_BYTES + 1, False),
    ],
)  # fmt: skip
def test_c105_the_size_of_the_body_and_the_messages_decide_who_leaves_the_loop(
    prompt: ChatPrompt | str, body_bytes: int, is_on_loop: bool
) -> None:
    assert tokenised(prompt, body_bytes)[0] is is_on_loop


@pytest.mark.parametrize("body_bytes", [10, INLINE_BYTES + 1])
@pytest.mark.parametrize(
    ("prompt", "adds", "has_special"),
    [
        ("x", None, True), ("x", False, False), ("x", True, True),
        (chat(1), None, False), (chat(1), False, False), (chat(1), True, True),
    ],
)  # fmt: skip
def test_special_tokens_are_added_as_the_worker_adds_them(
    prompt: ChatPrompt | str, adds: bool | None, has_special: bool, body_bytes: int
) -> None:
    assert tokenised(prompt, body_bytes, adds)[1] is has_special
