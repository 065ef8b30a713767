"""What the two halves of a connector tell each other: the scheduler's process and the worker's.

    plan    at each step, from the scheduler to the worker: copy these blocks, bring those
    report  at the end of each step, back: what came to the store and went, which loads are over

The engine carries both, pickled, between its own processes. Plain records. Read `plan.py` next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trunkline.core.records import Tier
from trunkline.core.transfer import PullEnd, Reason
from trunkline.kv.orders import PullOrder
from trunkline.kv.records import Manifest, Owner, Place, StoreEvent
from trunkline.kv.tickets import Ticket


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """A block that is finished when the step is."""

    place: Place
    owner: Owner
    block_id: int
    """Where it lies on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullWish:
    """What the gateway says may be pulled for a request."""

    name: str
    """What the gateway calls it when it is told how it ended."""
    order: PullOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Blocks that one request waits for."""

    request_id: str
    ticket: Ticket
    keys: tuple[bytes, ...]
    """Of the prompt's blocks from its first on; as far as the grant goes, if there is one."""
    block_ids: tuple[int, ...]
    """Where they lie, or are to lie, on the device: those before `first` are there."""
    first: int
    wish: PullWish | None = None

    @property
    def wanted(self) -> range:
        """The blocks that are to be brought."""
        return range(self.first, len(self.block_ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """How a load ended: so many leading blocks of it are on the device now."""

    load: Load
    blocks: int

    @property
    def failed_ids(self) -> tuple[int, ...]:
        """Places that do not hold what they were to hold."""
        return self.load.block_ids[self.load.first + self.blocks :]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    saves: tuple[Save, ...] = ()
    savers: tuple[Ticket, ...] = ()
    """On whose behalf these are saved, each once: what their tenants may hold."""
    loads: tuple[Load, ...] = ()
    cancelled: tuple[str, ...] = ()
    """Requests that ended while their load runs."""
    declined: tuple[tuple[str, PullEnd, Reason | None], ...] = ()
    """Pulls that nothing came of, by the gateway's name of them."""
    is_reset: bool = False
    """Forget all that is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    events: tuple[StoreEvent, ...] = ()
    resident: tuple[tuple[Tier, Manifest], ...] = ()
    """Only where events were dropped: all there is."""
    saved: tuple[bytes, ...] = ()
    """What was offered to the store, kept or not."""
    loaded: tuple[Loaded, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.events or self.resident or self.saved or self.loaded)


def place_in(keys: Sequence[bytes], index: int) -> Place:
    """Which block of which chain one of a prompt is."""
    return Place(key=keys[index], parent=keys[index - 1] if index else b"", index=index)
