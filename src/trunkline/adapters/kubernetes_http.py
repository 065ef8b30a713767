"""How the Kubernetes API is asked: one GET on a connection of its own, whole or line by line.

With the token and the authority of the pod's service account. The token is read anew each time, as
it is replaced while the pod lives. Read `kubernetes.py` for what is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import AsyncGenerator
from pathlib import Path

import httptools

from trunkline.errors import ConfigError
from trunkline.written import host_port

ANSWER_S = 15.0
"""To connect and begin to answer."""
MAX_ANSWER_BYTES = 32 << 20
MAX_LINE_BYTES = 8 << 20
_READ_BYTES = 64 << 10
_MAX_TOKEN_BYTES = 64 << 10


class ApiProblem(Exception):
    """The server cannot be asked, or did not answer well."""

    def __init__(self, text: str, *, status: int = 0) -> None:
        super().__init__(text)
        self.status = status
        """Of the answer; 0 where there was none."""


class KubernetesApi:
    """One API server."""

    def __init__(
        self, host: str, port: int, *, tls: ssl.SSLContext | None, token_file: Path | None
    ) -> None:
        self._host = host
        self._port = port
        self._tls = tls
        self._token_file = token_file

    async def get(self, path: str) -> bytes:
        """The body of a good answer. Raises ApiProblem."""
        body = bytearray()
        async with contextlib.aclosing(self._pieces(path, silent_s=ANSWER_S)) as pieces:
            async for piece in pieces:
                body += piece
                if len(body) > MAX_ANSWER_BYTES:
                    raise ApiProblem(f"{path} answered more than {MAX_ANSWER_BYTES} bytes")
        return bytes(body)

    async def lines(self, path: str, *, silent_s: float) -> AsyncGenerator[bytes]:
        """Each line of a good answer as it comes, until the server ends it. Raises ApiProblem."""
        rest = bytearray()
        async with contextlib.aclosing(self._pieces(path, silent_s=silent_s)) as pieces:
            async for piece in pieces:
                rest += piece
                if b"\n" in piece:  # a long line is not gone through for each of its pieces
                    *whole, rest = rest.split(b"\n")
                    for line in whole:
                        if line.strip():
                            yield bytes(line)
                if len(rest) > MAX_LINE_BYTES:
                    raise ApiProblem(f"a line of more than {MAX_LINE_BYTES} bytes")

    async def _pieces(self, path: str, *, silent_s: float) -> AsyncGenerator[bytes]:
        try:
            async with asyncio.timeout(ANSWER_S):
                request = await asyncio.to_thread(self._request, path)
                reader, writer = await asyncio.open_connection(
                    self._host, self._port, ssl=self._tls
                )
        except (OSError, TimeoutError) as error:
            raise ApiProblem(f"{self._host}:{self._port} is not reached: {_said(error)}") from error
        answer = _Answer()
        parser = httptools.HttpResponseParser(answer)
        try:
            writer.write(request)
            while not answer.is_complete:
                async with asyncio.timeout(silent_s if answer.is_begun else ANSWER_S):
                    data = await reader.read(_READ_BYTES)
                if not data:
                    break
                parser.feed_data(data)
                if answer.is_begun and (status := parser.get_status_code()) != 200:
                    raise ApiProblem(f"the API server answered {status}", status=status)
                for piece in answer.taken():
                    yield piece
            if not answer.is_begun:
                raise ApiProblem("the API server closed without an answer")
        except (OSError, TimeoutError, httptools.HttpParserError) as error:
            raise ApiProblem(f"the API server broke off: {_said(error)}") from error
        finally:
            writer.close()

    def _request(self, path: str) -> bytes:
        lines = [
            f"GET {path} HTTP/1.1",
            f"host: {host_port(self._host, self._port)}",
            "accept: application/json",
            "user-agent: trunkline",
            "connection: close",
        ]
        if self._token_file is not None:
            lines.append(f"authorization: Bearer {_token(self._token_file)}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("ascii")


class _Answer:
    """Callbacks of the parser."""

    def __init__(self) -> None:
        self.is_begun = False
        self.is_complete = False
        self._pieces: list[bytes] = []

    def on_headers_complete(self) -> None:
        self.is_begun = True

    def on_body(self, data: bytes) -> None:
        self._pieces.append(data)

    def on_message_complete(self) -> None:
        self.is_complete = True

    def taken(self) -> list[bytes]:
        pieces, self._pieces = self._pieces, []
        return pieces


def in_cluster(folder: Path) -> tuple[KubernetesApi, str]:
    """The server of the cluster that this process runs in, and the namespace of its pod. `folder`
    has what the service account is given. Raises ConfigError where this is no pod.
    """
    host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
    port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not port.isdecimal():
        raise ConfigError(
            "service_discovery: KUBERNETES_SERVICE_HOST is not set, so this is no pod of a "
            "cluster; --workers-file and --worker-dns work anywhere"
        )
    token_file = folder / "token"
    try:
        tls = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        namespace = (folder / "namespace").read_text("ascii").strip()
        _token(token_file)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(
            f"service_discovery: the service account in {folder} cannot be used: {_said(error)}"
        ) from error
    return KubernetesApi(host, int(port), tls=tls, token_file=token_file), namespace


def _token(path: Path) -> str:
    """Raises OSError for a file that is none, or holds no token."""
    with path.open("rb") as file:
        raw = file.read(_MAX_TOKEN_BYTES + 1).strip()
    if not raw or len(raw) > _MAX_TOKEN_BYTES or not all(33 <= byte <= 126 for byte in raw):
        raise OSError(f"{path} holds no token")
    return raw.decode("ascii")


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__
