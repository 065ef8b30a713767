"""Where a real gateway sends requests to real (simulated) workers, and what it expects there."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fleet import (
    Gateway,
    Process,
    Processes,
    at_once,
    engine_script,
    own_tokenizer,
    processes,
    stream_usage,
    text_of,
    until,
    url_of,
    user,
)
from heartbeat_relay import Relay, relaying
from scripted import json_answer, wire, worker

from trunkline.replay.traces import TraceRequest
from trunkline.replay.workloads import Workload
from trunkline.sim.figures import figures
from trunkline.sim.model import FleetModel, ModelOptions

TINY = ("--profile", "tiny")
SLOW = ("--profile", "fifo:60,0.02,2")
BLOCK = 16


@pytest.fixture(scope="module")
def started() -> Iterator[Processes]:
    with processes() as these:
        yield these


@pytest.fixture(scope="module")
def solo(started: Processes) -> Gateway:
    """One worker, so that only what is expected there is in question."""
    return started.gateway([started.worker(*TINY, "--blocks", "8192").url], *TINY)


@pytest.fixture(scope="module")
def slow_pair(started: Processes) -> tuple[Gateway, list[Process]]:
    workers = started.workers(2, *SLOW)
    return started.gateway([w.url for w in workers], *SLOW), workers


@pytest.fixture(scope="module")
def trio(started: Processes) -> Gateway:
    return started.gateway([w.url for w in started.workers(3, *TINY)], *TINY)


class Watch:
    """Looks at the requests in flight of each worker until it is left."""

    def __init__(self, gateway: Gateway) -> None:
        self.most: Counter[str] = Counter()
        self._gateway = gateway
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._is_over.is_set():
            for name, row in self._gateway.workers().items():
                self.most[name] = max(self.most[name], row["requests_active"])
            self._is_over.wait(0.02)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()


# -- load ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_stream", [True, False])
def test_c01_a_shared_prefix_under_load_moves_both_counters_and_spreads(
    slow_pair: tuple[Gateway, list[Process]], is_stream: bool
) -> None:
    gateway, _ = slow_pair
    shared = text_of(500, f"c01 {is_stream}")
    bodies = [user(f"{shared} {number}", stream=is_stream) for number in range(64)]
    with Watch(gateway) as watch:
        answers = asyncio.run(at_once(gateway, bodies))
    assert {answer.status for answer in answers} == {200}
    share = Counter(answer.worker for answer in answers)
    assert len(share) == 2
    assert min(share.values()) >= 16, "the imbalance sends part to the second"
    assert all(watch.most[name] >= 8 for name in share), "both counters moved"
    gateway.wait_quiet()
    hits = sum(answer.predicted > 0 for answer in answers)
    assert hits >= 48, "siblings of a burst find each other"


def test_c02_an_unknown_path_is_counted_and_spread(started: Processes) -> None:
    @wire
    async def scenario() -> None:
        release = asyncio.Event()
        here: Counter[int] = Counter()
        most: Counter[int] = Counter()

        def engine(index: int) -> Any:
            async def answer(path: str, headers: dict[str, str], body: bytes) -> bytes:
                here[index] += 1
                most[index] = max(most[index], here[index])
                if here.total() == 200:
                    release.set()
                await release.wait()
                here[index] -= 1
                return json_answer(body)

            return engine_script(answer)

        async with worker(engine(0)) as w0, worker(engine(1)) as w1:
            gateway = await asyncio.to_thread(started.gateway, [url_of(w0), url_of(w1)])
            shared = text_of(300, "c02")
            bodies = [{"input": f"{shared} {number}", "model": "m"} for number in range(200)]
            answers = await at_once(gateway, bodies, "/v1/inference/anything")
            echoed = [answer.json for answer in answers]
            assert len({body.pop("cache_salt") for body in echoed}) == 1, "ours, on any path"
            assert echoed == bodies
            assert most.total() == 200
            assert max(most.values()) <= 120, f"in flight at once: {dict(most)}"
            await asyncio.to_thread(gateway.wait_quiet)
            selected = gateway.metric("worker_selection_total")
            assert selected == 200

    scenario()


def test_c10_adding_a_worker_again_under_load_keeps_its_counter_and_its_index(
    slow_pair: tuple[Gateway, list[Process]],
) -> None:
    gateway, workers = slow_pair
    gateway.chat(text_of(300, "c10"))
    before = {w.name: gateway.rank(w) for w in workers}
    bodies = [user(text_of(100, f"c10 {number}"), max_tokens=30) for number in range(30)]
    states: set[tuple[int, str]] = set()
    active: Counter[str] = Counter()
    load = threading.Thread(target=lambda: asyncio.run(at_once(gateway, bodies)))
    load.start()
    while load.is_alive():
        for w in workers:
            reply = gateway.admin("/workers", "POST", json={"url": w.url})
            states.add((reply.status_code, reply.json()["state"]))
            active[w.name] = max(active[w.name], gateway.worker(w)["requests_active"])
        load.join(0.05)
    assert states == {(202, "ready")}
    assert all(active[w.name] > 0 for w in workers), "the counters went on"
    for w in workers:
        after = gateway.rank(w)
        assert after["incarnation"] == before[w.name]["incarnation"]
        assert after["held_blocks"] >= before[w.name]["held_blocks"]
    gateway.wait_quiet()


@pytest.mark.parametrize("page", ["/load", "/get_loads", ""])
def test_c11_load_is_read_wherever_the_engine_tells_it(started: Processes, page: str) -> None:
    @wire
    async def scenario() -> None:
        asked: Counter[str] = Counter()
        pages = {"/load": b'{"server_load":3}', "/get_loads": b'[{"num_running_reqs":2}]'}

        async def answer(path: str, headers: dict[str, str], body: bytes) -> bytes:
            asked[path] += 1
            return json_answer()

        known = {page: pages[page]} if page else {}
        async with worker(engine_script(answer, known)) as w:
            gateway = await asyncio.to_thread(started.gateway, [url_of(w)])
            connections = w.connection_count
            await asyncio.to_thread(
                until, lambda: w.connection_count > connections + 9, "a few rounds of probes"
            )
            [row] = gateway.workers().values()
            assert row["detail"]["degraded"] == ([] if page else ["load"])
            assert row["mode"] == "approximate"
            warnings = gateway.process.log().count("worker.load_unknown")
            assert warnings == (0 if page else 1)

    scenario()


def hot_prefix_run(policy: str, per_second: float) -> dict[str, Any]:
    """30 s of requests that share 8 of 9 blocks; a hit costs 41 ms, a miss 297 ms."""
    workload = Workload(
        name="hot",
        sentence="one hot prefix",
        trace_file=None,
        workers=4,
        capacity_blocks=5_000,
        block_tokens=512,
        prefill_token_ms=1_000.0 / 16_000.0,
    )
    dice, at_ms = random.Random(4), 0.0
    requests: list[TraceRequest] = []
    for number in range(int(30 * per_second)):
        at_ms += dice.expovariate(per_second) * 1_000.0
        requests.append(
            TraceRequest(
                arrival_ms=at_ms,
                input_tokens=9 * 512 + 64,
                output_tokens=20,
                block_ids=(*range(8), 1_000 + number),
                block_tokens=512,
            )
        )
    model = FleetModel(workload, ModelOptions(policy=policy), stopwatch_us=lambda: 0.0)
    return figures("hot", policy, model.run(requests))


def test_c14_a_hot_prefix_at_three_times_one_workers_capacity_is_spread() -> None:
    per_second = 3 * 1_000.0 / (5.0 + 576 * 1_000.0 / 16_000.0)  # three workers full of hits
    ours = hot_prefix_run("cache_aware", per_second)
    balanced = hot_prefix_run("least_queue", per_second)
    assert ours["lost"] == 0
    assert ours["busiest_over_mean_work"] < 1.25
    assert ours["hot_prefix_holders"] == 4
    assert ours["ttft_ms"]["p99"] <= 2 * balanced["ttft_ms"]["p99"]
    assert ours["hit_tokens_ratio"] >= balanced["hit_tokens_ratio"]


# -- hits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [60, 250])
def test_c17_conversations_at_low_load_get_nine_tenths_of_what_could_be_had(
    trio: Gateway, words: int
) -> None:
    got = possible = 0
    chats: list[list[dict[str, str]]] = [[] for _ in range(8)]
    resident = [0] * len(chats)
    for turn in range(5):
        for number, chat in enumerate(chats):
            chat.append({"role": "user", "content": text_of(words, (words, number, turn))})
            answer = trio.post("/v1/chat/completions", {"messages": chat, "max_tokens": 24})
            got += answer.cached
            possible += resident[number] // BLOCK * BLOCK
            resident[number] = answer.prompt_tokens
            content = answer.json["choices"][0]["message"]["content"]
            chat.append({"role": "assistant", "content": content})
    assert got >= 0.9 * possible, f"{got} of {possible} tokens"


def test_what_is_predicted_is_what_the_worker_reuses(trio: Gateway) -> None:
    """A hundred requests of all kinds: neither an over-claim nor a hit that nobody expected."""
    dice, tokenizer = random.Random(11), own_tokenizer()
    shared = [text_of(dice.randrange(30, 200), ("exact", number)) for number in range(6)]
    tools = [{"type": "function", "function": {"name": "look", "description": shared[0]}}]
    over_claims = trio.metric("over_claims_total")
    hits = 0
    for number in range(100):
        text = f"{dice.choice(shared)} {text_of(dice.randrange(0, 40), dice.randrange(12))}"
        kind = number % 5
        if kind == 0:
            answer = trio.chat(text, max_tokens=1)
        elif kind == 1:
            answer = trio.chat(text, max_tokens=1, tools=tools)
        elif kind == 2:
            answer = trio.complete(text, max_tokens=1)
        elif kind == 3:
            ids = tokenizer.encode(text, add_special_tokens=False).tolist()
            answer = trio.complete(ids, max_tokens=1)
        else:
            more = {"stream": True, "stream_options": {"include_usage": True}}
            answer = trio.chat(text, max_tokens=1, **more)
        assert answer.status == 200
        usage = stream_usage(answer.response) if kind == 4 else answer.json["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert answer.predicted == cached, f"request {number} of kind {kind}: {answer.decision}"
        assert answer.decision["matched"].endswith(f"/{usage['prompt_tokens']}")
        hits += cached > 0
    assert hits > 60
    assert trio.metric("over_claims_total") == over_claims


def test_c31_each_data_parallel_rank_is_a_place_of_its_own(started: Processes) -> None:
    both = started.worker(*TINY, "--data-parallel-size", "2")
    gateway = started.gateway([both.url], *TINY)
    prompts = [text_of(150, ("c31", number)) for number in range(12)]
    homes = [gateway.chat(prompt).worker for prompt in prompts]
    assert set(homes) == {f"{both.name}@0", f"{both.name}@1"}
    until(lambda: sum(gateway.rank(both, i)["held_blocks"] for i in (0, 1)) > 200, "events came")
    for prompt, home in zip(prompts, homes, strict=True):
        again = gateway.chat(prompt)
        if again.worker == home:
            assert again.predicted == again.cached > 0, "the request went to the rank that holds it"
        else:
            assert again.predicted == again.cached == 0
    stayed = gateway.admin("/decisions", params={"worker": both.name, "limit": "100"}).json()
    assert len(stayed["decisions"]) == 24
    one = gateway.admin("/decisions", params={"worker": homes[0], "limit": "100"}).json()
    assert {row["worker"] for row in one["decisions"]} == {homes[0]}
    reasons = Counter(row["reason"] for row in stayed["decisions"])
    assert reasons["cache-hit"] >= 10


# -- keys ------------------------------------------------------------------------------------------


def test_c43_token_arrays_are_told_apart_by_their_ids(solo: Gateway) -> None:
    one, two = [11] * 64, [12] * 64
    assert solo.complete(one).cached == 0
    other = solo.complete(two)
    assert (other.predicted, other.cached) == (0, 0)
    again = solo.complete(one)
    assert again.predicted == again.cached == 48
    for first, second in (([123] * 40, [1234] * 40), ("1234 " * 40, "12345 " * 40)):
        assert solo.complete(first).status == 200
        apart = solo.complete(second)
        assert (apart.predicted, apart.cached) == (0, 0)


IDS = list(range(20, 60))
SHAPES = [
    ("a text", 200), (IDS, 200), ([IDS], 200), (["a text"], 200), (["a", "b"], 200),
    ([IDS, IDS], 200), ([IDS, "a"], 400), (["a", IDS], 400), ([[IDS]], 400), ([[1, "a"]], 400),
    ([], 400), ([[]], 400), ("", 400), ([""], 400), (None, 400), (7, 400), ({"a": 1}, 400),
    ([1.5], 400), ([-1], 400), ([True], 400), ([1 << 40], 400), ([1 << 31], 400),
]  # fmt: skip


@pytest.mark.parametrize(("prompt", "status"), SHAPES, ids=lambda value: str(value)[:20])
def test_c44_a_prompt_of_any_shape_is_served_or_refused_as_the_api_says(
    solo: Gateway, prompt: Any, status: int
) -> None:
    """Batches are routed by their first prompt: what its others reuse is not predicted."""
    answer = solo.complete(prompt)
    is_batch = prompt in (["a", "b"], [IDS, IDS])
    assert answer.status == status
    if status == 200:
        assert answer.predicted <= answer.cached if is_batch else answer.predicted == answer.cached
    else:
        assert answer.error["message"]


def test_c45_a_chat_and_its_own_token_ids_are_the_same_prefix(solo: Gateway) -> None:
    messages = [{"role": "user", "content": text_of(120, "c45")}]
    [row] = solo.workers().values()
    ids = httpx.post(f"{row['url']}/tokenize", json={"messages": messages}).json()["tokens"]
    chat = solo.post("/v1/chat/completions", {"messages": messages})
    assert (chat.predicted, chat.prompt_tokens) == (0, len(ids))
    completion = solo.complete(ids)
    assert completion.predicted == completion.cached == (len(ids) - 1) // BLOCK * BLOCK
    assert solo.metric("decisions_total", reason="load-only") == 0, "nothing was skipped"


def test_c48_another_tool_is_another_prefix_from_there_on(solo: Gateway) -> None:
    def tools(description: str) -> list[dict[str, Any]]:
        function = {"name": "search", "description": description, "parameters": {}}
        return [{"type": "function", "function": function}]

    content = text_of(100, "c48")
    solo.chat(content, tools=tools("finds a page"))
    same = solo.chat(content, tools=tools("finds a page"))
    assert same.predicted == same.cached == (same.prompt_tokens - 1) // BLOCK * BLOCK
    changed = solo.chat(content, tools=tools("buys a thing"))
    assert changed.predicted == changed.cached < 64
    without = solo.chat(content)
    assert without.predicted == without.cached < 64


ODD_TEXTS = [
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467\U0001f3fd" * 30,
    "\u6f22\u5b57\u304b\u306a\u4ea4\u3058\u308a\u6587 " * 40,
    "e\u0301a\u0308o\u0302\u0303 n\u0303" * 40,
    "\u202e\u05d0\u05d1\u05d2 \u0627\u0628\u062a\u062b " * 40,
]


def shared_tokens(one: array[int], other: array[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@pytest.mark.parametrize("text", ODD_TEXTS, ids=["emoji", "cjk", "combining", "right-to-left"])
def test_c107_prompts_cut_inside_a_character_match_as_far_as_their_tokens(
    solo: Gateway, text: str
) -> None:
    tokenizer = own_tokenizer()
    assert solo.complete(text).status == 200
    whole = tokenizer.encode(text, add_special_tokens=True)
    for cut in range(len(text) // 2, len(text) // 2 + 9):
        prompt = f"{text[:cut]} {cut} other"
        tokens = tokenizer.encode(prompt, add_special_tokens=True)
        answer = solo.complete(prompt)
        assert answer.predicted == answer.cached
        assert answer.predicted >= shared_tokens(whole, tokens) // BLOCK * BLOCK
        assert answer.prompt_tokens == len(tokens)


@pytest.mark.parametrize("escape", ["\\ud83d", "\\ude00", "\\ude00\\ud83d", "\\ud83dx\\ude00"])
def test_c107_a_lone_surrogate_in_an_escape_is_refused_and_hurts_nobody(
    solo: Gateway, escape: str
) -> None:
    body = f'{{"prompt":"{"a b " * 50}{escape}","max_tokens":1}}'.encode()
    headers = {"content-type": "application/json"}
    reply = solo.client.post("/v1/completions", content=body, headers=headers)
    assert reply.status_code == 400
    assert "Traceback" not in solo.process.log()
    good = body.replace(escape.encode(), b"\\ud83d\\ude00")
    assert solo.client.post("/v1/completions", content=good, headers=headers).status_code == 200


# -- modes -----------------------------------------------------------------------------------------


def test_a_worker_without_events_is_approximate_and_found_again_by_our_own_routing(
    started: Processes,
) -> None:
    workers = started.workers(2, *TINY, "--feed", "approximate")
    gateway = started.gateway([w.url for w in workers], *TINY)
    for row in gateway.workers().values():
        assert (row["mode"], row["reason"]) == ("approximate", "the worker announces no events")
    prompts = [text_of(300, ("approximate", number)) for number in range(6)]
    for prompt in prompts:
        gateway.chat(prompt)
    again = [gateway.chat(prompt) for prompt in prompts]
    assert all(answer.predicted == answer.cached for answer in again)
    assert sum(answer.cached > 0 for answer in again) >= 4


def test_digest_workers_are_believed_by_their_heartbeats(started: Processes) -> None:
    with relaying() as relay:
        beats = ("--heartbeat-url", relay.url, "--heartbeat-interval-ms", "100")
        reporter = started.worker(*TINY, "--feed", "digest", *beats)
        gateway = started.gateway([reporter.url], *TINY, "--predicted-ttl-ms", "3000")
        relay.target = f"{gateway.admin_url}/heartbeat"
        _believed_by_heartbeats(gateway, reporter, relay)


def _believed_by_heartbeats(gateway: Gateway, reporter: Process, relay: Relay) -> None:
    until(lambda: gateway.worker(reporter)["mode"] == "digest", "a heartbeat came")
    prompt = text_of(500, "digest")
    assert gateway.chat(prompt).predicted == 0
    second = gateway.chat(prompt)
    assert second.predicted == second.cached > 1_024
    assert httpx.post(f"{reporter.url}/reset_prefix_cache").json() == {"success": True}
    # The prediction is ours and has no event; a report that was made later has to deny it.
    time.sleep(3.1)  # in 3 s of them we believe ourselves
    taken_count = relay.taken_count
    until(lambda: relay.taken_count > taken_count + 1, "a report that was made after that")
    third = gateway.chat(prompt)
    assert (third.predicted, third.cached) == (0, 0)
    assert gateway.chat(prompt).predicted > 1_024


# -- the same address, another engine --------------------------------------------------------------


def test_c24_another_block_size_at_the_same_url_is_taken_over(started: Processes) -> None:
    first = started.worker(*TINY)
    gateway = started.gateway([first.url], *TINY)
    prompt = text_of(300, "c24")
    gateway.chat(prompt)
    assert gateway.chat(prompt).predicted % 64 != 0
    first.kill()
    started.worker(*TINY, "--port", str(first.port), "--block-size", "64")
    until(lambda: gateway.worker(first)["detail"]["block_tokens"] == 64, "the new size is known")
    gateway.wait_ready(1)
    cold = gateway.chat(prompt)
    assert (cold.predicted, cold.cached) == (0, 0)
    gateway.wait_held(first, 5)
    warm = gateway.chat(prompt)
    assert warm.predicted == warm.cached == (warm.prompt_tokens - 1) // 64 * 64
    lines = [line for line in gateway.process.log().splitlines() if "block_size_changed" in line]
    assert len(lines) == 1
    assert "was=16" in lines[0]
    assert "block_tokens=64" in lines[0]
    assert gateway.rank(first)["feed_stats"]["wrong_block_size"] == 0
