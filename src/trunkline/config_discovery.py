"""The settings of where workers are learnt of, beside those that are named outright.

A section of `config.py`, which says how settings are made. Read `discovery_side.py` for what is
made of these.
"""

from __future__ import annotations

from dataclasses import dataclass

from trunkline.setting import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoveryConfig:
    """Where workers are learnt of that nobody names on the command line."""

    workers_file: str = setting(
        "",
        "File that names workers, followed while it changes: NAME.toml with [[workers]] tables, "
        "else a line for each, a URL or a JSON object (url, api_key, labels, model_id, draining).",
    )
    worker_dns: tuple[str, ...] = setting(
        (), "Names as `host:port`: each address of such a name (A, AAAA) is a worker."
    )
    worker_dns_interval_secs: float = setting(
        5.0, "Pause between two look-ups of such a name.", low=0.05, high=3_600.0
    )
    worker_networks: tuple[str, ...] = setting(
        (),
        "Networks as `10.0.0.0/8` that workers' addresses must lie in; empty takes all. Link-local "
        "and metadata addresses are never taken, loopback ones that were looked up only from here.",
    )
    worker_ca_file: str = setting(
        "",
        "File with certificates (PEM) of authorities that workers' https is believed by, beside "
        "those of the system.",
    )
    service_discovery: bool = setting(
        False,
        "Follow the EndpointSlices of Kubernetes services under --selector: for gateways that run "
        "in a pod whose service account may list and watch them.",
    )
    selector: tuple[str, ...] = setting(
        (), "Labels as `app=engine` that those slices (their services) have, all of them."
    )
    service_discovery_port: int = setting(
        0,
        "Port of the workers there; 0 takes the service's only one, or the one called `http`.",
        low=0,
        high=65_535,
    )
    service_discovery_namespace: str = setting(
        "", "Namespace of those services; empty takes the gateway's own."
    )
    service_account_dir: str = setting(
        "/var/run/secrets/kubernetes.io/serviceaccount",
        "Folder with the token, ca.crt and namespace that Kubernetes gives a pod.",
    )
