"""What chaining the block keys of a prompt costs.

    python benchmarks/keys.py [--json] [--rounds 200]

CPU time (process time) a call, medians: the compiled function where it is built, the Python one,
and as baseline the plain way to write it, one `hashlib.blake2b(...)` object set up for each
block. Prompts of 500 to 32,000 tokens at 16 a block show growth with length, block sizes of 16 to
256 what a block costs. Bars for 4,000 tokens at 16 a block: 60 us compiled, 400 us in Python. The
ratios to the baseline do not depend on the machine.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import random
import statistics
import struct
import time
from array import array
from collections.abc import Callable
from typing import Any

from trunkline.native import _fallback

KEY, ROOT = bytes(range(32)), bytes(range(32, 64))
SHAPES = ((500, 16), (4_000, 16), (32_000, 16), (4_000, 64), (4_000, 256))
BARS_US = {"compiled": 60.0, "pure": 400.0}


def plain_loop(
    key: bytes, root: bytes, tokens: array[int], block_tokens: int, extra: bytes = b""
) -> bytes:
    """The chain as one would write it first."""
    previous, out = root, b""
    tail = struct.pack("<I", len(extra)) + extra
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        words = tokens[start : start + block_tokens].tobytes()
        data = previous + struct.pack("<I", block_tokens) + words + tail
        previous = hashlib.blake2b(data, digest_size=32, key=key, person=b"blk").digest()
        out += previous
    return out


def call_us(function: Callable[..., bytes], tokens: array[int], size: int, rounds: int) -> float:
    """Median CPU microseconds of one call; each sample times enough calls for a steady clock."""
    calls = max(1, 20_000 // len(tokens))
    samples: list[float] = []
    for _ in range(rounds):
        started = time.process_time_ns()
        for _ in range(calls):
            function(KEY, ROOT, tokens, size)
        samples.append((time.process_time_ns() - started) / 1_000.0 / calls)
    return statistics.median(samples)


def measure(rounds: int) -> list[dict[str, Any]]:
    """One row for each shape; `compiled_us` is None where the extension is not built."""
    try:
        compiled = importlib.import_module("trunkline.native._core").chain_keys
    except ImportError:
        compiled = None
    draw = random.Random(1)
    rows: list[dict[str, Any]] = []
    for token_count, size in SHAPES:
        tokens = array("I", (draw.randrange(128_000) for _ in range(token_count)))
        expected = plain_loop(KEY, ROOT, tokens, size)
        assert _fallback.chain_keys(KEY, ROOT, tokens, size) == expected
        plain_us = call_us(plain_loop, tokens, size, rounds)
        pure_us = call_us(_fallback.chain_keys, tokens, size, rounds)
        compiled_us = None
        if compiled is not None:
            assert compiled(KEY, ROOT, tokens, size) == expected
            compiled_us = call_us(compiled, tokens, size, rounds)
        rows.append(
            {
                "tokens": token_count,
                "block_tokens": size,
                "compiled_us": compiled_us,
                "pure_us": pure_us,
                "plain_loop_us": plain_us,
                "plain_to_compiled_ratio": plain_us / compiled_us if compiled_us else None,
                "plain_to_pure_ratio": plain_us / pure_us,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    parser.add_argument("--rounds", type=int, default=200)
    args = parser.parse_args()
    rows = measure(args.rounds)
    if args.json:
        print(json.dumps({"bars_us": BARS_US, "rows": rows}, indent=2))
        return
    print("tokens  a block  compiled us  pure us  plain loop us  plain/compiled  plain/pure")
    for row in rows:
        compiled = "-" if row["compiled_us"] is None else f"{row['compiled_us']:.1f}"
        ratio = row["plain_to_compiled_ratio"]
        print(
            f"{row['tokens']:6d}  {row['block_tokens']:7d}  {compiled:>11}  {row['pure_us']:7.1f}"
            f"  {row['plain_loop_us']:13.1f}  {'-' if ratio is None else f'{ratio:.1f}':>14}"
            f"  {row['plain_to_pure_ratio']:10.2f}"
        )
    print(f"bars for 4,000 tokens at 16 a block: {BARS_US}")


if __name__ == "__main__":
    main()
