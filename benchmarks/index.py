"""What the block index costs: a lookup for all workers, taking in events, and memory.

    python benchmarks/index.py [--json] [--blocks 1000000] [--pure-blocks 100000] [--rounds 400]

Chains of 256 blocks; one in eight is a hot prefix that eight workers hold down to different
depths, the others lie at one worker each. CPU time (process time), medians. `match` is asked for
random chains of the whole index, so that most of its memory is cold, as in service. "Growth" rows
repeat the lookup with a tenth of the blocks and with shorter prompts. Bars for 1 M blocks,
compiled: match 10 us at 16 workers and 40 us at 128; store 1 M blocks a second at 16 tokens a
block; 100 bytes a block and holder. "Sweep" is one step of dropping a retired namespace, 4,096
blocks that three workers hold, among others that stay. The pure index runs at its own size; the
ratio of the two does not depend on the machine.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import statistics
import time
from array import array
from typing import Any

from trunkline.native import _fallback

CHAIN_BLOCKS = 256
HOT_HOLDERS = 8
KEY, ROOT = bytes(range(32)), bytes(range(32, 64))
BARS = {
    "match_us_16_workers": 10.0,
    "match_us_128_workers": 40.0,
    "store_blocks_per_s_16_tokens": 1e6,
    "bytes_per_block_and_holder": 100.0,
}


def filled(module: Any, blocks: int, workers: int) -> tuple[Any, list[bytes], int]:
    """An index with so many distinct blocks, its chains' keys, and the count of (block, holder)."""
    draw = random.Random(2)
    index = module.BlockIndex(2 * blocks)
    index.add_namespace(KEY, ROOT)
    for _ in range(workers):
        index.add_slot()
    chains: list[bytes] = []
    holder_count = 0
    for number in range(blocks // CHAIN_BLOCKS):
        tokens = array("I", draw.randbytes(8 * CHAIN_BLOCKS))
        names = array("Q", range(number * CHAIN_BLOCKS, (number + 1) * CHAIN_BLOCKS))
        chains.append(_fallback.chain_keys(KEY, ROOT, tokens, 2))
        slots = draw.sample(range(workers), HOT_HOLDERS if number % 8 == 0 else 1)
        for nth, slot in enumerate(slots):
            depth = CHAIN_BLOCKS if nth == 0 else draw.randrange(1, CHAIN_BLOCKS + 1)
            index.store(slot, 0, 0, 0, names[:depth], tokens[: 2 * depth], 2)
            holder_count += depth
    return index, chains, holder_count


def match_us(index: Any, chains: list[bytes], prompt_blocks: int, rounds: int) -> float:
    """Median CPU microseconds of one lookup."""
    draw = random.Random(5)
    samples: list[float] = []
    for _ in range(rounds):
        # Fresh copies: in service the keys were made a moment ago, only the index is cold.
        chosen = [draw.choice(chains) for _ in range(16)]
        prompts = [bytes(bytearray(chain)[: 32 * prompt_blocks]) for chain in chosen]
        started = time.process_time_ns()
        for prompt in prompts:
            index.match(prompt)
        samples.append((time.process_time_ns() - started) / 1_000.0 / len(prompts))
    return statistics.median(samples)


def store_rate(module: Any, blocks: int, block_tokens: int) -> float:
    """Blocks a second when runs of 64 blocks from 16 workers fill an empty index."""
    index = module.BlockIndex(blocks)
    index.add_namespace(KEY, ROOT)
    for _ in range(16):
        index.add_slot()
    draw = random.Random(7)
    runs = blocks // 64
    spent_ns = 0
    for number in range(runs):
        tokens = array("I", draw.randbytes(4 * 64 * block_tokens))
        names = array("Q", draw.randbytes(8 * 64))
        started = time.process_time_ns()
        index.store(number % 16, 0, 0, 0, names, tokens, block_tokens)
        spent_ns += time.process_time_ns() - started
    return runs * 64 / (spent_ns / 1e9)


def sweep_us(module: Any, blocks: int) -> float:
    """Median CPU microseconds of dropping 4,096 blocks of a namespace that has half the index."""
    index = module.BlockIndex(2 * blocks)
    namespaces = [index.add_namespace(bytes([n]) * 32, ROOT) for n in range(2)]
    for _ in range(3):
        index.add_slot()
    draw = random.Random(11)
    for number in range(blocks // CHAIN_BLOCKS):
        tokens = array("I", draw.randbytes(8 * CHAIN_BLOCKS))
        names = array("Q", range(number * CHAIN_BLOCKS, (number + 1) * CHAIN_BLOCKS))
        for slot in range(3):
            index.store(slot, 0, namespaces[number % 2], 0, names, tokens, 2)
    index.retire_namespace(namespaces[0])
    samples: list[float] = []
    is_left = True
    while is_left:
        started = time.process_time_ns()
        is_left = index.sweep(4_096) > 0
        samples.append((time.process_time_ns() - started) / 1_000.0)
    return statistics.median(samples)


def measure(module: Any, blocks: int, rounds: int) -> dict[str, Any]:
    row: dict[str, Any] = {"blocks": blocks}
    for workers in (16, 128, 1_000):
        index, chains, holder_count = filled(module, blocks, workers)
        row[f"match_us_{workers}_workers"] = match_us(index, chains, CHAIN_BLOCKS, rounds)
        if workers == 16:
            row["bytes_per_block_and_holder"] = index.memory_bytes() / holder_count
            row["holders_per_block"] = holder_count / index.block_count()
            for prompt_blocks in (16, 64):
                name = f"growth_match_us_{prompt_blocks}_of_{CHAIN_BLOCKS}_blocks"
                row[name] = match_us(index, chains, prompt_blocks, rounds)
        del index
    small, chains, _ = filled(module, blocks // 10, 16)
    row["growth_match_us_a_tenth_of_the_blocks"] = match_us(small, chains, CHAIN_BLOCKS, rounds)
    del small
    row["sweep_us_4096_blocks"] = sweep_us(module, blocks)
    row["store_blocks_per_s_16_tokens"] = store_rate(module, blocks // 2, 16)
    row["store_blocks_per_s_512_tokens"] = store_rate(module, max(6_400, blocks // 50), 512)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--pure-blocks", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=400)
    args = parser.parse_args()
    results: dict[str, Any] = {"bars": BARS, "compiled": None}
    try:
        compiled = importlib.import_module("trunkline.native._core")
    except ImportError:
        compiled = None
    if compiled is not None:  # first, before the pure index leaves its heap in pieces
        results["compiled"] = measure(compiled, args.blocks, args.rounds)
    results["pure"] = measure(_fallback, args.pure_blocks, args.rounds // 4)
    if compiled is not None:
        results["pure_to_compiled_match_ratio"] = (
            results["pure"]["match_us_16_workers"] / results["compiled"]["match_us_16_workers"]
        )
    if args.json:
        print(json.dumps(results, indent=2))
        return
    names = list(results["pure"])
    print(f"{'':40}  {'compiled':>12}  {'pure':>12}  {'bar':>12}")
    for name in names:
        cells = [(results[kind] or {}).get(name, "-") for kind in ("compiled", "pure")]
        cells.append(BARS.get(name, "-"))
        shown = [cell if isinstance(cell, str) else f"{cell:,.1f}" for cell in cells]
        print(f"{name:40}  " + "  ".join(f"{cell:>12}" for cell in shown))


if __name__ == "__main__":
    main()
