"""The half of a gateway that decides, put together: directory, fleet, cost, router, picker.

Nothing here listens, loads or looks at the world: `wiring.py` hands in what it loaded and drew.
Read `gateway/picker.py` for what asks it, `core/routing.py` for how it answers.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from trunkline.config import Config, RoutingConfig
from trunkline.control.discovery import FleetModel
from trunkline.core.cost import CostModel
from trunkline.core.directory import Directory
from trunkline.core.events import BlocksRemoved
from trunkline.core.feed import FeedState, WorkerFeed
from trunkline.core.fleet import Fleet
from trunkline.core.hearsay import Hearsay
from trunkline.core.identity import Epochs, ModelIdentity, Namespace, Scope, derive_namespace
from trunkline.core.links import LinkProfile, Links, gbit_per_s
from trunkline.core.profiles import Profile, profile_named
from trunkline.core.records import Tier, WorkerId
from trunkline.core.routing import Router
from trunkline.errors import ConfigError
from trunkline.gateway.namespaces import CacheQuota, Namespaces
from trunkline.gateway.picker import Accounts, FleetPicker
from trunkline.gateway.pulls import PullDesk
from trunkline.gateway.receipts import Receipts
from trunkline.gateway.tokenise import PromptTokens
from trunkline.ports.clock import Clock
from trunkline.ports.template import ChatTemplate
from trunkline.ports.tokenizer import Tokenizer
from trunkline.worker_url import worker_words


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What the world gives: read from files, or drawn."""

    tokenizer: Tokenizer
    template: ChatTemplate
    root_key: bytes = field(repr=False)
    directory_seed: int = field(repr=False)
    clock: Clock
    draw: Callable[[int], bytes]
    """`draw(n)`: n unguessable bytes."""
    quota_of: Callable[[str], CacheQuota | None]
    """What a tenant, by its id, may hold of a worker's cache."""
    transfer_key: bytes = field(default=b"", repr=False)
    """Empty where nothing is pulled."""
    is_model_given: bool = True
    """The settings name the model's folder. Else tokenizer and template are the simulated model's,
    and count only where the workers say that theirs are the same.
    """
    on_ignored: Callable[[WorkerId], None] = lambda _worker: None
    """A worker takes no notice of what it is told to pull."""
    also_named: tuple[str, ...] = ()
    """Further names that workers may list the model under."""
    books: Books | None = None
    """Where several models share theirs; None makes new ones."""
    doubt: str = ""
    """Why engines render this model's chats otherwise than by its template; empty for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """What is written down of decisions, whatever model they are for."""

    receipts: Receipts
    accounts: Accounts


def open_books(config: Config, draw: Callable[[int], bytes]) -> Books:
    routing = config.routing
    receipts = Receipts(kept=routing.decisions_kept, is_told=routing.decision_header, key=draw(32))
    return Books(receipts=receipts, accounts=Accounts())


NO_TOKENIZER = (
    "no tokenizer of its model is known: texts are told apart by their bytes, learned from our own "
    "routing, and its events are not used; remedy: --model-path"
)


class Parity:
    """Whether prompts are read here as the workers read them: as the settings say, else as the
    first worker does.
    """

    def __init__(self, prompts: PromptTokens, *, is_model_given: bool, doubt: str) -> None:
        self._prompts = prompts
        self._doubt = doubt
        self._is_settled = is_model_given
        self._is_model_given = is_model_given
        prompts.is_exact = not doubt

    def why_not(self, told_digest: str) -> str:
        """Asked as a worker joins, with the digest of the tokenizer that it says it has: why its
        blocks are not those that we have keys of; empty where they are.
        """
        if self._doubt or self._is_model_given:
            return self._doubt
        is_same = told_digest == self._prompts.tokenizer_digest
        if not self._is_settled:
            self._is_settled = True
            if not is_same:
                self._prompts.read_text()
        return "" if is_same and not self._prompts.is_text else NO_TOKENIZER


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """What decides, and what it is asked through."""

    directory: Directory
    fleet: Fleet
    prompts: PromptTokens
    namespaces: Namespaces
    picker: FleetPicker
    model: FleetModel
    parity: Parity
    identity: Callable[[int], ModelIdentity]
    """The served model's, for workers of a block size."""
    feeds: dict[WorkerId, WorkerFeed] = field(default_factory=dict[WorkerId, WorkerFeed])
    """What follows the events of each worker; of one that left, until another comes."""

    def follow(self, feed: WorkerFeed) -> WorkerFeed:
        for worker in [w for w, one in self.feeds.items() if one.state is FeedState.ENDED]:
            del self.feeds[worker]
        self.feeds[feed.worker] = feed
        return feed

    def block_tokens(self, worker: WorkerId) -> int | None:
        """Of a worker in the fleet."""
        state = self.fleet.get(worker)
        return None if state is None else state.block_tokens

    def with_hearsay(self) -> Hearsay:
        """From here on choices are told to other gateways, and theirs are heard."""

        def ttl_ms(worker: WorkerId) -> float:
            target = self.picker.target(worker)
            return 0.0 if target is None else target.predicted_ttl_ms

        self.picker.hearsay = Hearsay(self.directory, ttl_ms)
        return self.picker.hearsay


def assemble(config: Config, given: Given) -> Core:
    """An empty core: no worker is in it yet. Raises ConfigError for a profile that is unknown."""
    routing, model = config.routing, config.model
    has_p2p = any("p2p" in worker_words(url) for url in config.worker_urls)
    links = _links(routing) if given.transfer_key or has_p2p else None
    cost = _cost(routing, links)
    directory = Directory(max_blocks=config.directory.max_blocks, seed=given.directory_seed)
    served = FleetModel(model.served_model_name, given.also_named)
    books = given.books or open_books(config, given.draw)
    fleet = Fleet(virtual_nodes=routing.virtual_nodes, now=given.clock.now())
    prompts = PromptTokens(given.tokenizer, given.template, max_tokens=model.max_model_len)
    identity = partial(_identity, served, prompts)
    namespaces = _namespaces(directory, identity, given)
    router = Router(
        fleet=fleet,
        cost=cost,
        policy=routing.policy,
        rng=random.Random(routing.seed),
        max_copies=routing.max_copies,
    )
    picker = FleetPicker(
        fleet=fleet,
        directory=directory,
        router=router,
        prompts=prompts,
        namespaces=namespaces,
        clock=given.clock,
        receipts=books.receipts,
        desk=None if links is None else _desk(links, directory, given),
    )
    picker.accounts = books.accounts
    return Core(
        directory=directory,
        fleet=fleet,
        prompts=prompts,
        namespaces=namespaces,
        picker=picker,
        model=served,
        identity=identity,
        parity=Parity(prompts, is_model_given=given.is_model_given, doubt=given.doubt),
    )


def _profile(routing: RoutingConfig) -> Profile:
    try:
        return profile_named(routing.profile)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _cost(routing: RoutingConfig, links: Links | None) -> CostModel:
    return CostModel(
        _profile(routing),
        churn_weight=routing.churn_weight,
        time_scale=routing.time_scale,
        links=links,
    )


def _links(routing: RoutingConfig) -> Links:
    plain, scale = LinkProfile(), routing.time_scale
    profile = LinkProfile(
        setup_ms=plain.setup_ms * scale, bytes_per_ms=gbit_per_s(routing.link_gbit) / scale
    )
    return Links(profile, bytes_per_token=_profile(routing).kv_bytes_per_token)


def _desk(links: Links, directory: Directory, given: Given) -> PullDesk:
    def missing(worker: WorkerId, name: bytes) -> None:
        """Workers lend from host memory; their events call a block by the low half of its key."""
        if directory.knows(worker):
            low = array("Q", [int.from_bytes(name[-8:], "big")])
            directory.removed(worker, BlocksRemoved(hashes=low, tier=Tier.HOST))

    return PullDesk(
        links,
        transfer_key=given.transfer_key,
        clock=given.clock,
        draw=given.draw,
        on_missing=missing,
        on_ignored=given.on_ignored,
    )


def _namespaces(
    directory: Directory, identity: Callable[[int], ModelIdentity], given: Given
) -> Namespaces:
    """Namespaces of the served model, each known to the directory before anything is under it."""

    def derive(scope: Scope, epochs: Epochs, block_tokens: int, adapter: str) -> Namespace:
        model = replace(identity(block_tokens), adapter_digest=adapter)
        return derive_namespace(given.root_key, scope, model, epochs)

    return Namespaces(derive, directory, draw=given.draw, quota_of=given.quota_of)


def _identity(served: FleetModel, prompts: PromptTokens, block_tokens: int) -> ModelIdentity:
    return ModelIdentity(
        model_id=served.name or "unnamed",  # named before any block of it is: a worker joined
        block_tokens=block_tokens,
        tokenizer_digest=prompts.tokenizer_digest,
        template_digest=prompts.template_digest,
    )
