"""One worker under test: what is sent, what is seen, and what a bad answer leaves open."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from picker_bench import Characters, Contents, derive

from trunkline.core.alignment import Belief, Examination, State, Topic
from trunkline.core.directory import Directory
from trunkline.core.epochs import EpochTable, Subject, SubjectKind
from trunkline.core.events import BlocksStored, EventBatch
from trunkline.core.feed import WorkerFeed
from trunkline.core.fleet import Fleet, WorkerState
from trunkline.core.records import Tier, WorkerId
from trunkline.errors import WorkerTimeout
from trunkline.gateway.errands import Errands
from trunkline.gateway.examiner import BUSY_MS, Examiner, ExaminerParts
from trunkline.gateway.namespaces import Namespaces
from trunkline.gateway.tokenise import PromptTokens
from trunkline.ports.worker import Endpoint, Target
from virtual_loop import LoopClock, VirtualLoop

BLOCK = 16
W0 = WorkerId("w0")


class Engine:
    """A prefix cache by salt, as vLLM has it, and its events; each of its ways can be spoilt."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._cached: dict[tuple[str, str], array[int]] = {}
        self._names = 0
        self.sent: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.has_tokenize = True
        self.has_events = True
        self.status = 200
        self.failure: Exception | None = None
        self.key_of: Callable[[str, str], tuple[str, str]] = lambda salt, model: (salt, model)
        """What its cache goes by."""
        self.details: Callable[[int], Any] = lambda cached: {"cached_tokens": cached}
        self.before_answer: Callable[[], None] = lambda: None

    async def post(
        self,
        endpoint: Endpoint,
        path: str,
        body: bytes,
        *,
        timeout_ms: float,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> tuple[int, bytes]:
        await asyncio.sleep(0.01)
        asked = json.loads(body)
        self.sent.append((path, asked, dict(headers)))
        self.before_answer()
        if self.failure is not None:
            raise self.failure
        if path == "/tokenize":
            text = asked.get("prompt") or "".join(m["content"] for m in asked["messages"])
            told = {"tokens": [ord(one) for one in text]}
            return (200, json.dumps(told).encode()) if self.has_tokenize else (404, b"")
        if self.status != 200:
            return self.status, b"{}"
        prompt = asked.get("prompt") or "".join(m["content"] for m in asked["messages"])
        tokens = array("I", map(ord, prompt) if isinstance(prompt, str) else prompt)
        usage = {"prompt_tokens": len(tokens)}
        usage |= {"prompt_tokens_details": self.details(self._reuse(tokens, asked))}
        return 200, json.dumps({"usage": usage}).encode()

    def _reuse(self, tokens: array[int], asked: dict[str, Any]) -> int:
        key = self.key_of(asked["cache_salt"], asked["model"])
        known = self._cached.get(key, array("I"))
        full = len(tokens) // BLOCK * BLOCK
        if known[:full] == tokens[:full]:
            return (len(tokens) - 1) // BLOCK * BLOCK
        self._cached[key] = tokens
        if self.has_events and full and asked["model"] == "m":
            self._announce(tokens[:full], asked["cache_salt"])
        return 0

    def _announce(self, tokens: array[int], salt: str) -> None:
        count = len(tokens) // BLOCK
        names = array("Q", range(self._names, self._names + count))
        run = BlocksStored(
            hashes=names, parent=None, tokens=tokens, block_tokens=BLOCK, tier=Tier.DEVICE,
            salt=salt,
        )  # fmt: skip
        seq = self._bench.batches
        self._bench.batches += 1
        self._names += count
        batch = EventBatch(seq=seq, events=(run,), fingerprint=seq)
        self._bench.feed.live(batch, self._bench.clock.now())


class Agent:
    takes_tickets = True
    has_salt_regions = False
    pull = None


class Bench:
    def __init__(self) -> None:
        self.clock = LoopClock(asyncio.get_running_loop())
        self.directory = Directory(max_blocks=10_000)
        self.fleet = Fleet(virtual_nodes=8, now=self.clock.now())
        slot = self.directory.join(W0, block_tokens=BLOCK)
        self.state = WorkerState(worker=W0, slot=slot, block_tokens=BLOCK)
        self.fleet.add(self.state)
        self.feed = WorkerFeed(W0, self.directory, can_replay=False)
        self.batches = 0
        self.engine = Engine(self)
        self.table = EpochTable()
        self.namespaces = Namespaces(derive, self.directory, draw=self.draw)
        self.target = Target(
            worker=W0, endpoint=Endpoint(host="w0", port=1, host_header="w0:1"),
            headers=(("x-data-parallel-rank", "0"),),
        )  # fmt: skip
        self.drawn = 0
        self.prompts = PromptTokens(Characters(), Contents())
        self.examiner = Examiner(
            ExaminerParts(
                errands=Errands(
                    namespaces=self.namespaces, served_model=lambda: "m", post=self.engine.post
                ),
                namespaces=self.namespaces,
                directory=self.directory,
                fleet=self.fleet,
                prompts=self.prompts,
                table=lambda: self.table,
                served_model=lambda: "m",
                target_of=lambda worker: self.target,
                clock=self.clock,
                draw=self.draw,
            )
        )

    def draw(self, count: int) -> bytes:
        self.drawn += 1
        return self.drawn.to_bytes(4, "big") * (count // 4 + 1)

    async def look(self, *adapters: str, has_feed: bool = True) -> Examination:
        feed = self.feed if has_feed else None
        return await self.examiner([(W0, feed)], adapters)


def bench_test(test: Callable[[Bench], Awaitable[None]]) -> Callable[[], None]:
    def run() -> None:
        async def scenario() -> None:
            await test(Bench())

        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(scenario())

    run.__name__ = test.__name__  # pyright: ignore[reportAttributeAccessIssue]
    return run


def states(found: Examination) -> dict[str, str]:
    return {finding.topic.value: finding.state.value for finding in found.findings}


@bench_test
async def test_a_good_engine_passes_and_every_request_to_it_is_one_token_of_a_nobody(
    bench: Bench,
) -> None:
    found = await bench.look()
    assert set(states(found).values()) == {"ok"}, found
    assert not found.unfinished
    answers = [asked for path, asked, _ in bench.engine.sent if path != "/tokenize"]
    assert {asked["max_tokens"] for asked in answers} == {1}
    canaries = [asked for asked in answers if len(asked["prompt"]) > BLOCK + 1]
    assert len(canaries) == 3
    assert len({tuple(asked["prompt"]) for asked in canaries}) == 1
    assert len({asked["cache_salt"] for asked in canaries}) == 2
    headers = [h for path, _, h in bench.engine.sent if path != "/tokenize"]
    assert all(h == {"x-data-parallel-rank": "0"} for h in headers)


@bench_test
async def test_the_next_test_is_of_another_prompt_under_other_salts(bench: Bench) -> None:
    await bench.look()
    first = {(str(a.get("prompt")), a.get("cache_salt")) for _, a, _ in bench.engine.sent}
    count = len(bench.engine.sent)
    await bench.look()
    second = [a for p, a, _ in bench.engine.sent[count:] if p != "/tokenize"]
    again = [a for a in second if (str(a["prompt"]), a["cache_salt"]) in first]
    assert len(again) <= 1, "only the block that all workers are asked to name"


@bench_test
async def test_the_namespaces_of_a_test_are_given_back_but_for_that_of_names(bench: Bench) -> None:
    await bench.look()
    assert bench.directory.namespace_count() == 1
    await bench.look()
    assert bench.directory.namespace_count() == 1
    assert bench.feed.stats.resyncs == 0


@bench_test
async def test_a_connector_that_names_blocks_by_tokens_alone_is_found(bench: Bench) -> None:
    bench.engine.key_of = lambda salt, model: ("", model)
    found = await bench.look()
    assert found.leaks
    assert found.belief is Belief.BLIND


@bench_test
async def test_c52_an_engine_that_mixes_up_adapters_is_found(bench: Bench) -> None:
    good = await bench.look("fr")
    assert states(good)["adapter"] == "ok"
    bench.engine.key_of = lambda salt, model: (salt, "")
    assert states(await bench.look("fr"))["adapter"] == "wrong"


@pytest.mark.parametrize("details", [lambda cached: None, lambda cached: {}])
def test_usage_without_details_leaves_isolation_open(details: Callable[[int], Any]) -> None:
    @bench_test
    async def scenario(bench: Bench) -> None:
        bench.engine.details = details
        found = await bench.look()
        assert (states(found)["reuse"], states(found)["isolation"]) == ("wrong", "open")
        assert states(found)["block keys"] == "ok", "its events are as good as before"

    scenario()


@bench_test
async def test_c57_without_events_all_else_is_tested(bench: Bench) -> None:
    bench.engine.has_events = False
    found = await bench.look()
    assert (states(found)["events"], states(found)["isolation"]) == ("wrong", "ok")
    assert "no events since start" in found.reason
    mute = await bench.look(has_feed=False)
    assert "announces none" in mute.reason


@bench_test
async def test_where_no_tokenizer_is_known_ids_that_any_has_are_sent(
    bench: Bench,
) -> None:
    bench.prompts.read_text()
    found = await bench.look(has_feed=False)
    assert (states(found)["text"], states(found)["chat"]) == ("wrong", "wrong")
    assert (states(found)["isolation"], states(found)["events"]) == ("ok", "open")
    assert any("--model-path" in finding.remedy for finding in found.findings)
    sent = [asked["prompt"] for path, asked, _ in bench.engine.sent if path != "/tokenize"]
    assert sent
    assert all(100 <= one < 4_096 for prompt in sent for one in prompt if len(prompt) > BLOCK + 1)


@bench_test
async def test_an_engine_without_tokenize_is_asked_through_usage(bench: Bench) -> None:
    bench.engine.has_tokenize = False
    found = await bench.look()
    assert (states(found)["text"], states(found)["chat"]) == ("ok", "ok")
    asked = [a for p, a, _ in bench.engine.sent if p == "/v1/chat/completions"]
    assert len(asked) == 1
    assert asked[0]["cache_salt"], "a message of ours is no more to be met again than others'"


@bench_test
async def test_a_worker_that_is_too_slow_is_neither_trusted_nor_condemned(bench: Bench) -> None:
    bench.engine.failure = WorkerTimeout("w0 did not answer within 10000 ms")
    found = await bench.look()
    assert (found.findings, found.unfinished) == ((), "w0 did not answer within 10000 ms")
    assert bench.directory.namespace_count() == 0


@bench_test
async def test_a_busy_worker_is_left_alone(bench: Bench) -> None:
    bench.state.queue.start(1, 1e6, bench.clock.now())
    found = await bench.look()
    assert found.unfinished.startswith("busy: ")
    assert not bench.engine.sent
    bench.state.queue.end(1, bench.clock.now())
    assert BUSY_MS > 0
    assert not (await bench.look()).unfinished


@pytest.mark.parametrize("status", [400, 404, 500, 503])
def test_a_worker_that_takes_no_token_ids_is_unfinished(status: int) -> None:
    @bench_test
    async def scenario(bench: Bench) -> None:
        bench.engine.status = status
        found = await bench.look()
        assert f"answered {status}" in found.unfinished

    scenario()


@bench_test
async def test_epochs_that_are_raised_meanwhile_leave_it_unfinished(bench: Bench) -> None:
    def raise_epoch() -> None:
        if bench.table.rev == 0:
            subject = Subject(kind=SubjectKind.FLEET)
            bench.table = bench.table.raised(subject, epoch=1, rev=1, bars=False)

    bench.engine.before_answer = raise_epoch
    bench.engine.has_tokenize = True
    await bench.look()
    bench.table = EpochTable()
    sent = len(bench.engine.sent)
    bench.engine.before_answer = lambda: (
        raise_epoch() if len(bench.engine.sent) > sent + 3 else None
    )
    found = await bench.look()
    assert found.unfinished == "epochs were raised meanwhile"


@bench_test
async def test_a_worker_that_left_meanwhile_is_unfinished(bench: Bench) -> None:
    bench.engine.before_answer = lambda: bench.fleet.remove(W0)
    assert (await bench.look()).unfinished == "it lives anew since"
    assert (await bench.look()).unfinished == "it left"


@bench_test
async def test_beside_an_agent_no_reuse_may_be_a_missing_lease(bench: Bench) -> None:
    bench.target = replace(bench.target, agent=Agent())
    bench.engine.key_of = lambda salt, model: (str(len(bench.engine.sent)), model)
    found = await bench.look()
    assert "lease" in found.unfinished
    headers = [h for path, _, h in bench.engine.sent if path == "/v1/completions"]
    assert all("x-trunkline-ticket" in h for h in headers)


@bench_test
async def test_a_context_shorter_than_a_block_is_said_so(bench: Bench) -> None:
    bench.target = replace(bench.target, max_model_len=BLOCK)
    assert (await bench.look()).unfinished == "its context is shorter than a block"


@bench_test
async def test_a_barred_worker_is_tested_as_well_as_any(bench: Bench) -> None:
    bench.directory.bar(W0, True)
    found = await bench.look()
    assert State.WRONG not in {finding.state for finding in found.findings}
    assert Topic.KEYS in {finding.topic for finding in found.findings}
