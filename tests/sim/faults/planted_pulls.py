"""Planted faults of pulls between workers: see `planted.py`.

A revocation ends a pull in five ways: both fences, the store that condemns what is on its way, the
worker and the gateway that abort its request. Those that would hide a break are broken with it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from faults.planting import Planted
from faults.wrongs import Wrong, always, nothing, one_tenant

from trunkline import assembly
from trunkline.kv import berths, client, judge, loans, peers, pins, server, staging, store
from trunkline.kv import pulls as kv_pulls
from trunkline.worker import cache, coming, lending, pulls, tiers

_ROOMY = (("requests_per_s", None), ("max_running", 256), ("room_ms", 500.0))


def _backwards(right: Wrong) -> Wrong:
    """The same blocks, each in another's place."""

    def take(self: Any, pinned: Any) -> None:
        right(self, pinned)
        self.blocks.reverse()

    return take


def _once_alone(_right: Wrong) -> Wrong:
    return lambda self, _loan: self._guard


class _Fits:
    """Nothing is unlike it."""

    def __ne__(self, other: object) -> bool:
        return False


def _any_sum(_right: Wrong) -> Wrong:
    return SimpleNamespace(checksum=lambda _kv: _Fits())


PLANTED_PULLS: tuple[Planted, ...] = (
    Planted(
        name="a pull is published unverified",
        found_by=("I2",),
        swaps=(
            (staging.Staging, "verify", always(True)),
            (staging.Staging, "fault", always(None)),
        ),
        kinds=("kv-flip", "kv-corrupt"),
        pulls=True,
    ),
    Planted(
        name="a source sends one block for another",
        found_by=("I1", "I2"),
        swaps=((loans.Loan, "take", _backwards),),
        kinds=("kv-lag",),
        pulls=True,
    ),
    Planted(
        name="what is damaged on the device goes behind it with a digest of its own",
        found_by=("I1", "I2"),
        swaps=((tiers, "simkv", _any_sum),),
        kinds=("corrupt",),
        pulls=True,
    ),
    Planted(
        name="a source looks at its fence once for all that it sends",
        found_by=("I3",),
        swaps=((server.PullServer, "_still", _once_alone),),
        kinds=("kv-revoke",),
        pulls=True,
        first_seed=20,
    ),
    Planted(
        name="a source lends on what is revoked",
        found_by=("I3",),
        swaps=(
            (judge.PullHost, "fault", always(None)),
            (pins.PinTable, "renew", always(True)),
        ),
        kinds=("kv-revoke",),
        pulls=True,
        first_seed=20,
    ),
    Planted(
        name="what was revoked on its way is published",
        found_by=("I3",),
        swaps=(
            (judge.StoreJudge, "fault", always(None)),
            (berths.Berths, "condemn", nothing),
            (client.Puller, "_report", nothing),
            (kv_pulls.Cancel, "cancel", nothing),
        ),
        kinds=("kv-revoke",),
        pulls=True,
        first_seed=20,
    ),
    Planted(
        name="tenants share one namespace in host memory and between workers",
        found_by=("I7",),
        swaps=(
            (assembly, "derive_namespace", one_tenant),
            (cache.BlockCache, "_hits", always(([], None))),
        ),
        pulls=True,
        changes=_ROOMY,
    ),
    Planted(
        name="a pull that failed keeps its staging",
        found_by=("I9",),
        swaps=((store.BlockStore, "abandon", always(True)),),
        kinds=("kv-flip", "kv-reset"),
        pulls=True,
    ),
    Planted(
        name="a source never lets go of what it sent",
        found_by=("I9",),
        swaps=((lending.LentStore, "unpin", always(True)),),
        kinds=("kv-lag",),
        pulls=True,
    ),
    Planted(
        name="a connection on which a pull failed stays open",
        found_by=("I9",),
        swaps=((peers.Connection, "close", nothing),),
        kinds=("kv-flip", "kv-cut"),
        pulls=True,
    ),
    Planted(
        name="what was pulled is for ever on its way",
        found_by=("I9",),
        swaps=((pulls.Pulls, "_is_here", nothing),),
        kinds=("kv-lag",),
        pulls=True,
    ),
    Planted(
        name="a prompt that is computed is waited for",
        found_by=("I9",),
        swaps=((coming.Coming, "end", nothing),),
        kinds=("kv-lag",),
        pulls=True,
    ),
)
