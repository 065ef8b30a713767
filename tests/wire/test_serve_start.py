"""What the client port says while a gateway starts (C102), and workers that are there before it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import httpx
from fleet import MODEL_FOLDER, Gateway, free_port, processes, until


def test_c102_while_a_tokenizer_loads_the_gateway_is_alive_and_not_ready(tmp_path: Path) -> None:
    shutil.copytree(MODEL_FOLDER, tmp_path / "model")
    slow = tmp_path / "model" / "tokenizer.json"
    definition = slow.read_bytes()
    slow.unlink()
    os.mkfifo(slow)  # whoever reads it waits until it is written
    with processes() as started:
        worker = started.worker("--profile", "tiny")
        port = free_port()
        flags = ("--port", str(port), "--admin-port", "0", "--auth", "off")
        named = ("--worker-urls", worker.url, "--model-path", str(slow.parent))
        process = started.begin("serve", *named, *flags)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as client:

            def alive() -> bool:
                try:
                    return client.get("/liveness").status_code == 200
                except httpx.TransportError:
                    return False

            until(alive, "the gateway is alive")
            early = client.get("/readiness")
            assert (early.status_code, early.json()["status"]) == (503, "starting")
            asked = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
            assert (asked.status_code, asked.headers["retry-after"]) == (503, "1")
            assert client.get("/metrics").status_code == 503
            assert process.child.poll() is None

            slow.write_bytes(definition)
            process.wait_ready()

            until(lambda: client.get("/readiness").status_code == 200, "it is ready")
            answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
            assert answer.status_code == 200
            assert client.get("/metrics").status_code == 404


def test_c91_workers_that_were_there_before_the_gateway_are_all_usable() -> None:
    with processes() as started:
        workers = started.workers(3, "--profile", "tiny")
        gateway: Gateway = started.gateway([worker.url for worker in workers])
        seen = {gateway.complete(f"prompt {n}").worker for n in range(30)}
        assert seen == {worker.name for worker in workers}


def test_c88_the_models_are_listed_though_the_first_worker_is_dead() -> None:
    with processes() as started:
        worker = started.worker("--profile", "tiny")
        dead = f"http://127.0.0.1:{free_port()}"
        gateway = started.gateway([dead, worker.url], ready=1)
        listed = gateway.client.get("/v1/models").json()["data"]
        assert [model["id"] for model in listed] == [gateway.worker(worker)["model_id"]]
        assert gateway.client.get("/readiness").status_code == 200
        assert gateway.complete("a").status == 200


def test_what_ends_in_order_says_that_alone() -> None:
    """Nothing of the compiled core either, which would pass for an error in every log."""
    with processes() as started:
        worker = started.worker("--profile", "tiny")
        gateway = started.gateway([worker.url], "--profile", "tiny", "--log-format", "json")
        for _ in range(2):
            assert gateway.chat("a prompt of several blocks " * 20).status == 200
        assert gateway.process.stop() == 0
        lines = gateway.process.log().splitlines()
        assert [json.loads(line)["event"] for line in lines][-1] == "gateway.stopped"
        assert worker.stop() == 0
        assert "nanobind" not in worker.log()
