"""What the command line knows of the admin port: where it is, with which key, and what it answered.

One request at a time, bounded in time and size. What went wrong becomes one sentence that names the
flag to turn. Must never: show the key, or take for an answer what another program says. Read
`tenant_answers.py` for who asks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, cast
from urllib.parse import urlencode, urlsplit

from trunkline.errors import ConfigError, GatewayError
from trunkline.leaf import read_secret
from trunkline.written import is_printable_ascii

DEFAULT_URL = "http://127.0.0.1:29000"
KEY_VARIABLE = "TRUNKLINE_ADMIN_API_KEY"
TIMEOUT_S = 60.0
"""A revocation takes 3.2 s at most; to verify a long audit log takes longer."""

MAX_ANSWER_BYTES = 64 << 20

Json = dict[str, Any]
"""An object as JSON has it."""


class AdminUnreachable(GatewayError):
    """No gateway answers where one was looked for."""

    code = "admin_unreachable"


class AdminRefused(GatewayError):
    """The gateway said no. `answered` is its status, `answer` its own words."""

    code = "admin_refused"

    def __init__(self, message: str, answered: int, answer: Json) -> None:
        super().__init__(message)
        self.answered = answered
        self.answer = answer


class AdminClient:
    """The admin port of one gateway."""

    def __init__(self, url: str, key: str, key_source: str = "--admin-key") -> None:
        """`key` may be `@FILE`; empty for none. `key_source` names where it came from. Raises
        ConfigError.
        """
        self.url = url.rstrip("/")
        try:
            parts = urlsplit(self.url)
            self._port = parts.port
        except ValueError as error:
            raise ConfigError(f"--admin-url {url} is no address: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--admin-url {url} does not begin with http:// or https://")
        if parts.path or parts.query or parts.fragment or parts.username is not None:
            raise ConfigError(f"--admin-url {url}: give scheme, host and port alone")
        self._host, self._is_tls = parts.hostname, parts.scheme == "https"
        self._key = read_secret(key[1:], "--admin-key") if key.startswith("@") else key
        self._key_source = key_source
        self.timeout_s = TIMEOUT_S
        if not is_printable_ascii(self._key):
            raise ConfigError("the admin key holds a character that no header can carry")

    def get(self, path: str, query: Mapping[str, object] | None = None) -> Json:
        given = {name: value for name, value in (query or {}).items() if value not in (None, "")}
        return self.ask("GET", f"{path}?{urlencode(given)}" if given else path)

    def text(self, path: str) -> str:
        """What is no JSON: a page of metrics. Raises AdminUnreachable, AdminRefused."""
        status, raw = self._exchange("GET", path, None)
        if status >= 400:
            return str(self.ask("GET", path))  # which words what the gateway says
        return raw.decode("utf-8", "replace")

    def ask(self, method: str, path: str, body: Mapping[str, object] | None = None) -> Json:
        """What the gateway answers. Raises AdminUnreachable, AdminRefused."""
        status, raw = self._exchange(method, path, body)
        try:
            answer = json.loads(raw)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise AdminUnreachable(
                f"what answers at {self.url} is no admin port of trunkline (status {status});"
                " name it with --admin-url"
            )
        found = cast("Json", answer)  # JSON's keys are text
        if status >= 400:
            raise self._refusal(status, found)
        return found

    def pages(self, path: str, name: str, query: Mapping[str, object]) -> Iterator[Json]:
        """All items of a list, page by page."""
        after = ""
        while True:
            page = self.get(path, {**query, "limit": 1_000, "after": after})
            yield from page[name]
            after = page["next"]
            if after is None:
                return

    def _exchange(
        self, method: str, path: str, body: Mapping[str, object] | None
    ) -> tuple[int, bytes]:
        import http.client  # not before it is needed: `--help` is cheap

        kind = http.client.HTTPSConnection if self._is_tls else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=self.timeout_s)
        headers = {"authorization": f"Bearer {self._key}"} if self._key else {}
        raw = b"" if body is None else json.dumps(body).encode()
        if body is not None:
            headers["content-type"] = "application/json"
        try:
            connection.request(method, path, raw or None, headers)
            answer = connection.getresponse()
            return answer.status, answer.read(MAX_ANSWER_BYTES)
        except TimeoutError as error:
            raise AdminUnreachable(
                f"{self.url} did not answer within {self.timeout_s:g} s"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise AdminUnreachable(
                f"no gateway answers at {self.url} ({why}): is `trunkline serve` running? Its"
                " admin port is named with --admin-url"
            ) from error
        finally:
            connection.close()

    def _refusal(self, status: int, answer: Json) -> GatewayError:
        error = answer.get("error")
        told: Json = cast("Json", error) if isinstance(error, dict) else {}
        if "request_id" in told:  # which only the other port's errors have
            return AdminUnreachable(
                f"{self.url} is the client port; name the admin port with --admin-url"
                f" ({DEFAULT_URL} unless `trunkline serve` was told another)"
            )
        message = str(told.get("message", "no reason was given"))
        if status == 401:
            message = self._which_key()
        elif status == 404 and told.get("code") == "not_found":
            message = "nothing of that name is known, or not to this key"
        return AdminRefused(message, status, answer)

    def _which_key(self) -> str:
        """What to give to whom a key is missing, or has a wrong one."""
        remedy = (
            "give the admin key that `trunkline serve` was started with (its --admin-api-key), or"
            f" an API key with a role, with --admin-key @FILE or in {KEY_VARIABLE}"
        )
        if not self._key:
            return f"{self.url} asks for a key: {remedy}"
        if self._key.startswith("pk_"):
            why = "it is an API key that is unknown, expired or revoked, or of what was revoked"
        else:
            why = "it is not its admin key"
        return f"{self.url} does not take this key (from {self._key_source}), {why}: {remedy}"
