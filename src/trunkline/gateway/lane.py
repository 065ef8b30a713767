"""Work that would hold the loop, done on a few threads, in the order it was asked for.

Who waits for a turn can leave and costs nothing from then on; what a thread has begun cannot be
stopped, so whoever asked for it stays until it ends, to be counted. Must never start more than it
has threads for: a thread pool's own queue keeps what nobody wants any more. Read `tokenise.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Made = TypeVar("Made")


class Lane:
    """A bounded number of threads with a line in front. The line is as long as its callers are
    many; these are bounded by `max_concurrent_requests`.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._turns = asyncio.Semaphore(threads)

    async def run(self, work: Callable[[], Made]) -> Made:
        """What `work` returns or raises. Cancelled while it waits: at once; later: at its end."""
        async with self._turns:
            running = asyncio.get_running_loop().run_in_executor(self._pool, work)
            try:
                return await asyncio.shield(running)
            except asyncio.CancelledError:
                await asyncio.wait([running])
                raise

    def close(self) -> None:
        """Waits for nothing: what is being done is thrown away."""
        self._pool.shutdown(wait=False, cancel_futures=True)
