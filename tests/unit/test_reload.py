"""What a reload takes of other settings, and what it leaves for the next start."""

from __future__ import annotations

import asyncio
import signal
import threading
from dataclasses import replace
from typing import Any

import pytest
from test_settings import another_value

from trunkline import observe
from trunkline.config import Config, ModelTable
from trunkline.errors import ConfigError
from trunkline.leaf import Leaf, leaves
from trunkline.reload import Hangups, Reloaded, Reloader, merged


def with_value(config: Config, leaf: Leaf, value: Any) -> Config:
    if not leaf.section:
        return replace(config, **{leaf.name: value})
    section = replace(getattr(config, leaf.section), **{leaf.name: value})
    return replace(config, **{leaf.section: section})


@pytest.mark.parametrize("leaf", leaves(), ids=lambda leaf: leaf.name)
def test_a_live_setting_is_taken_and_any_other_is_left_and_named(leaf: Leaf) -> None:
    before = with_value(Config(), leaf, "a key") if leaf.setting.is_secret else Config()
    after = with_value(before, leaf, another_value(leaf))
    config, outcome = merged(before, after)
    assert config == (after if leaf.setting.is_live else before)
    assert outcome.changed + outcome.needs_restart == (leaf.name,)
    assert bool(outcome.changed) is leaf.setting.is_live


@pytest.mark.parametrize("name", ["api_key", "admin_api_key"])
def test_whether_a_key_is_asked_for_is_not_changed_while_it_runs(name: str) -> None:
    (leaf,) = [leaf for leaf in leaves() if leaf.name == name]
    keyed = with_value(Config(), leaf, "a key")
    for before, after in ((Config(), keyed), (keyed, Config())):
        assert merged(before, after) == (before, Reloaded(needs_restart=(name,)))


def test_of_models_only_the_workers_are_taken() -> None:
    before = replace(Config(), models=(ModelTable(name="a", worker_urls=("http://h:1",)),))
    other_workers = replace(before, models=(ModelTable(name="a", worker_urls=("http://h:2",)),))
    other_model = replace(before, models=(ModelTable(name="b", worker_urls=("http://h:2",)),))
    assert merged(before, other_workers) == (other_workers, Reloaded(changed=("models",)))
    assert merged(before, other_model) == (before, Reloaded(needs_restart=("models",)))


def test_workers_that_move_to_tables_of_models_stay_until_the_restart_that_these_wait_for() -> None:
    before = replace(Config(), worker_urls=("http://h:1",))
    after = replace(Config(), models=(ModelTable(name="a", worker_urls=("http://h:1",)),))
    waits = Reloaded(needs_restart=("worker_urls", "models"))
    assert merged(before, after) == (before, waits)
    assert merged(after, before) == (after, waits)


def test_what_contradicts_a_setting_that_waits_is_refused_and_no_client_becomes_an_operator() -> (
    None
):
    def keyed(api_key: str, admin_api_key: str) -> Config:
        listen = replace(Config().listen, api_key=api_key, admin_api_key=admin_api_key)
        return replace(Config(), listen=listen)

    async def apply(config: Config) -> None:
        raise AssertionError(f"{config.listen} was applied")

    async def scenario() -> None:
        start = keyed("clients", "operators")
        reloader = Reloader(
            start,
            again=lambda: keyed("", "clients"),  # sound by itself, but no key is not live
            check=lambda _config: None,
            apply=apply,
            log=observe.log,
        )
        with pytest.raises(ConfigError, match="every client would be an operator"):
            await reloader.reload()
        assert reloader.config == start

    asyncio.run(scenario())


def test_every_mark_in_the_settings_is_one_that_something_takes() -> None:
    """Sections are handed on whole, so a live setting of another one would be taken by nobody."""
    taken = {"", "limits", "upstream", "retry", "queue", "health", "observe", "listen", "auth"}
    assert {leaf.section for leaf in leaves() if leaf.setting.is_live} == taken
    whole = {"limits", "upstream", "retry"}
    assert all(leaf.setting.is_live for leaf in leaves() if leaf.section in whole)


def test_what_is_refused_changes_nothing_and_what_was_taken_is_held_against_the_next() -> None:
    wanted: list[Config | ConfigError] = []
    applied: list[Config] = []

    def again() -> Config:
        found = wanted.pop(0)
        if isinstance(found, ConfigError):
            raise found
        return found

    async def apply(config: Config) -> None:
        applied.append(config)

    def check(config: Config) -> None:
        if config.worker_urls:
            raise ConfigError("no workers here")

    async def scenario() -> None:
        start = Config()
        reloader = Reloader(start, again=again, check=check, apply=apply, log=observe.log)
        larger = replace(start, limits=replace(start.limits, max_headers=50))
        for bad in (ConfigError("wrong"), replace(larger, worker_urls=("http://h:1",))):
            wanted.append(bad)
            with pytest.raises(ConfigError):
                await reloader.reload()
        assert (applied, reloader.config) == ([], start)
        wanted.extend([larger, larger])
        assert await reloader.reload() == Reloaded(changed=("max_headers",))
        assert await reloader.reload() == Reloaded()
        assert applied == [larger]

    asyncio.run(scenario())


def test_two_wishes_at_once_are_done_one_after_the_other() -> None:
    running: list[int] = []

    async def apply(config: Config) -> None:
        running.append(config.limits.max_headers)
        assert len(running) == 1, "one is not done"
        await asyncio.sleep(0)
        running.pop()

    async def scenario() -> None:
        wanted = iter(range(10, 14))

        def again() -> Config:
            start = Config()
            return replace(start, limits=replace(start.limits, max_headers=next(wanted)))

        reloader = Reloader(
            Config(), again=again, check=lambda _config: None, apply=apply, log=observe.log
        )
        await asyncio.gather(*(reloader.reload() for _ in range(4)))
        assert reloader.config.limits.max_headers == 13

    asyncio.run(scenario())


def test_a_signal_that_comes_before_there_is_a_loop_is_heeded_when_there_is_one() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    # To this thread alone: others of a test's process hold nothing back, and it would end there.
    signal.pthread_kill(threading.get_ident(), signal.SIGHUP)

    async def scenario() -> None:
        done = asyncio.Event()

        async def reload() -> None:
            done.set()

        heeding = asyncio.create_task(Hangups().heed(reload))
        async with asyncio.timeout(60.0):
            await done.wait()
        heeding.cancel()

    asyncio.run(scenario())
