"""Tests the way that KV takes between workers: a prefix of the gateway's own is announced by one,
looked up, pulled by another, and must be there.

Each worker that pulls is tested when a life of it begins, and again: later while all is well, soon
while it is not. What fails is an alarm, and a line in the explanation of every route until it
works: pulls would go on being priced and fail one by one. Must never: stop pulls (`core/sources.py`
rests those who fail). Read `examiner.py` for what is tested of one worker alone.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from trunkline.core.directory import Directory
from trunkline.core.epochs import EpochTable
from trunkline.core.fleet import Fleet, WorkerState
from trunkline.core.keys import KeyChain
from trunkline.core.records import Instant, WorkerId
from trunkline.errors import WorkerLost, WorkerTimeout
from trunkline.gateway.contracts import Grant
from trunkline.gateway.errands import Errand, Errands, canary_grant
from trunkline.gateway.namespaces import Namespaces
from trunkline.gateway.pulls import PullDesk, PullOrder, PullPlan, pull_address
from trunkline.observe import EventLog
from trunkline.ports.clock import Clock
from trunkline.ports.worker import PullAddress, Target

BEAT_S = 1.0
REQUEST_MS = 10_000.0
ANNOUNCE_MS = 5_000.0
"""What was computed at the source is known here within this."""
AGAIN_MS, WRONG_AGAIN_MS = 600_000.0, 60_000.0
BLOCKS = 4
_PAUSE_S = 0.05


class _Choice(msgspec.Struct):
    text: str = ""


class _Details(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


@dataclass(slots=True, kw_only=True)
class CanaryParts:
    """What a canary works with."""

    desk: PullDesk
    errands: Errands
    namespaces: Namespaces
    directory: Directory
    fleet: Fleet
    target_of: Callable[[WorkerId], Target | None]
    table: Callable[[], EpochTable]
    served_model: Callable[[], str]
    vocab_size: int
    clock: Clock
    draw: Callable[[int], bytes] = field(repr=False)
    log: EventLog


@dataclass(frozen=True, slots=True)
class _End:
    """A worker that takes part in pulls."""

    state: WorkerState
    target: Target
    address: PullAddress


class _Failed(Exception):
    """Where on its way the canary was lost."""


class PullCanary:
    """Give it a task for `run`. What it finds stands in `desk.degraded`, by destination."""

    def __init__(self, parts: CanaryParts) -> None:
        self._parts = parts
        self._tested: dict[WorkerId, tuple[str, Instant]] = {}
        """Which life of a destination was tested, and until when that is good."""
        self.passed = 0
        self.failed = 0
        """Tests since start."""

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(BEAT_S)
            try:
                await self.look()
            except Exception as error:  # noqa: BLE001 - a mistake of ours is no reason to stop
                self._parts.log.error("pulls.not_tested", cause=error)

    async def look(self) -> None:
        """Test every pair that is due: each worker as destination, the one before it as source."""
        ends = self._ends()
        here = {end.state.worker for end in ends}
        for worker in [known for known in self._tested if known not in here]:
            del self._tested[worker]
            self._parts.desk.degraded.pop(worker, None)
        for index, end in enumerate(ends):
            source = ends[index - 1]
            if source is not end and self._is_due(end):
                await self._test(source, end)

    def _ends(self) -> list[_End]:
        """Workers that could pull from one another now: usable ones, of one layout."""
        parts = self._parts
        usable, _ = parts.fleet.usable(parts.clock.boot())
        found: list[_End] = []
        for state in usable:
            target = parts.target_of(state.worker)
            address = pull_address(target)
            if target is not None and address is not None:
                found.append(_End(state, target, address))
        first = found[0] if found else None
        return [
            end
            for end in found
            if first is not None
            and end.address.layout == first.address.layout
            and end.state.block_tokens == first.state.block_tokens
        ]

    def _is_due(self, end: _End) -> bool:
        tested = self._tested.get(end.state.worker)
        is_same = tested is not None and tested[0] == end.address.incarnation
        return tested is None or not is_same or self._parts.clock.now() >= tested[1]

    async def _test(self, source: _End, end: _End) -> None:
        parts, worker = self._parts, end.state.worker
        why = ""
        try:
            await self._send(source, end)
        except _Failed as failure:
            why = str(failure)
        except (WorkerLost, WorkerTimeout) as error:
            why = str(error)
        pause_ms = WRONG_AGAIN_MS if why else AGAIN_MS
        again_at = Instant(parts.clock.now() + pause_ms)
        self._tested[worker] = (end.address.incarnation, again_at)
        was_degraded = parts.desk.degraded.pop(worker, "")
        if why:
            self.failed += 1
            parts.desk.degraded[worker] = f"pulls to {worker} from {source.state.worker}: {why}"
            parts.log.warning("pulls.degraded", worker=worker, source=source.state.worker, why=why)
            return
        self.passed += 1
        if was_degraded:
            parts.log.info("pulls.restored", worker=worker, source=source.state.worker)

    async def _send(self, source: _End, end: _End) -> None:
        """Announce, look up, pull, verify. Raises _Failed, WorkerLost, WorkerTimeout."""
        parts, size = self._parts, end.state.block_tokens
        grant = canary_grant(parts.table(), parts.served_model(), parts.draw(16).hex())
        if grant is None:
            return  # the model is revoked: nothing is pulled either
        drawn = parts.draw(4 * (BLOCKS * size + 1))
        words = (int.from_bytes(drawn[at : at + 4], "big") for at in range(0, len(drawn), 4))
        tokens = array("I", (word % parts.vocab_size for word in words))
        try:
            keys = parts.namespaces.keys(grant, tokens, size)
            assert keys is not None, "the canary has a scope"
            await self._carry(source, end, grant, tokens, keys.private)
        finally:
            parts.namespaces.forget(grant, size)

    async def _carry(
        self, source: _End, end: _End, grant: Grant, tokens: array[int], keys: KeyChain
    ) -> None:
        parts = self._parts
        first = await self._ask(source, grant, tokens, None)
        await self._announced(source, end, keys)
        stakes = parts.namespaces.stakes(grant, keys.block_tokens)
        assert stakes is not None, "the canary has a scope"
        plan = PullPlan(
            source=source.state.worker,
            destination=end.state.worker,
            first_block=0,
            last_block=BLOCKS,
        )
        ends = {one.state.worker: one.address for one in (source, end)}
        order = parts.desk.order(plan, stakes, keys, tokens, ends.get)
        if order is None:
            raise _Failed("no order can say it")
        second = await self._ask(end, grant, tokens, order)
        details = second.usage.prompt_tokens_details if second.usage else None
        found, wanted = details.cached_tokens if details else 0, BLOCKS * keys.block_tokens
        if found < wanted:
            raise _Failed(f"{found} of {wanted} tokens arrived")
        if [one.text for one in second.choices] != [one.text for one in first.choices]:
            raise _Failed("what arrived gives another answer")

    async def _announced(self, source: _End, end: _End, keys: KeyChain) -> None:
        """The directory has it, and the desk would have it pulled from there."""
        parts = self._parts
        ends_at = parts.clock.now() + ANNOUNCE_MS
        wanted, held, found = BLOCKS * keys.block_tokens, 0, 0
        pulling = [(one.state, one.address) for one in (source, end)]
        while found < wanted:
            if parts.clock.now() > ends_at:
                step = "announced" if held < BLOCKS else "looked up"
                raise _Failed(f"the source's blocks were not {step}")
            await asyncio.sleep(_PAUSE_S)
            match = parts.directory.match(keys)
            held = match.expected[source.state.slot]
            # Nothing of it was predicted: what is expected there has been told of.
            tokens_of = parts.desk.source_tokens(match.expected, keys, pulling, BLOCKS)
            found = tokens_of[source.state.slot]

    async def _ask(
        self, end: _End, grant: Grant, tokens: array[int], order: PullOrder | None
    ) -> _Answer:
        errand = Errand(
            target=end.target,
            block_tokens=end.state.block_tokens,
            grant=grant,
            tokens=tokens,
            timeout_ms=REQUEST_MS,
            order=order,
        )
        status, body = await self._parts.errands.run(errand)
        if status != 200:
            raise _Failed(f"{end.state.worker} answered {status}")
        try:
            return msgspec.json.decode(body, type=_Answer)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _Failed(f"{end.state.worker} answered nonsense") from error
