"""Planted faults: small breaks of product code, each of which a named check has to find.

    PYTHONPATH=tests:tests/sim python -m faults.planted          # all, as a table
    PYTHONPATH=tests:tests/sim python -m faults.planted NAME     # one

A check that nothing can fail proves nothing. Each break is a function swapped for a wrong one while
seeds are run, those with the fault kinds under which it matters. Where the product has two lines of
defence, both are broken: that one alone holds is what the second is for. Read `planting.py` for
how, `checks.py` for the checks.
"""

from __future__ import annotations

import sys

from faults import gate
from faults.planted_pulls import PLANTED_PULLS
from faults.planting import Planted, catch, row_of
from faults.wrongs import (
    always,
    applies_behind_a_gap,
    at_once,
    counts_one_more,
    doubles_some,
    drops_some,
    ends_only_good,
    fails_at_times,
    forgets_rev,
    gives_up,
    in_force_at_once,
    keeps_aborted,
    keeps_no_line,
    lies_of_durability,
    loses_an_id,
    lowers_epoch,
    never_ends_tenants,
    no_epochs,
    nothing,
    one_tenant,
    one_user,
    stays_indexed,
    usable_all,
)

from trunkline import assembly
from trunkline.control import (
    gateways,
    health,
    holders,
    ledger,
    load,
    load_sync,
    memory_store,
    mirrored_store,
    registry,
    sinks,
)
from trunkline.control.entries import Entries
from trunkline.core import breaker, directory, epochs, feed, fleet, freshness
from trunkline.core.sequence import Sequence
from trunkline.gateway import client, front, mending, picker, places, relay, retry, upstream
from trunkline.worker import agent, cache, engine, fence, jobs, quota, voices

# -- the catalogue ---------------------------------------------------------------------------------

_STOPS = ("stop", "stop-many", "invalidate", "revoke")
_ROOMY = (("requests_per_s", None), ("max_running", 256), ("room_ms", 500.0))
_DEAR = ("profile", "fifo:20,4,20")
"""What a prefill costs as the gateways have it."""
_LONG = (("decode_ms", 60.0), ("requests_per_s", None))

PLANTED: tuple[Planted, ...] = (
    Planted(
        name="workers use what they hold unread",
        found_by=("I1",),
        swaps=((fence.Fence, "fault", always(None)),),
        kinds=("corrupt",),
    ),
    Planted(
        name="what is evicted can still be found, and nobody looks at it",
        found_by=("I1", "I2"),
        swaps=(
            (fence.Fence, "fault", always(None)),
            (cache.BlockCache, "_take", stays_indexed),
            (cache.BlockCache, "_unindex", nothing),
        ),
        changes=(("capacity_blocks", 40), ("block_tokens", 16), ("cap_blocks", None)),
    ),
    Planted(
        name="tenants share one namespace",
        found_by=("I7",),
        swaps=((assembly, "derive_namespace", one_tenant),),
        changes=_ROOMY,
    ),
    Planted(
        name="users share one namespace",
        found_by=("I7",),
        swaps=((assembly, "derive_namespace", one_user),),
        changes=_ROOMY,
    ),
    Planted(
        name="epochs are in no salt, and no worker minds them",
        found_by=("I3",),
        swaps=(
            (assembly, "derive_namespace", no_epochs),
            (freshness.Freshness, "is_current", always(True)),
            (agent.Agent, "_condemn", nothing),
        ),
        kinds=("invalidate",),
        changes=_ROOMY,
    ),
    Planted(
        name="a revocation is in force as soon as the gateway knows of it",
        found_by=("I3",),
        swaps=((freshness.Fencing, "is_complete", in_force_at_once),),
        kinds=_STOPS,
        changes=(*_ROOMY, ("latency_s", 0.05), ("jitter_s", 0.05)),
    ),
    Planted(
        name="streams go on after their revocation",
        found_by=("I3",),
        swaps=(
            (epochs.EpochTable, "may_leave", always(True)),
            (agent.Agent, "_abort", nothing),
        ),
        kinds=("revoke",),
        changes=_LONG,
    ),
    Planted(
        name="an order makes a worker forget its revision",
        found_by=("I3b",),
        swaps=((freshness.Freshness, "obey", forgets_rev),),
        kinds=("invalidate", "stop"),
    ),
    Planted(
        name="who is enabled again has its old epoch",
        found_by=("I3b",),
        swaps=((epochs.EpochTable, "enabled", lowers_epoch),),
        kinds=("revoke",),
    ),
    Planted(
        name="the store acknowledges what it has not kept",
        found_by=("I3b",),
        swaps=((memory_store.MemoryStore, "append", lies_of_durability),),
        kinds=("revoke", "gateway-dies"),
    ),
    Planted(
        name="access is given back without a word before it",
        found_by=("I10",),
        swaps=((ledger.Ledger, "intent", at_once(None)),),
        kinds=("revoke",),
    ),
    Planted(
        name="what changed is not recorded",
        found_by=("I10",),
        swaps=((ledger.Ledger, "catch_up", at_once(True)),),
        kinds=("revoke",),
    ),
    Planted(
        name="the audit log acknowledges what no disk has",
        found_by=("I10",),
        swaps=((sinks.Lanes, "append", keeps_no_line),),
        kinds=("revoke",),
    ),
    Planted(
        name="a revocation that a crash cut off stays without its outcome",
        found_by=("I10",),
        swaps=((gate, "finish_revocations", at_once(None)),),
        kinds=("revoke", "gateway-dies"),
    ),
    Planted(
        name="a drained worker gets requests",
        found_by=("I4",),
        swaps=((Entries, "set_draining", nothing),),
        kinds=("drain",),
    ),
    Planted(
        name="the router does not ask who may be chosen",
        found_by=("I4",),
        swaps=((fleet.Fleet, "usable", usable_all),),
        kinds=("crash", "drain", "hang"),
    ),
    Planted(
        name="a worker that fails its probes stays in",
        found_by=("I4",),
        swaps=(
            (Entries, "set_unhealthy", nothing),
            (breaker.Breaker, "is_usable", always(True)),
            (fleet, "_doubt", always(None)),
        ),
        kinds=("stop",),
        changes=(("worker_count", 3), *_ROOMY),
        first_seed=20,
    ),
    Planted(
        name="a broken stream is closed without a word",
        found_by=("I5",),
        swaps=((relay.Relay, "break_off", always(False)),),
        kinds=("crash", "crash-many", "stop"),
        changes=_LONG,
    ),
    Planted(
        name="a broken stream ends as if it were whole",
        found_by=("I5",),
        swaps=((mending.Mending, "error_event", always(b"data: [DONE]\n\n")),),
        kinds=("crash", "crash-many", "stop"),
        changes=_LONG,
    ),
    Planted(
        name="now and then a piece of a stream is lost",
        found_by=("I1", "I5"),
        swaps=((client.ClientConnection, "write", drops_some),),
    ),
    Planted(
        name="now and then a piece of a stream comes twice",
        found_by=("I1", "I5"),
        swaps=((client.ClientConnection, "write", doubles_some),),
    ),
    Planted(
        name="an answer that goes on repeats its last token",
        found_by=("I1", "I5"),
        swaps=((mending, "read_journal", loses_an_id),),
        kinds=("crash", "crash-many"),
        changes=_LONG,
    ),
    Planted(
        name="usage counts a token too many",
        found_by=("I5",),
        swaps=((voices, "usage", counts_one_more),),
    ),
    Planted(
        name="a book-keeper fails now and then",
        found_by=("I5",),
        swaps=((picker.FleetPicker, "first_byte", fails_at_times),),
    ),
    Planted(
        name="nobody looks at deadlines",
        found_by=("I5", "I9"),
        swaps=((front.Front, "_sweep", nothing),),
        kinds=("hang",),
    ),
    Planted(
        name="failed attempts stay in the books",
        found_by=("I9",),
        swaps=((picker.FleetPicker, "ended", ends_only_good),),
        kinds=("crash", "refuse"),
    ),
    Planted(
        name="who is aborted keeps its blocks",
        found_by=("I9",),
        swaps=((jobs.Jobs, "abort", keeps_aborted),),
    ),
    Planted(
        name="a tenant's requests are not counted down",
        found_by=("I9",),
        swaps=((places.Places, "end", never_ends_tenants),),
        kinds=("crash", "refuse"),
    ),
    Planted(
        name="clients that leave stay in the engine",
        found_by=("I9",),
        swaps=((engine.Engine, "abort", nothing),),
        changes=(("decode_ms", 60.0), ("max_running", 2), ("max_waiting", 64)),
    ),
    Planted(
        name="retries have no budget",
        found_by=("I12",),
        swaps=((retry.RetryBudget, "try_spend", always(True)),),
        kinds=("refuse", "crash-many", "hang"),
        changes=(("retry_floor_per_s", 0.0),),
    ),
    Planted(
        name="a breaker does not close again",
        found_by=("LIVE",),
        swaps=(
            (breaker.Breaker, "succeeded", nothing),
            (breaker.Breaker, "is_usable", lambda _right: lambda self, _now: not self._state),
        ),
        kinds=("refuse", "hang"),
        changes=(("breaker_threshold", 1),),
    ),
    Planted(
        name="good probes do not count",
        found_by=("LIVE",),
        swaps=((health.Health, "passed", always(False)),),
        kinds=("crash", "stop", "cut-both"),
    ),
    Planted(
        name="a lost lease is not asked for again",
        found_by=("LIVE",),
        swaps=((holders.WorkerHolder, "_beat", gives_up),),
        kinds=("stop", "cut-both"),
    ),
    Planted(
        name="a revocation waits for whoever is silent",
        found_by=("LIVE",),
        swaps=((freshness.Fencing, "complete_at", always(1e12)),),
        kinds=("crash-many", "revoke"),
    ),
    Planted(
        name="what is removed stays in the directory",
        found_by=("DIR",),
        swaps=((directory.Directory, "removed", always(0)),),
        changes=(("capacity_blocks", 40), ("block_tokens", 16)),
    ),
    Planted(
        name="what comes behind a gap is applied as it is",
        found_by=("DIR",),
        swaps=((feed.WorkerFeed, "_on_gap", applies_behind_a_gap),),
        kinds=("events-lost",),
        changes=(("capacity_blocks", 40), ("block_tokens", 16)),
    ),
    Planted(
        name="another life of a worker is taken for the same",
        found_by=("DIR", "LIVE"),
        swaps=(
            (feed.WorkerFeed, "_restart", nothing),
            (Sequence, "contradicts", always(False)),
            (Sequence, "is_repeat", always(True)),
            (directory.Directory, "leave", nothing),
            (load.LoadReader, "is_younger", always(False)),
        ),
        kinds=("crash",),
    ),
    Planted(
        name="a tenant's floor protects nothing",
        found_by=("I8",),
        swaps=((quota.Places, "_is_above_floor", always(True)),),
        changes=(
            *(("capacity_blocks", 40), ("block_tokens", 16), ("floor_blocks", 16)),
            *(("cap_blocks", None), *_ROOMY),
        ),
    ),
    Planted(
        name="a gateway reuses after its lease with the registry",
        found_by=("I4",),
        swaps=((gateways.Gateways, "is_valid", always(True)),),
        kinds=("gateway-cut",),
        gateways=2,
    ),
    Planted(
        name="a gateway lends workers more than it has",
        found_by=("I4",),
        swaps=((gateways.Gateways, "left_ms", always(3_000.0)),),
        kinds=("registry-away",),
        gateways=2,
    ),
    Planted(
        name="an ack waits for no silent gateway",
        found_by=("I3",),
        swaps=((gateways.Gateways, "settle", at_once(None)),),
        kinds=("gateway-cut", "revoke"),
        gateways=2,
        changes=(("lets_begun_finish", False), *_LONG),
        first_seed=8,
    ),
    Planted(
        name="a gateway takes in nothing that others commit",
        found_by=("I3", "LIVE"),
        swaps=((registry.Registry, "catch_up", at_once(None)),),
        kinds=("gateway-cut", "revoke"),
        gateways=2,
        changes=_LONG,
    ),
    Planted(
        name="what the servers lost is not put in again",
        found_by=("I3b", "LIVE", "I5"),
        swaps=((mirrored_store.MirroredStore, "_refilled", at_once(True)),),
        kinds=("registry-old", "invalidate"),
        gateways=2,
    ),
    Planted(
        name="words of other gateways never age",
        found_by=("I9",),
        swaps=((load_sync, "FRESH_MS", lambda _right: 1e12),),
        kinds=("gateway-dies",),
        changes=(("token_ms", 4.0), _DEAR, *_ROOMY),
        gateways=3,
    ),
    Planted(
        name="a dead attempt's connection is kept for others",
        found_by=("I1", "I5", "I9"),
        swaps=(
            (
                upstream.WorkerConnection,
                "abort",
                lambda _right: lambda self: self.release(is_reusable=True),
            ),
        ),
        kinds=("stop", "hang"),
        changes=_LONG,
    ),
    *PLANTED_PULLS,
)


def main() -> int:
    wanted = [one for one in PLANTED if not sys.argv[1:] or one.name in sys.argv[1:]]
    missed = 0
    for planted in wanted:
        caught = catch(planted)
        missed += caught.run is None
        sys.stdout.write(row_of(caught) + "\n")
        sys.stdout.flush()
    sys.stdout.write(f"{len(wanted) - missed} of {len(wanted)} planted faults were found\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
