"""What moving KV from one worker to another costs, measured for each pair.

    transfer_ms(bytes) = set-up + bytes / bandwidth

One line is fitted through the pulls of a pair, newer ones weighing more, and through what the
operator said of the links, which counts as a few pulls: a new pair is as good as its description,
and a pair with a history is as good as that. Never the nominal speed alone (reference: transfer,
section 5).

Cost: one look-up and a handful of additions. Must never: know sockets or a clock. Read `cost.py`
next.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from trunkline.core.records import WorkerId

MAX_PAIRS = 65_536
"""Pairs with a history; the one that has been silent for longest is forgotten for a new one."""

_FADE = 0.9
"""Weight of a pull after the next one: the last ten or so count."""
_PRIOR_WEIGHT = 2.0
_PRIOR_SPAN_MS = 50.0
"""The description counts as two pulls, one of no bytes and one that takes so long."""
_LOW, _HIGH = 0.1, 100.0
"""How far from its description a link may be found to be; beyond that it was an accident."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProfile:
    """How fast workers can take KV from one another before anything was measured: from end to end,
    verification and the way to the device included.
    """

    setup_ms: float = 2.0
    """From the decision to the first byte: a request, a grant, a manifest."""
    bytes_per_ms: float = 3_125_000.0
    """25 Gbit/s."""

    def __post_init__(self) -> None:
        if not (0.0 <= self.setup_ms < float("inf") and 0.0 < self.bytes_per_ms < float("inf")):
            raise ValueError(f"a link of {self.setup_ms} ms and {self.bytes_per_ms} bytes/ms")


def gbit_per_s(rate: float) -> float:
    """A link speed as links are sold, in bytes a millisecond."""
    return rate * 1e9 / 8 / 1_000


@dataclass(slots=True)
class _Fit:
    """Weighted sums of bytes x and milliseconds y."""

    weight: float
    x: float
    y: float
    xx: float
    xy: float
    setup_ms: float = 0.0
    ms_per_byte: float = 0.0


class Links:
    """All pairs of one fleet, in one direction each: KV flows from `source` to `target`."""

    def __init__(self, profile: LinkProfile, *, bytes_per_token: int) -> None:
        """Raises ValueError for tokens without KV."""
        if bytes_per_token < 1:
            raise ValueError(f"bytes_per_token is {bytes_per_token}, at least 1 is needed")
        self._profile = profile
        self.bytes_per_token = bytes_per_token
        self._token_ms = bytes_per_token / profile.bytes_per_ms
        self._pairs: OrderedDict[tuple[WorkerId, WorkerId], _Fit] = OrderedDict()

    def transfer_ms(self, source: WorkerId, target: WorkerId, tokens: int) -> float:
        """Predicted time to pull the KV of so many tokens."""
        fit = self._pairs.get((source, target))
        if fit is None:
            return self._profile.setup_ms + tokens * self._token_ms
        return fit.setup_ms + tokens * self.bytes_per_token * fit.ms_per_byte

    def observe(self, source: WorkerId, target: WorkerId, *, moved_bytes: int, ms: float) -> None:
        """A pull of this pair that ended well took so long, from the decision to the last byte."""
        if moved_bytes <= 0 or ms <= 0.0:
            return
        expected_ms = self._profile.setup_ms + moved_bytes / self._profile.bytes_per_ms
        ms = min(max(ms, _LOW * expected_ms), _HIGH * expected_ms)
        pair = (source, target)
        fit = self._pairs.pop(pair, None) or self._described()
        if len(self._pairs) >= MAX_PAIRS:
            self._pairs.popitem(last=False)
        self._pairs[pair] = fit
        fit.weight = fit.weight * _FADE + 1.0
        fit.x = fit.x * _FADE + moved_bytes
        fit.y = fit.y * _FADE + ms
        fit.xx = fit.xx * _FADE + moved_bytes * moved_bytes
        fit.xy = fit.xy * _FADE + moved_bytes * ms
        self._solve(fit)

    def forget(self, worker: WorkerId) -> None:
        """A worker left, or lives anew: what was measured of it says nothing any more."""
        for pair in [pair for pair in self._pairs if worker in pair]:
            del self._pairs[pair]

    def __len__(self) -> int:
        return len(self._pairs)

    def _described(self) -> _Fit:
        setup_ms, rate = self._profile.setup_ms, self._profile.bytes_per_ms
        far_bytes, far_ms = _PRIOR_SPAN_MS * rate, setup_ms + _PRIOR_SPAN_MS
        half = _PRIOR_WEIGHT / 2
        return _Fit(
            weight=_PRIOR_WEIGHT,
            x=half * far_bytes,
            y=half * (setup_ms + far_ms),
            xx=half * far_bytes * far_bytes,
            xy=half * far_bytes * far_ms,
        )

    def _solve(self, fit: _Fit) -> None:
        """Least squares. Where no line that rises fits, the bandwidth is taken as described, and
        all else is set-up; a line that would start below 0 goes through the origin.
        """
        spread = fit.weight * fit.xx - fit.x * fit.x
        slope = (fit.weight * fit.xy - fit.x * fit.y) / spread if spread > 0.0 else 0.0
        if slope <= 0.0:
            slope = 1.0 / self._profile.bytes_per_ms
        setup_ms = (fit.y - slope * fit.x) / fit.weight
        if setup_ms < 0.0:
            slope, setup_ms = fit.xy / fit.xx, 0.0
        fit.setup_ms, fit.ms_per_byte = setup_ms, slope
