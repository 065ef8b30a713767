"""Whether settings that are each allowed make sense together, and what they leave open.

What is refused outright is in `settings.py`; here is what a gateway starts with all the same and
its operator should know of. Pure but for the process's own limit of descriptors. Must never: look
at a file or a network. Read `doctor.py` for who asks before a start, `checkup.py` while it runs.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator

from trunkline.config import Config
from trunkline.core.ailment import GATEWAY, Ailment
from trunkline.core.alignment import State
from trunkline.written import is_loopback

HEARTBEAT_MS = 1_000
"""Pause between two heartbeats of a worker."""
SPARE_DESCRIPTORS = 256
"""Libraries, logs, the registry, event streams that come and go."""
PER_WORKER = 8
"""Event and replay sockets, probes and load readings of one worker at one time."""


def descriptors_limit() -> int | None:
    """What this process may open at most, once it has asked for it; None for no limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if hard in (resource.RLIM_INFINITY, -1) else hard


def ailments_of(config: Config, limit: int | None, workers_count: int = 0) -> list[Ailment]:
    """`limit` of descriptors. `workers_count`: those that are there, where they are not all named
    in the settings.
    """
    named = len(config.worker_urls) + sum(len(table.worker_urls) for table in config.models)
    return [
        *_exposure(config),
        *_time_outs(config),
        *_descriptors(config, limit, max(named, workers_count)),
        *_registry(config),
    ]


def _exposure(config: Config) -> Iterator[Ailment]:
    listen = config.listen
    if not is_loopback(listen.host) and config.auth.auth == "off":
        yield Ailment(
            what="client port",
            subject="listen.host",
            expected="clients that are asked who they are, or loopback",
            found=f"{listen.host} with --auth off: whoever reaches it is served, from one cache",
            remedy="--auth keys and `trunkline keys create`, --api-key @FILE, or --host 127.0.0.1",
        )
    if not is_loopback(listen.admin_host):
        yield Ailment(
            what="admin port",
            subject="listen.admin_host",
            expected="loopback, or TLS in front",
            found=f"{listen.admin_host}: the operator's key goes over the network in clear",
            remedy="--admin-host 127.0.0.1, or let a proxy with TLS alone reach it",
            state=State.NOTE,
        )


def _time_outs(config: Config) -> Iterator[Ailment]:
    for shorter, low_ms, longer, high_ms, meaning in _pairs(config):
        if low_ms >= high_ms:
            yield Ailment(
                what="time-outs",
                subject=longer,
                expected=f"more than {shorter} ({low_ms:g} ms)",
                found=f"{high_ms:g} ms: {meaning}",
                remedy=f"raise {longer}"
                + ("" if shorter == "a heartbeat" else f", or lower {shorter}"),
            )


def _pairs(config: Config) -> tuple[tuple[str, float, str, float, str], ...]:
    """What has to be shorter than what, and what it means where it is not."""
    upstream, retry, queue = config.upstream, config.retry, config.queue
    health, limits, directory = config.health, config.limits, config.directory
    first_ms = upstream.first_byte_timeout_ms
    return (
        (
            "upstream.connect_timeout_ms",
            upstream.connect_timeout_ms,
            "upstream.first_byte_timeout_ms",
            first_ms,
            "a worker that does not accept uses up all the time that its answer has",
        ),
        (
            "retry.retry_max_backoff_ms",
            retry.retry_max_backoff_ms,
            "upstream.first_byte_timeout_ms",
            first_ms,
            "a pause between attempts is longer than an attempt may take",
        ),
        (
            "health.stream_gap_floor_ms",
            health.stream_gap_floor_ms,
            "upstream.stream_idle_timeout_ms",
            upstream.stream_idle_timeout_ms,
            "a slow stream is cut before it can be seen to be slow",
        ),
        (
            "queue.queue_target_ms",
            queue.queue_target_ms,
            "queue.queue_timeout_secs",
            queue.queue_timeout_secs * 1_000.0,
            "requests are given up before overload is noticed",
        ),
        (
            "limits.header_timeout_ms",
            limits.header_timeout_ms,
            "limits.idle_timeout_ms",
            limits.idle_timeout_ms,
            "a connection is closed as idle while its request may still come",
        ),
        (
            "a heartbeat",
            HEARTBEAT_MS,
            "directory.heartbeat_ttl_ms",
            directory.heartbeat_ttl_ms,
            "a worker is out between two of its heartbeats",
        ),
    )


def _descriptors(config: Config, limit: int | None, workers_count: int) -> Iterator[Ailment]:
    """Of one process: several share no table of descriptors."""
    clients = min(config.limits.max_connections, 2 * config.limits.max_concurrent_requests)
    needed = clients + workers_count * PER_WORKER + SPARE_DESCRIPTORS
    if limit is None or needed <= limit:
        return
    yield Ailment(
        what="descriptors",
        subject=GATEWAY,
        expected=f"{needed} open files: clients, workers and their streams",
        found=f"{limit} (ulimit -Hn)",
        remedy=f"ulimit -n {needed} (systemd: LimitNOFILE={needed}), or --max-connections"
        f" {max(1, limit // 2)}",
    )


def _registry(config: Config) -> Iterator[Ailment]:
    control = config.control
    if control.control and control.control_replicas == 1:
        yield Ailment(
            what="registry",
            subject="control.control_replicas",
            expected="3 servers that keep a copy of the registry",
            found="1: when its server is away, so is reuse at every gateway",
            remedy="three servers of NATS in a cluster, and --control-replicas 3",
            state=State.NOTE if len(control.control) == 1 else State.WRONG,
        )
    if control.control and config.is_one_tenant:
        yield Ailment(
            what="registry",
            subject="control.control",
            expected="--auth keys, as a registry holds tenants",
            found="everybody is one tenant, so that nothing is asked of the registry",
            remedy="leave --control away, or serve tenants",
        )
