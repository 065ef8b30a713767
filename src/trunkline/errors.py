"""Operating errors: one class for each thing the caller can do about it.

`status`, `kind` and `code` let the HTTP edge answer without a table of types. Messages name the
thing, the value and the limit; never prompt text.
"""

from __future__ import annotations

from typing import ClassVar


class GatewayError(Exception):
    """Root. `retryable`: another worker may be tried, as nothing has reached the client."""

    status: ClassVar[int] = 500
    kind: ClassVar[str] = "internal_error"
    code: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False
    retry_after_s: int = 1
    """What `Retry-After` says beside a status of 429 or 503."""
    headers: tuple[tuple[str, str], ...] = ()
    """Further header lines of its answer."""


class WorkerLost(GatewayError):
    """The worker went away before the first byte of its answer."""

    status = 502
    kind = "upstream_error"
    code = "worker_lost"
    retryable = True


class AnswerTooLong(WorkerLost):
    """The worker is there, and answers more than is read of it. Asking again changes nothing."""

    retryable = False


class WorkerTimeout(GatewayError):
    """The worker did not answer in time."""

    status = 504
    kind = "timeout"
    code = "worker_timeout"


class WorkerLate(WorkerTimeout):
    """The worker was silent for longer than it ever is. Another one may do better."""

    code = "worker_late"
    retryable = True


class NoWorker(GatewayError):
    """No worker is usable: capacity does not exist."""

    status = 503
    kind = "unavailable"
    code = "no_worker"


class Busy(GatewayError):
    """Capacity exists but is contended: come back later."""

    status = 429
    kind = "rate_limit_error"
    code = "busy"


class DeadlinePassed(GatewayError):
    """The client's own time-out is over, or too short for what it asks even of an idle worker."""

    status = 504
    kind = "timeout"
    code = "deadline_exceeded"


class DeadlineUnmet(Busy):
    """What is in front of it would not be over by the client's own time-out: it is not begun."""

    code = "deadline_unmet"


class ConfigError(GatewayError):
    """A setting is wrong. The message names the key, the value and the remedy."""

    code = "config_error"
    also: tuple[str, ...] = ()
    """What else is wrong, for who can show several lines."""


class TraceError(GatewayError):
    """A trace file cannot be read. The message names the file, the line and what was expected."""

    code = "trace_error"


class AuditDown(GatewayError):
    """No audit sink can keep a record: nothing that grants or widens may happen now."""

    status = 503
    kind = "unavailable"
    code = "audit_down"


class RegistryDown(GatewayError):
    """The registry cannot keep a change now. It has not happened."""

    status = 503
    kind = "unavailable"
    code = "registry_down"


class RegistryBroken(GatewayError):
    """The registry's log cannot be believed. The message names the place and the remedy."""

    code = "registry_broken"


class ChangeRefused(GatewayError):
    """The registry does not allow this change; the message says what stands against it."""

    status = 409
    kind = "conflict"
    code = "change_refused"


class AccessEnded(GatewayError):
    """The caller was let in, and its right ended before its order could be carried out."""

    status = 401
    kind = "authentication_error"
    code = "unauthorized"


class UnknownName(GatewayError):
    """The registry knows nothing by this name."""

    status = 404
    kind = "not_found"
    code = "unknown_name"
