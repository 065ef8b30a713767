"""How far routing and free movement of KV could go: one cache of the fleet's whole size, shared by
all.

The least queued worker serves each request and finds whatever the one cache holds. No router can do
better on hits or on queues at once; reports print the limit beside each result (docs/routing.md).
`limit` lets a block be found as soon as its prompt is placed, `computed_limit` once it is computed.
"""

from __future__ import annotations

import math
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


def computed_limit(workload: Workload, requests: Sequence[TraceRequest]) -> Outcome:
    """The same, but nothing is found before it was computed somewhere: block by block, and at that
    moment everywhere. Who needs a block that somebody is computing waits where it would be no
    faster itself. Caches are endless.
    """
    outcome = Outcome()
    computed_ms: dict[int, float] = {}
    block_ms = workload.prefill_token_ms * workload.block_tokens
    names = [WorkerId(f"w{index}") for index in range(workload.workers)]
    busy_until_ms = [0.0] * workload.workers
    outcome.work_ms = dict.fromkeys(names, 0.0)
    for request in requests:
        ids = (request.block_ids or ())[: request.full_blocks]
        most = (request.input_tokens - 1) // workload.block_tokens
        least = min(range(workload.workers), key=busy_until_ms.__getitem__)
        began_ms = max(busy_until_ms[least], request.arrival_ms)
        now_ms, hit_tokens = began_ms + workload.prefill_fixed_ms, 0
        for index, block_id in enumerate(ids):
            due_ms = computed_ms.get(block_id, math.inf)
            if index < most and due_ms <= now_ms + block_ms:
                now_ms = max(now_ms, due_ms)
                hit_tokens += workload.block_tokens
            else:
                now_ms += block_ms
                computed_ms[block_id] = min(due_ms, now_ms)
        rest_tokens = request.input_tokens - len(ids) * workload.block_tokens
        now_ms += workload.prefill_token_ms * rest_tokens
        busy_until_ms[least] = now_ms
        outcome.ttft_ms.append(now_ms - request.arrival_ms)
        outcome.queue_ms += began_ms - request.arrival_ms
        outcome.work_ms[names[least]] += now_ms - began_ms
        outcome.input_tokens += request.input_tokens
        outcome.hit_tokens += hit_tokens
        outcome.hit_requests += hit_tokens > 0
    return outcome
