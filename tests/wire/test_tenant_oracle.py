"""No oracle at the admin port: what is foreign and what is made up cannot be told apart.

Same status, same bytes, same time, for whoever has a right but not to this thing.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest
from tenant_port import TenantPort, serving_tenants

TIMED_PER_ARM = 5_000


class Names:
    """Foreign and made-up ids and names, and how each is asked for."""

    def __init__(self, port: TenantPort) -> None:
        self.foreign_keys = [port.key(f"t{n}").split("_")[1] for n in range(20)]
        book = port.registry.book
        self.foreign_tenants = [f"t{n}" for n in range(20)]
        self.foreign_tenants += [book.names[f"tenant/{name}"] for name in self.foreign_tenants]
        self.draw = random.Random(3)

    def made_up(self, name: str) -> str:
        """Of the same shape, and nobody's."""
        if name[0] == "t":
            return f"u{self.draw.randrange(100)}"
        return self.draw.randbytes(len(name) // 2).hex()


def test_foreign_and_made_up_names_get_the_same_bytes(tmp_path: Path) -> None:
    with serving_tenants(tmp_path) as port:
        names = Names(port)
        asking = port.client(port.key("mine", "tenant.admin", "org.admin"))
        answers: set[tuple[int, bytes, str]] = set()
        counts = 0
        for name in names.foreign_tenants:
            for asked in (name, names.made_up(name)):
                bodies = [
                    ("/revoke", {"subject": f"tenant/{asked}", "reason": "r"}),
                    ("/invalidate", {"subject": f"tenant/{asked}"}),
                    ("/invalidate", {"subject": f"user/{asked}/alice"}),
                    ("/invalidate", {"subject": f"org/{asked}"}),
                    ("/invalidate", {"subject": f"public/{asked}"}),
                ]
                found = [asking.post(path, json=body) for path, body in bodies]
                found.append(asking.get("/keys", params={"tenant": asked}))
                found.append(asking.get("/tenants", params={"after": asked}))
                if asked.startswith(("t", "u")):
                    found.append(asking.post("/keys", json={"tenant": asked}))
                answers |= {(a.status_code, a.content, str(sorted(a.headers))) for a in found}
                counts += len(found)
        for key_id in names.foreign_keys:
            for asked in (key_id, names.made_up(key_id)):
                found = [asking.delete(f"/keys/{asked}"), asking.get(f"/keys?after={asked}")]
                answers |= {(a.status_code, a.content, str(sorted(a.headers))) for a in found}
        assert counts > 500
        assert {status for status, _, _ in answers} == {404}
        assert len(answers) == 1


Ask = Callable[[httpx.AsyncClient, str], Awaitable[httpx.Response]]
ASKS: dict[str, Ask] = {
    "keys.revoke": lambda client, name: client.delete(f"/keys/{name}"),
    "invalidate": lambda client, name: client.post(
        "/invalidate", json={"subject": f"tenant/{name}"}
    ),
}


@pytest.mark.nightly
@pytest.mark.parametrize("act", ASKS)
def test_foreign_and_made_up_names_take_the_same_time(act: str, tmp_path: Path) -> None:
    """AUC over the handler's own time, both arms mixed; 0.52 is the bar, 0.511 its noise."""
    with serving_tenants(tmp_path) as port:
        names = Names(port)
        ask = _in_the_loop(port, port.key("mine", "tenant.admin"), ASKS[act])
        # As many made-up ids as foreign ones, each asked again and again: all that differs is ours.
        foreign = names.foreign_keys if act == "keys.revoke" else names.foreign_tenants[20:]
        made_up = [names.made_up("0" * len(name)) for name in foreign]
        order = [(arm, n % len(foreign)) for n in range(TIMED_PER_ARM) for arm in (True, False)]
        names.draw.shuffle(order)
        times: dict[bool, list[float]] = {True: [], False: []}
        for is_foreign, index in order:
            times[is_foreign].append(ask((foreign if is_foreign else made_up)[index]))
        auc = _auc(times[True], times[False])
        assert abs(auc - 0.5) <= 0.02, auc


def _in_the_loop(port: TenantPort, text: str, asked: Ask) -> Callable[[str], float]:
    """Asks the application itself, on its own loop: no socket's noise hides a difference."""
    transport = httpx.ASGITransport(app=port.app)
    client = httpx.AsyncClient(
        transport=transport, base_url=port.url, headers={"authorization": f"Bearer {text}"}
    )

    async def timed(name: str) -> float:
        began_ns = time.perf_counter_ns()
        answer = await asked(client, name)
        took_ns = time.perf_counter_ns() - began_ns
        assert answer.status_code == 404
        return float(took_ns)

    def ask(name: str) -> float:
        return asyncio.run_coroutine_threadsafe(timed(name), port.loop).result(10)

    return ask


def _auc(first: list[float], second: list[float]) -> float:
    """How often a draw of the first is above one of the second, ties counted half."""
    ranked = sorted([(t, True) for t in first] + [(t, False) for t in second])
    rank_sum, index = 0.0, 0
    while index < len(ranked):
        end = index
        while end < len(ranked) and ranked[end][0] == ranked[index][0]:
            end += 1
        rank = (index + end + 1) / 2
        rank_sum += rank * sum(is_first for _, is_first in ranked[index:end])
        index = end
    count = len(first)
    return (rank_sum - count * (count + 1) / 2) / (count * len(second))
