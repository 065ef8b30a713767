"""How long a change of a shared registry takes, and until the other gateways have it.

    python benchmarks/shared_registry.py [--gateways 3] [--rounds 200] [--json]

A real nats-server with `sync_interval: always`, on loopback, with its data in a folder; registries,
copies (SQLite, full sync), leases and revokers of some gateways are in this process, each with a
connection of its own. Per round: one change (commit until it is acknowledged, and until the
last of the others has it in its book), and one revocation (until its receipt, which waits for all).
No workers: `revoke.py` has those. Bars: 100 ms at p99 for each, when all answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import uvloop

from trunkline.adapters.clock import SystemClock
from trunkline.adapters.nats_board import NatsBoard
from trunkline.adapters.nats_bucket import NatsBucket, NatsPlace
from trunkline.adapters.nats_store import NatsStore
from trunkline.adapters.sqlite_store import SqliteStore
from trunkline.control.changes import Intent, OrgAdded
from trunkline.control.gateways import GatewayParts, Gateways
from trunkline.control.mirrored_store import MirroredStore
from trunkline.control.receipts import Erasure, HolderAck, Receipt
from trunkline.control.registry import Registry
from trunkline.control.restored import BackupWatch
from trunkline.control.revocation import HERE, Revoker, RevokerParts
from trunkline.core.epochs import Subject, SubjectKind
from trunkline.core.freshness import LeaseGrants
from trunkline.observe import EventLog
from trunkline.ports.store import StoreDown
from trunkline.replay.counters import percentile

BAR_MS = 100.0
SUBJECT = Subject(kind=SubjectKind.MODEL, path="benchmark")
ME = Intent(actor="benchmark", reason="benchmark")
LOG = EventLog("benchmark")


class Unwritten:
    """No audit log: its own benchmark tells what it costs."""

    async def intent(self, action: str, subject: Subject, intent: Intent) -> None: ...
    async def outcome(self, receipt: Receipt, intent: Intent) -> None: ...
    async def erased(self, erasure: Erasure, intent: Intent) -> None: ...


@dataclass(frozen=True)
class Member:
    registry: Registry
    revoker: Revoker
    gateways: Gateways


def start_server(folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = folder / "server.conf"
    config.write_text(
        f"host: 127.0.0.1\nport: {port}\n"
        f'jetstream {{ store_dir: "{folder}", sync_interval: always }}\n'
    )
    binary = Path(sys.executable).parent / "nats-server"
    words = [str(binary), "-c", str(config)]
    child = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return child, f"nats://127.0.0.1:{port}"


async def joined(stack: AsyncExitStack, url: str, folder: Path, name: str) -> Member:
    clock = SystemClock()
    bucket = NatsBucket(NatsPlace(servers=(url,), bucket="trunkline-bench", replicas=1))
    board = NatsBoard(bucket, [])
    store = MirroredStore(NatsStore(bucket), await SqliteStore.open(folder / f"{name}.db"))
    async with asyncio.timeout(60):
        while not store.is_joined:
            try:
                await board.join()
                await store.sync()
            except StoreDown:
                await asyncio.sleep(0.1)
    stack.push_async_callback(store.close)
    registry = await Registry.load(store, clock)
    gateways = Gateways(
        GatewayParts(
            life=name, nonce=name, registry=registry, store=store, board=board, clock=clock, log=LOG
        )
    )
    revoker = await stack.enter_async_context(
        Revoker(
            RevokerParts(
                registry=registry,
                grants=LeaseGrants(clock.boot(), has_earlier_life=False),
                holders=list,
                here=lambda order: HolderAck(life=HERE),
                audit=Unwritten(),
                clock=clock,
                log=LOG,
                peers=gateways,
            )
        )
    )
    await stack.enter_async_context(gateways)
    running = asyncio.ensure_future(gateways.run(revoker, BackupWatch(clock, LOG)))
    stack.callback(running.cancel)
    return Member(registry=registry, revoker=revoker, gateways=gateways)


async def measured(url: str, folder: Path, count: int, rounds: int) -> dict[str, list[float]]:
    figures: dict[str, list[float]] = {"commit": [], "seen": [], "revoke": []}
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        members = [await joined(stack, url, folder, f"g{number}") for number in range(count)]
        waiting = {id(member): asyncio.Event() for member in members}
        for member in members:
            event = waiting[id(member)]
            member.registry.subscribe(lambda _committed, event=event: event.set())
        await asyncio.sleep(4.0)  # whoever was granted something in an earlier life is through
        assert all(member.gateways.is_valid() for member in members)
        for number in range(rounds):
            writer = members[number % count]
            others = [member for member in members if member is not writer]
            began_s = loop.time()
            change = OrgAdded(org=f"{number + 1:032x}", name=f"org-{number}")
            rev = await writer.registry.commit(change, ME)
            figures["commit"].append((loop.time() - began_s) * 1e3)
            for member in others:
                while member.registry.rev < rev:
                    waiting[id(member)].clear()
                    await waiting[id(member)].wait()
            figures["seen"].append((loop.time() - began_s) * 1e3)
            receipt = await writer.revoker.invalidate(SUBJECT, ME)
            assert receipt.fenced == (), f"silent: {receipt.fenced}"
            assert len(receipt.acked) == count
            figures["revoke"].append(receipt.ms)
            await asyncio.sleep(0.01)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gateways", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        child, url = start_server(Path(folder))
        try:
            figures = uvloop.run(measured(url, Path(folder), words.gateways, words.rounds))
        finally:
            child.terminate()
            child.wait()
    shown = {
        name: {f"p{share}_ms": round(percentile(sorted(ms), share / 100), 2) for share in (50, 99)}
        for name, ms in figures.items()
    }
    if words.json:
        print(json.dumps({"gateways": words.gateways, "rounds": words.rounds, **shown}))
    else:
        for name, row in shown.items():
            print(f"{name:8} p50 {row['p50_ms']:7.2f} ms   p99 {row['p99_ms']:7.2f} ms")
    return int(any(row["p99_ms"] > BAR_MS for row in shown.values()))


if __name__ == "__main__":
    sys.exit(main())
