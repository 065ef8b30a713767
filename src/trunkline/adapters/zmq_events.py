"""Follows one worker's KV events over ZeroMQ, and fetches replays where the feed asks for them.

A loop of small turns: take what has arrived (bounded in messages and bytes), hand it to the pure
`WorkerFeed`, carry out its actions, let others run. ZeroMQ reconnects by itself; a monitor tells us
when, since a new connection may lead to another life of the engine. The feed decides; nothing here
does.

Must never: block the loop, believe a frame's shape, or let one worker's trouble end another's task.
Read `core/feed.py` next, `event_sources.py` for endpoints.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from trunkline.adapters.vllm_events import (
    MAX_PAYLOAD_BYTES,
    UndecodableBatch,
    decode_batch,
    fingerprint,
)
from trunkline.core.actions import Action, FeedFailed, RequestReplay
from trunkline.core.feed import FeedState, WorkerFeed
from trunkline.ports.clock import Clock
from trunkline.ports.relay import Line, Relays
from trunkline.ports.worker import EventSource

TURN_MESSAGES = 64
TURN_BYTES = 256 << 10
"""About 5 ms of decoding and indexing: the longest that one turn holds the loop, big messages
aside.
"""
RECEIVE_HWM = 64
"""Messages that wait in ZeroMQ, 256 MiB at worst. Beyond it TCP holds the publisher back, whose own
queue is meant for that.
"""
MAX_REPLAY_HWM = 16_384
"""Room for a whole ring, since its publisher drops what does not fit; a worker may ask for less."""
SOCKETS_A_WORKER = 4
MAX_MESSAGE_BYTES = 2 * MAX_PAYLOAD_BYTES
"""Larger ones end the connection; one that is over the payload's cap only is a gap, no more."""
RECONNECT_SECS = 1.0
HEARTBEAT_MS = 2_000
HEARTBEAT_TIMEOUT_MS = 6_000
"""Without an answer of the peer's library for so long, the connection is taken for broken. A
machine that is busy to its limit answers late; a new connection costs a look at the ring.
"""
_END_OF_REPLAY = b"\xff" * 8
_BY_RELAY = "its events come over another gateway, which hands over what came before"

_Socket = zmq.Socket[bytes]
EventContext = zmq.Context[_Socket]


def event_context(max_workers: int) -> EventContext:
    """A ZeroMQ context with room for so many feeds; end it with `term()` when all feeds are
    over.
    """
    context = EventContext()
    limit = int(context.get(zmq.SOCKET_LIMIT))
    context.set(zmq.MAX_SOCKETS, min(limit, SOCKETS_A_WORKER * max_workers + 64))
    return context


async def run_feed(
    source: EventSource,
    feed: WorkerFeed,
    clock: Clock,
    on_action: Callable[[Action], None],
    *,
    context: EventContext,
    relays: Relays | None = None,
) -> None:
    """Follow a worker's events until cancelled, or until the worker leaves the directory; over
    `relays` while there is no connection of our own.

    `on_action` gets every action but `RequestReplay`. Trouble with sockets ends in `FeedFailed`,
    never in an exception: the task group that owns this task has others to keep.
    """
    subscription = _Subscription(source, feed, clock, on_action, context, relays)
    try:
        subscription.open()
        await subscription.follow()
    except zmq.ZMQError as error:
        on_action(FeedFailed(worker=feed.worker, reason=f"{source.endpoint}: {error}"))
    finally:
        subscription.close()


def told_live(feed: WorkerFeed, seq: int, payload: bytes, clock: Clock) -> list[Action]:
    """What the feed makes of one message of the live stream."""
    now = clock.now()
    try:
        batch = decode_batch(seq, payload)
    except UndecodableBatch:
        return feed.undecodable(seq, now, fingerprint=fingerprint(payload))
    return feed.live(batch, now, age_ms=(clock.wall() - batch.sent_at) * 1_000.0)


class _Subscription:
    """The sockets of one feed and the turns that read them."""

    def __init__(
        self,
        source: EventSource,
        feed: WorkerFeed,
        clock: Clock,
        on_action: Callable[[Action], None],
        context: EventContext,
        relays: Relays | None,
    ) -> None:
        self._source = source
        self._feed = feed
        self._clock = clock
        self._on_action = on_action
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._topic = source.topic.encode()
        self._events: _Socket | None = None
        self._monitor: _Socket | None = None
        self._replay: _Socket | None = None
        self._replay_id = 0
        self._watched: list[int] = []
        self._accepted: set[int] = set()
        """Descriptors of who connected to a socket of ours: an old life may hang up after the new
        one came.
        """
        self._reconnect: asyncio.TimerHandle | None = None
        self._relays = relays
        self._line: Line | None = None
        self._is_relayed = False

    # -- sockets -----------------------------------------------------------------------------------

    def open(self) -> None:
        """Subscribe first and ask for the past second, so that nothing falls in between."""
        self._events = events = self._socket(zmq.SUB, RECEIVE_HWM)
        # A peer that vanished without a word is found out, and so is one that is stopped.
        events.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        events.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        events.setsockopt(zmq.SUBSCRIBE, self._topic)
        self._monitor = events.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_DISCONNECTED
            | zmq.EVENT_CONNECT_RETRIED
            | zmq.EVENT_ACCEPTED
        )
        self._watch(events)
        self._watch(self._monitor)
        if self._source.is_bound_by_us:
            self._bind(events)
        else:
            events.connect(self._source.endpoint)
        if self._relays is not None:
            self._line = self._relays.open(self._feed.worker, self)
        self._carry_out(self._feed.joined(self._clock.now()))

    def _bind(self, events: _Socket) -> None:
        try:
            events.bind(self._source.endpoint)
        except zmq.ZMQError:
            if self._relays is None:
                raise
            # A gateway process beside this one has it, and may tell us.

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
        for descriptor in self._watched:
            self._loop.remove_reader(descriptor)
        self._watched.clear()
        if self._reconnect is not None:
            self._reconnect.cancel()
            self._reconnect = None
        if self._events is not None:
            if self._monitor is not None:
                self._events.disable_monitor()
                self._monitor.close(linger=0)
            self._events.close(linger=0)
        if self._replay is not None:
            self._replay.close(linger=0)
        self._events = self._monitor = self._replay = None

    def _socket(self, kind: int, hwm: int) -> _Socket:
        made = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.RCVHWM, hwm)
        made.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        made.setsockopt(zmq.IPV6, 1)
        made.setsockopt(zmq.RECONNECT_IVL, 100)
        made.setsockopt(zmq.RECONNECT_IVL_MAX, 5_000)
        return made

    def _watch(self, socket: _Socket) -> None:
        descriptor = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(descriptor, self._wake.set)
        self._watched.append(descriptor)

    # -- turns -------------------------------------------------------------------------------------

    async def follow(self) -> None:
        while self._feed.state is not FeedState.ENDED:
            # ZeroMQ's descriptor signals edges: clear first, then read until there is nothing more.
            self._wake.clear()
            if self._turn():
                await asyncio.sleep(0)
            else:
                await self._rest()

    def _turn(self) -> bool:
        """Take a bounded share of what has arrived; whether there may be more."""
        assert self._events is not None
        self._take_reconnects()
        is_busy = self._take(self._events, self._take_live)
        if self._replay is not None:
            is_busy = self._take(self._replay, self._take_replayed) or is_busy
        due = self._feed.next_tick
        if self._feed.has_backlog or (due is not None and due <= self._clock.now()):
            self._carry_out(self._feed.tick(self._clock.now()))
            is_busy = True
        return is_busy or self._feed.has_backlog

    async def _rest(self) -> None:
        """Wait for a message, or for the feed's next moment."""
        due = self._feed.next_tick
        timer = None
        if due is not None:
            wait_ms = max(due - self._clock.now(), 1.0)
            timer = self._loop.call_later(wait_ms / 1_000.0, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            if timer is not None:
                timer.cancel()

    def _take(self, socket: _Socket, take: Callable[[list[bytes]], None]) -> bool:
        byte_count = 0
        for _ in range(TURN_MESSAGES):
            if socket.closed:
                return True
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            take(frames)
            byte_count += sum(map(len, frames))
            if byte_count >= TURN_BYTES:
                break
        return True

    def _take_reconnects(self) -> None:
        assert self._monitor is not None
        while int(self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            frames = self._monitor.recv_multipart(zmq.NOBLOCK)
            event: Any = parse_monitor_message(frames)  # the library's own loosely typed record
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._accepted.add(event["value"])
                continue
            is_gone = event["event"] == zmq.EVENT_DISCONNECTED
            if is_gone:
                self._accepted.discard(event["value"])
            is_lost = is_gone and not self._accepted
            self._await_connection(is_lost and not self._source.is_bound_by_us)
            if is_lost:
                self._linked(False)
                self._carry_out(self._feed.disconnected(self._clock.now()))
            if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._linked(True)
                self._carry_out(self._feed.reconnected(self._clock.now()))

    def _await_connection(self, is_lost: bool) -> None:
        """ZeroMQ tries again after a loss, but not where the other side broke the protocol (a
        message over the limit): when it does nothing, connect anew.
        """
        if self._reconnect is not None:
            self._reconnect.cancel()
            self._reconnect = None
        if is_lost:
            self._reconnect = self._loop.call_later(RECONNECT_SECS, self._connect_anew)

    def _connect_anew(self) -> None:
        assert self._events is not None, "closing cancels this"
        self._reconnect = None
        with contextlib.suppress(zmq.ZMQError):  # it is not known any more where ZeroMQ gave up
            self._events.disconnect(self._source.endpoint)
        self._events.connect(self._source.endpoint)

    def _take_live(self, frames: list[bytes]) -> None:
        # A connection is announced before its first message: look before believing the message.
        self._take_reconnects()
        if len(frames) != 3 or len(frames[1]) != 8:
            self._carry_out(self._feed.undecodable(None, self._clock.now()))
            return
        seq = int.from_bytes(frames[1], "big")
        if self._line is not None:
            self._line.heard(seq, frames[2])
        self._carry_out(told_live(self._feed, seq, frames[2], self._clock))

    # -- over another gateway (`ports.relay.Ear`) --------------------------------------------------

    def _linked(self, is_up: bool) -> None:
        self._is_relayed = False  # our own connection comes first
        if self._line is not None:
            self._line.link(is_up)

    def relay_up(self) -> None:
        self._is_relayed, now = True, self._clock.now()
        if self._replay is not None:
            self._carry_out(self._feed.replay_failed(self._replay_id, _BY_RELAY, now))
        self._carry_out(self._feed.reconnected(now))
        self._wake.set()

    def relayed(self, seq: int, payload: bytes) -> None:
        self._carry_out(told_live(self._feed, seq, payload, self._clock))
        self._wake.set()

    def relay_down(self) -> None:
        self._is_relayed = False
        self._carry_out(self._feed.disconnected(self._clock.now()))
        self._wake.set()

    # -- replays -----------------------------------------------------------------------------------

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, RequestReplay):
                self._ask_replay(action)
            else:
                self._on_action(action)
        if self._replay is not None and self._feed.replay_id != self._replay_id:
            self._close_replay()

    def _ask_replay(self, action: RequestReplay) -> None:
        """A fresh socket for each replay: an old answer that is still under way goes down with the
        old.
        """
        self._close_replay()
        self._replay_id = action.replay_id
        endpoint = self._source.replay_endpoint
        if endpoint is None:
            reason = "the worker offers no replay"
        elif self._is_relayed:
            reason = _BY_RELAY
        else:
            try:
                hwm = min(self._source.buffer_steps, MAX_REPLAY_HWM) + 16
                self._replay = replay = self._socket(zmq.DEALER, hwm)
                self._watch(replay)
                replay.connect(endpoint)
                replay.send_multipart([b"", action.from_seq.to_bytes(8, "big")], zmq.NOBLOCK)
                self._wake.set()
                return
            except zmq.ZMQError as error:
                reason = f"{endpoint}: {error}"
        self._carry_out(self._feed.replay_failed(action.replay_id, reason, self._clock.now()))

    def _close_replay(self) -> None:
        if self._replay is not None:
            descriptor = int(self._replay.getsockopt(zmq.FD))
            self._loop.remove_reader(descriptor)
            self._watched.remove(descriptor)
            self._replay.close(linger=0)
            self._replay = None

    def _take_replayed(self, frames: list[bytes]) -> None:
        """`["", topic, seq, payload]`; older publishers leave the topic out, so count from the
        end.
        """
        now, replay_id = self._clock.now(), self._replay_id
        if not 3 <= len(frames) <= 4 or len(frames[-2]) != 8:
            self._carry_out(self._feed.replay_undecodable(None, replay_id, now))
            return
        payload = frames[-1]
        if frames[-2] == _END_OF_REPLAY:
            self._carry_out(self._feed.replay_ended(replay_id, now))
            return
        seq = int.from_bytes(frames[-2], "big")
        try:
            batch = decode_batch(seq, payload)
        except UndecodableBatch:
            actions = self._feed.replay_undecodable(
                seq, replay_id, now, fingerprint=fingerprint(payload)
            )
        else:
            actions = self._feed.replayed(batch, replay_id, now)
        self._carry_out(actions)
