"""Children that are stopped stand still when the test goes on."""

from __future__ import annotations

import os
import signal


def halt(pid: int) -> None:
    """SIGSTOP to a child; returns when none of its threads runs any more. Without that wait, one of
    them may still answer. A child that stands still already may be told again.
    """
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)  # else a stop is told of once
