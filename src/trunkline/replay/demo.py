"""`trunkline demo`: what the tour replays, and the same fleet kept up for a user to try.

The tour is `trunkline replay` on the first five minutes of a real hour of chat, eight times as
fast: small prompts of the same shape (a 512-token block of the trace is sent as one 16-token
block), baselines first. Owns its numbers only. Read `command.py` next.
"""

from __future__ import annotations

import argparse

from trunkline.replay import flags
from trunkline.replay.plan import FleetPlan

TRACE = "W1-smoke"
WORKERS = 8
LOAD = 0.5
"""The trace loads 16 workers; eight take half of it."""

TIME_SCALE = 0.0625
TOKENS_PER_BLOCK = 16
MAX_OUTPUT_TOKENS = 16
CAPACITY_BLOCKS = 4_000
"""Half the workers of W1 with twice the cache each."""

LINK_GBIT = 25.0
"""What many GPU servers have; a tenth of what the fastest have."""
HOST_FACTOR = 4.0

BARS = (
    "hit_tokens_ratio>=2*baselines.least_queue.hit_tokens_ratio",
    "ttft_ms.mean<=1*baselines.round_robin.ttft_ms.mean",
    "plans.local>0",
    "plans.pull>0",
    "plans.recompute>0",
    "net_saved_ms>0",
    "false_hits==0",
    "lost==0",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `trunkline demo`."""
    add = parser.add_argument
    add("--serve", action="store_true", help="keep the fleet up and print how to talk to it")
    add("--port", type=int, default=30_000, help="port of the gateway with --serve (30000)")
    add("--admin-port", type=int, default=29_000, help="port of its admin listener (29000)")
    add("--workers", type=int, default=WORKERS, help=f"simulated workers ({WORKERS})")
    add("--html", metavar="FILE", default=None, help="write the report with plots there, too")


def replay_arguments(args: argparse.Namespace) -> argparse.Namespace:
    """The tour as arguments of `trunkline replay`."""
    parser = argparse.ArgumentParser()
    flags.add_arguments(parser)
    words = [
        TRACE,
        *("--workers", str(args.workers)),
        *("--load", str(LOAD)),
        *("--time-scale", str(TIME_SCALE)),
        *("--tokens-per-block", str(TOKENS_PER_BLOCK)),
        *("--max-output-tokens", str(MAX_OUTPUT_TOKENS)),
        *("--link-gbit", str(LINK_GBIT)),
        *("--host-factor", str(HOST_FACTOR)),
    ]
    for bar in BARS:
        words += ["--bar", bar]
    if args.html:
        words += ["--html", args.html]
    return parser.parse_args(words)


def serve_plan(args: argparse.Namespace) -> FleetPlan:
    """The fleet of `--serve`: as fast as the model it stands for."""
    return FleetPlan(
        policy="cache_aware",
        workers=args.workers,
        capacity_blocks=CAPACITY_BLOCKS,
        block_tokens=TOKENS_PER_BLOCK,
        profile="llama-3.1-8b-h100",
        time_scale=1.0,
        link_gbit=LINK_GBIT,
        host_blocks=round(HOST_FACTOR * CAPACITY_BLOCKS),
        port=args.port,
        admin_port=args.admin_port,
    )


def greeting(url: str, admin_url: str) -> str:
    """What a user sees once the fleet is up."""
    return f"""
The fleet is up. Talk to it as to any OpenAI server (base URL {url}/v1):

  curl -i {url}/v1/chat/completions -H 'content-type: application/json' -d '{{
    "model": "trunkline-sim", "max_tokens": 24,
    "messages": [{{"role": "user", "content": "What does a prefix cache win?"}}]}}'

The header x-trunkline-decision says why which worker was chosen. For operators:

  curl '{admin_url}/workers'
  curl '{admin_url}/decisions?limit=3'
  curl '{admin_url}/metrics'

This fleet serves everybody as one tenant, and asks for no key. To try tenants, each of these in
a shell of its own, with this fleet stopped:

  trunkline worker --port 8000
  trunkline serve --worker-urls http://127.0.0.1:8000 --state-dir trunkline-state
  trunkline keys create --tenant acme --create-tenant    # then: -H "Authorization: Bearer KEY"

docs/tenancy.md goes on from there. The answers are made up: the workers are simulated. Ctrl-C
ends the fleet.
"""


def farewell(served_count: int | None) -> str:
    """The last line of `--serve`: what it did. None: the gateway did not say."""
    if served_count is None:
        return "stopped\n"
    return f"served {served_count:,} request{'' if served_count == 1 else 's'}, stopped\n"
