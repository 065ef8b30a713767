"""What is wrong with a worker, since when, and when it is worth saying so again.

A worker that is away for hours is asked twice a second, and told of ever more rarely. Must never:
write a line itself. Read `member.py` for who does.
"""

from __future__ import annotations

from trunkline.core.decision import Exclusion
from trunkline.core.records import Instant
from trunkline.core.repair import Pause

REMINDER_MS = 10_000.0
MAX_REMINDER_MS = 600_000.0
"""The pause between two lines about the same trouble doubles from the first to the second."""

OTHER_MODEL = "worker.other_model"
"""The kind of trouble of a worker that is not taken for what it serves."""
DRAINS = "takes no new requests; those in flight end"
SHOWN = {
    Exclusion.LEASE: "its heartbeats stopped: the lease of the last one ran out",
    Exclusion.SILENT: "it accepts connections and says nothing: no answer, no token",
    Exclusion.SUSPECT: "two of its streams missed their deadlines",
    Exclusion.EJECTED: "streams missed their deadlines again and again: it is out for a while",
    Exclusion.ASLEEP: "its engine sleeps or is paused; a request would wait until it wakes",
    Exclusion.CHECKING: "whether it keeps tenants apart is being tested",
    Exclusion.WARMING: "it takes over what is hot before it takes requests",
}
"""What is said of a worker that routing leaves out, where that is all there is to say."""


class Trouble:
    """The trouble of one worker; `text` is empty while there is none."""

    def __init__(self) -> None:
        self.text = ""
        self.kind = ""
        """The event that its last line was."""
        self._since: Instant | None = None
        self._due_at = Instant(0.0)
        self._pause = Pause(REMINDER_MS, MAX_REMINDER_MS)

    def is_worth_saying(self, kind: str, now: Instant) -> bool:
        """Whether to write of trouble of this kind now: when it begins or turns into another kind,
        then at growing intervals.
        """
        if self._since is None:
            self._since = now
        if kind != self.kind:
            self.kind = kind
            self._pause.reset()
        elif now < self._due_at:
            return False
        self._due_at = Instant(now + self._pause.take())
        return True

    def end(self, now: Instant) -> float | None:
        """It is over; how long it lasted in ms, None where there was nothing to say."""
        lasted_ms = None if self._since is None else now - self._since
        self.text = self.kind = ""
        self._since = None
        return lasted_ms
