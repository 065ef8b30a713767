"""Addresses of a registry that are none, as the doctor speaks of them."""

from __future__ import annotations

import pytest

from trunkline.doctor_here import nats_ailments


@pytest.mark.parametrize(
    "server",
    [
        "nats://gateway:marked/secret@n1:4222",  # the slash ends the host
        "nats://gateway:marked@n1:99999",
        "nats://[::1",
        "http://n1:4222",
        "n1:4222",
        "nats://",
    ],
)
def test_an_address_of_nats_that_is_none_is_found_and_no_password_told(server: str) -> None:
    (found,) = nats_ailments(server)
    assert (found.what, found.subject) == ("registry", "control.control")
    assert "marked" not in repr(found)
