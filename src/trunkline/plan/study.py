"""All that a plan finds out about one log, as figures ready for JSON.

Reads once: savings and the busiest stretch come from the same pass, routing is tried on the stretch
afterwards. Read `told.py` for how it is told, `command.py` for the flags.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from typing import Any

from trunkline.core.links import LinkProfile, gbit_per_s
from trunkline.plan.calls import Call
from trunkline.plan.moves import GOAL_SHARE, MAX_GOAL_CALLS, break_even, workers_needed
from trunkline.plan.peers import LEAST_QUEUE, OURS, ROUTERS
from trunkline.plan.queueing import FleetShape, QueueModel, Routed
from trunkline.plan.reader import LogReader
from trunkline.plan.savings import OWNERS, SHARED, Savings
from trunkline.plan.trials import Trial, tried
from trunkline.plan.window import BusiestWindow, Stretch, stretch_of
from trunkline.replay.traces import TraceRequest
from trunkline.sim.isolation import IsolationCount

GIB = 1 << 30
LADDER_GIB = tuple(float(1 << power) for power in range(18))
LINKS_GBIT = (10.0, 25.0, 100.0, 400.0)
MAX_PUBLIC_USES = 1_000_000
"""Blocks that prefixes are looked for in: some 150 MB. Above it several are taken together."""
MIN_OWNERS = 2
LIMIT, GOAL = "the limit", "goal"
"""Beside the routers: one queue before one cache of all, and the search for enough workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The fleet that is planned, in the units that people use."""

    workers: int = 16
    cache_gib: float = 40.0
    """KV memory of each worker."""
    kv_kib_per_token: float = 128.0
    prefill_tokens_per_s: float = 8_000.0
    link_gbit: float = 25.0
    ttft_goal_ms: float = 2_000.0
    per_second: float = 1.0
    """Calls, where the log has no times."""
    best_prefixes: int = 10
    seed: int = 0

    def tokens(self, gib: float) -> int:
        return int(gib * GIB / (self.kv_kib_per_token * 1_024))

    @property
    def kv_bytes_per_token(self) -> int:
        return int(self.kv_kib_per_token * 1_024)

    def shape(self, *, is_pooled: bool = False) -> FleetShape:
        return FleetShape(
            workers=self.workers,
            cache_tokens=self.tokens(self.cache_gib),
            token_ms=1e3 / self.prefill_tokens_per_s,
            is_pooled=is_pooled,
        )


class Study:
    """One log before one fleet."""

    def __init__(self, reader: LogReader, fleet: Fleet) -> None:
        self._reader = reader
        self._fleet = fleet
        ladder = {*LADDER_GIB, fleet.cache_gib, fleet.cache_gib * fleet.workers}
        self._ladder_gib = sorted(ladder)
        self._savings = Savings([fleet.tokens(gib) for gib in self._ladder_gib])
        self._window = BusiestWindow()
        self._first_ms: float | None = None
        self._last_ms: float | None = None
        self._usage = [0, 0]
        self._block_tokens = 0

    def read(self) -> None:
        """The whole log, once. Raises TraceError."""
        for call in self._reader.calls():
            self._savings.add(call)
            self._window.add(call)
            if call.at_ms is not None:
                self._first_ms = call.at_ms if self._first_ms is None else self._first_ms
                self._last_ms = call.at_ms
            if call.usage_tokens:
                self._usage[0] += call.usage_tokens
                self._usage[1] += call.tokens
            self._block_tokens = call.block_tokens

    def figures(self, step: Callable[[], None]) -> dict[str, Any]:
        """Everything that is told. `step` is called `steps` times."""
        fleet = self._fleet
        savings = self._saved()
        calls = self._window.calls()
        stretch = stretch_of(calls, per_second=fleet.per_second)
        found = self._tried(stretch, step)
        needed = found.pop(GOAL)
        return {
            "log": self._log(),
            "fleet": {**asdict(fleet), "cache_tokens": fleet.tokens(fleet.cache_gib)},
            "savings": savings,
            "isolation": self._isolation(savings),
            "public_prefixes": public_prefixes(calls, best=fleet.best_prefixes),
            "routing": self._routing(stretch, found),
            "pulls": self._pulls(found[OURS]),
            "goal": self._goal(stretch, needed),
        }

    @property
    def steps(self) -> int:
        return len(ROUTERS) + 2  # the limit, and the search for the goal

    def _log(self) -> dict[str, Any]:
        reader, savings = self._reader, self._savings
        span_s = ((self._last_ms or 0.0) - (self._first_ms or 0.0)) / 1e3
        rejects = reader.rejects
        return {
            "format": reader.kind.value,
            "requests": savings.calls,
            "lines": reader.lines,
            "malformed": rejects.total,
            "malformed_by_reason": {
                reason.value: {"count": count, "first": rejects.places[reason]}
                for reason, count in rejects.counts.most_common()
            },
            "other_lines": reader.other_lines,
            "late": reader.late,
            "without_time": reader.without_time,
            "span_s": round(span_s, 3),
            "prompt_tokens": savings.tokens,
            "output_tokens": savings.output_tokens,
            "longest_prompt_tokens": savings.longest_tokens,
            "block_tokens": self._block_tokens,
            "usage_over_guess": round(self._usage[0] / self._usage[1], 4)
            if self._usage[1]
            else None,
        }

    def _saved(self) -> dict[str, Any]:
        found = self._savings.found()
        tokens = max(1, self._savings.tokens)
        by_scope = {one.scope: [round(hit / tokens, 6) for hit in one.hit_tokens] for one in found}
        return {
            "by_cache": [
                {
                    "gib": gib,
                    "tokens": self._fleet.tokens(gib),
                    **{scope: ratios[index] for scope, ratios in by_scope.items()},
                }
                for index, gib in enumerate(self._ladder_gib)
            ],
            "ceiling": {scope: ratios[-1] for scope, ratios in by_scope.items()},
            "distinct_tokens": {one.scope: round(one.distinct_tokens) for one in found},
            "followed": {one.scope: one.rate for one in found},
        }

    def _isolation(self, savings: dict[str, Any]) -> list[dict[str, Any]]:
        """Without limit, and in caches of the fleet's size."""
        whole_gib = self._fleet.cache_gib * self._fleet.workers
        at_fleet = next(row for row in savings["by_cache"] if row["gib"] == whole_gib)
        return [
            {
                "scope": scope,
                "ceiling": ratio,
                "ceiling_cost": round(savings["ceiling"][SHARED] - ratio, 6),
                "at_fleet": at_fleet[scope],
                "at_fleet_cost": round(at_fleet[SHARED] - at_fleet[scope], 6),
            }
            for scope, ratio in savings["ceiling"].items()
            if scope != SHARED
        ]

    def _tried(self, stretch: Stretch, step: Callable[[], None]) -> dict[str, Any]:
        """How each router does, `LIMIT`, and how many workers `GOAL` takes."""
        fleet = self._fleet
        shape, pooled = fleet.shape(), fleet.shape(is_pooled=True)
        trials: dict[str, Trial[Any]] = {
            GOAL: partial(_needed, shape=shape, goal_ms=fleet.ttft_goal_ms)
        }
        for name in ROUTERS:
            trials[name] = partial(_routed, name=name, shape=shape, seed=fleet.seed)
        trials[LIMIT] = partial(_routed, name=LEAST_QUEUE, shape=pooled, seed=fleet.seed)
        return tried(stretch, trials, step)

    def _routing(self, stretch: Stretch, routed: dict[str, Routed]) -> dict[str, Any]:
        return {
            "requests": len(stretch),
            "of_requests": self._savings.calls,
            "span_s": round(stretch.span_ms / 1e3, 3),
            "block_tokens": stretch.block_tokens,
            "spread_ticks_ms": stretch.tick_ms,
            "rows": [_row(name, one) for name, one in routed.items()],
        }

    def _pulls(self, ours: Routed) -> dict[str, Any]:
        fleet = self._fleet
        links = sorted({*LINKS_GBIT, fleet.link_gbit})
        token_ms = 1e3 / fleet.prefill_tokens_per_s
        rows: list[dict[str, Any]] = []
        for gbit in links:
            found = break_even(
                ours.lead_tokens,
                token_ms=token_ms,
                kv_bytes_per_token=fleet.kv_bytes_per_token,
                link=LinkProfile(bytes_per_ms=gbit_per_s(gbit)),
            )
            rows.append({"gbit": gbit, **asdict(found)})
        return {
            "least_gbit": round(fleet.kv_bytes_per_token * 8 * fleet.prefill_tokens_per_s / 1e9, 3),
            "calls_with_more_elsewhere": len(ours.lead_tokens),
            "rows": rows,
        }

    def _goal(self, stretch: Stretch, workers: dict[str, int | None]) -> dict[str, Any]:
        return {
            "ttft_ms": self._fleet.ttft_goal_ms,
            "share": GOAL_SHARE,
            "requests": min(len(stretch), MAX_GOAL_CALLS),
            "workers": workers,
        }


def _routed(stretch: Stretch, *, name: str, shape: FleetShape, seed: int) -> Routed:
    return QueueModel(shape, stretch).run(ROUTERS[name](shape, seed))


def _needed(stretch: Stretch, *, shape: FleetShape, goal_ms: float) -> dict[str, int | None]:
    """Workers that keep the goal: with our choices, and blind to caches."""
    ours = workers_needed(stretch, shape, goal_ms, ROUTERS[OURS])
    blind = None
    if ours is not None:
        blind = workers_needed(stretch, shape, goal_ms, ROUTERS[LEAST_QUEUE], at_least=ours)
    return {OURS: ours, LEAST_QUEUE: blind}


def public_prefixes(calls: list[Call], *, best: int) -> dict[str, Any] | None:
    """What registering would bring back to owners that are kept apart; None where the log names no
    two of them.
    """
    owners = next(
        (scope for scope, (_, is_named) in OWNERS.items() if any(map(is_named, calls))), None
    )
    if owners is None:
        return None
    owner_of, session_of = OWNERS[owners][0], OWNERS["session"][0]
    step = max(1, -(-sum(len(call.blocks) for call in calls) // MAX_PUBLIC_USES))
    counted = IsolationCount()
    for number, call in enumerate(calls):
        request = TraceRequest(
            arrival_ms=0.0,
            input_tokens=call.tokens,
            output_tokens=0,
            block_ids=tuple(call.blocks[step - 1 :: step]),
            block_tokens=step * call.block_tokens,
        )
        counted.add(owner_of(number, call), session_of(number, call), request)
    if counted.hits.tenants < MIN_OWNERS:
        return None
    lost = counted.hits.shared - counted.hits.tenant
    found = counted.candidates()
    chosen = found[:best]
    sums = list(accumulate(one.hit_tokens for one in chosen))
    return {
        "owners": owners,
        "count": counted.hits.tenants,
        "lost_tokens": lost,
        "worth_registering": len(found),
        "won_of_lost": round(sums[-1] / lost, 6) if sums and lost else None,
        "rows": [
            {
                "prefix_tokens": one.prefix_tokens,
                "owners": one.tenants,
                "hit_tokens": one.hit_tokens,
                "won_of_lost": round(total / lost, 6),
                "first_line": calls[one.first_request - 1].line,
            }
            for one, total in zip(chosen, sums, strict=True)
        ],
    }


def _row(name: str, routed: Routed) -> dict[str, Any]:
    return {
        "router": name,
        "hit_tokens_ratio": round(routed.hit_tokens / max(1, routed.tokens), 6),
        "prefill_tokens": routed.tokens - routed.hit_tokens,
        "ttft_ms": {
            "mean": round(routed.mean_ms, 1),
            "p50": round(routed.ttft(0.50), 1),
            "p95": round(routed.ttft(0.95), 1),
            "p99": round(routed.ttft(0.99), 1),
        },
        "busiest_over_mean_work": round(routed.busiest_over_mean, 4),
    }
