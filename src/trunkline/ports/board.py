"""Where the gateways of a fleet post notices, in one order with the log of the registry they share.

`adapters/nats_board.py` has it in NATS. Read `control/gateways.py` for what the notices say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """The newest that one life of a gateway has posted. `seq` is its place in the common order."""

    seq: int
    name: str
    body: bytes


class Board(Protocol):
    """Each raises StoreDown."""

    async def join(self) -> None:
        """Connect, where there is no connection yet. Raises StoreBroken, ConfigError as well."""
        ...

    async def post(self, name: str, body: bytes) -> int:
        """Put a notice in the place of the last one of this name; its place in the order."""
        ...

    async def after(self, seq: int) -> Notice | None:
        """The next notice behind `seq` that was not replaced since; None for none."""
        ...

    def listen(self, on_record: Callable[[], None], on_notice: Callable[[], None]) -> None:
        """From now on called when a record may be in the log, or a notice on the board."""
        ...


class Wire(Protocol):
    """From one gateway to all others, at once or not at all: nothing is kept."""

    async def send(self, body: bytes) -> None:
        """Where nobody is connected it is lost."""
        ...

    def hear(self, on_body: Callable[[bytes], None]) -> None:
        """From now on called with what gateways send, ourselves included."""
        ...


class Calls(Protocol):
    """Questions of one gateway to all, of which the first answer counts."""

    async def call(self, body: bytes, wait_s: float) -> bytes:
        """The first answer. Raises StoreDown where none comes in time."""
        ...

    def answer(self, on_call: Callable[[bytes, Answer], None]) -> None:
        """From now on called with each question, our own included, and with how to answer it."""
        ...


class Answer(Protocol):
    async def __call__(self, body: bytes) -> None:
        """Lost where nobody is connected."""
        ...
