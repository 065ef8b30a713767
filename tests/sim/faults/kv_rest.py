"""What must not be left of pulls at rest (I9): by the product's own books, and by what the world
sees of threads and connections.

Read `checks.py` for who asks.
"""

from __future__ import annotations

from collections import Counter

from faults.crew import Life
from faults.kv_plane import Plane

OWN_THREADS = Counter({"kv-accept": 1, "kv-keeper": 1})
"""Of a worker to which nobody is connected."""


def left_of_pulls(life: Life, plane: Plane) -> dict[str, int]:
    storage = life.built.storage
    assert storage is not None
    exchange = storage.exchange
    assert exchange is not None
    pulls, puller, lent = exchange.pulls, exchange.pulls._puller.figures, exchange.lent
    server, store = exchange.server.figures, storage.tier.store.figures()
    kinds = (store.host_bytes, store.hidden_bytes, store.writing_bytes, store.leaving_bytes)
    more = (store.moving_bytes, store.staged_bytes, store.quarantined_bytes, store.dirty_bytes)
    threads = Counter(plane.threads.alive(life.machine))
    wanted = OWN_THREADS + Counter({"kv-pull": server.connections})
    open_ends = server.connections + puller_connections(life)
    return {
        "pulls": pulls.open_count,
        "blocks that are coming": len(pulls._coming),
        "pulls of the client": puller.open_pulls,
        "pulls beyond their deadline": puller.overdue_pulls,
        "pulls of the server": server.open_pulls,
        "prompts that others wait for": len(lent.coming),
        "waits for prompts": lent.coming.wait_count,
        "pins of host memory": store.pins,
        "pins whose time ran out": 0 if life.machine.was_stopped else store.expired_pins,
        "staged bytes": store.staged_bytes,
        "quarantined bytes": store.quarantined_bytes,
        "bytes that are condemned or moving": sum(kinds[1:]) + store.moving_bytes,
        "bytes of nobody": store.total_bytes - store.free_bytes - sum(kinds) - sum(more),
        "notes of blocks that may come": sum(
            note.awaited for note in storage.tier._notices._notes.values()
        ),
        "threads": (threads - wanted).total(),
        "threads that ended": (wanted - threads).total(),
        "open sockets": plane.sockets.open_at(life.machine) - open_ends,
    }


def puller_connections(life: Life) -> int:
    """Those that it keeps warm."""
    assert life.built.storage is not None
    assert life.built.storage.exchange is not None
    return life.built.storage.exchange.pulls._puller.peers.idle_count
