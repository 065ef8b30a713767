"""Glue of one decision: prompt -> tokens -> keys -> directory -> router, and the books behind it.

Everything that decides lives in `core`; here it is fed and its answers are turned into what the
exchange sends. One attempt is one ticket in the load book, from `pick` to `ended`, whatever happens
in between. Must never: take a scope, a salt or a worker from the client. Read `exchange.py` for the
caller.
"""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Sequence
from dataclasses import replace

from trunkline.core.cost import calibrate
from trunkline.core.debts import Lending
from trunkline.core.decision import Decision
from trunkline.core.directory import Directory
from trunkline.core.fleet import Fleet, WorkerState
from trunkline.core.hearsay import Hearsay
from trunkline.core.identity import DIGEST_BYTES
from trunkline.core.keys import KeyChain
from trunkline.core.records import Instant, WorkerId
from trunkline.core.routing import Router, RouteRequest
from trunkline.core.transfer import MAX_GRANT_BLOCKS
from trunkline.errors import NoWorker
from trunkline.gateway.accounts import Accounts
from trunkline.gateway.contracts import Grant, InferenceRequest, Pick
from trunkline.gateway.deadline import require_time
from trunkline.gateway.homes import home_key
from trunkline.gateway.namespaces import Namespaces, PromptKeys
from trunkline.gateway.patience import first_token_ms
from trunkline.gateway.pulls import PullDesk, PullOrder, plan_of, pull_address
from trunkline.gateway.receipts import Receipts
from trunkline.gateway.response_ids import ResponseIds
from trunkline.gateway.telling import require_apart, salted, told_headers, transfer_params
from trunkline.gateway.tickets import Ticket, Tickets, first_owed, reusable_blocks
from trunkline.gateway.tokenise import PromptTokens, too_long
from trunkline.ports.clock import Clock
from trunkline.ports.worker import AttemptEnd, PullAddress, Target

MAX_NOTES = 8
"""Lines beside a decision; a fleet with more trouble is explained well enough by these."""
PANIC = "more than half of the workers are in doubt, so none was left out for that"


class FleetPicker:
    """The `Picker` of the data plane, over one fleet and one directory."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        directory: Directory,
        router: Router,
        prompts: PromptTokens,
        namespaces: Namespaces,
        clock: Clock,
        receipts: Receipts,
        desk: PullDesk | None = None,
    ) -> None:
        """Without a `desk` nothing is pulled."""
        self.desk = desk
        self.hearsay: Hearsay | None = None
        """What other gateways expect; None without any."""
        self.accounts = Accounts()
        self.receipts = receipts
        self._fleet = fleet
        self._directory = directory
        self._router = router
        self._prompts = prompts
        self._namespaces = namespaces
        self._responses = ResponseIds(fleet, namespaces)
        self._clock = clock
        self._targets: dict[WorkerId, Target] = {}
        self._tickets = Tickets()
        self._max_tokens: int | None = None
        """What every worker that says so can take, as `/v1/models` lists it."""

    def add_target(self, target: Target) -> None:
        """Make a worker of the fleet reachable; replaces what was known of it."""
        self._targets[target.worker] = target
        self._measure()

    def target(self, worker: WorkerId) -> Target | None:
        return self._targets.get(worker)

    def remove_target(self, worker: WorkerId) -> None:
        self._targets.pop(worker, None)
        if self.desk is not None:
            self.desk.forget(worker)
        self._measure()
        self.accounts.forget(worker)

    # -- the Picker's three verbs ----------------------------------------------------------------

    def pick(self, request: InferenceRequest, tried: frozenset[WorkerId]) -> Pick | Awaitable[Pick]:
        """Choose a worker. Awaitable only while a long prompt is tokenised. Raises NoWorker,
        ClientError for a prompt that is too long, ValueError.
        """
        reading = self.read(request)
        if reading is None:
            return self._pick(request, tried)
        return self._pick_later(request, reading, tried)

    def first_byte(self, pick: Pick) -> None:
        ticket: Ticket = pick.ticket
        now = self._clock.now()
        ticket.first_byte_at = now
        self._tickets.prefilled(ticket)
        if not ticket.is_stream:
            return  # its first byte is nearly its last, and says nothing about prefill
        ticket.state.queue.first_token(ticket.number, now)
        if not ticket.tells_speed:
            return
        candidates, choice = ticket.decision.candidates, ticket.decision.choice
        predicted_ms = candidates.queue_ms[choice] + ticket.decision.miss_ms
        observed_ms = now - ticket.sent_at
        calibrate(ticket.state.queue, predicted_ms=predicted_ms, observed_ms=observed_ms)
        self._fleet.alarms.timed(ticket.worker, predicted_ms, observed_ms, now)
        if ticket.target.pace is not None:
            ticket.target.pace.first_token(predicted_ms=predicted_ms, observed_ms=observed_ms)

    def pulled(self, pick: Pick, told: bytes) -> None:
        ticket: Ticket = pick.ticket
        order, ticket.pull = ticket.pull, None
        if order is not None and self.desk is not None and ticket.keys is not None:
            self.desk.learn(order, ticket.keys, told)

    def told_of_pulls(self, worker: str, ended: Sequence[tuple[str, bytes]], lost: int) -> None:
        """A lease of a worker says how pulls ended, and how many tokens it computed that its engine
        had counted as reused.
        """
        self.accounts.recomputed_tokens += lost
        for name, told in ended:
            if self.desk is not None:
                self.desk.told(worker, name, told)

    def ended(self, pick: Pick, end: AttemptEnd, cached_tokens: int | None) -> None:
        ticket: Ticket = pick.ticket
        now = self._clock.now()
        was_open = ticket.state.queue.end(ticket.number, now)
        assert was_open, f"attempt {ticket.number} on {pick.worker} ended twice"
        if end is AttemptEnd.UNHEARD:
            self._tickets.prefilled(ticket)  # it was over before its answer was
        self._tickets.close(ticket)
        ticket.target.on_ended(end)
        self.receipts.ended(ticket.decision, ticket.outcome(end, cached_tokens, now))
        if ticket.is_alone and cached_tokens:
            self.accounts.false_hit(ticket.decision, cached_tokens)
        if ticket.keys is None:
            return
        is_good = end is AttemptEnd.COMPLETE and ticket.has_first_byte
        self._end_pull(ticket, ticket.keys, is_good, cached_tokens)
        if end is AttemptEnd.COMPLETE and cached_tokens is not None:
            self._account(ticket, ticket.keys.block_tokens, cached_tokens)
        is_refused = end is AttemptEnd.COMPLETE and not ticket.has_first_byte
        if is_refused or not ticket.is_prefilled:
            # Refused, failed or given up before anything was computed. What fails later had been
            # computed: if the worker died of it, its health or its events will say so.
            self._retract(ticket, ticket.keys)

    def _end_pull(
        self, ticket: Ticket, keys: KeyChain, is_good: bool, cached_tokens: int | None
    ) -> None:
        """The answer is over, and its head said nothing of the pull that was ordered."""
        order, ticket.pull = ticket.pull, None
        if order is not None and self.desk is not None:
            self.desk.answered(order, keys, cached_tokens, is_good=is_good)

    # -- what a line in front of it asks ---------------------------------------------------------

    def read(self, request: InferenceRequest) -> Awaitable[None] | None:
        """Turn the prompt into tokens, once for all attempts: `pick` answers at once from then on.
        Awaitable while that takes long. Raises as `pick` does for a prompt.
        """
        if request.prompt is None:
            return None
        tokens = self._prompts.tokens(request)
        if tokens is None:
            return self._read_later(request)
        self._has_read(request, tokens)
        return None

    def settle(self) -> None:
        """Prefills that nothing was heard of, and that were predicted to be over by now, are."""
        self._tickets.settle(self._clock.now())

    def uncached_tokens(self, pick: Pick) -> int:
        """What the worker of this attempt is expected to compute."""
        decision: Decision = pick.ticket.decision
        return decision.prompt_tokens - decision.expected_tokens

    async def preview(self, request: InferenceRequest) -> Decision:
        """What `pick` would choose now; nothing is charged or remembered. Raises as it does."""
        reading = self.read(request)
        if reading is not None:
            await reading
        return self._decide(request, frozenset(), self._clock.now())[0]

    # -- inside ----------------------------------------------------------------------------------

    def _measure(self) -> None:
        told = (target.max_model_len for target in self._targets.values())
        self._max_tokens = min((most for most in told if most is not None), default=None)

    async def _read_later(self, request: InferenceRequest) -> None:
        self._has_read(request, await self._prompts.tokens_later(request))

    def _has_read(self, request: InferenceRequest, tokens: array[int]) -> None:
        asked, request.prompt = request.prompt, tokens  # a second attempt does not tokenise again
        is_beyond = self._max_tokens is not None and len(tokens) > self._max_tokens
        if self._max_tokens is not None and is_beyond and not self._prompts.is_guess(request):
            raise too_long(asked, len(tokens), self._max_tokens)

    async def _pick_later(
        self, request: InferenceRequest, reading: Awaitable[None], tried: frozenset[WorkerId]
    ) -> Pick:
        await reading
        return self._pick(request, tried)

    def _pick(self, request: InferenceRequest, tried: frozenset[WorkerId]) -> Pick:
        self.accounts.read(request)
        now = self._clock.now()
        self._tickets.settle(now)
        decision, of_size, sources = self._decide(request, tried, now)
        require_time(request, decision, now)
        return self._commit(request, decision, of_size, sources, now)

    def _decide(
        self, request: InferenceRequest, tried: frozenset[WorkerId], now: Instant
    ) -> tuple[Decision, dict[int, PromptKeys], list[int] | None]:
        """Changes nothing. Raises NoWorker."""
        tokens = request.prompt if isinstance(request.prompt, array) else None
        of_size = self._keys(request.grant, tokens)
        matched, sources, lending = (
            self._matched(request, len(tokens), of_size)
            if tokens and of_size
            else (None, None, None)
        )
        decision = self._router.route(
            RouteRequest(
                request_id=request.request_id,
                prompt_tokens=len(tokens or ()) + request.further_tokens,
                matched_tokens=matched,
                source_tokens=sources,
                owed=lending,
                most_pulled_tokens=MAX_GRANT_BLOCKS * min(of_size, default=1),
                home_key=home_key(of_size, request),
            ),
            now=now,
            boot=self._clock.boot(),
            tried=tried,
            lacking=self._lacking(request.grant.adapter) | self._responses.elsewhere(request),
        )
        if decision is None:
            raise NoWorker("no worker is usable: all are down, draining or were tried")
        if notes := self._notes():
            decision = replace(decision, notes=notes[:MAX_NOTES])
        return decision, of_size, sources

    def _notes(self) -> tuple[str, ...]:
        panic = (PANIC,) if self._fleet.is_panicking else ()
        return panic if self.desk is None else (*panic, *self.desk.degraded.values())

    def _lacking(self, adapter: str) -> frozenset[WorkerId]:
        """Workers that do not serve this adapter; none for the model itself."""
        if not adapter:
            return frozenset()
        known = ((worker, target.models) for worker, target in self._targets.items())
        return frozenset(worker for worker, models in known if models and adapter not in models)

    def _keys(self, grant: Grant, tokens: array[int] | None) -> dict[int, PromptKeys]:
        """Those for each block size in the fleet, nearly always one; none where nothing may be
        reused.
        """
        if tokens is None or grant.scope is None:
            return {}
        of_size = ((b, self._namespaces.keys(grant, tokens, b)) for b in self._fleet.block_sizes())
        return {block_tokens: keys for block_tokens, keys in of_size if keys is not None}

    def _matched(
        self, request: InferenceRequest, token_count: int, of_size: dict[int, PromptKeys]
    ) -> tuple[list[int], list[int] | None, Lending | None]:
        """Leading tokens at each slot, those that can be pulled from there, and what says which of
        them are still to be computed. The last token always is, so the whole never matches.
        """
        started = self._clock.now()
        merged: list[int] = []
        sources: list[int] | None = None
        lending: Lending | None = None
        for block_tokens, keys in of_size.items():
            limit = reusable_blocks(token_count, block_tokens)
            if self.hearsay is not None:
                self.hearsay.asked(keys.private.namespace.tag, started)
            match = self._directory.match(keys.private)
            counts = [(b if b < limit else limit) * block_tokens for b in match.expected]
            can_pull = self._prompts.is_exact_for(request)
            if self.desk is not None and can_pull and len(of_size) == 1 and keys.zoned is None:
                pulling, lendable = self._pulling(), match.expected
                if self.hearsay is not None:
                    states = [state for state, _ in pulling]
                    lendable = self.hearsay.lendable(match, keys.private, states, started)
                sources = self.desk.source_tokens(lendable, keys.private, pulling, limit)
                lending = self._lending(keys.private)
            if keys.zoned is not None:
                self._prefer_public(keys, keys.zoned, counts, limit)
            merged = [max(a, b) for a, b in zip(merged, counts, strict=True)] if merged else counts
        self.accounts.lookup.observe((self._clock.now() - started) / 1_000.0)
        return merged, sources, lending

    def _lending(self, keys: KeyChain) -> Lending:
        def lends_owed(worker: WorkerId) -> bool:
            address = pull_address(self._targets.get(worker))
            return address is not None and address.lends_owed

        return Lending(
            keys=keys,
            block_tokens=keys.block_tokens,
            debts_of=self._tickets.owing,
            lends_owed=lends_owed,
        )

    def _pulling(self) -> list[tuple[WorkerState, PullAddress]]:
        """Workers that take part in pulls."""
        states = ((state, self._targets.get(state.worker)) for state in self._fleet.states())
        found = ((state, pull_address(target)) for state, target in states)
        return [(state, address) for state, address in found if address is not None]

    def _order(
        self,
        request: InferenceRequest,
        decision: Decision,
        keys: KeyChain | None,
        sources: list[int] | None,
    ) -> PullOrder | None:
        tokens = request.prompt
        if keys is None or not isinstance(tokens, array):
            return None
        lending = self._lending(keys)

        def tokens_at(worker: WorkerId) -> int:
            state = self._fleet.get(worker)
            there = 0 if sources is None or state is None else sources[state.slot]
            return there if state is None else lending.there_tokens(state, there)

        plan = plan_of(decision, keys.block_tokens, tokens_at)
        if plan is None:
            return None
        stakes = self._namespaces.stakes(request.grant, keys.block_tokens)
        if self.desk is None or stakes is None:
            return None
        return self.desk.order(
            plan, stakes, keys, tokens, lambda worker: pull_address(self._targets.get(worker))
        )

    def _prefer_public(
        self, keys: PromptKeys, zoned: KeyChain, counts: list[int], limit: int
    ) -> None:
        """Workers that have the whole public beginning, and no more of the caller's own: they are
        asked for it.
        """
        match = self._directory.match(zoned)
        for state in self._fleet.states():
            target = self._targets.get(state.worker)
            if target is None or target.agent is None or not target.agent.has_salt_regions:
                continue
            is_ready = match.device[state.slot] >= zoned.public_blocks
            tokens = min(match.expected[state.slot], limit) * zoned.block_tokens
            is_of_size = state.block_tokens == zoned.block_tokens
            if is_of_size and is_ready and tokens >= counts[state.slot]:
                counts[state.slot] = tokens
                keys.zoned_slots.add(state.slot)

    def _commit(
        self,
        request: InferenceRequest,
        decision: Decision,
        of_size: dict[int, PromptKeys],
        sources: list[int] | None,
        now: Instant,
    ) -> Pick:
        worker = decision.worker
        state, target = self._fleet.get(worker), self._targets.get(worker)
        assert state is not None, f"{worker} was chosen but is not in the fleet"
        assert target is not None, f"{worker} was chosen but has no target"
        known = of_size.get(state.block_tokens)
        keys = None if known is None else known.at(state.slot)
        is_public = keys is not None and keys.public is not None
        request.also_under = known.public if known is not None and is_public else None
        ticket = Ticket(
            number=self._tickets.next_number(),
            state=state,
            target=target,
            decision=decision,
            keys=keys,
            owed_from=0 if keys is None else first_owed(decision, keys, request.further_tokens),
            sent_at=now,
            is_stream=request.is_stream,
            is_guess=bool(request.approximate),
            is_alone=request.is_alone,
            tenant=request.grant.principal.tenant,
            pull=self._order(request, decision, keys, sources),
        )
        told = self._ticket(request.grant, keys, ticket)
        cold_ms = self._router.cold_ms(decision.prompt_tokens) * state.queue.scale
        self.receipts.add(decision, self._clock.wall(), request.identity)
        picked = Pick(
            worker=worker,
            endpoint=target.endpoint,
            body=self._body(request, keys, ticket, told),
            headers=told_headers(target, told, ticket.pull),
            decision_header=self.receipts.told(request.grant, decision),
            ticket=ticket,
            tokenizer=None if request.approximate else self._prompts.exact_tokenizer,
            stay=target.stay,
            pace=target.pace,
            ahead_ms=lambda: state.queue.queue_ms(self._clock.now()),
            first_token_ms=first_token_ms(request, decision, target.pace, cold_ms=cold_ms),
        )
        self._charge(ticket, now, request.keep_ms)
        self.accounts.remember(request, decision, keys, now)
        self._note_hot(request, keys, decision, now)
        return picked

    def _note_hot(
        self, request: InferenceRequest, keys: KeyChain | None, decision: Decision, now: Instant
    ) -> None:
        if self.desk is None or keys is None or not self._prompts.is_exact_for(request):
            return
        if isinstance(request.prompt, array):
            self.desk.hot.note(request.grant, keys, request.prompt, decision.expected_tokens, now)

    def _charge(self, ticket: Ticket, now: Instant, keep_ms: float) -> None:
        """Enter the attempt in every book, or, where one of them objects, in none."""
        decision, target, queue = ticket.decision, ticket.target, ticket.state.queue
        due = None if ticket.is_stream else Instant(now + ticket.predicted_ms)
        target.on_sent()
        self._tickets.open(ticket, due)
        try:
            queue.start(ticket.number, decision.miss_ms, now)
            prompt, known = decision.prompt_tokens, decision.expected_tokens
            self._fleet.churn.add(queue, prompt - known, now)
            self._fleet.headroom.add(decision.miss_ms, prompt, known, now)
            if ticket.keys is not None and target.predicted_ttl_ms > 0:
                ttl_ms = target.ttl_ms(keep_ms)
                self._directory.predict(ticket.worker, ticket.keys, now=now, ttl_ms=ttl_ms)
                if self.hearsay is not None:
                    # Of a worker with events the others know what it had before.
                    new_from = ticket.owed_from if target.is_exact else 0
                    self.hearsay.say(ticket.number, ticket.worker, ticket.keys, new_from)
        except BaseException:
            queue.end(ticket.number, now)
            self._tickets.close(ticket)
            target.on_ended(AttemptEnd.CLIENT_GONE)
            raise

    def _body(
        self, request: InferenceRequest, keys: KeyChain | None, attempt: Ticket, ticket: str
    ) -> bytes:
        """What is sent: anything that may be computed on bears our salt. Raises ClientError for
        what cannot bear it, where there is more than one tenant.
        """
        target = attempt.target
        is_salted = request.route.computes and (keys is not None or request.is_object)
        require_apart(request, target, is_salted=is_salted)
        if not is_salted:
            return request.body
        salt = self._namespaces.salt(request.grant, attempt.state.block_tokens)
        params = transfer_params(target, ticket, attempt.pull)
        named = self._responses.name(request, salt, attempt.worker, attempt.number)
        return salted(request.body, salt, keys, target, params, named)

    def _ticket(self, grant: Grant, keys: KeyChain | None, attempt: Ticket) -> str:
        """What an agent is told; empty where there is none."""
        agent = attempt.target.agent
        if agent is None or not agent.takes_tickets:
            return ""
        public = None if keys is None else keys.public
        return self._namespaces.ticket(grant, attempt.state.block_tokens, public)

    def _retract(self, ticket: Ticket, keys: KeyChain) -> None:
        """Nobody is to expect what this attempt did not fill, but for what others there will fill
        in its place, or had filled before it.
        """
        if self.hearsay is not None:
            self.hearsay.unsay(ticket.number)
        if self._fleet.get(ticket.worker) is not ticket.state:
            return  # the worker is gone, or lives anew and never heard of this attempt
        kept = self._tickets.hand_over(ticket)
        if kept < len(keys):
            lost = KeyChain(namespace=keys.namespace, packed=keys.packed[kept * DIGEST_BYTES :])
            self._directory.unpredict(ticket.worker, lost)

    def _account(self, ticket: Ticket, block_tokens: int, cached_tokens: int) -> None:
        if self._prompts.is_text or ticket.is_guess:  # what was predicted is not counted in tokens
            self.accounts.reused_tokens += cached_tokens
        else:
            self.accounts.reported(ticket.tenant, ticket.decision, block_tokens, cached_tokens)
            self._fleet.alarms.promised(ticket.decision, cached_tokens, self._clock.now())
