"""What traces requests: the tracer of a gateway, and where its spans go if anywhere.

OpenTelemetry is imported here alone, and only where an endpoint is set. Read `gateway/tracing.py`
for what is recorded.
"""

from __future__ import annotations

import random
import secrets
from typing import cast

from trunkline import cli
from trunkline.config import Config
from trunkline.errors import ConfigError
from trunkline.gateway.span_queue import SpanQueue
from trunkline.gateway.tracing import TenantNames, Tracer
from trunkline.observe import EventLog
from trunkline.ports.clock import Clock


def trace_side(config: Config, clock: Clock, log: EventLog) -> tuple[Tracer, SpanQueue | None]:
    """The queue is to be run beside requests; None where no spans are made. Raises ConfigError
    where spans are wanted and OpenTelemetry is not installed.
    """
    observe = config.observe
    queue = None
    if observe.otlp_endpoint:
        try:
            from trunkline.adapters.otlp import OtlpExport
        except ImportError as error:
            text = "otlp_endpoint needs OpenTelemetry; pip install 'trunkline[otel]'"
            raise ConfigError(text) from error
        export = OtlpExport(observe.otlp_endpoint, version=cli.version())
        queue = SpanQueue(export, log)
    tracer = Tracer(
        dice=random.Random(secrets.randbits(64)),
        now_ms=clock.now,
        wall=clock.wall,
        sink=None if queue is None else queue.put,
        sample_ratio=observe.trace_sample_ratio,
        begins=observe.make_traceparent,
        tenant_names=cast("TenantNames", observe.trace_tenants),  # checked against its choices
    )
    return tracer, queue
