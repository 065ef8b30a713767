"""The audit log as data: every tampering at every position of a long log is found, and where."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from trunkline.adapters.signing import Ed25519Signer
from trunkline.core.audit import (
    MAX_FIELD_CHARS,
    MAX_LINE_BYTES,
    AuditEvent,
    Checkpoint,
    Fault,
    Head,
    Kind,
    Stamp,
    Verification,
    follow,
    pseudonym,
    read_checkpoint,
    read_head,
    read_previous,
    read_record,
    seal,
    verify,
)

LENGTH = 10_000
EVERY = 1_000
SIGNER = Ed25519Signer(bytes(range(32)))
STAMP = Stamp(wall_ms=1, boot_ms=2, boot_id="b", host="h")
Tamper = Callable[[list[bytes], int], list[bytes]]


def an_event(number: int = 0) -> AuditEvent:
    return AuditEvent(kind=Kind.LOGIN, action="login", actor=f"key{number}", counts={"n": number})


def signed(head: Head) -> Checkpoint:
    bare = Checkpoint(head=head, wall_ms=1, rev=3, key_id=SIGNER.key_id)
    return Checkpoint(
        head=head, wall_ms=1, rev=3, key_id=SIGNER.key_id, signature=SIGNER.sign(bare.message())
    )


@cache
def a_log(length: int = LENGTH) -> tuple[list[bytes], list[Head], list[Checkpoint]]:
    """Lines, the head after each (and before the first), and the checkpoints that were copied."""
    lines: list[bytes] = []
    heads = [Head()]
    copies: list[Checkpoint] = []
    for number in range(1, length + 1):
        event = an_event(number)
        is_checkpoint = number % EVERY == 0
        if is_checkpoint:
            proof = signed(heads[-1]).proof()
            event = AuditEvent(kind=Kind.CHECKPOINT, action="audit.checkpoint", proof=proof)
        line, head = seal(event, heads[-1], STAMP)
        lines.append(line)
        heads.append(head)
        if is_checkpoint:
            copies.append(signed(head))
    return lines, heads, copies


def checked(lines: list[bytes], start: Head | None = None) -> Verification:
    return verify(lines, checkpoints=a_log()[2], is_signed=SIGNER.is_signed, start=start)


def flip(lines: list[bytes], at: int) -> list[bytes]:
    line = bytearray(lines[at])
    line[(at * 7_919) % len(line)] ^= 1 << (at % 8)
    return [*lines[:at], bytes(line), *lines[at + 1 :]]


def drop(lines: list[bytes], at: int) -> list[bytes]:
    return [*lines[:at], *lines[at + 1 :]]


def swap(lines: list[bytes], at: int) -> list[bytes]:
    other = at + 1 if at + 1 < len(lines) else at - 1
    first, second = sorted((at, other))
    return [*lines[:first], lines[second], lines[first], *lines[second + 1 :]]


def insert(lines: list[bytes], at: int) -> list[bytes]:
    """A record that fits what is before it: forged by one who knows the format."""
    forged, _ = seal(an_event(-1), a_log()[1][at], STAMP)
    return [*lines[:at], forged, *lines[at:]]


def truncate(lines: list[bytes], at: int) -> list[bytes]:
    return lines[:at]


def elsewhere(at: int) -> bytes:
    """A record that was written, at another place."""
    return a_log()[0][(at + LENGTH // 2 + 3) % LENGTH]


def replay(lines: list[bytes], at: int) -> list[bytes]:
    return [*lines[:at], elsewhere(at), *lines[at:]]


POSITION_OF: dict[Tamper, Callable[[int], int]] = {
    flip: lambda at: at + 1,
    drop: lambda at: at + 1,
    swap: lambda at: min(at, LENGTH - 2) + 1,
    # What was there before no longer follows; where a checkpoint was copied, that speaks first.
    insert: lambda at: at + 1 if (at + 1) % EVERY == 0 else at + 2,
    truncate: lambda at: at + 1,
    replay: lambda at: at + 1,
}


@pytest.mark.parametrize("tampered_with", POSITION_OF, ids=lambda tamper: tamper.__name__)
def test_a_tampering_anywhere_in_a_file_of_10000_is_found_with_its_position(
    tampered_with: Tamper,
) -> None:
    lines, _, _ = a_log()
    for at in [0, 1, 998, 999, 1_000, 5_555, LENGTH - 2, LENGTH - 1]:
        fault = checked(tampered_with(lines, at)).fault
        assert fault is not None, at
        assert fault.seq == POSITION_OF[tampered_with](at), (at, fault)


@pytest.mark.parametrize("tampered_with", POSITION_OF, ids=lambda tamper: tamper.__name__)
def test_a_tampering_at_every_single_position_is_found_with_its_position(
    tampered_with: Tamper,
) -> None:
    """Verification is a walk with one head for all its state, so it may begin at the head before
    the tampering; it ends at the first fault, three lines further at most (or at the end).
    """
    lines, heads, copies = a_log()
    for at in range(LENGTH):
        begin = max(0, at - 1)
        window = _window(tampered_with, at, begin)
        near = [copies[at // EVERY]]  # the next one, as a truncated log is held against it
        report = verify(window, checkpoints=near, start=heads[begin])
        fault = report.fault
        assert fault is not None, at
        assert fault.seq == POSITION_OF[tampered_with](at), (at, fault)
    assert len(lines) == LENGTH


def _window(tampered_with: Tamper, at: int, begin: int) -> list[bytes]:
    """The lines from `begin` to a little behind the tampering."""
    lines, heads, _ = a_log()
    near = lines[begin : at + 3]
    place = at - begin
    if tampered_with is insert:
        forged, _ = seal(an_event(-1), heads[at], STAMP)
        return [*near[:place], forged, *near[place:]]
    if tampered_with is replay:
        return [*near[:place], elsewhere(at), *near[place:]]
    if tampered_with is flip:
        return [*near[:place], flip([*lines[at : at + 1]], 0)[0], *near[place + 1 :]]
    return tampered_with(near, place)


def test_every_bit_of_a_line_counts() -> None:
    lines, heads, _ = a_log()
    line = lines[41]
    for bit in range(8 * len(line)):
        flipped = bytearray(line)
        flipped[bit // 8] ^= 1 << (bit % 8)
        assert isinstance(follow(heads[41], bytes(flipped)), Fault), bit


def test_an_untouched_log_passes_against_all_its_checkpoints() -> None:
    report = checked(a_log()[0])
    assert report.fault is None
    assert (report.head, report.checkpoints) == (a_log()[1][-1], 20)


def test_verification_may_begin_at_any_checkpoint() -> None:
    lines, heads, copies = a_log()
    for copy in copies:
        assert checked(lines[copy.head.seq :], start=copy.head).fault is None
        wrong = Head(seq=copy.head.seq, hash=heads[copy.head.seq - 1].hash)
        if copy.head.seq < LENGTH:
            fault = checked(lines[copy.head.seq :], start=wrong).fault
            assert fault is not None
            assert fault.seq == copy.head.seq + 1


def test_a_log_whose_old_segments_are_gone_begins_behind_a_checkpoint_and_nowhere_else() -> None:
    lines, _, _ = a_log()
    assert checked(lines[3 * EVERY :]).fault is None
    for begin in (1, 3 * EVERY - 1, 3 * EVERY + 1):
        fault = checked(lines[begin:]).fault
        assert fault is not None
        assert fault.seq == 1, "what is missing is missing from the beginning"


def test_a_log_that_was_written_anew_from_a_position_on_fails_at_the_next_checkpoint() -> None:
    lines, heads, _ = a_log()
    for at in (0, 998, 999, 4_321):
        forged = lines[:at]
        head = heads[at]
        while len(forged) < LENGTH:
            line, head = seal(an_event(7), head, STAMP)
            forged.append(line)
        fault = checked(forged).fault
        assert fault is not None
        assert fault.seq == (at // EVERY + 1) * EVERY


def test_a_checkpoint_that_was_signed_by_another_is_found() -> None:
    lines, heads, copies = a_log()
    other = Ed25519Signer(bytes(32))
    message = copies[0].message()
    forged = Checkpoint(
        head=copies[0].head, wall_ms=1, rev=3, key_id="x", signature=other.sign(message)
    )
    report = verify(lines[:1_500], checkpoints=[forged], is_signed=SIGNER.is_signed)
    assert report.fault == Fault(seq=1_000, reason="a kept checkpoint is forged")
    event = AuditEvent(kind=Kind.CHECKPOINT, action="audit.checkpoint", proof=forged.proof())
    line, _ = seal(event, heads[1_500], STAMP)
    inside = verify([*lines[:1_500], line], is_signed=SIGNER.is_signed).fault
    assert inside == Fault(seq=1_501, reason="the checkpoint in the log is forged")


@pytest.mark.parametrize("is_true_one_first", [True, False])
def test_two_signed_checkpoints_of_one_record_with_other_hashes_are_a_fault_in_any_order(
    is_true_one_first: bool,
) -> None:
    lines, heads, copies = a_log()
    twins = [copies[0], signed(Head(seq=copies[0].head.seq, hash=bytes(32)))]
    kept = [*(twins if is_true_one_first else reversed(twins)), copies[1]]
    fault = verify(lines, checkpoints=kept, is_signed=SIGNER.is_signed).fault
    assert fault is not None
    assert (fault.seq, "two kept checkpoints" in fault.reason) == (EVERY, True)
    beyond = verify((), checkpoints=kept, is_signed=SIGNER.is_signed, start=heads[10]).fault
    assert beyond == fault, "also where the log does not reach it"


def test_an_end_before_the_newest_checkpoints_is_told_from_a_fault_within() -> None:
    lines, _, copies = a_log()
    short = verify(lines[:1_500], checkpoints=copies[:3], is_signed=SIGNER.is_signed)
    assert (short.head.seq, short.newer) == (1_500, 2)
    assert short.fault == Fault(
        seq=1_501, reason="the log ends here; a checkpoint says that it reached 3000"
    )
    spoilt = [*lines[:700], b"{}", *lines[701:1_500]]
    assert verify(spoilt, checkpoints=copies[:3], is_signed=SIGNER.is_signed).newer == 0


def test_a_wrong_key_is_told_from_a_forged_signature() -> None:
    lines, _, copies = a_log()
    other = Ed25519Signer(bytes(32))
    wanted = f"signed by another key ({SIGNER.key_id[:4]}...) than given ({other.key_id[:4]}...)"
    for kept, what in (([], "the checkpoint in the log"), (copies[:1], "a kept checkpoint")):
        upto = lines[: EVERY - 1] if kept else lines
        fault = verify(upto, checkpoints=kept, is_signed=other.is_signed, key_id=other.key_id).fault
        assert fault == Fault(seq=EVERY, reason=f"{what} is {wanted}")


def test_words_that_look_like_a_checkpoint_are_words() -> None:
    event = AuditEvent(kind=Kind.LOGIN, action="x", reason='"kind":"CHECKPOINT"')
    line, _ = seal(event, Head(), STAMP)
    assert verify([line], is_signed=SIGNER.is_signed).fault is None


@pytest.mark.parametrize("line", [b"", b"{}", b"[]", b"\xff" * 80, b"x" * (MAX_LINE_BYTES + 1)])
def test_what_is_no_record_is_a_fault_at_its_position(line: bytes) -> None:
    lines, _, _ = a_log()
    fault = verify([*lines[:5], line]).fault
    assert fault == Fault(seq=6, reason="the line is no record")
    with pytest.raises(ValueError):
        read_head(line)


def test_a_line_tells_its_place_and_the_one_before() -> None:
    lines, heads, _ = a_log()
    assert read_head(lines[9]) == heads[10]
    assert read_previous(lines[9]) == heads[9]
    assert read_record(lines[9])["actor"] == "key10"


def test_a_checkpoint_comes_back_from_its_line() -> None:
    copy = a_log()[2][0]
    assert read_checkpoint(copy.proof()) == copy
    for broken in ({}, {**copy.proof(), "seq": "-1"}, {**copy.proof(), "hash": "00"}, [], 3):
        with pytest.raises(ValueError):
            read_checkpoint(broken)


def test_what_is_signed_covers_each_part_of_a_checkpoint() -> None:
    copy = a_log()[2][0]
    others = [
        Checkpoint(head=a_log()[1][7], wall_ms=1, rev=3),
        Checkpoint(head=copy.head, wall_ms=2, rev=3),
        Checkpoint(head=copy.head, wall_ms=1, rev=4),
    ]
    assert SIGNER.is_signed(copy.message(), copy.signature)
    assert not any(SIGNER.is_signed(other.message(), copy.signature) for other in others)


def test_long_words_are_cut_and_odd_ones_stay_on_their_line() -> None:
    event = AuditEvent(kind=Kind.LOGIN, action="x", actor="a\nb\r\u2028", reason="é" * 10_000)
    line, head = seal(event, Head(), STAMP)
    assert b"\n" not in line
    assert b"\r" not in line
    assert len(line) <= MAX_LINE_BYTES
    assert follow(Head(), line) == head
    assert read_record(line)["reason"] == "é" * MAX_FIELD_CHARS


def test_a_record_that_is_too_long_all_the_same_is_refused() -> None:
    event = AuditEvent(kind=Kind.LOGIN, action="x", proof={"long": "y" * MAX_LINE_BYTES})
    with pytest.raises(ValueError, match="at most"):
        seal(event, Head(), STAMP)


@pytest.mark.parametrize(
    "words",
    [
        {"action": ""},
        {"scope_path_hmac": "tenant/acme"},
        {"ns_tag": "xyz"},
        {"counts": {"Tenant acme": 1}},
        {"counts": {f"n{number}": 1 for number in range(33)}},
    ],
)
def test_a_record_out_of_shape_is_refused(words: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        AuditEvent(**{"kind": Kind.LOGIN, "action": "x", **words})  # type: ignore[arg-type]


def test_a_pseudonym_depends_on_key_and_id_and_shows_neither() -> None:
    first = pseudonym(bytes(32), "tenant/acme")
    assert first == pseudonym(bytes(32), "tenant/acme")
    assert len({first, pseudonym(bytes(31) + b"x", "tenant/acme"), pseudonym(bytes(32), "t")}) == 3
    assert len(first) == 32


def test_a_record_that_hashes_well_but_claims_another_position_is_found() -> None:
    lines, heads, _ = a_log()
    misplaced, _ = seal(an_event(1), Head(seq=7, hash=heads[5].hash), STAMP)
    fault = verify([*lines[:5], misplaced]).fault
    assert fault == Fault(seq=6, reason="the line does not belong at this position")


def test_an_old_signature_under_a_new_record_is_found() -> None:
    lines, heads, _ = a_log()
    proof = signed(heads[100]).proof()
    event = AuditEvent(kind=Kind.CHECKPOINT, action="audit.checkpoint", proof=proof)
    line, _ = seal(event, heads[200], STAMP)
    fault = verify([*lines[:200], line], is_signed=SIGNER.is_signed).fault
    assert fault == Fault(seq=201, reason="the checkpoint in the log is forged")
