"""Resets that the gateway asks for: what an engine may answer, and what is forgotten then."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from member_bench import W0, Bench, bench_test, refused, some_chain

from trunkline.control.flush import Flushed
from trunkline.errors import WorkerTimeout

DONE = b'{"success":true}'


async def predicted_after(bench: Bench, **pages: bytes) -> tuple[Flushed | None, int]:
    answers = await bench.joined()
    answers.pages |= {f"/{name}": body for name, body in pages.items()}
    bench.directory.predict(W0, some_chain(), now=bench.clock.now(), ttl_ms=60_000.0)
    outcome = await bench.membership.reset("w0:1")
    return outcome, bench.directory.predicted_count(W0)


@pytest.mark.parametrize(
    ("pages", "outcome", "left"),
    [
        ({"reset_prefix_cache": DONE}, Flushed.DONE, 0),
        ({"flush_cache": b"Cache flushed."}, Flushed.DONE, 0),
        ({"reset_prefix_cache": b""}, Flushed.DONE, 0),
        ({"reset_prefix_cache": b'{"success":false}', "flush_cache": DONE}, Flushed.BUSY, 20),
        ({}, Flushed.UNKNOWN, 20),
    ],
)
def test_only_a_reset_that_was_done_is_forgotten(
    pages: dict[str, bytes], outcome: Flushed, left: int
) -> None:
    @bench_test
    async def scenario(bench: Bench) -> None:
        assert await predicted_after(bench, **pages) == (outcome, left)

    scenario()


@pytest.mark.parametrize("failure", [refused, lambda: WorkerTimeout("late")])
def test_a_worker_that_does_not_answer_keeps_what_it_held(failure: Callable[[], Exception]) -> None:
    @bench_test
    async def scenario(bench: Bench) -> None:
        answers = await bench.joined()
        bench.directory.predict(W0, some_chain(), now=bench.clock.now(), ttl_ms=60_000.0)
        answers.failure = failure
        assert await bench.membership.reset("w0:1") is Flushed.FAILED
        assert bench.directory.predicted_count(W0) == 20

    scenario()


@bench_test
async def test_nobody_has_nothing_to_reset(bench: Bench) -> None:
    assert await bench.membership.reset("w9:9") is None
