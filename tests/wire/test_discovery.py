"""Gateways that learn of their workers from a file, a name, and Kubernetes. C89, C91."""

from __future__ import annotations

import asyncio
import datetime
import os
import ssl
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from fleet import Gateway, Processes, processes, text_of, until
from kubernetes_api import endpoint, kubernetes
from scripted import wire

TINY = ("--profile", "tiny")
HERE = ("--worker-networks", "127.0.0.0/8")


@pytest.fixture
def started() -> Iterator[Processes]:
    with processes() as these:
        yield these


def replaced(path: Path, text: str) -> None:
    beside = path.with_name("beside")
    beside.write_text(text)
    os.replace(beside, path)


def ready(gateway: Gateway) -> list[str]:
    return sorted(name for name, row in gateway.workers().items() if row["state"] == "ready")


def test_a_gateway_follows_a_file_of_workers_and_outlives_its_mistakes(
    started: Processes, tmp_path: Path
) -> None:
    first, second = started.workers(2, *TINY)
    path = tmp_path / "workers"
    path.write_text(f"# ours\n{first.url}\n")
    gateway = started.gateway([], *TINY, "--workers-file", str(path), ready=1)
    assert gateway.chat("hi").worker == first.name
    replaced(path, f'{first.url}\n{{"url": "{second.url}", "labels": {{"zone": "b"}}}}\n')
    gateway.wait_ready(2)
    assert gateway.worker(second)["labels"] == {"zone": "b"}
    replaced(path, f'{{"url": "{first.url}"')
    until(lambda: "workers.source_failed" in gateway.process.log(), "a word on the mistake")
    assert len(ready(gateway)) == 2
    replaced(path, f"{second.url}\nhttp://169.254.169.254:80\n")
    until(lambda: list(gateway.workers()) == [second.name], "only the second is left")
    until(lambda: "worker.refused" in gateway.process.log(), "a word on the address")
    gateway.wait_ready(1)
    assert {gateway.chat(text_of(9, n)).worker for n in range(4)} == {second.name}


def test_a_gateway_with_a_mistake_in_its_file_does_not_start(
    started: Processes, tmp_path: Path
) -> None:
    path = tmp_path / "workers"
    path.write_text("{")
    process = started.begin("serve", "--auth", "off", "--port", "0", "--workers-file", str(path))
    assert process.child.wait(60) == 2
    assert "line 1" in process.log()


def test_a_gateway_takes_each_address_of_a_name_for_a_worker(started: Processes) -> None:
    worker = started.worker(*TINY)
    name = f"localhost:{worker.port}"
    gateway = started.gateway([], *TINY, *HERE, "--worker-dns", name, ready=1)
    assert worker.name in ready(gateway)
    assert gateway.chat("hi").worker == worker.name


def test_a_loopback_address_that_was_looked_up_is_refused_unless_it_is_allowed(
    started: Processes,
) -> None:
    gateway = started.gateway([], *TINY, "--worker-dns", "localhost:1", ready=0)
    until(lambda: "worker.refused" in gateway.process.log(), "a word on the address")
    assert gateway.workers() == {}


def certified(folder: Path) -> ssl.SSLContext:
    """A server's context under an authority of its own, whose certificate is `ca.crt`."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "ca.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "ca.crt", folder / "key")
    return context


def test_c89_a_gateway_in_a_pod_follows_the_services_of_its_namespace(
    started: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the token and the authority of its service account, over TLS."""

    @wire
    async def run() -> None:
        first, second = await asyncio.to_thread(started.workers, 2, *TINY)
        async with kubernetes(certified(tmp_path)) as api:
            (tmp_path / "token").write_text(api.token)
            (tmp_path / "namespace").write_text("ml")
            monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
            monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(api.port))
            api.put("s1", endpoint("127.0.0.1", "a"), port=first.port)
            flags = ("--service-discovery", "--selector", "app=engine", *HERE)
            account = ("--service-account-dir", str(tmp_path))
            gateway = await asyncio.to_thread(
                lambda: started.gateway([], *TINY, *flags, *account, ready=1)
            )

            async def meet(names: list[str], what: str) -> None:
                await asyncio.to_thread(until, lambda: ready(gateway) == names, what)

            await meet([first.name], "the first is there")
            api.put("s2", endpoint("127.0.0.1", "b"), port=second.port)
            await meet(sorted([first.name, second.name]), "both are")
            api.put("s1", endpoint("127.0.0.1", "a", ready=False), port=first.port)
            await meet([second.name], "the first drains")
            api.put("s1", endpoint("127.0.0.1", "c"), port=first.port)
            await meet(sorted([first.name, second.name]), "another pod in its place")
            row = await asyncio.to_thread(gateway.worker, first)
            assert row["labels"]["pod_uid"] == "c"
            api.drop("s2")
            await meet([first.name], "the second is gone")
            assert api.token not in gateway.process.log()

    run()
