"""The settings of who is served and where: listeners, tenants, and gateways with one registry.

Sections of `config.py`, which says how settings are made. Read `authority.py` for what is made of
the last two.
"""

from __future__ import annotations

from dataclasses import dataclass

from trunkline.setting import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenConfig:
    """Where clients and operators connect."""

    host: str = setting("127.0.0.1", "Address of the client listener.")
    port: int = setting(
        30000, "Port of the client listener; 0 lets the kernel pick.", low=0, high=65535
    )
    processes: int = setting(
        1,
        "Gateway processes that share both ports, for more than one core: each needs a core and "
        "memory of its own.",
        unit="processes",
        low=1,
        high=64,
    )
    admin_host: str = setting(
        "127.0.0.1", "Address of the admin listener.", aliases=("prometheus-host",)
    )
    admin_port: int = setting(
        29000,
        "Port of the admin listener (metrics, workers, decisions); 0 lets the kernel pick.",
        low=0,
        high=65535,
        aliases=("prometheus-port",),
    )
    request_id_headers: tuple[str, ...] = setting(
        ("x-request-id",),
        "Headers that a client's own id of its request may be in; the first that is there counts. "
        "The answer has it in x-request-id.",
        is_live=True,
    )
    cors_allowed_origins: tuple[str, ...] = setting(
        (),
        "Origins as `https://app.example` of web pages that may use the API from a browser, with a "
        "key; `*` is any, empty none.",
        is_live=True,
    )
    api_key: str = setting(
        "",
        "One bearer key for all clients, who are then one tenant; empty asks as --auth says.",
        is_secret=True,
        is_live=True,
    )
    admin_api_key: str = setting(
        "",
        "Bearer key of the admin listener; empty is allowed on loopback only.",
        is_secret=True,
        is_live=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthConfig:
    """Who may use the API, and where the truth about tenants is kept."""

    auth: str = setting(
        "keys",
        "Who is served: `keys` takes API keys and tokens of tenants; `off` serves everybody as one "
        "tenant, without asking. With --api-key, whoever has that one key is the one tenant.",
        choices=("keys", "off"),
    )
    state_dir: str = setting(
        "",
        "Folder of the registry, the audit log and their secrets; empty takes "
        "$XDG_STATE_HOME/trunkline, or ~/.local/state/trunkline.",
    )
    audit_copy_dir: str = setting(
        "",
        "Folder of the second copy of the audit log: best on another disk, or one that is shipped "
        "away; empty takes `audit-copy` in the state folder.",
    )
    tenant_paths: tuple[str, ...] = setting(
        (),
        "Paths beside the API's own that are proxied for tenants, as `/v1/embeddings`: name only "
        "those on which your engines keep to `cache_salt`. All others are 404 to tenants.",
        is_live=True,
    )
    jwt_issuer: str = setting("", "Issuer whose tokens (JWT) are taken; empty takes none.")
    jwt_audience: str = setting("", "Audience that tokens must be made for.")
    jwt_algorithms: tuple[str, ...] = setting(
        ("RS256", "ES256", "EdDSA"), "Algorithms that tokens may be signed with."
    )
    jwt_jwks: str = setting(
        "", "Keys that tokens are checked with: a JWKS file, or an https URL of one."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlConfig:
    """Several gateways with one registry (extra `cluster`)."""

    control: tuple[str, ...] = setting(
        (),
        "Servers of NATS as `nats://HOST:PORT`, whose JetStream keeps the registry that all "
        "gateways of the fleet share; empty: the registry is this gateway's alone.",
    )
    control_fleet: str = setting(
        "trunkline", "Name of the fleet: its bucket in NATS is called `trunkline-<name>`."
    )
    control_replicas: int = setting(
        3,
        "Servers that keep a copy of the bucket: 1 where a single one is what you have.",
        unit="servers",
        low=1,
        high=5,
    )
    control_credentials_file: str = setting("", "Credentials (.creds) of the account in NATS.")
    control_ca_file: str = setting("", "Certificate that the servers' are signed by; turns TLS on.")
    control_lost: str = setting(
        "finish",
        "What an answer does that has begun with reuse when the registry stays away for longer than"
        " a lease: `finish` lets it go on to its end, `end` breaks it off. None begins with reuse.",
        choices=("finish", "end"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvoyConfig:
    """Deciding for an Envoy that carries the requests (extra `picker`)."""

    ext_proc_port: int = setting(
        0, "Port of the external processing (ext_proc) for Envoy; 0: none.", low=0, high=65_535
    )
    ext_proc_host: str = setting(
        "127.0.0.1",
        "Its address. It has neither key nor TLS, and tells salts to whoever has a client's key: "
        "let nobody but Envoy reach it.",
    )
    ext_proc_streams: int = setting(
        256,
        "Requests that Envoy may have open at once, a thread each; further ones are answered 429.",
        unit="requests",
        low=1,
        high=4_096,
    )
