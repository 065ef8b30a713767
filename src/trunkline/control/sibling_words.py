"""What gateways of one fleet say to one another about what workers hold: questions and answers.

    ask    who knows this worker at least up to this batch, and more of it?   first offer counts
    take   stand still and put down all that you know of it                   made: so many pieces
    fetch  piece number n                                                     the piece
    listen the next of this worker's events, from this one on                 relayed: those

Each is sealed with a key that only gateways with the fleet's root secret have; an answer names the
question's own number, so that an old one answers nothing. Every part has a bound. Must never: raise
on what somebody says. Read `siblings.py` and `relays.py` for who says what when.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Annotated

import msgspec

from trunkline.core.epochs import MAX_SUBJECT_BYTES, Subject, SubjectKind
from trunkline.core.handover import Lineage
from trunkline.core.identity import TAG_BYTES, Epochs, Scope, ScopeKind
from trunkline.core.records import NamespaceTag

MAX_FRAME_BYTES = 768 << 10
"""Inside the 1 MiB that servers of NATS take unless told otherwise."""
MAX_PIECES = 65_536
SEAL_BYTES = 16

_Number = Annotated[int, msgspec.Meta(ge=0)]
_Seq = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
_Part = Annotated[str, msgspec.Meta(max_length=MAX_SUBJECT_BYTES)]
_Tag = Annotated[bytes, msgspec.Meta(max_length=TAG_BYTES)]
_Few = msgspec.Meta(max_length=16)


class Ask(msgspec.Struct, tag="ask", frozen=True, array_like=True, kw_only=True):
    life: _Name
    number: _Name
    worker: _Name
    block_tokens: _Seq
    seq: _Seq
    knows_since: _Seq


class Offer(msgspec.Struct, tag="offer", frozen=True, array_like=True, kw_only=True):
    number: _Name
    life: _Name


class Take(msgspec.Struct, tag="take", frozen=True, array_like=True, kw_only=True):
    to: _Name
    ask: Ask


class Made(msgspec.Struct, tag="made", frozen=True, array_like=True, kw_only=True):
    number: _Name
    seq: _Seq
    fingerprint: _Number
    base: _Seq
    piece_count: Annotated[int, msgspec.Meta(ge=0, le=MAX_PIECES)]


class Fetch(msgspec.Struct, tag="fetch", frozen=True, array_like=True, kw_only=True):
    to: _Name
    number: _Name
    index: _Seq


class ToldLineage(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    tag: _Tag
    scope: Annotated[tuple[_Part, ...], msgspec.Meta(min_length=6, max_length=6)]
    epochs: Annotated[tuple[_Number, ...], msgspec.Meta(min_length=8, max_length=8)]
    adapter: _Part
    block_tokens: _Seq
    subjects: Annotated[tuple[tuple[_Part, _Part], ...], _Few]


class Piece(msgspec.Struct, tag="piece", frozen=True, array_like=True, kw_only=True):
    number: _Name
    index: _Seq
    packed: bytes = b""
    tags: Annotated[tuple[_Tag, ...], msgspec.Meta(max_length=8_192)] = ()
    lineages: Annotated[tuple[ToldLineage, ...], msgspec.Meta(max_length=8_192)] = ()
    """Of namespaces that no earlier piece told of."""
    unplaced: bytes = b""
    """Engine hashes, 8 bytes each."""


class Listen(msgspec.Struct, tag="listen", frozen=True, array_like=True, kw_only=True):
    life: _Name
    number: _Name
    to: Annotated[str, msgspec.Meta(max_length=512)]
    """Empty for whoever hears it."""
    worker: _Name
    number_next: _Seq
    """Of the batches that were told, by who tells; of nobody's where nobody is meant."""


class Relayed(msgspec.Struct, tag="relayed", frozen=True, array_like=True, kw_only=True):
    number: _Name
    life: _Name
    is_broken: bool
    """Some that should come next are gone."""
    number_next: _Seq
    sealed: bytes = b""
    """Sequence numbers and payloads, encrypted; empty for none."""


Word = Ask | Offer | Take | Made | Fetch | Piece | Listen | Relayed


class Seal:
    """Closes and opens frames under the fleet's secret."""

    def __init__(self, root_key: bytes) -> None:
        self._key = hashlib.blake2b(digest_size=32, key=root_key, person=b"siblings").digest()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Word)
        self.refused = 0
        """Frames that were no word of a gateway of this fleet."""

    def close(self, word: Word) -> bytes:
        body = self._encoder.encode(word)
        return self._mac(body) + body

    def open(self, frame: bytes) -> Word | None:
        """None for what no gateway of this fleet said, or what makes no sense."""
        body = frame[SEAL_BYTES:]
        is_ours = len(frame) <= MAX_FRAME_BYTES and hmac.compare_digest(
            frame[:SEAL_BYTES], self._mac(body)
        )
        if is_ours:
            try:
                return self._decoder.decode(body)
            except (msgspec.DecodeError, RecursionError):
                pass  # counted below: another version's word
        self.refused += 1
        return None

    def _mac(self, body: bytes) -> bytes:
        return hashlib.blake2b(body, digest_size=SEAL_BYTES, key=self._key).digest()


def told(lineage: Lineage) -> ToldLineage:
    scope, epochs = lineage.scope, lineage.epochs
    parts = (scope.org, scope.tenant, scope.user, scope.session, scope.public_id)
    return ToldLineage(
        tag=lineage.tag,
        scope=(scope.kind.value, *parts),
        epochs=tuple(getattr(epochs, kind.value) for kind in SubjectKind),
        adapter=lineage.adapter,
        block_tokens=lineage.block_tokens,
        subjects=tuple((subject.kind.value, subject.path) for subject in lineage.subjects),
    )


def heard(word: ToldLineage) -> Lineage | None:
    """None where it is no lineage."""
    kind, org, tenant, user, session, public_id = word.scope
    try:
        return Lineage(
            tag=NamespaceTag(word.tag),
            scope=Scope(
                kind=ScopeKind(kind),
                org=org,
                tenant=tenant,
                user=user,
                session=session,
                public_id=public_id,
            ),
            epochs=Epochs(
                **{kind.value: at for kind, at in zip(SubjectKind, word.epochs, strict=True)}
            ),
            adapter=word.adapter,
            block_tokens=word.block_tokens,
            subjects=tuple(
                Subject(kind=SubjectKind(name), path=path) for name, path in word.subjects
            ),
        )
    except ValueError:
        return None
