"""Where workers are learnt of, made of the settings: sources, and who holds them against the fleet.

Names the adapters that ask. Read `control/roster.py` for what is done with their answers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from ipaddress import ip_network
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trunkline.config_discovery import DiscoveryConfig
from trunkline.worker_url import address_problem, host_and_port

if TYPE_CHECKING:
    from trunkline.control.fleets import Members
    from trunkline.control.roster import Roster, SpecOf
    from trunkline.control.views import WorkerSpec
    from trunkline.ports.workers import NamedWorker, WorkerSource

_WORD = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_LABEL = re.compile(rf"(?:[a-z0-9](?:[a-z0-9.-]{{0,251}}[a-z0-9])?/)?{_WORD}=(?:{_WORD})?")
"""A label's name (perhaps behind a domain and `/`), `=`, and its value, as Kubernetes has them."""
_NAMESPACE = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")


def discovery_problems(discovery: DiscoveryConfig) -> dict[str, str | None]:
    """What is wrong with these settings, by name."""
    bad_dns = [name for name in discovery.worker_dns if host_and_port(name) is None]
    bad_networks = [text for text in discovery.worker_networks if not _is_network(text)]
    bad_labels = [text for text in discovery.selector if not _LABEL.fullmatch(text)]
    namespace = discovery.service_discovery_namespace
    is_selected = bool(discovery.selector)
    lone = "is given without --service-discovery"
    return {
        "worker_dns": f"{bad_dns[0]!r} is no HOST:PORT" if bad_dns else None,
        "worker_networks": f"{bad_networks[0]!r} is no network such as 10.0.0.0/8"
        if bad_networks
        else None,
        "selector": f"{bad_labels[0]!r} is no label such as app=engine; one a word"
        if bad_labels
        else (lone if is_selected and not discovery.service_discovery else None),
        "service_discovery": "needs --selector: without one every service would be taken"
        if discovery.service_discovery and not is_selected
        else None,
        "service_discovery_namespace": f"{namespace!r} is no name of a namespace"
        if namespace and not _NAMESPACE.fullmatch(namespace)
        else None,
    }


def worker_sources(discovery: DiscoveryConfig) -> list[WorkerSource]:
    """All that the settings name. Raises ConfigError for a file that is none or has a mistake, and
    for a cluster where there is none.
    """
    from trunkline.adapters.kubernetes import WorkersKubernetes
    from trunkline.adapters.kubernetes_http import in_cluster
    from trunkline.adapters.workers_dns import WorkersDns
    from trunkline.adapters.workers_file import WorkersFile

    sources: list[WorkerSource] = []
    if discovery.workers_file:
        file = WorkersFile(Path(discovery.workers_file))
        file.read()  # a mistake at start is better told there and then
        sources.append(file)
    for name in discovery.worker_dns:
        found = host_and_port(name)
        assert found is not None, "checked with the settings"
        sources.append(WorkersDns(*found, interval_s=discovery.worker_dns_interval_secs))
    if discovery.service_discovery:
        api, own_namespace = in_cluster(Path(discovery.service_account_dir))
        sources.append(
            WorkersKubernetes(
                api,
                namespace=discovery.service_discovery_namespace or own_namespace,
                selector=",".join(discovery.selector),
                port=discovery.service_discovery_port,
            )
        )
    return sources


def followed(
    sources: Sequence[WorkerSource],
    discovery: DiscoveryConfig,
    members: Members,
    spec_of: SpecOf,
    hide: Callable[[str], None],
) -> list[Coroutine[Any, Any, None]]:
    """What runs beside requests, so that the fleet is as the sources say. `hide` keeps a key out of
    the logs.
    """
    from trunkline import observe
    from trunkline.control.roster import Roster

    problem = partial(address_problem, networks=discovery.worker_networks)
    return [
        Roster(source, members, spec_of, address_problem=problem, hide=hide, log=observe.log).run()
        for source in sources
    ]


def named_roster(
    discovery: DiscoveryConfig,
    members: Members,
    spec_of: SpecOf,
    hide: Callable[[str], None],
    specs: Sequence[WorkerSpec],
) -> Roster:
    """Of the workers that the settings name outright: `specs` at first, others when these are read
    again.
    """
    from trunkline import observe
    from trunkline.control.roster import Roster

    problem = partial(address_problem, networks=discovery.worker_networks)
    roster = Roster(Named(), members, spec_of, address_problem=problem, hide=hide, log=observe.log)
    roster.adopt(specs)
    return roster


class Named:
    """The settings as a source of workers: it tells when it is read, and not by itself."""

    name = "settings"

    async def run(
        self, tell: Callable[[Sequence[NamedWorker]], None], on_trouble: Callable[[str], None]
    ) -> None:
        raise AssertionError("nobody follows the settings")


def _is_network(text: str) -> bool:
    try:
        ip_network(text)
    except ValueError:
        return False
    return True
