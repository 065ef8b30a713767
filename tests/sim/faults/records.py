"""The audit log of each gateway: the real one, over disks in memory, and what it must say (I10).

    Shelf    one place on a disk, which outlives processes, and may be away for a while
    Papers   what a gateway's lives have: two shelves, and the second place of checkpoints
    I10      an acknowledged change has its records, a change that grants has its intent first;
             where a receipt says `pending`, or its gateway died, the record comes later; every
             revision has exactly one, in order; the chain verifies

Read `gate.py` for who writes, `control/ledger.py` for the order that each change keeps.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trunkline.adapters.signing import Ed25519Signer
from trunkline.control.audit import REGISTRY_ACTION, AuditLog, AuditOrigin
from trunkline.control.receipts import AuditState, Receipt
from trunkline.core.audit import Checkpoint, Head, Kind, read_head, read_record, verify
from trunkline.ports.audit import Segment, SinkDown
from trunkline.ports.clock import Clock

if TYPE_CHECKING:
    from faults.gate import Gate
    from faults.world import World

_RAISED = f"{REGISTRY_ACTION}epoch-raised"
APPEND_S = 0.002
"""Until a line is on the disk, and said to be."""
SIGNER = Ed25519Signer(bytes(range(32)))


class Shelf:
    """`ports.AuditSink` on a disk that may be away."""

    def __init__(self, name: str, *, is_slow: bool) -> None:
        """`is_slow`: what is cut off was not written yet; else it was, and nobody said so."""
        self.name = name
        self._is_slow = is_slow
        self.lines: list[bytes] = []
        self.aside_count = 0
        self.is_down = False

    async def open(self) -> Head:
        self._require_up()
        return read_head(self.lines[-1]) if self.lines else Head()

    async def append(self, lines: Sequence[bytes], head: Head) -> None:
        self._require_up()
        assert read_head(lines[-1]) == head, "lines end where it is said"
        if self._is_slow:
            await asyncio.sleep(APPEND_S)
            self._require_up()
            self.lines += lines
        else:
            self.lines += lines
            await asyncio.sleep(APPEND_S)
            self._require_up()

    async def rewind(self, head: Head) -> None:
        self._require_up()
        del self.lines[head.seq :]

    async def read(self, after_seq: int, limit: int) -> list[bytes]:
        self._require_up()
        return self.lines[after_seq : after_seq + limit]

    async def closed_segments(self) -> list[Segment]:
        return []

    async def drop_segment(self, segment: Segment) -> None:
        raise SinkDown(f"{self.name} has no segment {segment.first_seq}")

    async def set_aside(self) -> Head:
        self._require_up()
        self.aside_count += 1
        self.lines.clear()
        return Head()

    async def check(self) -> None:
        self._require_up()

    async def close(self) -> None:
        pass

    def _require_up(self) -> None:
        if self.is_down:
            raise SinkDown(f"{self.name} is away")


class _Kept:
    """`ports.CheckpointKeeper`."""

    name = "elsewhere"

    def __init__(self) -> None:
        self.checkpoints: list[Checkpoint] = []

    async def keep(self, checkpoint: Checkpoint) -> None:
        self.checkpoints.append(checkpoint)

    async def recent(self, limit: int) -> list[Checkpoint]:
        return self.checkpoints[-limit:]


@dataclass(slots=True)
class Papers:
    """What is still there when a gateway begins anew."""

    shelves: tuple[Shelf, Shelf] = field(
        default_factory=lambda: (Shelf("a", is_slow=False), Shelf("b", is_slow=True))
    )
    keeper: _Kept = field(default_factory=_Kept)

    def log(self, name: str, life: int, clock: Clock) -> AuditLog:
        """The log of a new life."""
        return AuditLog(
            self.shelves,
            signer=SIGNER,
            keeper=self.keeper,
            clock=clock,
            origin=AuditOrigin(host=name, boot_id=str(life), audit_key=bytes(32)),
        )

    def records(self) -> list[dict[str, Any]]:
        """Of the longer shelf."""
        return [read_record(line) for line in max(self.shelves, key=lambda s: len(s.lines)).lines]


class Records:
    """I10, of one run."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._acked: list[tuple[str, Receipt]] = []
        """By which gateway, and what it said."""
        self._enabled: Counter[str] = Counter()

    def acked(self, gate: Gate, receipt: Receipt) -> None:
        """A receipt was given."""
        self._acked.append((gate.name, receipt))
        counts = self._world.seen.counts
        if receipt.audit is AuditState.PENDING:
            counts["an ack before its audit record"] += 1
        elif receipt.rev not in _outcomes(gate.papers.records()):
            told = f"the receipt of revision {receipt.rev} at {gate.name}"
            self._world.violate("I10", f"{told} says that its outcome is recorded")

    def enabled(self, gate: Gate, rev: int | None) -> None:
        """A tenant was let in again: the intent is on a disk since before that."""
        if rev is None:
            return  # it was not barred
        self._enabled[gate.name] += 1
        actions = [record["action"] for record in gate.papers.records()]
        if actions.count("wanted.enable") < self._enabled[gate.name]:
            self._world.violate("I10", f"revision {rev} at {gate.name} has no intent")

    def is_at_rest(self) -> None:
        for gate in self._world.gates.values():
            self._check(gate)
        for name, receipt in self._acked:
            if receipt.rev not in _outcomes(self._world.gates[name].papers.records()):
                self._world.violate("I10", f"revision {receipt.rev} at {name} has no outcome")

    def _check(self, gate: Gate) -> None:
        world, papers = self._world, gate.papers
        for shelf in papers.shelves:
            found = verify(
                shelf.lines, checkpoints=papers.keeper.checkpoints, is_signed=SIGNER.is_signed
            )
            if found.fault is not None or found.newer:
                world.violate("I10", f"log {shelf.name} of {gate.name}: {found}")
            if shelf.aside_count:
                world.violate("I10", f"log {shelf.name} of {gate.name} was set aside")
        records = papers.records()
        told = [r["rev"] for r in records if r["action"].startswith(REGISTRY_ACTION)]
        if told != list(range(1, gate.registry.rev + 1)):
            world.violate("I10", f"{gate.name} is at {gate.registry.rev}, recorded are {told}")
        raised = {r["rev"] for r in records if r["action"] == _RAISED}
        if lacking := sorted(raised - _outcomes(records)):
            world.violate("I10", f"at {gate.name} nothing came of revisions {lacking}")


def _outcomes(records: list[dict[str, Any]]) -> set[int]:
    """Revisions of which it is recorded what came of them, and not only that nobody knows."""
    outcomes = (r for r in records if r["kind"] == Kind.OUTCOME.value and r.get("counts"))
    return {r["rev"] for r in outcomes if r["action"] in ("revoke", "invalidate")}
