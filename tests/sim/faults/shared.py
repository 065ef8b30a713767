"""The registry that several gateways share, and each gateway's way to it.

The servers are one more host on the virtual network. A question that cannot arrive in time is not
asked there; one whose answer cannot is answered and its asker does not know. News and words between
gateways are lost where the way is cut: nobody sends them again. Read `../memory_bucket.py` for what
the servers keep, `gate.py` for who asks.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from faults.machines import Machine, current_machine
from faults.network import FaultyNet, Way
from memory_bucket import Bucket, BucketLink

from trunkline.ports.store import StoreDown

SERVERS = "registry"
PATIENCE_S = 1.0
"""So long a gateway waits for its question to arrive, and for the answer."""


class Common:
    """The servers, and who is connected to them."""

    def __init__(self, net: FaultyNet, seed: int) -> None:
        self.net = net
        self.dice = random.Random(f"registry {seed}")
        self.bucket = Bucket()
        self.reaches: dict[str, Reach] = {}
        """By gateway: that of its newest life."""
        self.posted_s = -1e9
        """When any gateway, of whatever life, last began to post a notice that was taken."""

    def reach(self) -> Reach:
        """The way of the gateway that calls it."""
        machine = current_machine()
        assert machine is not None
        made = self.reaches[machine.name] = Reach(self, machine)
        return made

    def cut(self, gateway: str, secs: float, *, is_one_way: bool) -> None:
        """Its questions do not arrive; one way: they do, and their answers do not."""
        if not is_one_way:
            self.net.cut(gateway, SERVERS, secs)
        self.net.cut(SERVERS, gateway, secs)

    def is_cut(self, gateway: str) -> bool:
        ways = self.net.ground.way(gateway, SERVERS), self.net.ground.way(SERVERS, gateway)
        return any(way.cut_until_s > self.net.time() for way in ways)

    def head(self) -> int:
        """The revision that the servers have."""
        newest = self.bucket.newest("log.*")
        return int(newest.key.removeprefix("log.")) if newest else 0

    def spread(self, work: Callable[[Reach], None], but: Reach | None = None) -> None:
        """To all that can be told now, each on its own machine."""
        now_s = self.net.time()
        for reach in list(self.reaches.values()):
            way = self.net.ground.way(SERVERS, reach.machine.name)
            if reach is but or reach.machine.is_dead or way.cut_until_s > now_s:
                continue
            at_s = way.arrives_at(now_s, self.dice)
            self.net.call_at(at_s, work, reach, context=reach.machine.context.copy())


class Reach(BucketLink):
    """A gateway's `NatsBucket`, and its `ports.board.Wire`."""

    def __init__(self, common: Common, machine: Machine) -> None:
        super().__init__(common.bucket)
        self.machine = machine
        self.posted_s = -1e9
        """When it last began to post a notice that the servers took."""
        self._common = common
        self._ears: list[Callable[[bytes], None]] = []

    def spread(self, key: str) -> None:
        self._common.spread(lambda reach: reach.tell(key))

    async def put(
        self, key: str, value: bytes, *, behind: tuple[str, int] | None = None, ttl_s: int = 0
    ) -> int:
        began_s = self._common.net.time()
        made = await super().put(key, value, behind=behind, ttl_s=ttl_s)
        if key.startswith("holder."):
            self.posted_s = began_s
            self._common.posted_s = max(self._common.posted_s, began_s)
        return made

    async def send(self, body: bytes) -> None:
        """To the other gateways."""
        if not self._common.is_cut(self.machine.name):
            self._common.spread(lambda reach: reach.take(body), but=self)

    def hear(self, on_body: Callable[[bytes], None]) -> None:
        self._ears.append(on_body)

    def take(self, body: bytes) -> None:
        for ear in self._ears:
            ear(body)

    async def way(self, *, is_back: bool) -> None:
        net, here = self._common.net, self.machine.name
        way: Way = net.ground.way(SERVERS, here) if is_back else net.ground.way(here, SERVERS)
        wait_s = way.arrives_at(net.time(), self._common.dice) - net.time()
        await asyncio.sleep(min(wait_s, PATIENCE_S))
        if wait_s > PATIENCE_S:
            raise StoreDown("the servers do not answer")
