"""The `trunkline` command: a thin table of verbs.

Owns exit codes and what a user sees of an error: one line, no traceback for a mistake of theirs.
Must stay cheap to import, since `--help` pays for it: what a verb needs is imported when it runs.
Read `wiring.py` and `rehearsal.py` next, where each verb is put together.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from trunkline.config import nearest
from trunkline.errors import ConfigError, GatewayError, TraceError

OK, FAILED, MISUSED, INTERRUPTED = 0, 1, 2, 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """One subcommand. Text of the form `module:function` is imported when the verb is used."""

    summary: str
    run: str | Callable[[argparse.Namespace], int]
    options: str
    """Called with the parser; empty for a verb without options."""
    examples: tuple[str, ...]
    usage: str = "[options]"
    """What follows the verb on the first line of its help."""


class Parser(argparse.ArgumentParser):
    """argparse, with one-line errors and a suggestion for a flag nobody knows."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse all words; raises ConfigError for the first that means nothing."""
        try:
            found, rest = self.parse_known_args(words)
        except argparse.ArgumentError as error:
            raise ConfigError(f"{error}; see {self.prog} --help") from error
        if rest:
            self._refuse(next((word for word in rest if word.startswith("-")), rest[0]))
        return found

    def _refuse(self, word: str) -> NoReturn:
        flag, manual = word.partition("=")[0], f"{self.prog} --help"
        if not flag.startswith("-"):
            raise ConfigError(f"{word!r} is one word too many; see {manual}")
        known = [name for name in self._option_string_actions if name.startswith("--")]
        if self.prog == "trunkline serve":  # whose flags are settings, with their own advice
            from trunkline.settings import unknown_name

            key = flag.lstrip("-").replace("-", "_")
            raise unknown_name(key, flag, known, source="command line", manual=manual)
        near = nearest(flag, known)
        hint = f"did you mean {near}?" if near else f"see {manual}"
        raise ConfigError(f"{flag} is no flag of {self.prog}; {hint}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the answer is the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except (ConfigError, TraceError) as error:
        return _complain(error, MISUSED)
    except GatewayError as error:
        return _complain(error, FAILED)
    except BrokenPipeError:
        # Whoever read our output has left (`| head`): stop quietly, and let the exit flush nothing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:
        return _complain(error, MISUSED)
    except KeyboardInterrupt:
        return INTERRUPTED


def build_parser(name: str) -> Parser:
    """The parser of one verb, its options imported."""
    verb = VERBS[name]
    parser = Parser(
        prog=f"trunkline {name}",
        usage=f"trunkline {name} {verb.usage}".rstrip(),
        description=verb.summary,
        epilog="examples:\n" + "\n".join(f"  {line}" for line in verb.examples),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if verb.options:
        _load(verb.options)(parser)
    return parser


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview())
        return OK if words else MISUSED
    name = "version" if words[0] in ("-V", "--version") else words[0]
    if name not in VERBS:
        near = nearest(name, VERBS)
        hint = f"did you mean {near}?" if near else f"the verbs are {', '.join(VERBS)}"
        raise ConfigError(f"{name!r} is no verb of trunkline; {hint}")
    arguments = build_parser(name).read(words[1:])
    run = VERBS[name].run
    return (_load(run) if isinstance(run, str) else run)(arguments)


def _load(path: str) -> Callable[..., Any]:  # Any: each verb has its own signature
    module, _, function = path.partition(":")
    return getattr(importlib.import_module(module), function)


def _complain(error: Exception, code: int) -> int:
    line = " ".join(str(error).split()) or type(error).__name__
    print(f"trunkline: {line}", file=sys.stderr)
    return code


def _overview() -> str:
    width = max(map(len, VERBS))
    lines = ["usage: trunkline VERB [options]", ""]
    lines += ["A cache-aware gateway for fleets of LLM workers.", "", "verbs:"]
    lines += [f"  {name:<{width}}  {verb.summary}" for name, verb in VERBS.items()]
    lines += ["", "examples:"]
    lines += [f"  {verb.examples[0]}" for verb in VERBS.values()]
    return "\n".join([*lines, "", "`trunkline VERB --help` explains one."])


def _serve(arguments: argparse.Namespace) -> int:
    from trunkline import settings

    flags: Mapping[str, object] = vars(arguments)
    resolved = settings.resolve(flags, os.environ)
    if arguments.print_config:
        print(settings.to_toml(resolved), end="")
        return OK
    return _load("trunkline.wiring:serve")(resolved.config)


def _version(_arguments: argparse.Namespace) -> int:
    from trunkline.native import IMPLEMENTATION

    python = ".".join(map(str, sys.version_info[:3]))
    print(f"trunkline {version()} ({IMPLEMENTATION} core, Python {python})")
    return OK


def version() -> str:
    """The installed version; `unknown` when run from a tree that is not installed."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed("trunkline")
    except PackageNotFoundError:
        return "unknown"


VERBS: Mapping[str, Verb] = {
    "serve": Verb(
        summary="Run the gateway in front of your workers.",
        run=_serve,
        options="trunkline.settings:add_arguments",
        examples=(
            "trunkline serve --worker-urls http://10.0.0.1:8000 http://10.0.0.2:8000",
            "trunkline serve --config trunkline.toml --log-format json",
            "TRUNKLINE_PORT=8080 trunkline serve --print-config",
            "trunkline serve --host 0.0.0.0 --api-key @/run/secrets/client-key",
        ),
        usage="[--worker-urls URL ...] [options]",
    ),
    "worker": Verb(
        summary="Run a simulated worker: an engine's HTTP and cache events without a GPU.",
        run="trunkline.rehearsal:run_worker",
        options="trunkline.worker.options:add_arguments",
        examples=("trunkline worker --port 8000", "trunkline worker --port 8001"),
    ),
    "simulate": Verb(
        summary="Play a trace through the fleet model; exit code 1 if a bar is missed.",
        run="trunkline.rehearsal:simulate",
        options="trunkline.sim.command:add_arguments",
        examples=(
            "trunkline simulate W1",
            "trunkline simulate W2 --policy least_queue --no-baselines --json",
            "trunkline simulate W1 --event-delay-ms 5000 --fail-if 'hit_tokens_ratio<0.3'",
            "trunkline simulate W3 --kill-worker-at 0.5",
        ),
        usage="WORKLOAD [options]",
    ),
    "replay": Verb(
        summary="Play a trace through a real gateway; exit code 1 on a false hit or a missed bar.",
        run="trunkline.rehearsal:replay",
        options="trunkline.replay.flags:add_arguments",
        examples=(
            "trunkline replay W1-smoke --load 0.5 --workers 8 --time-scale 0.1"
            " --tokens-per-block 16",
            "trunkline replay W5 --policies cache_aware --bar 'ttft_ms.p95<=200,false_hits==0'",
            "trunkline replay my-trace.jsonl.gz --target http://10.0.0.1:30000 --no-verify",
        ),
        usage="[TRACE] [options]",
    ),
    "demo": Verb(
        summary="The tour: a gateway and simulated workers on this machine.",
        run="trunkline.rehearsal:demo",
        options="trunkline.rehearsal:add_demo_arguments",
        examples=("trunkline demo", "trunkline demo --serve"),
    ),
    "docs": Verb(
        summary="Write the generated reference page, docs/configuration.md.",
        run="trunkline.reference:run",
        options="trunkline.reference:add_arguments",
        examples=("trunkline docs", "trunkline docs --check"),
    ),
    "version": Verb(
        summary="Print the version.",
        run=_version,
        options="",
        examples=("trunkline version",),
    ),
}
