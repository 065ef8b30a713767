"""What other routers call things, and what to give here instead.

Owns the one table behind the refusals and `docs/migration.md`. A name in it is never a setting of
ours, and no remedy names a flag that does not exist: tests hold both. Must never make a flag of
theirs mean something here. Read `settings.py` for who refuses, `cli.py` next.
"""

from __future__ import annotations

from collections.abc import Mapping

_NO_THRESHOLDS = "the cost in milliseconds has no thresholds: remove it (see --policy)"
_NO_TREE = "the directory follows cache events, with leases: remove it (bounds: --max-blocks)"
_NO_SPLIT = (
    "there is no prefill/decode mode here, each worker does both: "
    "name all workers with --worker-urls"
)
_NO_STORE = "nothing of a conversation is stored here: remove it"
_NO_BACKOFF = "use --retry-initial-backoff-ms and --retry-max-backoff-ms"
_JOINS = "workers may come at any time, and join when they answer: remove it"
_KEPT_APART = "every worker is probed: use --health-check-interval-secs and its neighbours"
_ENGINE_PARSES = "workers parse what their models write: give it to the engine"
_NO_TLS = "TLS ends in front of the gateway: put a proxy there"
_NO_CLIENT_TLS = "workers are shown no certificate, only their api_key (see --workers-file)"
_TRACES = "use --otlp-endpoint, OTLP over HTTP"
_NO_RANKS = "ranks of a worker are found by its cache events: remove it"
_FEEDS_BY_THEMSELVES = "caches are followed through the engines' own events: remove it"
_TABLES = "a table [[models]] for each, with served_names, in the file of --config"

_SGLANG: Mapping[str, str] = {
    "cache_threshold": _NO_THRESHOLDS,
    "balance_abs_threshold": _NO_THRESHOLDS,
    "balance_rel_threshold": _NO_THRESHOLDS,
    "eviction_interval_secs": _NO_TREE,
    "max_tree_size": _NO_TREE,
    "bucket_adjust_interval_secs": _NO_THRESHOLDS,
    "request_timeout_secs": "an answer has no total limit: "
    "use --first-byte-timeout-ms and --stream-idle-timeout-ms",
    "retry_backoff_multiplier": f"the pause doubles, jittered: {_NO_BACKOFF}",
    "retry_jitter_factor": "the pause is always jittered: remove it",
    "cb_window_duration_secs": "failures count in a row: use --cb-failure-threshold",
    "disable_health_check": _KEPT_APART,
    "pd_disaggregation": _NO_SPLIT,
    "e_disaggregation": _NO_SPLIT,
    "prefill": _NO_SPLIT,
    "decode": _NO_SPLIT,
    "encode": _NO_SPLIT,
    "prefill_policy": _NO_SPLIT,
    "decode_policy": _NO_SPLIT,
    "prefill_selector": _NO_SPLIT,
    "decode_selector": _NO_SPLIT,
    "mini_lb": "use --policy round_robin",
    "worker_startup_timeout_secs": _JOINS,
    "worker_startup_check_interval": _JOINS,
    "dp_aware": _NO_RANKS,
    "enable_igw": f"several models are {_TABLES}",
    "tokenizer_cache_enable_l0": "the tokenizer needs no cache here: remove it",
    "tokenizer_cache_enable_l1": "the tokenizer needs no cache here: remove it",
    "reasoning_parser": _ENGINE_PARSES,
    "tool_call_parser": _ENGINE_PARSES,
    "mcp_config_path": "tools are not called here: remove it",
    "backend": "what engine a worker is, it says itself: remove it",
    "history_backend": _NO_STORE,
    "tls_cert_path": _NO_TLS,
    "tls_key_path": _NO_TLS,
    "client_cert_path": _NO_CLIENT_TLS,
    "client_key_path": _NO_CLIENT_TLS,
    "ca_cert_paths": "use --worker-ca-file",
    "enable_trace": _TRACES,
    "otlp_traces_endpoint": _TRACES,
}

_VLLM_ROUTER: Mapping[str, str] = {
    "eviction_interval": _NO_TREE,
    "vllm_pd_disaggregation": _NO_SPLIT,
    "vllm_discovery_address": "use --worker-urls, --workers-file or --service-discovery",
    "kv_connector": "the KV connector is a setting of the engine (see --transfer-key-file)",
    "intra_node_data_parallel_size": _NO_RANKS,
    "enable_program_scheduling": "affinity and fairness need no switch: remove it",
    "runtime": "what engine a worker is, it says itself: remove it",
}

_PRODUCTION_STACK: Mapping[str, str] = {
    "service_discovery_type": "use --service-discovery (Kubernetes) or --worker-urls",
    "k8s_port": "use --service-discovery-port",
    "k8s_namespace": "use --service-discovery-namespace",
    "k8s_label_selector": "use --selector, with labels of the services",
    "k8s_service_discovery_type": "services' EndpointSlices are followed: use --selector",
    "static_backends": "use --worker-urls",
    "static_models": f"use --served-model-name for one model; several are {_TABLES}",
    "static_aliases": f"names of models are {_TABLES}",
    "static_model_types": "which model a worker serves, it says itself: remove it",
    "static_model_labels": "labels stand in the file of --workers-file",
    "static_backend_health_checks": _KEPT_APART,
    "backend_health_check_timeout_seconds": "use --health-check-timeout-secs",
    "routing_logic": "use --policy",
    "session_key": "sessions are known by x-session-id and the headers of agent tools: remove it",
    "kv_aware_threshold": _NO_THRESHOLDS,
    "lmcache_controller_port": _FEEDS_BY_THEMSELVES,
    "engine_stats_interval": "use --load-interval-secs",
    "request_stats_window": "loads are followed at all times: remove it",
    "log_stats": "figures are at /metrics of --admin-port: remove it",
    "log_stats_interval": "figures are at /metrics of --admin-port: remove it",
    "dynamic_config_yaml": "use --workers-file for what changes",
    "dynamic_config_json": "use --workers-file for what changes",
    "enable_batch_api": _NO_STORE,
    "file_storage_class": _NO_STORE,
    "callbacks": "requests are not changed by code of yours: remove it",
    "request_rewriter": "requests are not changed by code of yours: remove it",
    "feature_gates": "there are no gates: remove it",
    "sentry_dsn": "errors are in the log: use --log-format json",
    "otel_endpoint": _TRACES,
    "prefill_model_labels": _NO_SPLIT,
    "decode_model_labels": _NO_SPLIT,
}

_DYNAMO: Mapping[str, str] = {
    "router_mode": "use --policy",
    "http_port": "use --port",
    "http_host": "use --host",
    "kv_cache_block_size": "use --block-size, where a worker does not say it",
    "kv_overlap_score_weight": _NO_THRESHOLDS,
    "router_kv_overlap_score_weight": _NO_THRESHOLDS,
    "router_kv_overlap_score_credit": _NO_THRESHOLDS,
    "router_temperature": "near ties are broken by --seed: remove it",
    "kv_events": _FEEDS_BY_THEMSELVES,
    "router_ttl_secs": "use --approximate-ttl-ms",
    "router_predicted_ttl_secs": "use --predicted-ttl-ms",
    "router_max_tree_size": _NO_TREE,
    "router_prune_target_ratio": _NO_TREE,
    "router_replica_sync": "gateways of one fleet tell one another: use --control",
    "router_snapshot_threshold": "what workers hold is asked of them anew: remove it",
    "router_reset_states": "what workers hold is asked of them anew: remove it",
    "router_track_active_blocks": "what runs at a worker always counts: remove it",
    "router_queue_threshold": "use --queue-target-ms",
    "busy_threshold": "use --queue-target-ms",
    "migration_limit": "use --retry-max-retries and --resume-buffer-bytes",
    "discovery_backend": "use --worker-urls, --workers-file or --service-discovery",
    "request_plane": "workers are spoken to by HTTP: use --worker-urls",
    "event_plane": _FEEDS_BY_THEMSELVES,
    "enforce_disagg": _NO_SPLIT,
}

_LLM_D: Mapping[str, str] = {
    "pool_name": "use --selector",
    "pool_namespace": "use --service-discovery-namespace",
    "endpoint_selector": "use --selector",
    "endpoint_target_ports": "use --service-discovery-port",
    "config_file": "use --config",
    "grpc_port": "the gateway is the proxy, no picker beside one: use --port",
    "metrics_port": "use --admin-port",
    "refresh_metrics_interval": "use --load-interval-secs",
    "kv_cache_usage_percentage_metric": "engines are read by what they are: remove it",
    "total_queued_requests_metric": "engines are read by what they are: remove it",
    "tracing": _TRACES,
}

_LITELLM: Mapping[str, str] = {
    "num_workers": "use --processes",
    "num_retries": "use --retry-max-retries",
    "request_timeout": "use --first-byte-timeout-ms and --stream-idle-timeout-ms",
    "max_parallel_requests": "use --max-concurrent-requests",
    "master_key": "use --admin-api-key",
    "routing_strategy": "use --policy",
    "model_list": f"models are {_TABLES}",
    "detailed_debug": "use --log-level debug",
    "debug": "use --log-level debug",
}

BY_PEER: Mapping[str, Mapping[str, str]] = {
    "SGLang router": _SGLANG,
    "vLLM Router": _VLLM_ROUTER,
    "production-stack": _PRODUCTION_STACK,
    "Dynamo": _DYNAMO,
    "llm-d": _LLM_D,
    "LiteLLM": _LITELLM,
}
"""Settings of other routers that mean nothing here, by key, and what to do instead. AIBrix is not
in it: it is told by the environment.
"""

FOREIGN: Mapping[str, str] = {
    name: remedy for theirs in BY_PEER.values() for name, remedy in theirs.items()
}
"""All of them."""

VALUES: Mapping[str, Mapping[str, str]] = {
    "policy": {
        "kv": "cache_aware",
        "prefix-cache": "cache_aware",
        "prefix_hash": "cache_aware",
        "session": "consistent_hash",
        "rendezvous_hash": "consistent_hash",
        "simple-shuffle": "random",
        "least-request": "least_queue",
        "least-busy": "least_queue",
        "bucket": "least_queue",
    },
    "log_level": {"critical": "error", "trace": "debug"},
}
"""Values of theirs, by setting, and ours that comes nearest to each."""

SAME_WITH = "router_"
"""What SGLang's launcher puts in front of its router's flags."""
