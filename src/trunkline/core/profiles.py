"""Latency profiles: what a prefill and a decode step cost on one model and machine, as a formula.

The router prices with them until it has calibrated itself; the simulated worker waits by them
instead of computing. Pure figures with their origin; nothing here measures. Read `cost.py` next.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum

_GIB = 1 << 30


class Scheduling(Enum):
    """How a worker shares its machine among requests."""

    FIFO = "fifo"
    """One prefill at a time in order of arrival; decoding is never disturbed."""
    BATCHED = "batched"
    """Steps of at most `max_batch_tokens`: a token for each running request, else prefill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Prefill of n tokens after c cached ones takes `a + b*n + k*n*(c + n/2)` milliseconds."""

    name: str
    prefill_fixed_ms: float
    prefill_token_ms: float
    prefill_context_ms: float
    """Price of one token attending to one earlier token."""
    decode_token_ms: float
    """From one token of an answer to the next."""
    kv_bytes_per_token: int
    max_batch_tokens: int
    scheduling: Scheduling
    source: str
    """Where the figures come from, said honestly."""
    host_gib_per_s: float = 20.0
    """From host memory to the device. Assumed: what a PCIe 5 x16 link has left beside the engine's
    own traffic.
    """

    disk_gib_per_s: float = 5.0
    """From disk to host memory. Assumed: one NVMe drive, read in blocks."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a profile needs a name")
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not 0 <= value < float("inf"):
                raise ValueError(f"profile {self.name}: {field.name} is {value}, must be 0 or more")
        if not self.kv_bytes_per_token or not self.max_batch_tokens:
            raise ValueError(f"profile {self.name}: a size or a batch of 0 tokens cannot be")
        if not self.host_gib_per_s or not self.disk_gib_per_s:
            raise ValueError(f"profile {self.name}: a tier at 0 GiB/s cannot be")

    def prefill_ms(self, uncached_tokens: float, context_tokens: float) -> float:
        """Time to prefill `uncached_tokens` after `context_tokens` cached ones; 0 for none."""
        if uncached_tokens <= 0:
            return 0.0
        attended = uncached_tokens * (context_tokens + uncached_tokens / 2)
        return (
            self.prefill_fixed_ms
            + self.prefill_token_ms * uncached_tokens
            + self.prefill_context_ms * attended
        )

    def load_ms(self, tokens: int) -> float:
        """Time to copy so many tokens' KV from host memory to the device."""
        return tokens * self.kv_bytes_per_token / (self.host_gib_per_s * _GIB) * 1e3

    def read_ms(self, tokens: int) -> float:
        """Time to read so many tokens' KV from disk into host memory."""
        return tokens * self.kv_bytes_per_token / (self.disk_gib_per_s * _GIB) * 1e3


# Derivation of the H100 rows, with MFU 0.45 and a bf16 peak of 989 TFLOP/s a GPU:
#   b = 2 * parameters / (GPUs * MFU * peak)
#     8B, 1 GPU:  2 * 8.03e9 / 445e12  = 36.1 us (27.7k tokens/s)
#     70B, 4 GPU: 2 * 70.6e9 / 1780e12 = 79.3 us (12.6k tokens/s)
#   k = 4 * layers * heads * head_dim / (GPUs * MFU * peak)
#     8B:  4 * 32 * 32 * 128 / 445e12  = 1.18 ns
#     70B: 4 * 80 * 64 * 128 / 1780e12 = 1.47 ns
# Decode reads the weights once a token, at 65 % of 3.35 TB/s a GPU: 16.1 GB take 7.4 ms, and a
# quarter of 141 GB takes 16.2 ms.
# KV: 2 * layers * kv_heads * head_dim * 2 bytes = 128 KiB and 320 KiB a token.
_FORMULA = (
    "derived, not measured: FLOPs at MFU 0.45 of a bf16 peak of 989 TFLOP/s for prefill, "
    "weight reads at 65 % of 3.35 TB/s for decode; the fixed part is assumed"
)

_ALL = (
    Profile(
        name="llama-3.1-8b-h100",
        prefill_fixed_ms=8.0,
        prefill_token_ms=0.0361,
        prefill_context_ms=1.18e-6,
        decode_token_ms=7.4,
        kv_bytes_per_token=128 << 10,
        max_batch_tokens=8_192,
        scheduling=Scheduling.BATCHED,
        source=f"Llama 3.1 8B, bf16, one H100 SXM; {_FORMULA}",
    ),
    Profile(
        name="llama-3.1-70b-h100",
        prefill_fixed_ms=15.0,
        prefill_token_ms=0.0793,
        prefill_context_ms=1.47e-6,
        decode_token_ms=16.2,
        kv_bytes_per_token=320 << 10,
        max_batch_tokens=8_192,
        scheduling=Scheduling.BATCHED,
        source=f"Llama 3.1 70B, bf16, four H100 SXM (TP4), communication not counted; {_FORMULA}",
    ),
    Profile(
        name="peers-w5",
        prefill_fixed_ms=5.0,
        prefill_token_ms=0.1,
        prefill_context_ms=0.0,
        decode_token_ms=10.0,
        kv_bytes_per_token=128 << 10,
        max_batch_tokens=8_192,
        scheduling=Scheduling.FIFO,
        source="set by the comparison that other gateways were measured in; no machine behind it",
    ),
    Profile(
        name="tiny",
        prefill_fixed_ms=1.0,
        prefill_token_ms=0.005,
        prefill_context_ms=0.0,
        decode_token_ms=1.0,
        kv_bytes_per_token=4 << 10,
        max_batch_tokens=8_192,
        scheduling=Scheduling.FIFO,
        source="chosen so that tests are quick; no machine behind it",
    ),
)

PROFILES: dict[str, Profile] = {profile.name: profile for profile in _ALL}
"""By name. Read only."""


def profile_named(name: str) -> Profile:
    """A profile of the table, or one spelt out as `fifo:FIXED_MS,TOKEN_MS,DECODE_MS`, and after
    that, where it is not 131,072, the bytes of KV of a token.

    Raises ValueError that lists the known names.
    """
    if name.startswith(_SPELT):
        return _spelt(name)
    try:
        return PROFILES[name]
    except KeyError as error:
        known = ", ".join(PROFILES)
        raise ValueError(
            f"profile {name!r} is unknown; known are {known}, and {_SPELT}FIXED,TOKEN,DECODE in ms"
        ) from error


def fifo_profile(
    fixed_ms: float, token_ms: float, decode_ms: float, kv_bytes_per_token: int = 128 << 10
) -> str:
    """The name that `profile_named` reads back."""
    times = f"{_SPELT}{fixed_ms!r},{token_ms!r},{decode_ms!r}"
    return times if kv_bytes_per_token == _KV_BYTES else f"{times},{kv_bytes_per_token}"


_SPELT = "fifo:"
_KV_BYTES = 128 << 10


def _spelt(name: str) -> Profile:
    try:
        *times, last = name.removeprefix(_SPELT).split(",")
        fixed_ms, token_ms, decode_ms = map(float, times if len(times) == 3 else [*times, last])
        kv_bytes = int(last) if len(times) == 3 else _KV_BYTES
    except ValueError as error:
        raise ValueError(
            f"profile {name!r}: {_SPELT}FIXED,TOKEN,DECODE in ms is needed, and KV bytes a token "
            f"where these are not {_KV_BYTES}"
        ) from error
    return Profile(
        name=name,
        prefill_fixed_ms=fixed_ms,
        prefill_token_ms=token_ms,
        prefill_context_ms=0.0,
        decode_token_ms=decode_ms,
        kv_bytes_per_token=kv_bytes,
        max_batch_tokens=8_192,
        scheduling=Scheduling.FIFO,
        source="spelt out by the user",
    )
