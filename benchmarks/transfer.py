"""How fast KV blocks are pulled on one machine, verification included, beside bare copies.

    python benchmarks/transfer.py [--rounds 31] [--block-mib 8] [--blocks 8] [--mooncake] [--json]

A source in a process of its own has 8 blocks of 8 MiB; this process pulls them in chunks of 1 MiB,
every chunk with its digest compared, blocks published. Beside it, with a process of its own as
well: as many bytes by `sendall`/`recv_into` on a blocking socket, and copied in and out of shared
memory in slots of 1 MiB. The four take turns, so that what else the machine does meets all of them;
medians over the rounds count, and ratios are of each round's pair.
Bars: 0.7 of the bare socket over TCP, 0.5 of the bare copy over shared memory; exit code 1 below.
`--mooncake` adds Mooncake's transfer engine over tcp, where it is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from multiprocessing import resource_tracker, shared_memory
from typing import Any, BinaryIO, cast

from trunkline.adapters.clock import SystemClock
from trunkline.core.eviction import make_evictor
from trunkline.core.records import Instant
from trunkline.core.transfer import Grant, PullEnd, Reason, hash_scheme, keys_digest, kv_chain
from trunkline.kv import BlockStore, Component, Layout, Owner, Place, StoreOptions
from trunkline.kv.client import Puller
from trunkline.kv.peers import PeerOptions, Source
from trunkline.kv.pulls import PullOptions, PullRequest
from trunkline.kv.server import PullServer, ServerOptions
from trunkline.kv.wire import Identity

MIB = 1 << 20
CHUNK_BYTES = MIB
SLOTS = 4
KEY = bytes(32)
OWNER = Owner(ns=b"n" * 16)
BARS = {"tcp": 0.7, "shared_memory": 0.5}
CLOCK = SystemClock()


class Host:
    """Nothing was revoked."""

    def fault(self, grant: Grant) -> Reason | None:
        del grant


class Judge:
    """The same, for a store."""

    def fault(self, owner: Owner) -> Reason | None:
        del owner


def layout_of(block_bytes: int) -> Layout:
    return Layout(
        model="m", adapter="", tokenizer="t", rope="r", dtype="bf16", kv_format="f",
        tp_rank=0, tp_size=1, block_tokens=512, chunk_bytes=CHUNK_BYTES,
        components=(Component(name="kv", size_bytes=block_bytes),),
    )  # fmt: skip


def places_of(count: int) -> tuple[Place, ...]:
    packed = kv_chain("salt", array("I", range(512 * count)), 512)
    keys = [bytes(32), *(packed[at : at + 32] for at in range(0, len(packed), 32))]
    return tuple(
        Place(key=key, parent=parent, index=index)
        for index, (parent, key) in enumerate(pairwise(keys))
    )


def store_of(layout: Layout, blocks: int) -> BlockStore:
    size = blocks * layout.block_bytes
    return BlockStore(
        layout,
        StoreOptions(host_bytes=size, staging_bytes=size),
        clock=CLOCK,
        judge=Judge(),
        make_order=partial(make_evictor, "lru", capacity_bytes=size),
        draw=os.urandom,
    )


def identity(worker: str, layout: Layout) -> Identity:
    return Identity(worker=worker, incarnation="1", scheme=hash_scheme(layout.block_tokens))


# -- the other processes ---------------------------------------------------------------------------


def serve_pulls(block_bytes: int, blocks: int) -> None:
    layout = layout_of(block_bytes)
    store = store_of(layout, blocks)
    for number, place in enumerate(places_of(blocks)):
        store.put(place, OWNER, os.urandom(CHUNK_BYTES) * (block_bytes // CHUNK_BYTES))
        assert number == place.index
    server = PullServer(
        store, layout, identity("source", layout), KEY, CLOCK, ServerOptions(),
        host=Host(), draw=os.urandom,
    )  # fmt: skip
    server.start()
    print(json.dumps({"port": server.address[1], "local": server.local_address}), flush=True)
    sys.stdin.read()
    server.close()


def serve_bytes(size: int) -> None:
    """A byte asks for all of them."""
    payload = memoryview(os.urandom(CHUNK_BYTES) * (size // CHUNK_BYTES))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
        connected, _ = listener.accept()
    with connected:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while connected.recv(1):
            for begin in range(0, size, CHUNK_BYTES):
                connected.sendall(payload[begin : begin + CHUNK_BYTES])


def serve_slots(size: int, name: str, address: str) -> None:
    """A byte asks for all of them; a byte says that a slot is full, another that it is free."""
    payload = memoryview(os.urandom(CHUNK_BYTES) * (size // CHUNK_BYTES))
    shared = attached(name)
    view = memory_of(shared)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        print("{}", flush=True)
        connected, _ = listener.accept()
    with connected:
        while connected.recv(1):
            for number, begin in enumerate(range(0, size, CHUNK_BYTES)):
                if number >= SLOTS:
                    connected.recv(1)
                slot = number % SLOTS * CHUNK_BYTES
                view[slot : slot + CHUNK_BYTES] = payload[begin : begin + CHUNK_BYTES]
                connected.send(b"f")
            for _ in range(min(SLOTS, size // CHUNK_BYTES)):
                connected.recv(1)
    del view
    shared.close()


def memory_of(shared: shared_memory.SharedMemory) -> memoryview:
    assert shared.buf is not None
    return shared.buf


def attached(name: str) -> shared_memory.SharedMemory:
    shared = shared_memory.SharedMemory(name=name)
    # It belongs to the process that made it; this one's tracker would remove it a second time.
    resource_tracker.unregister(f"/{name}", "shared_memory")
    return shared


@contextmanager
def child(role: str, *words: object) -> Iterator[dict[str, Any]]:
    """A process of this script in that role; it ends when its input does."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--role", role, *map(str, words)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    output = cast("BinaryIO", process.stdout)
    try:
        yield json.loads(output.readline())
    finally:
        process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        output.close()


# -- contenders ------------------------------------------------------------------------------------


@dataclass
class Pulls:
    """Pulls all blocks into a store that has none of them."""

    layout: Layout
    blocks: int
    source: Source
    is_local: bool

    def __post_init__(self) -> None:
        self.places = places_of(self.blocks)
        self.setup_ms = 0.0
        self.verify_ms: list[float] = []
        self.store = store_of(self.layout, self.blocks)
        options = PullOptions(peers=PeerOptions(is_local_used=self.is_local), stall_ms=60_000.0)
        self.puller = Puller(
            self.store, self.layout, identity("destination", self.layout), KEY, CLOCK, options,
            host=Host(), draw=os.urandom,
        )  # fmt: skip

    def __call__(self) -> float:
        """One pull, in seconds."""
        now = CLOCK.now()
        grant = Grant(
            source="source", source_incarnation="1",
            destination="destination", destination_incarnation="1",
            ns=OWNER.ns, subjects=(), epochs=(), rev=0, layout=self.layout.digest,
            first_block=0, block_count=self.blocks,
            keys=keys_digest(b"".join(place.key for place in self.places)),
            max_bytes=self.blocks * self.layout.block_bytes,
            deadline_ms=int(CLOCK.wall() * 1_000 + 50_000), nonce=os.urandom(16),
        )  # fmt: skip
        request = PullRequest(
            grant=grant.signed(KEY),
            source=self.source,
            places=self.places,
            owner=OWNER,
            deadline=Instant(now + 50_000.0),
        )
        result = self.puller.pull(request)
        assert (result.end, result.reason) == (PullEnd.PUBLISHED, None), result
        self.verify_ms.append(result.verify_ms)
        # Memory of the store is touched once, as that of the bare contenders is.
        self.store.condemn(lambda owner: True)
        while self.store.erase(self.blocks):
            pass
        return result.ms / 1_000.0

    def close(self) -> None:
        self.puller.close()


@dataclass
class BareSocket:
    port: int
    size: int

    def __post_init__(self) -> None:
        self.buffer = memoryview(bytearray(self.size))
        self.connected = socket.create_connection(("127.0.0.1", self.port))
        self.connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __call__(self) -> float:
        began = CLOCK.now()
        self.connected.sendall(b"g")
        got = 0
        while got < self.size:
            got += self.connected.recv_into(self.buffer[got:], min(CHUNK_BYTES, self.size - got))
        return (CLOCK.now() - began) / 1_000.0

    def close(self) -> None:
        self.connected.close()


@dataclass
class BareMemory:
    """In and out of shared memory, a byte on a socket for each slot that is full or free."""

    shared: shared_memory.SharedMemory
    address: str
    size: int

    def __post_init__(self) -> None:
        self.buffer = memoryview(bytearray(self.size))
        self.connected = socket.socket(socket.AF_UNIX)
        self.connected.connect(self.address)

    def __call__(self) -> float:
        view = memory_of(self.shared)
        began = CLOCK.now()
        self.connected.send(b"g")
        for number, begin in enumerate(range(0, self.size, CHUNK_BYTES)):
            self.connected.recv(1)
            slot = number % SLOTS * CHUNK_BYTES
            self.buffer[begin : begin + CHUNK_BYTES] = view[slot : slot + CHUNK_BYTES]
            self.connected.send(b"c")
        seconds = (CLOCK.now() - began) / 1_000.0
        del view
        return seconds

    def close(self) -> None:
        self.connected.close()


# -- Mooncake --------------------------------------------------------------------------------------


def serve_mooncake(size: int) -> None:
    engine, address = _mooncake_engine(size)
    print(json.dumps({"port": engine.get_rpc_port(), "address": address}), flush=True)
    sys.stdin.read()


def _mooncake_engine(size: int) -> tuple[Any, int]:
    os.environ["MC_TCP_BIND_ADDRESS"] = "127.0.0.1"  # it listens on every interface otherwise
    from mooncake.engine import TransferEngine  # pyright: ignore[reportMissingImports]

    engine: Any = TransferEngine()  # no type hints
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
        raise RuntimeError("mooncake's transfer engine does not start")
    address = engine.allocate_managed_buffer(size)
    return engine, address


class Mooncake:
    def __init__(self, port: int, remote: int, size: int) -> None:
        self.engine, self.local = _mooncake_engine(size)
        self.target, self.remote, self.size = f"127.0.0.1:{port}", remote, size

    def __call__(self) -> float:
        began = CLOCK.now()
        status = self.engine.transfer_sync_read(self.target, self.local, self.remote, self.size)
        assert status == 0, status
        return (CLOCK.now() - began) / 1_000.0

    def close(self) -> None:
        return


# -- measuring -------------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> dict[str, Any]:
    block_bytes = args.block_mib * MIB
    size = args.blocks * block_bytes
    layout = layout_of(block_bytes)
    with ExitStack() as stack:
        ready = stack.enter_context(child("pulls", block_bytes, args.blocks))
        bare = stack.enter_context(child("bytes", size))
        shared = shared_memory.SharedMemory(create=True, size=SLOTS * CHUNK_BYTES)
        stack.callback(shared.unlink)
        stack.callback(shared.close)
        address = f"\0trunkline-bench-{os.getpid()}"
        stack.enter_context(child("slots", size, shared.name, address[1:]))
        near = Source(
            worker="source", incarnation="1", host="127.0.0.1",
            port=ready["port"], local=ready["local"],
        )  # fmt: skip
        runs: dict[str, Callable[[], float]] = {
            "tcp": Pulls(layout, args.blocks, near, is_local=False),
            "bare socket": BareSocket(bare["port"], size),
            "shared memory": Pulls(layout, args.blocks, near, is_local=True),
            "bare memory": BareMemory(shared, address, size),
        }
        if args.mooncake and importlib.util.find_spec("mooncake") is not None:
            other = stack.enter_context(child("mooncake", size))
            runs["mooncake tcp"] = Mooncake(other["port"], other["address"], size)
        for run in runs.values():
            stack.callback(cast("Any", run).close)  # each has one
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        names = list(runs)
        for number in range(args.rounds + 2):
            names = [*names[1:], names[0]]  # nobody always follows the same one
            for name in names:
                took = runs[name]()
                if number >= 2:  # the first ones touch memory and open connections
                    seconds[name].append(took)
        return report(args, size, seconds, runs)


def report(
    args: argparse.Namespace,
    size: int,
    seconds: dict[str, list[float]],
    runs: dict[str, Callable[[], float]],
) -> dict[str, Any]:
    gib = size / (1 << 30)
    pairs = {"tcp": ("tcp", "bare socket"), "shared_memory": ("shared memory", "bare memory")}
    ratios = {
        name: statistics.median(b / a for a, b in zip(seconds[ours], seconds[theirs], strict=True))
        for name, (ours, theirs) in pairs.items()
    }
    verify = {
        name: round(statistics.median(run.verify_ms), 3)
        for name, run in runs.items()
        if isinstance(run, Pulls)
    }
    return {
        "benchmark": "transfer",
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "rounds": args.rounds,
        "mib_a_pull": size // MIB,
        "gib_per_s": {name: _spread([gib / one for one in all_]) for name, all_ in seconds.items()},
        "verify_ms": verify,
        "ratio": {name: round(ratio, 3) for name, ratio in ratios.items()},
        "bars": BARS,
        "mooncake": _mooncake_note(args),
        "passed": all(ratios[name] >= bar for name, bar in BARS.items()),
    }


def _mooncake_note(args: argparse.Namespace) -> str:
    if importlib.util.find_spec("mooncake") is None:
        return "not installed"
    return "measured" if args.mooncake else "installed, not asked for (--mooncake)"


def _spread(rates: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(rates), 3),
        "least": round(min(rates), 3),
        "most": round(max(rates), 3),
    }


def play(role: str, words: list[str]) -> None:
    match role:
        case "pulls":
            serve_pulls(int(words[0]), int(words[1]))
        case "bytes":
            serve_bytes(int(words[0]))
        case "slots":
            serve_slots(int(words[0]), words[1], f"\0{words[2]}")
        case _:
            serve_mooncake(int(words[0]))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--block-mib", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--mooncake", action="store_true", help="beside its engine over tcp")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        play(args.role, args.words)
        return 0
    result = measure(args)
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        for name, rates in result["gib_per_s"].items():
            print(f"{name:14} {rates['median']:8.3f} GiB/s  ({rates['least']} to {rates['most']})")
        for name, ratio in result["ratio"].items():
            print(f"{name:14} {ratio:8.3f} of the bare one; bar {BARS[name]}")
        print(f"verifying      {result['verify_ms']} ms of {result['mib_a_pull']} MiB")
        print(f"mooncake       {result['mooncake']}")
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
