"""Work that must not stop half way, such as a write and what follows from it.

Must never: start work that nobody awaits. Read `registry.py` for who needs it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

_T = TypeVar("_T")


async def unbroken(work: Coroutine[object, object, _T]) -> _T:
    """Await it to its end; a cancellation that came in the meantime counts then."""
    task = asyncio.ensure_future(work)
    is_cancelled = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            is_cancelled = True
    if is_cancelled and task.exception() is None:
        raise asyncio.CancelledError
    return task.result()
