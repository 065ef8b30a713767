"""The audit log as data: canonical records, the hash chain, checkpoints, and verification.

A line is the canonical record with its own hash in front. The hash covers the exact bytes of the
line behind it and the hash before, so that any change, gap, or swap breaks the chain at its place.
A chain alone does not show a cut tail or a rewritten whole: signed checkpoints, kept in a second
place, do. Must never: hold token ids, text, or a digest of a prompt; ids of tenants appear under an
audit key alone. Read `control/audit.py` for who writes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

HASH_BYTES = 32
MAX_LINE_BYTES = 8_192
MAX_FIELD_CHARS = 512
"""Longer words of an actor, a source or a reason are cut."""
MAX_COUNTS = 32

_OPEN = b'{"hash":"'
_HASH_END = len(_OPEN) + 2 * HASH_BYTES
_BODY = _HASH_END + len(b'",')
_CHECKPOINT_TAG = b"trunkline-audit-checkpoint-v1"
_COUNT_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
_HEX = re.compile(r"(?:[0-9a-f]{2}){0,64}")


class Kind(Enum):
    """What a record tells."""

    INTENT = "INTENT"
    OUTCOME = "OUTCOME"
    ERASED = "ERASED"
    REFUSED = "REFUSED"
    LOGIN = "LOGIN"
    KEY = "KEY"
    PUBLIC_REG = "PUBLIC_REG"
    POLICY = "POLICY"
    LEASE_LOST = "LEASE_LOST"
    CHECKPOINT = "CHECKPOINT"
    TOMBSTONE = "TOMBSTONE"
    """Old segments were removed; `proof` says which and how they ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Where a chain ends: its last position, from 1, and the hash there."""

    seq: int = 0
    hash: bytes = bytes(HASH_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """When and where. Wall time is for people; order is by `seq` alone."""

    wall_ms: int
    boot_ms: int
    boot_id: str
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEvent:
    """What happened, before it has a place in the log. Raises ValueError out of shape."""

    kind: Kind
    action: str
    actor: str = ""
    """Key id or `sub`, never a secret."""
    auth_method: str = ""
    source: str = ""
    request_id: str = ""
    scope_path_hmac: str = ""
    """The subject under the audit key, in hex."""
    ns_tag: str = ""
    rev: int = 0
    """The registry's revision that this is about; 0 for none (yet)."""
    epoch_from: int = 0
    epoch_to: int = 0
    result: str = ""
    reason: str = ""
    counts: Mapping[str, int] = field(default_factory=dict[str, int])
    proof: Mapping[str, str] = field(default_factory=dict[str, str])
    """Of a CHECKPOINT its signature, of a TOMBSTONE what it stands for."""

    def __post_init__(self) -> None:
        if not self.action:
            raise ValueError("an audit record without an action")
        for name in ("scope_path_hmac", "ns_tag"):
            if not _HEX.fullmatch(getattr(self, name)):
                raise ValueError(f"{name} of an audit record is not short hex")
        is_sound = all(_COUNT_NAME.fullmatch(name) for name in (*self.counts, *self.proof))
        if not is_sound or len(self.counts) > MAX_COUNTS or len(self.proof) > MAX_COUNTS:
            raise ValueError("the counts of an audit record are too many or ill-named")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """The first position at which a log is not what was written, and what is wrong there."""

    seq: int
    reason: str


def pseudonym(audit_key: bytes, subject: str) -> str:
    """An id under the audit key, 128 bits in hex: the same for the same, and no way back."""
    return hashlib.blake2b(
        subject.encode(), digest_size=16, key=audit_key, person=b"audit-id"
    ).hexdigest()


def chain_hash(previous: bytes, canonical: bytes) -> bytes:
    """Keyless, so that anyone can verify."""
    return hashlib.blake2b(previous + canonical, digest_size=HASH_BYTES, person=b"audit").digest()


def seal(event: AuditEvent, head: Head, stamp: Stamp) -> tuple[bytes, Head]:
    """The line of an event behind `head`, and where the chain then ends.

    Raises ValueError for one that is too long even with its words cut.
    """
    record: dict[str, object] = {
        "prev_hash": head.hash.hex(),
        "seq": head.seq + 1,
        "kind": event.kind.value,
        "ts_wall": stamp.wall_ms,
        "ts_boot": stamp.boot_ms,
        "boot_id": stamp.boot_id[:MAX_FIELD_CHARS],
        "host": stamp.host[:MAX_FIELD_CHARS],
    }
    words = ("actor", "auth_method", "source", "request_id", "action", "result", "reason")
    record |= {name: getattr(event, name)[:MAX_FIELD_CHARS] for name in words}
    exact = ("scope_path_hmac", "ns_tag", "rev", "epoch_from", "epoch_to")
    record |= {name: getattr(event, name) for name in exact}
    record["counts"] = dict(sorted(event.counts.items()))
    record["proof"] = dict(sorted(event.proof.items()))
    canonical = json.dumps(record, separators=(",", ":")).encode("ascii")
    digest = chain_hash(head.hash, canonical)
    line = _OPEN + digest.hex().encode("ascii") + b'",' + canonical[1:]
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"an audit record has {len(line)} bytes, at most {MAX_LINE_BYTES}")
    return line, Head(seq=head.seq + 1, hash=digest)


def read_record(line: bytes) -> dict[str, object]:
    """The fields of a line, for showing. Raises ValueError for what is no record."""
    record: object = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError("an audit line that is no record")
    return record  # pyright: ignore[reportUnknownVariableType]  # JSON's keys are text


def read_head(line: bytes) -> Head:
    """Where a chain ends that ends with this line. Raises ValueError for what is no record."""
    if not line.startswith(_OPEN) or line[_HASH_END:_BODY] != b'",' or len(line) > MAX_LINE_BYTES:
        raise ValueError("an audit line that is no record")
    seq = read_record(line).get("seq")
    if not isinstance(seq, int):
        raise ValueError("an audit line without a position")
    return Head(seq=seq, hash=bytes.fromhex(line[len(_OPEN) : _HASH_END].decode("ascii")))


def read_previous(line: bytes) -> Head:
    """Where the chain ended before this line, by its own word. Raises ValueError."""
    seq = read_head(line).seq
    previous = read_record(line).get("prev_hash")
    if not isinstance(previous, str) or len(previous) != 2 * HASH_BYTES:
        raise ValueError("an audit line without the hash before it")
    return Head(seq=seq - 1, hash=bytes.fromhex(previous))


def follow(head: Head, line: bytes) -> Head | Fault:
    """The end of a chain after one more line, or what is wrong with that line."""
    seq = head.seq + 1
    if not line.startswith(_OPEN) or line[_HASH_END:_BODY] != b'",' or len(line) > MAX_LINE_BYTES:
        return Fault(seq=seq, reason="the line is no record")
    body = b"{" + line[_BODY:]
    digest = chain_hash(head.hash, body)
    begin = b'{"prev_hash":"%s","seq":%d,' % (head.hash.hex().encode("ascii"), seq)
    if not body.startswith(begin):
        return Fault(seq=seq, reason="the line does not belong at this position")
    if digest.hex().encode("ascii") != line[len(_OPEN) : _HASH_END]:
        return Fault(seq=seq, reason="the record is not what its hash says")
    return Head(seq=seq, hash=digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A signed statement that the log had this hash at this position."""

    head: Head
    wall_ms: int
    rev: int = 0
    """The registry's revision up to which the log tells of every change."""
    key_id: str = ""
    signature: bytes = b""

    def message(self) -> bytes:
        """What is signed."""
        numbers = b"".join(n.to_bytes(8, "big") for n in (self.head.seq, self.wall_ms, self.rev))
        return _CHECKPOINT_TAG + numbers + self.head.hash

    def proof(self) -> dict[str, str]:
        """As the `proof` of a record."""
        return {
            "hash": self.head.hash.hex(),
            "key": self.key_id,
            "rev": str(self.rev),
            "seq": str(self.head.seq),
            "signature": self.signature.hex(),
            "wall_ms": str(self.wall_ms),
        }

    def line(self) -> bytes:
        return json.dumps(self.proof(), separators=(",", ":")).encode("ascii")


def read_checkpoint(proof: object) -> Checkpoint:
    """A checkpoint from a decoded `proof` or line of one. Raises ValueError out of shape."""
    if not isinstance(proof, dict):
        raise ValueError("a checkpoint that is no record")
    fields: dict[object, object] = dict(proof)  # pyright: ignore[reportUnknownArgumentType]  # checked just below
    words = [fields.get(n) for n in ("hash", "seq", "wall_ms", "rev", "key", "signature")]
    if len(fields) != len(words) or not all(isinstance(word, str) for word in words):
        raise ValueError("a checkpoint with missing or foreign fields")
    digest, seq, wall_ms, rev, key_id, signature = (str(word) for word in words)
    head = Head(seq=int(seq), hash=bytes.fromhex(digest))
    if len(head.hash) != HASH_BYTES or min(head.seq, int(wall_ms), int(rev)) < 0:
        raise ValueError("a checkpoint out of range")
    return Checkpoint(
        head=head,
        wall_ms=int(wall_ms),
        rev=int(rev),
        key_id=key_id,
        signature=bytes.fromhex(signature),
    )


IsSigned = Callable[[bytes, bytes], bool]
"""Whether a signature over a message is the log's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What a check of a log found. `fault` None: the whole of it is as it was written."""

    start: Head
    head: Head
    checkpoints: int
    """How many statements it was held against."""
    fault: Fault | None
    newer: int = 0
    """Checkpoints from elsewhere beyond its end, where nothing else is wrong: it was cut, or is a
    copy that was taken before them.
    """


def verify(
    lines: Iterable[bytes],
    *,
    checkpoints: Sequence[Checkpoint] = (),
    is_signed: IsSigned | None = None,
    start: Head | None = None,
    key_id: str = "",
) -> Verification:
    """Check a log (or what follows `start`) line by line, against checkpoints from elsewhere.

    Without `start` it must begin at position 1, or, where older segments were removed, right behind
    a checkpoint. Without `is_signed` signatures are not looked at; with `key_id` one that names
    another key is said to.
    """
    check = _Check(checkpoints, is_signed, key_id)
    head = start
    begin = start or Head()
    for line in lines:
        if head is None:
            head = begin = check.beginning(line)
        before = head
        after = follow(before, line)
        fault = after if isinstance(after, Fault) else check.fault_at(before, after, line)
        if fault is not None:
            return check.result(begin, before, fault)
        assert isinstance(after, Head)
        head = after
    head = head or Head()
    return check.result(begin, head, check.fault_at_end(head))


class _Check:
    """The checkpoints that one verification is held against."""

    def __init__(
        self, checkpoints: Sequence[Checkpoint], is_signed: IsSigned | None, key_id: str
    ) -> None:
        self._is_signed = is_signed
        self._key_id = key_id
        self._forged: list[Fault] = []
        self._hashes: dict[int, bytes] = {}
        self._contradicted: set[int] = set()
        """Positions for which two hashes were signed."""
        for checkpoint in checkpoints:
            self._take(checkpoint)
        self._met = 0
        self._newer = 0

    def _take(self, checkpoint: Checkpoint) -> None:
        seq = checkpoint.head.seq
        why = self._why_bad(checkpoint)
        if why:
            self._forged.append(Fault(seq=seq, reason=f"a kept checkpoint is {why}"))
        elif self._hashes.setdefault(seq, checkpoint.head.hash) != checkpoint.head.hash:
            self._contradicted.add(seq)

    def beginning(self, line: bytes) -> Head:
        """Where a log that starts with this line starts: position 0, or a known checkpoint."""
        try:
            previous = read_previous(line)
        except ValueError:
            return Head()
        is_known = self._hashes.get(previous.seq) == previous.hash
        return previous if is_known else Head()

    def fault_at(self, before: Head, after: Head, line: bytes) -> Fault | None:
        wanted = self._hashes.get(after.seq)
        if after.seq in self._contradicted:
            return _contradiction(after.seq)
        if wanted is not None:
            self._met += 1
            if wanted != after.hash:
                return Fault(seq=after.seq, reason="a kept checkpoint has another hash here")
        if not line.startswith(b'"kind":"CHECKPOINT"', line.find(b'"kind":')):
            return None
        try:
            checkpoint = read_checkpoint(read_record(line).get("proof"))
        except ValueError as error:
            return Fault(seq=after.seq, reason=str(error))
        why = "forged" if checkpoint.head != before else self._why_bad(checkpoint)
        if why:
            return Fault(seq=after.seq, reason=f"the checkpoint in the log is {why}")
        self._met += 1
        return None

    def fault_at_end(self, head: Head) -> Fault | None:
        if self._contradicted:
            return _contradiction(min(self._contradicted))
        if self._forged:
            return min(self._forged, key=lambda fault: fault.seq)
        last_seq = max(self._hashes, default=0)
        if last_seq > head.seq:
            self._newer = sum(seq > head.seq for seq in self._hashes)
            return Fault(
                seq=head.seq + 1,
                reason=f"the log ends here; a checkpoint says that it reached {last_seq}",
            )
        return None

    def result(self, start: Head, head: Head, fault: Fault | None) -> Verification:
        return Verification(
            start=start, head=head, checkpoints=self._met, fault=fault, newer=self._newer
        )

    def _why_bad(self, checkpoint: Checkpoint) -> str:
        """What is wrong with a signature; empty where it is good, or not looked at."""
        if self._is_signed is None or self._is_signed(checkpoint.message(), checkpoint.signature):
            return ""
        if self._key_id and checkpoint.key_id != self._key_id:
            return (
                f"signed by another key ({checkpoint.key_id[:4]}...) than given"
                f" ({self._key_id[:4]}...)"
            )
        return "forged"


def _contradiction(seq: int) -> Fault:
    return Fault(
        seq=seq,
        reason="two kept checkpoints have different hashes here: one of them is of another log",
    )
