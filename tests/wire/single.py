"""One simulated worker as a process, and what it is asked over HTTP and on its replay socket."""

from __future__ import annotations

import json
import subprocess
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
import zmq
from fleet import processes

from trunkline.core.simkv import answer_tokens

VOCAB = 4_096
PROMPT = list(range(1_000, 1_070))
WAIT_S = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A worker process that has said that it is ready."""

    process: subprocess.Popen[bytes]
    http: httpx.Client
    events: str
    replay: str

    def complete(self, prompt: list[int] | str, max_tokens: int = 8, **more: Any) -> Any:
        body = {"prompt": prompt, "max_tokens": max_tokens, "return_token_ids": True, **more}
        answer = self.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def metric(self, name: str) -> float:
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))


@contextmanager
def worker(*flags: str, profile: str = "tiny") -> Iterator[Running]:
    with processes() as started:
        process = started.worker("--profile", profile, *flags)
        ready = process.ready
        try:
            with httpx.Client(base_url=process.url, timeout=WAIT_S) as client:
                yield Running(
                    process=process.child,
                    http=client,
                    events=ready["events"],
                    replay=ready["replay"],
                )
        finally:
            process.kill()


def cached(answer: Any) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def ids(answer: Any) -> list[int]:
    return answer["choices"][0]["token_ids"]


def right(prompt: list[int], count: int = 8) -> list[int]:
    return answer_tokens(array("I", prompt), count, VOCAB).tolist()


def events_of(text: str) -> list[Any]:
    """The JSON of each server-sent event but the end mark, which must be there."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def replayed(endpoint: str, start: int = 0) -> list[tuple[int, Any]]:
    context = zmq.Context()
    try:
        socket = context.socket(zmq.DEALER)
        socket.linger = 0
        socket.rcvtimeo = WAIT_S * 1_000
        socket.connect(endpoint)
        socket.send_multipart([b"", start.to_bytes(8, "big")])
        batches: list[tuple[int, Any]] = []
        while True:
            _, _, number, payload = socket.recv_multipart()
            if number == b"\xff" * 8:
                return batches
            batches.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)))
    finally:
        context.destroy(linger=0)
