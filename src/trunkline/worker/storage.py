"""Puts together what is behind a worker's device memory: store, tier, pulls and pull server.

One store a process, whatever ranks there are: they share the host memory. Who may pull has to be
told (`address`), so nothing listens before `start`. Read `tiers.py`, `pulls.py` and `lending.py`
for the parts.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trunkline.core import simkv
from trunkline.core.eviction import make_evictor
from trunkline.core.transfer import MAX_GRANT_LIFE_MS, hash_scheme
from trunkline.kv.client import Puller
from trunkline.kv.disk import DiskOptions, DiskTier
from trunkline.kv.files import FolderFiles
from trunkline.kv.judge import PullHost, StoreJudge
from trunkline.kv.orders import MAX_SOURCES
from trunkline.kv.pulls import PullOptions
from trunkline.kv.records import Component, Layout
from trunkline.kv.server import PullServer, ServerOptions
from trunkline.kv.store import BlockStore, StoreOptions
from trunkline.kv.wire import Identity
from trunkline.ports.clock import Clock
from trunkline.ports.sealer import Sealer
from trunkline.worker.coming import Coming
from trunkline.worker.fence import Fence
from trunkline.worker.lending import LentStore
from trunkline.worker.lifting import Lifts
from trunkline.worker.link import Link
from trunkline.worker.options import WorkerOptions
from trunkline.worker.pulls import MAX_PULLS, SETUP_MS, Pulls, PullTerms
from trunkline.worker.tiers import HostTier

MIN_STAGING_BLOCKS = 256
STAGING_SHARE = 0.25
"""Of the store, beside it: what may be on its way here."""
MOVING_BLOCKS = 128
"""On their way to the disk; what gives way beyond that is dropped."""
_STALL_MS = 600_000.0
"""Of who pulls: the source's link keeps it waiting for the first answer, the deadline alone ends
that. What it holds meanwhile is a staging of its own, which outlives the deadline. A source has no
such time: it waits for its link before it pins, and a peer that then takes nothing is given up.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageParts:
    """What storage is given: `draw(n)` makes n bytes that nobody can guess."""

    fence: Fence
    clock: Clock
    draw: Callable[[int], bytes]
    transfer_key: bytes
    """Empty where the worker neither pulls nor is pulled from."""
    vocab_size: int
    boot_nonce: str
    sealer: Sealer | None = None
    """Encrypts what goes to the disk; needed where anything does."""


@dataclass(slots=True, kw_only=True)
class Exchange:
    """Both directions of pulls."""

    pulls: Pulls
    server: PullServer
    lent: LentStore
    identity: Identity
    token_bytes: int
    """As the profile has it."""

    @property
    def bytes_out(self) -> int:
        """As the profile has it."""
        return self.server.figures.bytes_out // simkv.TOKEN_KV_BYTES * self.token_bytes


@dataclass(slots=True, kw_only=True)
class Storage:
    """What a worker has behind its device memory."""

    tier: HostTier
    exchange: Exchange | None
    lifts: Lifts | None
    """None where there is no disk."""

    @property
    def tiers(self) -> tuple[str, ...]:
        """Their names in receipts and metrics."""
        return ("host", "disk") if self.lifts else ("host",)

    def start(self) -> None:
        """Listen for those who pull, and keep connections to others warm. Raises OSError."""
        if self.exchange is not None:
            self.exchange.server.start()
            self.exchange.pulls.start()

    def address(self) -> Mapping[str, Any] | None:  # JSON
        """What the gateway is told of it; None where nobody can pull from here."""
        exchange = self.exchange
        if exchange is None:
            return None
        host, port = exchange.server.address
        layout = self.tier.store.layout
        return {
            "worker": exchange.identity.worker,
            "incarnation": exchange.identity.incarnation,
            "host": host,
            "port": port,
            "local": exchange.server.local_address,
            "layout": layout.digest.hex(),
            "block_bytes": layout.block_bytes,
            "lends_owed": True,
            "sources": MAX_SOURCES,
        }

    def close(self) -> None:
        if self.exchange is not None:
            self.exchange.lent.close()
            self.exchange.pulls.close()
            self.exchange.server.close()
        if self.lifts is not None:
            self.lifts.close()
        self.tier.close()


def build_storage(options: WorkerOptions, parts: StorageParts) -> Storage | None:
    """None where there is no host memory to keep blocks in. Raises OSError."""
    if not options.host_blocks:
        return None
    layout = _layout(options, parts.vocab_size)
    size = layout.block_bytes
    staging_blocks = max(MIN_STAGING_BLOCKS, int(options.host_blocks * STAGING_SHARE))
    host_bytes = options.host_blocks * size
    store = BlockStore(
        layout,
        StoreOptions(host_bytes=host_bytes, staging_bytes=staging_blocks * size),
        clock=parts.clock,
        judge=StoreJudge(parts.fence),
        make_order=lambda: make_evictor(options.eviction, capacity_bytes=host_bytes),
        draw=parts.draw,
        disk=_disk(options, parts, size) if options.disk_blocks else None,
    )
    profile, block_tokens = options.latency, options.block_size
    tier = HostTier(
        store,
        clock=parts.clock,
        block_tokens=block_tokens,
        host_blocks=options.host_blocks,
        device_blocks=options.blocks,
        has_disk=options.disk_blocks > 0,
        saved_ms=lambda index: (
            profile.prefill_ms(block_tokens, index * block_tokens) - profile.prefill_fixed_ms
        ),
    )
    exchange = _exchange(options, parts, tier) if parts.transfer_key else None
    if exchange is None:
        sys.stderr.write("trunkline: no transfer key, so nothing is pulled from here or to here\n")
    lifts = None
    if tier.has_disk:
        lifts = Lifts(
            tier,
            clock=parts.clock,
            load_ms=lambda tokens: profile.read_ms(tokens) * options.time_scale,
            block_tokens=block_tokens,
        )
    return Storage(tier=tier, exchange=exchange, lifts=lifts)


def _disk(options: WorkerOptions, parts: StorageParts, block_bytes: int) -> DiskTier:
    assert parts.sealer is not None, "nothing goes to a disk in the clear"
    return DiskTier(
        FolderFiles(Path(options.disk_dir), parts.boot_nonce),
        parts.sealer,
        parts.clock,
        DiskOptions(
            capacity_bytes=options.disk_blocks * (block_bytes + parts.sealer.overhead_bytes),
            moving_blocks=MOVING_BLOCKS,
        ),
    )


def _exchange(options: WorkerOptions, parts: StorageParts, tier: HostTier) -> Exchange:
    store, layout, clock = tier.store, tier.store.layout, parts.clock
    token_bytes, block_tokens = options.latency.kv_bytes_per_token, options.block_size
    ms_per_token = token_bytes * 8 / (options.link_gbit * 1e9) * 1e3 * options.time_scale
    host = PullHost(parts.fence)
    identity = Identity(
        worker=options.worker_id,
        incarnation=parts.boot_nonce,
        scheme=hash_scheme(block_tokens),
    )
    puller = Puller(
        store,
        layout,
        identity,
        parts.transfer_key,
        clock,
        PullOptions(max_pulls=MAX_PULLS, stall_ms=_STALL_MS),
        host=host,
        draw=parts.draw,
    )
    lent = LentStore(
        store,
        link=Link(ms_per_token),
        clock=clock,
        faults=options.faults,
        block_tokens=block_tokens,
        coming=Coming(clock, block_tokens=block_tokens),
    )
    server = PullServer(
        lent,
        layout,
        identity,
        parts.transfer_key,
        clock,
        ServerOptions(
            host=options.pull_host,
            port=options.pull_port,
            lease_ms=MAX_GRANT_LIFE_MS,  # so `lent` is told when the grant ends
        ),
        host=host,
        draw=parts.draw,
    )
    pulls = Pulls(
        tier,
        puller,
        transfer_key=parts.transfer_key,
        clock=clock,
        link=Link(ms_per_token),
        host=host,
        terms=PullTerms(
            block_tokens=block_tokens,
            token_bytes=token_bytes,
            setup_ms=SETUP_MS * options.time_scale,
            patience_ms=options.pull_patience_ms,
            saved_ms=lambda first, last: _saved_ms(options, first, last),
        ),
    )
    return Exchange(
        pulls=pulls, server=server, lent=lent, identity=identity, token_bytes=token_bytes
    )


def _saved_ms(options: WorkerOptions, first: int, last: int) -> float:
    """What computing the blocks from one to another of a prompt takes that is computed further in
    any case, less what copying them to the device does.
    """
    profile, count = options.latency, (last - first) * options.block_size
    computed_ms = profile.prefill_ms(count, first * options.block_size) - profile.prefill_fixed_ms
    factor = options.time_scale * options.faults.slow_factor
    return (computed_ms - profile.load_ms(count)) * factor


def _layout(options: WorkerOptions, vocab_size: int) -> Layout:
    """What the bytes of a block mean: workers that differ in any of it exchange nothing."""
    return Layout(
        model=_digest(simkv.ROOT.hex(), options.model),
        adapter="",
        tokenizer=_digest(str(vocab_size)),
        rope="",
        dtype="",
        kv_format=_digest("trunkline simulated kv 1", str(options.latency.kv_bytes_per_token)),
        tp_rank=0,
        tp_size=1,
        block_tokens=options.block_size,
        components=(Component(name="kv", size_bytes=options.block_size * simkv.TOKEN_KV_BYTES),),
    )


def _digest(*words: str) -> str:
    return hashlib.sha256("\0".join(words).encode()).hexdigest()
