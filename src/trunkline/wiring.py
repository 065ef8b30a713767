"""Puts each verb's objects together, readable from top to bottom. The only place that names adapters."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from trunkline.adapters.clock import SystemClock


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


def traces_dir() -> Path:
    """The bundled traces: in the package where it was installed, beside `src` in a checkout."""
    here = Path(__file__).resolve().parent
    bundled = here / "_traces"
    return bundled if bundled.is_dir() else here.parents[1] / "traces"
