"""What one seed stands for: a fleet, its settings, its load, and which faults it meets.

Everything is drawn here and nowhere else, before anything runs: a seed is printed as one `Setting`,
and a smaller one is made from it by leaving out calls and troubles. Read `world.py` for who carries
it out.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from trunkline.core.policies import POLICIES
from trunkline.core.profiles import fifo_profile

WARM_S, FAULTS_S, HEAL_S = 2.0, 8.0, 11.0
"""Phases: all is well; faults; no faults any more, and 10 heartbeats to be as before."""
REST_S = 6.13
"""At most: nobody asks anything, and then the books are looked at."""
ORG = "0" * 32
PULLS_SHARE = 0.33
"""Of the seeds."""
KV_BYTES = 4 << 10
"""Of a token, as workers and gateways have it where there are pulls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request of a client."""

    number: int
    at_s: float
    tenant: int
    user: int
    family: int
    """Prompts of a family begin alike."""
    shared_blocks: int
    """So many blocks of 16 tokens of its family's text, and then `own_tokens` of its own."""
    own_tokens: int
    answer_tokens: int
    is_stream: bool
    is_chat: bool
    wants_ids: bool
    wish: str
    """The scope it narrows itself to; empty for its tenant's."""
    leaves_after_s: float | None
    """When the client goes away; None stays to the end."""
    pauses_s: float
    """How long it reads nothing, from its first byte on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """One thing that goes wrong, or that somebody does."""

    at_s: float
    kind: str
    who: int
    """A worker's number, a tenant's, or neither: then `share` says which gateway."""
    secs: float = 0.0
    share: float = 0.0
    flag: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulls:
    """Of a fleet whose workers pull KV from one another."""

    host_blocks: int
    """What each worker keeps behind its device."""
    link_gbit: float
    """As modelled, and as the gateways have it."""
    patience_ms: int
    room_bytes: int
    """What a connection takes that the other end has not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The drawn configuration of one run."""

    seed: int
    gateway_count: int
    """One has a registry of its own; several share theirs. Not drawn: a seed is a run with each."""
    lets_begun_finish: bool
    """Answers that have begun go on at a gateway that is cut off from the registry."""
    worker_count: int
    tenant_count: int
    block_tokens: int
    capacity_blocks: int
    policy: str
    profile: str
    """What the gateways take workers for."""
    fixed_ms: float
    token_ms: float
    decode_ms: float
    max_running: int
    max_waiting: int
    floor_blocks: int
    cap_blocks: int | None
    requests_per_s: float | None
    retry_floor_per_s: float
    breaker_threshold: int
    first_byte_ms: int
    stream_idle_ms: int
    write_buffer_bytes: int
    write_stall_ms: int
    ring_batches: int
    """Batches that a worker keeps for replays."""
    line_places: int
    room_ms: float
    """Queued work above which a worker has no room for the next in line."""
    latency_s: float
    jitter_s: float
    pulls: Pulls | None
    """Workers may pull KV from one another."""
    kinds: tuple[str, ...]
    """The fault kinds of this seed."""
    only: tuple[str, ...]
    """Where they were given and not drawn."""
    calls: tuple[Call, ...]
    troubles: tuple[Trouble, ...]

    def head(self) -> str:
        """All but calls and troubles, on a line."""
        shown = {
            name: getattr(self, name)
            for name in self.__slots__
            if name not in ("calls", "troubles", "kinds", "only")
        }
        words = " ".join(f"{name}={value}" for name, value in shown.items())
        counts = f"calls={len(self.calls)} troubles={len(self.troubles)}"
        return f"{words} kinds={','.join(self.kinds)} {counts}"


def setting_of(
    seed: int, only: tuple[str, ...] = (), gateways: int = 1, *, pulls: bool | None = None
) -> Setting:
    """The setting of a seed; with `only` these fault kinds, where one is looked for. Whether there
    are pulls is drawn, unless it is said.
    """
    drawn = _without_pulls(seed, tuple(kind for kind in only if kind in KINDS), gateways)
    draw = random.Random(f"pulls {seed} {only}")
    is_drawn = draw.random() < PULLS_SHARE
    if not (is_drawn if pulls is None else pulls):
        return replace(drawn, only=only)
    return _with_pulls(drawn, only, draw)


def _without_pulls(seed: int, only: tuple[str, ...], gateways: int) -> Setting:
    name = f"setting {seed} {only}" if only else f"setting {seed}"
    draw = random.Random(name if gateways == 1 else f"{name} of {gateways} gateways")
    more = random.Random(f"gateways {seed}")
    worker_count = draw.choice((2, 2, 3, 3, 4, 4, 5, 6, 8))
    tenant_count = draw.randint(1, 4)
    block_tokens = draw.choice((16, 16, 32))
    capacity_blocks = draw.choice((40, 64, 256)) * 16 // block_tokens
    floor_blocks = draw.choice((0, 0, capacity_blocks // 8))
    possible = sorted(KINDS if gateways > 1 else KINDS.keys() - OF_SEVERAL)
    kinds = tuple(sorted(draw.sample(possible, draw.randint(2, 7))) if draw.random() < 0.95 else ())
    kinds = only or kinds
    troubles = [
        made
        for kind in kinds
        for _ in range(draw.randint(1, 3))
        for made in KINDS[kind](draw, worker_count, tenant_count)
    ]
    if gateways > 1:
        troubles = [_placed(trouble, more) for trouble in troubles]
    return Setting(
        seed=seed,
        gateway_count=gateways,
        lets_begun_finish=more.random() < 0.5,
        worker_count=worker_count,
        tenant_count=tenant_count,
        block_tokens=block_tokens,
        capacity_blocks=capacity_blocks,
        policy=draw.choice((*sorted(POLICIES), "cache_aware", "cache_aware", "cache_aware")),
        profile="tiny",
        fixed_ms=draw.choice((1.0, 5.0, 20.0)),
        token_ms=draw.choice((0.05, 0.2, 0.5)),
        decode_ms=draw.choice((5.0, 20.0, 60.0)),
        max_running=draw.choice((2, 8, 256)),
        max_waiting=draw.choice((2, 64, 64)),
        floor_blocks=floor_blocks,
        cap_blocks=draw.choice((None, None, floor_blocks + capacity_blocks // 3)),
        requests_per_s=draw.choice((None, None, None, 4.0)),
        retry_floor_per_s=draw.choice((0.0, 0.2, 10.0)),
        breaker_threshold=draw.choice((1, 3, 3)),
        first_byte_ms=draw.choice((1_500, 4_000)),
        stream_idle_ms=draw.choice((1_000, 3_000)),
        write_buffer_bytes=16 << 10,
        write_stall_ms=draw.choice((1_000, 20_000)),
        ring_batches=draw.choice((4, 64, 1_000)),
        line_places=draw.choice((2, 64, 64)),
        room_ms=draw.choice((2.0, 20.0, 500.0)),
        latency_s=draw.choice((0.0001, 0.001, 0.01)),
        jitter_s=draw.choice((0.0, 0.0005, 0.02)),
        pulls=None,
        kinds=kinds,
        only=only,
        calls=_calls(draw, tenant_count),
        troubles=tuple(sorted(troubles, key=lambda trouble: trouble.at_s)),
    )


def _with_pulls(drawn: Setting, only: tuple[str, ...], draw: random.Random) -> Setting:
    """The same fleet with host memory, links, and prefills that are dear enough to be spared."""
    kinds = tuple(kind for kind in only if kind in PULL_KINDS)
    if not only:
        kinds = tuple(sorted(draw.sample(sorted(PULL_KINDS), draw.randint(1, 4))))
    troubles = [
        made
        for kind in kinds
        for _ in range(draw.randint(1, 3))
        for made in PULL_KINDS[kind](draw, drawn.worker_count, drawn.tenant_count)
    ]
    troubles += drawn.troubles
    token_ms = draw.choice((0.5, 1.0, 2.0))
    pulls = Pulls(
        host_blocks=drawn.capacity_blocks * draw.choice((1, 2)),
        link_gbit=draw.choice((0.05, 0.2, 25.0)),
        patience_ms=draw.choice((100, 500)),
        room_bytes=draw.choice((1 << 10, 4 << 10, 64 << 10)),
    )
    return replace(
        drawn,
        policy="cache_aware",
        profile=fifo_profile(drawn.fixed_ms, token_ms, drawn.decode_ms, KV_BYTES),
        token_ms=token_ms,
        pulls=pulls,
        calls=_in_order([*drawn.calls, *_waves(draw, drawn.tenant_count)]),
        kinds=(*drawn.kinds, *kinds),
        only=only,
        troubles=tuple(sorted(troubles, key=lambda trouble: trouble.at_s)),
    )


def transfer_key(setting: Setting) -> bytes:
    """The fleet's."""
    return random.Random(f"transfer key {setting.seed}").randbytes(32)


# -- load ------------------------------------------------------------------------------------------


def _calls(draw: random.Random, tenant_count: int) -> tuple[Call, ...]:
    families = draw.randint(1, 4)
    times = [draw.uniform(0.8, WARM_S) for _ in range(draw.randint(2, 6))]
    times += [draw.uniform(WARM_S, WARM_S + FAULTS_S) for _ in range(draw.randint(8, 24))]
    times += [draw.uniform(WARM_S + FAULTS_S, WARM_S + FAULTS_S + 4) for _ in range(5)]
    made = [_call(draw, at_s, tenant_count, families) for at_s in times]
    if draw.random() < 0.5:  # a burst of equal prompts
        one = _call(draw, draw.uniform(1.0, WARM_S + FAULTS_S), tenant_count, families)
        made += [
            _again(one, at_s=one.at_s + draw.uniform(0.0, 0.02)) for _ in range(draw.randint(3, 10))
        ]
    return _in_order(made)


def _waves(draw: random.Random, tenant_count: int) -> list[Call]:
    """Prompts that go on differently from one long beginning, within a moment: more than who has it
    can serve at once.
    """
    made: list[Call] = []
    for _ in range(draw.randint(3, 6)):
        at_s = draw.uniform(1.0, WARM_S + FAULTS_S + 1.0)
        first = _again(_call(draw, at_s, tenant_count, 2), shared_blocks=8, wish="")
        made += [
            _again(
                first,
                at_s=at_s + 0.5 + draw.uniform(0.0, 0.02),
                own_tokens=draw.choice((16, 40, 80, 90, 100)),
                answer_tokens=draw.choice((2, 20)),
            )
            for _ in range(draw.randint(3, 6))
        ]
        made.append(first)
    return made


def _in_order(made: list[Call]) -> tuple[Call, ...]:
    made.sort(key=lambda call: call.at_s)
    return tuple(_again(call, number=number) for number, call in enumerate(made))


def _call(draw: random.Random, at_s: float, tenant_count: int, families: int) -> Call:
    is_slow = draw.random() < 0.08
    return Call(
        number=0,
        at_s=at_s,
        tenant=draw.randrange(tenant_count),
        user=draw.randrange(2),
        family=draw.randrange(families),
        shared_blocks=draw.choice((0, 1, 2, 4, 6, 8)),
        own_tokens=draw.choice((1, 5, 16, 40)),
        answer_tokens=160 if is_slow else draw.choice((1, 2, 8, 20, 40)),
        is_stream=is_slow or draw.random() < 0.7,
        is_chat=draw.random() < 0.2,
        wants_ids=draw.random() < 0.5,
        wish=draw.choice(("", "", "", "", "", "user", "none")),
        leaves_after_s=draw.choice((None, None, None, None, draw.uniform(0.0, 1.0))),
        pauses_s=draw.uniform(0.5, 3.0) if is_slow else 0.0,
    )


def _again(call: Call, **changes: float | str) -> Call:
    return replace(call, **changes)


def _placed(trouble: Trouble, draw: random.Random) -> Trouble:
    """What is done at a gateway is done at one of several."""
    if trouble.who >= 0 and trouble.kind not in ("revoke", "invalidate"):
        return trouble
    is_one_way = draw.random() < 0.5
    return replace(trouble, share=draw.random(), flag=trouble.flag or is_one_way)


# -- fault kinds -----------------------------------------------------------------------------------

Plan = Callable[[random.Random, int, int], list[Trouble]]


def _when(draw: random.Random) -> float:
    return WARM_S + draw.uniform(0.0, FAULTS_S)


def _left(at_s: float, wanted_s: float) -> float:
    """Faults end with their phase."""
    return min(wanted_s, WARM_S + FAULTS_S - at_s)


def _long(draw: random.Random) -> float:
    """0.1 to 30 s; most are short."""
    return draw.choice((draw.uniform(0.1, 1.0), draw.uniform(1.0, 5.0), draw.uniform(5.0, 30.0)))


def _at_a_worker(kind: str, *, has_flag: float = 0.0) -> Plan:
    def plan(draw: random.Random, workers: int, _tenants: int) -> list[Trouble]:
        at_s = _when(draw)
        return [
            Trouble(
                at_s=at_s,
                kind=kind,
                who=draw.randrange(workers),
                secs=_left(at_s, _long(draw)),
                share=draw.uniform(0.1, 0.9),
                flag=draw.random() < has_flag,
            )
        ]

    return plan


def _at_all(kind: str) -> Plan:
    """Correlated: half of the workers or more, within a moment."""

    def plan(draw: random.Random, workers: int, _tenants: int) -> list[Trouble]:
        at_s, secs = _when(draw), _long(draw)
        hit = draw.sample(range(workers), draw.randint((workers + 1) // 2, workers))
        return [
            Trouble(at_s=at_s + 0.001 * n, kind=kind, who=who, secs=_left(at_s, secs))
            for n, who in enumerate(hit)
        ]

    return plan


def _at_a_tenant(kind: str) -> Plan:
    def plan(draw: random.Random, _workers: int, tenants: int) -> list[Trouble]:
        at_s = _when(draw)
        return [
            Trouble(
                at_s=at_s,
                kind=kind,
                who=draw.randrange(tenants),
                secs=_left(at_s, draw.uniform(0.5, 4.0)),
                flag=draw.random() < 0.5,
            )
        ]

    return plan


def _at_a_gateway(kind: str, *, is_short: bool = False) -> Plan:
    def plan(draw: random.Random, _workers: int, _tenants: int) -> list[Trouble]:
        at_s = _when(draw)
        secs = draw.uniform(0.05, 1.0) if is_short else draw.uniform(0.3, 6.0)
        return [Trouble(at_s=at_s, kind=kind, who=-1, secs=_left(at_s, secs))]

    return plan


def _in_mid_pull_of_a_tenant(draw: random.Random, workers: int, tenants: int) -> list[Trouble]:
    made = _at_a_tenant("kv-revoke")(draw, workers, tenants)
    return [replace(one, share=draw.random()) for one in made]


KINDS: dict[str, Plan] = {
    "crash": _at_a_worker("crash", has_flag=0.3),
    "crash-many": _at_all("crash"),
    "stop": _at_a_worker("stop"),
    "stop-many": _at_all("stop"),
    "slow": _at_a_worker("slow"),
    "cut-to": _at_a_worker("cut-to"),
    "cut-from": _at_a_worker("cut-from"),
    "cut-both": _at_a_worker("cut-both"),
    "lag": _at_a_worker("lag"),
    "reset": _at_a_worker("reset", has_flag=0.5),
    "events-lost": _at_a_worker("events-lost"),
    "events-doubled": _at_a_worker("events-doubled"),
    "events-broken": _at_a_worker("events-broken"),
    "events-cut": _at_a_worker("events-cut"),
    "replay-lost": _at_a_worker("replay-lost"),
    "cache-reset": _at_a_worker("cache-reset"),
    "corrupt": _at_a_worker("corrupt"),
    "refuse": _at_a_worker("refuse"),
    "hang": _at_a_worker("hang"),
    "drain": _at_a_worker("drain"),
    "revoke": _at_a_tenant("revoke"),
    "invalidate": _at_a_tenant("invalidate"),
    "store-down": _at_a_gateway("store-down", is_short=True),
    "gateway-dies": _at_a_gateway("gateway-dies", is_short=True),
    "gateway-cut": _at_a_gateway("gateway-cut"),
    "registry-away": _at_a_gateway("registry-away"),
    "registry-old": _at_a_gateway("registry-old"),
}
"""Name -> what it plans. `flag` is a variant: a crash without a word, a reset in mid-frame, a cut
of one direction. `share` says which gateway.
"""
PULL_KINDS: dict[str, Plan] = {
    "kv-cut": _at_a_worker("kv-cut", has_flag=0.5),
    "kv-lag": _at_a_worker("kv-lag"),
    "kv-reset": _at_a_worker("kv-reset", has_flag=0.7),
    "kv-flip": _at_a_worker("kv-flip"),
    "kv-corrupt": _at_a_worker("kv-corrupt"),
    "kv-crash": _at_a_worker("kv-crash", has_flag=0.3),
    "kv-stop": _at_a_worker("kv-stop"),
    "kv-revoke": _in_mid_pull_of_a_tenant,
}
"""The same for the ways between workers, and what lies behind their devices. `flag`: a cut of one
direction, a reset in mid-frame.
"""
OF_SEVERAL = frozenset(("gateway-cut", "registry-away", "registry-old"))
"""What only gateways that share a registry can meet."""
