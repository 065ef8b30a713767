"""Workers that a file names, and what becomes of a file with a mistake."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from trunkline.adapters.workers_file import MAX_BYTES, MAX_WORKERS, WorkersFile
from trunkline.errors import ConfigError
from trunkline.ports.workers import NamedWorker


def urls(named: Sequence[NamedWorker]) -> list[str]:
    return [one.url for one in named]


def test_lines_are_urls_or_objects_and_comments_are_neither(tmp_path: Path) -> None:
    path = tmp_path / "workers"
    path.write_text(
        "# two\n\nhttp://a:1#events=tcp://a:2\n"
        '{"url": "http://b:1", "labels": {"z": "1", "a": "2"}, "model_id": "m", "draining": true}\n'
    )
    first, second = WorkersFile(path).read()
    assert first == NamedWorker(url="http://a:1#events=tcp://a:2")
    assert second == NamedWorker(
        url="http://b:1", labels=(("a", "2"), ("z", "1")), model_id="m", is_draining=True
    )


def test_toml_has_a_table_for_each(tmp_path: Path) -> None:
    path = tmp_path / "workers.toml"
    path.write_text('[[workers]]\nurl = "http://a:1"\n[[workers]]\nurl = "http://b:1"\n')
    assert urls(WorkersFile(path).read()) == ["http://a:1", "http://b:1"]
    path.write_text("")
    assert WorkersFile(path).read() == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("workers", '{"url": "http://a:1"'),
        ("workers", '{"url": "http://a:1", "colour": "red"}'),
        ("workers", '{"url": 7}'),
        ("workers", "{}"),
        ("workers", "http://a\u00e9:1"),
        ("workers.toml", "[[workers]\n"),
        ("workers.toml", "[[worker]]\nurl = 'http://a:1'\n"),
        ("workers.toml", "workers = 3\n"),
        ("workers", "http://a:1\n" * (MAX_WORKERS + 1)),
        ("workers", "#" * (MAX_BYTES + 1)),
    ],
)
def test_a_mistake_names_the_file(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match="workers"):
        WorkersFile(path).read()
    with pytest.raises(ConfigError, match="No such file"):
        WorkersFile(tmp_path / "none").read()


def test_keys_in_a_file_that_everyone_may_read_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "workers"
    path.write_text(json.dumps({"url": "http://a:1", "api_key": "marked"}))
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600") as caught:
        WorkersFile(path).read()
    assert "marked" not in str(caught.value)
    path.chmod(0o600)
    [named] = WorkersFile(path).read()
    assert (named.api_key, "marked" in repr(named)) == ("marked", False)


class Told:
    """What a source told, and what it complained of."""

    def __init__(self) -> None:
        self.named: list[list[str]] = []
        self.troubles: list[str] = []

    def tell(self, named: Sequence[NamedWorker]) -> None:
        self.named.append(urls(named))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60.0):
        while not condition():  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.005)


def followed(path: Path, play: Callable[[Told], Awaitable[None]]) -> None:
    async def run() -> None:
        told = Told()
        source = WorkersFile(path, look_s=0.01)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(source.run(told.tell, told.troubles.append))
            await play(told)
            task.cancel()

    asyncio.run(run())


def replaced(path: Path, text: str) -> None:
    beside = path.with_name("new")
    beside.write_text(text)
    os.replace(beside, path)


def test_a_replaced_file_is_told_and_one_with_a_mistake_is_not(tmp_path: Path) -> None:
    path = tmp_path / "workers"
    path.write_text("http://a:1\n")

    async def play(told: Told) -> None:
        await until(lambda: told.named == [["http://a:1"]])
        replaced(path, "http://b:1\n")
        await until(lambda: told.named[1:] == [["http://b:1"]])
        replaced(path, "{")
        await until(lambda: told.troubles)
        path.unlink()
        await until(lambda: "No such file" in told.troubles[-1])
        assert len(told.named) == 2, "what it told stays"
        replaced(path, "http://b:1\nhttp://c:1\n")
        await until(lambda: told.named[2:] == [["http://b:1", "http://c:1"]])

    followed(path, play)


def test_a_file_that_stays_as_it_is_is_told_once(tmp_path: Path) -> None:
    path = tmp_path / "workers"
    path.write_text("http://a:1\n")

    async def play(told: Told) -> None:
        await until(lambda: told.named)
        await asyncio.sleep(0.1)
        assert told.named == [["http://a:1"]]

    followed(path, play)
