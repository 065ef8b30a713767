"""What an engine says about itself, read from its answers: models, block size, event streams, load.

Pure parsing of untrusted bytes: a missing or odd answer means "not known", never an exception.
Names are those of vLLM and SGLang (reference: conventions section 2). Read `membership.py` next.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from trunkline.ports.worker import EngineKind

_SAMPLE = re.compile(
    rb"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{([^}\n]*)\})? +([0-9eE+.\-]+|NaN|[+-]Inf)", re.MULTILINE
)
_RELEASE = re.compile(r"v?(\d{1,4})\.(\d{1,4})\.(\d{1,4})")
_LABEL = re.compile(rb'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')

_Shape = TypeVar("_Shape")

_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")
_MEMORY = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
"""Newest name first; an older engine knows only a later one."""
_SLEEP = "vllm:engine_sleep_state"
_CACHE = "vllm:cache_config_info"
_FAMILIES = (b"vllm:", b"sglang:")
_OF_LOAD = frozenset(name.encode() for name in (*_RUNNING, *_WAITING, *_MEMORY, _SLEEP))
_STARTED = "process_start_time_seconds"
_OF_CACHE = frozenset((_CACHE.encode(), _STARTED.encode()))

MAX_MODEL_NAME_CHARS = 256
MAX_MODEL_TOKENS = 1 << 24
MAX_BLOCK_TOKENS = 65_536
MAX_CAPACITY_BLOCKS = 1 << 31
MAX_CAPACITY_TOKENS = 1 << 36
MAX_VERSION_CHARS = 64
MAX_REQUESTS = 1 << 20
"""Beyond these a number is not believed: it is a mistake or a lie, and we compute with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """One entry of `/v1/models`."""

    model_id: str
    max_model_len: int | None
    owned_by: str = ""
    parent: str | None = None
    """The model that it is an adapter of; None for a model itself, or where that is not told."""
    tokenizer_digest: str = ""
    """Simulated workers say it; empty for all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What SGLang's `/server_info` tells. None where it does not say."""

    version: str = ""
    page_tokens: int | None = None
    capacity_tokens: int | None = None
    """Of one rank."""

    def is_before(self, *release: int) -> bool:
        """Whether it is older than this release; False where that cannot be told."""
        found = release_of(self.version)
        return bool(found) and found < release


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """A worker's own word on how busy it is. None where it does not say."""

    running: int
    waiting: int | None
    memory_ratio: float | None
    is_asleep: bool = False
    is_paused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFacts:
    """Size of the KV cache. None where the engine does not say."""

    block_tokens: int | None
    capacity_blocks: int | None
    started_s: float | None = field(default=None, compare=False)
    """When the process began that tells, by its own clock. Of engines of several processes, none
    may say so, or each for itself.
    """


class _ModelEntry(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    owned_by: Any = ""  # whatever stands there; only a text is looked at
    parent: str | None = None
    trunkline_tokenizer: object = None


class _ModelList(msgspec.Struct):
    data: list[_ModelEntry]


class _ServerLoad(msgspec.Struct):
    server_load: int


class _Pause(msgspec.Struct):
    is_paused: bool


class _RankLoad(msgspec.Struct):
    num_running_reqs: int | None = None
    num_reqs: int | None = None
    """Waiting ones included: what `/get_load` had before `/v1/loads` came."""
    num_waiting_reqs: int = 0
    token_usage: float | None = None

    def running(self) -> int | None:
        if self.num_running_reqs is not None or self.num_reqs is None:
            return self.num_running_reqs
        return self.num_reqs - self.num_waiting_reqs


class _RankLoads(msgspec.Struct):
    loads: list[_RankLoad]


class _PublishedEvents(msgspec.Struct):
    block_size: int | None = None


class _Version(msgspec.Struct):
    version: str


class _ServerInfo(msgspec.Struct):
    version: str = ""
    page_size: int | None = None
    max_total_num_tokens: int | None = None
    kv_events: _PublishedEvents | None = None


def release_of(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with; empty where it is no release."""
    found = _RELEASE.match(version)
    return tuple(map(int, found.groups())) if found else ()


def parse_version(body: bytes) -> str:
    """What vLLM's `/version` tells; empty for anything else."""
    told = _decode(body, _Version)
    return told.version[:MAX_VERSION_CHARS] if told else ""


def parse_models(body: bytes) -> list[ModelFacts]:
    """The models of `/v1/models`; empty for anything else."""
    listed = _decode(body, _ModelList)
    return [
        ModelFacts(
            model_id=entry.id,
            max_model_len=_bounded(entry.max_model_len, MAX_MODEL_TOKENS),
            owned_by=entry.owned_by if type(entry.owned_by) is str else "",
            parent=entry.parent,
            tokenizer_digest=_short_text(entry.trunkline_tokenizer),
        )
        for entry in (listed.data if listed else [])
        if 0 < len(entry.id) <= MAX_MODEL_NAME_CHARS
    ]


def kind_of(models: Sequence[ModelFacts], metrics: bytes) -> EngineKind:
    """Whose surface it is: models are owned by the engine, unless somebody in front renames that;
    metrics bear its name.
    """
    owner = models[0].owned_by if models else ""
    if owner in {kind.value for kind in EngineKind}:
        return EngineKind(owner)
    families = {name.partition(":")[0] for name, _, _ in _samples(metrics)}
    return EngineKind(families.pop()) if len(families) == 1 else EngineKind.UNKNOWN


def parse_server_info(body: bytes) -> ServerFacts | None:
    """SGLang's `/server_info`; None for anything else."""
    told = _decode(body, _ServerInfo)
    if told is None:
        return None
    events_tokens = told.kv_events.block_size if told.kv_events else None
    return ServerFacts(
        version=told.version[:MAX_VERSION_CHARS],
        page_tokens=_bounded(events_tokens or told.page_size, MAX_BLOCK_TOKENS),
        capacity_tokens=_bounded(told.max_total_num_tokens, MAX_CAPACITY_TOKENS),
    )


def _short_text(value: object) -> str:
    return value if isinstance(value, str) and len(value) <= MAX_MODEL_NAME_CHARS else ""


def parse_cache(metrics: bytes) -> CacheFacts:
    """Block size and capacity out of `vllm:cache_config_info`, and whose they are."""
    sizes: dict[str, str] | None = None
    started_s: float | None = None
    for name, labels, value in _samples(metrics, _OF_CACHE):
        if name == _STARTED:
            started_s = value
        elif sizes is None:
            sizes = labels
    sizes = sizes or {}
    return CacheFacts(
        block_tokens=_positive(sizes.get("block_size"), MAX_BLOCK_TOKENS),
        capacity_blocks=_positive(sizes.get("num_gpu_blocks"), MAX_CAPACITY_BLOCKS),
        started_s=started_s,
    )


def parse_metrics_load(metrics: bytes) -> LoadReport | None:
    """Load out of a metrics page, summed over its label sets, of memory the fullest; None when it
    has no such metric.
    """
    sums: dict[str, float] = {}
    is_asleep = False
    for name, labels, value in _samples(metrics, _OF_LOAD):
        known = sums.get(name, 0.0)
        sums[name] = max(known, value) if name in _MEMORY else known + value
        if name == _SLEEP and labels.get("sleep_state") == "awake":
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
    """Load out of vLLM's `/load` or SGLang's `/v1/loads` and `/get_load`; None for anything
    else.
    """
    served = _decode(body, _ServerLoad)
    if served is not None:
        return LoadReport(running=_requests(served.server_load), waiting=None, memory_ratio=None)
    wrapped = _decode(body, _RankLoads)
    rows = wrapped.loads if wrapped else _decode(body, list[_RankLoad])
    running = [row.running() for row in rows or ()]
    if not rows or None in running:
        return None
    usages = [row.token_usage for row in rows if row.token_usage is not None]
    usages = [min(max(usage, 0.0), 1.0) for usage in usages if math.isfinite(usage)]
    return LoadReport(
        running=_requests(sum(_requests(count or 0) for count in running)),
        waiting=_requests(sum(_requests(row.num_waiting_reqs) for row in rows)),
        memory_ratio=max(usages, default=None),
    )


def parse_pause(body: bytes) -> bool | None:
    """vLLM's `/is_paused`; None for anything else."""
    told = _decode(body, _Pause)
    return None if told is None else told.is_paused


def _samples(
    metrics: bytes, wanted: frozenset[bytes] | None = None
) -> Iterator[tuple[str, dict[str, str], float]]:
    """Those of these names, or all of engines. A page has hundreds, is read each second from every
    worker, and a handful of them is wanted: no other is looked into.
    """
    for match in _SAMPLE.finditer(metrics):
        name, raw_labels, raw_value = match.groups(b"")
        if name not in wanted if wanted else not name.startswith(_FAMILIES):
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
