"""The flags of `trunkline replay`: what each means, what is refused, and a run as a command line.

Owns names, defaults and bounds of the flags. `command_line` is made from the same list, so a new
flag is in every report's command without anybody thinking of it. Read `command.py` next.
"""

from __future__ import annotations

import argparse
import shlex
from math import isfinite
from pathlib import Path
from typing import Any

from trunkline.errors import ConfigError
from trunkline.replay.figures import ListFigures, listing, specimen
from trunkline.replay.formats import TraceFormat
from trunkline.replay.plan import FEEDS
from trunkline.replay.workloads import explained

DEFAULT_POLICIES = "cache_aware,least_queue,round_robin"
MANUAL = "trunkline replay --figures"
PULLING_HOST_FACTOR = 4.0
"""Host memory of a server is a few times its device's."""
MAX_HOST_FACTOR = 1_000.0
MAX_LINK_GBIT = 10_000.0

_ABOVE_ZERO = ("load", "rate", "speed", "time_scale", "time_divisor", "timeout_s", "link_gbit")
_AT_LEAST_ONE = (
    *("requests", "workers", "block_tokens", "tokens_per_block", "max_output_tokens"),
    *("max_in_flight", "vocab_size", "max_copies"),
)
_SECRET = "api_key"


def add_arguments(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """All flags; the answer is one action for each, in the order of `--help`."""
    actions = [
        *_add_trace(parser),
        *_add_pace(parser),
        *_add_fleet(parser),
        *_add_target(parser),
        *_add_verdict(parser),
    ]
    parser.add_argument_group("workloads", description=explained())
    return actions


def check(arguments: argparse.Namespace) -> None:
    """Raises ConfigError for a number out of bounds and for a file that cannot be written."""
    for name in _ABOVE_ZERO:
        value = getattr(arguments, name)
        if value is not None and not (value > 0.0 and isfinite(value)):
            raise ConfigError(f"{_flag(name)} is {value:g}, a number above 0 is needed")
    for name in _AT_LEAST_ONE:
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ConfigError(f"{_flag(name)} is {value}, at least 1 is needed")
    for name, most in (("link_gbit", MAX_LINK_GBIT), ("host_factor", MAX_HOST_FACTOR)):
        value = getattr(arguments, name)
        if value is not None and not 0.0 <= value <= most:
            raise ConfigError(f"{_flag(name)} is {value:g}, allowed are 0 to {most:g}")
    if arguments.link_gbit is not None and arguments.host_factor == 0.0:
        raise ConfigError("--link-gbit needs a --host-factor: pulls go between host memories")
    for path in (arguments.html, arguments.json):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{path} cannot be written: its folder does not exist")


def command_line(arguments: argparse.Namespace) -> str:
    """The command that makes this run again: every flag that is not at its default.

    A key is not shown: put it in by hand.
    """
    words = ["trunkline", "replay"]
    for action in add_arguments(argparse.ArgumentParser()):
        value = getattr(arguments, action.dest, action.default)
        if not action.option_strings:
            words.append(str(value))
        elif value != action.default:
            words += _words(action, value)
    return shlex.join(words)


def _words(action: argparse.Action, value: Any) -> list[str]:  # Any: of the flag's own type
    flag = action.option_strings[0]
    if action.nargs == 0:
        return [flag]
    texts = ["***"] if action.dest == _SECRET else _texts(value)
    # What begins with a dash would be read as a flag.
    pairs = ([f"{flag}={text}"] if text.startswith("-") else [flag, text] for text in texts)
    return [word for pair in pairs for word in pair]


def _texts(value: Any) -> list[str]:  # Any: of the flag's own type
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]  # pyright: ignore


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _add_trace(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    add = parser.add_argument_group("what is sent").add_argument
    formats = [one.value for one in TraceFormat]
    return [
        add("trace", nargs="?", default="W5", metavar="TRACE",
            help="a workload (see below) or a trace file [W5]"),
        add("--requests", type=int, metavar="COUNT", help="only the first so many [all]"),
        add("--seed", type=int, default=0, metavar="NUMBER",
            help="prompts of different seeds share nothing [0]"),
        add("--tokens-per-block", type=int, metavar="TOKENS",
            help="send each block of the trace as so many tokens, which is lighter "
            "[as the trace says]"),
        add("--max-output-tokens", type=int, metavar="TOKENS",
            help="longest answer to ask for [as the trace says]"),
        add("--traces-dir", type=Path, metavar="DIR",
            help="where the workloads' traces lie [the bundled ones]"),
        add("--format", choices=formats, default="auto", help="of a trace file [auto]"),
        add("--block-tokens", type=int, metavar="TOKENS",
            help="tokens that a block id in a trace file stands for [as the file says]"),
        add("--time-divisor", type=float, default=1.0, metavar="FACTOR",
            help="divide the times of a trace file; 1000 where they are in us [1]"),
        add("--spread-ticks", action="store_true",
            help="spread the arrivals of a trace file inside their 3 s ticks (seed 7)"),
    ]  # fmt: skip


def _add_pace(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    add = parser.add_argument_group("how fast").add_argument
    return [
        add("--load", type=float, default=1.0, metavar="FACTOR",
            help="times the workload's rate of arrival [1]"),
        add("--rate", type=float, metavar="REQUESTS_PER_S",
            help="even arrivals, for traces without times [as the trace says]"),
        add("--speed", type=float, default=1.0, metavar="FACTOR",
            help="2 halves the time between requests; workers stay as they are [1]"),
        add("--time-scale", type=float, default=1.0, metavar="FACTOR",
            help="slow simulated workers and arrivals down by this, where the machine is too small "
            "for real time; below 1 it makes them faster [1]"),
        add("--sessions", choices=["open", "closed"], default="open",
            help="closed: a turn waits for the end of the one before it [open]"),
        add("--max-in-flight", type=int, default=1_024, metavar="COUNT",
            help="requests on the way at most [1024]"),
        add("--timeout-s", type=float, default=600.0, metavar="SECONDS",
            help="longest silence of an answer [600]"),
    ]  # fmt: skip


def _add_fleet(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    add = parser.add_argument_group("the fleet that is started, without --target").add_argument
    return [
        add("--policies", default=DEFAULT_POLICIES, metavar="A,B,...",
            help=f"one run each; the first is judged [{DEFAULT_POLICIES}]"),
        add("--workers", type=int, metavar="COUNT",
            help="simulated workers [the workload's own, see below]"),
        add("--feed", choices=FEEDS, default="exact",
            help="how workers tell what they hold [exact]"),
        add("--link-gbit", type=float, metavar="RATE",
            help="workers pull KV from one another over links of so many Gbit/s [they do not]"),
        add("--host-factor", type=float, metavar="FACTOR",
            help="host memory for KV at each worker, in times of its device memory; pulls need it "
            f"[0, and {PULLING_HOST_FACTOR:g} with --link-gbit]"),
        add("--max-copies", type=int, default=64, metavar="COUNT",
            help="what so many workers hold is not pulled any more [64]"),
    ]  # fmt: skip


def _add_target(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    add = parser.add_argument_group("a gateway that is there already").add_argument
    return [
        add("--target", action="append", default=[], metavar="URL",
            help="send there and start nothing; may be repeated, requests go to each in turn"),
        add("--model", default="", metavar="NAME", help="model to ask for [the trace's own]"),
        add("--api-key", default="", metavar="KEY", help="bearer key of the targets [none]"),
        add("--vocab-size", type=int, default=4_096, metavar="TOKENS",
            help="vocabulary of the model behind --target; prompts use ids below it [4096]"),
        add("--no-verify", action="store_true",
            help="do not compare answers: only simulated workers give known ones"),
    ]  # fmt: skip


def _add_verdict(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    group = parser.add_argument_group("verdict and report")
    add = group.add_argument
    add("--figures", action=ListFigures, text=lambda: listing(specimen()))
    return [
        add("--bar", action="append", default=[], metavar="EXPR",
            help="must hold, else exit code 1: 'hit_tokens_ratio>=0.85'; may be repeated"),
        add("--fail-if", action="append", default=[], metavar="EXPR",
            help="exit code 1 where true: 'lost>0'; may be repeated"),
        add("--json", type=Path, metavar="FILE", help="write all figures there"),
        add("--html", type=Path, metavar="FILE",
            help="write the report with plots there (needs trunkline[report])"),
    ]  # fmt: skip
