"""How far routing and free movement of KV could go: one cache of the fleet's whole size, shared by
all.

The least queued worker serves each request and finds whatever the one cache holds. No router can do
better on hits or on queues at once; reports print the limit beside each result (docs/routing.md).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from trunkline.core.records import WorkerId
from trunkline.replay.traces import TraceRequest
from trunkline.replay.workloads import Workload
from trunkline.sim.cache import PrefixCache
from trunkline.sim.outcome import Outcome


def limit(workload: Workload, requests: Sequence[TraceRequest], *, host_blocks: int = 0) -> Outcome:
    """The outcome of the limit; blocks are named by the trace's ids alone. `host_blocks` of each
    worker keep what its device has, too.
    """
    outcome = Outcome()
    cache = PrefixCache(max(workload.capacity_blocks, host_blocks) * workload.workers)
    names = [WorkerId(f"w{index}") for index in range(workload.workers)]
    busy_until_ms = [0.0] * workload.workers
    outcome.work_ms = dict.fromkeys(names, 0.0)
    for request in requests:
        ids = array("I", (request.block_ids or ())[: request.full_blocks])
        use = cache.use([block_id.to_bytes(4, "big") for block_id in ids], ids)
        most = (request.input_tokens - 1) // workload.block_tokens
        hit_tokens = min(use.hit_blocks, most) * workload.block_tokens
        least = min(range(workload.workers), key=busy_until_ms.__getitem__)
        prefill_ms = workload.prefill_ms(request.input_tokens - hit_tokens)
        wait_ms = max(0.0, busy_until_ms[least] - request.arrival_ms)
        busy_until_ms[least] = request.arrival_ms + wait_ms + prefill_ms
        outcome.ttft_ms.append(wait_ms + prefill_ms)
        outcome.queue_ms += wait_ms
        outcome.work_ms[names[least]] += prefill_ms
        outcome.input_tokens += request.input_tokens
        outcome.hit_tokens += hit_tokens
        outcome.hit_requests += hit_tokens > 0
    return outcome
