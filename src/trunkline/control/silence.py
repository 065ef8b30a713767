"""Notices workers that announced cache events and never send one (C57).

Their blocks would be expected for some seconds after each request and then held for gone, though
the worker does hold them. Must never: judge a worker whose answers store nothing. Read `member.py`
next.
"""

from __future__ import annotations

from trunkline.core.feed import WorkerFeed
from trunkline.core.records import WorkerId

NO_EVENTS = "no events since start, though it announced them"
SILENT_AFTER = 3
"""Answers whose blocks should have been announced; fewer may be a coincidence."""


class Silence:
    """The ranks of one worker's present life that answer and say nothing of their caches."""

    def __init__(self) -> None:
        self._answers: dict[WorkerId, int] = {}

    def answered(self, feed: WorkerFeed, expected_blocks: int) -> bool:
        """A request ended well; True when it is just now one too many without an event.

        `expected_blocks`: whole blocks that requests are to fill there; none, and no event is due.
        """
        if _is_heard(feed) or not expected_blocks:
            return False
        count = self._answers[feed.worker] = self._answers.get(feed.worker, 0) + 1
        return count == SILENT_AFTER

    def is_over(self, feeds: dict[WorkerId, WorkerFeed]) -> bool:
        """Whether each rank that was silent has been heard of."""
        return all(_is_heard(feeds[worker]) for worker in self._answers)


def _is_heard(feed: WorkerFeed) -> bool:
    return feed.stats.batches > 0 or feed.stats.stored_blocks > 0  # the second: by a replay
