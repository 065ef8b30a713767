"""What is made of the URL of a worker: where it listens, where its events come from, and what
stands beside it. Names the adapter that reads addresses of event streams. Read `worker_url.py` for
what a URL may say.
"""

from __future__ import annotations

import functools
import ssl
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from trunkline.config import Config
from trunkline.errors import ConfigError
from trunkline.worker_url import (
    address_problem,
    p2p_address,
    without_secrets,
    worker_name,
    worker_url_problem,
    worker_words,
)
from trunkline.written import is_printable_ascii

if TYPE_CHECKING:
    from trunkline.control.views import WorkerSpec
    from trunkline.ports.worker import Endpoint, EventSource
    from trunkline.ports.workers import NamedWorker


def spec_reader(config: Config) -> Callable[[str, str, Mapping[str, str]], WorkerSpec]:
    """`worker_spec`, and a refusal of what the settings leave no room for. Raises ConfigError where
    the file of authorities is none.
    """
    ca_file = config.discovery.worker_ca_file
    if ca_file:
        _believing(ca_file)

    def read(url: str, api_key: str, labels: Mapping[str, str]) -> WorkerSpec:
        spec = worker_spec(url, api_key, labels, ca_file)
        for endpoint in filter(None, (spec.endpoint, spec.agent)):
            problem = address_problem(endpoint.host, False, config.discovery.worker_networks)
            if problem:
                raise ConfigError(f"worker {url}: {problem}")
        if spec.p2p is not None and not config.is_one_tenant:
            raise ConfigError(
                f"worker {url}: p2p is for one tenant (--auth off): the engine's own tier asks"
                " nobody whose blocks they are"
            )
        return spec

    return read


def named_specs(
    config: Config, spec_of: Callable[[str, str, Mapping[str, str]], WorkerSpec]
) -> list[WorkerSpec]:
    """The workers that the settings name outright. Raises as `spec_of` does."""
    return [
        replace(spec_of(one.url, "", {}), model_id=one.model_id) for one in named_workers(config)
    ]


def named_workers(config: Config) -> list[NamedWorker]:
    """The same, as a source of workers names them."""
    from trunkline.ports.workers import NamedWorker

    workers = [NamedWorker(url=url) for url in config.worker_urls]
    workers += [
        NamedWorker(url=url, model_id=table.name)
        for table in config.models
        for url in table.worker_urls
    ]
    return workers


def worker_spec(url: str, api_key: str, labels: Mapping[str, str], ca_file: str = "") -> WorkerSpec:
    """A worker as its URL names it. Raises ConfigError for a URL that cannot be one."""
    from trunkline.control.views import WorkerSpec

    named = f"worker {without_secrets(url)}"
    problem = worker_url_problem(url)
    if problem:
        raise ConfigError(f"{named}: {problem}")
    if not is_printable_ascii(api_key):
        raise ConfigError(f"{named}: its api_key holds a character that no header can carry")
    endpoint = _endpoint(url, api_key, ca_file)
    words = worker_words(url)
    return WorkerSpec(
        name=worker_name(url),
        endpoint=endpoint,
        labels=tuple(sorted(labels.items())),
        event_sources=_named_sources(words, endpoint.host),
        # The engine's key is nothing to who listens on another port.
        agent=_endpoint(words["agent"], "", ca_file) if "agent" in words else None,
        p2p=p2p_address(words["p2p"]) if "p2p" in words else None,
    )


def _endpoint(url: str, api_key: str, ca_file: str) -> Endpoint:
    from trunkline.ports.worker import Endpoint

    parts = urlsplit(url)
    return Endpoint(
        host=parts.hostname or "",
        port=parts.port or (443 if parts.scheme == "https" else 80),
        host_header=worker_name(url).partition("/")[0],
        base_path=parts.path.rstrip("/"),
        tls=_believing(ca_file) if parts.scheme == "https" else None,
        api_key=api_key,
    )


@functools.cache
def _believing(ca_file: str) -> ssl.SSLContext:
    """One for all workers: reading the system's authorities takes 10 ms and more. Raises
    ConfigError.
    """
    context = ssl.create_default_context()
    if ca_file:
        try:
            context.load_verify_locations(ca_file)
        except ssl.SSLError as error:
            text = f"worker_ca_file {ca_file} holds no certificate in PEM"
            raise ConfigError(text) from error
        except OSError as error:
            raise ConfigError(f"worker_ca_file {ca_file}: {error.strerror}") from error
    return context


def _named_sources(named: Mapping[str, str], host: str) -> tuple[EventSource, ...]:
    """The event source that a worker's URL names behind `#`. Raises ConfigError for no endpoint."""
    from trunkline.adapters.event_sources import event_source

    if "events" not in named:
        return ()
    source = event_source(named["events"], worker_host=host)
    replay = event_source(named["replay"], worker_host=host).endpoint if "replay" in named else None
    # Read as an engine's own, but here it says where to connect to.
    return (replace(source, is_bound_by_us=False, replay_endpoint=replay),)
