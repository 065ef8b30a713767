"""What public prefixes add to a request: finding the longest one, and keys in two zones.

    python benchmarks/publics.py [--json] [--tokens 8192] [--rounds 400]

A prompt of so many tokens in blocks of 16. "Nested" is a book of 120 prefixes, each a little longer
than the one before: the worst that a tree can be asked. CPU time (process time), medians.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from array import array
from collections.abc import Callable

from trunkline.core.identity import ModelIdentity, Scope, ScopeKind, derive_namespace
from trunkline.core.keys import chain
from trunkline.core.publics import PublicBook, PublicPrefix, packed, two_zone_chain

MODEL = ModelIdentity(model_id="m", block_tokens=16)
PRIVATE = derive_namespace(bytes(32), Scope(kind=ScopeKind.TENANT, org="o", tenant="t"), MODEL)
NESTED = 120


def prefix(name: str, tokens: array[int]) -> PublicPrefix:
    return PublicPrefix(
        public_id=name,
        owner="o",
        approvers=("a", "b"),
        tokens=packed(tokens),
        audience=frozenset({"o"}),
        model_id="m",
        not_after_ms=1,
        reason="benchmark",
    )


def median_us(work: Callable[[], object], rounds: int) -> float:
    samples: list[float] = []
    for _ in range(rounds):
        started = time.process_time_ns()
        work()
        samples.append((time.process_time_ns() - started) / 1_000.0)
    return statistics.median(samples)


def measure(tokens: int, rounds: int) -> dict[str, float]:
    draw = random.Random(3)
    prompt = array("I", (draw.randrange(100_000) for _ in range(tokens)))
    other = array("I", reversed(prompt))
    half = tokens // 2
    one = PublicBook([prefix("p", prompt[:half])])
    step = max(1, half // NESTED)
    nested = PublicBook(prefix(f"p{n}", prompt[: 16 + n * step]) for n in range(NESTED))
    public = derive_namespace(bytes(32), prefix("p", prompt).scope, MODEL)

    def matching(book: PublicBook, asked: array[int]) -> Callable[[], object]:
        return lambda: book.match(asked, org="o", model=MODEL, now_ms=0.0)

    blocks = half // 16
    return {
        "match_us_nothing_registered": median_us(matching(PublicBook(), prompt), rounds),
        "match_us_nothing_in_common": median_us(matching(one, other), rounds),
        "match_us_half_the_prompt": median_us(matching(one, prompt), rounds),
        "match_us_120_nested": median_us(matching(nested, prompt), rounds),
        "chain_us_one_zone": median_us(lambda: chain(PRIVATE, prompt), rounds),
        "chain_us_two_zones": median_us(
            lambda: two_zone_chain(public, PRIVATE, prompt, blocks), rounds
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    parser.add_argument("--tokens", type=int, default=8_192)
    parser.add_argument("--rounds", type=int, default=400)
    args = parser.parse_args()
    result = measure(args.tokens, args.rounds)
    if args.json:
        print(json.dumps(result, indent=2))
        return
    for name, value in result.items():
        print(f"{name:32} {value:10.2f}")


if __name__ == "__main__":
    main()
