"""`trunkline top`: the fleet of a running gateway in a terminal, drawn anew each second.

Keys sort, `q` leaves; `--once` prints one frame, `--json` the same as JSON. A gateway that is gone
is said to be, and asked again until it is back. Must never: leave a terminal as no shell wants it,
or ask a gateway so often that showing it is its work. Read `top_frame.py` for what is shown.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import shutil
import signal
import sys
import termios
import tty
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from types import FrameType

from trunkline.admin_client import AdminClient, AdminUnreachable
from trunkline.errors import ConfigError
from trunkline.tenant_answers import client_of
from trunkline.tenant_commands import add_where
from trunkline.terminal import OK, Terminal, print_json
from trunkline.top_frame import SORTS, Line, Order, Screen, Snapshot, Style, frame, snapshot_of

INTERVAL_S = 1.0
MIN_INTERVAL_S, MAX_INTERVAL_S = 0.1, 3_600.0
WINDOW_S = 10.0
"""Rates and times to first token are of so long."""
MAX_KEPT = 128
REST = 5.0
"""The pause between two questions is so many times as long as the answer took, at least."""
TIMEOUT_S = 5.0
_FALLBACK = (80, 24)
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _REST_OF_LINE, _REST_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--once", action="store_true", help="print one frame and leave; so does --json")
    add(
        "--interval-secs",
        type=float,
        default=INTERVAL_S,
        metavar="X",
        help=f"pause between two looks, from {MIN_INTERVAL_S:g} [{INTERVAL_S:g}]",
    )
    add("--sort", choices=[name for name, _ in SORTS.values()], default="state", help="[state]")
    add_where(parser)


def run(arguments: argparse.Namespace, terminal: Terminal) -> int:
    """Raises ConfigError, and with `--once` or `--json` what the admin client raises."""
    interval_s: float = arguments.interval_secs
    if not MIN_INTERVAL_S <= interval_s <= MAX_INTERVAL_S:
        bounds = f"{MIN_INTERVAL_S:g} to {MAX_INTERVAL_S:g}"
        raise ConfigError(f"--interval-secs {interval_s:g} is not within {bounds} s")
    client = client_of(arguments, terminal)
    client.timeout_s = TIMEOUT_S
    key = next(key for key, (name, _) in SORTS.items() if name == arguments.sort)
    order = Order(key)
    if arguments.json:
        return print_json(_asked(client, terminal).as_json(), terminal)
    if arguments.once:
        width = shutil.get_terminal_size(_FALLBACK).columns
        screen = Screen(width=width, order=order, has_keys=False, url=client.url)
        for line in frame(_asked(client, terminal), None, screen):
            terminal.say(line.text.rstrip())
        return OK
    if not (terminal.out.isatty() and sys.stdin.isatty()):
        raise ConfigError("top draws in a terminal; give --once or --json for anything else")
    with _cleared(terminal) as wake:
        Live(client, terminal, wake, interval_s, order).run()
    return OK


def _asked(client: AdminClient, terminal: Terminal) -> Snapshot:
    """Raises what the admin client raises."""
    workers = client.get("/workers")["workers"]
    return snapshot_of(workers, client.text("/metrics"), terminal.wall_s())


class Live:
    """One run in a terminal."""

    def __init__(
        self,
        client: AdminClient,
        terminal: Terminal,
        wake: int,
        interval_s: float,
        order: Order,
    ) -> None:
        """`wake` can be read when a signal came."""
        self._client = client
        self._terminal = terminal
        self._wake = wake
        self._interval_s = interval_s
        self._screen = Screen(width=80, order=order, url=client.url)
        self._kept: deque[Snapshot] = deque(maxlen=MAX_KEPT)
        self._has_colour = not terminal.environ.get("NO_COLOR")

    def run(self) -> None:
        """Until `q`."""
        now_s = self._terminal.wall_s
        due_s = now_s()
        while True:
            if not 0.0 < due_s - now_s() <= MAX_INTERVAL_S:  # also where the clock was set back
                began_s = now_s()
                self._look()
                took_s = max(0.0, now_s() - began_s)
                due_s = now_s() + max(self._interval_s, REST * took_s)
            self._draw()
            if not self._is_kept_on(max(0.0, due_s - now_s())):
                return

    def _look(self) -> None:
        try:
            found = _asked(self._client, self._terminal)
        except AdminUnreachable as gone:
            self._screen = replace(self._screen, gone=str(gone))
            return
        self._screen = replace(self._screen, gone="")
        self._kept.append(found)
        while len(self._kept) > 2 and self._kept[1].at_s <= found.at_s - WINDOW_S:
            self._kept.popleft()

    def _is_kept_on(self, wait_s: float) -> bool:
        """Wait for a key, a signal, or the next look; False to leave."""
        stdin = sys.stdin.fileno()
        ready, _, _ = select.select([stdin, self._wake], [], [], wait_s)
        if self._wake in ready:
            os.read(self._wake, 64)
        if stdin not in ready:
            return True
        pressed = os.read(stdin, 64)
        if not pressed:
            return False  # nobody is there any more
        for key in pressed.decode("ascii", "ignore").lower():
            if key == "q":
                return False
            if key in SORTS:
                order = self._screen.order.pressed(key)
                self._screen = replace(self._screen, order=order)
        return True

    def _draw(self) -> None:
        width, height = shutil.get_terminal_size(_FALLBACK)
        clock = datetime.fromtimestamp(self._terminal.wall_s(), UTC).strftime("%H:%M:%S UTC")
        self._screen = replace(self._screen, width=width, height=height, clock=clock)
        now = self._kept[-1] if self._kept else None
        before = self._kept[0] if len(self._kept) > 1 else None
        out = self._terminal.out
        out.write(painted(frame(now, before, self._screen), has_colour=self._has_colour))
        out.flush()


def painted(lines: Sequence[Line], *, has_colour: bool) -> str:
    """The frame over the one before it, without a blink. The last line ends no line: the terminal
    would scroll.
    """
    parts: list[str] = []
    for line in lines:
        is_plain = line.style is Style.PLAIN or not has_colour
        text = line.text if is_plain else f"\x1b[{line.style.value}m{line.text}\x1b[0m"
        parts.append(text + _REST_OF_LINE)
    return _HOME + "\r\n".join(parts) + _REST_OF_SCREEN


@contextlib.contextmanager
def _cleared(terminal: Terminal) -> Generator[int]:
    """A screen of our own and keys as they are pressed; all as it was at the end, whatever that is.
    Yields what can be read when a signal came.
    """
    stdin = sys.stdin.fileno()
    saved = termios.tcgetattr(stdin)
    wake, waker = os.pipe()
    os.set_blocking(waker, False)

    def ignore(number: int, at: FrameType | None) -> None:
        """That it came is in the pipe."""

    def end(number: int, at: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {signal.SIGWINCH: signal.signal(signal.SIGWINCH, ignore)}
    before[signal.SIGTERM] = signal.signal(signal.SIGTERM, end)
    was_woken = signal.set_wakeup_fd(waker)
    try:
        tty.setcbreak(stdin)
        terminal.out.write(_ENTER)
        yield wake
    finally:
        signal.set_wakeup_fd(was_woken)
        for number, handler in before.items():
            signal.signal(number, handler)
        terminal.out.write(_LEAVE)
        terminal.out.flush()
        termios.tcsetattr(stdin, termios.TCSADRAIN, saved)
        os.close(wake)
        os.close(waker)
