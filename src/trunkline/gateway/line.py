"""What an exchange stands between: the client, the shared parts of the front, and its result.

Owns whether a further attempt is allowed, and no other behaviour; it keeps `exchange.py` and
`client.py` from knowing each other's insides.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from trunkline.config import RetryConfig, UpstreamConfig
from trunkline.errors import GatewayError
from trunkline.gateway.answers import Answer
from trunkline.gateway.contracts import InferenceRequest, Picker
from trunkline.gateway.counters import Counters
from trunkline.gateway.deadline import past
from trunkline.gateway.retry import RetryBudget
from trunkline.gateway.upstream import WorkerPool


class Ending(Enum):
    """What becomes of the client's connection after an exchange."""

    KEEP = "keep"
    CLOSE = "close"
    """Flush, then close: the client can tell whether the answer was whole."""
    RESET = "reset"
    """The client could take a plain close for a good end."""


# In Python 3.11 a member costs 50 ns more where it is looked up in its class.
KEEP, CLOSE, RESET = Ending.KEEP, Ending.CLOSE, Ending.RESET


@dataclass(slots=True, kw_only=True)
class Result:
    """How an exchange went, for the access log."""

    status: int
    code: str
    worker: str
    attempts: int
    answer_bytes: int
    ttft_ms: float | None
    ending: Ending


def local_result(answer: Answer) -> Result:
    """Of what was answered without any worker."""
    return Result(
        status=answer.status, code=answer.code, worker="", attempts=0,
        answer_bytes=len(answer.body), ttft_ms=None, ending=Ending.KEEP,
    )  # fmt: skip


class ClientSide(Protocol):
    """What an exchange needs of the client's connection."""

    def write(self, data: bytes) -> None: ...
    @property
    def takes_chunks(self) -> bool: ...
    @property
    def closes(self) -> bool:
        """Whether the connection is to be closed behind this answer."""
        ...

    def refuse(self, error: GatewayError) -> int:
        """Answer with an error of ours; returns its status."""
        ...

    @property
    def is_paused(self) -> bool:
        """Whether the client has too much unread to be sent more."""
        ...

    def exchange_over(self, result: Result) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What all exchanges of one front share."""

    picker: Picker
    pool: WorkerPool
    budget: RetryBudget
    objection: Callable[[InferenceRequest], GatewayError | None]
    """Why nothing of a request may go out now; asked in the step that writes it."""
    is_current: Callable[[InferenceRequest], bool]
    """Whether what was decided for a request may still be sent to a worker."""
    renew: Callable[[InferenceRequest], None]
    """Admit it anew, under what holds now. Raises GatewayError."""
    upstream: UpstreamConfig
    retry: RetryConfig
    counters: Counters
    dice: random.Random
    now_s: Callable[[], float]
    """The loop's time, for deadlines."""
    now_ms: Callable[[], float]
    """The clock's time, for what is reported."""
    spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    call_later: Callable[[float, Callable[[], None]], asyncio.TimerHandle]

    def may_retry(self, request: InferenceRequest, attempts: int) -> bool:
        """Whether one more may follow so many attempts; takes it out of the budget."""
        retry, wished = self.retry, request.max_retries
        most = retry.retry_max_retries if wished is None else min(retry.retry_max_retries, wished)
        if retry.disable_retries or attempts > most or past(request.deadline, self.now_ms()):
            return False
        if self.budget.try_spend(self.now_s()):
            self.counters.retries += 1
            return True
        self.counters.retries_denied += 1
        return False
