"""What the processes behind one port are to one another: port, words, and joined answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import sys
from typing import Any

import pytest

from trunkline.adapters.clock import SystemClock
from trunkline.adapters.process_wire import MAX_WORD_BYTES, ProcessWire, wire_pair
from trunkline.config import AuthConfig, Config
from trunkline.control.probe import Told
from trunkline.gateway.contracts import EVERYBODY, ClientError
from trunkline.gateway.metrics_pages import joined_pages
from trunkline.gateway.shared_port import addresses_of, hold, sockets_at
from trunkline.observe import EventLog
from trunkline.one_tenant import open_one_tenant
from trunkline.parent_admin import ParentAdmin
from trunkline.parent_answers import Asked, Heard
from trunkline.parent_joins import in_turns, joined_tenants, joined_worker

linux = pytest.mark.skipif(sys.platform != "linux", reason="SO_REUSEPORT spreads there alone")


@linux
def test_a_held_port_is_shared_with_nobody_but_ours() -> None:
    held = hold("127.0.0.1", 0)
    addresses = addresses_of(held)
    ours = [one for _ in range(3) for one in sockets_at(addresses)]
    for one in ours:
        one.listen(1)
    port = held[0].getsockname()[1]
    assert {one.getsockname()[1] for one in ours} == {port}
    with pytest.raises(OSError, match="in use"):
        hold("127.0.0.1", port)
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind(("127.0.0.1", port))
    for one in (*ours, *held):
        one.close()
    for one in hold("127.0.0.1", port):
        one.close()


@linux
def test_who_holds_a_port_is_given_no_connection() -> None:
    held = hold("127.0.0.1", 0)
    place = held[0].getsockname()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(place, 1.0)
    (one,) = sockets_at(addresses_of(held))
    one.listen(8)
    links = [socket.create_connection(place, 1.0) for _ in range(8)]
    for open_one in (*links, one, *held):
        open_one.close()


def test_a_word_reaches_all_others_and_nobody_twice() -> None:
    async def run() -> None:
        pairs = [wire_pair() for _ in range(3)]
        heard: dict[int, list[bytes]] = {0: [], 1: [], 2: []}
        wires: list[ProcessWire] = []
        for number, (ear, _) in enumerate(pairs):
            mouths = [mouth.dup() for other, (_, mouth) in enumerate(pairs) if other != number]
            wire = ProcessWire(ear, mouths)
            wire.hear(heard[number].append)
            wires.append(wire)
        await wires[0].send(b"to an earlier life")
        for wire in wires:
            wire.open()
        await wires[1].send(b"one")
        await wires[1].send(b"two")
        await asyncio.sleep(0)
        async with asyncio.timeout(30):
            while not (heard[0] and heard[2]):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert heard == {0: [b"one", b"two"], 1: [], 2: [b"one", b"two"]}
        for wire in wires:
            wire.close()
        for _, mouth in pairs:
            mouth.close()

    asyncio.run(run())


def test_the_longest_word_is_heard_whole() -> None:
    async def run() -> None:
        ear, mouth = wire_pair()
        words: list[bytes] = []
        one = ProcessWire(ear, [])
        one.hear(words.append)
        one.open()
        await ProcessWire(ear, [mouth]).send(b"w" * MAX_WORD_BYTES)
        async with asyncio.timeout(30):
            while not words:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert words == [b"w" * MAX_WORD_BYTES]
        one.close()
        mouth.close()

    asyncio.run(run())


def test_words_that_nobody_reads_or_that_are_too_large_are_lost_and_hold_up_nobody() -> None:
    async def run() -> None:
        ear, mouth = wire_pair()
        deaf, to_deaf = wire_pair()
        wire = ProcessWire(ear, [to_deaf])
        for number in range(10_000):
            await wire.send(b"%d" % number)
        await wire.send(b"x" * (MAX_WORD_BYTES * 64))
        kept: list[bytes] = []
        with contextlib.suppress(BlockingIOError):
            while True:
                kept.append(deaf.recv(MAX_WORD_BYTES))
        assert kept == [b"%d" % number for number in range(len(kept))]
        assert 0 < len(kept) < 10_000, "the oldest wait for who reads, the others are lost"
        for one in (ear, mouth, deaf, to_deaf):
            one.close()
        await wire.send(b"to nobody")

    asyncio.run(run())


def heard(number: int, body: Any, status: int = 200) -> Heard:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Heard(number=number, told=Told(status=status, headers=[], body=raw))


def test_metrics_of_all_are_one_page_with_each_family_once() -> None:
    page = b'# HELP a_total Of a.\n# TYPE a_total counter\na_total{x="{"} 1.0\n# HELP b B.\n'
    page += b"# TYPE b gauge\nb 2.0\n"
    only = b"# HELP c C.\n# TYPE c gauge\nc 3.0\n"
    joined = joined_pages([(b'process="0"', page), (b'process="1"', page + only)], b"own 1\n")
    assert joined.decode().splitlines() == [
        "# HELP a_total Of a.",
        "# TYPE a_total counter",
        'a_total{process="0",x="{"} 1.0',
        'a_total{process="1",x="{"} 1.0',
        "# HELP b B.",
        "# TYPE b gauge",
        'b{process="0"} 2.0',
        'b{process="1"} 2.0',
        "# HELP c C.",
        "# TYPE c gauge",
        'c{process="1"} 3.0',
        "own 1",
    ]


def row(state: str, active: int, queue_ms: float) -> dict[str, Any]:
    shown: dict[str, Any] = {"worker": "w", "state": state, "mode": "exact", "reason": state}
    shown |= {"breaker": "closed", "requests_active": active, "queue_ms": queue_ms}
    return shown | {"detail": {"block_tokens": 16}}


def test_a_worker_is_ready_if_it_is_at_all_processes() -> None:
    both = joined_worker([(0, row("ready", 1, 2.0)), (1, row("ready", 3, 9.0))])
    assert (both["state"], both["requests_active"], both["queue_ms"]) == ("ready", 4, 9.0)
    one = joined_worker([(0, row("ready", 1, 2.0)), (1, row("suspect", 3, 9.0))])
    assert (one["state"], one["reason"]) == ("suspect", "suspect")
    assert [seen["state"] for seen in one["detail"]["processes"]] == ["ready", "suspect"]
    assert one["detail"]["block_tokens"] == 16


def test_lists_of_several_are_taken_in_turns() -> None:
    assert list(in_turns([[1, 2, 3], [], [4]])) == [1, 4, 2, 3]
    assert list(in_turns([])) == []


def test_of_changes_of_a_worker_a_later_process_is_told_what_is_left_of_them() -> None:
    admin = ParentAdmin(list, "t", "", dict)

    def change(method: str, target: str, url: str = "") -> None:
        body = json.dumps({"url": url}).encode() if url else b""
        root = "/" + target.partition("?")[0].split("/")[1]
        admin.keep(root, Asked(method=method, target=target, body=body))

    change("POST", "/workers", "http://a:1")
    change("POST", "/workers/a:1/drain")
    change("POST", "/workers/http://a:1/undrain")
    change("POST", "/workers/a:1/reset")
    change("POST", "/workers/b:1/drain?grace_secs=3")
    change("POST", "/add_worker?url=http://c:1")
    change("DELETE", "/workers/c:1")
    change("POST", "/remove_worker?url=http://d:1")
    assert [(one.method, one.target) for one in admin.kept()] == [
        ("POST", "/workers"),
        ("POST", "/workers/http://a:1/undrain"),
        ("POST", "/workers/b:1/drain?grace_secs=3"),
        ("DELETE", "/workers/c:1"),
        ("POST", "/remove_worker?url=http://d:1"),
    ]


def test_gateways_of_one_tenant_with_one_root_key_know_one_anothers_sessions() -> None:
    config = Config(auth=AuthConfig(auth="off"))

    async def session_known(one_key: bytes, other_key: bytes) -> bool:
        draw = random.Random(1).randbytes
        clock, log = SystemClock(), EventLog("test")
        async with (
            open_one_tenant(config, clock, log, draw, one_key) as (_, one, _),
            open_one_tenant(config, clock, log, draw, other_key) as (_, other, _),
        ):
            session = one.begin_session(EVERYBODY)
            try:
                return bool(other.session(EVERYBODY, session))
            except ClientError:
                return False

    assert asyncio.run(session_known(bytes(32), bytes(32)))
    assert not asyncio.run(session_known(bytes(32), b"x" * 32))
    assert not asyncio.run(session_known(b"", b"")), "each draws its own"


def test_a_tenant_that_one_process_has_among_the_others_has_no_sum() -> None:
    """The part that is known would pass for all of it."""

    def answer(x: int | None, y: int) -> dict[str, Any]:
        usage = {"x": None if x is None else {"requests": x}, "y": {"requests": y}}
        rows = [{"id": name, "usage": usage[name]} for name in usage]
        return {"tenants": rows, "others": {"requests": 0 if x else 5}}

    joined = joined_tenants([answer(7, 1), answer(None, 2)])
    assert [row["usage"] for row in joined["tenants"]] == [None, {"requests": 3}]
    assert joined["others"] == {"requests": 5}
