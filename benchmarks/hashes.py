"""That no two random blocks get one key: so many blocks, every key against every other.

    python benchmarks/hashes.py [--json] [--blocks 10000000]

Keys of one namespace, each block at the root, so that nothing but its 16 tokens tells it from
another. Already keys that agree in their first 64 bits fail the run: with ten million blocks one
such pair is to be expected in 370,000 runs, and whole keys never agree. Also counted is how evenly
keys fall into 256 buckets by their first byte, as index tables rely on it (1.0 is even). Exit code
1 on an agreement. About ten seconds and 120 MB.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from array import array
from typing import Any

from trunkline.core.identity import ModelIdentity, Scope, ScopeKind, derive_namespace
from trunkline.native import chain_keys

BLOCK_TOKENS = 16
BUCKETS = 256
NAMESPACE = derive_namespace(
    bytes(range(32)),
    Scope(kind=ScopeKind.TENANT, org="o", tenant="t"),
    ModelIdentity(model_id="m", block_tokens=BLOCK_TOKENS),
)


def measure(blocks: int) -> dict[str, Any]:
    draw = random.Random(60)
    buckets = [array("Q") for _ in range(BUCKETS)]
    started = time.process_time()
    for number in range(blocks):
        tokens = draw.randbytes(4 * BLOCK_TOKENS - 4) + number.to_bytes(4, "little")
        key = chain_keys(NAMESPACE.key, NAMESPACE.root, tokens, BLOCK_TOKENS)
        buckets[key[0]].append(int.from_bytes(key[:8], "big"))
    equal_heads = 0
    for bucket in buckets:
        equal_heads += len(bucket) - len(set(bucket))
    sizes = [len(bucket) for bucket in buckets]
    mean = blocks / BUCKETS
    return {
        "blocks": blocks,
        "pairs_compared": blocks * (blocks - 1) // 2,
        "keys_equal_in_64_bits": equal_heads,
        "bucket_chi_square_over_255": sum((n - mean) ** 2 / mean for n in sizes) / (BUCKETS - 1),
        "cpu_s": time.process_time() - started,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    parser.add_argument("--blocks", type=int, default=10_000_000)
    args = parser.parse_args()
    result = measure(args.blocks)
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        for name, value in result.items():
            print(
                f"{name:30} {value:>24,.3f}" if type(value) is float else f"{name:30} {value:>24,}"
            )
    return 0 if result["keys_equal_in_64_bits"] == 0 else 1


if __name__ == "__main__":
    raise SystemExit(main())
