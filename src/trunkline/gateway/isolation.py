"""What isolation costs: prompt tokens that others had sent lately, and this scope had not.

Looks at three depths of each prompt, by digests under a seed of this process: had anybody sent the
same beginning lately, and had the same scope? The difference is what one cache for all would have
had, and ours may not. Only sums are told, to operators alone, and nothing decides by them: what is
known here of another tenant's prompts never reaches a request. What public prefixes bring back is
not taken off. Bounded: of the beginnings the ones that were used longest ago go. Must never: keep
tokens, or name a tenant. Read `docs/tenancy.md` for the boundary itself.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable

import xxhash

from trunkline.core.identity import ScopeKind
from trunkline.core.records import Instant
from trunkline.gateway.contracts import InferenceRequest
from trunkline.gateway.metrics import Sample
from trunkline.ports.clock import Clock

DEPTHS = (256, 1_024, 4_096)
"""Tokens: those at which workers in digest mode tell what they hold."""
MAX_BEGINNINGS = 16_384
MAX_OWNERS = 8
"""Scopes that are remembered of one beginning; the one that was longest silent goes."""
LATELY_MS = 600_000.0
"""About as long as a busy worker keeps a block that nobody asks for."""


class IsolationCost:
    """See the module. One for each model; a `MetricsSource`."""

    def __init__(self, clock: Clock, *, seed: int, max_beginnings: int = MAX_BEGINNINGS) -> None:
        self.lost_tokens = dict.fromkeys(ScopeKind, 0)
        self.prompt_tokens = 0
        """Of all prompts that were looked at."""
        self._clock = clock
        self._seed = seed
        self._max_beginnings = max_beginnings
        self._seen: OrderedDict[int, dict[bytes, Instant]] = OrderedDict()
        """Digest of a beginning -> scopes, the one heard last at the end, and when that was."""

    def __len__(self) -> int:
        return len(self._seen)

    def note(self, request: InferenceRequest) -> None:
        """A request came, and its prompt is known."""
        tokens, grant = request.prompt, request.grant
        if not isinstance(tokens, array) or grant.scope is None:
            return
        self.prompt_tokens += len(tokens)
        now, owner = self._clock.now(), grant.domain
        of_all = of_own = 0
        view = memoryview(tokens)
        for depth in DEPTHS:
            if len(tokens) < depth:
                break
            digest = xxhash.xxh3_64_intdigest(view[:depth], seed=self._seed)
            owners = self._owners(digest)
            newest = next(reversed(owners.values()), None)
            if newest is not None and now - newest <= LATELY_MS:
                of_all = depth
            own = owners.pop(owner, None)
            if own is not None and now - own <= LATELY_MS:
                of_own = depth
            owners[owner] = now
            if len(owners) > MAX_OWNERS:
                del owners[next(iter(owners))]
        assert of_own <= of_all, f"{of_own} tokens of one scope, {of_all} of all"
        self.lost_tokens[grant.scope.kind] += of_all - of_own

    def samples(self) -> Iterable[Sample]:
        yield Sample("isolation_prompt_tokens_total", self.prompt_tokens)
        for kind, tokens in self.lost_tokens.items():
            yield Sample("isolation_cost_tokens_total", tokens, (kind.value,))

    def _owners(self, digest: int) -> dict[bytes, Instant]:
        owners = self._seen.get(digest)
        if owners is None:
            owners = self._seen[digest] = {}
            if len(self._seen) > self._max_beginnings:
                self._seen.popitem(last=False)
        else:
            self._seen.move_to_end(digest)
        return owners
