"""Real engines that crash, forget and run out of room, gateways that start anew or hear nothing for
a while: at rest the gateway knows what each engine holds, and clients hardly notice.

The second engine ends here more than once, and has a small pool of blocks from then on: nothing
that wants it large may come after this.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from fleet import WAIT_S, Gateway, Processes, processes, until
from traffic import ids
from truth import assert_directory_is_true, held_by, rank_of, salt_through, wait_true
from vllm_engines import BLOCK_TOKENS, MODEL, START_S, Engine

from conftest import Figures, Lab

POOL_BLOCKS = 160
SMALL_POOL = ("--num-gpu-blocks-override", str(POOL_BLOCKS), "--max-model-len", "4096")
SMALL_HWM: dict[str, object] = {"hwm": 8}
"""So few batches wait in the engine for a subscriber that does not read."""
LOST_BATCHES = 700
"""More than that and what the kernel keeps of a socket: about 170."""
CLIENTS = 4
LOAD_TOKENS = 100
MUCH_LOAD = 30


@pytest.fixture(scope="module", autouse=True)
def _engines_run(engines: list[Engine]) -> Iterator[None]:
    """Whoever comes next finds both running."""
    yield
    assert all(engine.is_running for engine in engines)


@pytest.fixture(scope="module")
def root_key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("key") / "root"
    file.write_text(os.urandom(32).hex())
    file.chmod(0o600)
    return file


@pytest.fixture
def flags(lab: Lab, root_key: Path) -> tuple[str, ...]:
    """Of a gateway that makes the same salts again after a restart."""
    return ("--model-path", str(lab.model), "--root-key-file", str(root_key))


@pytest.fixture
def small_pool(lab: Lab, engines: list[Engine]) -> Engine:
    """The second engine with a small pool."""
    engine = engines[1]
    if not set(SMALL_POOL) <= set(engine.flags):
        engine.kill()
        _make_small(engine)
        lab.start(engine)
    return engine


def test_a_gateway_that_starts_anew_knows_what_the_engines_hold(
    engines: list[Engine], flags: tuple[str, ...]
) -> None:
    """Also what they came to hold while no gateway was there to hear of it."""
    urls = [engine.url for engine in engines]
    prompts, unheard = _prompts(8), _prompts(2)
    with processes() as started:
        before = started.gateway(urls, *flags)
        salt = salt_through(before, engines)
        for prompt in prompts:
            assert before.complete(prompt, max_tokens=40).status == 200
        assert_directory_is_true(before, engines, salt, prompts[:3])
        before.process.kill()
    for engine, prompt in zip(engines, unheard, strict=True):
        _ask(engine, salt, [prompt])
    with processes() as started:
        after = started.gateway(urls, *flags)
        compared = assert_directory_is_true(after, engines, salt, [*unheard, *prompts])
    assert compared > sum(map(len, prompts)) // 2


def test_a_reset_of_an_idle_engine_costs_one_wrong_guess(
    engines: list[Engine], flags: tuple[str, ...], started: Processes
) -> None:
    """The engine tells of it only with its next request's batch."""
    engine = engines[0]
    gateway = started.gateway([engine.url], *flags)
    salt = salt_through(gateway, [engine])
    first, second = _prompts(2)
    for prompt in (first, second):
        assert gateway.complete(prompt, max_tokens=1).cached == 0
    assert_directory_is_true(gateway, [engine], salt, [first, second])
    assert httpx.post(f"{engine.url}/reset_prefix_cache", timeout=WAIT_S).status_code == 200

    wrong = gateway.complete(first, max_tokens=1)
    assert wrong.predicted > wrong.cached == 0, "nobody could know"
    compared = assert_directory_is_true(gateway, [engine], salt, [first, second])
    assert compared == wrong.predicted, "the first is there again, and of the second nothing"
    assert gateway.metric("over_claims_total") == 1


def test_an_engine_that_is_killed_under_load_costs_at_most_what_it_was_answering(
    lab: Lab, engines: list[Engine], small_pool: Engine, flags: tuple[str, ...],
    started: Processes, figures: Figures,
) -> None:  # fmt: skip
    """It comes back with the settings it had, and an empty cache."""
    victim = small_pool
    gateway = started.gateway([engine.url for engine in engines], *flags)
    salt = salt_through(gateway, engines)
    with _Load(gateway) as load:
        until(
            lambda: len(load.ended) > MUCH_LOAD and rank_of(gateway, victim)["in_flight"],
            "it has something to answer",
        )
        victim.kill()
        killed_at = time.monotonic()
        until(lambda: gateway.workers()[victim.worker]["state"] != "ready", "it is missed")
        lab.start(victim)
        back = "it is chosen again"
        until(lambda: gateway.workers()[victim.worker]["state"] == "ready", back, START_S)
        until(lambda: len(load.prompts(after=killed_at, at=victim)) > MUCH_LOAD, back)
    broken = [end for end in load.ended if end.why]
    figures.add(
        f"engine killed under the load of {CLIENTS} clients: requests ended well, broken",
        f"{len(load.ended) - len(broken)}, {len(broken)}",
        f"at most {CLIENTS} broken",
    )
    for end in broken:
        assert end.began_at < killed_at, f"it came after the kill: {end.why}"
        assert end.worker == victim.worker, f"another engine's, or nothing of it was told: {end}"
    assert len(broken) <= CLIENTS, "each client has one in flight"
    asked = [*load.prompts(before=killed_at, at=victim)[-4:], *load.prompts()[-2 * CLIENTS :]]
    compared = assert_directory_is_true(gateway, engines, salt, asked)
    assert compared > 0


def test_what_a_small_pool_has_evicted_is_expected_no_more(
    engines: list[Engine], small_pool: Engine, flags: tuple[str, ...], started: Processes,
    figures: Figures,
) -> None:  # fmt: skip
    gateway = started.gateway([small_pool.url], *flags)
    salt = salt_through(gateway, [small_pool])
    removed_before = held_by(small_pool).removed
    old, others, new = _prompts(4), _prompts(20), _prompts(8)
    for prompt in old:
        assert gateway.complete(prompt, max_tokens=40).status == 200
    # Past the gateway: what it sends itself would push out its oldest guesses.
    _ask(small_pool, salt, others)
    for prompt in new:
        assert gateway.complete(prompt, max_tokens=40).status == 200
    wait_true(gateway, [small_pool], salt)
    held = held_by(small_pool)
    assert not any(held.leading_tokens(prompt, salt) for prompt in old)
    compared = assert_directory_is_true(gateway, [small_pool], salt, [*old, *new[::-2]])
    removed = held.removed - removed_before
    figures.add(
        f"pool of {POOL_BLOCKS} blocks at rest: removed; tokens compared, all equal",
        f"{removed}; {compared}",
        "above 100; equal",
    )
    assert removed > 100
    assert compared > 0


def test_what_a_paused_gateway_did_not_hear_is_asked_for_again(
    small_pool: Engine, flags: tuple[str, ...], started: Processes
) -> None:
    gateway = started.gateway([small_pool.url], *flags)
    salt = salt_through(gateway, [small_pool])
    (prompt,) = _prompts(1)
    assert gateway.complete(prompt, max_tokens=1).status == 200
    wait_true(gateway, [small_pool], salt)
    before = rank_of(gateway, small_pool)["feed_stats"]
    unheard = _lose_batches(gateway, small_pool, salt, prompt)
    wait_true(gateway, [small_pool], salt)
    after = rank_of(gateway, small_pool)["feed_stats"]
    assert after["replays"] > before["replays"]
    assert after["relearned"] == before["relearned"], "nothing had to be forgotten"
    asked = [prompt, *unheard[-4:], *_prompts(1)]
    assert assert_directory_is_true(gateway, [small_pool], salt, asked) > 0


def test_without_a_replay_nothing_is_guessed_at_and_what_comes_is_learnt(
    lab: Lab, engines: list[Engine], flags: tuple[str, ...]
) -> None:
    """Neither by a gateway that starts anew, nor by one that has lost batches: it forgets all."""
    engine = engines[1]
    with processes() as started:
        salt = salt_through(started.gateway([engines[0].url], *flags), engines[:1])
    engine.kill()
    _make_small(engine)
    engine.told_of_events["replay_endpoint"] = None
    lab.start(engine)
    prompts = _prompts(4)
    with processes() as started:
        before = started.gateway([engine.url], *flags)
        for prompt in prompts:
            assert before.complete(prompt, max_tokens=1).status == 200
    with processes() as started:
        gateway = started.gateway([engine.url], *flags)
        assert rank_of(gateway, engine)["held_blocks"] == 0
        for prompt in prompts:
            answer = gateway.complete(prompt, max_tokens=1)
            assert answer.predicted == 0 < answer.cached
        (learnt,) = _prompts(1)
        assert gateway.complete(learnt, max_tokens=1).cached == 0
        until(lambda: rank_of(gateway, engine)["held_blocks"], "it has learnt")
        answer = gateway.complete(learnt, max_tokens=1)
        assert answer.predicted == answer.cached > 0

        _lose_batches(gateway, engine, salt, learnt)
        until(lambda: rank_of(gateway, engine)["feed_state"] == "live", "it is believed again")
        assert rank_of(gateway, engine)["feed_stats"]["relearned"] > 0
        answer = gateway.complete(learnt, max_tokens=1)
        assert answer.predicted == answer.cached == 0, "evicted, and not believed to be there"
        assert gateway.metric("over_claims_total") == 0


# -- loads and upheavals ---------------------------------------------------------------------------


def _make_small(engine: Engine) -> None:
    if not set(SMALL_POOL) <= set(engine.flags):
        engine.flags = (*engine.flags, *SMALL_POOL)
    engine.told_of_events = dict(SMALL_HWM)


def _prompts(count: int) -> list[list[int]]:
    """That nobody sent before, of a few hundred tokens."""
    dice = random.Random(time.monotonic_ns())
    return [ids(dice, dice.randrange(150, 500)) for _ in range(count)]


def _ask(engine: Engine, salt: str, prompts: Sequence[Sequence[int]]) -> None:
    """Past any gateway."""
    with httpx.Client(base_url=engine.url, timeout=WAIT_S) as client:
        for prompt in prompts:
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "cache_salt": salt}
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text


def _lose_batches(
    gateway: Gateway, engine: Engine, salt: str, evicted: Sequence[int]
) -> list[list[int]]:
    """The gateway stands still while the engine tells more than sockets and queues hold, and goes
    on when the whole pool is overwritten; it sees that something is missing. That `evicted` is gone
    is among it: at first it is used again and again. What else the engine was asked.
    """
    dice = random.Random(time.monotonic_ns())
    unheard = [ids(dice, BLOCK_TOKENS + 1) for _ in range(LOST_BATCHES)]
    before = rank_of(gateway, engine)["feed_stats"]["gaps"]
    gateway.process.send(signal.SIGSTOP)
    try:
        for start in range(0, LOST_BATCHES, POOL_BLOCKS // 4):
            asked = unheard[start : start + POOL_BLOCKS // 4]
            _ask(engine, salt, [evicted, *asked] if start < LOST_BATCHES // 2 else asked)
    finally:
        gateway.process.send(signal.SIGCONT)
    # Only a later batch shows that some before it are missing.
    shows = ids(dice, BLOCK_TOKENS + 1)
    _ask(engine, salt, [shows])
    until(lambda: rank_of(gateway, engine)["feed_stats"]["gaps"] > before, "a gap is seen")
    return [*unheard, shows]


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """How one request ended; `why` is empty where it went well, and `worker` where nothing came."""

    prompt: list[int]
    began_at: float
    worker: str = ""
    why: str = ""


@dataclass(slots=True)
class _Load:
    """Clients that ask one thing after another, half of them for streams, until told to stop."""

    gateway: Gateway
    ended: list[_End] = field(default_factory=list[_End])
    is_over: threading.Event = field(default_factory=threading.Event)
    threads: list[threading.Thread] = field(default_factory=list[threading.Thread])

    def __enter__(self) -> _Load:
        for number in range(CLIENTS):
            thread = threading.Thread(target=self._ask, args=(number,), daemon=True)
            self.threads.append(thread)
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_over.set()
        for thread in self.threads:
            thread.join(2 * WAIT_S)
        assert not any(thread.is_alive() for thread in self.threads), "a client hangs"

    def prompts(
        self, *, after: float = 0.0, before: float = float("inf"), at: Engine | None = None
    ) -> list[list[int]]:
        """Of the requests that began in between and ended well, of one engine or of all."""
        return [
            end.prompt
            for end in self.ended
            if after < end.began_at < before and not end.why
            if at is None or end.worker == at.worker
        ]

    def _ask(self, number: int) -> None:
        dice = random.Random(f"{number} {time.monotonic_ns()}")
        with httpx.Client(base_url=self.gateway.url, timeout=2 * WAIT_S) as client:
            while not self.is_over.is_set():
                prompt = ids(dice, LOAD_TOKENS)
                self.ended.append(_outcome(client, prompt, is_stream=number % 2 == 0))


def _outcome(client: httpx.Client, prompt: list[int], *, is_stream: bool) -> _End:
    """An answer is good when it is whole."""
    body = {"prompt": prompt, "stream": is_stream, "max_tokens": 16, "ignore_eos": True}
    began_at = time.monotonic()
    worker, told = "", b""
    try:
        with client.stream("POST", "/v1/completions", json=body) as answer:
            words = answer.headers.get("x-trunkline-decision", "").split("; ")
            worker = next((w[7:] for w in words if w.startswith("worker=")), "")
            for piece in answer.iter_bytes():
                told += piece
        is_whole = b"data: [DONE]" in told if is_stream else told.endswith(b"}")
        why = "" if answer.status_code == 200 and is_whole else f"{answer.status_code}: {told!r}"
    except httpx.HTTPError as error:
        why = repr(error)
    return _End(prompt=prompt, began_at=began_at, worker=worker, why=why)
