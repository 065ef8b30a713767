"""Peers of a pull server that are broken or mean it: each costs a refusal, and no memory.

They speak by hand, with or without the transfer key.
"""

from __future__ import annotations

import contextlib
import socket
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest
from pull_desk import DEADLINE_MS, KEY, OWNER, SERVER, STALL_MS, Ends, Host, running, wait_until

from kv_desk import LAYOUT, chain, owner
from trunkline.core.records import Instant
from trunkline.core.transfer import MAX_GRANT_BLOCKS, Grant, Reason, hash_scheme, keys_digest
from trunkline.kv.wire import (
    CHUNK_HEAD_BYTES,
    MAX_MESSAGE_BYTES,
    PROTOCOL,
    Channel,
    Fault,
    Hello,
    Manifests,
    Ping,
    Proof,
    Pull,
    Refused,
    Welcome,
    early_decoder,
    encoded,
    greeting_mac,
    reply_decoder,
)

FOREVER = Instant(1e12)
HELLO = Hello(
    protocol=PROTOCOL,
    worker="w2",
    incarnation="i1",
    scheme=hash_scheme(LAYOUT.block_tokens),
    layout=LAYOUT.digest,
    nonce=b"c" * 16,
)


@contextlib.contextmanager
def raw(ends: Ends) -> Iterator[socket.socket]:
    with socket.create_connection(ends.server.address) as connected:
        connected.settimeout(60)
        yield connected


@contextlib.contextmanager
def proved(ends: Ends, hello: Hello = HELLO) -> Iterator[Channel]:
    """A destination that has the key, and then does what it wants."""
    with raw(ends) as connected:
        channel = Channel(connected, ends.clock, tick_ms=5)
        channel.send([encoded(hello)], FOREVER)
        answer = channel.receive_message(early_decoder, 4_096, FOREVER)
        assert isinstance(answer, Welcome)
        mac = greeting_mac(KEY, b"destination", hello, answer.hello)
        channel.send([encoded(Proof(mac=mac))], FOREVER)
        yield channel


def ask(channel: Channel, grant: Grant | str, keys: bytes) -> Reason | None:
    """What the source says to it; None where it gives."""
    text = grant if isinstance(grant, str) else grant.signed(KEY)
    channel.send([encoded(Pull(grant=text, keys=keys))], FOREVER)
    reply = channel.receive_message(reply_decoder, MAX_MESSAGE_BYTES, FOREVER)
    if isinstance(reply, Refused):
        return reply.reason
    assert isinstance(reply, Manifests)
    return None


def keys_of(ends: Ends) -> bytes:
    return b"".join(place.key for place in ends.places)


def is_closed(connected: socket.socket) -> bool:
    with contextlib.suppress(ConnectionError):
        while connected.recv(4_096):
            pass
    return True


# -- without the key -------------------------------------------------------------------------------

BEFORE_PROOF = {
    "huge length": b"\xff\xff\xff\xff" + b"x" * 64,
    "a length just beyond": (4_097).to_bytes(4, "little") + b"x" * 64,
    "no length": b"\0\0\0\0",
    "rubbish": b"\x10\0\0\0" + b"\xc1" * 16,
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "a nest": b"\x00\x10\0\0" + b"\x91" * 4_096,
    "a pull at once": encoded(Pull(grant="x", keys=b"")),
    "a proof at once": encoded(Proof(mac=b"m" * 32)),
    "a long name": encoded(msgspec.structs.replace(HELLO, worker="w" * 300)),
    "a short nonce": encoded(msgspec.structs.replace(HELLO, nonce=b"n")),
    "another protocol": encoded(msgspec.structs.replace(HELLO, protocol=PROTOCOL + 1)),
    "another scheme": encoded(msgspec.structs.replace(HELLO, scheme=b"s" * 16)),
    "another layout": encoded(msgspec.structs.replace(HELLO, layout=b"l" * 16)),
    "a wrong proof": encoded(HELLO) + encoded(Proof(mac=b"m" * 32)),
    "a ping for a proof": encoded(HELLO) + encoded(Ping()),
}


@pytest.mark.parametrize("words", BEFORE_PROOF.values(), ids=BEFORE_PROOF.keys())
def test_who_has_not_the_key_is_shown_the_door(words: bytes) -> None:
    with running(Ends()) as ends, raw(ends) as connected:
        connected.sendall(words)
        assert is_closed(connected)
        wait_until(lambda: ends.server.figures.connections == 0)
        assert ends.server.figures.pulls_served == 0
        assert sum(ends.server.figures.ended.values()) == 1


def test_a_proof_of_another_connection_is_worth_nothing() -> None:
    """What was heard on one connection is no proof on another: the source's nonce differs."""
    with running(Ends()) as ends:
        with raw(ends) as connected:
            channel = Channel(connected, ends.clock, tick_ms=5)
            channel.send([encoded(HELLO)], FOREVER)
            answer = channel.receive_message(early_decoder, 4_096, FOREVER)
            assert isinstance(answer, Welcome)
            heard = encoded(Proof(mac=greeting_mac(KEY, b"destination", HELLO, answer.hello)))
        with raw(ends) as connected:
            connected.sendall(encoded(HELLO) + heard)
            assert is_closed(connected)


def test_the_source_s_own_proof_sent_back_is_worth_nothing() -> None:
    with running(Ends()) as ends, raw(ends) as connected:
        channel = Channel(connected, ends.clock, tick_ms=5)
        channel.send([encoded(HELLO)], FOREVER)
        answer = channel.receive_message(early_decoder, 4_096, FOREVER)
        assert isinstance(answer, Welcome)
        channel.send([encoded(Proof(mac=answer.mac))], FOREVER)
        with pytest.raises(Fault):
            channel.receive_message(reply_decoder, 4_096, FOREVER)


def test_an_endless_greeting_ends_with_its_time() -> None:
    with running(Ends()) as ends, raw(ends) as connected:
        connected.sendall((4_000).to_bytes(4, "little"))

        def has_had_enough() -> bool:
            ends.clock.ms += SERVER.hello_ms / 4
            with contextlib.suppress(OSError):
                connected.send(b"x")
            return ends.server.figures.connections == 0 and bool(ends.server.figures.ended)

        wait_until(has_had_enough)
        assert set(ends.server.figures.ended) <= {Reason.TIMEOUT, Reason.PROTOCOL}


def test_huge_lengths_take_no_memory() -> None:
    with running(Ends()) as ends:
        with raw(ends) as connected:  # what is loaded at the first one is not theirs
            connected.sendall(b"\xff\xff\xff\xff")
            assert is_closed(connected)
        tracemalloc.start()
        try:
            for _ in range(50):
                with raw(ends) as connected:
                    connected.sendall(b"\xff\xff\xff\xff" + b"x" * 1_000)
                    assert is_closed(connected)
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak_bytes < 4 << 20


def test_connections_are_bounded_and_a_further_one_is_closed_at_once() -> None:
    options = replace(SERVER, max_connections=3)
    with running(Ends(server_options=options)) as ends, contextlib.ExitStack() as stack:
        kept = [stack.enter_context(raw(ends)) for _ in range(3)]
        wait_until(lambda: ends.server.figures.connections == 3)
        with raw(ends) as fourth:
            assert is_closed(fourth)
        assert ends.server.figures.refused_connections == 1
        kept[0].close()
        wait_until(lambda: ends.server.figures.connections == 2)
        assert ends.pull().blocks == 3


# -- with the key ----------------------------------------------------------------------------------

REFUSALS: dict[str, tuple[dict[str, object], Reason]] = {
    "another destination": ({"destination": "w3"}, Reason.GRANT),
    "another life of the destination": ({"destination_incarnation": "i0"}, Reason.GRANT),
    "another source": ({"source": "w9"}, Reason.GRANT),
    "another life of the source": ({"source_incarnation": "i0"}, Reason.INCARNATION),
    "another namespace": ({"ns": owner("b").ns}, Reason.NS),
    "another layout": ({"layout": b"l" * 16}, Reason.LAYOUT),
    "other keys": ({"keys": keys_digest(b"k" * 96)}, Reason.GRANT),
    "fewer blocks": ({"block_count": 2}, Reason.GRANT),
    "another place": ({"first_block": 4}, Reason.CHAIN),
    "fewer bytes": ({"max_bytes": 3 * LAYOUT.block_bytes - 1}, Reason.GRANT),
    "a past end": ({"deadline_ms": 1_000}, Reason.GRANT),
    "an end far ahead": ({"deadline_ms": 2**50}, Reason.GRANT),
}


@pytest.mark.parametrize(("changes", "reason"), REFUSALS.values(), ids=REFUSALS.keys())
def test_d09_a_grant_for_something_else_gets_nothing(
    changes: dict[str, object], reason: Reason
) -> None:
    with running(Ends()) as ends, proved(ends) as channel:
        wrong = replace(ends.grant(), **changes)  # type: ignore[arg-type]  # any field
        assert ask(channel, wrong, keys_of(ends)) is reason
        assert ends.source.store.figures().pinned_bytes == 0
        assert ends.server.figures.bytes_out == 0
        assert ask(channel, ends.grant(), keys_of(ends)) is None, "the connection goes on"


def test_d09_a_grant_is_served_once() -> None:
    with running(Ends()) as ends:
        grant = ends.grant()
        with proved(ends) as channel:
            assert ask(channel, grant, keys_of(ends)) is None
            wait_until(lambda: ends.server.figures.pulls_served == 1)
        with proved(ends) as channel:
            assert ask(channel, grant, keys_of(ends)) is Reason.GRANT


@pytest.mark.parametrize("text", ["", "A", "x" * 20_000, "\x00", "AAAA" * 100])
def test_d09_what_is_no_grant_gets_nothing(text: str) -> None:
    with running(Ends()) as ends, proved(ends) as channel:
        assert ask(channel, text, keys_of(ends)) is Reason.GRANT


def test_d09_a_grant_of_another_key_gets_nothing() -> None:
    with running(Ends()) as ends, proved(ends) as channel:
        assert ask(channel, ends.grant().signed(b"x" * 32), keys_of(ends)) is Reason.GRANT


def test_d09_a_grant_for_one_run_does_not_open_another_of_the_namespace() -> None:
    """The source has both, and the last key is the granted one: still the whole run counts."""
    with running(Ends()) as ends, proved(ends) as channel:
        secret = chain(OWNER, 500, 2)
        ends.source.put(secret, OWNER)
        mixed = b"".join(place.key for place in [*secret, ends.places[-1]])
        assert ask(channel, ends.grant(), mixed) is Reason.GRANT


def test_d09_another_worker_cannot_use_the_grant_of_this_one() -> None:
    other = msgspec.structs.replace(HELLO, worker="w3")
    with running(Ends()) as ends, proved(ends, other) as channel:
        assert ask(channel, ends.grant(), keys_of(ends)) is Reason.GRANT


@pytest.mark.parametrize("reason", [Reason.EPOCH, Reason.LEASE])
def test_a_source_that_may_not_reuse_gives_nothing(reason: Reason) -> None:
    with running(Ends(source_host=Host(reason=reason))) as ends, proved(ends) as channel:
        assert ask(channel, ends.grant(), keys_of(ends)) is reason
        assert ends.server.figures.bytes_out == 0


@pytest.mark.parametrize("length", [MAX_MESSAGE_BYTES + 1, 2**32 - 1, 0])
def test_a_request_of_a_wrong_length_ends_the_connection(length: int) -> None:
    with running(Ends()) as ends, proved(ends) as channel:
        channel.send([length.to_bytes(4, "little")], FOREVER)
        wait_until(lambda: ends.server.figures.connections == 0)
        assert ends.server.figures.ended == {Reason.PROTOCOL: 1}


def test_the_longest_run_is_served_and_a_longer_one_cannot_be_granted() -> None:
    with running(Ends()) as ends, proved(ends) as channel:
        keys = keys_of(ends) + bytes(32 * (MAX_GRANT_BLOCKS - 3))
        grant = ends.grant(
            block_count=MAX_GRANT_BLOCKS,
            keys=keys_digest(keys),
            max_bytes=MAX_GRANT_BLOCKS * LAYOUT.block_bytes,
        )
        assert ask(channel, grant, keys) is None


def test_no_more_pulls_are_served_than_may_and_the_grant_is_not_used_up() -> None:
    part = replace(LAYOUT.components[0], size_bytes=8 << 20)
    layout = replace(LAYOUT, components=(part,), chunk_bytes=1 << 20)
    hello = msgspec.structs.replace(HELLO, layout=layout.digest)
    options = replace(SERVER, max_pulls=1)
    with contextlib.ExitStack() as stack:
        ends = stack.enter_context(running(Ends(layout=layout, server_options=options)))
        slow, other = (stack.enter_context(proved(ends, hello)) for _ in range(2))
        assert ask(slow, ends.grant(), keys_of(ends)) is None  # and reads no further
        grant = ends.grant()
        assert ask(other, grant, keys_of(ends)) is Reason.BUSY
        slow.close()
        wait_until(lambda: ends.server.figures.open_pulls == 0)
        assert ask(other, grant, keys_of(ends)) is None


@pytest.mark.parametrize("end", ["stall", "grant"])
def test_d13_d29_a_reader_that_stops_reading_holds_nothing_for_long(end: str) -> None:
    part = replace(LAYOUT.components[0], size_bytes=8 << 20)
    layout = replace(LAYOUT, components=(part,), chunk_bytes=1 << 20)
    hello = msgspec.structs.replace(HELLO, layout=layout.digest)
    with running(Ends(layout=layout)) as ends, proved(ends, hello) as channel:
        assert ask(channel, ends.grant(), keys_of(ends)) is None
        assert ends.source.store.figures().pinned_bytes > 0

        def is_over() -> bool:
            """Time goes by, for as long as it takes the source to notice."""
            ends.clock.ms += STALL_MS + 1 if end == "stall" else DEADLINE_MS + 1
            return ends.source.store.figures().pinned_bytes == 0

        wait_until(is_over)
        ends.settled()
        assert ends.server.figures.ended == {Reason.TIMEOUT: 1}


def test_a_revocation_ends_what_waits_for_a_slow_reader() -> None:
    """In the middle of what is sent together: nobody gets the rest by reading on."""
    part = replace(LAYOUT.components[0], size_bytes=8 << 20)
    layout = replace(LAYOUT, components=(part,), chunk_bytes=1 << 20)
    hello = msgspec.structs.replace(HELLO, layout=layout.digest)
    options = replace(SERVER, batch_bytes=1 << 30)
    with running(Ends(layout=layout, server_options=options)) as ends:
        with proved(ends, hello) as channel:
            assert ask(channel, ends.grant(), keys_of(ends)) is None
            channel.receive_into(memoryview(bytearray(CHUNK_HEAD_BYTES)), FOREVER)  # it has begun
            ends.source_host.reason = Reason.EPOCH
            wait_until(lambda: ends.server.figures.ended == {Reason.EPOCH: 1})
            ends.settled()
        assert ends.source.store.figures().pinned_bytes == 0


def test_d13_d29_a_reader_that_dies_holds_nothing() -> None:
    part = replace(LAYOUT.components[0], size_bytes=8 << 20)
    layout = replace(LAYOUT, components=(part,), chunk_bytes=1 << 20)
    hello = msgspec.structs.replace(HELLO, layout=layout.digest)
    with running(Ends(layout=layout)) as ends:
        with proved(ends, hello) as channel:
            assert ask(channel, ends.grant(), keys_of(ends)) is None
        ends.settled()
        assert ends.server.figures.ended == {Reason.LOST: 1}
        assert ends.source.store.figures().expired_pins == 0, "given back, not waited for"
