"""The self-test of one worker: when it is due, what came of it, and what that leaves of the worker.

Due when a life of it begins, when an operator asks, and again later while something is wrong or
could not be seen to the end. A test that did not come to its end changes nothing. Must never: hold
a worker up for longer than `HOLD_MS`, or look itself (`parts.examine` does). Read
`core/alignment.py` for what is found.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from trunkline.control.entries import Entries
from trunkline.control.parts import MemberParts
from trunkline.control.views import CheckView, Mode
from trunkline.core.alignment import Belief, Examination, State, Topic
from trunkline.core.feed import WorkerFeed
from trunkline.core.records import WorkerId
from trunkline.core.repair import Pause

HOLD_MS = 3_000.0
"""Where tenants are kept apart, a worker that has just come waits for its test, and no longer."""
ASKED_MS = 60_000.0
"""An operator's question waits so long for its answer."""
_WRONG_PAUSE_MS, _MAX_WRONG_PAUSE_MS = 60_000.0, 600_000.0
_OPEN_PAUSE_MS, _MAX_OPEN_PAUSE_MS = 5_000.0, 300_000.0
_LEAVES = {
    Belief.EXACT: Mode.EXACT,
    Belief.APPROXIMATE: Mode.APPROXIMATE,
    Belief.BLIND: Mode.BLIND,
}
_BELIEVED_LESS = (Mode.EXACT, Mode.DIGEST, Mode.APPROXIMATE, Mode.BLIND)


class SelfTest:
    """One for a worker; `begin` with each of its lives."""

    def __init__(self, name: str, entries: Entries, parts: MemberParts) -> None:
        self._name = name
        self._entries = entries
        self._parts = parts
        self._last: Examination | None = None
        """The last that came to its end in this life."""
        self._unfinished = ""
        self._due = asyncio.Event()
        self._asked: list[asyncio.Future[CheckView]] = []
        self._wrong_pause = Pause(_WRONG_PAUSE_MS, _MAX_WRONG_PAUSE_MS)
        self._open_pause = Pause(_OPEN_PAUSE_MS, _MAX_OPEN_PAUSE_MS)

    # -- what it leaves of the worker --------------------------------------------------------------

    def view(self) -> CheckView:
        return CheckView(examination=self._last, unfinished=self._unfinished)

    def mode(self, told: Mode) -> Mode:
        """How we know what it holds: as it tells, as far as the test leaves that."""
        left = _LEAVES[self._last.belief if self._last else Belief.EXACT]
        if told not in _BELIEVED_LESS:
            return told
        return max(told, left, key=_BELIEVED_LESS.index)

    def reason(self, told: Mode) -> str:
        """Why it is in another mode than it tells; empty where it is not."""
        last = self._last
        return last.reason if last is not None and self.mode(told) is not told else ""

    @property
    def verdict(self) -> str:
        """What is worst of what was found; empty where nothing is wrong."""
        return self._last.reason if self._last else ""

    @property
    def told_block_tokens(self) -> int | None:
        """The block size that its events tell, where it is another than it was joined with."""
        return self._last.block_tokens if self._last else None

    @property
    def holds(self) -> bool:
        """Whether a worker that comes now waits for its test."""
        return self._parts.keeps_apart and self._is_on

    @property
    def _is_on(self) -> bool:
        return self._parts.examine is not None and not self._parts.health.disable_self_test

    # -- when --------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A new life: what was found of an earlier one says nothing about it."""
        self._last, self._unfinished = None, ""
        self.renew()

    def renew(self) -> None:
        """It may be another than it was: test it at once. Until then the last test holds."""
        self._wrong_pause.reset()
        self._open_pause.reset()
        if self._is_on:
            self._due.set()

    async def ask(self) -> CheckView:
        """Test it now, and say what came of it; or why that takes too long."""
        future: asyncio.Future[CheckView] = asyncio.get_running_loop().create_future()
        self._asked.append(future)
        self._due.set()
        try:
            async with asyncio.timeout(ASKED_MS / 1e3):
                return await future
        except TimeoutError:
            late = f"no answer within {ASKED_MS / 1e3:g} s"
            return CheckView(examination=self._last, unfinished=late)
        finally:
            with contextlib.suppress(ValueError):
                self._asked.remove(future)

    async def run(
        self,
        ranks: Callable[[], Sequence[tuple[WorkerId, WorkerFeed | None]]],
        adapters: Callable[[], Sequence[str]],
        on_found: Callable[[], None],
    ) -> None:
        """While the worker is in the fleet; until cancelled. `on_found` is called when its mode may
        be another.
        """
        examine = self._parts.examine
        if examine is None:
            return
        pause_ms: float | None = None
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if pause_ms is None else pause_ms / 1e3):
                    await self._due.wait()
            self._due.clear()
            found = await examine(ranks(), adapters())
            pause_ms = self._take(found)
            on_found()
            self._answer()

    async def hold(self) -> None:
        """Let it in when its test takes too long."""
        await asyncio.sleep(HOLD_MS / 1e3)
        if any(state.is_unchecked for state in self._entries.states()):
            self._parts.log.warning("worker.unchecked", worker=self._name, held_ms=HOLD_MS)
            self._entries.let_in()

    def _answer(self) -> None:
        for future in self._asked:
            if not future.done():
                future.set_result(self.view())

    # -- what came of it ---------------------------------------------------------------------------

    def _take(self, found: Examination) -> float | None:
        """Note it and carry it out; after how many ms it is due again, None for not by itself."""
        if found.unfinished:
            if found.unfinished != self._unfinished:
                self._parts.log.warning(
                    "worker.check_unfinished", worker=self._name, why=found.unfinished
                )
            self._unfinished = found.unfinished
            self._entries.let_in()
            return self._open_pause.take()
        self._unfinished = ""
        self._open_pause.reset()
        self._say(found)
        self._last = found
        self._carry_out(found)
        return self._wrong_pause.take() if found.is_wrong else None

    def _carry_out(self, found: Examination) -> None:
        is_blind = found.belief is Belief.BLIND
        for worker in self._entries.workers:
            self._parts.directory.bar(worker, is_blind)
        self._entries.set_leaking(is_leaking=found.leaks and self._parts.keeps_apart)
        self._entries.let_in()

    def _say(self, found: Examination) -> None:
        """What differs from the last test, a line a finding."""
        log, before = self._parts.log, self._last.findings if self._last else ()
        for finding in found.findings:
            if finding.state is not State.WRONG or finding in before:
                continue
            write = log.error if finding.topic is Topic.ISOLATION else log.warning
            write(  # an event for each topic: of one event only a line a second is written
                f"alignment.{finding.topic.value.replace(' ', '_')}",
                worker=self._name,
                expected=finding.expected,
                found=finding.found,
                remedy=finding.remedy,
            )
        if not found.is_wrong and (self._last is None or self._last.is_wrong):
            log.info("worker.aligned", worker=self._name)
