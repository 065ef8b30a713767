"""Text across a seam: stop texts and characters that lie on both sides, cut anywhere."""

from __future__ import annotations

from array import array
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from stream_model import BYTES
from trunkline.gateway.seam import Detokeniser, StopWatch, Voice

LETTERS = st.text("ab", max_size=30)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


def pieces(text: str, cuts: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in pairwise(edges)]


def first_stop(text: str, stops: list[str], behind: int) -> tuple[int, int, int] | None:
    """The one that is whole first, by trying every place: its end, its rank, its beginning."""
    found = [
        (at + len(stop), rank, at)
        for rank, stop in enumerate(stops)
        for at in range(len(text))
        if text.startswith(stop, at) and at + len(stop) > behind
    ]
    return min(found, default=None)


@given(LETTERS, st.integers(0, 30), STOPS, st.lists(st.integers(0, 30)), st.booleans())
def test_a_stop_text_is_found_wherever_it_lies_and_nothing_of_it_is_shown_before(
    text: str, shown: int, stops: list[str], cuts: list[int], is_included: bool
) -> None:
    shown = min(shown, len(text))
    watch = StopWatch(stops, text[:shown], is_included=is_included)
    parts = pieces(text[shown:], cuts)
    said = [watch.feed(part, is_last=index == len(parts) - 1) for index, part in enumerate(parts)]
    found = first_stop(text, stops, shown) if parts else None
    if found is None:
        assert "".join(said) == text[shown:]
        assert watch.found == ""
    else:
        end, rank, at = found
        assert "".join(said) == text[shown : end if is_included else max(at, shown)]
        assert watch.found == stops[rank]


@given(st.text(max_size=20), st.integers(0, 80), st.lists(st.integers(0, 80)), st.integers(0, 3))
def test_the_text_of_tokens_does_not_depend_on_where_a_stream_broke(
    text: str, seam: int, cuts: list[int], unseen: int
) -> None:
    """Tokens are bytes here, so that most seams lie inside a character; of what is whole in front
    of it, the client may lack some more.
    """
    ids = BYTES.encode(text, add_special_tokens=False)
    seam = min(seam, len(ids))
    detokeniser = Detokeniser(BYTES, ids[:seam])
    whole = detokeniser.text
    assert text.startswith(whole)
    delivered = whole[: max(0, len(whole) - unseen)]
    voice = Voice(withheld=whole[len(delivered) :], detokeniser=detokeniser, stops=None)
    edges = sorted({seam, len(ids), *(seam + cut % (len(ids) - seam + 1) for cut in cuts)})
    rest = [
        voice.says("", ids[start:end], is_last=end == len(ids)) for start, end in pairwise(edges)
    ]
    if rest:
        assert delivered + "".join(rest) == text
    for shown in rest:
        assert "\ufffd" not in shown or "\ufffd" in text


def test_bytes_that_never_become_a_character_hold_nothing_up_for_ever() -> None:
    broken = array("I", [0xC3, 0x28, 0x41, 0xFF, 0x42, 0x43])
    detokeniser = Detokeniser(BYTES, broken[:1])
    said = "".join(detokeniser.feed(broken[at : at + 1]) for at in range(1, len(broken)))
    assert said.endswith("BC")
    assert (
        not Detokeniser(BYTES, array("I", [0xFF] * 9)).feed(array("I", [0x41])).endswith("\ufffd")
    )
