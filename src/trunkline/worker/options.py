"""What `trunkline worker` can be told: one frozen record, its bounds, and its flags.

Read `app.py` next, which builds a worker from it.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, cast

from trunkline.core.eviction import DEFAULT_POLICY, Policy
from trunkline.core.profiles import PROFILES, Profile, profile_named
from trunkline.errors import ConfigError
from trunkline.worker.faults import FAULT_KINDS, Faults, parse_faults
from trunkline.written import require_pull_host


class Feed(Enum):
    """How the gateway learns what the cache holds."""

    EXACT = "exact"
    DIGEST = "digest"
    APPROXIMATE = "approximate"


class Surface(Enum):
    """The engine that it stands for: whose paths and events it has."""

    VLLM = "vllm"
    SGLANG = "sglang"
    """As of 0.5.23."""
    SGLANG_0_5_18 = "sglang-0.5.18"


class AgentSwitch(Enum):
    """Whether the worker takes leases, tickets and orders."""

    ON = "on"
    OFF = "off"


def _option(
    default: Any,  # the field's own type
    sentence: str,
    low: float | None = None,
    high: float | None = None,
) -> Any:
    return field(default=default, metadata={"sentence": sentence, "low": low, "high": high})


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """One simulated worker. Raises ValueError that names the field, the value and the bounds."""

    host: str = _option("127.0.0.1", "Address to listen on.")
    port: int = _option(0, "Port to listen on; 0 lets the kernel pick.", 0, 65_535)
    worker_id: str = _option("", "Name in heartbeats; empty takes host:port, as a gateway does.")
    model: str = _option("trunkline-sim", "Model name in the API.")
    model_path: str = _option("", "Folder with tokenizer and template; empty takes the own ones.")
    max_model_len: int = _option(
        0, "Longest prompt plus answer, tokens; 0: what fits the cache.", 0, 1 << 24
    )
    block_size: int = _option(16, "Tokens a cache block, a multiple of 16.", 16, 4_096)
    blocks: int = _option(4_096, "Cache blocks of one rank.", 2, 1 << 22)
    profile: str = _option("llama-3.1-8b-h100", f"Latency profile: {', '.join(PROFILES)}.")
    time_scale: float = _option(1.0, "Factor on all times of the profile.", 0.0001, 1_000)
    max_num_seqs: int = _option(256, "Most requests that run at once.", 1, 65_536)
    max_waiting: int = _option(1_024, "Most requests that wait; more are answered 503.", 1, 1 << 20)
    default_tokens: int = _option(64, "Length of an answer without max_tokens.", 1, 1 << 20)
    data_parallel_size: int = _option(1, "Ranks, each with its own cache and queue.", 1, 64)
    feed: Feed = _option(Feed.EXACT, "How the gateway learns of the cache.")
    events_port: int = _option(
        0, "Port of rank 0's events, rank r has the r-th after; 0: kernel.", 0, 65_535
    )
    event_ring: int = _option(
        10_000, "Batches of events kept for whoever missed some.", 1, 1_000_000
    )
    engine: Surface = _option(Surface.VLLM, "Whose paths and events; SGLang's has no agent.")
    page_size: int = _option(
        0, "Tokens a page in SGLang's events, a part of a block; 0: as a block.", 0, 4_096
    )
    enable_cache_report: bool = _option(False, "As SGLang: only then usage tells of reuse.")
    agent: AgentSwitch = _option(
        AgentSwitch.ON, "Leases, tickets and revocation; off is a stock engine."
    )
    host_blocks: int = _option(
        0, "Blocks that host memory keeps behind all ranks' devices; 0: none.", 0, 1 << 24
    )
    disk_blocks: int = _option(0, "Blocks on disk behind host memory; 0: none.", 0, 1 << 24)
    disk_dir: str = _option("", "Folder for them; what a dead worker left there goes.")
    eviction: str = _option(
        DEFAULT_POLICY.value, f"What goes first there: {', '.join(p.value for p in Policy)}."
    )
    pull_host: str = _option("127.0.0.1", "IPv4 address that other workers pull blocks from.")
    pull_port: int = _option(0, "Its port; 0 lets the kernel pick.", 0, 65_535)
    transfer_key_file: str = _option(
        "", "File with the fleet's transfer key, 64 hex digits; empty: no pulls."
    )
    link_gbit: float = _option(25.0, "Modelled link for pulls, each way.", 0.001, 10_000)
    pull_patience_ms: int = _option(500, "Each pull is given this long at least.", 1, 600_000)
    wide_hashes: bool = _option(False, "Name blocks in events by 32 bytes instead of 64 bits.")
    heartbeat_url: str = _option("", "Where the digest feed posts its heartbeats.")
    heartbeat_key: str = field(
        default="", repr=False, metadata={"sentence": "Bearer key of the heartbeats."}
    )
    heartbeat_interval_ms: int = _option(1_000, "Pause between heartbeats.", 10, 60_000)
    drain_grace_ms: int = _option(
        5_000, "On SIGTERM, answers have this long to end; a second one ends them.", 0, 86_400_000
    )
    seed: int = _option(0, "Seed of the faults that happen by chance.", 0, 2**63 - 1)
    fault: tuple[str, ...] = _option((), f"Misbehaviour for tests: {', '.join(FAULT_KINDS)}.")

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            low, high = one.metadata.get("low"), one.metadata.get("high")
            if low is not None and not low <= value <= high:
                raise ValueError(f"{one.name} is {value}, allowed are {low} to {high}")
        if self.block_size % 16:
            raise ValueError(f"block_size is {self.block_size}, needed is a multiple of 16")
        if self.max_model_len > self.blocks * self.block_size:
            capacity = self.blocks * self.block_size
            raise ValueError(f"max_model_len is {self.max_model_len}, the cache has {capacity}")
        if self.eviction not in {policy.value for policy in Policy}:
            known = ", ".join(policy.value for policy in Policy)
            raise ValueError(f"eviction {self.eviction!r} is not one of {known}")
        require_pull_host(self.pull_host)
        if self.transfer_key_file and not self.host_blocks:
            raise ValueError("transfer_key_file needs host_blocks: pulls go between host memories")
        if bool(self.disk_blocks) is not bool(self.disk_dir):
            raise ValueError("disk_blocks and disk_dir go together")
        if self.disk_blocks and not self.host_blocks:
            raise ValueError("disk_blocks needs host_blocks: blocks reach the disk through them")
        self._check_engine()
        if self.host_blocks and not self.has_agent:
            raise ValueError("host_blocks needs the agent: only requests with a ticket use them")
        if self.feed is Feed.DIGEST and not self.heartbeat_url.startswith("http://"):
            raise ValueError("feed digest needs heartbeat_url, beginning with http://")
        if self.events_port + self.data_parallel_size > 65_536:
            raise ValueError(f"events_port is {self.events_port}, too high for all ranks")
        _ = self.faults, self.latency  # both say what is wrong

    def _check_engine(self) -> None:
        if self.block_size % self.page_tokens:
            raise ValueError(f"page_size is {self.page_size}, needed is a part of a block")
        if not self.is_sglang and (self.page_size or self.enable_cache_report):
            raise ValueError("page_size and enable_cache_report need engine sglang")
        if self.is_sglang and self.data_parallel_size > 1:
            raise ValueError("engine sglang has one rank here: it could not tell of more")

    @property
    def is_sglang(self) -> bool:
        return self.engine is not Surface.VLLM

    @property
    def has_agent(self) -> bool:
        return self.agent is AgentSwitch.ON and not self.is_sglang

    @property
    def tells_reuse(self) -> bool:
        return self.enable_cache_report or not self.is_sglang

    @property
    def page_tokens(self) -> int:
        """Tokens of what it calls a block in its events."""
        return self.page_size or self.block_size

    @property
    def faults(self) -> Faults:
        return parse_faults(self.fault)

    @property
    def latency(self) -> Profile:
        return profile_named(self.profile)

    @property
    def context_tokens(self) -> int:
        """The longest prompt plus answer."""
        return self.max_model_len or min(131_072, self.blocks * self.block_size)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One flag for each field of `WorkerOptions`, in its order."""
    for one in fields(WorkerOptions):
        default: Any = one.default  # the field's own type
        flag = "--" + one.name.replace("_", "-")
        sentence = one.metadata["sentence"]
        if isinstance(default, bool):
            parser.add_argument(flag, action="store_true", help=sentence)
        elif isinstance(default, tuple):
            parser.add_argument(flag, action="append", default=[], metavar="KIND", help=sentence)
        elif isinstance(default, Enum):
            choices = [choice.value for choice in type(default)]
            parser.add_argument(flag, choices=choices, default=default.value, help=sentence)
        else:
            kind = cast("type[int | float | str]", type(default))
            shown = f"{sentence} Default: {default!r}." if default else sentence
            parser.add_argument(flag, type=kind, default=default, help=shown.replace("%", "%%"))


def options_from(arguments: argparse.Namespace) -> WorkerOptions:
    """Raises ConfigError where `WorkerOptions` raises ValueError."""
    given = {one.name: getattr(arguments, one.name) for one in fields(WorkerOptions)}
    given["feed"] = Feed(given["feed"])
    given["agent"] = AgentSwitch(given["agent"])
    given["engine"] = Surface(given["engine"])
    given["fault"] = tuple(given["fault"])
    try:
        return WorkerOptions(**given)
    except ValueError as error:
        raise ConfigError(str(error)) from error
