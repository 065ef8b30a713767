"""Runs one simulated worker with the real adapters: `python launch_worker.py FLAGS...`."""

from __future__ import annotations

import argparse
import functools
import secrets
from pathlib import Path

from trunkline.adapters.clock import SystemClock
from trunkline.adapters.event_publisher import ZmqEventPublisher
from trunkline.adapters.template import load_template
from trunkline.adapters.tokenizer import load_tokenizer
from trunkline.ports.publisher import EventPublisher
from trunkline.worker.app import WorkerParts, run_worker
from trunkline.worker.options import WorkerOptions, add_arguments, options_from

MODEL_FOLDER = Path(__file__).resolve().parents[2] / "src" / "trunkline" / "worker" / "model"


def main() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = options_from(parser.parse_args())
    run_worker(options, _parts(options))


def _parts(options: WorkerOptions) -> WorkerParts:
    clock = SystemClock()
    folder = Path(options.model_path) if options.model_path else MODEL_FOLDER
    return WorkerParts(
        tokenizer=load_tokenizer(folder),
        template=load_template(folder, wall=clock.wall),
        make_publisher=functools.partial(_publisher, clock, options.wide_hashes),
        clock=clock,
        boot_nonce=secrets.token_hex(16),
    )


def _publisher(
    clock: SystemClock, is_wide: bool, host: str, port: int, rank: int
) -> EventPublisher:
    return ZmqEventPublisher(clock, host=host, port=port, rank=rank, is_wide=is_wide)


if __name__ == "__main__":
    main()
