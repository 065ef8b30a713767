"""The pace of tenants' administrators: whose it is, and how many are kept in mind."""

from __future__ import annotations

import pytest

from hand_clock import HandClock
from trunkline.administration_pace import MAX_PACED, RAISES, TenantPace
from trunkline.core.principals import Principal
from trunkline.errors import Busy
from trunkline.gateway.backend import Call, Caller
from trunkline.gateway.permissions import Act, Extent


def call(tenant: str, extent: Extent = Extent.TENANT, *, key: str = "k", org: str = "o") -> Call:
    who = Principal(org=org, tenant=tenant, actor=key, auth_method="key")
    caller = Caller(principal=who, source="here")
    return Call(caller=caller, act=Act.INVALIDATE, extent=extent)


def test_all_keys_of_a_tenant_have_one_pace_and_all_tenants_of_an_organisations_admin() -> None:
    pace = TenantPace(RAISES, clock := HandClock())
    for number in range(int(RAISES.requests_burst)):
        pace.charge(call("t", key=f"k{number}"))
        pace.charge(call(f"t{number}", Extent.ORG))
    for late in (call("t"), call("any", Extent.ORG)):
        with pytest.raises(Busy) as caught:
            pace.charge(late)
        assert caught.value.retry_after_s == 1
    pace.charge(call("t2"))
    pace.charge(call("t", Extent.FLEET))
    clock.ms += 1_000
    pace.charge(call("t"))


def test_so_many_tenants_have_a_pace_and_the_longest_unused_is_forgotten() -> None:
    pace = TenantPace(RAISES, HandClock())
    for number in range(MAX_PACED + 10):
        pace.charge(call(f"t{number}"))
    assert len(pace) == MAX_PACED
