"""Merges defaults < file < environment < flags into `Config`, and says where each came from.

Owns which sources there are and what is refused in them: what names no setting, with the
nearest name that does. Must never guess, ignore a setting, or print a secret. `leaf.py` knows one
setting, `reference.py` makes the page of all; read `cli.py` next.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from trunkline.config import Config, ListenConfig, ModelTable
from trunkline.discovery_side import discovery_problems
from trunkline.errors import ConfigError
from trunkline.foreign import FOREIGN, SAME_WITH
from trunkline.leaf import (
    PREFIX,
    Leaf,
    checked,
    from_text,
    from_toml,
    leaves,
    leaves_by_name,
    read_bounded,
    secrets_in,
    shown,
    toml_value,
)
from trunkline.model_tables import TITLE, as_dicts, as_toml, conflict, tables_from_toml
from trunkline.worker_url import without_secrets, worker_name, worker_url_problem
from trunkline.written import is_loopback, is_printable_ascii, nearest

MAX_REFUSALS = 12
"""Named at once; of more it is said how many there are."""
_MAX_FILE_BYTES = 1 << 20
_QUOTES = 'texts stand in quotes: policy = "cache_aware"'

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
_NO_IDS = frozenset({"authorization", "cookie", "host", "content-length", "content-type"})
_ORIGIN = re.compile(r"\*|https?://(?:[a-z0-9._-]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")

OTHER_VARIABLES = frozenset({"TRUNKLINE_CONFIG", "TRUNKLINE_PURE"})
"""Variables with our prefix that are no settings."""

COLLECTOR = "OTEL_EXPORTER_OTLP_ENDPOINT"
"""As OpenTelemetry has it, for all programs of a machine; whatever else says weighs more."""

# A Kubernetes service called `trunkline` puts these into every container of its namespace.
_SERVICE_LINK = re.compile(
    r"TRUNKLINE_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP)(_\w+)?)\Z"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """The merged tree, and for each leaf's name which source gave its value."""

    config: Config
    origins: Mapping[str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One flag for each setting, grouped as the tree is. Values stay text until `resolve`."""
    general = parser.add_argument_group("sources")
    general.add_argument("--config", metavar="FILE", help="TOML file with sections named as below")
    general.add_argument(
        "--print-config",
        action="store_true",
        help="print the settings and where each came from, then leave",
    )
    groups: dict[str, Any] = {"": parser.add_argument_group("workers")}
    for leaf in leaves():
        if leaf.section not in groups:
            groups[leaf.section] = parser.add_argument_group(f"[{leaf.section}]")
        _add_flag(groups[leaf.section], leaf)


def resolve(flags: Mapping[str, Any], environ: Mapping[str, str]) -> Resolved:
    """Merge all sources. `flags` is what the parser found: names of settings, and `config`.

    Raises ConfigError naming key, value, bound, source and remedy, of all that are wrong.
    """
    values: dict[str, Any] = {leaf.name: leaf.default for leaf in leaves()}
    origins = {leaf.name: "default" for leaf in leaves()}
    refused: list[ConfigError] = []

    def settle(leaf: Leaf, read: Callable[[Leaf, Any, str], Any], given: Any, origin: str) -> None:
        try:
            values[leaf.name] = checked(leaf, read(leaf, given, origin), origin)
            origins[leaf.name] = origin
        except ConfigError as error:
            refused.append(error)

    if collector := environ.get(COLLECTOR):
        settle(leaves_by_name()["otlp_endpoint"], from_text, collector, f"environment {COLLECTOR}")
    path = file_in(flags, environ)
    models: tuple[ModelTable, ...] = ()
    if path:
        document, mode = _document(path)
        refused += _refusals_in(dict(document), mode, path)
        if not refused:
            models = tables_from_toml(document.pop(TITLE, []), path)
            for leaf, value in _read_file(document, mode, path):
                settle(leaf, from_toml, value, f"file {path}")
    for leaf, text in _read_environment(environ, refused):
        settle(leaf, from_text, text, f"environment {leaf.variable}")
    for leaf in leaves():
        if leaf.name in flags:
            settle(leaf, from_text, flags[leaf.name], f"flag {leaf.flag}")
    _raise_all(refused)
    config = replace(_plant(values), models=models)
    check_together(config, origins)
    return Resolved(config=config, origins=origins)


def check_together(config: Config, origins: Mapping[str, str] | None = None) -> None:
    """What a field alone cannot tell. Raises ConfigError, of all that is wrong."""
    limits, retry = config.limits, config.retry
    problems = {
        "worker_urls": _urls_problem(
            (*config.worker_urls, *(url for table in config.models for url in table.worker_urls))
        ),
        "served_model_name": conflict(config),
        **discovery_problems(config.discovery),
        **_listen_problems(config.listen),
        **_auth_problems(config),
        "max_header_bytes": limits.max_header_bytes > limits.max_head_bytes
        and f"is above max_head_bytes = {limits.max_head_bytes}",
        "retry_initial_backoff_ms": retry.retry_initial_backoff_ms > retry.retry_max_backoff_ms
        and f"is above retry_max_backoff_ms = {retry.retry_max_backoff_ms}",
        "health_check_endpoint": _path_problem(config.health.health_check_endpoint),
        "ext_proc_port": config.envoy.ext_proc_port
        and config.listen.processes > 1
        and "is one process's: leave --processes at 1",
        "otlp_endpoint": config.observe.otlp_endpoint
        and worker_url_problem(
            config.observe.otlp_endpoint, key="a header in OTEL_EXPORTER_OTLP_HEADERS"
        ),
    }
    beside = "beside what waits for a restart"
    _raise_all(
        [
            ConfigError(
                f"{leaves_by_name()[name].key} ({origins[name] if origins else beside}) {problem}"
            )
            for name, problem in problems.items()
            if problem
        ]
    )


def file_in(flags: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    """The settings file that `resolve` would read; empty where none is given."""
    return str(flags.get("config") or environ.get("TRUNKLINE_CONFIG") or "")


def refusals_in(path: str) -> list[ConfigError]:
    """All that `resolve` would refuse of a settings file by itself, one key after the other. Raises
    ConfigError for one that cannot be read.
    """
    return _refusals_in(*_document(path), path)


def _refusals_in(document: dict[str, Any], mode: int, path: str) -> list[ConfigError]:
    tables = document.pop(TITLE, [])
    found: list[ConfigError] = []
    for title, content in document.items():
        section = cast("dict[str, Any]", content) if isinstance(content, dict) else {}
        alone: list[dict[str, Any]] = [{title: {name: value}} for name, value in section.items()]
        for part in alone or [{title: content}]:
            try:
                for leaf, given in _read_file(part, mode, path):
                    checked(leaf, from_toml(leaf, given, f"file {path}"), f"file {path}")
            except ConfigError as refusal:
                found.append(refusal)
    try:
        tables_from_toml(tables, path)
    except ConfigError as refusal:
        found.append(refusal)
    return list({str(one): one for one in found}.values())  # a section nobody knows is one


def _raise_all(refused: Sequence[ConfigError]) -> None:
    """The first, which has the others with it."""
    if not refused:
        return
    first, *others = refused
    also = [str(one) for one in others[: MAX_REFUSALS - 1]]
    if len(also) < len(others):
        also.append(f"and {len(others) - len(also)} more")
    first.also = tuple(also)
    raise first


def to_toml(resolved: Resolved) -> str:
    """A file that gives the same settings (less the secrets), each with its source beside it."""
    lines: list[str] = []
    section = ""
    for leaf in leaves():
        if leaf.section != section:
            section = leaf.section
            lines += ["", f"[{section}]"]
        value = shown(leaf, leaf.value_in(resolved.config))
        lines.append(f"{leaf.name} = {toml_value(value)}  # {resolved.origins[leaf.name]}")
    lines += as_toml(resolved.config.models)
    return "\n".join(lines) + "\n"


def redacted(config: Config) -> dict[str, Any]:
    """The tree as nested dicts, ready for JSON, secrets hidden."""
    tree: dict[str, Any] = {}
    for leaf in leaves():
        branch = tree.setdefault(leaf.section, {}) if leaf.section else tree
        branch[leaf.name] = shown(leaf, leaf.value_in(config))
    if config.models:
        tree[TITLE] = as_dicts(config.models)
    return tree


def secret_values(config: Config) -> tuple[str, ...]:
    """Every secret in the tree, for `observe.configure` to keep out of the logs."""
    return tuple(one for leaf in leaves() for one in secrets_in(leaf, leaf.value_in(config)))


def unknown_name(
    name: str,
    written: str,
    known: Iterable[str],
    source: str,
    manual: str = "trunkline serve --help",
) -> ConfigError:
    """The refusal of a name nobody knows. `name` is its key form, `written` how it was given."""
    bare = name.removeprefix(SAME_WITH)
    remedy = FOREIGN.get(name) or FOREIGN.get(bare)
    if remedy is not None:
        return ConfigError(f"{written} ({source}) belongs to other routers; {remedy}")
    for leaf in leaves():
        names = (leaf.flag, *leaf.flag_aliases)
        if leaf.name != name and f"--{bare.replace('_', '-')}" in names:
            is_flag, is_variable = written.startswith("-"), written.startswith(PREFIX)
            ours = leaf.flag if is_flag else leaf.variable if is_variable else leaf.name
            return ConfigError(f"{written} ({source}) is called {ours} here")
    near = nearest(written, known)
    hint = f"did you mean {near}?" if near else f"see {manual}"
    return ConfigError(f"{written} ({source}) is not a setting; {hint}")


def _add_flag(group: Any, leaf: Leaf) -> None:  # Any: argparse gives its groups no public type
    default = toml_value(shown(leaf, leaf.default)) if leaf.default not in ("", ()) else "none"
    text = f"{leaf.setting.sentence} [{default}{' ' + leaf.unit if leaf.unit else ''}]"
    if leaf.setting.choices:
        text += f" one of {', '.join(leaf.setting.choices)}"
    if leaf.setting.is_secret:
        text += " @FILE reads it from a file"
    if leaf.setting.aliases:
        text += f" (also {', '.join([*leaf.flag_aliases, *leaf.value_aliases])})"
    options: dict[str, Any] = {"dest": leaf.name, "default": argparse.SUPPRESS}
    if leaf.kind is bool:
        options["action"] = argparse.BooleanOptionalAction
    elif leaf.kind is tuple:
        options |= {"nargs": "*", "metavar": "URL" if leaf.name.endswith("_urls") else "TEXT"}
    else:
        options["metavar"] = {int: "N", float: "X"}.get(leaf.kind, "TEXT")
    group.add_argument(leaf.flag, help=text.replace("%", "%%"), **options)
    for alias in leaf.flag_aliases:
        group.add_argument(alias, help=argparse.SUPPRESS, **options)


def _read_environment(
    environ: Mapping[str, str], refused: list[ConfigError]
) -> Iterable[tuple[Leaf, str]]:
    """What names no setting goes to `refused`."""
    by_variable = {leaf.variable: leaf for leaf in leaves()}
    for variable in sorted(environ):
        if not variable.startswith(PREFIX) or variable in OTHER_VARIABLES:
            continue
        text = environ[variable]
        if _SERVICE_LINK.match(variable) or (variable == "TRUNKLINE_PORT" and "://" in text):
            continue
        leaf = by_variable.get(variable)
        if leaf is None:
            name = variable.removeprefix(PREFIX).lower()
            refused.append(unknown_name(name, variable, by_variable, "environment"))
            continue
        yield leaf, text


def _document(path: str) -> tuple[dict[str, Any], int]:
    """What the file holds, and who may read it."""
    import tomllib  # only where there is a file

    raw, mode = read_bounded(path, _MAX_FILE_BYTES, "settings file")
    try:
        return tomllib.loads(raw.decode("utf-8")), mode
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        hint = f"; {_QUOTES}" if str(error).startswith("Invalid value") else ""
        raise ConfigError(f"settings file {path} is not TOML: {error}{hint}") from error


def _read_file(document: dict[str, Any], mode: int, path: str) -> Iterable[tuple[Leaf, Any]]:
    sections = {leaf.section for leaf in leaves() if leaf.section}
    for title, content in document.items():
        if not isinstance(content, dict):
            yield _placed(title, "", path), content
            continue
        if title not in sections:
            raise unknown_name(title, f"[{title}]", [f"[{name}]" for name in sections], path)
        for name, value in cast("dict[str, Any]", content).items():  # what a TOML table is
            leaf = _placed(name, title, path)
            if mode & stat.S_IROTH and _has_secret(leaf, value):
                raise ConfigError(f"{path} holds {leaf.key} and everyone may read it; chmod 600 it")
            yield leaf, value


def _has_secret(leaf: Leaf, value: Any) -> bool:
    """Whether the file itself holds one: a key, or whom a URL logs in as."""
    if leaf.setting.is_secret:
        return bool(value) and not str(value).startswith("@")
    items = cast("list[Any]", value) if isinstance(value, list) else [value]  # as TOML has it
    return any(True for _ in secrets_in(leaf, tuple(one for one in items if isinstance(one, str))))


def _placed(name: str, section: str, path: str) -> Leaf:
    by_name = leaves_by_name()
    leaf = by_name.get(name)
    if leaf is None:
        raise unknown_name(name, name, by_name, path)
    if leaf.section != section:
        place = f"under [{leaf.section}]" if leaf.section else "at the top, before all sections"
        raise ConfigError(f"{name} ({path}) belongs {place}")
    return leaf


def _plant(values: Mapping[str, Any]) -> Config:
    branches: dict[str, Any] = {}
    for branch in dataclasses.fields(Config):
        if "tables" in branch.metadata:
            continue
        if "setting" in branch.metadata:
            branches[branch.name] = values[branch.name]
            continue
        make: Callable[..., Any] = branch.default_factory  # type: ignore[assignment]  # a section has one
        names = [leaf.name for leaf in leaves() if leaf.section == branch.name]
        branches[branch.name] = make(**{name: values[name] for name in names})
    return Config(**branches)


def _auth_problems(config: Config) -> dict[str, str | None]:
    is_told_twice = config.auth.auth == "off" and bool(config.listen.api_key)
    text = "serves everybody, and --api-key does not; give one of the two"
    return {"auth": text if is_told_twice else None}


def _path_problem(path: str) -> str | None:
    if not path.startswith("/"):
        return "does not begin with /"
    return None if is_printable_ascii(path) else "holds a space or a character beyond ASCII"


def _urls_problem(urls: tuple[str, ...]) -> str | None:
    for url in urls:
        problem = worker_url_problem(url)
        if problem:
            return f"{without_secrets(url)!r} {problem}"
    names = [worker_name(url) for url in urls]
    twice = next((name for name in names if names.count(name) > 1), None)
    return f"names the worker {twice} twice; remove one" if twice else None


def _listen_problems(listen: ListenConfig) -> dict[str, str | None]:
    problems: dict[str, str | None] = {}
    for name, host in (("host", listen.host), ("admin_host", listen.admin_host)):
        if not host or any(character.isspace() for character in host):
            problems[name] = f"{host!r} is no address; 127.0.0.1 or 0.0.0.0 are"
    bad_names = [name for name in listen.request_id_headers if not _NAME.fullmatch(name)]
    taken = [name for name in listen.request_id_headers if name in _NO_IDS]
    bad_origins = [text for text in listen.cors_allowed_origins if not _ORIGIN.fullmatch(text)]
    if bad_names or taken:
        problems["request_id_headers"] = (
            f"{bad_names[0][:80]!r} is no name of a header, in small letters"
            if bad_names
            else f"{taken[0]} holds no id of a request"
        )
    if bad_origins:
        problems["cors_allowed_origins"] = (
            f"{bad_origins[0][:80]!r} is no origin such as https://app.example, without a path"
        )
    if not is_loopback(listen.admin_host) and not listen.admin_api_key:
        problems.setdefault(
            "admin_host",
            f"{listen.admin_host} is reachable from other machines, which nobody asks for a key;"
            " give --admin-api-key @FILE, or --admin-host 127.0.0.1",
        )
    if listen.admin_api_key and listen.admin_api_key == listen.api_key:
        problems["admin_api_key"] = "equals api_key: every client would be an operator"
    if listen.port and listen.port == listen.admin_port:
        problems["admin_port"] = f"{listen.port} is the port for clients too; give another"
    return problems
