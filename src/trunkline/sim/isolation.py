"""What isolation costs on a trace, and what registering public prefixes would bring back.

Counts exactly, in tokens, with a cache without limit in which a prompt's blocks are usable as soon
as it has arrived: what any router on any fleet could hit at most. Nothing here promotes a prefix;
it tells the people who register which lengths would pay, and no token is ever shown. Owns the
assignment of requests to tenants and the generated mix. Read `plan_public.py` for the command.
"""

from __future__ import annotations

import hashlib
import json
import random
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from trunkline.core.publics import MAX_PREFIX_TOKENS
from trunkline.errors import TraceError
from trunkline.replay.traces import TraceRequest

MAX_BLOCK_USES = 16_000_000
"""Distinct blocks of all tenants and sessions together: about 2 GB. A trace of more is refused."""
NAMED_BLOCK_TOKENS = 16
"""Blocks of a trace that carries bodies in place of ids; text counts as 4 bytes a token."""

TenantOf = Callable[[int, TraceRequest], str]
"""Position in the trace and request -> tenant."""


# -- who is whose -------------------------------------------------------------------------------


def session_of(position: int, request: TraceRequest) -> str:
    """A sub-agent (`parent/agent`) is of its parent's session; without a name each is its own."""
    return (request.session or f"#{position}").partition("/")[0]


def by_session(tenants: int, seed: int) -> TenantOf:
    """Sessions spread over so many tenants, by name and seed alone."""
    assert tenants > 0

    def tenant_of(position: int, request: TraceRequest) -> str:
        name = f"{seed} {session_of(position, request)}".encode("utf-8", "surrogatepass")
        drawn = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big")
        return f"tenant-{drawn % tenants}"

    return tenant_of


def by_model(_position: int, request: TraceRequest) -> str:
    """Whoever asks for one model is one tenant."""
    return request.model or ""


def by_map(tenants: Mapping[str, str]) -> TenantOf:
    """As a mapping of sessions says. Raises TraceError at a session that it does not name."""

    def tenant_of(position: int, request: TraceRequest) -> str:
        session = session_of(position, request)
        if session not in tenants:
            raise TraceError(f"request {position}: the map of tenants has no session {session!r}")
        return tenants[session]

    return tenant_of


# -- what is hit --------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Hits:
    """Hit tokens of one trace when blocks are shared by all, inside a tenant, inside a session."""

    requests: int = 0
    tenants: int = 0
    sessions: int = 0
    input_tokens: int = 0
    shared: int = 0
    tenant: int = 0
    session: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A prefix worth registering, and what it adds to those before it in the list."""

    prefix_tokens: int
    tenants: int
    """That have its first own block in common."""
    whole_tenants: int
    """That have all of it in common."""
    hit_tokens: int
    first_request: int
    """The first request of the trace that has all of it, counted from 1."""
    first_session: str
    """That request's; `#` and its position where it named none."""


@dataclass(slots=True)
class _Block:
    parent: int | None
    depth: int
    tokens: int
    first_request: int
    first_session: str
    tenants: int = 0
    lost_tokens: int = 0
    """Hits of one tenant on what only others had asked before."""


@dataclass(slots=True)
class _Seen:
    """What one scope has asked so far, apart for each owner."""

    blocks: dict[str, set[int]] = field(default_factory=dict[str, set[int]])

    def leading(self, owner: str, ids: tuple[int, ...]) -> int:
        seen = self.blocks.setdefault(owner, set())
        return next((n for n, block in enumerate(ids) if block not in seen), len(ids))


class IsolationCount:
    """Takes in a trace, request by request."""

    def __init__(self) -> None:
        self.hits = Hits()
        self._blocks: dict[int, _Block] = {}  # parents before children
        self._by_tenant = _Seen()
        self._by_session = _Seen()
        self._use_count = 0

    def add(self, tenant: str, session: str, request: TraceRequest) -> None:
        """Raises TraceError where the trace grows beyond what can be counted."""
        ids, block_tokens = named_blocks(request)
        hits = self.hits
        most = max(0, request.input_tokens - 1) // block_tokens  # the last token is computed
        shared = next((n for n, block in enumerate(ids) if block not in self._blocks), len(ids))
        own = self._by_tenant.leading(tenant, ids)
        of_session = self._by_session.leading(f"{tenant}\0{session}", ids)
        assert of_session <= own <= shared, "a narrower scope knows no more than a wider one"
        self._enter(ids, shared, block_tokens, session)
        for block in ids[own : min(shared, most)]:
            self._blocks[block].lost_tokens += block_tokens
        for block in ids[own:]:
            self._blocks[block].tenants += 1
        self._by_tenant.blocks[tenant].update(ids[own:])
        self._by_session.blocks[f"{tenant}\0{session}"].update(ids[of_session:])
        hits.requests += 1
        hits.tenants = len(self._by_tenant.blocks)
        hits.sessions = len(self._by_session.blocks)
        hits.input_tokens += request.input_tokens
        hits.shared += min(shared, most) * block_tokens
        hits.tenant += min(own, most) * block_tokens
        hits.session += min(of_session, most) * block_tokens
        self._use_count += len(ids) - of_session
        if self._use_count > MAX_BLOCK_USES:
            raise TraceError(
                f"after {hits.requests} requests the trace has more than {MAX_BLOCK_USES} blocks;"
                " count fewer with --requests"
            )

    def _enter(self, ids: tuple[int, ...], known: int, block_tokens: int, session: str) -> None:
        number = self.hits.requests + 1
        for index in range(known, len(ids)):
            parent = ids[index - 1] if index else None
            self._blocks[ids[index]] = _Block(parent, index + 1, block_tokens, number, session)

    def candidates(self, min_tenants: int = 2) -> list[Candidate]:
        """Prefixes worth registering, best first: of any number of them, the first so many win the
        most that so many can.

        Each block belongs to the candidate that goes on where most is to be won; where a prefix
        forks, the other branches are candidates of their own, for what they add.
        """
        best: dict[int, int] = {}
        heavy: dict[int, int] = {}
        for name in reversed(self._blocks):  # children before parents
            block = self._blocks[name]
            if block.tenants < min_tenants or block.depth * block.tokens > MAX_PREFIX_TOKENS:
                continue
            best[name] = block.lost_tokens + best.get(heavy.get(name, -1), 0)
            parent = block.parent
            if parent is not None and best[name] >= best.get(heavy.get(parent, -1), 0):
                heavy[parent] = name  # at equal worth, the one that came first
        starts = [
            name
            for name, won in best.items()
            if won and heavy.get(cast(int, self._blocks[name].parent)) != name
        ]
        starts.sort(key=lambda name: (-best[name], self._blocks[name].depth, name))
        return [self._candidate(start, heavy, best) for start in starts]

    def _candidate(self, start: int, heavy: dict[int, int], best: dict[int, int]) -> Candidate:
        end = start
        while best.get(heavy.get(end, -1), 0):
            end = heavy[end]
        last = self._blocks[end]
        return Candidate(
            prefix_tokens=last.depth * last.tokens,
            tenants=self._blocks[start].tenants,
            whole_tenants=last.tenants,
            hit_tokens=best[start],
            first_request=last.first_request,
            first_session=last.first_session,
        )


def count(requests: Iterable[TraceRequest], tenant_of: TenantOf) -> IsolationCount:
    """All requests of a trace, in order."""
    made = IsolationCount()
    for position, request in enumerate(requests):
        made.add(tenant_of(position, request), session_of(position, request), request)
    return made


# -- blocks of bodies ---------------------------------------------------------------------------


def named_blocks(request: TraceRequest) -> tuple[tuple[int, ...], int]:
    """Names of a request's full blocks, each in the context of all before it, and their tokens."""
    if request.block_ids is not None:
        return request.block_ids[: request.full_blocks], request.block_tokens
    raw = b"".join(_texts(request.body or {}))
    size = 4 * NAMED_BLOCK_TOKENS
    names: list[int] = []
    name = b""
    for start in range(0, len(raw) - size + 1, size):
        name = hashlib.blake2b(name + raw[start : start + size], digest_size=8).digest()
        names.append(int.from_bytes(name, "big"))
    return tuple(names), NAMED_BLOCK_TOKENS


def _texts(body: Mapping[str, Any]) -> Iterator[bytes]:
    """What a prompt is made of, in order; token ids as 4 bytes each."""
    prompt, messages = body.get("prompt"), body.get("messages")
    if isinstance(prompt, list) and all(type(item) is int for item in cast("list[Any]", prompt)):
        yield array("I", cast("list[int]", prompt)).tobytes()
    elif isinstance(prompt, str):
        yield prompt.encode("utf-8", "surrogatepass")
    elif isinstance(messages, list):
        for message in cast("list[Any]", messages):
            yield json.dumps(message, sort_keys=True).encode()


# -- the generated mix --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MixShape:
    """Many tenants that share a few system prompts, and nothing else."""

    tenants: int = 64
    system_prompts: int = 4
    min_system_tokens: int = 1_000
    max_system_tokens: int = 3_000
    sessions_of_tenant: int = 6
    turns: int = 3
    user_tokens: int = 150
    seed: int = 64


def system_prompts(shape: MixShape) -> list[array[int]]:
    """The shared prompts, of lengths that are no multiple of a block."""
    draw = random.Random(shape.seed)
    lengths = [
        draw.randint(shape.min_system_tokens, shape.max_system_tokens) | 1
        for _ in range(shape.system_prompts)
    ]
    return [array("I", (draw.randrange(100_000) for _ in range(n))) for n in lengths]


def generated_mix(shape: MixShape) -> Iterator[tuple[str, TraceRequest]]:
    """`(tenant, request)` in order of time; prompts are token ids in the body."""
    prompts = system_prompts(shape)
    draw = random.Random(shape.seed + 1)
    sessions: dict[str, array[int]] = {}
    turns = [
        (draw.random() + turn, f"tenant-{tenant}", f"s{tenant}.{number}")
        for tenant in range(shape.tenants)
        for number in range(shape.sessions_of_tenant)
        for turn in range(shape.turns)
    ]
    for at, tenant, session in sorted(turns):
        tokens = sessions.get(session)
        if tokens is None:
            tokens = sessions[session] = array("I", draw.choice(prompts))
        tokens.extend(draw.randrange(100_000) for _ in range(shape.user_tokens))
        yield (
            tenant,
            TraceRequest(
                arrival_ms=at * 1_000.0,
                input_tokens=len(tokens),
                output_tokens=1,
                session=session,
                body={"prompt": tokens.tolist()},
            ),
        )
