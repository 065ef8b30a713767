"""The settings of a gateway: one frozen tree, built once, passed down by piece.

Each field has a default, a unit, a bound and one sentence; the flag, the environment name, the key
in the file and the reference page are all made from them. Must never read a file, a flag or the
environment: `settings.py` does that and merges them (defaults < file < environment < flags). Read
it next.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from trunkline.config_access import AuthConfig, ControlConfig, EnvoyConfig, ListenConfig
from trunkline.config_discovery import DiscoveryConfig
from trunkline.config_models import ModelTable
from trunkline.setting import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    """Bounds on what a client may send and hold."""

    max_payload_size: int = setting(
        8 << 20, "Largest request body.", unit="bytes", low=1024, high=1 << 30, is_live=True
    )
    max_headers: int = setting(
        100, "Most header lines of a request.", unit="lines", low=8, high=1000, is_live=True
    )
    max_header_bytes: int = setting(
        8 << 10, "Largest single header.", low=256, high=1 << 20, is_live=True
    )
    max_head_bytes: int = setting(
        32 << 10, "Largest request head.", low=1024, high=1 << 20, is_live=True
    )
    max_json_depth: int = setting(
        64, "Deepest nesting of a JSON body.", unit="levels", low=4, high=500, is_live=True
    )
    header_timeout_ms: int = setting(
        10_000, "A request head must arrive within this.", low=100, high=600_000, is_live=True
    )
    body_timeout_ms: int = setting(
        30_000, "A request body must arrive within this.", low=100, high=3_600_000, is_live=True
    )
    idle_timeout_ms: int = setting(
        60_000, "A keep-alive connection may idle this long.", low=100, high=3_600_000, is_live=True
    )
    write_stall_ms: int = setting(
        30_000,
        "A client that reads nothing for this long is dropped.",
        low=100,
        high=3_600_000,
        is_live=True,
    )
    write_buffer_bytes: int = setting(
        1 << 20,
        "Unread answer bytes of one client before its upstream is paused.",
        low=16 << 10,
        high=1 << 28,
        is_live=True,
    )
    max_connections: int = setting(
        20_000,
        "Most open client connections.",
        unit="connections",
        low=1,
        high=1_000_000,
        is_live=True,
    )
    max_concurrent_requests: int = setting(
        8_192,
        "Most requests in flight; further ones are answered 429 with Retry-After.",
        unit="requests",
        low=1,
        high=1_000_000,
        is_live=True,
    )
    rate_limit_tokens_per_second: float = setting(
        0.0,
        "Prompt tokens a second of a tenant whose policy says nothing of tokens; 0 is no limit.",
        unit="tokens/s",
        low=0.0,
        high=1e12,
        is_live=True,
    )
    strict_fields: bool = setting(
        False,
        "Answer 400 to unknown body fields instead of dropping and counting them.",
        is_live=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueConfig:
    """How long requests wait for a worker with room, and when too many do."""

    queue_size: int = setting(
        8_192,
        "Most requests that wait, a quarter of them of one tenant; further ones are answered 429.",
        unit="requests",
        low=4,
        high=1_000_000,
    )
    queue_timeout_secs: float = setting(
        60.0, "Who has waited so long is answered 429.", low=0.01, high=86_400.0, is_live=True
    )
    queue_target_ms: float = setting(
        500.0,
        "Where the wait stays above this for an interval, the fleet is overloaded: requests that "
        "would wait longer are answered 429 as they come. 0 takes no wait for overload.",
        low=0.0,
        high=600_000.0,
        is_live=True,
    )
    queue_interval_ms: float = setting(
        2_000.0, "How long a wait is taken for a burst.", low=10.0, high=600_000.0, is_live=True
    )
    queue_one_tenant: bool = setting(
        True,
        "Let requests wait here, and shed overload, where everybody is one tenant, too; else all "
        "are sent to workers at once.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamConfig:
    """How workers are connected to and waited for."""

    connect_timeout_ms: int = setting(
        1_000, "A worker must accept within this.", low=10, high=60_000, is_live=True
    )
    first_byte_timeout_ms: int = setting(
        600_000, "A worker must begin to answer within this.", low=10, high=86_400_000, is_live=True
    )
    stream_idle_timeout_ms: int = setting(
        600_000,
        "Longest silence inside an answer; there is no total limit.",
        low=10,
        high=86_400_000,
        is_live=True,
    )
    keepalive_idle_ms: int = setting(
        4_000,
        "An idle worker connection is reused this long (vLLM closes at 5 s).",
        low=0,
        high=600_000,
        is_live=True,
    )
    max_idle_connections: int = setting(
        256,
        "Most idle connections kept to one worker.",
        unit="connections",
        low=0,
        high=65_536,
        is_live=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryConfig:
    """Further attempts: before the first byte of an answer, and in the middle of a stream."""

    retry_max_retries: int = setting(
        2, "Most further attempts of one request.", unit="attempts", low=0, high=10, is_live=True
    )
    retry_initial_backoff_ms: int = setting(
        25, "Pause before the first further attempt.", low=0, high=60_000, is_live=True
    )
    retry_max_backoff_ms: int = setting(
        250, "Longest pause between attempts.", low=0, high=60_000, is_live=True
    )
    retry_budget_ratio: float = setting(
        0.2,
        "Further attempts allowed as a share of requests, over 10 s.",
        unit="share",
        low=0.0,
        high=1.0,
        is_live=True,
    )
    retry_budget_floor_per_s: float = setting(
        10.0, "Further attempts always allowed, per second.", low=0.0, high=100_000.0, is_live=True
    )
    disable_retries: bool = setting(False, "Never try a second worker.", is_live=True)
    resume_buffer_bytes: int = setting(
        1 << 20,
        "Most of a running stream that is kept to go on from another worker; 0 never goes on.",
        low=0,
        high=64 << 20,
        is_live=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerConfig:
    """When a failing worker is left alone. An answer below 500 is never a failure."""

    cb_failure_threshold: int = setting(
        10, "Consecutive failures that open the breaker.", unit="failures", low=1, high=10_000
    )
    cb_success_threshold: int = setting(
        3, "Consecutive successes that close it.", unit="successes", low=1, high=10_000
    )
    cb_timeout_duration_secs: float = setting(
        60.0, "Pause before an open breaker lets a trial through.", low=0.01, high=86_400.0
    )
    disable_circuit_breaker: bool = setting(False, "Never open a breaker.")


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthConfig:
    """Probing of workers that send no heartbeats."""

    health_check_interval_secs: float = setting(
        5.0, "Pause between probes.", low=0.05, high=3_600.0, is_live=True
    )
    health_check_timeout_secs: float = setting(
        5.0, "A probe must be answered within this.", low=0.05, high=600.0, is_live=True
    )
    health_failure_threshold: int = setting(
        3,
        "Failed probes in a row that take a worker out.",
        unit="probes",
        low=1,
        high=1_000,
        is_live=True,
    )
    health_success_threshold: int = setting(
        2,
        "Good probes in a row that bring it back.",
        unit="probes",
        low=1,
        high=1_000,
        is_live=True,
    )
    health_check_endpoint: str = setting("/health", "Path that is probed.", is_live=True)
    load_interval_secs: float = setting(
        1.0, "Pause between readings of a worker's load.", low=0.05, high=3_600.0, is_live=True
    )
    stream_gap_floor_ms: int = setting(
        5_000,
        "No pause between two tokens that is shorter counts against a worker that answers at all; "
        "raise it for pools that give their tokens slowly or in bursts.",
        low=100,
        high=86_400_000,
    )
    disable_gray_detection: bool = setting(
        False,
        "Leave no worker out for being silent, slow or late while its health probe is answered, "
        "and take the time-outs of `[upstream]` as they are.",
    )
    disable_self_test: bool = setting(
        False, "Test no worker by itself when it joins; `trunkline doctor` still does."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingConfig:
    """How a worker is chosen."""

    policy: str = setting(
        "cache_aware",
        "Routing policy.",
        choices=(
            "cache_aware",
            "round_robin",
            "least_queue",
            "power_of_two",
            "consistent_hash",
            "random",
        ),
        aliases=(
            "roundrobin=round_robin",
            "consistent_hashing=consistent_hash",
            "kv_aware=cache_aware",
            "kvaware=cache_aware",
            "prefixaware=cache_aware",
        ),
    )
    profile: str = setting(
        "llama-3.1-8b-h100", "Latency profile that prices start from, before calibration."
    )
    churn_weight: float = setting(
        1.5,
        "Extra price of a cold prefill where much was inserted lately (1 to 2).",
        unit="factor",
        low=0.0,
        high=8.0,
    )
    predicted_ttl_ms: int = setting(
        5_000,
        "How long a decision counts as residency before events confirm it.",
        low=0,
        high=600_000,
    )
    approximate_ttl_ms: int = setting(
        120_000, "The same for workers without cache events.", low=0, high=86_400_000
    )
    slow_start_ms: int = setting(
        60_000,
        "Prefill that a worker which comes with an empty cache is sent before its queue counts as "
        "any other's; until then it counts up to ten times. 0 is no slow start.",
        low=0,
        high=600_000,
    )
    virtual_nodes: int = setting(
        128, "Points of each worker on the hash ring.", unit="points", low=1, high=4_096
    )
    transfer_key_file: str = setting(
        "",
        "File with the key that lets workers pull KV from one another, 64 hex digits, the same for "
        "all of them, that others must not be able to read; empty: nothing is pulled.",
    )
    link_gbit: float = setting(
        25.0,
        "Speed of the workers' links that prices of pulls start from, before calibration.",
        unit="Gbit/s",
        low=0.001,
        high=100_000.0,
    )
    max_copies: int = setting(
        64, "What so many workers hold is not pulled any more.", unit="workers", low=1, high=65_535
    )
    memory_watermark: float = setting(
        0.98,
        "A worker with fuller KV memory gets no new prefixes.",
        unit="share",
        low=0.0,
        high=1.0,
    )
    load_watermark: float = setting(
        0.85,
        "A worker whose heartbeats tell of higher load gets no new prefixes; engines do not say.",
        unit="share",
        low=0.0,
        high=1.0,
    )
    time_scale: float = setting(
        1.0,
        "Factor on all times of the profile, for simulated workers that run slowed down.",
        unit="factor",
        low=0.001,
        high=1_000.0,
    )
    seed: int = setting(0, "Seed of tie-breaks and of the random policies.", low=0, high=2**63 - 1)
    decisions_kept: int = setting(
        1_000, "Decisions kept for /decisions.", unit="decisions", low=0, high=1_000_000
    )
    decision_header: bool = setting(
        False,
        "Send x-trunkline-decision to clients: to tenants an opaque id; to operators, and where all"
        " are one tenant, the decision itself, which names workers.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryConfig:
    """Bounds of the cache directory and of the feeds that fill it."""

    max_blocks: int = setting(
        8_000_000, "Most distinct blocks known.", unit="blocks", low=1, high=1 << 31
    )
    max_buffered_batches: int = setting(
        65_536, "Live batches held back during a replay.", unit="batches", low=16, high=1 << 24
    )
    max_parked_runs: int = setting(
        1_024, "Runs of blocks whose parent is not known yet.", unit="runs", low=0, high=1 << 20
    )
    parked_ttl_ms: int = setting(
        5_000, "How long such a run waits for its parent.", low=0, high=600_000
    )
    replay_timeout_ms: int = setting(
        5_000, "A replay must finish within this.", low=10, high=600_000
    )
    heartbeat_ttl_ms: int = setting(
        3_000, "A heartbeat is believed this long.", low=10, high=600_000
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model that the fleet serves."""

    model_path: str = setting(
        "",
        "Folder with tokenizer.json and tokenizer_config.json. Without one, prompts of simulated "
        "workers are read as they read them, and all others are told apart by their text alone.",
    )
    tokenizer_path: str = setting("", "tokenizer.json, where it lies apart from the model folder.")
    chat_template: str = setting(
        "", "Chat template file; empty takes the one of the tokenizer's config."
    )
    served_model_name: str = setting(
        "",
        "Model that the fleet serves; workers that do not list it are left out. "
        "Empty takes that of the first worker.",
    )
    max_model_len: int = setting(
        131_072, "Longest prompt plus answer.", unit="tokens", low=16, high=1 << 24
    )
    block_size: int = setting(
        16, "Block size where a worker does not say.", unit="tokens", low=1, high=65_536
    )
    root_key_file: str = setting(
        "",
        "File with the 32-byte root secret of all namespaces, hex, that others must not be able to "
        "read; empty makes one at start.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserveConfig:
    """Logs and traces."""

    log_level: str = setting(
        "info",
        "Least severe event logged.",
        choices=("debug", "info", "warning", "error"),
        aliases=("warn=warning",),
        is_live=True,
    )
    log_format: str = setting("text", "Shape of log lines.", choices=("text", "json"))
    log_dir: str = setting(
        "",
        "Folder for log files beside stderr: 8 of 64 MiB for each process, then the oldest goes; "
        "empty writes none.",
    )
    otlp_endpoint: str = setting(
        "",
        "Collector of traces, `http://host:4318` (OTLP over HTTP, extra `otel`); empty makes no "
        "spans. `OTEL_EXPORTER_OTLP_ENDPOINT` is read too, where nothing else says.",
    )
    trace_sample_ratio: float = setting(
        1.0,
        "Share of the traces that begin here of which spans are made; of others the caller's flag "
        "decides.",
        unit="share",
        low=0.0,
        high=1.0,
    )
    make_traceparent: bool = setting(
        False,
        "Begin a trace for requests that come without one, also where no spans are made, so that "
        "logs here and at workers can be joined.",
    )
    trace_tenants: str = setting(
        "hash",
        "What traces say of a request's tenant.",
        choices=("hash", "name", "none"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything `trunkline serve` can be told."""

    worker_urls: tuple[str, ...] = setting(
        (),
        "Workers as `http://host:port`, followed by `#events=tcp://host:port` (and "
        "`&replay=tcp://host:port`) where the engine does not announce its event socket.",
        is_live=True,
    )
    discovery: DiscoveryConfig = field(default_factory=DiscoveryConfig)
    listen: ListenConfig = field(default_factory=ListenConfig)
    auth: AuthConfig = field(default_factory=AuthConfig)
    control: ControlConfig = field(default_factory=ControlConfig)
    envoy: EnvoyConfig = field(default_factory=EnvoyConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    queue: QueueConfig = field(default_factory=QueueConfig)
    upstream: UpstreamConfig = field(default_factory=UpstreamConfig)
    retry: RetryConfig = field(default_factory=RetryConfig)
    breaker: BreakerConfig = field(default_factory=BreakerConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    directory: DirectoryConfig = field(default_factory=DirectoryConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    models: tuple[ModelTable, ...] = field(default=(), metadata={"tables": ModelTable})
    """Empty for one model, which `[model]` is about."""

    @property
    def is_one_tenant(self) -> bool:
        """Whether all who are served are one tenant, so that nobody is kept apart."""
        return self.auth.auth == "off" or bool(self.listen.api_key)
