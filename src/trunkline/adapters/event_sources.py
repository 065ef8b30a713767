"""Where a worker's KV events come from: endpoints as announced, made fit to connect or bind.

An engine's publisher binds for a wildcard, an IPv6 `::` or a path; for a concrete TCP host it
*connects*, so that we must bind. Discovery (vLLM's `GET /kv_event_sources`) answers with an object
of one entry a rank, empty where it publishes nothing, with a list, or with that list under
`sources`; SGLang's `GET /server_info` repeats the settings of its events, and rank r has the r-th
port after those.

Must never: connect anywhere but to the worker's own host because a worker said so. Read
`zmq_events.py` next.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

import msgspec

from trunkline.errors import ConfigError
from trunkline.ports.worker import EventSource
from trunkline.written import host_port

MAX_SOURCES = 1_024
_TCP = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.%*]+\]|[^\[\]:/]+|::):(?P<port>\d{1,5})")
_RANK = re.compile(r"[0-9]{1,5}", re.ASCII)
_PUBLISHER_BINDS = "*"
_DEFAULT_ENDPOINT = f"tcp://{_PUBLISHER_BINDS}:5557"
_WILDCARDS = {"*", "0.0.0.0", "::", "[::]"}


def event_source(
    endpoint: str,
    *,
    worker_host: str,
    replay_endpoint: str | None = None,
    topic: str = "",
    rank: int | None = None,
    buffer_steps: int = 10_000,
    binds: bool | None = None,
) -> EventSource:
    """Read a publisher's own endpoint from the subscriber's side; `binds` is what it does there,
    where it is told. Raises ConfigError for a malformed one.
    """
    is_tcp = endpoint.startswith("tcp://")
    host = _tcp_parts(endpoint)[0] if is_tcp else ""
    if binds is None:
        binds = host in _WILDCARDS or "::" in host
    is_bound_by_us = is_tcp and not binds
    if not is_tcp and not endpoint.startswith(("ipc://", "inproc://")):
        raise ConfigError(
            f"event endpoint {endpoint[:64]!r}: tcp://, ipc:// or inproc:// is needed"
        )
    return EventSource(
        endpoint=endpoint if is_bound_by_us or not is_tcp else _at(worker_host, endpoint),
        is_bound_by_us=is_bound_by_us,
        replay_endpoint=None if not replay_endpoint else _at(worker_host, replay_endpoint),
        topic=topic,
        rank=rank,
        buffer_steps=buffer_steps,
    )


def discovered_sources(answer: object, *, worker_host: str) -> list[EventSource]:
    """Read the decoded JSON of `GET /kv_event_sources`, or of `GET /server_info`, sorted by rank.
    Raises ConfigError.
    """
    listed: object = answer
    if isinstance(answer, dict):
        fields = cast("Mapping[str, Any]", answer)  # decoded JSON; each field is checked below
        if "kv_events_config" in fields:
            return _by_settings(fields, worker_host)
        listed = fields["sources"] if "sources" in fields else _by_rank(fields)
    if not isinstance(listed, list) or len(cast("list[object]", listed)) > MAX_SOURCES:
        raise ConfigError(f"kv_event_sources: a list of at most {MAX_SOURCES} sources is needed")
    sources = [_discovered(entry, worker_host) for entry in cast("list[object]", listed)]
    if len({source.rank for source in sources}) != len(sources):
        raise ConfigError("kv_event_sources: one rank is listed twice")
    return sorted(sources, key=lambda source: source.rank or 0)


def _by_rank(answer: Mapping[str, object]) -> list[object]:
    """vLLM's own shape: the publisher's settings under each rank's number."""
    listed: list[object] = []
    for rank, settings in answer.items():
        if not (_RANK.fullmatch(rank) and isinstance(settings, dict)):
            raise ConfigError("kv_event_sources: an object of settings by rank is needed")
        entry = cast("dict[str, object]", settings)
        if entry.get("enable_kv_cache_events", True) and entry.get("publisher") != "null":
            listed.append({**entry, "data_parallel_rank": int(rank)})
    return listed


def _discovered(entry: object, worker_host: str) -> EventSource:
    if not isinstance(entry, dict):
        raise ConfigError("kv_event_sources: a source must be an object")
    fields = cast("dict[str, Any]", entry)  # decoded JSON; each field is checked below
    endpoint, replay = fields.get("endpoint"), fields.get("replay_endpoint")
    topic, steps = fields.get("topic") or "", fields.get("buffer_steps")
    rank = fields.get("data_parallel_rank", fields.get("rank", 0))
    binds = fields.get("bind")
    if type(endpoint) is not str or type(rank) is not int or not 0 <= rank < 65_536:
        raise ConfigError("kv_event_sources: a source needs an endpoint and a rank")
    if type(topic) is not str or not (replay is None or type(replay) is str):
        raise ConfigError("kv_event_sources: topic and replay_endpoint must be text")
    return event_source(
        endpoint,
        worker_host=worker_host,
        replay_endpoint=replay,
        topic=topic,
        rank=rank,
        buffer_steps=steps if type(steps) is int and 0 < steps <= 1 << 24 else 10_000,
        binds=binds if type(binds) is bool else None,
    )


def _by_settings(told: Mapping[str, Any], worker_host: str) -> list[EventSource]:
    """What SGLang was started with as `--kv-events-config`, for each of its ranks."""
    settings: Any = told["kv_events_config"]
    if type(settings) is str and settings:
        try:
            settings = msgspec.json.decode(settings)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ConfigError("server_info: kv_events_config is no JSON") from error
    if not settings:
        return []
    if type(settings) is not dict:
        raise ConfigError("server_info: kv_events_config must be an object")
    fields = cast("dict[str, Any]", settings)
    if fields.get("publisher") != "zmq":
        return []
    ranks: Any = told.get("dp_size")
    if isinstance(told.get("kv_events"), dict):
        ranks = cast("dict[str, Any]", told["kv_events"]).get("dp_size")
    if type(ranks) is not int or not 1 <= ranks <= MAX_SOURCES:
        ranks = 1
    told_endpoints = {name: fields.get(name) for name in ("endpoint", "replay_endpoint")}
    told_endpoints["endpoint"] = told_endpoints["endpoint"] or _DEFAULT_ENDPOINT
    sources: list[EventSource] = []
    for rank in range(ranks):
        own = {name: _of_rank(endpoint, rank) for name, endpoint in told_endpoints.items()}
        sources.append(_discovered({**fields, **own, "rank": rank}, worker_host))
    return sources


def _of_rank(endpoint: Any, rank: int) -> Any:
    if type(endpoint) is not str or not endpoint.startswith("tcp://"):
        return endpoint
    host, port = _tcp_parts(endpoint)
    return f"tcp://{host}:{port + rank}"


def _tcp_parts(endpoint: str) -> tuple[str, int]:
    match = _TCP.fullmatch(endpoint)
    if match is None or not 0 < int(match["port"]) < 65_536:
        raise ConfigError(f"event endpoint {endpoint[:64]!r}: tcp://host:port is needed")
    return match["host"], int(match["port"])


def _at(worker_host: str, endpoint: str) -> str:
    """The endpoint at the worker's own host, whatever host it names."""
    if not endpoint.startswith("tcp://"):
        return endpoint
    return f"tcp://{host_port(worker_host, _tcp_parts(endpoint)[1])}"
