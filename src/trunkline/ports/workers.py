"""Where the gateway may learn which workers there are: a file, a name system, an orchestrator.

A source tells all that there is each time, never a difference, so that nothing can be missed. Read
`control/roster.py` for who holds that against the fleet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedWorker:
    """One worker, as a source names it."""

    url: str
    """As `--worker-urls` has it."""
    api_key: str = field(default="", repr=False)
    labels: tuple[tuple[str, str], ...] = ()
    model_id: str = ""
    is_draining: bool = False
    """It is still there and wants no new requests."""
    is_found: bool = False
    """Its address was looked up, and not written by an operator: it is checked more strictly."""


class WorkerSource(Protocol):
    """One place that names workers. What it cannot read, or reach, leaves what it told before."""

    @property
    def name(self) -> str:
        """For logs, such as `file /etc/workers.toml`."""
        ...

    async def run(
        self, tell: Callable[[Sequence[NamedWorker]], None], on_trouble: Callable[[str], None]
    ) -> None:
        """Until cancelled: `tell` all workers at first, and whenever they may be others; say with
        `on_trouble` why they could not be learnt.
        """
        ...
