"""What an engine says about itself, read from its answers: models, block size, event streams, load.

Pure parsing of untrusted bytes: a missing or odd answer means "not known", never an exception.
Names are those of vLLM and SGLang (reference: conventions section 2). Read `membership.py` next.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import msgspec

_SAMPLE = re.compile(
    rb"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{([^}\n]*)\})? +([0-9eE+.\-]+|NaN|[+-]Inf)", re.MULTILINE
)
_LABEL = re.compile(rb'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')

_Shape = TypeVar("_Shape")

_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")
_MEMORY = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
"""Newest name first; an older engine knows only a later one."""

MAX_MODEL_NAME_CHARS = 256
MAX_MODEL_TOKENS = 1 << 24
MAX_BLOCK_TOKENS = 65_536
MAX_CAPACITY_BLOCKS = 1 << 31
MAX_REQUESTS = 1 << 20
"""Beyond these a number is not believed: it is a mistake or a lie, and we compute with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """One entry of `/v1/models`."""

    model_id: str
    max_model_len: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """A worker's own word on how busy it is. None where it does not say."""

    running: int
    waiting: int | None
    memory_ratio: float | None
    is_asleep: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFacts:
    """Size of the KV cache. None where the engine does not say."""

    block_tokens: int | None
    capacity_blocks: int | None


class _ModelEntry(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _ModelList(msgspec.Struct):
    data: list[_ModelEntry]


class _ServerLoad(msgspec.Struct):
    server_load: int


class _RankLoad(msgspec.Struct):
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0


class _RankLoads(msgspec.Struct):
    loads: list[_RankLoad]


def parse_models(body: bytes) -> list[ModelFacts]:
    """The models of `/v1/models`; empty for anything else."""
    listed = _decode(body, _ModelList)
    return [
        ModelFacts(
            model_id=entry.id,
            max_model_len=_bounded(entry.max_model_len, MAX_MODEL_TOKENS),
        )
        for entry in (listed.data if listed else [])
        if 0 < len(entry.id) <= MAX_MODEL_NAME_CHARS
    ]


def parse_cache(metrics: bytes) -> CacheFacts:
    """Block size and capacity out of `vllm:cache_config_info`."""
    for name, labels, _ in _samples(metrics):
        if name == "vllm:cache_config_info":
            return CacheFacts(
                block_tokens=_positive(labels.get("block_size"), MAX_BLOCK_TOKENS),
                capacity_blocks=_positive(labels.get("num_gpu_blocks"), MAX_CAPACITY_BLOCKS),
            )
    return CacheFacts(block_tokens=None, capacity_blocks=None)


def parse_metrics_load(metrics: bytes) -> LoadReport | None:
    """Load out of a metrics page, summed over its label sets; None when it has no such metric."""
    sums: dict[str, float] = {}
    is_asleep = False
    for name, labels, value in _samples(metrics):
        sums[name] = sums.get(name, 0.0) + value
        if name == "vllm:engine_sleep_state" and labels.get("sleep_state") == "awake":
            is_asleep = value == 0.0
    running = _first(sums, _RUNNING)
    if running is None:
        return None
    waiting = _first(sums, _WAITING)
    memory = _first(sums, _MEMORY)
    return LoadReport(
        running=_requests(running),
        waiting=None if waiting is None else _requests(waiting),
        memory_ratio=None if memory is None else min(max(memory, 0.0), 1.0),
        is_asleep=is_asleep,
    )


def parse_json_load(body: bytes) -> LoadReport | None:
    """Load out of vLLM's `/load` or SGLang's `/get_loads`; None for anything else."""
    served = _decode(body, _ServerLoad)
    if served is not None:
        return LoadReport(running=_requests(served.server_load), waiting=None, memory_ratio=None)
    wrapped = _decode(body, _RankLoads)
    rows = wrapped.loads if wrapped else _decode(body, list[_RankLoad])
    if not rows:
        return None
    return LoadReport(
        running=_requests(sum(_requests(row.num_running_reqs) for row in rows)),
        waiting=_requests(sum(_requests(row.num_waiting_reqs) for row in rows)),
        memory_ratio=None,
    )


def _samples(metrics: bytes) -> Iterator[tuple[str, dict[str, str], float]]:
    for match in _SAMPLE.finditer(metrics):
        name, raw_labels, raw_value = match.groups(b"")
        if not name.startswith((b"vllm:", b"sglang:")):
            continue
        try:
            value = float(raw_value)
        except ValueError:
            continue
        if math.isfinite(value):
            labels = {
                key.decode(): text.decode("utf-8", "replace")
                for key, text in _LABEL.findall(raw_labels)
            }
            yield name.decode(), labels, value


def _first(sums: dict[str, float], names: tuple[str, ...]) -> float | None:
    for name in names:
        if name in sums:
            return sums[name]
    return None


def _requests(count: float) -> int:
    return int(min(max(count, 0), MAX_REQUESTS))


def _positive(text: str | None, most: int) -> int | None:
    # Bounded in length first: int() refuses thousands of digits with an exception.
    is_number = text is not None and len(text) <= 10 and text.isascii() and text.isdecimal()
    return _bounded(int(text), most) if text is not None and is_number else None


def _bounded(number: int | None, most: int) -> int | None:
    return number if number is not None and 0 < number <= most else None


def _decode(body: bytes, kind: type[_Shape]) -> _Shape | None:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
