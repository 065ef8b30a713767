"""Questions about what somebody wrote: a name that was meant, an address, what fits into a header.

Must never resolve or read anything. Read `config.py` and `worker_url.py` for who asks.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Address, ip_address


def nearest(written: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant; None where none is really close.

    What all names of a kind share (dashes, brackets, our prefix) does not count as likeness.
    """
    from difflib import get_close_matches  # an error path: start-up does not pay for it

    bare = {_bare(name): name for name in known}
    near = get_close_matches(_bare(written), list(bare), n=1, cutoff=0.7)
    return bare[near[0]] if near else None


def _bare(name: str) -> str:
    return name.strip("-[]").lower().replace("-", "_").removeprefix("trunkline_")


def is_loopback(host: str) -> bool:
    """Whether a listener on `host` is reachable from this machine alone. Resolves nothing."""
    if host.lower() == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def require_pull_host(text: str) -> None:
    """Raises ValueError for what is no address to serve pulls on and to tell others as it is."""
    try:
        address = IPv4Address(text)
    except ValueError as error:
        raise ValueError(f"pull_host is {text!r}, needed is an IPv4 address") from error
    if address.is_unspecified:
        raise ValueError(f"pull_host is {text}, needed is the address that other workers reach")


def is_printable_ascii(text: str) -> bool:
    """Whether it can stand in a request line or a header as it is. A space can not."""
    return all("!" <= character <= "~" for character in text)


def host_port(host: str, port: int) -> str:
    """`HOST:PORT`, as URLs and headers have it: an IPv6 address stands in brackets."""
    is_bare = ":" in host and not host.startswith("[")
    return f"[{host}]:{port}" if is_bare else f"{host}:{port}"
