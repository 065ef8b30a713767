"""All engines of the fleet, as the admin port asks them: their own metrics, and what they are.

Must never: forward a worker's key, or wait for one that does not answer. Read
`gateway/admin_engines.py` for who asks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from trunkline.control.fleets import Members
from trunkline.control.views import WorkerSpec
from trunkline.core.records import WorkerId
from trunkline.errors import ConfigError, GatewayError
from trunkline.gateway.admin_engines import Amendment
from trunkline.gateway.backend import Refused, WorkerJob
from trunkline.ports.worker import Fetch
from trunkline.worker_url import worker_name, worker_url_problem
from trunkline.written import is_printable_ascii

PAGE_MS = 2_000.0
MAX_ASKED_AT_ONCE = 32


class FleetEngines:
    """The `Engines` of a gateway."""

    def __init__(self, members: Members, *, fetch: Fetch, hide: Callable[[str], None]) -> None:
        """`hide` keeps a key out of the logs."""
        self._members = members
        self._fetch = fetch
        self._hide = hide
        self._asking = asyncio.Semaphore(MAX_ASKED_AT_ONCE)

    async def pages(self) -> Sequence[tuple[WorkerId, bytes]]:
        names = [view.name for view in self._members.views()]
        pages = await asyncio.gather(*map(self._page, names))
        return [(WorkerId(name), page) for name, page in zip(names, pages, strict=True) if page]

    async def _page(self, name: str) -> bytes:
        async with self._asking:
            spec = self._members.spec(name)
            if spec is None:  # it left meanwhile
                return b""
            try:
                status, page = await self._fetch(
                    spec.endpoint, "GET", "/metrics", timeout_ms=PAGE_MS
                )
            except GatewayError:
                return b""
            return page if status == 200 else b""

    async def amend(self, worker: WorkerId, amendment: Amendment) -> WorkerJob | Refused | None:
        url = worker if "://" in worker else f"http://{worker}"
        name = worker if worker_url_problem(url) else worker_name(url)
        spec = self._members.spec(name)
        if spec is None:
            return None
        try:
            self._members.add(amended(spec, amendment))
        except ConfigError as error:
            return Refused(status=400, code="bad_worker", message=str(error))
        self._hide(amendment.api_key or "")
        return WorkerJob(worker=WorkerId(name), state="joining")


def amended(spec: WorkerSpec, amendment: Amendment) -> WorkerSpec:
    """The worker with another key, labels or model. Raises ConfigError."""
    key, labels = amendment.api_key, amendment.labels
    if key is not None:
        if not is_printable_ascii(key):
            raise ConfigError("its api_key holds a character that no header can carry")
        spec = replace(spec, endpoint=replace(spec.endpoint, api_key=key))
    if labels is not None:
        spec = replace(spec, labels=_sorted(labels))
    if amendment.model_id is not None:
        spec = replace(spec, model_id=amendment.model_id)
    return spec


def _sorted(labels: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(labels.items()))
