"""Who is asking: one refusal for every cause, swaps that count at once, floods of wrong keys."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hand_clock import WALL_MS, HandClock
from trunkline.core.credentials import (
    Credential,
    CredentialProblem,
    KeyBook,
    KeyRecord,
    draw_key,
    secret_hash_under,
)
from trunkline.core.principals import Principal
from trunkline.gateway.authenticate import (
    MAX_AUTHORIZATION_BYTES,
    NONE_SENT,
    REFUSAL,
    Authenticator,
    AuthLimits,
    Credentials,
    OpenDoor,
    StaticKey,
    network_of,
)
from trunkline.gateway.contracts import ClientError, Refusal

HASH = secret_hash_under(bytes(range(32)))
HOME = "192.0.2.1"


def drawn(number: int) -> tuple[str, KeyRecord]:
    key = draw_key(random.Random(number).randbytes, HASH)
    tenant = f"{number:032x}"
    record = KeyRecord(key_id=key.key_id, org="0a" * 16, tenant=tenant, secret_hash=key.secret_hash)
    return key.text, record


TEXT, RECORD = drawn(1)
HEADER = f"Bearer {TEXT}".encode()


class Desk:
    """One `Credentials` with its clock, and a count of the hashes it made."""

    def __init__(self, *, limits: AuthLimits | None = None, records: int = 1) -> None:
        self.clock = HandClock()
        self.hashes = 0
        self.book = KeyBook(drawn(number)[1] for number in range(1, records + 1))
        self.door = Credentials(
            book=self.book, hash_secret=self._hash, clock=self.clock, limits=limits
        )

    def _hash(self, secret: bytes) -> bytes:
        self.hashes += 1
        return HASH(secret)

    def swap(self, book: KeyBook) -> None:
        self.book = book
        self.door.swap(book)

    def is_open(self, header: bytes, address: str = HOME) -> bool:
        try:
            self.door.principal(header, address)
        except ClientError as error:
            if error.refusal is not told(header):
                raise
            return False
        return True


def told(header: bytes) -> Refusal:
    return REFUSAL if header else NONE_SENT


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "bEaReR"])
@pytest.mark.parametrize("blanks", [" ", "   "])
def test_the_right_key_is_its_principal_whatever_the_case_of_the_scheme(
    scheme: str, blanks: str
) -> None:
    principal = Desk().door.principal(f"{scheme}{blanks}{TEXT}".encode(), HOME)
    assert (principal.tenant, principal.actor) == (RECORD.tenant, RECORD.key_id)


def test_whoever_sends_no_key_is_told_that_none_was_sent() -> None:
    assert "none was sent" in NONE_SENT.message
    assert "Authorization: Bearer" in NONE_SENT.message
    assert "none" not in REFUSAL.message


WRONG: dict[str, tuple[bytes, CredentialProblem]] = {
    "none": (b"", CredentialProblem.MISSING),
    "scheme alone": (b"Bearer", CredentialProblem.MALFORMED),
    "scheme and a blank": (b"Bearer ", CredentialProblem.MALFORMED),
    "no scheme": (TEXT.encode(), CredentialProblem.MALFORMED),
    "basic": (b"Basic " + TEXT.encode(), CredentialProblem.MALFORMED),
    "a tab": (b"Bearer\t" + TEXT.encode(), CredentialProblem.MALFORMED),
    "two keys": (HEADER + b", " + HEADER, CredentialProblem.MALFORMED),
    "unknown": (b"Bearer " + drawn(2)[0].encode(), CredentialProblem.UNKNOWN),
    "wrong secret": (HEADER[:-1] + b"_", CredentialProblem.WRONG),
    "SQL": (b"Bearer pk_' OR '1'='1", CredentialProblem.MALFORMED),
    "LDAP": (b"Bearer *)(uid=*))(|(uid=*", CredentialProblem.MALFORMED),
    "format": (b"Bearer %s%n{0.__class__}", CredentialProblem.MALFORMED),
    "not ASCII": ("Bearer ключ".encode(), CredentialProblem.MALFORMED),
    "latin": (b"Bearer \xff\xfe", CredentialProblem.MALFORMED),
    "oversized": (b"Bearer " + b"a" * MAX_AUTHORIZATION_BYTES, CredentialProblem.MALFORMED),
    "a token where none are taken": (b"Bearer a.b.c", CredentialProblem.MALFORMED),
}


@pytest.mark.parametrize(("header", "reason"), WRONG.values(), ids=WRONG.keys())
def test_whatever_is_wrong_the_client_sees_one_refusal_and_operators_the_reason(
    header: bytes, reason: CredentialProblem
) -> None:
    desk = Desk()
    with pytest.raises(ClientError) as refused:
        desk.door.principal(header, HOME)
    refusal = refused.value.refusal
    assert refusal is told(header)
    assert (refusal.status, refusal.code, refusal.param) == (401, "invalid_api_key", None)
    assert str(refused.value) == refusal.message
    assert refused.value.__cause__ is None
    assert desk.door.refusals == {reason: 1}


def test_a_known_key_is_not_hashed_again() -> None:
    desk = Desk()
    assert all(desk.is_open(HEADER) for _ in range(5))
    assert desk.hashes == 1


def test_a_revoked_key_stops_with_the_swap() -> None:
    desk = Desk(records=2)
    assert desk.is_open(HEADER)
    desk.swap(desk.book.replaced(replace(RECORD, is_revoked=True)))
    assert not desk.is_open(HEADER)
    assert desk.door.refusals == {CredentialProblem.REVOKED: 1}


def test_a_key_that_is_gone_or_was_given_another_secret_stops_with_the_swap() -> None:
    desk = Desk()
    assert desk.is_open(HEADER)
    desk.swap(KeyBook([replace(RECORD, secret_hash=bytes(32))]))
    assert not desk.is_open(HEADER)
    desk.swap(KeyBook())
    assert not desk.is_open(HEADER)


def test_a_changed_record_counts_from_the_swap_on() -> None:
    desk = Desk()
    assert desk.door.principal(HEADER, HOME).models is None
    desk.swap(desk.book.replaced(replace(RECORD, models=frozenset({"small"}))))
    assert desk.door.principal(HEADER, HOME).models == {"small"}


def test_a_swap_that_leaves_a_key_as_it_was_leaves_it_known() -> None:
    desk = Desk()
    assert desk.is_open(HEADER)
    desk.swap(KeyBook([replace(RECORD), drawn(2)[1]]))
    assert desk.is_open(HEADER)
    assert desk.hashes == 1


def test_a_known_key_ends_at_its_time() -> None:
    desk = Desk()
    end_ms = WALL_MS + int(desk.clock.ms) + 1_000
    desk.swap(KeyBook([replace(RECORD, not_after_ms=end_ms)]))
    assert desk.is_open(HEADER)
    desk.clock.ms = end_ms - WALL_MS - 0.5
    assert desk.is_open(HEADER)
    desk.clock.ms = float(end_ms - WALL_MS)
    assert not desk.is_open(HEADER)
    assert desk.door.refusals == {CredentialProblem.EXPIRED: 1}


def test_known_keys_are_bounded_and_the_longest_unused_goes_first() -> None:
    desk = Desk(limits=AuthLimits(max_known_keys=3), records=4)
    first, second, third, fourth = (f"Bearer {drawn(n)[0]}".encode() for n in range(1, 5))
    for header in (first, second, third, first, fourth):
        assert desk.is_open(header)
    assert desk.hashes == 4
    assert desk.is_open(first)
    assert desk.hashes == 4
    assert desk.is_open(second)
    assert desk.hashes == 5


def wrong_headers(count: int) -> list[bytes]:
    """Of all kinds: wrong secrets of a real key, unknown ids, nonsense."""
    dice = random.Random(7)
    made: list[bytes] = []
    for number in range(count):
        text = draw_key(dice.randbytes, HASH).text
        kinds = (f"pk_{RECORD.key_id}{text[19:]}", text, f"' OR {number}=1")
        made.append(f"Bearer {kinds[number % 3]}".encode())
    return made


def test_one_key_is_remembered_once_however_its_header_is_written() -> None:
    desk = Desk(limits=AuthLimits(max_known_keys=2), records=2)
    second = f"Bearer {drawn(2)[0]}".encode()
    assert desk.is_open(second)
    for scheme in ("Bearer", "bearer", "BEARER", "bEARER"):
        for blanks in range(1, 20):
            assert desk.is_open(f"{scheme}{' ' * blanks}{TEXT}".encode())
    assert desk.is_open(second)
    assert desk.hashes == 2


class TestWrongKeys:
    """Many of them, from one address."""

    def test_10_000_are_all_refused_alike_and_counted_for_what_they_are(self) -> None:
        desk = Desk()
        assert not any(desk.is_open(header) for header in wrong_headers(10_000))
        assert desk.door.refusals == {
            CredentialProblem.WRONG: 3_334,
            CredentialProblem.UNKNOWN: 3_333,
            CredentialProblem.MALFORMED: 3_333,
        }

    def test_a_right_one_that_is_new_gets_through_among_them(self) -> None:
        desk = Desk(records=60)
        for number in range(1, 61):
            assert not any(desk.is_open(header) for header in wrong_headers(30))
            assert desk.is_open(f"Bearer {drawn(number)[0]}".encode())

    def test_keys_of_one_tenant_that_push_out_another_do_not_keep_it_out(self) -> None:
        desk = Desk(limits=AuthLimits(max_known_keys=3), records=10)
        assert desk.is_open(HEADER)
        for number in range(2, 11):
            assert desk.is_open(f"Bearer {drawn(number)[0]}".encode())
        assert not any(desk.is_open(header) for header in wrong_headers(100))
        assert desk.is_open(HEADER)

    def test_they_are_no_reason_to_look_at_fewer_tokens(self) -> None:
        door, tokens = with_tokens()
        for header in wrong_headers(300):
            if header.startswith(b"Bearer pk_"):
                is_refused(door, header)
        assert door.principal(b"Bearer good.good.good", HOME).user == "ann"
        assert (tokens.checks, len(door.sources)) == (1, 0)

    def test_an_expired_key_is_refused_for_that(self) -> None:
        desk = Desk()
        desk.swap(KeyBook([replace(RECORD, not_after_ms=5)]))
        assert not any(desk.is_open(HEADER) for _ in range(100))
        assert desk.door.refusals == {CredentialProblem.EXPIRED: 100}


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("192.0.2.1", "192.0.2.2", False),
        ("2001:db8:1:2::1", "2001:db8:1:2:ffff::9", True),
        ("2001:db8:1:2::1", "2001:db8:1:3::1", False),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
        ("fe80::1%eth0", "fe80::2%eth1", True),
        ("no:address", "no:address", True),
        ("", "192.0.2.1", False),
    ],
)
def test_a_source_is_an_ipv4_address_or_a_64_of_ipv6(one: str, other: str, is_same: bool) -> None:
    assert (network_of(one) == network_of(other)) is is_same


class Tokens:
    """Knows one good token, after it was checked once. Those that begin with `forged` could be
    good by their looks.
    """

    def __init__(self, principal: Principal) -> None:
        self.credential = Credential(principal=principal)
        self.checks = 0
        self.is_known = False

    def known(self, token: bytes) -> Credential | None:
        return self.credential if self.is_known and token == b"good.good.good" else None

    def is_plausible(self, token: bytes) -> bool:
        return token.startswith((b"good", b"forged"))

    def check(self, token: bytes) -> Credential | CredentialProblem:
        self.checks += 1
        self.is_known = self.is_known or token == b"good.good.good"
        return self.credential if token == b"good.good.good" else CredentialProblem.WRONG


def with_tokens(limits: AuthLimits | None = None) -> tuple[Credentials, Tokens]:
    tokens = Tokens(Principal(org="o", tenant="t", user="ann", actor="ann", auth_method="jwt"))
    door = Credentials(
        book=KeyBook([RECORD]), hash_secret=HASH, clock=HandClock(), tokens=tokens, limits=limits
    )
    return door, tokens


def is_refused(door: Credentials, header: bytes, address: str = HOME) -> bool:
    with pytest.raises(ClientError) as refused:
        door.principal(header, address)
    return refused.value.refusal is told(header)


def test_keys_and_tokens_are_taken_side_by_side() -> None:
    door, tokens = with_tokens()
    assert door.principal(b"Bearer good.good.good", HOME).auth_method == "jwt"
    assert door.principal(HEADER, HOME).auth_method == "key"
    assert door.principal(b"Bearer good.good.good", HOME).auth_method == "jwt"
    assert tokens.checks == 1


class TestWrongTokens:
    """Many of them, from one address and from many."""

    def flood(self, door: Credentials, kind: bytes = b"wrong", address: str = HOME) -> None:
        for number in range(1_000):
            assert is_refused(door, b"Bearer %b.x.%d" % (kind, number), address)

    def test_few_are_checked_and_one_that_is_in_use_goes_on(self) -> None:
        door, tokens = with_tokens()
        door.principal(b"Bearer good.good.good", HOME)
        self.flood(door)
        assert tokens.checks == 1 + AuthLimits().wrong_burst
        assert door.principal(b"Bearer good.good.good", HOME).user == "ann"
        assert door.refusals[CredentialProblem.LIMITED] == 1_000 - AuthLimits().wrong_burst

    def test_a_right_one_that_is_new_gets_through_among_them(self) -> None:
        door, _ = with_tokens()
        self.flood(door)
        assert door.principal(b"Bearer good.good.good", HOME).user == "ann"

    def test_those_of_a_good_shape_are_checked_within_one_bound_for_all_addresses(self) -> None:
        limits = AuthLimits(wrong_burst=2, spare_burst=5, spare_per_s=10.0)
        door, tokens = with_tokens(limits)
        self.flood(door, b"forged")
        self.flood(door, b"forged", "192.0.2.2")
        assert tokens.checks == 2 + 2 + 5
        assert is_refused(door, b"Bearer good.good.good")
        assert door.principal(b"Bearer good.good.good", "192.0.2.3").user == "ann"

    def test_what_is_left_for_those_of_a_good_shape_comes_back_with_time(self) -> None:
        limits = AuthLimits(wrong_burst=2, spare_burst=5, spare_per_s=10.0)
        clock = HandClock()
        tokens = with_tokens()[1]
        door = Credentials(
            book=KeyBook(), hash_secret=HASH, clock=clock, tokens=tokens, limits=limits
        )
        self.flood(door, b"forged")
        clock.ms += 99.0
        assert is_refused(door, b"Bearer good.good.good")
        clock.ms += 1.0
        assert door.principal(b"Bearer good.good.good", HOME).user == "ann"

    def test_right_ones_use_up_nothing(self) -> None:
        door, tokens = with_tokens(AuthLimits(wrong_burst=2, spare_burst=1, spare_per_s=1.0))
        for number in range(2):
            is_refused(door, b"Bearer wrong.x.%d" % number)
        for _ in range(10):
            tokens.is_known = False
            assert door.principal(b"Bearer good.good.good", HOME).user == "ann"

    def test_the_limit_of_an_address_ends_with_time(self) -> None:
        clock = HandClock()
        tokens = with_tokens()[1]
        door = Credentials(book=KeyBook(), hash_secret=HASH, clock=clock, tokens=tokens)
        self.flood(door)
        clock.ms += 999.0
        is_refused(door, b"Bearer wrong.x.y")
        assert tokens.checks == AuthLimits().wrong_burst
        clock.ms += 1.0
        is_refused(door, b"Bearer wrong.x.y")
        assert tokens.checks == AuthLimits().wrong_burst + 1

    def test_the_table_of_addresses_is_bounded(self) -> None:
        door, _ = with_tokens(AuthLimits(max_sources=50))
        for number in range(500):
            is_refused(door, b"Bearer no.no.no", f"198.51.{number % 250}.{number // 250}")
            assert len(door.sources) <= 50
        assert len(door.sources) == 50

    def test_addresses_that_became_quiet_are_forgotten(self) -> None:
        clock = HandClock()
        door = Credentials(book=KeyBook(), hash_secret=HASH, clock=clock, tokens=with_tokens()[1])
        for number in range(40):
            is_refused(door, b"Bearer no.no.no", f"198.51.100.{number}")
        assert len(door.sources) == 40
        clock.ms += 1_000.0
        is_refused(door, b"Bearer no.no.no")
        assert len(door.sources) == 1


ONE = Principal(org="o", tenant="t", actor="static", auth_method="operator")


def test_an_open_door_takes_everybody_for_the_one_principal() -> None:
    door = OpenDoor(ONE)
    for header in (b"", b"Bearer x", b"\xff" * 100_000):
        assert door.principal(header, HOME) is ONE


def test_a_static_key_opens_and_nothing_else_does() -> None:
    door = StaticKey("open sesame ä", ONE)
    assert door.principal("bearer open sesame ä".encode(), HOME) is ONE
    wrong = [header for header, _ in WRONG.values()]
    for header in [*wrong, b"Bearer open sesame", b"Bearer open sesame \xe4"]:
        with pytest.raises(ClientError) as refused:
            door.principal(header, HOME)
        assert refused.value.refusal is told(header)
    assert sum(door.refusals.values()) == len(wrong) + 2


def test_an_empty_static_key_is_refused_when_it_is_made() -> None:
    with pytest.raises(ValueError, match="OpenDoor"):
        StaticKey("", ONE)


MAKERS: list[Callable[[], Authenticator]] = [
    lambda: StaticKey("k", ONE),
    lambda: Desk().door,
    lambda: with_tokens()[0],
]


@pytest.mark.parametrize("make", MAKERS)
@given(header=st.binary(max_size=200) | st.binary(max_size=80).map(lambda tail: b"Bearer " + tail))
def test_no_header_breaks_a_door(make: Callable[[], Authenticator], header: bytes) -> None:
    door = make()
    if header.strip(b" ")[7:].strip(b" ") in (b"k", TEXT.encode(), b"good.good.good"):
        return
    with pytest.raises(ClientError) as refused:
        door.principal(header, HOME)
    assert refused.value.refusal is told(header)
    assert sum(door.refusals.values()) == 1
