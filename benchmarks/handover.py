"""What it costs to hand over what is known of a worker: bytes a block, CPU of both gateways.

    python benchmarks/handover.py --blocks 100000

Both directories, the sealing and the words are the gateways' own; NATS's part is not in it. Blocks
of several tenants in chains as prompts make them. CPU time, of each run the best of `--rounds`.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from array import array

from trunkline.control.sibling_words import Piece, Seal
from trunkline.control.siblings import SLICE_ROWS
from trunkline.core.directory import Directory
from trunkline.core.events import BlocksStored
from trunkline.core.handover import Rows
from trunkline.core.identity import ModelIdentity, Namespace, Scope, ScopeKind, derive_namespace
from trunkline.core.records import NamespaceTag, Tier, WorkerId
from trunkline.native import IMPLEMENTATION

WORKER = WorkerId("w")
BLOCK_TOKENS = 16
CHAIN_BLOCKS = 64


def namespaces(count: int) -> list[Namespace]:
    model = ModelIdentity(model_id="m", block_tokens=BLOCK_TOKENS)
    scopes = [Scope(kind=ScopeKind.TENANT, org="o", tenant=f"t{at}") for at in range(count)]
    return [derive_namespace(bytes(32), scope, model) for scope in scopes]


def directory(known: list[Namespace], blocks: int, seed: int) -> Directory:
    """Each gateway draws its own seed: in the order of one's table the other's fills up evenly."""
    made = Directory(max_blocks=2 * blocks + 1_024, seed=seed)
    for namespace in known:
        made.admit_namespace(namespace)
    made.join(WORKER, block_tokens=BLOCK_TOKENS, max_held=2 * blocks + 1_024)
    return made


def filled(known: list[Namespace], blocks: int, dice: random.Random) -> Directory:
    made = directory(known, blocks, seed=dice.getrandbits(64))
    for _ in range(0, blocks, CHAIN_BLOCKS):
        names = array("Q", (dice.getrandbits(64) for _ in range(CHAIN_BLOCKS)))
        tokens = array("I", (dice.randrange(1 << 17) for _ in range(CHAIN_BLOCKS * BLOCK_TOKENS)))
        made.stored(
            WORKER,
            BlocksStored(
                hashes=names,
                parent=None,
                tokens=tokens,
                block_tokens=BLOCK_TOKENS,
                tier=Tier.DEVICE,
                salt=dice.choice(known).salt,
            ),
        )
    return made


def handed_over(source: Directory, to: Directory, seal: Seal) -> tuple[int, float, float, float]:
    """Bytes, CPU ms of either side, and the longest that one slice holds a loop, ms."""
    told_ms = taken_ms = longest_ms = 0.0
    byte_count, index, start = 0, 0, 0
    while start >= 0:
        began = time.process_time()
        rows = source.export(WORKER, start, SLICE_ROWS)
        piece = Piece(number="n" * 32, index=index, packed=rows.packed, tags=rows.tags)
        frame = seal.close(piece)
        between = time.process_time()
        opened = seal.open(frame)
        assert isinstance(opened, Piece)
        tags = tuple(NamespaceTag(tag) for tag in opened.tags)
        to.adopt(WORKER, Rows(packed=opened.packed, tags=tags))
        ended = time.process_time()
        told_ms += 1e3 * (between - began)
        taken_ms += 1e3 * (ended - between)
        longest_ms = max(longest_ms, 1e3 * max(between - began, ended - between))
        byte_count, index, start = byte_count + len(frame), index + 1, rows.next_start
    return byte_count, told_ms, taken_ms, longest_ms


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--tenants", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    known = namespaces(args.tenants)
    source = filled(known, args.blocks, random.Random(args.seed))
    runs: list[tuple[int, float, float, float]] = []
    for turn in range(args.rounds):
        to = directory(known, args.blocks, seed=turn)
        runs.append(handed_over(source, to, Seal(bytes(32))))
        assert to.held_keys(WORKER) == source.held_keys(WORKER)
    count = source.held_count(WORKER)
    told_ms, taken_ms = min(run[1] for run in runs), min(run[2] for run in runs)
    longest_ms = statistics.median(run[3] for run in runs)
    print(f"{count:,} blocks of {args.tenants} tenants, {IMPLEMENTATION} index")
    print(f"on the wire    {runs[0][0] / count:.1f} bytes a block, {runs[0][0] / 1e6:.1f} MB")
    print(f"who tells      {told_ms:.0f} ms of CPU")
    print(f"who takes      {taken_ms:.0f} ms of CPU")
    print(f"longest slice  {longest_ms:.1f} ms (median of {args.rounds} runs)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
