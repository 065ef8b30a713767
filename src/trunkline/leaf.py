"""One setting: its names, its type, and how a value of it is read, checked and shown.

Everything made from the tree in `config.py` starts at `leaves()`: flags, variables, keys in the
file, the reference page. Must never put a secret into an error. Read `settings.py` next, which
merges the sources.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, cast
from urllib.parse import unquote

from trunkline.config import Config
from trunkline.errors import ConfigError
from trunkline.foreign import VALUES
from trunkline.setting import Setting
from trunkline.written import nearest

PREFIX = "TRUNKLINE_"

SHOWN_SECRET = "***"
"""What is shown in place of a secret; refused as a value, so that a printed file sets none."""


_MAX_SECRET_BYTES = 4_096
_KEY_BYTES = 32
_KINDS: Mapping[str, type[Any]] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "tuple[str, ...]": tuple,
}
_WORDS: Mapping[type[Any], str] = {
    int: "a whole number",
    float: "a number",
    str: "a string",
    bool: "true or false",
}
_LOGIN = re.compile(r"(?<=://).*(?=@)")
"""Who connects to the server of a URL, and with which password."""
_SUFFIX_UNITS = {"ms": "ms", "secs": "s", "bytes": "bytes", "s": "1/s"}
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_INTEGER = re.compile(r"[+-]?[0-9]+(_[0-9]+)*\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One field of the tree with all its names. `section` is empty at the top of the tree."""

    section: str
    name: str
    kind: type[Any]
    default: Any
    setting: Setting

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    @property
    def key(self) -> str:
        return f"{self.section}.{self.name}" if self.section else self.name

    @property
    def unit(self) -> str:
        if self.setting.unit or self.kind not in (int, float):
            return self.setting.unit
        return _SUFFIX_UNITS.get(self.name.rpartition("_")[2], "")

    @property
    def flag_aliases(self) -> tuple[str, ...]:
        return tuple(f"--{alias}" for alias in self.setting.aliases if "=" not in alias)

    @property
    def value_aliases(self) -> dict[str, str]:
        pairs = (alias.partition("=") for alias in self.setting.aliases if "=" in alias)
        return {alias: value for alias, _, value in pairs}

    def value_in(self, config: Config) -> Any:
        return getattr(getattr(config, self.section) if self.section else config, self.name)


@cache
def leaves() -> tuple[Leaf, ...]:
    """Every setting, in the order of the tree."""
    found: list[Leaf] = []
    for branch in dataclasses.fields(Config):
        if "setting" in branch.metadata:
            found.append(_leaf("", branch))
            continue
        if "tables" in branch.metadata:
            continue  # only the file has those
        assert isinstance(branch.default_factory, type), branch.name
        found.extend(
            _leaf(branch.name, field) for field in dataclasses.fields(branch.default_factory)
        )
    return tuple(found)


@cache
def table_leaves(title: str, table: type[Any]) -> tuple[Leaf, ...]:
    """Every setting of a table that may stand several times in the file."""
    return tuple(_leaf(title, field) for field in dataclasses.fields(table))


@cache
def leaves_by_name() -> Mapping[str, Leaf]:
    """The same by name, which is unique over the tree."""
    named = {leaf.name: leaf for leaf in leaves()}
    assert len(named) == len(leaves()), "two settings share a name"
    return named


def shown(leaf: Leaf, value: Any) -> Any:
    """The value as people may see it."""
    if leaf.setting.is_secret and value:
        return SHOWN_SECRET
    if isinstance(value, tuple):
        return tuple(_LOGIN.sub(SHOWN_SECRET, item) for item in cast("tuple[str, ...]", value))
    return value


def secrets_in(leaf: Leaf, value: Any) -> Iterator[str]:
    """What nobody may see of a value: the key that it is, or what its servers are told as one."""
    if leaf.setting.is_secret and value:
        yield value
    for item in cast("tuple[str, ...]", value) if isinstance(value, tuple) else ():
        for login in _LOGIN.findall(item):
            password = login.partition(":")[2] or login
            yield password
            if unquote(password) != password:
                yield unquote(password)


def toml_value(value: Any) -> str:
    """A TOML literal for a value of a setting."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        items = cast("tuple[str, ...]", value)
        return "[" + ", ".join(toml_value(item) for item in items) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return repr(value)


def from_toml(leaf: Leaf, value: Any, source: str) -> Any:
    """A value as the file writes it."""
    if leaf.kind is float and type(value) is int:
        return float(value)
    if leaf.kind is tuple and isinstance(value, list):
        items = cast("list[Any]", value)  # what a TOML array is
        if all(isinstance(item, str) for item in items):
            return tuple(items)
    elif type(value) is leaf.kind:
        return value
    wanted = "an array of strings" if leaf.kind is tuple else _WORDS[leaf.kind]
    raise _refusal(leaf, value, f"is not {wanted}", source)


def from_text(leaf: Leaf, given: Any, source: str) -> Any:
    """A value as the command line or the environment writes it."""
    if leaf.kind is tuple:
        words = [given] if isinstance(given, str) else given
        return tuple(word for text in words for word in re.split(r"[\s,]+", text) if word)
    if isinstance(given, bool) or leaf.kind is str:
        return given
    text = str(given).strip()
    if leaf.kind is bool:
        if text.lower() not in _TRUE | _FALSE:
            raise _refusal(leaf, given, "is not true or false", source)
        return text.lower() in _TRUE
    if leaf.kind is int:
        if len(text) > 40 or not _INTEGER.match(text):
            raise _refusal(leaf, given, "is not a whole number", source)
        return int(text)
    try:
        return float(text)
    except ValueError:
        raise _refusal(leaf, given, "is not a number", source) from None


def checked(leaf: Leaf, value: Any, source: str) -> Any:
    """The value in its final form, inside its bounds."""
    if leaf.kind in (int, float):
        return _checked_number(leaf, value, source)
    if leaf.kind is tuple:
        return tuple(_checked_text(leaf, item, source) for item in value)
    if leaf.kind is str:
        return _checked_text(leaf, value, source)
    return value


def _checked_number(leaf: Leaf, value: Any, source: str) -> Any:
    low, high = leaf.setting.low, leaf.setting.high
    if not math.isfinite(value):
        raise _refusal(leaf, value, "is not finite", source)
    if low is not None and value < low:
        raise _refusal(leaf, value, f"is below {low:g}", source)
    if high is not None and value > high:
        raise _refusal(leaf, value, f"is above {high:g}", source)
    return value


def _checked_text(leaf: Leaf, value: str, source: str) -> str:
    if leaf.setting.is_secret:
        value = _secret(leaf, value, source)
    if leaf.kind is tuple and SHOWN_SECRET in _LOGIN.findall(value):
        raise _refusal(leaf, value, "has what is shown in place of a secret", source)
    if any(character < " " or character == "\x7f" for character in value) or len(value) > 8_192:
        raise _refusal(leaf, value, "holds control characters or is too long", source)
    if not value.isascii() and value.encode("utf-8", "replace").decode() != value:
        raise _refusal(leaf, value, "is not valid UTF-8", source)
    value = leaf.value_aliases.get(value, value)
    if leaf.setting.choices and value not in leaf.setting.choices:
        raise _refusal(leaf, value, f"is not one of its values{_meant(leaf, value)}", source)
    return value


def _meant(leaf: Leaf, value: str) -> str:
    known = (*leaf.setting.choices, *leaf.value_aliases)
    near = VALUES.get(leaf.name, {}).get(value) or nearest(value, known)
    return f", did you mean {near}?" if near else ""


def _secret(leaf: Leaf, value: str, source: str) -> str:
    if value == SHOWN_SECRET:
        raise _refusal(leaf, value, "is what is shown in place of a secret", source)
    if not value.startswith("@"):
        return value
    return read_secret(value[1:], f"{leaf.key} ({source})")


def read_secret(path: str, what: str) -> str:
    """The text of a small file that nobody else may read. Raises ConfigError; `what` is for it."""
    raw, mode = read_bounded(path, _MAX_SECRET_BYTES, f"{what}: secret file")
    if mode & stat.S_IROTH:
        raise ConfigError(f"{what}: everyone may read {path}; chmod 600 it")
    try:
        secret = raw.decode("utf-8").strip()
    except UnicodeDecodeError:
        raise ConfigError(f"{what}: {path} is not valid UTF-8") from None
    if not secret:
        raise ConfigError(f"{what}: {path} is empty; write the key into it")
    return secret


def read_root_key(path: str) -> bytes:
    """The root secret of all namespaces; empty where no file is named. Raises ConfigError."""
    return read_key(path, "root_key_file")


def read_key(path: str, what: str) -> bytes:
    """A key of 32 bytes, written in hex; empty where no file is named. Raises ConfigError."""
    if not path:
        return b""
    try:
        key = bytes.fromhex(read_secret(path, what))
    except ValueError:
        key = b""  # what it says instead may be a secret all the same: not shown
    if len(key) != _KEY_BYTES:
        raise ConfigError(f"{what} {path}: {2 * _KEY_BYTES} hex digits are needed")
    return key


def _refusal(leaf: Leaf, value: Any, problem: str, source: str) -> ConfigError:
    shown_value = _LOGIN.sub(SHOWN_SECRET, repr(value))
    written = SHOWN_SECRET if leaf.setting.is_secret else shown_value
    if len(written) > 80:
        written = written[:77] + "..."
    return ConfigError(f"{leaf.key} = {written} ({source}) {problem}; give {allowed(leaf)}")


def allowed(leaf: Leaf) -> str:
    """What may be given, for people: `1024 to 1073741824 bytes`, `text or json`."""
    low, high, unit = leaf.setting.low, leaf.setting.high, leaf.unit
    if leaf.setting.choices:
        return "one of " + ", ".join(leaf.setting.choices)
    if leaf.kind is bool:
        return "true or false"
    if leaf.kind is tuple:
        return "a list of texts"
    if leaf.kind is str:
        return "the key itself or @FILE" if leaf.setting.is_secret else "a text"
    bounds = f" from {low} to {high}" if low is not None and high is not None else ""
    return f"{_WORDS[leaf.kind]}{bounds}{' ' + unit if unit else ''}"


def _leaf(section: str, field: dataclasses.Field[Any]) -> Leaf:
    return Leaf(
        section=section,
        name=field.name,
        kind=_KINDS[str(field.type)],
        default=field.default,
        setting=field.metadata["setting"],
    )


def read_bounded(path: str, limit_bytes: int, what: str) -> tuple[bytes, int]:
    """Content and mode of a regular file. A pipe or device would never end."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                raise ConfigError(f"{what} {path} is no regular file")
            raw = file.read(limit_bytes + 1)
    except OSError as error:
        raise ConfigError(f"{what} {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{what} {path!r} is no file name: {error}") from error
    if len(raw) > limit_bytes:
        raise ConfigError(f"{what} {path} is larger than {limit_bytes} bytes")
    return raw, mode
