"""The dashboard's page and what it is made of: the same bytes for everybody, and no data in them.

Served without a key, as a browser asks for them before anybody can give it one; what they show they
ask for with it. Nothing on the page comes from elsewhere, and no script or style stands inside it,
which the headers have the browser enforce. Must never: hold anything of this gateway but whether it
wants a key. Read `dashboard.py` for the data.
"""

from __future__ import annotations

from pathlib import Path

from starlette.responses import Response

from trunkline.gateway.listener import DASHBOARD, json_response

FOLDER = Path(__file__).resolve().parents[1] / "dashboard"
DOOR = f"{DASHBOARD}/door"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


class Pages:
    """Read once, when the port opens."""

    def __init__(self, *, wants_key: bool) -> None:
        self._wants_key = wants_key
        self._files = {
            f"{DASHBOARD}/{path.name}": (path.read_bytes(), _TYPES[path.suffix])
            for path in sorted(FOLDER.iterdir())
            if path.suffix in _TYPES
        }
        self._files[DASHBOARD] = self._files.pop(f"{DASHBOARD}/index.html")

    def paths(self) -> tuple[str, ...]:
        """All that is open to everybody."""
        return (*self._files, "/", f"{DASHBOARD}/", DOOR)

    def answer(self, path: str) -> Response | None:
        """None for a path that is none of these."""
        if path == DOOR:
            return json_response({"key": self._wants_key})
        if path == "/":
            # What people type. Not for good: nobody's browser is to remember it of this address.
            return Response(status_code=307, headers={"location": DASHBOARD[1:]} | _HEADERS)
        if path == f"{DASHBOARD}/":
            # Of itself a browser would look for the page's parts one level too deep.
            return Response(status_code=308, headers={"location": f"..{DASHBOARD}"} | _HEADERS)
        found = self._files.get(path)
        return None if found is None else Response(found[0], headers=_HEADERS, media_type=found[1])
