"""Where a gateway's registry is kept: in its state folder alone, or in NATS with a copy there.

What the two have in common is the folder's lock, so that no second process works in it. Read
`authority.py` for what is opened on it, `control/gateways.py` for a gateway among others.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from trunkline.adapters.sqlite_store import SqliteStore, marked_rev
from trunkline.adapters.state_dir import StateDir, host_name
from trunkline.config import Config
from trunkline.control.registry import Registry
from trunkline.control.supervised import Supervised
from trunkline.errors import ConfigError
from trunkline.observe import EventLog
from trunkline.ports.clock import Clock
from trunkline.ports.store import Store, StoreBroken, StoreDown, StoreForked, StoreTaken

if TYPE_CHECKING:
    from trunkline.adapters.nats_board import NatsBoard
    from trunkline.adapters.nats_bucket import NatsBucket
    from trunkline.control.gateways import Gateways
    from trunkline.control.mirrored_store import MirroredStore
    from trunkline.control.relays import RelayParts
    from trunkline.control.sibling_words import Seal
    from trunkline.control.siblings import SiblingParts


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What everything of an authority is opened on, and closed with."""

    stack: AsyncExitStack
    tasks: Supervised
    config: Config
    clock: Clock
    state: StateDir
    root_key: bytes
    log: EventLog

    def begin(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Work until what was opened after now is closed; an error in it ends the authority."""
        self.stack.callback(self.tasks.begin(work, name).cancel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What there is where several gateways share the registry."""

    store: MirroredStore
    board: NatsBoard
    wire: NatsBucket


async def open_store(ground: Ground) -> tuple[Store, Shared | None]:
    """Raises ConfigError."""
    copy = await _open_file(ground)
    if not ground.config.control.control:
        await _require_newest(ground.state, copy)
        return copy, None
    shared = await _open_shared(ground, copy)
    return shared.store, shared


async def open_registry(ground: Ground, store: Store, acknowledged_rev: int) -> Registry:
    """Raises RegistryBroken, RegistryDown."""
    registry = await Registry.load(store, ground.clock, acknowledged_rev=acknowledged_rev)
    if registry.lost_revisions:
        ground.log.error(
            "registry.restored",
            lost_revisions=registry.lost_revisions,
            meaning="a backup: changes were forgotten, revoked keys and tenants may be back",
            remedy="compare with the audit log; all caches were made unreachable",
        )
    return registry


def gateways_at(
    ground: Ground, shared: Shared, registry: Registry, on_back: Callable[[], None]
) -> Gateways:
    """This gateway among those at the registry; not entered yet."""
    from trunkline import cli
    from trunkline.control.gateways import GatewayParts, Gateways
    from trunkline.control.load_sync import LoadSync
    from trunkline.control.sibling_words import Seal

    if shared.store.is_joined:
        shared.store.owes_mend = False  # loading did it
    nonce = secrets.token_hex(16)
    seal = Seal(ground.root_key)
    return Gateways(
        GatewayParts(
            siblings=partial(_siblings, ground, shared, registry, seal, nonce),
            relays=partial(_relays, ground, shared, seal, nonce),
            load=LoadSync(nonce, shared.wire, ground.clock),
            life=f"gateway/{host_name()}#{nonce}",
            nonce=nonce,
            registry=registry,
            store=shared.store,
            board=shared.board,
            clock=ground.clock,
            log=ground.log,
            version=cli.version(),
            on_back=on_back,
        )
    )


def _siblings(
    ground: Ground,
    shared: Shared,
    registry: Registry,
    seal: Seal,
    nonce: str,
    gateways: Gateways,
) -> SiblingParts:
    from trunkline.control.siblings import SiblingParts

    return SiblingParts(
        life=nonce,
        calls=shared.wire,
        seal=seal,
        clock=ground.clock,
        log=ground.log,
        begin=gateways.begin,
        others=gateways.others,
        table=lambda: registry.table,
        draw=secrets.token_bytes,
    )


def _relays(
    ground: Ground, shared: Shared, seal: Seal, nonce: str, gateways: Gateways
) -> RelayParts:
    from trunkline.adapters.aes_gcm import LifeCipher
    from trunkline.control.relays import RelayParts

    return RelayParts(
        life=nonce,
        calls=shared.wire,
        seal=seal,
        cipher=LifeCipher(ground.root_key, nonce),
        clock=ground.clock,
        log=ground.log,
        begin=gateways.begin,
        others=gateways.others,
        draw=secrets.token_bytes,
    )


async def _open_file(ground: Ground) -> SqliteStore:
    path = ground.state.registry_file
    try:
        store = await SqliteStore.open(path)
    except (StoreTaken, StoreDown, StoreBroken) as error:
        raise ConfigError(f"the registry {path}: {error}") from error
    ground.stack.push_async_callback(store.close)

    def told(why: str) -> None:
        if why:
            ground.log.warning(
                "registry.out", why=why, meaning="nothing is changed until it is back"
            )
        else:
            ground.log.warning("registry.back")

    ground.begin(store.keep(told), "registry store")
    return store


async def _require_newest(state: StateDir, own: SqliteStore) -> None:
    """Where several processes have run, one of them may have died before it had the last of what
    was acknowledged. Alone, it must not go by less.
    """
    head = await own.head()
    for folder in sorted(state.path.glob("p[0-9]*")):
        rev = marked_rev(folder / state.registry_file.name)
        if rev > head:
            raise ConfigError(
                f"{folder} has revision {rev} of the registry and {state.path} only {head}: start"
                " once with --processes 2 or more, which brings both to one, and end that in order"
            )


async def _open_shared(ground: Ground, copy: SqliteStore) -> Shared:
    try:
        from trunkline.adapters.nats_board import NatsBoard
        from trunkline.adapters.nats_bucket import NatsBucket, NatsPlace, checked_place
        from trunkline.adapters.nats_store import NatsStore
        from trunkline.control.mirrored_store import MirroredStore
    except ModuleNotFoundError as error:
        raise ConfigError(f"--control needs pip install 'trunkline[cluster]': {error}") from error

    control, state = ground.config.control, ground.state
    place = NatsPlace(
        servers=control.control,
        bucket=f"trunkline-{control.control_fleet}",
        replicas=control.control_replicas,
        credentials_file=control.control_credentials_file,
        ca_file=control.control_ca_file,
    )
    bucket = NatsBucket(checked_place(place))
    ground.stack.push_async_callback(bucket.close)
    alike = [("root", ground.root_key)]
    alike += [(name, state.secret(name)) for name in ("pepper", "session")]
    board = NatsBoard(bucket, alike)
    store = MirroredStore(NatsStore(bucket), copy)
    try:
        await board.join()
        await store.sync()
    except StoreForked as error:
        raise ConfigError(
            f"{error}: {state.registry_file} is of another fleet, or has changes that the fleet's"
            " lost data does not. To go on as the fleet has it, move it and its .high away"
        ) from error
    except StoreBroken as error:
        raise ConfigError(f"the registry in NATS: {error}") from error
    except StoreDown as error:
        if not await copy.head():
            raise ConfigError(f"{error}, and {state.registry_file} has no copy to go by") from error
        ground.log.warning(
            "control.out",
            why=str(error),
            meaning="started by the copy of the registry: no reuse and no changes until it is back",
        )
    return Shared(store=store, board=board, wire=bucket)
