"""Tickets are read strictly: what is not exactly right is refused with a sentence."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trunkline.kv.tickets import MAX_EPOCH, MAX_QUOTA_BYTES, MAX_REV, MAX_TICKET_BYTES, Ticket
from trunkline.worker.requests import BadRequest
from trunkline.worker.ticket import HEADER, ticket_from

GOOD: dict[str, Any] = {
    "ns": "00112233445566778899aabbccddeeff",
    "epochs": [1, 0, 3, 0, 0, 0, 2, 0],
    "rev": 7,
    "tenant": "ffeeddccbbaa99887766554433221100",
    "subjects": ["fleet", "org/o", "tenant/t", "model/m"],
}


def _read(**changes: Any) -> Ticket | None:
    body = {name: value for name, value in (GOOD | changes).items() if value is not ...}
    return ticket_from([(HEADER, json.dumps(body).encode())])


def test_a_good_ticket_pairs_each_subject_with_its_epoch() -> None:
    read = _read(floor=1_024, cap=4_096)
    assert read is not None
    assert dict(zip(read.subjects, read.epochs, strict=True)) == {
        "fleet": 1,
        "org/o": 0,
        "tenant/t": 3,
        "model/m": 2,
    }
    assert (read.ns.hex(), read.tenant, read.rev) == (GOOD["ns"], GOOD["tenant"], 7)
    assert (read.floor_bytes, read.cap_bytes) == (1_024, 4_096)


def test_the_order_of_the_subjects_does_not_matter() -> None:
    read = _read(subjects=["model/m", "tenant/t", "fleet"])
    assert read is not None
    assert dict(zip(read.subjects, read.epochs, strict=True))["tenant/t"] == 3


def test_no_header_is_no_ticket() -> None:
    assert ticket_from([(b"content-type", b"application/json")]) is None


def test_scope_none_has_an_empty_tag() -> None:
    read = _read(ns="", subjects=[], epochs=[0] * 8)
    assert read is not None
    assert read.ns == b""


def test_figures_at_their_bounds_are_taken() -> None:
    epochs = [MAX_EPOCH, 0, 0, 0, 0, 0, 0, 0]
    quota = {"floor": MAX_QUOTA_BYTES, "cap": MAX_QUOTA_BYTES}
    assert _read(tenant="x" * 64) is not None
    assert _read(rev=MAX_REV, epochs=epochs, regions=["0" * 32] * 8, **quota) is not None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ns": "00"}, "ns must be 32 hex digits"),
        ({"ns": "00112233445566778899AABBCCDDEEFF"}, "lower case"),
        ({"ns": "0x112233445566778899aabbccddeeff"}, "ns must be 32 hex digits"),
        ({"ns": ...}, "ns"),
        ({"ns": None}, "ns"),
        ({"tenant": "a/b"}, "tenant must be 1 to 64"),
        ({"tenant": "x" * 65}, "tenant must be 1 to 64"),
        ({"tenant": "a\n"}, "tenant must be 1 to 64"),
        ({"tenant": ""}, "tenant must be 1 to 64"),
        ({"epochs": [0] * 7}, "epochs has 7 numbers"),
        ({"epochs": [0] * 9}, "epochs has 9 numbers"),
        ({"epochs": [-1, *[0] * 7]}, "epochs is -1"),
        ({"epochs": [2**64, *[0] * 7]}, "epochs"),
        ({"epochs": ["1", *[0] * 7]}, "epochs"),
        ({"epochs": [1.5, *[0] * 7]}, "epochs"),
        ({"epochs": [0, 0, 0, 4, 0, 0, 0, 0]}, "the user has the epoch 4"),
        ({"rev": -1}, "rev is -1"),
        ({"rev": MAX_REV + 1}, "rev is"),
        ({"rev": True}, "rev"),
        ({"rev": "7"}, "rev"),
        ({"subjects": ["org/o", "tenant/t", "model/m"], "epochs": [0] * 8}, "lacks the fleet"),
        ({"subjects": ["fleet", "tenant/t", "tenant/u"]}, "two of the kind tenant"),
        ({"subjects": ["fleet", "fleet"]}, "two of the kind fleet"),
        ({"subjects": ["fleet", "team/t"]}, "team"),
        ({"subjects": ["fleet", "tenant/"]}, "tenant"),
        ({"subjects": ["fleet", "tenant"]}, "tenant"),
        ({"subjects": ["fleet/"]}, "fleet"),
        ({"subjects": ["fleet", "tenant/a\nb"]}, "tenant"),
        ({"subjects": ["fleet", "tenant/" + "x" * 600]}, "tenant"),
        ({"floor": -1}, "floor is -1"),
        ({"floor": MAX_QUOTA_BYTES + 1}, "floor is"),
        ({"cap": MAX_QUOTA_BYTES + 1}, "cap is"),
        ({"floor": 10, "cap": 9}, "cap is 9, below the floor of 10"),
        ({"regions": ["0" * 32] * 9}, "regions has 9 tags"),
        ({"regions": ["xy"]}, "regions must be 32 hex digits"),
        ({"more": 1}, "more"),
    ],
)
def test_what_is_not_right_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRequest, match=said) as refused:
        _read(**changes)
    assert refused.value.status == 400
    assert refused.value.param == HEADER.decode()


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 5_000, b"{} {}"])
def test_what_is_no_ticket_at_all_is_refused(raw: bytes) -> None:
    with pytest.raises(BadRequest):
        ticket_from([(HEADER, raw)])


def test_two_tickets_are_refused() -> None:
    good = (HEADER, json.dumps(GOOD).encode())
    with pytest.raises(BadRequest, match="there are two"):
        ticket_from([good, good])


def test_a_ticket_beyond_the_bound_is_refused_and_one_at_it_is_read() -> None:
    raw = json.dumps(GOOD).encode()
    at = raw + b" " * (MAX_TICKET_BYTES - len(raw))
    assert ticket_from([(HEADER, at)]) is not None
    with pytest.raises(BadRequest, match="at most 16384"):
        ticket_from([(HEADER, at + b" ")])
