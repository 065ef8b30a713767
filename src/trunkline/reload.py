"""Settings that are read again while a gateway runs: what changes, and what waits for a restart.

Owns the rule that a file is taken whole or not at all: whatever is wrong in it leaves all as it
was. What may change is marked in `config.py` (`is_live`); requests that run go on under what they
began with. Must never: open or close a port, move state, or change who is one tenant. Read
`settings.py` for how the sources are merged, `effects.py` for what is made of a change.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from trunkline.config import Config, ModelTable
from trunkline.errors import ConfigError
from trunkline.leaf import leaves
from trunkline.observe import EventLog
from trunkline.settings import check_together

Again = Callable[[], Config]
"""Reads all sources again. Raises ConfigError."""
Apply = Callable[[Config], Awaitable[None]]
"""Puts in force what is live of these settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reloaded:
    """What came of it, by the names of settings."""

    changed: tuple[str, ...] = ()
    """In force now."""
    needs_restart: tuple[str, ...] = ()
    """As they were: they differ from the sources until the gateway is started again."""


class Reloader:
    """One reload after the other. `config` is what is in force."""

    def __init__(
        self,
        config: Config,
        *,
        again: Again | None,
        check: Callable[[Config], object],
        apply: Apply,
        log: EventLog,
    ) -> None:
        """`check` raises ConfigError for what the settings' own bounds do not see; `apply` puts the
        settings in force that it is given, all live ones of them.
        """
        self.config = config
        self._again = again
        self._check = check
        self._apply = apply
        self._log = log
        self._turn = asyncio.Lock()

    async def reload(self) -> Reloaded:
        """Raises ConfigError, and has changed nothing then."""
        async with self._turn:
            try:
                if self._again is None:
                    raise ConfigError("this gateway was not started from settings that can be read")
                wanted = await asyncio.to_thread(self._again)
                self._check(wanted)
                config, outcome = merged(self.config, wanted)
                check_together(config)  # what is taken, beside what waits
            except ConfigError as error:
                self._log.error("config.refused", why=str(error), meaning="all stays as it was")
                raise
            self.config = config
            if outcome.changed:
                await self._apply(self.config)
        say = self._log.warning if outcome.needs_restart else self._log.info
        say(
            "config.reloaded",
            changed=", ".join(outcome.changed) or "nothing",
            **(
                {"needs_restart": ", ".join(outcome.needs_restart)} if outcome.needs_restart else {}
            ),
        )
        return outcome


class Hangups:
    """SIGHUP, from when it is made: one means a reload. A terminal that is gone means the end."""

    def __init__(self) -> None:
        self._came = asyncio.Event()
        self._had_terminal = _has_terminal()
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._came.set)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # `cli.py` held it back

    async def heed(self, reload: Callable[[], Awaitable[object]]) -> None:
        """Until cancelled."""
        while True:
            await self._came.wait()
            self._came.clear()
            if self._had_terminal and not _has_terminal():
                signal.raise_signal(signal.SIGTERM)
                return
            with suppress(ConfigError):  # which is in the log
                await reload()


def merged(config: Config, wanted: Config) -> tuple[Config, Reloaded]:
    """`config` with what is live taken from `wanted`, and what that changed."""
    changed: list[str] = []
    needs_restart: list[str] = []
    # Workers move between the two: half of such a move would leave a gateway without any.
    is_other_models = _without_workers(config.models) != _without_workers(wanted.models)
    parts: dict[str, dict[str, Any]] = {}
    for leaf in leaves():
        old, new = leaf.value_in(config), leaf.value_in(wanted)
        if old == new:
            continue
        # To ask for a key or not is another gateway: the door, and who is let in, are made once.
        is_live = leaf.setting.is_live and (not leaf.setting.is_secret or bool(old and new))
        is_live = is_live and not (leaf.name == "worker_urls" and is_other_models)
        (changed if is_live else needs_restart).append(leaf.name)
        if is_live:
            parts.setdefault(leaf.section, {})[leaf.name] = new
    top = parts.pop("", {})
    sections = {name: replace(getattr(config, name), **values) for name, values in parts.items()}
    if config.models != wanted.models:
        (needs_restart if is_other_models else changed).append("models")
        top |= {} if is_other_models else {"models": wanted.models}
    outcome = Reloaded(changed=tuple(changed), needs_restart=tuple(needs_restart))
    return replace(config, **top, **sections), outcome


def _without_workers(models: tuple[ModelTable, ...]) -> tuple[ModelTable, ...]:
    return tuple(replace(table, worker_urls=()) for table in models)


def _has_terminal() -> bool:
    try:
        return os.isatty(sys.stdin.fileno())
    except (ValueError, OSError):  # no standard input at all
        return False
