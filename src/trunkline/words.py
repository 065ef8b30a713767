"""How the verbs about tenants read what a person writes: names, subjects, times, sizes, numbers.

What can be known to be wrong is refused here, with the remedy, before any gateway is asked; the
gateway checks all of it again. Must never: show a key's secret, or repair a word silently. Read
`tenant_answers.py` for who asks.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from decimal import Decimal

from trunkline.errors import ConfigError
from trunkline.leaf import read_bounded
from trunkline.written import nearest

MAX_TOKENS_FILE_BYTES = 4 << 20
MAX_KEY_LIFE_S = 10 * 366 * 86_400
MAX_PUBLIC_LIFE_S = 90 * 86_400
MAX_BYTES = 2**53
MAX_RATE = 1e12
MAX_WEIGHT = 1_000.0

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_KEY_ID = re.compile(r"[0-9a-f]{16}")
_KEY_TEXT = re.compile(r"pk_([0-9a-f]{16})_[A-Za-z0-9_-]{43}")
_SPAN = re.compile(r"([1-9][0-9]{0,8})([smhdwy])")
_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800, "y": 365 * 86_400}
_SIZE = re.compile(r"([0-9]{1,16}(?:\.[0-9]{1,6})?)([kMGT]i?)?(B)?", re.IGNORECASE)
_UNITS = {"k": 1_000, "m": 1_000**2, "g": 1_000**3, "t": 1_000**4}
_BINARY = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}

KINDS = ("tenant", "user", "org", "model", "adapter", "key_class", "public")
"""Kinds of subjects that have a name; `fleet` has none."""
_NAMED_STRICTLY = ("tenant", "org", "public")
_OTHER_WORDS = {
    "organisation": "org",
    "organization": "org",
    "class": "key_class",
    "prefix": "public",
    "key_classes": "key_class",
    "key-class": "key_class",
    "publics": "public",
}


# -- names and subjects ----------------------------------------------------------------------------


def name_in(text: str, what: str) -> str:
    """A name of a tenant, an organisation or a prefix. Raises ConfigError that tells the rule."""
    if _NAME.fullmatch(text):
        return text
    rule = "1 to 64 small letters, digits, `.`, `_` or `-`, the first a letter or digit"
    near = re.sub(r"[^a-z0-9._-]+", "-", text.rpartition("/")[2].lower()).strip("-._")[:64]
    hint = f"; did you mean {near}?" if near and near != text else ""
    raise ConfigError(f"{what} {_shown(text)}: a name is {rule}{hint}")


def key_id_in(text: str) -> str:
    """The id of a key, from its id, `key/ID` or its whole text, of which the secret goes no
    further. Raises ConfigError.
    """
    whole = _KEY_TEXT.fullmatch(text.strip())
    if whole is not None:
        return whole[1]
    word = text.removeprefix("key/")
    if _KEY_ID.fullmatch(word):
        return word
    shown = "what begins with pk_ is no whole key" if text.startswith("pk_") else _shown(text)
    raise ConfigError(f"{shown}: a key's id is 16 hex digits, as `trunkline keys list` shows it")


def subject_in(text: str) -> str:
    """What can be revoked, as the gateway calls it. Raises ConfigError with what was probably
    meant.
    """
    kind, slash, rest = text.partition("/")
    if text.startswith("pk_") or kind in ("key", "keys"):
        found = _KEY_TEXT.fullmatch(text) or _KEY_ID.search(rest)
        which = "ID" if found is None else found[found.re.groups]
        raise ConfigError(f"for one key: trunkline keys revoke {which}")
    if text == "fleet":
        return text
    if kind == "fleet":
        raise ConfigError("fleet stands alone, without a name")
    if kind not in KINDS:
        raise ConfigError(f"{_shown(text)} is no subject; {_meant(kind, slash, rest)}")
    if not rest:
        form = "user/TENANT/NAME" if kind == "user" else f"{kind}/NAME"
        raise ConfigError(f"{_shown(text)} names nobody; a subject is {form}")
    if kind in _NAMED_STRICTLY:
        owner, slash, member = rest.partition("/")
        if kind == "tenant" and slash and member:
            raise ConfigError(f"{_shown(text)}: did you mean user/{_plain(rest)}?")
        name_in(rest, kind)
    if kind == "user":
        owner, _, member = rest.partition("/")
        if not member:
            raise ConfigError(f"{_shown(text)} is no user: it is user/TENANT/NAME")
        name_in(owner, "tenant")
    return text


def _meant(kind: str, slash: str, rest: str) -> str:
    if not slash:
        near = nearest(kind, ("fleet",))
        return f"did you mean {near or f'tenant/{_plain(kind)}'}?"
    singular = kind.lower().removesuffix("s")
    known = singular if singular in KINDS else _OTHER_WORDS.get(kind.lower())
    near = known or nearest(kind, KINDS)
    if near is None:
        return f"it begins with one of {', '.join(KINDS)}, or is fleet"
    return f"did you mean {near}/{_plain(rest)}?"


# -- times -----------------------------------------------------------------------------------------


def seconds_of(text: str) -> int:
    """`30d` in seconds. Raises ConfigError."""
    found = _SPAN.fullmatch(text)
    if found is None:
        raise ConfigError(
            f"--expires {_shown(text)}: give a whole number and s, m, h, d, w or y, like 30d; or a"
            " date in UTC, like 2027-01-31"
        )
    return int(found[1]) * _SECONDS[found[2]]


def expiry_in(text: str, now_s: float, most_s: int) -> int:
    """So many seconds from now on, from a span (`30d`) or a date. Raises ConfigError."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        seconds = seconds_of(text)
    else:
        seconds = int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() - now_s)
        if seconds < 1:
            raise ConfigError(f"--expires {text} is over already (dates are in UTC)")
    if seconds > most_s:
        raise ConfigError(
            f"--expires {text} is {seconds / 86_400:.0f} days, at most {_days(most_s)}"
        )
    return seconds


def _days(seconds: int) -> str:
    return f"{seconds // 86_400}d"


# -- numbers ---------------------------------------------------------------------------------------


def number_in(text: str, flag: str, most: float) -> float:
    """A number above 0. Raises ConfigError."""
    try:
        number = float(text)
    except ValueError:
        raise ConfigError(f"{flag} {_shown(text)} is no number") from None
    if not 0 < number <= most:  # not a number (nan) fails here too
        raise ConfigError(f"{flag} {_shown(text)} is not above 0 and at most {most:g}")
    return number


def bytes_in(text: str, flag: str) -> int:
    """`8000000000`, `10GB` or `512MiB` in bytes. Raises ConfigError."""
    found = _SIZE.fullmatch(text)
    if found is None or (found[2] and not found[3]):
        near = f"{found[1]}{found[2][0]}B or {found[1]}{found[2][0]}iB" if found else "10GB, 512MiB"
        raise ConfigError(f"{flag} {_shown(text)}: give bytes, or a size like {near}")
    unit = (found[2] or "").lower()
    scale = 1 if not unit else _BINARY[unit[0]] if unit.endswith("i") else _UNITS[unit]
    size = Decimal(found[1]) * scale
    if size != int(size) or size > MAX_BYTES:
        raise ConfigError(f"{flag} {_shown(text)} is no whole number of bytes up to {MAX_BYTES}")
    return int(size)


def tokens_in(path: str) -> list[int]:
    """Token ids from a file. Raises ConfigError that names the first word that is none."""
    raw, _ = read_bounded(path, MAX_TOKENS_FILE_BYTES, "--tokens: file")
    words = raw.replace(b"[", b" ").replace(b"]", b" ").replace(b",", b" ").split()
    for word in words:
        if not word.isdigit() or len(word) > 10 or int(word) >= 1 << 32:
            shown = word[:20].decode("ascii", "replace")
            raise ConfigError(f"--tokens {path}: {shown!r} is no token id")
    if not words:
        raise ConfigError(f"--tokens {path} holds no token ids")
    return [int(word) for word in words]


def _shown(text: str) -> str:
    return repr(text[:80])


def _plain(text: str) -> str:
    return text[:80] if text.isprintable() else "NAME"
