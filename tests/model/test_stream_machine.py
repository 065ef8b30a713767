"""A stream that dies at any byte, any number of times, is the stream that nothing happened to.

The real relay, journal, resumption and continuation, between an engine and a client of a few lines
each: every seam may lie inside a chunk, inside a character, or inside a stop text.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stream_model import BYTES, PROMPT, Answer, Engine, heard
from trunkline.gateway import resumption
from trunkline.gateway.continuation import Continuation
from trunkline.gateway.contracts import InferenceRequest, Route
from trunkline.gateway.framing import ChunkReader
from trunkline.gateway.head import AnswerHead
from trunkline.gateway.journal import read_journal
from trunkline.gateway.relay import Relay
from trunkline.gateway.resumption import resume
from trunkline.gateway.seam import Voice

HEAD = AnswerHead(
    status=200, reason=b"OK", passed=b"", content_length=None, is_chunked=True, keeps_alive=True,
    is_event_stream=True,
)  # fmt: skip
MOST_BYTES = 1 << 20
TEXTS = st.text("abé\u4e2d\U0001f600", max_size=12)
STOPS = st.lists(st.text("abé\u4e2d", min_size=1, max_size=3), max_size=2)
DEATHS = st.lists(st.integers(0, 5_000), max_size=4)
"""Each where a stream breaks off, in bytes of the body."""


class Client:
    def __init__(self) -> None:
        self.body = b""

    def write(self, data: bytes) -> None:
        self.body += data

    def events(self) -> bytes:
        """Of a message that ended as it should."""
        reader = ChunkReader(takes_trailers=False, collects=True)
        assert reader.feed(self.body) == len(self.body), "the message does not end where it ends"
        return b"".join(reader.pieces or [])


def asked(body: dict[str, Any]) -> InferenceRequest:
    is_chat = "messages" in body
    return InferenceRequest(
        request_id="r",
        route=Route.CHAT if is_chat else Route.COMPLETION,
        method="POST",
        path="/v1/chat/completions" if is_chat else "/v1/completions",
        body=json.dumps(body).encode(),
        prompt=array("I", list(PROMPT)),
        max_tokens=body["max_tokens"],
        is_stream=True,
    )


def told(text: str, body: dict[str, Any], deaths: Sequence[int], pieces: int) -> Answer:
    """What a client is told; where a worker dies, the next one is asked. Without ids and another
    worker, no text tells of all tokens that there were: then they are not counted here.
    """
    client, request = Client(), asked(body)
    passage: Relay | Continuation = Relay(
        client, HEAD, takes_chunks=True, most_kept_bytes=MOST_BYTES
    )
    now = request
    for life, death in enumerate([*deaths, 1 << 30]):
        stream = Engine(text=text, name=f"engine {life}").stream(json.loads(now.body))
        for start in range(0, min(death, len(stream)), pieces):
            if passage.pass_on(stream[start : min(start + pieces, death)]):
                return heard(client.events())
        assert passage.forwarded is not None
        seam = resume(request, read_journal(passage.forwarded), BYTES, life + 1)
        passage = Continuation(client, seam, passage, most_kept_bytes=MOST_BYTES)
        if seam.request is None:
            passage.finish()
            answer = heard(client.events())
            return answer if body.get("return_token_ids") else replace(answer, tokens=-1)
        now = seam.request
    raise AssertionError("the last engine does not die")


BODIES = st.fixed_dictionaries(
    {
        "stream": st.just(True),
        "max_tokens": st.integers(1, 40),
        "stream_options": st.just({"include_usage": True}),
        "return_token_ids": st.booleans(),
        "stop": STOPS,
        "include_stop_str_in_output": st.booleans(),
    }
)


@settings(max_examples=600, deadline=None)
@given(TEXTS, BODIES, st.booleans(), DEATHS, st.integers(1, 300))
def test_a_stream_that_breaks_anywhere_is_told_as_if_it_had_not(
    text: str, body: dict[str, Any], is_chat: bool, deaths: list[int], pieces: int
) -> None:
    body |= {"messages": []} if is_chat else {"prompt": PROMPT.decode()}
    got = told(text, body, deaths, pieces)
    right = Engine(text=text, name="engine").answer(body)
    assert got == (right if got.tokens >= 0 else replace(right, tokens=-1))


# -- each of these breaks it -----------------------------------------------------------------------

CUT_CHARACTER = ("\U0001f600ab", {"return_token_ids": True, "stop": []})
CUT_STOP = ("a\u4e2dbaab", {"return_token_ids": True, "stop": ["\u4e2db"]})
SHOWN_STOP = ("aaabaa", {"stop": ["ab"], "include_stop_str_in_output": True})


def differs(text: str, more: dict[str, Any]) -> bool:
    """Whether any single death, at any byte, shows."""
    body: dict[str, Any] = {
        "stream": True, "max_tokens": 40, "stream_options": {"include_usage": True},
        "prompt": PROMPT.decode(), **more,
    }  # fmt: skip
    engine = Engine(text=text, name="engine")
    right, length = engine.answer(body), len(engine.stream(body))
    for death in range(length):
        try:
            got: Answer | None = told(text, body, [death], 64)
        except AssertionError:
            got = None
        if got is None or replace(got, tokens=0) != replace(right, tokens=0):
            return True
    return False


@pytest.mark.parametrize("case", [CUT_CHARACTER, CUT_STOP, SHOWN_STOP])
def test_no_single_death_shows(case: tuple[str, dict[str, Any]]) -> None:
    assert not differs(*case)


def test_without_the_text_that_was_held_back_it_would(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets(*, withheld: str = "", **parts: Any) -> Voice:
        return Voice(**parts)

    monkeypatch.setattr(resumption, "Voice", forgets)
    assert differs(*CUT_STOP)


def test_without_the_characters_that_were_cut_it_would(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets(*, detokeniser: Any, **parts: Any) -> Voice:
        return Voice(detokeniser=None, **parts)

    monkeypatch.setattr(resumption, "Voice", forgets)
    assert differs(*CUT_CHARACTER)


def test_without_the_stop_texts_in_front_of_the_seam_it_would(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forgets(*, stops: Any, **parts: Any) -> Voice:
        return Voice(stops=None, **parts)

    monkeypatch.setattr(resumption, "Voice", forgets)
    assert differs(*SHOWN_STOP)
