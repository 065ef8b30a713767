"""What operators do to workers and see of caches, on record: the intent first, then the outcome.

A worker sees the prompts of all tenants: who adds one is in the audit log first, or adds none. And
where a prompt would go says whether a tenant has sent it lately. Must never: carry anything out
while no sink takes the intent. Read `gateway/admin.py` for who asks.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from trunkline.control.book import Check
from trunkline.control.changes import Intent
from trunkline.control.ledger import Ledger
from trunkline.errors import GatewayError
from trunkline.gateway.backend import Refused

_Outcome = TypeVar("_Outcome")


async def recorded(
    ledger: Ledger,
    action: str,
    target: str,
    intent: Intent,
    check: Check,
    carry_out: Callable[[], Awaitable[_Outcome]],
) -> _Outcome:
    """What came of it. Raises AuditDown, and then nothing was done; what `check` raises."""
    await ledger.wanted(action, target, intent, check)
    try:
        outcome = await carry_out()
    except GatewayError as error:
        await ledger.came_of(action, target, intent, result="refused", reason=error.code)
        raise
    if outcome is None:
        await ledger.came_of(action, target, intent, result="refused", reason="unknown")
    elif isinstance(outcome, Refused):
        await ledger.came_of(action, target, intent, result="refused", reason=outcome.code)
    else:
        await ledger.came_of(action, target, intent, result="done")
    return outcome
