"""Bodies that two readers could take differently are refused; everything else is read once."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.gateway.contracts import ClientError
from trunkline.gateway.fields import FORBIDDEN
from trunkline.gateway.strict_json import (
    MAX_ITEMS,
    MAX_MARKS,
    MAX_STRINGS,
    decode_object,
    has_negative_zero,
    without,
)

BROKEN: list[tuple[str, bytes, str]] = [
    ("empty", b"", "invalid_json"),
    ("only a blank", b" ", "invalid_json"),
    ("truncated object", b'{"a":1', "invalid_json"),
    ("truncated string", b'{"a":"b', "invalid_json"),
    ("trailing garbage", b'{"a":1}x', "invalid_json"),
    ("two values", b'{"a":1}{"a":1}', "invalid_json"),
    ("byte order mark", b'\xef\xbb\xbf{"a":1}', "invalid_json"),
    ("UTF-16", '{"a":1}'.encode("utf-16"), "invalid_utf8"),
    ("UTF-16 without a mark", '{"a":1}'.encode("utf-16-le"), "invalid_json"),
    ("an array", b"[1]", "invalid_json"),
    ("a string", b'"a"', "invalid_json"),
    ("null", b"null", "invalid_json"),
    ("single quotes", b"{'a':1}", "invalid_json"),
    ("a trailing comma", b'{"a":1,}', "invalid_json"),
    ("a comment", b'{"a":1/*x*/}', "invalid_json"),
    ("NaN", b'{"a":NaN}', "invalid_json"),
    ("Infinity", b'{"a":Infinity}', "invalid_json"),
    ("minus Infinity", b'{"a":-Infinity}', "invalid_json"),
    ("1e999", b'{"a":1e999}', "invalid_json"),
    ("a leading zero", b'{"a":01}', "invalid_json"),
    ("a plus sign", b'{"a":+1}', "invalid_json"),
    ("a bare point", b'{"a":.5}', "invalid_json"),
    ("hexadecimal", b'{"a":0x1}', "invalid_json"),
    ("100,000 digits", b'{"a":' + b"9" * 100_000 + b"}", "invalid_json"),
    ("a raw control character", b'{"a":"\x01"}', "invalid_json"),
    ("a raw NUL", b'{"a":"\x00"}', "invalid_json"),
    ("an escaped NUL", b'{"a":"x\\u0000y"}', "invalid_utf8"),
    ("an escaped NUL in a key", b'{"a\\u0000":1}', "invalid_utf8"),
    ("a bad escape", b'{"a":"\\x41"}', "invalid_json"),
    ("a short escape", b'{"a":"\\u12"}', "invalid_json"),
    ("a lone high surrogate", b'{"a":"\\ud800"}', "invalid_utf8"),
    ("a lone low surrogate", b'{"a":"\\udc00"}', "invalid_utf8"),
    ("surrogates the wrong way round", b'{"a":"\\udc00\\ud800"}', "invalid_utf8"),
    ("bytes that are not UTF-8", b'{"a":"\xff"}', "invalid_utf8"),
    ("overlong UTF-8", b'{"a":"\xc0\xaf"}', "invalid_utf8"),
    ("a surrogate in UTF-8", b'{"a":"\xed\xa0\x80"}', "invalid_utf8"),
    ("65 levels", b'{"a":' + b"[" * 64 + b"]" * 64 + b"}", "too_deep"),
    ("65 levels of objects", b'{"a":' * 65 + b"1" + b"}" * 65, "too_deep"),
    ("a million brackets", b"[" * 1_000_000, "too_complex"),
    ("90,000 brackets", b"[" * 90_000, "too_deep"),
    ("a million nested objects", b'{"a":' * 1_000_000, "too_complex"),
    ("a key twice", b'{"model":"a","model":"b"}', "duplicate_key"),
    ("a key twice, once escaped", b'{"model":"a","mod\\u0065l":"b"}', "duplicate_key"),
    ("a key twice in other case", b'{"model":"a","Model":"b"}', "duplicate_key"),
    ("a nested key twice", b'{"a":[{"b":1,"b":2}]}', "duplicate_key"),
    ("a nested key twice, escaped", b'{"a":[{"b":1,"\\u0062":2}]}', "duplicate_key"),
    ("a key twice behind quotes", b'{"a":"\\u0022\\u0022\\"","b":1,"b":1}', "duplicate_key"),
    ("a twin hidden by \\u0022", b'{"a":"\\u0022\\u0022","b":1,"b":1}', "duplicate_key"),
    ("a twin with a quote in it", b'{"a\\"":1,"a\\u0022":2}', "duplicate_key"),
    ("a twin that is a string", b'{"b":"x","b":"y","a":"\\u0022\\u0022\\u0022\\u0022"}',
     "duplicate_key"),
    ("empty keys", b'{"":1,"":2}', "duplicate_key"),
    ("a dropped subtree", b'{"a":{"x":["y"]},"a":1}', "duplicate_key"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "code"), [c[1:] for c in BROKEN], ids=[c[0] for c in BROKEN])
def test_a_body_that_readers_could_differ_on_is_refused(body: bytes, code: str) -> None:
    with pytest.raises(ClientError) as caught:
        decode_object(body, 64, FORBIDDEN)

    assert caught.value.refusal.status == 400
    assert caught.value.refusal.code == code
    assert len(caught.value.refusal.message) < 200


SOUND = [
    b'{"a":"quote \\" backslash \\\\ slash \\/ tab \\t"}',
    b'{"a":"\\\\","b":"\\\\\\""}',
    b'{"a":"\\u0022 is a quote","b":"\\\\u0022 is not"}',
    b'{ "a" : 1 ,\n\t"b" :\r\n"c" }',
    b'{"a":"\\ud83d\\ude00","b":"\xf0\x9f\x98\x80"}',
    b'{"a":{"b":1},"c":{"b":1}}',
    b'{"tools":[{"id":1,"ID":2}]}',
    b'{"a":' + b"[" * 63 + b"]" * 63 + b"}",
    b'{"a":"-0,","b":-0.5,"c":[-1]}',
    b'{"prompt":[' + b",".join(b"%d" % i for i in range(50_000)) + b"]}",
    b"{}",
]


@pytest.mark.parametrize("body", SOUND)
def test_a_sound_body_reads_as_the_standard_library_reads_it(body: bytes) -> None:
    assert decode_object(body, 64, FORBIDDEN) == (json.loads(body), None)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(max_size=8)
    | st.text(alphabet='"\\u02 ', max_size=6),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.text(alphabet='ab"\\', max_size=3), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


KEYS = st.text(alphabet='xyz"\\', max_size=3)


@given(st.dictionaries(KEYS, JSON_VALUES, max_size=5), st.booleans())
def test_any_object_without_twins_passes_and_is_read_right(
    value: dict[str, Any], is_ascii: bool
) -> None:
    body = json.dumps(value, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass")
    text = json.dumps(value)
    if "\\u0000" in text or "\\ud" in text:
        return

    assert decode_object(body, 64, FORBIDDEN)[0] == value


@given(
    st.lists(st.tuples(st.sampled_from(['"a"', '"\\u0061"', '"b"', '"q\\""', '"q\\u0022"']),
                       st.sampled_from(['1', '"x"', '"\\u0022"', '"\\u0022\\u0022"', '"\\""'])),
             min_size=1, max_size=6),
    st.sampled_from(["", "x" * 4_000]),
)  # fmt: skip
def test_twins_are_found_however_they_are_spelled(
    pairs: list[tuple[str, str]], text_beside: str
) -> None:
    named = ",".join(f"{key}:{value}" for key, value in pairs)
    body = f'{{"text":"{text_beside}",{named}}}'
    has_twins = len({json.loads(key) for key, _ in pairs}) != len(pairs)

    if has_twins:
        with pytest.raises(ClientError, match="more than once"):
            decode_object(body.encode(), 64, FORBIDDEN)
    else:
        decode_object(body.encode(), 64, FORBIDDEN)


MEBI = 1 << 20
DENSE = {
    "empty lists": b'{"a":[' + b"[]," * MEBI + b"1]}",
    "nested lists": b'{"a":[' + b"[[[[[]]]]]," * (MEBI // 4) + b"1]}",
    "empty objects": b'{"a":[' + b"{}," * MEBI + b"1]}",
    "integers": b'{"a":[' + b"1," * MEBI + b"1]}",
    "empty strings": b'{"a":[' + b'"",' * MEBI + b"1]}",
    "strings of backslashes": b'{"a":[' + rb'"\\",' * MEBI + b"1]}",
    "strings of quotes": b'{"a":[' + rb'"\"",' * MEBI + b"1]}",
    "zeros and dates": b'{"z":0,"a":["2024-01",' + b'"",' * MEBI + b"1]}",
    "keys": b"{" + b",".join(b'"%x":1' % i for i in range(200_000)) + b"}",
}


@pytest.mark.parametrize("body", DENSE.values(), ids=DENSE.keys())
def test_a_body_that_would_hold_the_loop_is_refused_before_it_is_decoded(body: bytes) -> None:
    with pytest.raises(ClientError) as caught:
        decode_object(body, 64, FORBIDDEN)

    assert caught.value.refusal.code == "too_complex"


def test_a_long_text_full_of_brackets_is_not_taken_for_structure() -> None:
    body = json.dumps({"a": "[{:" * MEBI, "b": "\\"}).encode()

    assert len(decode_object(body, 64, FORBIDDEN)[0]["a"]) == 3 * MEBI


def test_the_bounds_on_strings_and_items_are_exact() -> None:
    pad = b'"' + rb"x\\\"," * (1 << 16) + b'",'
    for one, limit, others in ((b'"",', MAX_STRINGS, 2), (b"1,", MAX_ITEMS, 1)):
        body = b'{"a":[' + pad + one * (limit - others) + b"1]}"
        decode_object(body, 64, FORBIDDEN)
        with pytest.raises(ClientError, match=f"more than {limit} ") as caught:
            decode_object(body.replace(pad, pad + one), 64, FORBIDDEN)
        assert caught.value.refusal.code == "too_complex"


def test_the_longest_text_in_escapes_is_read_in_time() -> None:
    """Quotes, dates and colons by the million in one string: 570 ms before they were counted."""
    text = rb"\"2024-01-05: [" * (MEBI // 4)
    body = b'{"temperature":0,"a":"' + text + b'"}'
    began = time.process_time()
    decode_object(body, 64, FORBIDDEN)
    assert not has_negative_zero(body)
    assert time.process_time() - began < 4.0, "a hang, on any machine"


def test_quotes_in_any_spelling_are_told_from_twins_in_large_bodies() -> None:
    pad = b'"p":"' + b"x" * (1 << 18) + b'",'
    body = b"{" + pad + rb'"a":"\u0022\\u0022\\\u0022\"","b\u0022":1'
    assert decode_object(body + b"}", 64, FORBIDDEN)[0]["a"] == '"\\u0022\\""'
    with pytest.raises(ClientError) as caught:
        decode_object(body + rb',"b\u0022":2}', 64, FORBIDDEN)
    assert caught.value.refusal.code == "duplicate_key"


def test_the_bound_on_structure_is_exact() -> None:
    pad = b'"' + b"x" * (1 << 18) + b'",'
    body = b'{"a":[' + pad + b"[]," * (MAX_MARKS - 3) + b"1]}"

    decode_object(body, 64, FORBIDDEN)
    with pytest.raises(ClientError, match=str(MAX_MARKS)):
        decode_object(body.replace(b"[]", b"[[]]", 1), 64, FORBIDDEN)


@pytest.mark.parametrize("name", sorted(FORBIDDEN))
def test_a_forbidden_key_is_found_at_any_nesting(name: str) -> None:
    spelled = f"\\u{ord(name[0]):04x}{name[1:]}"
    body = f'{{"messages":[{{"content":[{{"{spelled}":1}}]}}]}}'.encode()

    assert decode_object(body, 64, FORBIDDEN)[1] == name
    assert decode_object(f'{{"{name}":1}}'.encode(), 64, FORBIDDEN)[1] is None


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        (b'{"a":-0}', True), (b'{"a": -0.0 }', True), (b'{"a":[1,-0]}', True),
        (b'{"a":-0e5}', True), (b'{"a":-0.5}', False), (b'{"a":"on 2024-01-05: -0,"}', False),
        (b'{"a":":-0,"}', False), (b'{"a":1e-0}', False), (b'{"a":[1E-0,2]}', False),
        (b'{"a":-0.05}', False), (b'{"a":-0e}', False),
        (b'{"a":"\\\\","b":-0}', True), (b'{"a":0}', False), (b'{"a":"\\":-0,"}', False),
    ],
)  # fmt: skip
def test_a_negative_zero_is_told_from_text_that_looks_like_one(body: bytes, answer: bool) -> None:
    assert has_negative_zero(body) is answer


def test_taking_a_field_out_leaves_all_others_byte_for_byte() -> None:
    body = b'{"a": 1.50, "cache_salt": "x", "b": [1, {"c" : "\\u00e9"}]}'

    assert without(body, frozenset({"cache_salt"})) == b'{"a":1.50,"b":[1, {"c" : "\\u00e9"}]}'
