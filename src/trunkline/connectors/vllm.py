"""The KV connector that vLLM 0.32 loads: two instances, one in each of an engine's processes.

    scheduler   `Planner`: what is in the store, what a step copies, what a request waits for
    worker      store, `Keeper`, pull server and the gateway's agent, beside the tensors

The only module that may import vLLM and torch, and the top of what runs inside an engine: it names
adapters as `wiring.py` does. vLLM calls this interface experimental, so it is held to one minor
version, and refuses at start what it cannot serve. Read `docs/connector.md`, then `plan.py`.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

import vllm
from trunkline.adapters.clock import SystemClock
from trunkline.connectors.agent import Agent, AgentServer, Belief
from trunkline.connectors.keeper import Keeper, KeeperTerms
from trunkline.connectors.messages import StepPlan, StepReport
from trunkline.connectors.options import ConnectorOptions, read_options
from trunkline.connectors.plan import Planner
from trunkline.connectors.weights import weights_digest
from trunkline.core.eviction import make_evictor
from trunkline.core.freshness import Freshness
from trunkline.core.transfer import hash_scheme
from trunkline.errors import ConfigError
from trunkline.kv.client import Puller
from trunkline.kv.judge import PullHost, StoreJudge
from trunkline.kv.orders import MAX_SOURCES
from trunkline.kv.pulls import PullOptions
from trunkline.kv.records import Component, Layout
from trunkline.kv.server import PullServer, ServerOptions
from trunkline.kv.store import BlockStore, StoreOptions
from trunkline.kv.wire import Identity
from trunkline.leaf import read_key
from trunkline.ports.publisher import BlockEvent, CacheCleared, RunStored
from trunkline.ports.publisher import BlockRemoved as TrunkBlockRemoved

VLLM_VERSION = "0.32."
MEDIUM = "CPU"
_log = logging.getLogger("vllm.trunkline")  # the engine shows what is below its own name


@dataclass
class _Plan(KVConnectorMetadata):
    plan: StepPlan


@dataclass
class _Report(KVConnectorWorkerMetadata):
    report: StepReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        raise AssertionError("one worker an engine")


class TrunklineConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module. Raises ConfigError at start for what cannot be served."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        _check_engine(vllm_config, kv_cache_config)
        super().__init__(vllm_config, role, kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        self._options = options = read_options(extra)
        self._transfer_key = read_key(options.transfer_key_file, "transfer_key_file")
        self._block_tokens: int = vllm_config.cache_config.block_size
        self._planner: Planner | None = None
        self._worker: _Worker | None = None
        self._report = StepReport()
        if role is KVConnectorRole.SCHEDULER:
            self._planner = Planner(
                block_tokens=self._block_tokens,
                transfer_key=self._transfer_key,
                max_loads=options.max_loads,
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is dropped is a later miss."""
        return False

    # -- the scheduler's process -------------------------------------------------------------------

    @property
    def _plans(self) -> Planner:
        assert self._planner is not None, "the scheduler's half"
        return self._planner

    def on_new_request(self, request: Any) -> None:
        self._plans.begin(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tokens = self._plans.matched(request.request_id, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            (block_ids,) = blocks.get_block_ids()
            self._plans.allocated(request.request_id, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        state = scheduler_output.kv_connector_block_state

        def block_ids_of(request_id: str) -> list[int]:
            (block_ids,) = state.resolve_block_ids(request_id)
            return block_ids

        return _Plan(self._plans.step(scheduler_output.num_scheduled_tokens, block_ids_of))

    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, _Report):
            self._plans.learn(meta.report)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._plans.finished(request.request_id)
        return False, None

    def take_events(self) -> Iterable[KVCacheEvent]:
        return [_engine_event(event) for event in self._plans.take_events()]

    def reset_cache(self) -> bool | None:
        self._plans.reset()
        return True

    # -- the worker's process ----------------------------------------------------------------------

    @property
    def _works(self) -> _Worker:
        assert self._worker is not None, "the worker's half, with its tensors"
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        device = _Tensors(kv_caches, self._kv_cache_config.num_blocks, self._options)
        layout = _layout(self._vllm_config, device, self._options, self._block_tokens)
        self._worker = _Worker(self._options, self._transfer_key, layout, device)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._works.keeper.begin(self._bound_plan())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded while a step runs."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Blocks are copied whole, when the step is over."""

    def wait_for_save(self) -> None:
        self._works.keeper.save(self._bound_plan().saves)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        self._report = self._works.keeper.drain()
        return None, {loaded.load.request_id for loaded in self._report.loaded}

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Of the loads that `get_finished` told just now."""
        return {block for loaded in self._report.loaded for block in loaded.failed_ids}

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        report, self._report = self._report, StepReport()
        return None if report.is_empty else _Report(report)

    def shutdown(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def _bound_plan(self) -> StepPlan:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, _Plan)
        return metadata.plan


class _Worker:
    """What lives beside the tensors. Raises OSError where a port is taken."""

    def __init__(
        self, options: ConnectorOptions, transfer_key: bytes, layout: Layout, device: _Tensors
    ) -> None:
        clock, block_tokens = SystemClock(), layout.block_tokens
        nonce = os.urandom(16).hex()
        belief = Belief(freshness=Freshness(nonce), boot=clock.boot)
        self._identity = Identity(
            worker=options.worker or f"vllm-{nonce[:12]}",
            incarnation=nonce,
            scheme=hash_scheme(block_tokens),
        )
        self._layout = layout
        store = BlockStore(
            layout,
            StoreOptions(host_bytes=options.host_bytes, staging_bytes=options.staging_bytes),
            clock=clock,
            judge=StoreJudge(belief),
            make_order=lambda: make_evictor(
                options.eviction.value, capacity_bytes=options.host_bytes
            ),
            draw=os.urandom,
        )
        self._server: PullServer | None = None
        puller = self._begin_pulls(store, clock, options, transfer_key, PullHost(belief))
        self.keeper = Keeper(
            store,
            device,
            belief,
            clock,
            KeeperTerms(
                block_tokens=block_tokens,
                max_loads=options.max_loads,
                max_pull_ms=options.max_pull_ms,
                saved_ms=options.prefill_ms_per_token * block_tokens,
                device_share=options.host_bytes / device.total_bytes,
            ),
            puller=puller,
            transfer_key=transfer_key,
        )
        agent = Agent(self.keeper, belief, pull=self._address)
        self._agent = AgentServer(agent.app(), options.agent_host, options.agent_port)
        self._agent.start()
        _log.info(
            "trunkline: %s keeps up to %d blocks of %d bytes; agent on %s:%d",
            self._identity.worker,
            options.host_bytes // layout.block_bytes,
            layout.block_bytes,
            options.agent_host,
            self._agent.port,
        )

    def _begin_pulls(
        self,
        store: BlockStore,
        clock: SystemClock,
        options: ConnectorOptions,
        transfer_key: bytes,
        host: PullHost,
    ) -> Puller | None:
        """Both ends of the way between engines; nothing without a key."""
        if not transfer_key:
            return None
        both = (store, self._layout, self._identity, transfer_key, clock)
        server_options = ServerOptions(host=options.pull_host, port=options.pull_port)
        self._server = PullServer(*both, server_options, host=host, draw=os.urandom)
        self._server.start()
        puller = Puller(*both, PullOptions(max_pulls=options.max_loads), host=host, draw=os.urandom)
        puller.start()
        return puller

    def close(self) -> None:
        self._agent.close()
        if self._server is not None:
            self._server.close()
        self.keeper.close()

    def _address(self) -> Mapping[str, Any] | None:
        if self._server is None:
            return None
        host, port = self._server.address
        return {
            "worker": self._identity.worker,
            "incarnation": self._identity.incarnation,
            "host": host,
            "port": port,
            "local": self._server.local_address,
            "layout": self._layout.digest.hex(),
            "block_bytes": self._layout.block_bytes,
            "sources": MAX_SOURCES,
        }


class _Tensors:
    """`keeper.Device` over the engine's KV tensors: one a layer, block by block."""

    def __init__(
        self, kv_caches: dict[str, torch.Tensor], num_blocks: int, options: ConnectorOptions
    ) -> None:
        """Raises ConfigError for tensors in which a block is not one piece."""
        self.names: list[str] = []
        self.shape_words: list[str] = []
        self._layers: list[torch.Tensor] = []
        seen: set[int] = set()
        for name, tensor in sorted(kv_caches.items()):
            if tensor.device.type != "cpu" and not options.allow_untested_devices:
                raise ConfigError(
                    f"{name} lies on {tensor.device}: tested are engines on the CPU alone;"
                    " allow_untested_devices tries others"
                )
            if tensor.shape[0] % num_blocks or not tensor.is_contiguous():
                raise ConfigError(
                    f"{name}: the shape {tuple(tensor.shape)} is not one piece a block"
                )
            if tensor.data_ptr() in seen:
                continue  # layers that share their cache
            seen.add(tensor.data_ptr())
            self.names.append(name)
            self.shape_words.append(f"{tuple(tensor.shape[1:])} {tensor.dtype}")
            self._layers.append(tensor.view(num_blocks, -1).view(torch.uint8))
        if not self._layers:
            raise ConfigError("the engine has no KV tensors")
        self.sizes = [layer.shape[1] for layer in self._layers]
        self.total_bytes = num_blocks * sum(self.sizes)

    def read(self, block_id: int, into: bytearray) -> None:
        for layer, part in zip(self._layers, self._parts(into), strict=True):
            part.copy_(layer[block_id])

    def write(self, block_id: int, data: bytearray) -> None:
        for layer, part in zip(self._layers, self._parts(data), strict=True):
            layer[block_id].copy_(part)

    def _parts(self, buffer: bytearray) -> tuple[torch.Tensor, ...]:
        return torch.frombuffer(buffer, dtype=torch.uint8).split(self.sizes)


def _layout(
    vllm_config: Any, device: _Tensors, options: ConnectorOptions, block_tokens: int
) -> Layout:
    """What the bytes of a block mean: engines that differ in any of it exchange nothing."""
    model = vllm_config.model_config
    config_json = model.hf_config.to_json_string(use_diff=False)
    isa = torch.backends.cpu.get_cpu_capability()
    return Layout(
        model=options.model_digest or weights_digest(_folder_of(model)),
        adapter="",  # requests with an adapter are left alone
        tokenizer="",  # blocks are named by token ids: these decide, not the text behind them
        rope=hashlib.sha256(config_json.encode()).hexdigest(),
        dtype=f"{model.dtype} {vllm_config.cache_config.cache_dtype} {model.quantization}",
        kv_format=f"vllm {vllm.__version__} torch {torch.__version__} {isa} {device.shape_words}",
        tp_rank=0,
        tp_size=1,
        block_tokens=block_tokens,
        components=tuple(
            Component(name=name, size_bytes=size)
            for name, size in zip(device.names, device.sizes, strict=True)
        ),
    )


def _folder_of(model: Any) -> Path:
    """Where the engine's weights lie."""
    folder = Path(model.model)
    if folder.is_dir():
        return folder
    try:
        from huggingface_hub import snapshot_download

        found: str = snapshot_download(model.model, revision=model.revision, local_files_only=True)
    except Exception as error:
        raise ConfigError(
            f"the weights of {model.model} are not on this machine's disk; say model_digest in the"
            " extra config: a digest of what they are, the same for the same weights only"
        ) from error
    return Path(found)


def _check_engine(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raises ConfigError for the first thing that cannot be served."""
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    groups = kv_cache_config.kv_cache_groups
    kinds = [type(group.kv_cache_spec).__name__ for group in groups]
    is_plain = kinds == ["FullAttentionSpec"] and groups[0].kv_cache_spec.sliding_window is None
    version = vllm.__version__
    wanted = [
        (version.startswith(VLLM_VERSION), f"vLLM {version}: it is made for {VLLM_VERSION}x"),
        (transfer.kv_role == "kv_both", f"kv_role is {transfer.kv_role}: it needs kv_both"),
        (
            transfer.kv_load_failure_policy == "recompute",
            f'kv_load_failure_policy is "{transfer.kv_load_failure_policy}": it needs "recompute",'
            " else a block that does not verify fails the request",
        ),
        (
            parallel.world_size == 1 and parallel.data_parallel_size == 1,
            f"{parallel.world_size} ranks x {parallel.data_parallel_size} replicas in one engine:"
            " it serves one (tensor, pipeline and data parallel size 1)",
        ),
        (is_plain, f"the cache has the groups {kinds}: it serves one of full attention"),
        (vllm_config.speculative_config is None, "speculative decoding is not served"),
        (vllm_config.cache_config.enable_prefix_caching, "prefix caching is switched off"),
    ]
    for is_right, said in wanted:
        if not is_right:
            raise ConfigError(f"trunkline's connector: {said}")


def _engine_event(event: BlockEvent) -> KVCacheEvent:
    """As the engine publishes it, beside its own. Blocks are called by their kv keys: the engine's
    own names are shorter and other ones, so none is taken for another.
    """
    match event:
        case RunStored():
            rest: list[Any] = [None] * len(event.hashes)
            if event.parent is None:
                rest[0] = (event.salt,)
            return BlockStored(
                block_hashes=list(event.hashes),
                parent_block_hash=event.parent,
                token_ids=event.tokens.tolist(),
                block_size=event.block_tokens,
                lora_id=None,
                medium=MEDIUM,
                lora_name=None,
                extra_keys=rest,
            )
        case TrunkBlockRemoved():
            return BlockRemoved(block_hashes=[event.hash], medium=MEDIUM)
        case CacheCleared():
            raise AssertionError("a store tells of blocks alone")
