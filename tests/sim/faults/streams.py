"""A worker's cache events on their way to the gateway: ZeroMQ's behaviour, without its threads.

Batches are encoded as on the wire and decoded by the real adapter. A subscription connects to an
address, hears nothing while nobody publishes there, is told when it is connected anew, and may
miss, double or damage what it is told to; what was lost stays in the publisher's ring, and is asked
for there. Read `adapters/zmq_events.py` for what this stands for.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from faults.machines import Machine, current_machine, wall_of
from faults.network import FaultyNet

from trunkline.adapters.event_publisher import encode_batch
from trunkline.adapters.vllm_events import decode_batch
from trunkline.adapters.zmq_events import told_live
from trunkline.core.actions import Action, RequestReplay
from trunkline.core.feed import FeedState, WorkerFeed
from trunkline.ports.clock import Clock
from trunkline.ports.publisher import BlockEvent
from trunkline.ports.worker import EventSource

RECONNECT_S = 0.1
AT_MOST_S = 5.0
"""Whatever there is to do wakes a subscription; it looks by itself now and then."""
Message = Callable[[], None]


@dataclass(slots=True)
class Spoiler:
    """What happens to one worker's stream, whichever life of it publishes."""

    lost: float = 0.0
    doubled: float = 0.0
    broken: float = 0.0
    loses_replays: bool = False
    replay_batches_lost: float = 0.0


@dataclass(slots=True, kw_only=True)
class Publisher:
    """`ports.publisher.EventPublisher` of one life of a worker."""

    air: Air
    machine: Machine
    endpoint: str
    replay_endpoint: str
    topic: str = "kv"
    buffer_batches: int
    ring: deque[tuple[int, bytes]] = field(default_factory=deque[tuple[int, bytes]])
    count: int = 0

    def publish(self, events: Sequence[BlockEvent], *, is_sent: bool = True) -> None:
        payload = encode_batch(wall_of(self.air.net), events, 0)
        seq = self.count
        self.count += 1
        self.ring.append((seq, payload))
        while len(self.ring) > self.buffer_batches:
            self.ring.popleft()
        if is_sent:
            self.air.send(self, seq, payload)

    def close(self) -> None:
        self.air.publishers.pop(self.endpoint, None)


class Air:
    """All streams there are."""

    def __init__(self, net: FaultyNet, seed: int) -> None:
        self.net = net
        self.dice = random.Random(f"air {seed}")
        self.publishers: dict[str, Publisher] = {}
        self.subscriptions: dict[Subscription, None] = {}
        self.spoilers: dict[str, Spoiler] = {}

    def spoiler(self, host: str) -> Spoiler:
        return self.spoilers.setdefault(host, Spoiler())

    def open(self, *, buffer_batches: int) -> Publisher:
        """A publisher of the machine that calls it."""
        machine = current_machine()
        assert machine is not None
        endpoint = f"tcp://{machine.name}:5557"
        made = Publisher(
            air=self,
            machine=machine,
            endpoint=endpoint,
            replay_endpoint=f"tcp://{machine.name}:5558",
            buffer_batches=buffer_batches,
        )
        self.publishers[endpoint] = made
        for subscription in self.subscriptions:
            if subscription.follows(machine.name):
                subscription.look_again()
        return made

    def send(self, source: Publisher, seq: int, payload: bytes) -> None:
        spoiler = self.spoiler(source.machine.name)
        for subscription in list(self.subscriptions):
            if subscription.connected_to is not source or subscription.machine.is_dead:
                continue
            if self.dice.random() < spoiler.lost:
                continue
            told = payload
            if self.dice.random() < spoiler.broken:
                told = payload[: self.dice.randrange(len(payload))]
            subscription.bring(seq, told)
            if self.dice.random() < spoiler.doubled:
                subscription.bring(seq, told)

    def arrives_at(self, source: str, target: str) -> float:
        return self.net.ground.way(source, target).arrives_at(self.net.time(), self.dice)


class Subscription:
    """Follows one source for a feed, on the gateway's machine."""

    def __init__(
        self,
        air: Air,
        source: EventSource,
        feed: WorkerFeed,
        clock: Clock,
        on_action: Callable[[Action], None],
    ) -> None:
        machine = current_machine()
        assert machine is not None
        self.machine = machine
        self.connected_to: Publisher | None = None
        self._air = air
        self._net = air.net
        self._source = source
        self._feed = feed
        self._clock = clock
        self._on_action = on_action
        self._inbox: deque[tuple[float, Message]] = deque()
        self._wake = asyncio.Event()
        self._replay_id = 0

    async def follow(self) -> None:
        """Until cancelled, or until the worker leaves the directory."""
        self._air.subscriptions[self] = None
        try:
            self._carry_out(self._feed.joined(self._clock.now()))
            while self._feed.state is not FeedState.ENDED:
                self._wake.clear()
                self._connect()
                self._take()
                await self._rest()
        finally:
            self._air.subscriptions.pop(self, None)

    def follows(self, host: str) -> bool:
        return _host(self._source.endpoint) == host

    def bring(self, seq: int, payload: bytes) -> None:
        """A live batch is sent; called on the publisher's machine."""
        self._deliver(lambda: self._take_live(seq, payload))

    def drop_connection(self) -> None:
        """What is on its way is lost, and it is connected anew."""
        self._inbox.clear()
        self.connected_to = None
        self.look_again()

    def look_again(self) -> None:
        """Soon, for who publishes there."""
        self._wake_at(self._net.time() + RECONNECT_S)

    # -- turns -------------------------------------------------------------------------------------

    def _connect(self) -> None:
        found = self._air.publishers.get(self._source.endpoint)
        if found is not None and found.machine.is_dead:
            found = None
        if found is self.connected_to:
            return
        was_first = self.connected_to is None or self.connected_to.machine.is_dead
        self.connected_to = found
        if found is not None and not was_first:
            self._inbox.clear()
        if found is not None:
            self._carry_out(self._feed.reconnected(self._clock.now()))

    def _take(self) -> None:
        now_s = self._net.time() + 1e-9
        while self._inbox and self._inbox[0][0] <= now_s:
            self._inbox.popleft()[1]()
        due = self._feed.next_tick
        if self._feed.has_backlog or (due is not None and due <= self._clock.now()):
            self._carry_out(self._feed.tick(self._clock.now()))

    async def _rest(self) -> None:
        wait_s = AT_MOST_S
        if self._inbox:
            wait_s = min(wait_s, self._inbox[0][0] - self._net.time())
        due = self._feed.next_tick
        if due is not None:
            wait_s = min(wait_s, (due - self._clock.now()) / 1e3)
        if self._feed.has_backlog:
            wait_s = 0.0
        timer = self._net.call_later(max(wait_s, 0.0001), self._wake.set)
        try:
            await self._wake.wait()
        finally:
            timer.cancel()

    def _deliver(self, message: Message) -> None:
        at_s = self._air.arrives_at(_host(self._source.endpoint), self.machine.name)
        if self._inbox:
            at_s = max(at_s, self._inbox[-1][0])
        self._inbox.append((at_s, message))
        self._wake_at(at_s)

    def _wake_at(self, at_s: float) -> None:
        self._net.call_at(at_s, self._wake.set, context=self.machine.context.copy())

    def _take_live(self, seq: int, payload: bytes) -> None:
        self._carry_out(told_live(self._feed, seq, payload, self._clock))

    # -- replays -----------------------------------------------------------------------------------

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, RequestReplay):
                self._ask_replay(action)
            else:
                self._on_action(action)

    def _ask_replay(self, asked: RequestReplay) -> None:
        """The question goes to whoever publishes there when it arrives."""
        host = _host(self._source.endpoint)
        found = self._air.publishers.get(self._source.endpoint)
        if self._air.spoiler(host).loses_replays or found is None or found.machine.is_dead:
            return  # nobody answers, and the feed's own deadline ends it
        at_s = self._air.arrives_at(self.machine.name, host)
        self._net.call_at(
            at_s, self._answer_replay, found, asked, context=found.machine.context.copy()
        )

    def _answer_replay(self, source: Publisher, asked: RequestReplay) -> None:
        """On the worker's machine."""
        lost = self._air.spoiler(source.machine.name).replay_batches_lost
        for seq, payload in list(source.ring):
            if seq >= asked.from_seq and self._air.dice.random() >= lost:
                self._deliver(lambda seq=seq, payload=payload: self._replayed(seq, payload, asked))
        self._deliver(lambda: self._replay_ended(asked))

    def _replayed(self, seq: int, payload: bytes, asked: RequestReplay) -> None:
        batch = decode_batch(seq, payload)
        self._carry_out(self._feed.replayed(batch, asked.replay_id, self._clock.now()))

    def _replay_ended(self, asked: RequestReplay) -> None:
        self._carry_out(self._feed.replay_ended(asked.replay_id, self._clock.now()))


def _host(endpoint: str) -> str:
    return endpoint.removeprefix("tcp://").rpartition(":")[0]
