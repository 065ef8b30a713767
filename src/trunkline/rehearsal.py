"""Puts together the verbs that need no fleet of anybody's: worker, simulate, plan, replay,
demo.

Read `wiring.py` for `trunkline serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from trunkline.adapters.clock import SystemClock
from trunkline.leaf import read_key

if TYPE_CHECKING:
    from trunkline.plan.command import PlanParts
    from trunkline.plan.naming import Tokenise

OWN_MODEL = Path(__file__).resolve().parent / "worker" / "model"


def run_worker(args: argparse.Namespace) -> int:
    """`trunkline worker`: one simulated worker, until SIGINT or SIGTERM."""
    from trunkline.adapters.aes_gcm import AesGcmSealer
    from trunkline.adapters.event_publisher import VllmWire, Wire, ZmqEventPublisher
    from trunkline.adapters.sglang_wire import SglangWire
    from trunkline.adapters.template import load_template
    from trunkline.adapters.tokenizer import load_tokenizer
    from trunkline.lifetime import taken_port_named
    from trunkline.ports.publisher import EventPublisher
    from trunkline.worker import app
    from trunkline.worker.options import Surface, options_from

    options, clock = options_from(args), SystemClock()
    folder = Path(options.model_path) if options.model_path else OWN_MODEL

    wire: Wire = VllmWire(is_wide=options.wide_hashes)
    if options.is_sglang:
        wire = SglangWire(
            block_pages=options.block_size // options.page_tokens,
            is_positional=options.engine is Surface.SGLANG_0_5_18,
        )

    def publisher(host: str, port: int, rank: int) -> EventPublisher:
        return ZmqEventPublisher(
            clock,
            host=host,
            port=port,
            rank=rank,
            wire=wire,
            buffer_batches=options.event_ring,
        )

    with taken_port_named("--port", options.host, options.port):
        listener = app.listen(options.host, options.port)
    app.run_worker(
        options,
        app.WorkerParts(
            tokenizer=load_tokenizer(folder),
            template=load_template(folder, wall=clock.wall),
            make_publisher=publisher,
            clock=clock,
            boot_nonce=secrets.token_hex(16),
            draw=secrets.token_bytes,
            transfer_key=read_key(options.transfer_key_file, "transfer_key_file"),
            sealer=AesGcmSealer() if options.disk_blocks else None,
        ),
        listener,
    )
    return 0


def simulate(args: argparse.Namespace) -> int:
    """`trunkline simulate`."""
    from trunkline.sim import command

    return command.run(
        args,
        traces_dir=traces_dir(),
        clock=SystemClock(),
        out=sys.stdout,
        progress_out=sys.stderr,
    )


def plan(args: argparse.Namespace) -> int:
    """`trunkline plan LOG`."""
    from trunkline.plan import command

    return command.run(args, _plan_parts())


def plan_export(args: argparse.Namespace) -> int:
    """`trunkline plan export`."""
    from trunkline.plan import export

    return export.run(args, _plan_parts(), secrets.token_bytes)


def plan_public(args: argparse.Namespace) -> int:
    """`trunkline plan public`."""
    from trunkline.sim import plan_public

    return plan_public.run(args, traces_dir=traces_dir(), out=sys.stdout)


def _plan_parts() -> PlanParts:
    from trunkline.adapters.tokenizer import load_tokenizer
    from trunkline.plan.command import PlanParts

    def load_tokenise(path: Path) -> Tokenise:
        tokenizer = load_tokenizer(path)
        return lambda text: tokenizer.encode(text, add_special_tokens=False)

    return PlanParts(
        clock=SystemClock(),
        out=sys.stdout,
        progress_out=sys.stderr,
        load_tokenise=load_tokenise,
    )


def replay(args: argparse.Namespace) -> int:
    """`trunkline replay`."""
    import uvloop

    return uvloop.run(_replay(args))


async def _replay(args: argparse.Namespace) -> int:
    from trunkline.adapters.tokenizer import load_tokenizer
    from trunkline.control.probe import fetch
    from trunkline.replay import command
    from trunkline.replay.processes import ProcessFleets

    tokenizer = load_tokenizer(OWN_MODEL)
    fleets = ProcessFleets(
        fetch=fetch,
        decode=tokenizer.decode,
        vocab_size=tokenizer.vocab_size,
        draw=secrets.token_bytes,
    )
    async with fleets:
        parts = command.ReplayParts(
            clock=SystemClock(),
            start_fleet=fleets.start,
            fetch=fetch,
            traces_dir=traces_dir(),
            out=sys.stdout,
            err=sys.stderr,
        )
        return await command.run(args, parts)


def add_demo_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `trunkline demo`."""
    from trunkline.replay import demo

    demo.add_arguments(parser)


def demo(args: argparse.Namespace) -> int:
    """`trunkline demo`: the tour, or with `--serve` the same fleet kept up."""
    import uvloop

    from trunkline.replay import demo as tour

    return uvloop.run(_keep_fleet(args) if args.serve else _replay(tour.replay_arguments(args)))


async def _keep_fleet(args: argparse.Namespace) -> int:
    from trunkline.adapters.tokenizer import load_tokenizer
    from trunkline.control.probe import fetch
    from trunkline.replay import demo as tour
    from trunkline.replay.processes import ProcessFleets

    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    tokenizer = load_tokenizer(OWN_MODEL)
    fleets = ProcessFleets(
        fetch=fetch,
        decode=tokenizer.decode,
        vocab_size=tokenizer.vocab_size,
        draw=secrets.token_bytes,
    )
    async with fleets:
        fleet = await fleets.start(tour.serve_plan(args))
        sys.stdout.write(tour.greeting(fleet.target_urls[0], fleet.admin_url))
        sys.stdout.flush()
        await stop.wait()
        served_count = await fleet.served_requests()
    sys.stdout.write(tour.farewell(served_count))
    return 0


def traces_dir() -> Path:
    """The bundled traces: in the package where it was installed, beside `src` in a checkout."""
    here = Path(__file__).resolve().parent
    bundled = here / "_traces"
    return bundled if bundled.is_dir() else here.parents[1] / "traces"
