"""A fleet that is asked for more than it serves: what clients see, with real processes (F10)."""

from __future__ import annotations

import asyncio

from fleet import at_once, processes, text_of

SLOW = ("--profile", "fifo:60,0.05,1")


def test_f10_what_would_wait_too_long_is_refused_with_a_time_to_come_again() -> None:
    bodies = [{"prompt": f"{n} {text_of(20, n)}", "max_tokens": 1} for n in range(400)]
    flags = ("--queue-target-ms", "100", "--queue-interval-ms", "400")
    with processes() as started:
        workers = started.workers(2, *SLOW)
        gateway = started.gateway([w.url for w in workers], *SLOW, *flags)

        answers = asyncio.run(at_once(gateway, bodies, "/v1/completions"))

        served = [one for one in answers if one.status == 200]
        refused = [one for one in answers if one.status == 429]
        assert len(served) + len(refused) == len(answers), "nothing is lost"
        assert served
        assert refused
        assert {one.error["code"] for one in refused} == {"overloaded"}
        assert all(int(one.response.headers["retry-after"]) >= 1 for one in refused)
        assert gateway.metric("line_shed_total", priority="normal") == len(refused)
        gateway.wait_quiet()
        assert gateway.metric("queue_depth") == 0
        assert gateway.complete("afterwards").status == 200


def test_without_a_target_everybody_waits_and_is_served() -> None:
    bodies = [{"prompt": f"{n} {text_of(20, n)}", "max_tokens": 1} for n in range(60)]
    with processes() as started:
        worker = started.worker(*SLOW)
        gateway = started.gateway([worker.url], *SLOW, "--queue-target-ms", "0")

        answers = asyncio.run(at_once(gateway, bodies, "/v1/completions"))

        assert {one.status for one in answers} == {200}
        assert gateway.metric("line_ended_total", end="sent") > 0


def test_where_all_are_one_tenant_all_may_be_sent_to_workers_at_once() -> None:
    bodies = [{"prompt": f"{n} {text_of(20, n)}", "max_tokens": 1} for n in range(60)]
    with processes() as started:
        worker = started.worker(*SLOW)
        gateway = started.gateway([worker.url], *SLOW, "--no-queue-one-tenant")

        answers = asyncio.run(at_once(gateway, bodies, "/v1/completions"))

        assert {one.status for one in answers} == {200}
        assert gateway.metric("line_ended_total") == 0
