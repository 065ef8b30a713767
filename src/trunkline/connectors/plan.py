"""The scheduler's half: what each step is to copy into the store, and what requests wait for.

    begin ─► matched (asked again and again) ─► allocated: a load ─► ... ─► learn: it is over
                                           └─► step: blocks that it fills are saved ─► finished

The store is in another process. What is in it is known from reports, so it may have changed
meanwhile: then a load brings less, and the engine computes the rest. Requests without a ticket, and
those whose tokens do not say everything (adapters, media, embeddings), are left alone.

Must never: wait, answer with the last token of a prompt, or bring the same block for two requests
at a time. Read `keeper.py` for the other half.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

from trunkline.connectors.messages import Load, PullWish, Save, StepPlan, StepReport, place_in
from trunkline.connectors.wishes import Wishes, read_wishes
from trunkline.core.records import Tier
from trunkline.core.transfer import KV_KEY_BYTES, PullEnd, Reason, kv_chain
from trunkline.kv.notices import Note, Notices
from trunkline.kv.records import Manifest, Owner
from trunkline.kv.tickets import Ticket
from trunkline.ports.publisher import BlockEvent

MAX_LOADS = 8
"""That run at a time; a further request is computed at once."""
LOADS_A_REQUEST = 4
"""One that is preempted comes again, and so does one whose load failed as a whole."""
MAX_SAVES = 1_024
"""Blocks copied at the end of one step; the rest of a prompt follows with its next steps."""


_WORTH_SAYING = {1, 10, 100, 1_000, 10_000}
_log = logging.getLogger("vllm.trunkline")  # the engine shows what is below its own name


class EngineRequest(Protocol):
    """What is looked at of an engine's own record of a request."""

    request_id: str
    cache_salt: str | None
    num_computed_tokens: int
    kv_transfer_params: dict[str, Any] | None
    lora_request: Any  # the engine's own
    mm_features: Any
    prompt_embeds: Any
    resumable: bool

    @property
    def all_token_ids(self) -> Sequence[int]: ...


@dataclass(slots=True, kw_only=True)
class PlanFigures:
    """Plain counters since start."""

    unread: int = 0
    """Requests whose ticket or order made no sense."""
    busy: int = 0
    """Requests that were computed since as many loads ran as may."""


@dataclass(slots=True, eq=False, kw_only=True)
class _Prompt:
    """One request with a ticket."""

    request: EngineRequest
    salt: str
    wishes: Wishes
    owner: Owner
    keys: list[bytes] = field(default_factory=list[bytes])
    offered: int = 0
    """Leading blocks that were offered to the store."""
    loads_left: int = LOADS_A_REQUEST
    found: tuple[int, int] = (0, 0)
    """First and last block (exclusive) of the newest answer."""
    wish: PullWish | None = None
    """What may still be pulled for it."""
    verdict: tuple[PullEnd, Reason | None] = (PullEnd.REJECTED, Reason.BUSY)
    """What becomes of the wish, should nothing be pulled."""


class Planner:
    """Belongs to the scheduler's thread."""

    def __init__(
        self,
        *,
        block_tokens: int,
        transfer_key: bytes,
        max_loads: int = MAX_LOADS,
        max_saves: int = MAX_SAVES,
    ) -> None:
        self.figures = PlanFigures()
        self._block_tokens = block_tokens
        self._transfer_key = transfer_key
        self._max_loads = max_loads
        self._max_saves = max_saves
        self._resident: Sequence[tuple[Tier, Manifest]] = ()
        self._notices = Notices(block_tokens, lambda: self._resident)
        self._events: list[BlockEvent] = []
        self._prompts: dict[str, _Prompt] = {}
        self._running: dict[str, Load] = {}
        self._coming: dict[bytes, str] = {}
        """Blocks that are being brought, and for which request."""
        self._loads: list[Load] = []
        self._cancelled: list[str] = []
        self._declined: list[tuple[str, PullEnd, Reason | None]] = []
        self._is_reset = False

    # -- one request -------------------------------------------------------------------------------

    def begin(self, request: EngineRequest) -> None:
        """It is new here."""
        try:
            wishes = read_wishes(request.kv_transfer_params, self._transfer_key)
        except ValueError as error:
            self.figures.unread += 1
            if self.figures.unread in _WORTH_SAYING:
                _log.warning("trunkline: what a gateway says of a request is not read: %s", error)
            return
        if wishes is None or not wishes.ticket.ns or not _is_told_by_tokens(request):
            return
        ticket = wishes.ticket
        self._prompts[request.request_id] = _Prompt(
            request=request,
            salt=request.cache_salt or "",
            wishes=wishes,
            owner=Owner(
                ns=ticket.ns,
                subjects=ticket.subjects,
                epochs=ticket.epochs,
                domain=ticket.tenant,
            ),
            wish=wishes.pull,
        )

    def matched(self, request_id: str, computed_tokens: int) -> int | None:
        """How many tokens can be brought behind those that are on the device; None: ask again, they
        are being brought for somebody else.
        """
        prompt = self._prompts.get(request_id)
        if prompt is None or not prompt.loads_left:
            return 0
        self._extend(prompt)
        here = computed_tokens // self._block_tokens
        limit = (len(prompt.request.all_token_ids) - 1) // self._block_tokens
        limit = min(limit, len(prompt.keys))
        if here < limit and prompt.keys[here] in self._coming:
            return None
        held = here
        while held < limit and self._notices.is_told(prompt.keys[held], Tier.HOST):
            held += 1
        end = max(held, self._reach(prompt, held, limit))
        if end == here:
            return 0
        if len(self._running) >= self._max_loads:
            self.figures.busy += 1
            return 0
        prompt.found = (here, end)
        return (end - here) * self._block_tokens

    def allocated(self, request_id: str, block_ids: Sequence[int], external_tokens: int) -> None:
        """The engine has made room for so many of the tokens that were found."""
        prompt = self._prompts.get(request_id)
        if prompt is None or not external_tokens:
            return
        assert request_id not in self._running, "one load at a time for a request"
        first, found_end = prompt.found
        end = first + external_tokens // self._block_tokens
        assert first < end <= found_end, (first, end, found_end)
        wish, grant = prompt.wish, prompt.wishes.grant
        known = end
        if wish is not None and grant is not None:
            known = min(len(prompt.keys), max(end, grant.first_block + grant.block_count))
        load = Load(
            request_id=request_id,
            ticket=prompt.wishes.ticket,
            keys=tuple(prompt.keys[:known]),
            block_ids=tuple(block_ids[:end]),
            first=first,
            wish=wish,
        )
        prompt.wish = None
        prompt.loads_left -= 1
        self._running[request_id] = load
        for index in range(known):  # a pull may publish what lies before and behind as well
            self._notices.expect(prompt.keys[index], self._noted(prompt, index))
        for index in load.wanted:
            self._coming[prompt.keys[index]] = request_id
        self._loads.append(load)

    def finished(self, request_id: str) -> None:
        """It ended, or its client left."""
        prompt = self._prompts.pop(request_id, None)
        if request_id in self._running:
            self._cancelled.append(request_id)
        if prompt is not None:
            self._decline(prompt)

    # -- one step ----------------------------------------------------------------------------------

    def step(
        self, scheduled: Mapping[str, int], block_ids_of: Callable[[str], Sequence[int]]
    ) -> StepPlan:
        """What the step is to do beside computing: `scheduled` says how many tokens of each request
        it computes.
        """
        saves: list[Save] = []
        savers: dict[str, Ticket] = {}
        for request_id, tokens in scheduled.items():
            prompt = self._prompts.get(request_id)
            if prompt is not None:
                self._decline(prompt)
                count = len(saves)
                self._save(prompt, tokens, block_ids_of, saves)
                if len(saves) > count:
                    savers[prompt.owner.domain] = prompt.wishes.ticket
        plan = StepPlan(
            saves=tuple(saves),
            savers=tuple(savers.values()),
            loads=tuple(self._loads),
            cancelled=tuple(self._cancelled),
            declined=tuple(self._declined),
            is_reset=self._is_reset,
        )
        self._loads, self._cancelled, self._declined = [], [], []
        self._is_reset = False
        return plan

    def learn(self, report: StepReport) -> None:
        """What the worker did."""
        self._resident = report.resident
        self._events.extend(self._notices.take(report.events))
        self._notices.settle(report.saved)
        for loaded in report.loaded:
            load = loaded.load
            del self._running[load.request_id]
            self._notices.settle(load.keys)
            for index in load.wanted:
                self._coming.pop(load.keys[index], None)

    def take_events(self) -> list[BlockEvent]:
        """What came to the store and went, since the last call."""
        events, self._events = self._events, []
        return events

    def reset(self) -> None:
        """All that is kept is to be forgotten, with the next step."""
        self._is_reset = True

    # -- inside ------------------------------------------------------------------------------------

    def _reach(self, prompt: _Prompt, held: int, limit: int) -> int:
        """How far a pull would bring it, where `held` blocks need none."""
        wish, grant = prompt.wish, prompt.wishes.grant
        if wish is None:
            return 0
        if grant is None:
            prompt.verdict = (PullEnd.REJECTED, Reason.GRANT)
            return 0
        last = min(grant.first_block + grant.block_count, limit)
        if last <= held:
            prompt.verdict = (PullEnd.PUBLISHED, None)
            return 0
        if held < grant.first_block:
            prompt.verdict = (PullEnd.REJECTED, Reason.CHAIN)
            return 0
        prompt.verdict = (PullEnd.REJECTED, Reason.BUSY)
        return last

    def _decline(self, prompt: _Prompt) -> None:
        """It is computed, or over: nothing is pulled for it any more."""
        if prompt.wish is not None:
            end, reason = prompt.verdict
            self._declined.append((prompt.wish.name, end, reason))
            prompt.wish = None

    def _save(
        self,
        prompt: _Prompt,
        tokens: int,
        block_ids_of: Callable[[str], Sequence[int]],
        saves: list[Save],
    ) -> None:
        """Blocks whose tokens are known and that are full when the step is over. What the device
        had already is offered as well, where the store does not have it: a block needs the one
        before it.
        """
        self._extend(prompt)
        request = prompt.request
        full = min((request.num_computed_tokens + tokens) // self._block_tokens, len(prompt.keys))
        room = self._max_saves - len(saves)
        if room <= 0:
            return
        wanted = (
            index
            for index in range(prompt.offered, full)
            if not self._notices.is_told(prompt.keys[index], Tier.HOST)
        )
        chosen = list(islice(wanted, room))
        prompt.offered = max(prompt.offered, chosen[-1] + 1 if len(chosen) == room else full)
        if not chosen:
            return
        block_ids = block_ids_of(request.request_id)
        for index in chosen:
            self._notices.expect(prompt.keys[index], self._noted(prompt, index))
            saves.append(
                Save(
                    place=place_in(prompt.keys, index),
                    owner=prompt.owner,
                    block_id=block_ids[index],
                )
            )

    def _extend(self, prompt: _Prompt) -> None:
        """Name the blocks that became full."""
        known, size = len(prompt.keys), self._block_tokens
        ids = prompt.request.all_token_ids
        full = len(ids) // size
        if full <= known:
            return
        packed = kv_chain(
            prompt.salt,
            array("I", ids[known * size : full * size]),
            size,
            prompt.keys[-1] if known else None,
        )
        prompt.keys += (packed[i : i + KV_KEY_BYTES] for i in range(0, len(packed), KV_KEY_BYTES))

    def _noted(self, prompt: _Prompt, index: int) -> Note:
        start = index * self._block_tokens
        ids = prompt.request.all_token_ids[start : start + self._block_tokens]
        return Note(tokens=array("I", ids), salt=prompt.salt)


def _is_told_by_tokens(request: EngineRequest) -> bool:
    """Whether salt and tokens name its KV completely, and do not change while it runs."""
    is_plain = not (request.lora_request or request.mm_features or request.resumable)
    return is_plain and request.prompt_embeds is None and bool(request.cache_salt)
