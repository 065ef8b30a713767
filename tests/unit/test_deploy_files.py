"""What is in deploy/: its paths, flags and variables exist, and the manifests fit their schemas."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from trunkline import settings
from trunkline.cli import build_parser
from trunkline.gateway.routes import Local, route_of
from trunkline.leaf import leaves
from trunkline.lifetime import DRAIN_MS

REPOSITORY = Path(__file__).resolve().parents[2]
DEPLOY = REPOSITORY / "deploy"
UNIT = DEPLOY / "systemd" / "trunkline.service"
DOCKERFILE = DEPLOY / "docker" / "Dockerfile"
MANIFESTS = DEPLOY / "kubernetes" / "trunkline.yaml"
KUBERNETES = ("1.30", "1.37")
VARIABLE = re.compile(r"\bTRUNKLINE_[A-Z0-9_]+")
Json = dict[str, Any]  # Any: what YAML holds


def known_variables() -> set[str]:
    return {leaf.variable for leaf in leaves()} | settings.OTHER_VARIABLES


def resolved(words: list[str], environ: dict[str, str]) -> settings.Resolved:
    """As `trunkline serve` reads them. Raises ConfigError."""
    return settings.resolve(vars(build_parser("serve").read(words)), environ)


@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("*")), ids=lambda path: path.name)
def test_every_variable_of_ours_in_the_files_is_a_setting(path: Path) -> None:
    if path.is_file():
        found = set(VARIABLE.findall(path.read_text("utf-8")))
        assert {name for name in found if not name.endswith("_")} <= known_variables()


# -- systemd ---------------------------------------------------------------------------------------


def unit_options() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text("utf-8").splitlines():
        name, is_option, value = line.partition("=")
        if is_option and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


def test_the_unit_starts_with_settings_that_the_gateway_takes(tmp_path: Path) -> None:
    options = unit_options()
    program, verb, *words = shlex.split(options["ExecStart"][0])
    assert (Path(program).name, verb) == ("trunkline", "serve")
    config, key = tmp_path / "trunkline.toml", tmp_path / "admin-key"
    config.write_text('worker_urls = ["http://10.0.0.1:8000"]\n')
    key.write_text("a" * 64)
    key.chmod(0o400)
    (source,) = (one.partition(":")[0] for one in options["LoadCredential"])
    words = [str(config) if word == "/etc/trunkline/trunkline.toml" else word for word in words]
    given = (pair.split("=", 1) for line in options["Environment"] for pair in line.split())
    environ = {name: value.replace(f"%d/{source}", str(key)) for name, value in given}
    found = resolved(words, environ).config
    assert found.listen.admin_api_key == "a" * 64
    assert found.auth.state_dir == f"%S/{options['StateDirectory'][0]}"


def test_the_unit_waits_longer_than_a_drain_takes() -> None:
    options = unit_options()
    assert options["KillSignal"] == ["SIGTERM"]
    assert int(options["TimeoutStopSec"][0]) * 1_000.0 >= 2 * DRAIN_MS


def test_a_reload_of_the_unit_has_the_settings_read_again() -> None:
    assert unit_options()["ExecReload"] == ["/bin/kill -HUP $MAINPID"]


def test_the_unit_is_one_for_systemd_and_little_exposed(tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not here; apt install systemd")
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text("utf-8").replace("/opt/trunkline/bin/trunkline", "/bin/true"))
    done = subprocess.run(
        [program, "verify", str(copy)], capture_output=True, text=True, check=False
    )
    said = [line for line in done.stderr.splitlines() if UNIT.name in line]
    assert said == [], "systemd understands every line"
    command = [program, "security", "--offline=true", "--threshold=20", str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


# -- Docker ----------------------------------------------------------------------------------------


def instructions() -> Iterator[tuple[str, str]]:
    text = re.sub(r"\\\n\s*", "", DOCKERFILE.read_text("utf-8"))
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, rest = line.partition(" ")
            yield name, rest


def test_the_dockerfile_copies_what_there_is_and_its_ignore_file_lets_through() -> None:
    copied = [
        word
        for name, rest in instructions()
        if name == "COPY" and not rest.startswith("--from")
        for word in rest.split()[:-1]
    ]
    ignore = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text("utf-8").splitlines()
    assert copied
    for path in copied:
        assert (REPOSITORY / path).exists(), path
        assert f"!{path}" in ignore, f"{path} is ignored"
    assert "*" in ignore, "what is not named stays outside"


def test_the_dockerfile_has_what_the_wheel_is_built_of() -> None:
    text = (REPOSITORY / "pyproject.toml").read_text("utf-8")
    copied = {word for name, rest in instructions() if name == "COPY" for word in rest.split()}
    needed = {"CMakeLists.txt", "LICENSE", "README.md", "traces", "src", "pyproject.toml"}
    assert all(name in text for name in needed - {"pyproject.toml", "CMakeLists.txt"})
    assert needed <= copied


def test_the_image_runs_as_nobody_with_settings_that_the_gateway_takes() -> None:
    by_name = dict(instructions())  # the last of each: what is in force in the last stage
    assert by_name["USER"] == "65532:65532"
    verb = ast.literal_eval(by_name["ENTRYPOINT"])
    assert verb == ["trunkline", "serve"]
    environ = dict(pair.split("=", 1) for pair in by_name["ENV"].split())
    found = resolved(["--worker-urls", "http://10.0.0.1:8000"], environ).config
    assert found.auth.state_dir == by_name["VOLUME"]
    port = by_name["EXPOSE"]
    assert str(found.listen.port) == port
    assert f"http://127.0.0.1:{port}/readiness" in by_name["HEALTHCHECK"]


def test_the_commands_in_the_dockerfile_are_understood() -> None:
    comment = re.sub(r" \\\n#\s*", " ", DOCKERFILE.read_text("utf-8"))
    (line,) = re.findall(r"^# +docker run .* trunkline (--.*)$", comment, re.MULTILINE)
    resolved(line.split(), {})
    (line,) = re.findall(r"^# +docker exec CONTAINER trunkline keys create (.*)$", comment, re.M)
    build_parser("keys create").read(line.split())


# -- Kubernetes ------------------------------------------------------------------------------------


def manifests() -> list[Json]:
    return [one for one in yaml.safe_load_all(MANIFESTS.read_text("utf-8")) if one]


def named(kind: str, name: str) -> Json:
    (found,) = (m for m in manifests() if (m["kind"], m["metadata"]["name"]) == (kind, name))
    return found


def gateway_pod() -> Json:
    return named("StatefulSet", "trunkline")["spec"]["template"]["spec"]


def gateway() -> Json:
    (container,) = gateway_pod()["containers"]
    return container


@pytest.mark.parametrize("version", KUBERNETES)
def test_the_manifests_fit_the_schemas_of_kubernetes(version: str) -> None:
    for manifest in manifests():
        kubernetes_validate.validate(manifest, version, strict=True)


def test_a_misspelt_field_in_a_manifest_is_found() -> None:
    pod = gateway_pod()
    broken = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod}
    kubernetes_validate.validate(broken, KUBERNETES[-1], strict=True)
    pod["terminationGracePeriodSecond"] = pod.pop("terminationGracePeriodSeconds")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, KUBERNETES[-1], strict=True)


def test_the_gateways_of_the_manifests_start_with_settings_that_they_take(tmp_path: Path) -> None:
    key = tmp_path / "admin-key"
    key.write_text("a" * 64)
    key.chmod(0o440)
    words = [word.replace("@/keys/admin-key", f"@{key}") for word in gateway()["args"]]
    environ = {one["name"]: one["value"] for one in gateway()["env"] if "value" in one}
    found = resolved(words, environ).config
    assert found.discovery.service_discovery
    assert len(found.control.control) == 3
    assert found.listen.admin_api_key == "a" * 64
    ports = {one["name"]: one["containerPort"] for one in gateway()["ports"]}
    assert ports == {"http": found.listen.port, "admin": found.listen.admin_port}


def test_gateways_select_the_slices_of_the_service_of_workers(tmp_path: Path) -> None:
    key = tmp_path / "admin-key"
    key.write_text("a" * 64)
    key.chmod(0o400)
    words = [word.replace("/keys/admin-key", str(key)) for word in gateway()["args"]]
    selector = resolved(words, {}).config.discovery.selector
    wanted = dict(pair.split("=", 1) for pair in selector)
    chosen = [
        manifest["metadata"]["name"]
        for manifest in manifests()
        if manifest["kind"] == "Service"
        and wanted.items() <= manifest["metadata"]["labels"].items()
    ]
    assert chosen == ["trunkline-workers"], "slices have their service's labels"


def test_probes_ask_for_paths_of_the_client_port_and_the_grace_fits_the_drain() -> None:
    paths = {
        probe: gateway()[probe]["httpGet"]["path"]
        for probe in ("startupProbe", "livenessProbe", "readinessProbe")
    }
    asked = {probe: route_of(path.encode()) for probe, path in paths.items()}
    alive = Local.LIVENESS  # a fleet without workers is no dead gateway
    assert asked == {
        "startupProbe": alive,
        "livenessProbe": alive,
        "readinessProbe": Local.READINESS,
    }
    pause_s = gateway()["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert gateway_pod()["terminationGracePeriodSeconds"] >= pause_s + 2 * DRAIN_MS / 1_000.0


def test_every_container_runs_without_rights() -> None:
    for manifest in manifests():
        if manifest["kind"] != "StatefulSet":
            continue
        pod = manifest["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"]
            assert not security["allowPrivilegeEscalation"]
            assert security["capabilities"] == {"drop": ["ALL"]}


def test_the_role_of_gateways_reads_endpoint_slices_and_nothing_else() -> None:
    (rule,) = named("Role", "trunkline")["rules"]
    assert rule == {
        "apiGroups": ["discovery.k8s.io"],
        "resources": ["endpointslices"],
        "verbs": ["list", "watch"],
    }


def test_workers_take_connections_from_gateways_alone() -> None:
    policy = named("NetworkPolicy", "trunkline-workers")["spec"]
    gateways = named("StatefulSet", "trunkline")["spec"]["selector"]["matchLabels"]
    assert (
        policy["podSelector"]["matchLabels"]
        == named("Service", "trunkline-workers")["spec"]["selector"]
    )
    (rule,) = policy["ingress"]
    assert rule["from"] == [{"podSelector": {"matchLabels": gateways}}]


def test_the_settings_of_nats_are_understood_by_nats_and_write_at_once(tmp_path: Path) -> None:
    from trunkline.adapters.nats_process import nats_binary

    text: str = named("ConfigMap", "trunkline-nats")["data"]["nats.conf"]
    assert "sync_interval: always" in text
    page = tmp_path / "nats.conf"
    page.write_text(text)
    environ = os.environ | {"NATS_PASSWORD": "p0123"}
    command = [nats_binary(), "--config", str(page), "-t"]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    assert done.returncode == 0, done.stderr


def test_the_init_container_gives_a_state_folder_that_the_gateway_takes(tmp_path: Path) -> None:
    from trunkline.adapters.state_dir import StateDir

    (container,) = gateway_pod()["initContainers"]
    keys, state = tmp_path / "keys", tmp_path / "state"
    keys.mkdir()
    state.mkdir()
    for number, name in enumerate(("root", "pepper", "session")):
        (keys / f"{name}.key").write_text(f"{number}" * 64)
        (keys / f"{name}.key").chmod(0o440)
    shell, options, script = container["command"]
    script = script.replace("/state/", f"{state}/").replace("/keys/", f"{keys}/")
    for _ in range(2):  # as at the first start, and at a further one
        subprocess.run([shell, options, script], check=True)
    assert StateDir(state / "gateway").secret("pepper") == bytes.fromhex("1" * 64)
