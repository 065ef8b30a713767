"""Our connector in real vLLM engines: host tier, verified pulls, tenants, and what goes wrong."""

from __future__ import annotations

import inspect
import json
import random
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from connected import (
    SOURCES,
    Connected,
    Member,
    Tenant,
    Wire,
    can_load,
    flags,
    forget_device,
    prompt,
)
from fleet import Gateway, free_port, processes, text_of, until
from tenants import Caller, tenants
from vllm_engines import BLOCK_TOKENS, Engine, EngineFailed, wait_all

from conftest import PYTHON, Figures, Lab

ACME, UMBRA = Tenant("acme"), Tenant("umbra")
LONG = 4_096
SHORT = 32 * BLOCK_TOKENS
BLOCK_BYTES = 512 << 10
ENVIRONMENT = {"PYTHONPATH": str(SOURCES)}


@pytest.fixture(scope="module")
def key_file(lab: Lab) -> Path:
    path = lab.folder / "transfer.key"
    path.write_text("5a" * 32)
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def agents() -> list[int]:
    return [free_port(), free_port()]


@pytest.fixture(scope="module")
def pair(lab: Lab, key_file: Path, agents: list[int]) -> Iterator[list[Engine]]:
    reason = can_load(PYTHON)
    if reason:
        pytest.skip(f"the engines' environment lacks what the connector needs: {reason}")
    both = [
        lab.engine(name, *flags(port, key_file), environment=ENVIRONMENT)
        for name, port in zip(("lends", "pulls"), agents, strict=True)
    ]
    lab.start(*both)
    yield both
    for engine in both:
        engine.stop()


@pytest.fixture(scope="module")
def fleet(pair: list[Engine], agents: list[int]) -> Iterator[Connected]:
    made = Connected(list(zip(pair, agents, strict=True)), bytes.fromhex("5a" * 32))
    made.open()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def empty_devices(pair: list[Engine]) -> None:
    for engine in pair:
        forget_device(engine)


# --- the real gateway ---


def test_the_gateway_has_a_prefix_pulled_when_its_holder_is_busy(
    lab: Lab, pair: list[Engine], agents: list[int], key_file: Path
) -> None:
    """First in this file: its leases are of revision 0, and a worker never goes back."""
    urls = [
        f"{engine.url}#agent=http://127.0.0.1:{port}"
        for engine, port in zip(pair, agents, strict=True)
    ]
    with processes() as made:
        # The profile's times, slowed down to about those of this engine on a CPU.
        gateway = made.gateway(
            urls,
            *("--model-path", str(lab.model), "--transfer-key-file", str(key_file)),
            *("--time-scale", "30", "--link-gbit", "10000"),
        )
        tokens = prompt(LONG, "routed")
        cold = gateway.complete(tokens, max_tokens=8, temperature=0)
        until(lambda: _is_idle(gateway), "the self-tests are over")
        holder = gateway.complete(tokens, max_tokens=8, temperature=0).worker
        pulled = None
        for turn in range(12):
            busy = _keep_busy(gateway, prompt(LONG, f"busy {turn}"))
            answer = gateway.complete(tokens, max_tokens=8, temperature=0)
            busy.join()
            assert answer.json["choices"][0]["text"] == cold.json["choices"][0]["text"]
            if answer.decision["reason"] == "cache-pull":
                pulled = answer
                break
        assert pulled is not None, "its holder was never the busy one"
        assert pulled.worker != holder
        assert pulled.cached >= LONG
        # On a busy machine it may end early: then the rest was computed, and that is told.
        until(lambda: gateway.metric("pulls_total") >= 1, "a lease tells how the pull ended")
        computed = gateway.metric("recomputed_tokens_total")
        assert gateway.metric("pulled_tokens_total") + computed >= LONG
        assert gateway.metric("workers_ignoring_pulls") == 0


def test_tenants_of_a_gateway_share_nothing_in_host_memory_and_nothing_after_a_revocation(
    lab: Lab, pair: list[Engine], agents: list[int], tmp_path: Path
) -> None:
    """One engine, whose device forgets between any two requests: what is reused is the store's."""
    engine, agent = pair[0], f"http://127.0.0.1:{agents[0]}"
    with processes() as made:
        gate = tenants(
            made, [f"{engine.url}#agent={agent}"], tmp_path, "--model-path", str(lab.model)
        )
        gate.wait_leased(1)
        acme, zeta = gate.caller("acme"), gate.caller("zeta")
        text = text_of(200, "kept apart")

        def cached(who: Caller) -> int:
            forget_device(engine)
            return who.answer(text, max_tokens=2, temperature=0).cached

        assert [cached(who) for who in (acme, zeta)] == [0, 0]
        own, other = cached(acme), cached(zeta)
        assert own == other > 0, "each has its own by now"
        receipt = gate.raised("revoke", "tenant/acme")
        assert receipt["condemned_bytes"]["host"] > 0, receipt
        gate.enable("tenant/acme")
        assert [cached(who) for who in (acme, zeta)] == [0, other]


def _is_idle(gateway: Gateway) -> bool:
    return all(worker["requests_active"] == 0 for worker in gateway.workers().values())


def _keep_busy(gateway: Gateway, tokens: list[int]) -> threading.Thread:
    """A cold prompt is on its way somewhere, and is computed when this returns."""
    thread = threading.Thread(target=lambda: gateway.complete(tokens, max_tokens=1))
    thread.start()
    time.sleep(0.1)
    return thread


# --- from here on the gateway's part is played by hand ---


def _pair(fleet: Connected) -> tuple[Member, Member]:
    lends, pulls = fleet.members
    return lends, pulls


# --- the host tier ---


def test_what_the_device_has_lost_comes_back_from_host_memory_with_the_same_text(
    fleet: Connected,
) -> None:
    one, _ = _pair(fleet)
    tokens = prompt(SHORT, "host")
    cold = fleet.ask(one, tokens, ACME)
    before = one.tokens("host")
    forget_device(one.engine)
    warm = fleet.ask(one, tokens, ACME)
    assert (cold.cached_tokens, warm.cached_tokens) == (0, SHORT)
    assert one.tokens("host") - before == SHORT
    assert warm.text == cold.text


def test_generated_tokens_come_back_as_well(fleet: Connected) -> None:
    one, _ = _pair(fleet)
    tokens = prompt(SHORT, "generated")
    fleet.ask(one, tokens, ACME, count=2 * BLOCK_TOKENS)
    forget_device(one.engine)
    held = one.figures()["store"]["host_bytes"]
    assert held >= (SHORT // BLOCK_TOKENS + 1) * BLOCK_BYTES


def test_many_at_once_with_little_room_get_the_texts_that_they_get_alone(
    fleet: Connected,
) -> None:
    """Prefixes are shared, devices forget, requests come and go: no block is another one's."""
    dice = random.Random(7)
    heads = [prompt(16 * BLOCK_TOKENS, f"head {n}")[:-1] for n in range(4)]
    asked = [dice.choice(heads)[: dice.randrange(4, 17) * BLOCK_TOKENS] + prompt(40, n)
             for n in range(40)]  # fmt: skip
    alone = [fleet.ask(fleet.members[0], tokens, Tenant(f"alone {n}")).text
             for n, tokens in enumerate(asked)]  # fmt: skip

    def ask(n: int) -> str:
        lends, pulls = fleet.members if n % 2 else fleet.members[::-1]
        order = fleet.order(lends, pulls, asked[n], ACME) if n % 3 else None
        if n % 8 == 7:
            forget_device(pulls.engine)
        return fleet.ask(pulls, asked[n], ACME, order).text

    before = [member.figures()["tokens"] for member in fleet.members]
    with ThreadPoolExecutor(6) as threads:
        together = list(threads.map(ask, range(len(asked))))
    assert together == alone
    after = [member.figures()["tokens"] for member in fleet.members]
    reused = {
        source: sum(a[source] - b[source] for a, b in zip(after, before, strict=True))
        for source in ("host", "pull")
    }
    assert sum(reused.values()) > 0, [member.figures() for member in fleet.members]
    for member in fleet.members:
        store = member.figures()["store"]
        assert store["staged_bytes"] == store["pins"] == store["conflicts"] == 0


# --- pulls ---


def test_a_pulled_prefix_gives_the_same_text_and_counts_as_verified(fleet: Connected) -> None:
    lends, pulls = _pair(fleet)
    tokens = prompt(SHORT, "pulled")
    cold = fleet.ask(lends, tokens, ACME)
    order = fleet.order(lends, pulls, tokens, ACME)
    before = pulls.tokens("pull")
    pulled = fleet.ask(pulls, tokens, ACME, order)
    assert pulled.text == cold.text
    assert pulled.cached_tokens == SHORT
    assert pulls.tokens("pull") - before == SHORT
    told = fleet.ended(pulls, order)
    assert (told["end"], told["reason"], told["blocks"]) == ("published", None, 32)


def test_a_pull_of_a_4k_prefix_takes_at_most_two_fifths_of_computing_it(
    fleet: Connected, figures: Figures
) -> None:
    lends, pulls = _pair(fleet)
    cold_ms: list[float] = []
    pulled_ms: list[float] = []
    for turn in range(3):
        other, tokens = prompt(LONG, f"cold {turn}"), prompt(LONG, f"pull {turn}")
        fleet.ask(lends, tokens, ACME, count=1)
        cold_ms.append(fleet.ask(pulls, other, ACME, count=1).ms)
        order = fleet.order(lends, pulls, tokens, ACME)
        pulled = fleet.ask(pulls, tokens, ACME, order, count=1)
        assert pulled.cached_tokens == LONG
        pulled_ms.append(pulled.ms)
        for member in fleet.members:
            forget_device(member.engine)
    cold, pull = statistics.median(cold_ms), statistics.median(pulled_ms)
    figures.add("TTFT, 4k prefix pulled / cold", f"{pull:.0f} / {cold:.0f} ms", "at most 0.4")
    assert pull <= 0.4 * cold, (pulled_ms, cold_ms)


@pytest.mark.parametrize(
    ("fault", "reasons"),
    [
        ({"flips_at": 20 * BLOCK_BYTES}, {"digest"}),
        ({"cuts_at": 20 * BLOCK_BYTES}, {"lost"}),
        ({"stops_at": 20 * BLOCK_BYTES}, {"timeout"}),
    ],
    ids=("corrupt", "cut", "late"),
)
def test_what_goes_wrong_in_the_middle_of_a_pull_is_computed_with_the_same_text(
    fleet: Connected, fault: dict[str, int], reasons: set[str]
) -> None:
    lends, pulls = _pair(fleet)
    tokens = prompt(SHORT, fault)
    cold = fleet.ask(lends, tokens, ACME)
    lost, came = pulls.tokens("lost"), pulls.tokens("pull")
    wire = Wire(lends.pull["port"], **fault)
    try:
        order = fleet.order(lends, pulls, tokens, ACME, port=wire.port)
        pulled = fleet.ask(pulls, tokens, ACME, order)
    finally:
        wire.close()
    told = fleet.ended(pulls, order)
    assert pulled.text == cold.text
    assert told["reason"] in reasons
    assert 0 < told["blocks"] < 32
    assert pulls.tokens("pull") - came == told["blocks"] * BLOCK_TOKENS
    assert pulls.tokens("lost") - lost == SHORT - told["blocks"] * BLOCK_TOKENS
    store = pulls.figures()["store"]
    assert store["staged_bytes"] == store["quarantined_bytes"] == 0


def test_a_source_that_is_gone_costs_a_recompute(fleet: Connected) -> None:
    lends, pulls = _pair(fleet)
    tokens = prompt(SHORT, "gone")
    cold = fleet.ask(lends, tokens, ACME)
    order = fleet.order(lends, pulls, tokens, ACME, port=free_port())
    pulled = fleet.ask(pulls, tokens, ACME, order)
    assert pulled.text == cold.text
    assert fleet.ended(pulls, order)["reason"] == "connect"
    assert pulls.figures()["tokens"]["lost"] >= SHORT


def test_a_grant_for_something_else_is_refused_and_the_prompt_computed(fleet: Connected) -> None:
    lends, pulls = _pair(fleet)
    tokens = prompt(SHORT, "grant")
    cold = fleet.ask(lends, tokens, ACME)
    order = fleet.order(lends, pulls, tokens, ACME, destination="somebody else")
    pulled = fleet.ask(pulls, tokens, ACME, order)
    assert pulled.text == cold.text
    assert fleet.ended(pulls, order)["reason"] == "grant"


# --- tenants ---


def test_d16_vllm_the_same_prompt_of_two_tenants_shares_nothing_and_of_one_it_does(
    fleet: Connected,
) -> None:
    one, _ = _pair(fleet)
    tokens = prompt(SHORT, "tenants")
    mine = fleet.ask(one, tokens, ACME)
    forget_device(one.engine)
    other = fleet.ask(one, tokens, UMBRA)
    again = fleet.ask(one, tokens, ACME)
    assert (other.cached_tokens, again.cached_tokens) == (0, SHORT)
    assert mine.text == other.text == again.text


def test_c58_d16_vllm_another_tenants_blocks_are_not_pulled_by_a_grant_of_ones_own(
    fleet: Connected,
) -> None:
    lends, pulls = _pair(fleet)
    tokens = prompt(SHORT, "other's")
    fleet.ask(lends, tokens, ACME)
    order = fleet.order(lends, pulls, tokens, UMBRA)
    before = pulls.tokens("pull")
    fleet.ask(pulls, tokens, UMBRA, order)
    assert pulls.tokens("pull") == before
    assert fleet.ended(pulls, order)["reason"] == "miss"


def test_revoked_means_nothing_is_reused_and_bytes_are_wiped(fleet: Connected) -> None:
    lends, pulls = _pair(fleet)
    tenant, tokens = Tenant("leaver"), prompt(SHORT, "revoked")
    cold = fleet.ask(lends, tokens, tenant)
    raised, receipts = fleet.raise_epoch(tenant)
    assert receipts[0]["condemned_blocks"] >= SHORT // BLOCK_TOKENS
    for member in fleet.members:
        forget_device(member.engine)
    assert fleet.ask(lends, tokens, raised).cached_tokens == 0
    order = fleet.order(lends, pulls, tokens, tenant)
    stale = fleet.ask(pulls, tokens, tenant, order)  # nobody sends the old salt again; were it so
    assert fleet.ended(pulls, order)["reason"] in {"epoch", "grant"}
    assert stale.text == cold.text
    assert pulls.figures()["store"]["hidden_bytes"] == 0


# --- refusals ---


def test_what_it_cannot_serve_it_refuses_at_start_and_says_why(lab: Lab, key_file: Path) -> None:
    said = list(flags(0, key_file))
    config = json.loads(said[1])
    del config["kv_load_failure_policy"]
    said[1] = json.dumps(config)
    engine = lab.engine("refused", *said, environment=ENVIRONMENT)
    engine.begin()
    with pytest.raises(EngineFailed):
        wait_all([engine], lambda _text: None)
    assert 'it needs "recompute"' in engine.log()
    engine.stop()


def test_the_engines_interface_is_the_one_that_it_was_made_for() -> None:
    """Every method that vLLM calls here has the parameters that it has there."""
    asked = """
import inspect, json
from trunkline.connectors.vllm import TrunklineConnector as ours
theirs = ours.__mro__[1]
names = [n for n, f in vars(ours).items() if inspect.isfunction(f) and not n.startswith("_")]
base = [*ours.__mro__[1:]]
found = {}
for name in names:
    there = next((vars(c)[name] for c in base if name in vars(c)), None)
    found[name] = None if there is None else [
        [list(inspect.signature(f).parameters) for f in (vars(ours)[name], there)],
    ]
print(json.dumps(found))
"""
    told = subprocess.run(
        [PYTHON, "-c", inspect.cleandoc(asked)],
        env={**ENVIRONMENT, "PATH": "/usr/bin:/bin", "HOME": "/tmp"},
        capture_output=True,
        text=True,
        check=True,
    )
    for name, pair in json.loads(told.stdout.splitlines()[-1]).items():
        assert pair is not None, f"{name} overrides nothing"
        [[here, there]] = pair
        assert here == there, name
