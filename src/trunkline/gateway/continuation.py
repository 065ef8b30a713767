"""The rest of a stream that another worker goes on with, in the words of the first one.

Takes the place of the relay behind a seam. Events are decoded and written anew: the answer keeps
its id, its time and its shape, whatever the second worker calls it; tokens that the client was told
of do not come again; usage counts the prompt once and all that was generated. An answer that is
given anew keeps its own events, under the id of the first one. Must never pass on what it does not
understand. Read `resumption.py` for where it comes from, `relay.py` for the usual way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from trunkline.core.sse import EventSplitter, EventTooLong
from trunkline.gateway.framing import ChunkReader
from trunkline.gateway.head import AnswerHead, BrokenAnswer
from trunkline.gateway.journal import DONE_MARK, ChoiceEvent, StreamEvent, as_ids
from trunkline.gateway.relay import Writer
from trunkline.gateway.resumption import Resumption

_MAX_EVENT_BYTES = 1 << 20
_LAST_CHUNK = b"0\r\n\r\n"
_encode = msgspec.json.encode
_events = msgspec.json.Decoder(StreamEvent)


class Passed(Protocol):
    """What the continuation needs to know of what went before; a relay or another continuation."""

    @property
    def bytes_out(self) -> int: ...
    @property
    def events_delivered(self) -> int: ...
    @property
    def forwarded(self) -> list[bytes] | None: ...


class Continuation:
    """See the module. The exchange calls it as it calls a relay."""

    is_chunked_out = True
    is_events = True
    ends_by_closing = False

    def __init__(
        self,
        client: Writer,
        seam: Resumption,
        before: Passed,
        *,
        most_kept_bytes: int,
        on_begun: Callable[[], None] = lambda: None,
    ) -> None:
        """`before` ended between two events; what it forwarded is kept on, up to the bound.
        `on_begun`: the first of it is about to go out.
        """
        self._client = client
        self._seam = seam
        self._reader = ChunkReader(takes_trailers=True, collects=True)
        self._splitter = EventSplitter(_MAX_EVENT_BYTES)
        self._said_tokens = seam.said_tokens
        self._id = ""
        self._is_announced = False
        self._on_begun: Callable[[], None] | None = on_begun
        """None when it was called."""
        self._has_finished = False
        self._is_cut = False
        """A stop text lay across the seam: the worker does not know that it was met."""
        self._has_told_usage = False
        self._cached_tokens: int | None = None
        self._kept = before.forwarded
        self._kept_bytes = sum(map(len, self._kept or ()))
        self._most_kept_bytes = most_kept_bytes
        self.events_delivered = before.events_delivered
        self.bytes_out = before.bytes_out
        self.leaves_link_clean = True
        """Whether the worker said all that it had to say."""

    @property
    def forwarded(self) -> list[bytes] | None:
        return self._kept

    @staticmethod
    def takes(head: AnswerHead) -> bool:
        """Whether a worker's answer is one that can go on here."""
        return head.status == 200 and head.is_chunked and head.is_event_stream

    def begin(self, head: bytes, body: bytes) -> bool:
        """The client has its head. As `pass_on`."""
        assert not head, "a second head in the middle of an answer"
        return self.pass_on(body) if body else False

    def pass_on(self, data: bytes) -> bool:
        """Pass on what one buffer says. True where the answer is whole. Raises BrokenAnswer,
        BrokenFraming.
        """
        reader = self._reader
        assert reader.pieces is not None, "a reader that does not collect"
        end = reader.feed(data)
        payload = b"".join(reader.pieces)
        reader.pieces.clear()
        if 0 <= end < len(data):
            raise BrokenAnswer("the worker sent bytes behind the end of its answer")
        out: list[bytes] = []
        try:
            for event in self._splitter.feed(payload):
                out += self._event(event)
                if self._is_cut:
                    self._write(out, is_end=True)
                    self.leaves_link_clean = end >= 0
                    return True
        except (EventTooLong, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BrokenAnswer("the worker's events cannot be read") from error
        self._write(out, is_end=end >= 0)
        return end >= 0

    def finish(self) -> None:
        """End the answer without a worker: nothing is left to be generated."""
        seam = self._seam
        text = seam.voice.says("", None, is_last=True)
        reason = "stop" if seam.voice.stopped_by else seam.finish_reason
        self._write(self._last_words(text, reason), is_end=True)

    def end_of_worker(self) -> bool:
        return False

    def break_off(self, event: bytes) -> bool:
        """End it with `event`."""
        framed = b"%x\r\n%b\r\n%b" % (len(event), event, _LAST_CHUNK)
        self._client.write(framed)
        self.bytes_out += len(framed)
        return True

    def cached_tokens(self) -> int | None:
        """What the worker's usage said of reuse, if anything."""
        return self._cached_tokens

    def usage(self) -> dict[str, int]:
        """As a relay's, of the whole answer: the prompt once, and all that was generated."""
        counts = {"prompt": self._seam.prompt_tokens, "completion": self._said_tokens}
        return counts if self._cached_tokens is None else {**counts, "cached": self._cached_tokens}

    # -- events ----------------------------------------------------------------------------------

    def _event(self, raw: bytes) -> list[bytes]:
        if raw == DONE_MARK:
            return [_framed(raw)] if self._seam.is_anew else [*self._usage({}), _framed(raw)]
        event = _events.decode(raw)
        self._id = self._id or event.id
        if event.id != self._id and event.error is None:
            raise BrokenAnswer("the worker's stream holds events of another answer")
        self._note_reuse(event.usage)
        if event.error is not None:
            return [_framed(raw)]
        if self._seam.is_anew:
            return self._anew(event, raw)
        told: list[bytes] = []
        for choice in event.choices:
            told += self._choice(choice)
        if event.usage and not event.choices:
            told += self._usage(event.usage)
        return told

    def _anew(self, event: StreamEvent, raw: bytes) -> list[bytes]:
        """An event of the whole answer, under the name that the client knows."""
        envelope = self._seam.envelope
        if not envelope:
            return [_framed(raw)]
        is_role = bool(event.choices) and all(
            choice.delta is not None
            and choice.delta.role
            and choice.delta.is_plain
            and not choice.said
            and not choice.finish_reason
            for choice in event.choices
        )
        if is_role:
            return []  # the client has that one
        whole: dict[str, Any] = msgspec.json.decode(raw)
        kept = {name: value for name, value in envelope.items() if name != "usage"}
        return [_framed(_encode(whole | kept))]

    def _choice(self, choice: ChoiceEvent) -> list[bytes]:
        if choice.index != 0 or self._has_finished:
            raise BrokenAnswer("the worker goes on behind the end of its answer")
        ids = None if choice.token_ids is None else as_ids(choice.token_ids)
        if choice.token_ids and ids is None:
            raise BrokenAnswer("the worker's token ids are none")
        voice, reason = self._seam.voice, choice.finish_reason
        text = voice.says(choice.said, ids, is_last=reason is not None)
        self._said_tokens += len(ids) if ids is not None else bool(choice.said)
        if voice.stopped_by and reason is None:
            self._is_cut = True
            return self._last_words(text, "stop", choice.token_ids)
        if not text and not ids and reason is None:
            return []
        self._has_finished = reason is not None
        return [self._chunk(text, choice.token_ids, reason, choice.stop_reason)]

    def _chunk(
        self, text: str, ids: list[int] | None, reason: str | None, stop_reason: object = None
    ) -> bytes:
        seam = self._seam
        choice: dict[str, Any] = {"index": 0}
        choice |= {"delta": {"content": text}} if seam.is_chat else {"text": text}
        choice |= {"logprobs": None, "finish_reason": reason}
        if reason is not None:
            choice["stop_reason"] = stop_reason
        if seam.tells_ids and ids is not None:
            choice["token_ids"] = ids
        return _framed(_encode({**seam.envelope, "choices": [choice]}))

    def _last_words(self, text: str, reason: str, ids: list[int] | None = None) -> list[bytes]:
        """All that is missing behind the last token that came from a worker."""
        seam, told = self._seam, list[bytes]()
        self._has_finished = True
        if seam.is_done:
            return told
        if reason:
            told.append(self._chunk(text, ids, reason, seam.voice.stopped_by or None))
        return [*told, *self._usage({}), _framed(DONE_MARK)]

    def _usage(self, usage: dict[str, Any]) -> list[bytes]:
        """The counts of the whole answer; `usage` is what the worker says of its part."""
        seam = self._seam
        if not seam.tells_usage or self._has_told_usage:
            return []
        self._has_told_usage = True
        prompt, generated = seam.prompt_tokens, usage.get("completion_tokens")
        said = self._said_tokens if generated is None else seam.said_tokens + generated
        cached = self._cached_tokens
        counts: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": said,
            "total_tokens": prompt + said,
            "prompt_tokens_details": None
            if cached is None
            else {"cached_tokens": min(cached, prompt)},
            "x_resumes": seam.count,
        }
        return [_framed(_encode({**seam.envelope, "choices": [], "usage": counts}))]

    def _note_reuse(self, usage: Any) -> None:  # any JSON
        match usage:
            case {"prompt_tokens_details": {"cached_tokens": int(cached)}} if cached >= 0:
                self._cached_tokens = cached
            case _:
                pass

    # -- out -------------------------------------------------------------------------------------

    def _write(self, events: list[bytes], *, is_end: bool) -> None:
        self.events_delivered += len(events)
        if events and not self._is_announced and not self._seam.is_anew:
            self._is_announced = True
            events = [b": resumed n=%d\n\n" % self._seam.said_tokens, *events]
        framed = b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events)
        out = framed + _LAST_CHUNK if is_end else framed
        if not out:
            return
        if (on_begun := self._on_begun) is not None:
            self._on_begun = None
            on_begun()
        self.bytes_out += len(out)
        self._keep(framed)
        self._client.write(out)

    def _keep(self, framed: bytes) -> None:
        self._kept_bytes += len(framed)
        if self._kept is not None and self._kept_bytes <= self._most_kept_bytes:
            self._kept.append(framed)
        else:
            self._kept = None


def _framed(data: bytes) -> bytes:
    return b"data: %b\n\n" % data.replace(b"\n", b"\ndata: ")
