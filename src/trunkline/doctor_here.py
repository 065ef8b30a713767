"""What `trunkline doctor --config FILE` looks at: all that can be known before a gateway starts.

The settings as `serve` would read them, files and folders that they name, ports, and the servers of
NATS. Must never: start anything, keep a port, write a file, or show a secret. Read
`sound_settings.py` for what settings mean together, `doctor.py` for who shows it.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from trunkline.authority import state_path
from trunkline.config import Config
from trunkline.core.ailment import Ailment
from trunkline.core.alignment import State
from trunkline.errors import ConfigError
from trunkline.leaf import read_key, read_secret
from trunkline.settings import refusals_in, resolve
from trunkline.sound_settings import ailments_of, descriptors_limit
from trunkline.written import is_loopback

NATS_S = 3.0
"""A server of NATS says who it is within this."""
MAX_INFO_BYTES = 64 << 10
OLDEST_NATS = (2, 12)
_NATS_PORT = 4222


def ailments_before(path: str, environ: Mapping[str, str]) -> list[Ailment]:
    """Of the settings file at `path`, with what the environment adds."""
    try:
        refused = refusals_in(path)
        if refused:
            return [_of_refusal(_kind_of(str(error)), path, error) for error in refused]
        config = resolve({"config": path}, environ).config
    except ConfigError as error:
        told = (str(error), *error.also)
        return [_of_refusal(_kind_of(text), path, ConfigError(text)) for text in told]
    return [
        *ailments_of(config, descriptors_limit()),
        *_secrets(config),
        *_folders(config),
        *_ports(config),
        *_workers(config),
        *(ailment for server in config.control.control for ailment in nats_ailments(server)),
    ]


def _kind_of(refusal: str) -> str:
    if "admin_host" in refusal:
        return "admin port"
    return "secret" if "everyone may read" in refusal else "settings"


def _of_refusal(what: str, subject: str, error: ConfigError) -> Ailment:
    """What `serve` would end with. Its messages say what is wrong, then what to do."""
    text = " ".join(str(error).split())
    found, _, remedy = text.rpartition("; ")
    if not found:
        found, remedy = text, "change it: `trunkline serve --help` says what is allowed"
    if found.endswith("is not a setting"):
        remedy = f"{remedy} (docs/configuration.md has all of them)"
    return Ailment(
        what=what,
        subject=subject,
        expected="what `trunkline serve` can start with",
        found=found,
        remedy=remedy.removeprefix("remedy: "),
    )


def _secrets(config: Config) -> Iterator[Ailment]:
    """Those in files that are read at the start; keys behind an @ were read with the settings."""
    for name, path in (
        ("model.root_key_file", config.model.root_key_file),
        ("routing.transfer_key_file", config.routing.transfer_key_file),
    ):
        try:
            read_key(path, name)
        except ConfigError as error:
            yield _of_refusal("secret", name, error)
    path = config.control.control_credentials_file
    if path:
        try:
            read_secret(path, "control_credentials_file")
        except ConfigError as error:
            yield _of_refusal("secret", "control.control_credentials_file", error)


# -- folders ---------------------------------------------------------------------------------------


def _folders(config: Config) -> Iterator[Ailment]:
    if config.is_one_tenant:
        return  # nothing is kept
    state = state_path(config.auth.state_dir)
    yield from _folder(state, "auth.state_dir", "--state-dir")
    for inner in (state / "secrets", *sorted((state / "secrets").glob("*.key"))):
        yield from _closed_to_others(inner, is_secret=True)
    if config.auth.audit_copy_dir:
        copy = Path(config.auth.audit_copy_dir)
        yield from _folder(copy, "auth.audit_copy_dir", "--audit-copy-dir")


def _folder(path: Path, subject: str, flag: str) -> Iterator[Ailment]:
    place = next((one for one in (path, *path.absolute().parents) if one.exists()), Path("/"))
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        why = "no folder" if not place.is_dir() else "nothing that this user may write into"
        yield Ailment(
            what="state folder",
            subject=subject,
            expected="a folder that the gateway can write into",
            found=f"{place} is {why}",
            remedy=f"chown or chmod {place}, or name another folder with {flag}",
        )
    elif path.exists():
        yield from _closed_to_others(path, is_secret=False)


def _closed_to_others(path: Path, *, is_secret: bool) -> Iterator[Ailment]:
    try:
        mode = path.stat().st_mode
    except OSError:
        return  # not there yet, or not to be seen: the folder around it is looked at
    # A volume is lent to a group at times; what is secret is closed to that, too.
    open_to = stat.S_IMODE(mode) & (0o077 if is_secret else 0o007)
    if not open_to:
        return
    wanted = "700" if stat.S_ISDIR(mode) else "600"
    yield Ailment(
        what="state folder",
        subject=str(path),
        expected=f"mode {wanted}: for the gateway alone",
        found=f"mode {stat.S_IMODE(mode):o}: others may "
        + ("change it" if open_to & 0o022 else "look into it"),
        remedy=f"chmod {wanted} {path}",
    )


# -- ports and workers -----------------------------------------------------------------------------


def _ports(config: Config) -> Iterator[Ailment]:
    listen = config.listen
    for flag, host, port in (
        ("--port", listen.host, listen.port),
        ("--admin-port", listen.admin_host, listen.admin_port),
    ):
        problem = _port_problem(host, port) if port else None
        if problem is not None:
            found, remedy = problem
            yield Ailment(
                what="port",
                subject=f"listen.{flag.strip('-').replace('-', '_')}",
                expected=f"port {port} on {host} to be free",
                found=found,
                remedy=f"{remedy}, or give another with {flag}",
            )


def _port_problem(host: str, port: int) -> tuple[str, str] | None:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
            trial.listen(1)
    except socket.gaierror as error:
        return f"no address: {error.strerror}", "name an address of this machine"
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return (
                "another process listens there",
                "end that (a gateway that runs is asked by `trunkline doctor` without --config)",
            )
        if error.errno == errno.EACCES:
            return "it needs more rights", "give one above 1023"
        return error.strerror or str(error), "name an address of this machine"
    return None


def _workers(config: Config) -> Iterator[Ailment]:
    is_followed = config.discovery != type(config.discovery)()
    if config.worker_urls or config.models or is_followed:
        return
    yield Ailment(
        what="workers",
        subject="worker_urls",
        expected="at least one worker",
        found="none is named, and nothing that would name them",
        remedy="--worker-urls, --workers-file, or POST /workers while it runs",
        state=State.NOTE,
    )


# -- NATS ------------------------------------------------------------------------------------------


def nats_ailments(server: str) -> Iterator[Ailment]:
    """What a server of the registry says of itself before anybody has said who they are."""
    problem = _address_problem(server)
    if problem is not None:
        yield Ailment(
            what="registry",
            subject="control.control",
            expected="servers of NATS as nats://HOST:PORT",
            found=problem,
            remedy="mend the address; what stands for / or @ in a password is %2F or %40",
        )
        return
    try:
        told = _info(server)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        yield _of_nats(
            server,
            "a server of NATS",
            f"nobody who says so ({why})",
            "start nats-server there (nats-server -js -sd FOLDER), or give its address with"
            " --control",
        )
        return
    if not told.get("jetstream"):
        yield _of_nats(
            server,
            "JetStream, which keeps the registry",
            "it is off",
            "start it with -js -sd FOLDER (jetstream { store_dir: FOLDER, sync_interval: always })",
        )
    version = str(told.get("version", ""))[:32]
    numbers = version.split(".")[:2]
    is_old = all(part.isdecimal() for part in numbers) and tuple(map(int, numbers)) < OLDEST_NATS
    if is_old:
        oldest = ".".join(map(str, OLDEST_NATS))
        yield _of_nats(server, f"{oldest} or newer", version, "install a newer nats-server")
    if not told.get("auth_required"):
        is_near = is_loopback(urlsplit(server).hostname or "")
        yield _of_nats(
            server,
            "clients that are asked who they are",
            "none is asked: whoever reaches it can change tenants, keys and epochs",
            "accounts in its settings, and --control-credentials-file",
            State.NOTE if is_near else State.WRONG,
        )


def _address_problem(server: str) -> str | None:
    """Without what may be a password in it."""
    try:
        place = urlsplit(server)
        is_place = place.scheme in ("nats", "tls") and bool(place.hostname) and place.port != 0
    except ValueError:  # whose text may have a password in it
        return "one whose host or port is none"
    return None if is_place else "one without a host"


def _of_nats(
    server: str, expected: str, found: str, remedy: str, state: State = State.WRONG
) -> Ailment:
    place = urlsplit(server)
    named = f"nats://{place.hostname}:{place.port or _NATS_PORT}"  # less a password in it
    return Ailment(
        what="registry", subject=named, expected=expected, found=found, remedy=remedy, state=state
    )


def _info(server: str) -> dict[str, Any]:  # Any: as JSON has it
    """Raises OSError, ValueError."""
    place = urlsplit(server)
    address = (place.hostname or "", place.port or _NATS_PORT)
    with socket.create_connection(address, NATS_S) as link:
        line = link.makefile("rb").readline(MAX_INFO_BYTES)
    word, _, told = line.partition(b" ")
    if word != b"INFO":
        raise ValueError("it speaks another protocol")
    answer = json.loads(told)
    if not isinstance(answer, dict):
        raise ValueError("it says nothing of itself")
    return cast("dict[str, Any]", answer)
