"""C80: workers wherever a URL can say that they are, before a real gateway: behind https with an
authority of one's own, at addresses of IPv6, with a slash at the end, under a path of a proxy.
"""

from __future__ import annotations

import contextlib
import http.client
import ssl
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from fleet import Process, Processes, processes, text_of

BASE = "/x"


@pytest.fixture(scope="module")
def started() -> Iterator[Processes]:
    with processes() as running:
        yield running


@pytest.fixture(scope="module")
def ca_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of 127.0.0.1 that nobody but its owner has heard of, with its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "worker")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("ca") / "own.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM) + private)
    return path


@contextlib.contextmanager
def proxy(worker: Process, *, base: str = "", pem: Path | None = None) -> Iterator[str]:
    """A reverse proxy before a worker, under a path, with TLS where it has a certificate."""

    class Forward(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def forward(self) -> None:
            if not self.path.startswith(f"{base}/"):
                self.send_error(404)
                return
            body = self.rfile.read(int(self.headers.get("content-length", "0")))
            behind = http.client.HTTPConnection("127.0.0.1", worker.port)
            headers = {n: v for n, v in self.headers.items() if n.lower() != "connection"}
            behind.request(self.command, self.path.removeprefix(base), body, headers)
            answer = behind.getresponse()
            told = answer.read()
            self.send_response(answer.status)
            self.send_header("content-type", answer.getheader("content-type", ""))
            self.send_header("content-length", str(len(told)))
            self.end_headers()
            self.wfile.write(told)
            behind.close()

        do_GET = do_POST = forward  # noqa: N815 - the library's names

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Forward)
    if pem is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pem)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        scheme = "http" if pem is None else "https"
        yield f"{scheme}://127.0.0.1:{server.server_address[1]}{base}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_c80_workers_are_served_by_whatever_url_reaches_them(
    started: Processes, ca_file: Path
) -> None:
    plain, six, encrypted, under = (
        *started.workers(1),
        started.worker("--host", "::1"),
        *started.workers(2),
    )
    with (
        proxy(encrypted, pem=ca_file) as https,
        proxy(under, base=BASE, pem=ca_file) as based,
    ):
        urls = [f"{plain.url}/", f"http://[::1]:{six.port}", https, f"{based}/"]
        gateway = started.gateway(urls, "--worker-ca-file", str(ca_file))
        rows = gateway.admin("/workers").json()["workers"]
        assert {row["url"] for row in rows} == {url.rstrip("/") for url in urls}
        names = {row["worker"] for row in rows}
        for seed in range(40):
            first = gateway.complete(text_of(40, seed))
            again = gateway.complete(text_of(40, seed))
            assert first.status == again.status == 200
            assert again.worker == first.worker
            names.discard(first.worker)
            if not names:
                break
        assert not names, "some worker was never chosen"


def test_c80_a_certificate_that_nobody_vouches_for_keeps_its_worker_out(
    started: Processes, ca_file: Path
) -> None:
    worker = started.worker()
    with proxy(worker, pem=ca_file) as https:
        gateway = started.gateway([https], ready=0)
        [row] = gateway.admin("/workers").json()["workers"]
        assert row["state"] == "joining"
        assert gateway.complete("hello").status == 503
    assert "its certificate is not trusted" in row["reason"]
    assert "--worker-ca-file" in row["reason"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--worker-urls", "::1:8000"), "http://[::1]:8000"),
        (("--worker-urls", "http://::1:8000"), "http://[::1]:8000"),
        (("--worker-ca-file", "/nowhere/ca.pem"), "/nowhere/ca.pem: No such file"),
        (("--worker-ca-file", __file__), "no certificate in PEM"),
    ],
)
def test_c80_what_can_name_no_worker_is_refused_with_its_remedy(
    started: Processes, flags: tuple[str, ...], said: str
) -> None:
    ended = started.begin("serve", "--port", "0", "--admin-port", "0", "--auth", "off", *flags)
    assert ended.child.wait(timeout=60) == 2
    assert said in ended.log()
