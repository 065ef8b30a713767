"""What a person writes on the command line: taken, or refused with what is right."""

from __future__ import annotations

import pytest

from trunkline import words
from trunkline.core.credentials import MAX_NAME_BYTES
from trunkline.core.epochs import SubjectKind
from trunkline.errors import ConfigError
from trunkline.gateway import admin_tenancy

NOW_S = 1_800_000_000.0
KEY = "pk_0123456789abcdef_" + "A" * 43


def test_the_bounds_are_those_of_the_gateway() -> None:
    assert admin_tenancy.MAX_EXPIRES_S == words.MAX_KEY_LIFE_S
    assert admin_tenancy.MAX_PUBLIC_EXPIRES_S == words.MAX_PUBLIC_LIFE_S
    kinds = {kind.value for kind in SubjectKind} - {"fleet"}
    assert set(words.KINDS) == kinds
    assert MAX_NAME_BYTES == 256


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("45m", 2_700), ("12h", 43_200), ("30d", 2_592_000), ("2w", 1_209_600)],
)
def test_durations_are_read_with_their_unit(text: str, seconds: int) -> None:
    assert words.seconds_of(text) == seconds
    assert words.expiry_in(text, NOW_S, words.MAX_KEY_LIFE_S) == seconds


def test_a_year_has_365_days_and_a_date_is_in_utc() -> None:
    assert words.seconds_of("1y") == 365 * 86_400
    assert words.expiry_in("2027-01-16", NOW_S, words.MAX_PUBLIC_LIFE_S) == 57_600
    assert words.expiry_in("2027-01-16T09:00:00+01:00", NOW_S, words.MAX_PUBLIC_LIFE_S) == 86_400
    assert words.expiry_in("90d", NOW_S, words.MAX_PUBLIC_LIFE_S) == 90 * 86_400


@pytest.mark.parametrize(
    ("text", "part"),
    [
        *(("soon", "like 30d"), ("1mo", "like 30d"), ("0d", "like 30d"), ("1.5h", "like 30d")),
        ("2027-01-15", "is over already"),
        ("91d", "at most 90d"),
        ("2028-01-01", "at most 90d"),
    ],
)
def test_an_end_that_cannot_be_is_refused(text: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        words.expiry_in(text, NOW_S, words.MAX_PUBLIC_LIFE_S)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *(("0", 0), ("8000000000", 8_000_000_000), ("10GB", 10_000_000_000), ("5B", 5)),
        *(("512MiB", 512 << 20), ("1.5GiB", 3 << 29), ("2kb", 2_000), ("1TiB", 1 << 40)),
    ],
)
def test_sizes_are_read_with_their_unit(text: str, size: int) -> None:
    assert words.bytes_in(text, "--cap") == size


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("10G", "10GB or 10GiB"),
        ("10Gi", "10GB or 10GiB"),
        *(("-1", "a size like"), ("", "a size like"), ("10 GB", "a size like")),
        *(("0.3B", "no whole number"), ("9000TiB", "no whole number")),
    ],
)
def test_a_size_that_is_none_is_refused(text: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        words.bytes_in(text, "--cap")


@pytest.mark.parametrize(
    "text",
    [
        *("fleet", "tenant/acme", "tenant/" + "0" * 32, "user/acme/Alice B", "org/o", "public/p"),
        *("model/meta-llama/Llama-3", "adapter/x", "key_class/ci"),
    ],
)
def test_subjects_go_to_the_gateway_as_they_are(text: str) -> None:
    assert words.subject_in(text) == text


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("tenants/acme", "did you mean tenant/acme?"),
        ("Tenant/acme", "did you mean tenant/acme?"),
        ("users/acme/alice", "did you mean user/acme/alice?"),
        ("organisation/acme", "did you mean org/acme?"),
        ("class/ci", "did you mean key_class/ci?"),
        ("modle/m", "did you mean model/m?"),
        ("acme", "did you mean tenant/acme?"),
        ("fleets", "did you mean fleet?"),
        ("planet/x", "it begins with one of tenant, user, org"),
        ("tenant", "a subject is tenant/NAME"),
        ("user/", "a subject is user/TENANT/NAME"),
        ("user/alice", "it is user/TENANT/NAME"),
        ("tenant/acme/alice", "did you mean user/acme/alice?"),
        ("tenant/Acme", "did you mean acme?"),
        ("fleet/all", "fleet stands alone"),
        ("key/0123456789abcdef", "trunkline keys revoke 0123456789abcdef"),
        ("keys/mine", "trunkline keys revoke ID"),
        (KEY, "trunkline keys revoke 0123456789abcdef"),
    ],
)
def test_a_subject_that_is_none_is_refused_with_what_was_meant(text: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        words.subject_in(text)
    assert part in str(caught.value)
    assert "AAAA" not in str(caught.value)


def test_the_id_of_a_key_is_found_in_all_that_people_have_of_it() -> None:
    for text in ("0123456789abcdef", "key/0123456789abcdef", KEY, KEY + "\n"):
        assert words.key_id_in(text) == "0123456789abcdef"
    for text in (KEY[:-1], KEY + "A", "0123", "0123456789ABCDEF"):
        with pytest.raises(ConfigError, match="16 hex digits") as caught:
            words.key_id_in(text)
        assert "AAAA" not in str(caught.value)


@pytest.mark.parametrize("text", ["inf", "nan", "0", "-3", "1001"])
def test_a_number_out_of_bounds_is_refused(text: str) -> None:
    assert words.number_in("1000", "--weight", words.MAX_WEIGHT) == 1_000.0
    with pytest.raises(ConfigError, match="at most 1000"):
        words.number_in(text, "--weight", words.MAX_WEIGHT)
