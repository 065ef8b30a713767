"""How much the administrators of one tenant may change, and who is never held off by it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from admin_port import code_of
from tenant_port import TenantPort, serving_tenants

from trunkline.administration_pace import KEY_CHANGES, RAISES


@pytest.fixture
def port(tmp_path: Path) -> Iterator[TenantPort]:
    with serving_tenants(tmp_path) as served:
        yield served


def test_a_tenants_administrators_raise_so_many_epochs_and_then_wait(port: TenantPort) -> None:
    admins = [port.client(port.key("acme", "tenant.admin")) for _ in range(2)]
    other = port.client(port.key("globex", "tenant.admin"))
    officer = port.client(port.key("acme", "security.officer"))
    burst = int(RAISES.requests_burst)
    port.clock.stop()
    answers = [
        admins[number % 2].post("/invalidate", json={"subject": f"user/acme/ghost{number}"})
        for number in range(2 * burst)
    ]
    codes = [answer.status_code for answer in answers]
    assert codes == [200] * burst + [429] * burst
    assert len(port.registry.table.epochs) == burst
    late = answers[-1]
    assert (code_of(late), late.headers["retry-after"]) == ((429, "busy"), "1")
    assert other.post("/invalidate", json={"subject": "tenant/globex"}).status_code == 200
    for number in range(2 * burst):
        subject = f"user/acme/real{number}"
        assert officer.post("/invalidate", json={"subject": subject}).status_code == 200


def test_a_tenants_administrators_change_so_many_keys_and_then_wait(port: TenantPort) -> None:
    admin = port.client(port.key("acme", "tenant.admin"))
    burst = int(KEY_CHANGES.requests_burst)
    port.clock.stop()
    codes = [admin.post("/keys", json={"tenant": "acme"}).status_code for _ in range(2 * burst)]
    assert codes == [201] * burst + [429] * burst
    assert port.operator.post("/keys", json={"tenant": "acme"}).status_code == 201


def test_what_is_not_theirs_costs_a_tenants_administrators_nothing(port: TenantPort) -> None:
    admin = port.client(port.key("acme", "tenant.admin"))
    port.key("globex")
    for number in range(2 * int(RAISES.requests_burst)):
        name = "globex" if number % 2 else "made-up"
        answer = admin.post("/invalidate", json={"subject": f"tenant/{name}"})
        assert answer.status_code == 404
    assert admin.post("/invalidate", json={"subject": "tenant/acme"}).status_code == 200
