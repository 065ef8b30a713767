"""What the URL of a worker says: where it is, what it is called, where its events come from.

Looks at the words and resolves nothing. Read `wiring.py` for what is made of it.
"""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

from trunkline.config import is_printable_ascii


def worker_url_problem(url: str) -> str | None:
    """Why `url` cannot name a worker, None when it can. Looks at the words, resolves nothing."""
    if len(url) > 2_048:
        return "is longer than 2048 characters"
    if not is_printable_ascii(url):
        return (
            "holds a space, a control character or one beyond ASCII; "
            "write hosts as xn--... and paths with %XX"
        )
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return f"is no URL ({error})"
    if parts.scheme not in ("http", "https"):
        return "does not begin with http:// or https://"
    if port == 0:
        return "has port 0"
    return _host_problem(parts) or _rest_problem(parts)


def _host_problem(parts: SplitResult) -> str | None:
    if not parts.hostname:
        return "names no host"
    if not all(0 < len(label) <= 63 for label in parts.hostname.removesuffix(".").split(".")):
        return "has a host with an empty label or one longer than 63 characters"
    if parts.username is not None or parts.password is not None:
        return "holds a user or password; give the key as the worker's api_key"
    return None


def _rest_problem(parts: SplitResult) -> str | None:
    if parts.query:
        return "has a query"
    if "@" in parts.path:
        return "has an @ in its path, which names the ranks of a worker"
    names = [word.partition("=")[0] for word in parts.fragment.split("&") if word]
    is_known = not set(names) - {"events", "replay"} and len(set(names)) == len(names)
    if not names or (is_known and "events" in names):
        return None
    return "has a fragment other than #events=tcp://HOST:PORT or ...&replay=tcp://HOST:PORT"


def worker_event_endpoints(url: str) -> dict[str, str]:
    """What a good URL says behind `#`: `events` and perhaps `replay`; empty where it says none."""
    fragment = urlsplit(url).fragment
    return {
        name: endpoint
        for name, _, endpoint in (word.partition("=") for word in fragment.split("&") if word)
    }


def worker_name(url: str) -> str:
    """The one name of the worker at a good URL: `host:port`, and its base path where it has one."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return shown + parts.path.rstrip("/")
