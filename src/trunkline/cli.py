"""The `trunkline` command: a thin table of verbs.

Owns exit codes and what a user sees of an error: one line, no traceback for a mistake of theirs.
Must stay cheap to import, since `--help` pays for it: what a verb needs is imported when it runs.
Read `wiring.py` and `rehearsal.py` next, where each verb is put together.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from trunkline import tenant_commands
from trunkline.errors import ConfigError, GatewayError, TraceError
from trunkline.written import nearest

if TYPE_CHECKING:
    from trunkline.terminal import Terminal

OK, FAILED, MISUSED, INTERRUPTED = 0, 1, 2, 130
MAX_NAMED = 8
"""Of flags that nobody knows, so many are named at once."""

_SHOWN_FIRST = ("serve", "worker", "simulate", "replay", "demo", "keys create", "revoke")
"""Verbs of which the overview has an example."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """One subcommand, of one word or two. Text of the form `module:function` is imported when the
    verb is used.
    """

    summary: str
    run: str | Callable[[argparse.Namespace], int]
    options: str | Callable[[argparse.ArgumentParser], None]
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
            flags = [word for word in rest if word.startswith("-")]
            self._refuse(flags[0] if flags else rest[0], flags[1:MAX_NAMED])
        return found

    def actions(self) -> Sequence[argparse.Action]:
        """All of them, for who describes the parser: argparse has no public way to ask."""
        return self._actions

    def _refuse(self, word: str, others: Sequence[str] = ()) -> NoReturn:
        try:
            self._refuse_one(word)
        except ConfigError as error:
            if not others:
                raise
            more = ", ".join(other.partition("=")[0] for other in others)
            raise ConfigError(f"{error}; nor is any of these known: {more}") from error

    def _refuse_one(self, word: str) -> NoReturn:
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
        return complain(error, MISUSED)
    except GatewayError as error:
        return complain(error, FAILED)
    except BrokenPipeError:
        # Whoever read our output has left (`| head`): stop quietly, and let the exit flush nothing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:
        return complain(error, MISUSED)
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
        (_load(verb.options) if isinstance(verb.options, str) else verb.options)(parser)
    return parser


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview())
        return OK if words else MISUSED
    name = "version" if words[0] in ("-V", "--version") else words[0]
    group = [verb for verb in VERBS if verb.startswith(f"{name} ")]
    rest = words[1:]
    if rest and f"{name} {rest[0]}" in VERBS:
        name, rest = f"{name} {rest[0]}", rest[1:]
    elif group and name not in VERBS:
        if not rest or rest[0] in ("-h", "--help"):
            print(_group_overview(name, group))
            return OK if rest else MISUSED
        name, rest = f"{name} {rest[0]}", rest[1:]
    if name not in VERBS:
        raise _unknown_verb(name, group)
    arguments = build_parser(name).read(rest)
    run = VERBS[name].run
    return (_load(run) if isinstance(run, str) else run)(arguments)


def _unknown_verb(name: str, group: Sequence[str]) -> ConfigError:
    known = list(group) or list(dict.fromkeys(verb.partition(" ")[0] for verb in VERBS))
    # Of two words the second is the misspelt one: the first is like all of its group.
    seconds = {verb.partition(" ")[2]: verb for verb in group}
    found = nearest(name.rpartition(" ")[2], seconds or known)
    near = seconds.get(found, found) if found else None
    hint = f"did you mean {near}?" if near else f"the verbs are {', '.join(known)}"
    instead = tenant_commands.instead(name)
    hint = f"{instead}; {hint}" if instead else hint
    return ConfigError(f"{name!r} is no verb of trunkline; {hint}")


def _load(path: str) -> Callable[..., Any]:  # Any: each verb has its own signature
    module, _, function = path.partition(":")
    return getattr(importlib.import_module(module), function)


def complain(error: Exception, code: int) -> int:
    """What a user sees of an error: one line, and one for each further setting that is wrong."""
    also = error.also if isinstance(error, ConfigError) else ()
    for text in (str(error), *also):
        line = " ".join(text.split()) or type(error).__name__
        print(f"trunkline: {line}", file=sys.stderr)
    return code


def _overview() -> str:
    lines = ["usage: trunkline VERB [options]", ""]
    lines += ["A cache-aware gateway for fleets of LLM workers.", "", "verbs:"]
    lines += _listed(name for name in VERBS if name not in tenant_commands.COMMANDS)
    lines += ["", "tenants, on the admin port of a running gateway:"]
    lines += _listed(name for name in VERBS if name in tenant_commands.COMMANDS)
    lines += ["", "examples:"]
    lines += [f"  {verb.examples[0]}" for name, verb in VERBS.items() if name in _SHOWN_FIRST]
    return "\n".join([*lines, "", "`trunkline VERB --help` explains one."])


def _group_overview(name: str, group: Sequence[str]) -> str:
    lines = [f"usage: trunkline {name} VERB [options]", "", "verbs:", *_listed(group)]
    lines += ["", "examples:", *(f"  {VERBS[verb].examples[0]}" for verb in group)]
    return "\n".join([*lines, "", f"`trunkline {name} VERB --help` explains one."])


def _listed(names: Iterable[str]) -> list[str]:
    width = max(map(len, VERBS))
    return [f"  {name:<{width}}  {VERBS[name].summary}" for name in names]


def _serve(arguments: argparse.Namespace) -> int:
    from trunkline import settings

    flags: Mapping[str, object] = vars(arguments)

    def again() -> settings.Resolved:
        return settings.resolve(flags, os.environ)

    if not arguments.print_config:
        # Until there is a loop to heed it, which takes a second, a wish to reload waits: a service
        # manager may have one at once, and to end of it would pass for an end in order.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        resolved = again()
    except ConfigError as error:
        path = settings.file_in(flags, os.environ)
        if not path or not os.path.isfile(path):
            raise
        hint = f"`trunkline doctor --config {path}` shows all"
        first, *others = (str(error), *error.also)
        told = ConfigError(first if others else f"{first}; {hint}")
        told.also = (*others, hint) if others else ()
        raise told from error
    if arguments.print_config:
        print(settings.to_toml(resolved), end="")
        return OK
    return _load("trunkline.wiring:serve")(resolved.config, lambda: again().config)


def _doctor(arguments: argparse.Namespace) -> int:
    from trunkline import doctor

    return _ask(doctor.run, arguments)


def _top(arguments: argparse.Namespace) -> int:
    from trunkline import top

    return _ask(top.run, arguments)


def _explain(arguments: argparse.Namespace) -> int:
    from trunkline import explain

    return _ask(explain.run, arguments)


def _ask(run: Callable[[argparse.Namespace, Terminal], int], arguments: argparse.Namespace) -> int:
    """A verb that asks the admin port; with `--json` an error is on standard output too."""
    from trunkline import tenant_answers
    from trunkline.terminal import Terminal, print_json

    terminal = Terminal(environ=os.environ, out=sys.stdout, err=sys.stderr, wall_s=time.time)
    try:
        return run(arguments, terminal)
    except GatewayError as error:
        if arguments.json:
            print_json(tenant_answers.error_object(error), terminal)
        raise


def _administer(arguments: argparse.Namespace) -> int:
    """Any verb of `tenant_commands.COMMANDS`. With `--json` an error is on standard output too, as
    the gateway words errors.
    """
    from trunkline import audit_answers, tenant_answers
    from trunkline.terminal import Terminal, print_json

    terminal = Terminal(environ=os.environ, out=sys.stdout, err=sys.stderr, wall_s=time.time)
    try:
        if arguments.command == "audit verify" and arguments.dir:
            found = _verified_files(arguments)
            return audit_answers.print_verification(arguments, found, terminal)
        return tenant_answers.run(arguments, terminal)
    except GatewayError as error:
        if arguments.json:
            print_json(tenant_answers.error_object(error), terminal)
        raise


def _verified_files(arguments: argparse.Namespace) -> dict[str, Any]:  # Any: as JSON has it
    """Check an audit log in files, without asking any gateway."""
    from dataclasses import asdict
    from pathlib import Path

    from trunkline.adapters.audit_files import log_lines, read_checkpoints, segment_paths
    from trunkline.adapters.signing import Ed25519Check
    from trunkline.administration_views import verification_view
    from trunkline.control.audit_reader import SinkCheck
    from trunkline.core.audit import verify
    from trunkline.ports.audit import SinkDown

    folder, kept = Path(arguments.dir), arguments.from_checkpoint
    if not folder.is_dir():
        raise ConfigError(f"--dir {folder} is no folder")
    if not segment_paths(folder) and segment_paths(folder / "audit"):
        raise ConfigError(f"--dir {folder} is a state folder: give {folder / 'audit'}")
    if kept and not Path(kept).is_file():
        raise ConfigError(f"--from-checkpoint {kept} is no file")
    try:
        checkpoints = read_checkpoints(Path(kept)) if kept else []
        check = None
        if arguments.public_key:
            signers = {checkpoint.key_id for checkpoint in checkpoints}
            check = Ed25519Check.from_file(Path(arguments.public_key), signers)
        found = verify(
            log_lines(folder),
            checkpoints=checkpoints,
            is_signed=None if check is None else check.is_signed,
            key_id="" if check is None else check.key_id,
        )
    except (SinkDown, ValueError) as error:
        raise ConfigError(str(error)) from error
    if found.head.seq == 0 and found.fault is None:
        raise ConfigError(f"--dir {folder} holds no audit log")
    if check is None:
        print("signatures were not checked: give --public-key", file=sys.stderr)
    view = verification_view([SinkCheck(sink=str(folder), found=found)])
    more = {"signatures_checked": check is not None, "newer_checkpoints": found.newer}
    return asdict(view) | more


def _version(_arguments: argparse.Namespace) -> int:
    from trunkline.native import IMPLEMENTATION, STALE_CORE

    python = ".".join(map(str, sys.version_info[:3]))
    print(f"trunkline {version()} ({IMPLEMENTATION} core, Python {python})")
    if STALE_CORE:
        print(f"{STALE_CORE}: install it again (`make setup`)", file=sys.stderr)
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
    "doctor": Verb(
        summary="Say what is wrong with a set-up, and what to do; exit code 1 if anything is.",
        run=_doctor,
        options="trunkline.doctor:add_arguments",
        examples=(
            "trunkline doctor",
            "trunkline doctor http://10.0.0.1:8000 --json",
            "trunkline doctor --config trunkline.toml",
        ),
        usage="[WORKER ...] [options]",
    ),
    "top": Verb(
        summary="Show the fleet of a running gateway, drawn anew each second.",
        run=_top,
        options="trunkline.top:add_arguments",
        examples=("trunkline top", "trunkline top --once --sort load", "trunkline top --json"),
    ),
    "explain": Verb(
        summary="Say why a request went where it went, and what came true of it.",
        run=_explain,
        options="trunkline.explain:add_arguments",
        examples=(
            "trunkline explain 3f1c9a",
            "trunkline explain --prompt body.json --tenant acme",
        ),
        usage="REQUEST_ID | --prompt FILE [options]",
    ),
    "plan": Verb(
        summary="Read a log of requests: what caches would save, how to route, how many workers.",
        run="trunkline.rehearsal:plan",
        options="trunkline.plan.command:add_arguments",
        examples=(
            "trunkline plan requests.jsonl",
            "trunkline plan spend-logs.csv.gz --workers 8 --cache-gib 60 --html plan.html",
            "trunkline plan vllm.log --prefill-tokens-per-s 20000 --ttft-goal-ms 500 --json",
        ),
        usage="LOG [options]",
    ),
    "plan export": Verb(
        summary="Write a log as an anonymised trace: times, lengths and keyed hashes, no text.",
        run="trunkline.rehearsal:plan_export",
        options="trunkline.plan.export:add_arguments",
        examples=(
            "trunkline plan export requests.jsonl --out trace.jsonl",
            "trunkline plan export vllm.log --out trace.jsonl --as bailian --key-file key",
        ),
        usage="LOG --out FILE [options]",
    ),
    "plan public": Verb(
        summary="Say what isolation costs on a trace, and which prefixes are worth registering.",
        run="trunkline.rehearsal:plan_public",
        options="trunkline.sim.plan_public:add_arguments",
        examples=(
            "trunkline plan public W2 --tenants 8",
            "trunkline plan public my-requests.jsonl --json",
        ),
        usage="TRACE [options]",
    ),
    "demo": Verb(
        summary="The tour: a gateway and simulated workers on this machine.",
        run="trunkline.rehearsal:demo",
        options="trunkline.rehearsal:add_demo_arguments",
        examples=("trunkline demo", "trunkline demo --serve"),
    ),
    **{
        name: Verb(
            summary=command.summary,
            run=_administer,
            options=tenant_commands.add_arguments(name),
            examples=command.examples,
            usage=command.usage,
        )
        for name, command in tenant_commands.COMMANDS.items()
    },
    "monitoring": Verb(
        summary="Write a Grafana dashboard, and alert rules and a scrape config for Prometheus.",
        run="trunkline.monitoring:run",
        options="trunkline.monitoring:add_arguments",
        examples=(
            "trunkline monitoring --out monitoring",
            "trunkline monitoring --out /etc/trunkline --target 10.0.0.1:29000",
        ),
        usage="--out FOLDER [options]",
    ),
    "completion": Verb(
        summary="Print what a shell needs to complete verbs, flags and values with TAB.",
        run="trunkline.completion:run",
        options="trunkline.completion:add_arguments",
        examples=(
            "source <(trunkline completion bash)",
            "trunkline completion fish > ~/.config/fish/completions/trunkline.fish",
        ),
        usage="bash|zsh|fish",
    ),
    "docs": Verb(
        summary="Write what is generated: reference pages, runbook, dashboard and alert rules.",
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
