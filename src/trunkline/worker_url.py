"""What the URL of a worker says: where it is, what it is called, and what stands beside it.

Looks at the words and resolves nothing. Read `wiring.py` for what is made of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import ip_address, ip_network
from urllib.parse import SplitResult, urlsplit

from trunkline.written import host_port, is_printable_ascii

_WORDS = {"events", "replay", "agent", "p2p"}
_FRAGMENT = (
    "#events=tcp://HOST:PORT, &replay=tcp://HOST:PORT, &agent=http://HOST:PORT or &p2p=HOST:PORT"
)
"""`agent`: where a connector inside the engine takes leases. `p2p`: where the engine's own tier
lends."""
_MAX_SHOWN = 200


_METADATA = frozenset(map(ip_address, ("100.100.100.200", "192.0.0.192", "fd00:ec2::254")))
"""Where clouds tell machines their secrets, beside 169.254.169.254, which is link-local."""


_SECRET = re.compile(r"(?<=//)[^/?#]*(?=@)|(?<=\?)[^#]*")
"""Where a URL may hold one: the user's place, and a query."""


def without_secrets(url: str) -> str:
    """As an error may say it: without a user, a password or a query."""
    return _SECRET.sub("***", url[:_MAX_SHOWN])


def worker_url_problem(url: str, *, key: str = "the worker's api_key") -> str | None:
    """Why `url` cannot name a worker, None when it can. Looks at the words, resolves nothing. `key`
    says where what stands before an @ belongs.
    """
    if len(url) > 2_048:
        return "is longer than 2048 characters"
    if not is_printable_ascii(url):
        return (
            "holds a space, a control character or one beyond ASCII; "
            "write hosts as xn--... and paths with %XX"
        )
    bare = _bare_ipv6(url)
    if bare:
        return f"has an address of IPv6 without brackets; write {bare}"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return f"is no URL ({error})"
    if parts.scheme not in ("http", "https"):
        return "does not begin with http:// or https://"
    if port == 0:
        return "has port 0"
    if parts.username is not None or parts.password is not None:
        return f"holds a user or password; give the key as {key}"
    return _host_problem(parts) or _rest_problem(parts)


def _bare_ipv6(url: str) -> str:
    """How the URL is meant whose place is an address of IPv6 without brackets; else empty."""
    scheme, _, rest = url.rpartition("://")
    place, slash, path = rest.partition("/")
    if place.count(":") < 2 or "[" in place:
        return ""
    host, _, port = place.rpartition(":")
    try:
        ip_address(host)
    except ValueError:
        return ""
    return f"{scheme or 'http'}://[{host}]:{port}{slash}{path}"


def _host_problem(parts: SplitResult) -> str | None:
    if not parts.hostname:
        return "names no host"
    if not all(0 < len(label) <= 63 for label in parts.hostname.removesuffix(".").split(".")):
        return "has a host with an empty label or one longer than 63 characters"
    return None


def _rest_problem(parts: SplitResult) -> str | None:
    if parts.query:
        return "has a query"
    if "@" in parts.path:
        return "has an @ in its path, which names the ranks of a worker"
    return _fragment_problem(parts.fragment)


def _fragment_problem(fragment: str) -> str | None:
    said = worker_words(f"#{fragment}")
    count = sum(1 for word in fragment.split("&") if word)
    is_known = said.keys() <= _WORDS and len(said) == count
    if not is_known or ("replay" in said and "events" not in said):
        return f"has a fragment other than {_FRAGMENT}"
    agent = said.get("agent")
    if agent is not None:
        problem = "names a place in it" if "#" in agent else worker_url_problem(agent)
        if problem or urlsplit(agent).path not in ("", "/"):
            return f"has an agent at {without_secrets(agent)}, which {problem or 'has a path'}"
    if "p2p" in said and p2p_address(said["p2p"]) is None:
        return f"has p2p={said['p2p']}, which is no HOST:PORT"
    return None


def address_problem(host: str, is_found: bool, networks: Iterable[str]) -> str | None:
    """Why no worker may be at this address, None where it may, or is a name: what that stands for
    is not looked up here. `is_found`: nobody wrote the address, it was looked up.
    """
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return None
    mapped = getattr(address, "ipv4_mapped", None)
    address = mapped or address
    if address.is_link_local or address.is_multicast or address in _METADATA:
        return f"{host} is a link-local, metadata or multicast address, and no worker's"
    allowed = [ip_network(text) for text in networks]
    is_allowed = any(address in network for network in allowed)
    if allowed and not is_allowed:
        return f"{host} lies in none of --worker-networks"
    if is_found and not is_allowed and (address.is_loopback or address.is_unspecified):
        return f"{host} is this machine itself; name it in --worker-networks where that is meant"
    return None


def host_and_port(text: str) -> tuple[str, int] | None:
    """`HOST:PORT` in two, the host printable; None for anything else."""
    return p2p_address(text) if is_printable_ascii(text) else None


def p2p_address(text: str) -> tuple[str, int] | None:
    """`HOST:PORT` in two; None for anything else."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    is_port = port.isascii() and port.isdecimal() and len(port) <= 5
    if not host or not is_port or not 1 <= int(port) <= 65_535 or set(host) & set("/?#@ "):
        return None
    return host, int(port)


def worker_words(url: str) -> dict[str, str]:
    """What a good URL says behind `#`, by name; empty where it says nothing."""
    words = (word.partition("=") for word in urlsplit(url).fragment.split("&") if word)
    return {name: value for name, _, value in words}


def worker_name(url: str) -> str:
    """The one name of the worker at a good URL: `host:port`, and its base path where it has one."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return host_port(host, port) + parts.path.rstrip("/")
