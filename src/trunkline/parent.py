"""`trunkline serve --processes N`: N gateways behind one port and one admin port, as one command.

The parent serves no request. It holds the client port (each process listens on it by itself),
starts the processes, starts those again that end, passes signals on, and is the one admin port
(`parent_admin.py`). What the processes share they share as gateways of one fleet do: with tenants
the registry in NATS, that of `--control` or a nats-server of the parent's own; without, the root
key, and words of load from process to process. Must never: try again what never came up, or leave a
process behind. Read `seat.py` for the other side, adr/0011 for why it is so.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import sys
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from trunkline import observe
from trunkline.adapters.clock import SystemClock
from trunkline.adapters.nats_process import NatsProcess
from trunkline.adapters.process_wire import wire_pair
from trunkline.adapters.state_dir import StateDir
from trunkline.authority import state_path
from trunkline.child import LENGTH_BYTES
from trunkline.config import Config
from trunkline.gateway.listener import GRACE_S, bind_admin, serve_admin
from trunkline.gateway.shared_port import Address, addresses_of, hold, sockets_at
from trunkline.gateway.waiting_room import WaitingRoom
from trunkline.leaf import read_root_key
from trunkline.lifetime import DRAIN_MS, announce, stop_on_signals, taken_port_named
from trunkline.parent_admin import ParentAdmin, Post
from trunkline.parent_dashboard import ParentDashboard
from trunkline.ports.worker import Endpoint
from trunkline.reload import Again, Hangups, Reloader, merged
from trunkline.reload_record import ReloadRecord
from trunkline.seat import SERVE, SERVE_WHEN_READY, Handed
from trunkline.settings import secret_values
from trunkline.worker_specs import named_specs, spec_reader

PAUSE_S, MAX_PAUSE_S = 0.25, 30.0
"""Before a process is started again; doubled each time, until one lived for as long as the
longest.
"""
WATCH_S, HUNG_MS = 2.0, 30_000.0
"""Pause between two looks at a process, and how long it may take to answer one."""
START_S = 120.0
"""A process that has not said by then where it is asked is killed. The texts of a large model take
seconds, the registry may be waited for.
"""
END_S = DRAIN_MS / 1_000.0 + GRACE_S + 10.0
"""A process that was told to end and has not by then is killed."""
SHARED_SECRETS = ("root", "pepper", "session")


def serve_several(config: Config, again: Again | None = None) -> int:
    """Until a signal, or until a process cannot be started at all."""
    level: Any = config.observe.log_level
    shape: Any = config.observe.log_format
    redactor = observe.configure(
        level, shape, secrets=secret_values(config), folder=config.observe.log_dir
    )
    token = secrets.token_hex(16)
    redactor.add(token)
    return uvloop.run(_run(config, token, redactor, again))


async def _run(config: Config, token: str, redactor: observe.Redactor, again: Again | None) -> int:
    stop, hurry = asyncio.Event(), asyncio.Event()
    stop_on_signals(stop, hurry)
    hangups = Hangups()
    listen = config.listen
    async with AsyncExitStack() as stack:
        with taken_port_named("--port", listen.host, listen.port):
            held = hold(listen.host, listen.port)
        for one in held:
            stack.callback(one.close)
        with taken_port_named("--admin-port", listen.admin_host, listen.admin_port):
            admin = bind_admin(listen)
        stack.callback(admin.close)
        ports = {"port": held[0].getsockname()[1], "admin_port": admin.getsockname()[1]}
        shown = replace(config, listen=replace(listen, **ports))
        parts = Shared(config=shown, shown=shown, addresses=addresses_of(held), token=token)
        nats: NatsProcess | None = None
        if config.is_one_tenant:
            parts.root_key = read_root_key(config.model.root_key_file) or secrets.token_bytes(32)
            parts.wires = [wire_pair() for _ in range(listen.processes)]
        elif not config.control.control:
            state = StateDir(state_path(config.auth.state_dir))
            nats = NatsProcess(state.path / "nats", secrets.token_bytes, observe.log)
            stack.push_async_callback(nats.stop)
            await nats.start()
            redactor.add(nats.password)
            control = replace(config.control, control=(nats.url,), control_replicas=1)
            parts.config = replace(shown, control=control)
        parent = Parent(parts, admin)
        reloader = Reloader(
            config,
            again=again,
            check=partial(named_specs, spec_of=spec_reader(config)),
            apply=partial(parent.apply, redactor=redactor),
            log=observe.log,
        )
        return await parent.run(stop, hurry, nats, [parent.heed(hangups, reloader)])


@dataclass(slots=True, kw_only=True)
class Shared:
    """What all processes are told."""

    config: Config
    shown: Config
    addresses: Sequence[Address]
    token: str = field(repr=False)
    root_key: bytes = field(default=b"", repr=False)
    wires: Sequence[tuple[socket.socket, socket.socket]] = ()
    """An ear and a mouth for each process; none where NATS carries their words."""

    def for_process(self, number: int) -> Handed:
        config = self.config
        if not config.is_one_tenant and number:
            place = state_path(config.auth.state_dir) / f"p{number}"
            copies = config.auth.audit_copy_dir
            copy_dir = str(Path(copies) / f"p{number}") if copies else ""
            auth = replace(config.auth, state_dir=str(place), audit_copy_dir=copy_dir)
            config = replace(config, auth=auth)
        mouths = [mouth.fileno() for n, (_, mouth) in enumerate(self.wires) if n != number]
        return Handed(
            number=number,
            config=config,
            shown=self.shown,
            addresses=list(self.addresses),
            root_key=self.root_key,
            token=self.token,
            ear=self.wires[number][0].fileno() if self.wires else -1,
            mouths=mouths,
        )


@dataclass(slots=True, kw_only=True)
class _Slot:
    """One of the processes, whichever life it is in."""

    number: int
    process: asyncio.subprocess.Process | None = None
    post: Post | None = None
    """Where it is asked; None while it is not up."""
    up: asyncio.Event = field(default_factory=asyncio.Event)
    """It was up once."""
    serving: asyncio.Event = field(default_factory=asyncio.Event)
    """It takes connections now."""
    restarts: int = 0
    code: int = 0
    """Of its last life that ended; below 0 the signal."""


class Parent:
    """See the module. `run` it once."""

    def __init__(self, parts: Shared, admin: socket.socket) -> None:
        self._parts = parts
        self._admin_socket = admin
        self._slots = [_Slot(number=n) for n in range(parts.config.listen.processes)]
        self._room = WaitingRoom(parts.shown.listen)
        self._settling = asyncio.Lock()
        self._may_serve = asyncio.Event()
        self._failed = asyncio.Event()
        """A process ended before all were up: there is nothing to try again."""
        self._is_stopping = False
        self._admin = ParentAdmin(
            self._posts, parts.token, parts.shown.listen.admin_api_key, self._metrics
        )
        wants_key = bool(parts.shown.listen.admin_api_key)
        self._shown = ParentDashboard(self._admin, wants_key=wants_key)

    async def run(
        self,
        stop: asyncio.Event,
        again: asyncio.Event,
        nats: NatsProcess | None,
        works: Sequence[Coroutine[Any, Any, None]],
    ) -> int:
        """`works` run beside it."""
        keepers: list[asyncio.Task[None]] = []
        beside = [asyncio.create_task(work) for work in works]
        try:
            await self._settle_room()
            if nats is not None:
                beside.append(asyncio.create_task(nats.keep()))
            starting = asyncio.create_task(self._start(keepers))
            beside.append(starting)
            await _any_of(starting, stop, self._failed)
            if starting.done():
                beside.remove(starting)
                starting.result()
                beside.append(
                    asyncio.create_task(serve_admin(self._shown, self._admin_socket, stop))
                )
                announce(self._parts.shown)
                await _any_of(stop, *beside, *keepers)  # a task that ends is a bug
        finally:
            code = await self._end(keepers, again)
            for task in beside:
                task.cancel()
            for result in await asyncio.gather(*beside, return_exceptions=True):
                if isinstance(result, Exception):
                    raise result
        return code

    async def apply(self, config: Config, redactor: observe.Redactor) -> None:
        """These settings from here on, of all processes that are there and to come."""
        for secret in secret_values(config):
            redactor.add(secret)
        parts = self._parts
        level: Any = config.observe.log_level
        observe.set_level(level)
        parts.config, parts.shown = merged(parts.config, config)[0], merged(parts.shown, config)[0]
        told = msgspec.json.encode(parts.shown)
        await self._admin.take_settings(told, config.listen.admin_api_key)

    async def heed(self, hangups: Hangups, reloader: Reloader) -> None:
        """Read the settings again when told to, by a signal or at the admin port."""
        record = ReloadRecord(self._admin.note_reload, SystemClock().wall)
        self._admin.reload = partial(record.recorded, reload=reloader.reload)
        await hangups.heed(partial(record.hung_up, reloader.reload, observe.log))

    # -- starting --------------------------------------------------------------------------------

    async def _start(self, keepers: list[asyncio.Task[None]]) -> None:
        """Until all take connections. The first alone, so that what is wrong is said once, and the
        others have its secrets.
        """
        first, others = self._slots[0], self._slots[1:]
        keepers.append(asyncio.create_task(self._keep(first)))
        await first.up.wait()
        if not self._parts.config.is_one_tenant:
            state = state_path(self._parts.config.auth.state_dir)
            for slot in others:
                StateDir(state).share(state / f"p{slot.number}", SHARED_SECRETS)
        keepers += [asyncio.create_task(self._keep(slot)) for slot in others]
        for slot in others:
            await slot.up.wait()
        self._may_serve.set()
        for slot in self._slots:
            await slot.serving.wait()

    async def _keep(self, slot: _Slot) -> None:
        """One life after the other."""
        loop, pause_s = asyncio.get_running_loop(), PAUSE_S
        while True:
            began_s = loop.time()
            try:
                await self._live(slot)
                await self._settle_room()
            except OSError as error:
                if not self._may_serve.is_set():
                    self._failed.set()
                    raise
                # Short of memory or descriptors: what serves goes on, and this one is tried again.
                observe.log.error("process.not_started", process=slot.number, why=str(error))
            if self._is_stopping:
                return
            if not self._may_serve.is_set():
                self._failed.set()
                return
            pause_s = PAUSE_S if loop.time() - began_s > MAX_PAUSE_S else pause_s
            slot.restarts += 1
            observe.log.error(
                "process.ended", process=slot.number, code=slot.code, again_in_s=pause_s
            )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _live(self, slot: _Slot) -> None:
        """From its start to its end."""
        handed = self._parts.for_process(slot.number)
        process = slot.process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "trunkline.child", str(slot.number)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches us alone
            pass_fds=[fd for fd in (handed.ear, *handed.mouths) if fd >= 0],
        )
        watch: asyncio.Task[None] | None = None
        try:
            post = await self._met_in_time(slot, process, msgspec.json.encode(handed))
            if post is not None:  # it may come to a standstill before it serves, too
                watch = asyncio.create_task(self._watch(post, process))
                await self._bring_up(slot, process, post)
            slot.code = await process.wait()
        finally:
            if watch is not None:
                watch.cancel()
            slot.post = None
            slot.serving.clear()

    async def _met_in_time(
        self, slot: _Slot, process: asyncio.subprocess.Process, handed: bytes
    ) -> Post | None:
        """As `_met`; one that comes to a standstill before is killed."""
        try:
            async with asyncio.timeout(START_S):
                return await self._met(slot, process, handed)
        except TimeoutError:
            self._kill(slot.number, process, START_S * 1_000.0)
            return None

    async def _met(
        self, slot: _Slot, process: asyncio.subprocess.Process, handed: bytes
    ) -> Post | None:
        """Tell it all that it has to know; where it is asked from now on, None where it ended."""
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None
        assert stdout is not None
        with suppress(ConnectionError):
            stdin.write(len(handed).to_bytes(LENGTH_BYTES, "big") + handed)
            await stdin.drain()
        line = await stdout.readline()
        if not line:
            return None
        port = int(json.loads(line)["admin_port"])
        host = "127.0.0.1"
        return Post(
            number=slot.number,
            endpoint=Endpoint(host=host, port=port, host_header=f"{host}:{port}"),
        )

    async def _bring_up(self, slot: _Slot, process: asyncio.subprocess.Process, post: Post) -> None:
        """Until it takes connections, or ends."""
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None
        assert stdout is not None

        def is_here() -> None:
            slot.post = post

        await self._admin.bring_up(post, is_here)
        slot.up.set()
        await self._may_serve.wait()
        is_patient = slot.restarts > 0 and self._serving_count() > 0
        with suppress(ConnectionError):
            stdin.write(SERVE_WHEN_READY if is_patient else SERVE)
            await stdin.drain()
        if await stdout.readline():
            observe.log.info("process.serving", process=slot.number, pid=process.pid)
            slot.serving.set()
            await self._settle_room()

    async def _settle_room(self) -> None:
        """While nobody takes connections, say that this is being seen to."""
        async with self._settling:
            is_wanted = not self._is_stopping and not self._serving_count()
            if not is_wanted:
                self._room.close()
            elif not self._room.is_open:
                await self._room.open(sockets_at(self._parts.addresses))

    def _serving_count(self) -> int:
        return sum(slot.serving.is_set() for slot in self._slots)

    async def _watch(self, post: Post, process: asyncio.subprocess.Process) -> None:
        """A process whose loop stands still is given connections still: end it."""
        while True:
            await asyncio.sleep(WATCH_S)
            if not self._is_stopping and not await self._admin.is_alive(post, HUNG_MS):
                self._kill(post.number, process, HUNG_MS)
                return

    def _kill(self, number: int, process: asyncio.subprocess.Process, silent_ms: float) -> None:
        observe.log.error(
            "process.hung", process=number, silent_ms=silent_ms, meaning="it is killed"
        )
        with suppress(ProcessLookupError):
            process.kill()

    # -- ending ----------------------------------------------------------------------------------

    async def _end(self, keepers: Sequence[asyncio.Task[None]], again: asyncio.Event) -> int:
        """All processes, in order; at once with a further signal. The exit code."""
        self._is_stopping = True
        served = [slot.serving.is_set() for slot in self._slots]
        await self._settle_room()
        for task, slot in zip(keepers, self._slots, strict=False):
            is_running = slot.process is not None and slot.process.returncode is None
            if not is_running:
                task.cancel()  # it waits to start again
        self._signal(signal.SIGTERM)
        ended = asyncio.gather(*keepers, return_exceptions=True)
        hurrying = asyncio.create_task(self._hurry(again))
        try:
            async with asyncio.timeout(END_S):
                await asyncio.shield(ended)
        except TimeoutError:
            observe.log.error("process.killed", meaning="it did not end in time")
            self._signal(signal.SIGKILL)
            await ended
        hurrying.cancel()
        for result in await ended:
            if isinstance(result, Exception):
                raise result
        if self._failed.is_set():
            return next((slot.code for slot in self._slots if slot.code > 0), 1)
        # A process that did not serve yet may not heed the signal, but end of it.
        well = [(0,) if was_serving else (0, -signal.SIGTERM) for was_serving in served]
        return int(any(s.code not in codes for s, codes in zip(self._slots, well, strict=True)))

    async def _hurry(self, again: asyncio.Event) -> None:
        await again.wait()
        self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        for slot in self._slots:
            if slot.process is not None and slot.process.returncode is None:
                with suppress(ProcessLookupError):
                    os.kill(slot.process.pid, number)

    # -- what the admin port asks ----------------------------------------------------------------

    def _posts(self) -> list[Post]:
        return [slot.post for slot in self._slots if slot.post is not None]

    def _metrics(self) -> dict[str, float]:
        return {
            "processes_serving": self._serving_count(),
            "process_restarts_total": sum(slot.restarts for slot in self._slots),
        }


async def _any_of(*things: asyncio.Event | asyncio.Task[None]) -> None:
    """Until one of the events is set, or one of the tasks is done."""
    waits = [
        thing if isinstance(thing, asyncio.Task) else asyncio.create_task(thing.wait())
        for thing in things
    ]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait, thing in zip(waits, things, strict=True):
            if isinstance(thing, asyncio.Event):
                wait.cancel()
