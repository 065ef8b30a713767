"""The breaker and the pace of one life of a worker, and the lines that are written of them.

Owns what attempts do to both. Must never: judge what an attempt was (`ports/worker.py` names the
ends). Read `core/breaker.py` and `core/pace.py` for the rules.
"""

from __future__ import annotations

from trunkline.config import BreakerConfig, HealthConfig
from trunkline.core.breaker import Breaker, BreakerState
from trunkline.core.pace import Pace, Standing
from trunkline.core.records import Instant
from trunkline.observe import EventLog
from trunkline.ports.worker import AttemptEnd


class Guard:
    """Closed at first. `retire` it with the life it is for: what ends later changes nothing."""

    def __init__(
        self,
        worker: str,
        settings: BreakerConfig,
        health: HealthConfig,
        log: EventLog,
        pool: Pace | None = None,
    ) -> None:
        self.pace = Pace(gap_floor_ms=health.stream_gap_floor_ms, pool=pool)
        self._worker = worker
        self._settings = settings
        self._is_pace_judged = not health.disable_gray_detection
        self._log = log
        self._breaker = Breaker(
            failure_threshold=settings.cb_failure_threshold,
            success_threshold=settings.cb_success_threshold,
            pause_ms=settings.cb_timeout_duration_secs * 1_000.0,
        )
        self._is_said_closed = True
        self._said_standing = Standing.GOOD
        self._is_retired = False

    @property
    def reason(self) -> str:
        """Why it is open, for operators."""
        settings = self._settings
        return (
            f"{settings.cb_failure_threshold} requests in a row or a trial failed there; "
            f"after {settings.cb_timeout_duration_secs:g} s one is tried"
        )

    def state(self, now: Instant) -> BreakerState:
        """Closed for ever where breakers are switched off, or its life is over."""
        return self._breaker.state(now) if self._is_in_force() else BreakerState.CLOSED

    def is_open(self, now: Instant) -> bool:
        """Whether no attempt may be made."""
        return self._is_in_force() and not self._breaker.is_usable(now)

    def standing(self, now: Instant) -> Standing:
        """What its streams say of it, and a line where that became another."""
        if not self._is_pace_judged or self._is_retired:
            return Standing.GOOD
        standing = self.pace.standing(now)
        if standing is not self._said_standing:
            self._said_standing = standing
            is_good = standing is Standing.GOOD
            write = self._log.info if is_good else self._log.warning
            write(f"gray.{standing.value}", worker=self._worker)
        return standing

    def sent(self, now: Instant) -> None:
        self._breaker.begin(now)

    def ended(self, end: AttemptEnd, now: Instant) -> None:
        match end:
            case AttemptEnd.COMPLETE | AttemptEnd.UNHEARD:
                self._breaker.succeeded()
            case AttemptEnd.WORKER_FAILED:
                self._breaker.failed(now)
            case AttemptEnd.WORKER_LATE:
                self._breaker.failed(now)
                self.pace.missed(now)
            case AttemptEnd.CLIENT_GONE:
                self._breaker.abandoned()
        if self.state(now) is BreakerState.CLOSED:
            self._say_closed("it answers well")
        elif self._is_said_closed:
            self._is_said_closed = False
            self._log.warning("breaker.opened", worker=self._worker, why=self.reason)

    def retire(self) -> None:
        """The worker is gone, or lives anew with another breaker."""
        self._say_closed("its life ended")
        self._is_retired = True

    def _is_in_force(self) -> bool:
        return not self._settings.disable_circuit_breaker and not self._is_retired

    def _say_closed(self, why: str) -> None:
        if not self._is_said_closed:
            self._is_said_closed = True
            self._log.info("breaker.closed", worker=self._worker, why=why)
