"""What isolation costs and registration brings back: the count, the command, the generated mix."""

from __future__ import annotations

import argparse
import io
import json
from array import array
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.core.identity import ModelIdentity, Namespace, Scope, ScopeKind, derive_namespace
from trunkline.core.keys import chain
from trunkline.core.publics import PublicBook, PublicPrefix, packed, two_zone_chain
from trunkline.errors import ConfigError, TraceError
from trunkline.replay.traces import TraceRequest
from trunkline.sim import isolation, plan_public
from trunkline.sim.cache import PrefixCache
from trunkline.sim.isolation import (
    IsolationCount,
    MixShape,
    by_map,
    by_model,
    by_session,
    count,
    generated_mix,
    named_blocks,
    session_of,
    system_prompts,
)
from trunkline.words import tokens_in

TRACES = Path(__file__).resolve().parents[2] / "traces"


def request(
    *ids: int, session: str | None = None, model: str | None = None, over: int = 1
) -> TraceRequest:
    """Blocks of ten tokens, and `over` tokens behind them."""
    return TraceRequest(
        arrival_ms=0.0,
        input_tokens=10 * len(ids) + over,
        output_tokens=1,
        block_ids=ids,
        block_tokens=10,
        session=session,
        model=model,
    )


# -- the count ----------------------------------------------------------------------------------


def test_hits_are_counted_for_each_scope_and_their_differences_are_the_cost() -> None:
    made = IsolationCount()
    made.add("a", "s1", request(1, 2, 3))
    made.add("a", "s2", request(1, 2, 4))  # two blocks known to the tenant
    made.add("b", "s3", request(1, 2, 3))  # three known to others
    made.add("b", "s3", request(1, 2, 3))  # three known to the session
    hits = made.hits
    assert (hits.shared, hits.tenant, hits.session) == (20 + 30 + 30, 20 + 30, 30)
    assert (hits.requests, hits.tenants, hits.sessions) == (4, 2, 3)


def test_the_last_token_is_always_computed() -> None:
    made = IsolationCount()
    for tenant in ("a", "b"):
        made.add(tenant, "s", request(1, 2, over=0))
        made.add(tenant, "s", request(1, 2, over=0))
    assert (made.hits.shared, made.hits.tenant) == (30, 20)
    assert [one.hit_tokens for one in made.candidates()] == [10]


def test_a_forked_prefix_is_a_candidate_for_what_it_adds() -> None:
    made = IsolationCount()
    for tenant, ids in [("a", (1, 2, 3)), ("b", (1, 2, 3)), ("c", (1, 2, 4)), ("d", (1, 2, 4)),
                        ("e", (1, 9)), ("f", (7, 8))]:  # fmt: skip
        made.add(tenant, tenant, request(*ids))
    found = [(c.prefix_tokens, c.tenants, c.whole_tenants, c.hit_tokens) for c in made.candidates()]
    assert found == [(30, 5, 2, 40 + 30 + 10), (30, 2, 2, 10)]
    assert [c.prefix_tokens for c in made.candidates(min_tenants=3)] == [20]


traces = st.lists(
    st.tuples(st.integers(0, 3), st.lists(st.integers(0, 1), max_size=4).map(tuple)), max_size=14
)


def way_names(steps: tuple[int, ...]) -> tuple[int, ...]:
    """A name for each block that tells the way to it, as traces have them."""
    return tuple(int("1" + "".join(map(str, steps[: n + 1])), 2) for n in range(len(steps)))


@given(trace=traces, most=st.integers(1, 3))
def test_the_best_so_many_candidates_win_the_most_that_so_many_prefixes_can(
    trace: list[tuple[int, tuple[int, ...]]], most: int
) -> None:
    made = IsolationCount()
    lost: dict[tuple[int, ...], int] = {}
    for tenant, steps in trace:
        before = made.hits.shared, made.hits.tenant
        made.add(f"t{tenant}", f"t{tenant}", request(*way_names(steps)))
        shared = (made.hits.shared - before[0]) // 10
        for depth in range((made.hits.tenant - before[1]) // 10, shared):
            way = steps[: depth + 1]
            lost[way] = lost.get(way, 0) + 10
    ways = list(lost)
    best = 0
    for chosen in combinations(ways, min(most, len(ways))):
        covered = {way[: n + 1] for way in chosen for n in range(len(way))}
        best = max(best, sum(lost.get(way, 0) for way in covered))
    won = [one.hit_tokens for one in made.candidates()]
    assert sum(won[:most]) == best
    assert sum(won) == made.hits.shared - made.hits.tenant, "all of them win all that is lost"


def test_a_trace_that_cannot_be_counted_is_refused_and_not_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(isolation, "MAX_BLOCK_USES", 5)
    made = IsolationCount()
    made.add("a", "s", request(1, 2, 3))
    made.add("a", "s", request(1, 2, 3, 4, 5))
    with pytest.raises(TraceError, match=r"after 3 requests .* --requests"):
        made.add("b", "s", request(1))


# -- who is whose -------------------------------------------------------------------------------


def test_a_session_is_of_one_tenant_whatever_comes_before_it() -> None:
    tenant_of = by_session(8, seed=1)
    names = [f"s{number}" for number in range(500)]
    drawn = [tenant_of(n, request(session=name)) for n, name in enumerate(names)]
    again = [tenant_of(0, request(session=f"{name}/agent-1")) for name in reversed(names)]
    assert again[::-1] == drawn, "a sub-agent is of its parent's session"
    assert len(set(drawn)) == 8
    assert drawn != [by_session(8, seed=2)(0, request(session=name)) for name in names]
    assert session_of(7, request()) == "#7"


def test_a_map_names_the_tenants_and_must_name_every_session() -> None:
    tenant_of = by_map({"s1": "acme"})
    assert tenant_of(0, request(session="s1")) == "acme"
    with pytest.raises(TraceError, match=r"request 3: .* no session 's2'"):
        tenant_of(3, request(session="s2"))
    assert by_model(0, request(model="m")) == "m"


def test_blocks_of_bodies_are_named_by_all_that_is_before_them() -> None:
    def names(**body: Any) -> tuple[int, ...]:
        one = TraceRequest(arrival_ms=0.0, input_tokens=1, output_tokens=1, body=body)
        ids, block_tokens = named_blocks(one)
        assert block_tokens == 16
        return ids

    tokens = list(range(50))
    assert len(names(prompt=tokens)) == 3
    assert names(prompt=tokens)[:2] == names(prompt=tokens[:33])
    assert names(prompt=[9, *tokens])[1:] != names(prompt=tokens)[1:]
    first = [{"role": "system", "content": "s" * 300}]
    longer = [*first, {"role": "user", "content": "u" * 300}]
    assert names(messages=longer)[:4] == names(messages=first)[:4]
    assert names(prompt="x" * 640) != names(prompt="y" * 640)
    assert names() == ()


# -- the generated mix --------------------------------------------------------------------------

ROOT_KEY = bytes(range(32))
MODEL = ModelIdentity(model_id="m", block_tokens=16)


def namespace(scope: Scope) -> Namespace:
    return derive_namespace(ROOT_KEY, scope, MODEL)


def hit_tokens(mix: list[tuple[str, TraceRequest]], *, isolated: bool, book: PublicBook) -> int:
    """Real keys, a real book, one cache without limit that the filler has filled before."""
    cache = PrefixCache(10_000_000)
    for prefix in book:
        of_prefix = chain(namespace(prefix.scope), array("I", prefix.tokens))
        keys = [bytes(of_prefix[n]) for n in range(len(of_prefix))]
        cache.use(keys, array("I", range(len(keys))))
    total = 0
    for tenant, one in mix:
        tokens = array("I", (one.body or {})["prompt"])
        tenant_name = tenant if isolated else "everyone"
        private = namespace(Scope(kind=ScopeKind.TENANT, org="o", tenant=tenant_name))
        match = book.match(tokens, org="o", model=MODEL, now_ms=0.0)
        if match is None:
            made = chain(private, tokens)
        else:
            public = namespace(match.prefix.scope)
            made = two_zone_chain(public, private, tokens, match.blocks)
        keys = [bytes(made[n]) for n in range(len(made))]
        use = cache.use(keys, array("I", range(len(keys))))
        total += min(use.hit_blocks, (len(tokens) - 1) // 16) * 16
    return total


def test_registering_four_prompts_brings_back_what_64_tenants_lose() -> None:
    """An exact cache count with the gateway's own keys, not the fleet model: no router in it."""
    shape = MixShape()
    assert (shape.tenants, shape.system_prompts) == (64, 4)
    mix = list(generated_mix(shape))
    prefixes = [
        PublicPrefix(
            public_id=f"p{number}",
            owner="o",
            approvers=("ann", "bob"),
            tokens=packed(tokens),
            audience=None,
            model_id="m",
            not_after_ms=1,
            reason="a shared system prompt",
        )
        for number, tokens in enumerate(system_prompts(shape))
    ]
    shared = hit_tokens(mix, isolated=False, book=PublicBook())
    alone = hit_tokens(mix, isolated=True, book=PublicBook())
    registered = hit_tokens(mix, isolated=True, book=PublicBook(prefixes))
    assert alone < 0.95 * shared, "there is something to lose"
    assert (registered - alone) / (shared - alone) >= 0.80
    planned = count_mix(mix)
    assert (planned.hits.shared, planned.hits.tenant) == (shared, alone)
    # The filler is also there for the first of all, whose blocks were lost to nobody.
    first_tokens = sum(prefix.token_count // 16 * 16 for prefix in prefixes)
    won = sum(one.hit_tokens for one in planned.candidates()[:4])
    assert registered == alone + won + first_tokens


def count_mix(mix: list[tuple[str, TraceRequest]]) -> IsolationCount:
    made = IsolationCount()
    for position, (tenant, one) in enumerate(mix):
        made.add(tenant, session_of(position, one), one)
    return made


def test_the_plan_names_the_four_prompts_of_the_mix() -> None:
    shape = MixShape()
    made = count_mix(list(generated_mix(shape)))
    found = made.candidates()
    lengths = sorted(len(tokens) // 16 * 16 for tokens in system_prompts(shape))
    assert sorted(one.prefix_tokens for one in found) == lengths
    assert min(one.whole_tenants for one in found) >= 40
    lost = made.hits.shared - made.hits.tenant
    assert sum(one.hit_tokens for one in found) >= 0.80 * lost


# -- the command --------------------------------------------------------------------------------


def plan(*words: str) -> str:
    parser = argparse.ArgumentParser()
    plan_public.add_arguments(parser)
    out = io.StringIO()
    assert plan_public.run(parser.parse_args([*words]), traces_dir=TRACES, out=out) == 0
    return out.getvalue()


def test_the_plan_of_a_trace_as_json_adds_up() -> None:
    found = json.loads(plan("W2-smoke", "--tenants", "4", "--json"))
    hits, registering = found["hit_tokens"], found["registering"]
    assert (found["requests"], found["sessions"], found["tenants"]) == (600, 16, 4)
    assert hits["session"] <= hits["tenant"] <= hits["shared"] <= found["prompt_tokens"]
    assert found["isolation_cost_tokens"]["tenant"] == hits["shared"] - hits["tenant"]
    assert registering["best"][-1]["won_tokens"] == registering["won_tokens"]
    assert hits["tenant_and_public"] == hits["tenant"] + registering["won_tokens"]
    one = json.loads(plan("W2-smoke", "--tenants", "1", "--json"))
    assert one["isolation_cost_tokens"]["tenant"] == 0
    assert one["registering"]["best"] == []


def test_the_plan_for_people_shows_costs_and_prefixes() -> None:
    text = plan("W2-smoke", "--tenant-by", "session", "--best", "2")
    assert "a namespace a tenant" in text
    assert "prefixes worth registering" in text
    assert "no prefix is worth registering" in plan("W2-smoke", "--tenants", "1")
    assert "upper bound" in plan("W1-smoke")


def test_a_file_of_bodies_is_planned_with_a_map_of_tenants(tmp_path: Path) -> None:
    trace, tenants = tmp_path / "trace.jsonl", tmp_path / "tenants.json"
    lines = [
        {"prompt": list(range(100)), "session_id": session, "timestamp": at, "max_tokens": 1}
        for at, session in enumerate(["a", "b", "a"])
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    tenants.write_text(json.dumps({"a": "one", "b": "two"}))
    found = json.loads(plan(str(trace), "--tenant-map", str(tenants), "--json"))
    assert found["hit_tokens"] == {
        "shared": 192,
        "tenant": 96,
        "session": 96,
        "tenant_and_public": 192,
    }
    assert json.loads(plan(str(trace), "--requests", "1", "--json"))["requests"] == 1


def _logged(path: Path, *prompts: object) -> Path:
    """A log of requests, a session each."""
    lines = [
        {"prompt": prompt, "session_id": f"s{at}", "timestamp": at, "max_tokens": 1}
        for at, prompt in enumerate(prompts)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_the_plan_names_the_first_request_that_has_all_of_a_prefix(tmp_path: Path) -> None:
    shared = list(range(70))
    log = _logged(tmp_path / "log.jsonl", [*range(500, 540)], [*shared[:40]], shared, shared)
    words = (str(log), "--tenant-by", "session")
    (best,) = json.loads(plan(*words, "--json"))["registering"]["best"]
    assert (best["prefix_tokens"], best["first_request"], best["first_session"]) == (64, 3, "s2")
    assert plan(*words).splitlines()[-2].endswith("  3, s2")


def test_the_tokens_of_each_planned_prefix_are_written_as_a_proposal_takes_them(
    tmp_path: Path,
) -> None:
    one, two = list(range(70)), list(range(1_000, 1_040))
    log = _logged(tmp_path / "log.jsonl", one, two, one, two)
    folder = tmp_path / "tokens"
    words = (str(log), "--tenant-by", "session", "--write-tokens", str(folder))
    page = plan(*words)
    assert f"--tokens {folder}/prefix-1.json --block-tokens 16" in page
    files = sorted(folder.iterdir())
    assert [tokens_in(str(path)) for path in files] == [one[:64], two[:32]]
    assert [path.stat().st_mode & 0o077 for path in files] == [0, 0]
    with pytest.raises(ConfigError, match="has such files already"):
        plan(*words)


def test_a_trace_without_tokens_says_so_and_writes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "tokens"
    with pytest.raises(TraceError, match="W2-smoke has block ids"):
        plan("W2-smoke", "--write-tokens", str(folder))
    log = _logged(tmp_path / "log.jsonl", "words " * 50, "words " * 50)
    with pytest.raises(TraceError, match="only its tokenizer knows"):
        plan(str(log), "--write-tokens", str(folder))
    assert not folder.exists()


def test_a_prefix_of_text_among_those_of_tokens_is_said_to_be_missing(tmp_path: Path) -> None:
    text = "".join(map(chr, range(48, 112))) * 2
    log = _logged(tmp_path / "log.jsonl", [*range(64)], text, [*range(64)], text)
    words = (str(log), "--tenant-by", "session", "--write-tokens", str(tmp_path / "t"))
    page = plan(*words)
    assert "prefix 2 was not written: its first request has no token ids" in page
    assert [path.name for path in (tmp_path / "t").iterdir()] == ["prefix-1.json"]


@pytest.mark.parametrize("text", ["[]", "{", '{"a": 1}', ""])
def test_a_map_that_is_none_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tenants.json"
    path.write_text(text)
    with pytest.raises(TraceError, match=r"tenants\.json: expected a JSON object"):
        plan("W2-smoke", "--tenant-map", str(path))


@pytest.mark.parametrize(
    "words",
    [
        ("--tenants", "0"),
        ("--tenants", "1000001"),
        ("--best", "0"),
        ("--best", "257"),
        ("--min-tenants", "1"),
        ("--requests", "0"),
    ],
    ids=" ".join,
)
def test_flags_out_of_bounds_are_refused_by_name(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=words[0]):
        plan("W2-smoke", *words)


def test_a_trace_that_is_not_there_is_named() -> None:
    with pytest.raises(TraceError, match=r"missing\.jsonl: no such file"):
        plan("missing.jsonl")
    with pytest.raises(TraceError, match="no workload 'W9'"):
        plan("W9")


def test_the_plan_prints_no_token(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    line = {"prompt": [777_777] * 64, "timestamp": 0}
    trace.write_text("\n".join([json.dumps(line)] * 3))
    assert "777777" not in plan(str(trace), "--tenant-by", "session")
    assert count([], by_session(1, 0)).candidates() == []
