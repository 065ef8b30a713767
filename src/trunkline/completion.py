"""`trunkline completion SHELL`: what a shell proposes when TAB is pressed.

Made of the verbs and their parsers, so that it knows what they know. The script holds all of it:
pressing TAB runs no Python. Must never: ask a gateway, or read a setting. Read `cli.py` for verbs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

SHELLS = ("bash", "zsh", "fish")
_FILE_ENDINGS = ("_file", "_dir", "_path", "_template")
_FILE_NAMES = frozenset({"config", "out", "dir", "html", "prompt", "tokens", "from_checkpoint"})
_FILE_WORDS = frozenset({"FILE", "FOLDER", "DIR", "PATH", "LOG"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag of one verb, as a shell has to know it."""

    names: tuple[str, ...]
    """The usual one first."""
    sentence: str
    takes_value: bool
    choices: tuple[str, ...] = ()
    is_file: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="bash, zsh or fish")


def run(arguments: argparse.Namespace) -> int:
    """Print the script of one shell."""
    from trunkline.cli import VERBS

    sys.stdout.write(script(arguments.shell, {name: verb.summary for name, verb in VERBS.items()}))
    return 0


def script(shell: str, summaries: Mapping[str, str]) -> str:
    """`summaries` by verb: which there are, and what each is for."""
    flags = {verb: flags_of(verb) for verb in summaries}
    made = {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell]
    return made(summaries, flags)


def flags_of(verb: str) -> list[Flag]:
    """All that are shown in its help, and those that end in a switch's `--no-`."""
    from trunkline.cli import build_parser

    values = _settings_values() if verb == "serve" else {}
    found: list[Flag] = []
    for action in build_parser(verb).actions():
        if not action.option_strings or action.help == argparse.SUPPRESS:
            continue
        choices = values.get(action.dest) or tuple(map(str, action.choices or ()))
        found.append(
            Flag(
                names=tuple(sorted(action.option_strings, key=_usual_first)),
                sentence=" ".join((action.help or "").replace("%%", "%").split()),
                takes_value=action.nargs != 0,
                choices=choices,
                is_file=_is_file(action),
            )
        )
    return found


def _usual_first(name: str) -> tuple[bool, bool]:
    return not name.startswith("--"), name.startswith("--no-")


def _settings_values() -> dict[str, tuple[str, ...]]:
    from trunkline.leaf import leaves

    return {leaf.name: (*leaf.setting.choices, *leaf.value_aliases) for leaf in leaves()}


def _is_file(action: argparse.Action) -> bool:
    named = str(action.metavar or "")
    is_named = action.dest.endswith(_FILE_ENDINGS) or action.dest in _FILE_NAMES
    return action.nargs != 0 and (is_named or named in _FILE_WORDS)


def _seconds(verbs: Iterable[str]) -> dict[str, list[str]]:
    """Second words by the first: of verbs that have two, and what a verb's first word may be."""
    from trunkline.cli import build_parser

    found: dict[str, list[str]] = {}
    for verb in verbs:
        first, _, second = verb.partition(" ")
        if second:
            found.setdefault(first, []).append(second)
        for action in build_parser(verb).actions():
            if not action.option_strings and action.choices and not second:
                found.setdefault(first, []).extend(map(str, action.choices))
    return found


def _firsts(verbs: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(verb.partition(" ")[0] for verb in verbs))


# -- bash ------------------------------------------------------------------------------------------

_BASH = """\
# trunkline completion bash: put `source <(trunkline completion bash)` into ~/.bashrc, or this text
# into /etc/bash_completion.d/trunkline.
_trunkline() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}}
    local first=${{COMP_WORDS[1]}} second=${{COMP_WORDS[2]-}} verb words=
    COMPREPLY=()
    if [ "$current" = "=" ]; then
        current=
    elif [ "$before" = "=" ]; then
        before=${{COMP_WORDS[COMP_CWORD-2]}}
    fi
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{firsts} --help --version" -- "$current"))
        return
    fi
    verb=$first
    case "$first $second" in
{pairs}
    esac
    if [ "$COMP_CWORD" -eq 2 ]; then
        case "$first" in
{seconds}
        esac
    fi
    case "$verb $before" in
{values}
    esac
    case "$verb" in
{flags}
    esac
    if [ "$COMP_CWORD" -eq 2 ] || [[ "$current" == -* ]]; then
        COMPREPLY=($(compgen -W "$words" -- "$current"))
    fi
}}
complete -o bashdefault -o default -F _trunkline trunkline
"""


def _bash(summaries: Mapping[str, str], flags: Mapping[str, Sequence[Flag]]) -> str:
    seconds = _seconds(summaries)
    pairs = [f'        "{verb}") verb="{verb}";;' for verb in summaries if " " in verb]
    return _BASH.format(
        firsts=" ".join(_firsts(summaries)),
        pairs="\n".join(pairs),
        seconds="\n".join(
            f'            {first}) words="{" ".join(words)}";;' for first, words in seconds.items()
        ),
        values=_cases(flags, _reply),
        flags="\n".join(
            f'        "{verb}") words="$words {" ".join(n for f in known for n in f.names)}";;'
            for verb, known in flags.items()
        ),
    )


def _reply(flag: Flag) -> str:
    if flag.choices:
        return f'COMPREPLY=($(compgen -W "{" ".join(flag.choices)}" -- "$current")); return'
    if flag.is_file:
        return 'compopt -o filenames; COMPREPLY=($(compgen -f -- "$current")); return'
    return 'if [[ "$current" != -* ]]; then compopt +o default +o bashdefault; return; fi'


def _cases(flags: Mapping[str, Sequence[Flag]], reply: Callable[[Flag], str]) -> str:
    """What stands behind a flag that takes a value, of each verb; bash and zsh spell it alike."""
    lines: list[str] = []
    for verb, known in flags.items():
        for flag in known:
            if flag.takes_value:
                names = "|".join(f'"{verb} {name}"' for name in flag.names)
                lines.append(f"        {names}) {reply(flag)};;")
    return "\n".join(lines)


# -- zsh -------------------------------------------------------------------------------------------

_ZSH = """\
#compdef trunkline
# trunkline completion zsh: put this text into a file _trunkline in a folder of $fpath, or
# `source <(trunkline completion zsh)` into ~/.zshrc behind compinit.
_trunkline() {{
    local first=$words[2] second=${{words[3]-}} before=${{words[CURRENT-1]}} verb
    local -a found
    if (( CURRENT == 2 )); then
        found=({firsts})
        _describe verb found
        return
    fi
    verb=$first
    case "$first $second" in
{pairs}
    esac
    if (( CURRENT == 3 )); then
        case $first in
{seconds}
        esac
        if (( $#found )); then _describe verb found; fi
    fi
    case "$verb $before" in
{values}
    esac
    case $verb in
{flags}
    esac
    if [[ $PREFIX == -* ]]; then _describe flag found; else _files; fi
}}
if [[ $funcstack[1] == _trunkline ]]; then _trunkline "$@"; else compdef _trunkline trunkline; fi
"""


def _zsh(summaries: Mapping[str, str], flags: Mapping[str, Sequence[Flag]]) -> str:
    seconds = _seconds(summaries)
    firsts = [_described(first, summaries.get(first, first)) for first in _firsts(summaries)]
    pairs = [f'        "{verb}") verb="{verb}";;' for verb in summaries if " " in verb]
    return _ZSH.format(
        firsts=" ".join(firsts),
        pairs="\n".join(pairs),
        seconds="\n".join(
            f"            {first}) found=("
            + " ".join(_described(word, summaries.get(f"{first} {word}", word)) for word in words)
            + ");;"
            for first, words in seconds.items()
        ),
        values=_cases(flags, _zsh_values),
        flags="\n".join(
            f'        "{verb}") found=('
            + " ".join(_described(name, flag.sentence) for flag in known for name in flag.names)
            + ");;"
            for verb, known in flags.items()
        ),
    )


def _zsh_values(flag: Flag) -> str:
    if flag.choices:
        return f"compadd -- {' '.join(flag.choices)}; return"
    return "_files; return" if flag.is_file else "[[ $PREFIX == -* ]] || return"


def _described(word: str, sentence: str) -> str:
    """One word in single quotes, with its sentence behind a colon."""
    text = sentence[:100].replace("'", "’").replace("\\", "")
    return "'" + word.replace(":", "\\:") + ":" + text.replace(":", "\\:") + "'"


# -- fish ------------------------------------------------------------------------------------------

_FISH = """\
# trunkline completion fish: `trunkline completion fish > ~/.config/fish/completions/trunkline.fish`
complete -c trunkline -f
function __trunkline_is
    set -l words (commandline -opc)
    test "$words[2..]" = "$argv"; or string match -q -- "$argv -*" "$words[2..]"
end
"""


def _fish(summaries: Mapping[str, str], flags: Mapping[str, Sequence[Flag]]) -> str:
    seconds = _seconds(summaries)
    lines = [_FISH.rstrip("\n")]
    for first in _firsts(summaries):
        told = _fish_text(summaries.get(first, ", ".join(seconds.get(first, []))))
        lines.append(f"complete -c trunkline -n __fish_use_subcommand -a {first} -d {told}")
    for first, words in seconds.items():
        for word in words:
            told = _fish_text(summaries.get(f"{first} {word}", word))
            lines.append(f"complete -c trunkline -n '__trunkline_is {first}' -a {word} -d {told}")
    for verb, known in flags.items():
        for flag in known:
            lines += [_fish_line(verb, name, flag) for name in flag.names]
    return "\n".join(lines) + "\n"


def _fish_line(verb: str, name: str, flag: Flag) -> str:
    kind = f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
    line = f"complete -c trunkline -n '__trunkline_is {verb}' {kind} -d {_fish_text(flag.sentence)}"
    if flag.choices:
        return f"{line} -x -a '{' '.join(flag.choices)}'"
    if flag.is_file:
        return f"{line} -r -F"
    return f"{line} -x" if flag.takes_value else line


def _fish_text(sentence: str) -> str:
    return "'" + sentence[:100].replace("\\", "\\\\").replace("'", "\\'") + "'"
