"""A relay for heartbeats: it hands them on to an admin port, and counts those that were taken."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import httpx


@dataclass(slots=True)
class Relay:
    """What it counted so far."""

    url: str = ""
    target: str = ""
    """Where heartbeats go; nowhere yet while it is empty."""
    taken_count: int = 0

    def hand_on(self, body: bytes) -> int:
        """The status that the sender is told."""
        if not self.target:
            return 503
        status = httpx.post(self.target, content=body).status_code
        self.taken_count += status == 200
        return status


@contextlib.contextmanager
def relaying() -> Iterator[Relay]:
    relay = Relay()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            status = relay.hand_on(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002  the library's

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        relay.url = f"http://127.0.0.1:{server.server_port}/heartbeat"
        threading.Thread(target=server.serve_forever, args=(0.05,)).start()
        try:
            yield relay
        finally:
            server.shutdown()
