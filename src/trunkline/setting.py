"""What a field of the settings carries beside its name and type: bounds, unit, one sentence.

Owns no setting. Read `config.py` for those.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What `settings.py` knows of a field beside its name and type: bounds and documentation."""

    sentence: str
    low: float | None = None
    high: float | None = None
    unit: str = ""
    """Where the name does not end in it."""
    choices: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    """`other-flag` for a second flag, `other=value` for a second spelling of a value."""
    is_secret: bool = False
    is_live: bool = False
    """A reload changes it in a gateway that runs; all others are read as it starts."""


def setting(  # noqa: PLR0913 - one for each field of `Setting`
    default: Any,  # the field's own type; dataclasses.field has no better one to give
    sentence: str,
    *,
    low: float | None = None,
    high: float | None = None,
    unit: str = "",
    choices: tuple[str, ...] = (),
    aliases: tuple[str, ...] = (),
    is_secret: bool = False,
    is_live: bool = False,
) -> Any:
    """A dataclass field that carries a `Setting`."""
    meta = Setting(
        sentence=sentence,
        low=low,
        high=high,
        unit=unit,
        choices=choices,
        aliases=aliases,
        is_secret=is_secret,
        is_live=is_live,
    )
    return field(default=default, metadata={"setting": meta})
