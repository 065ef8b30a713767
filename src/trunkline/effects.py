"""What a change of live settings does to a gateway that runs.

Each part is handed its own section anew. Must never: fail half-way; what could be wrong with the
settings was checked before. Read `reload.py` for when.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trunkline import observe
from trunkline.config import Config
from trunkline.gateway.authenticate import StaticKey
from trunkline.gateway.listener import AdminKey
from trunkline.model_half import line_limits
from trunkline.settings import redacted, secret_values
from trunkline.worker_specs import named_workers

if TYPE_CHECKING:
    from trunkline.authority import Authority
    from trunkline.control.roster import Roster
    from trunkline.gateway.front import Front
    from trunkline.model_half import Half


class Running:
    """The parts of a gateway that take settings while they run."""

    def __init__(
        self,
        bound: Config,
        *,
        front: Front,
        halves: Sequence[Half],
        authority: Authority,
        named: Roster,
        hide: Callable[[str], None],
    ) -> None:
        """`bound`: the settings at the start, with the ports that it listens on. `named` is of the
        workers that the settings name.
        """
        self.admin_key = AdminKey(bound.listen.admin_api_key)
        self.halves = halves
        self.authority = authority
        self.config = bound
        """Those in force."""
        self.shown = redacted(bound)
        """What operators are shown of the settings."""
        self._front = front
        self._named = named
        self.hide = hide
        self._listen = bound.listen

    async def apply(self, config: Config) -> None:
        for secret in secret_values(config):
            self.hide(secret)
        level: Any = config.observe.log_level  # checked against its choices
        observe.set_level(level)
        self._front.take(
            listen=config.listen,
            limits=config.limits,
            upstream=config.upstream,
            retry=config.retry,
            tenant_paths=frozenset(config.auth.tenant_paths),
            is_debugging=config.observe.log_level == "debug",
        )
        tenants = self.authority.tenants
        for half in self.halves:
            half.parts.health = config.health
            if half.line is not None:
                half.line.take(line_limits(config, has_tenants=tenants is not None))
        if tenants is not None:
            tenants.allowance.take_default(config.limits.rate_limit_tokens_per_second or None)
        door = self.authority.authenticator
        if isinstance(door, StaticKey):
            door.take(config.listen.api_key)
        self.admin_key.text = config.listen.admin_api_key
        ports = {"port": self._listen.port, "admin_port": self._listen.admin_port}
        listen = replace(config.listen, **ports)
        self.config = replace(config, listen=listen)
        self.shown.update(redacted(self.config))
        self._named.take(named_workers(config))
