"""API keys: how they are drawn, what is kept of them, and that a wrong one is wrong in one way."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.core.credentials import (
    MAX_KEYS,
    Credential,
    CredentialProblem,
    KeyBook,
    KeyRecord,
    NewKey,
    draw_key,
    secret_hash_under,
)
from trunkline.core.identity import ScopeKind
from trunkline.core.principals import Role

PEPPER = bytes(range(32))
HASH = secret_hash_under(PEPPER)
ORG, TENANT = "0a" * 16, "1b" * 16


def drawn(seed: int = 1) -> NewKey:
    return draw_key(random.Random(seed).randbytes, HASH)


def record_of(key: NewKey) -> KeyRecord:
    return KeyRecord(key_id=key.key_id, org=ORG, tenant=TENANT, secret_hash=key.secret_hash)


KEY = drawn()
RECORD = record_of(KEY)
BOOK = KeyBook([RECORD, record_of(drawn(2))])


def outcome_of(text: bytes, book: KeyBook = BOOK, now_ms: float = 1_000.0) -> object:
    found = book.check(text, HASH, now_ms)
    return found if isinstance(found, CredentialProblem) else found.principal.actor


def test_a_key_has_an_id_of_64_bits_and_a_secret_of_256() -> None:
    prefix, key_id, secret = KEY.text.split("_", 2)
    assert (prefix, key_id, len(key_id), len(secret)) == ("pk", KEY.key_id, 16, 43)
    assert drawn(1).text == KEY.text
    assert len({drawn(seed).text for seed in range(200)}) == 200


def test_nothing_that_is_kept_or_printed_shows_the_secret() -> None:
    secret = KEY.text[20:]
    assert secret not in repr(KEY)
    assert secret not in repr(RECORD)
    assert all(secret not in str(getattr(RECORD, field.name)) for field in fields(RECORD))
    assert repr(RECORD.secret_hash) not in repr(RECORD)


def test_the_hash_depends_on_the_pepper_and_on_nothing_public() -> None:
    secret = KEY.text[20:].encode()
    assert HASH(secret) == RECORD.secret_hash
    assert secret_hash_under(PEPPER[::-1])(secret) != RECORD.secret_hash


@pytest.mark.parametrize("length", [0, 16, 31, 65])
def test_a_pepper_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="pepper"):
        secret_hash_under(bytes(length))


@pytest.mark.parametrize("source", [lambda n: b"", lambda n: bytes(n), lambda n: b"abcd"])
def test_a_source_that_gives_no_chance_makes_no_key(source: Callable[[int], bytes]) -> None:
    with pytest.raises(ValueError, match="source of chance"):
        draw_key(source, HASH)


def test_the_right_key_is_its_principal() -> None:
    record = replace(
        RECORD,
        user="ann",
        roles=frozenset({Role.TENANT_ADMIN}),
        models=frozenset({"m"}),
        adapters=frozenset({"a"}),
        key_class="batch",
        default_scope=ScopeKind.USER,
    )
    found = KeyBook([record]).check(KEY.text.encode(), HASH, 5.0)
    assert isinstance(found, Credential)
    principal = found.principal
    assert (principal.org, principal.tenant, principal.user) == (ORG, TENANT, "ann")
    assert (principal.actor, principal.auth_method) == (KEY.key_id, "key")
    assert principal.roles == {Role.TENANT_ADMIN}
    assert (principal.models, principal.adapters) == ({"m"}, {"a"})
    assert principal.key_class == "batch"
    assert principal.default_scope is ScopeKind.USER


GOOD = KEY.text.encode()
MALFORMED: dict[str, bytes] = {
    "empty": b"",
    "another prefix": b"sk" + GOOD[2:],
    "capitals in the id": GOOD[:3] + b"ABCDEF0123456789" + GOOD[19:],
    "short id": GOOD[:3] + GOOD[4:],
    "short secret": GOOD[:-1],
    "long secret": GOOD + b"A",
    "a line break behind it": GOOD + b"\n",
    "NUL": GOOD[:-1] + b"\0",
    "blanks": b" " + GOOD,
    "one megabyte": b"pk_" + b"a" * (1 << 20),
    "not ASCII": b"pk_0123456789abcdef_" + "ä".encode() * 43,
    "digits of another script": b"pk_" + "٠".encode() * 16 + GOOD[19:],
    "invalid UTF-8": b"\xff\xfe" * 30,
    "SQL": b"pk_' OR '1'='1' --_" + GOOD[20:],
    "SQL in the secret": GOOD[:20] + b"' OR 1=1; DROP TABLE api_keys; ----------------",
    "LDAP": b"pk_*)(uid=*))(|(uid=*_" + GOOD[20:],
    "format string": b"pk_%s%s%n%x{0.__class__}_" + GOOD[20:],
    "a path": b"pk_../../../etc/passwd_" + GOOD[20:],
    "a token": b"eyJhbGciOiJub25lIn0.e30.",
}


@pytest.mark.parametrize("text", MALFORMED.values(), ids=MALFORMED.keys())
def test_text_that_is_no_key_is_malformed(text: bytes) -> None:
    assert outcome_of(text) is CredentialProblem.MALFORMED


@pytest.mark.parametrize("position", range(20, 63))
def test_one_other_character_of_the_secret_is_a_wrong_key(position: int) -> None:
    other = bytearray(GOOD)
    other[position] = ord("A") if other[position] != ord("A") else ord("B")
    assert outcome_of(bytes(other)) is CredentialProblem.WRONG


def test_an_unknown_id_and_the_secret_of_another_key_are_refused() -> None:
    assert outcome_of(drawn(3).text.encode()) is CredentialProblem.UNKNOWN
    assert outcome_of(GOOD[:20] + drawn(2).text.encode()[20:]) is CredentialProblem.WRONG


def test_the_dummy_of_unknown_ids_opens_nothing() -> None:
    assert outcome_of(b"pk_" + b"0" * 16 + b"_" + b"-" * 43) is CredentialProblem.UNKNOWN


@pytest.mark.parametrize(
    ("now_ms", "expected"),
    [
        (99.9, CredentialProblem.EARLY),
        (100.0, KEY.key_id),
        (199.9, KEY.key_id),
        (200.0, CredentialProblem.EXPIRED),
    ],
)
def test_a_key_is_good_from_its_first_moment_to_before_its_last(
    now_ms: float, expected: object
) -> None:
    book = KeyBook([replace(RECORD, not_before_ms=100, not_after_ms=200)])
    assert outcome_of(GOOD, book, now_ms) == expected


def test_a_revoked_key_is_refused_and_a_wrong_secret_does_not_learn_of_it() -> None:
    book = BOOK.replaced(replace(RECORD, is_revoked=True))
    assert outcome_of(GOOD, book) is CredentialProblem.REVOKED
    assert outcome_of(GOOD[:-1] + b"_", book) is CredentialProblem.WRONG


def test_replacing_leaves_the_old_book_as_it_was() -> None:
    book = BOOK.replaced(replace(RECORD, is_revoked=True))
    assert (len(book), len(BOOK)) == (2, 2)
    assert outcome_of(GOOD) == KEY.key_id
    assert [record.key_id for record in book] == [record.key_id for record in BOOK]


@pytest.mark.parametrize(
    "text", [*MALFORMED.values(), GOOD, GOOD[:-1] + b"_", drawn(9).text.encode()]
)
def test_every_check_hashes_one_secret_of_one_length(text: bytes) -> None:
    hashed: list[int] = []

    def counting(secret: bytes) -> bytes:
        hashed.append(len(secret))
        return HASH(secret)

    BOOK.check(text, counting, 1_000.0)
    assert hashed == [43]


@given(st.binary(max_size=200))
def test_no_text_but_the_key_opens_the_book_and_none_breaks_it(text: bytes) -> None:
    assert isinstance(outcome_of(text), CredentialProblem) or text == GOOD


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("key_id", "0123"),
        ("key_id", "0123456789ABCDEF"),
        ("org", ""),
        ("tenant", ""),
        ("user", "line\nbreak"),
        ("user", "x" * 257),
        ("user", "\ud800"),
        ("secret_hash", b"short"),
        ("not_after_ms", 0),
        ("default_scope", ScopeKind.PUBLIC),
    ],
)
def test_a_record_out_of_shape_is_refused(part: str, value: object) -> None:
    parts: dict[str, object] = {f.name: getattr(RECORD, f.name) for f in fields(RECORD)}
    with pytest.raises(ValueError):
        KeyRecord(**(parts | {part: value}))  # pyright: ignore[reportArgumentType]  the point


def test_a_book_takes_no_two_keys_of_one_id() -> None:
    with pytest.raises(ValueError, match="two keys"):
        KeyBook([RECORD, RECORD])


def test_a_book_takes_no_more_keys_than_its_bound() -> None:
    full = KeyBook(replace(RECORD, key_id=f"{number:016x}") for number in range(MAX_KEYS))
    assert len(full) == MAX_KEYS
    with pytest.raises(ValueError, match=f"at most {MAX_KEYS}"):
        full.replaced(RECORD)
    with pytest.raises(ValueError, match=f"at most {MAX_KEYS}"):
        KeyBook([*full, RECORD])
