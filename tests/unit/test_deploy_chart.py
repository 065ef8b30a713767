"""The Helm chart, rendered by Helm itself: `make charts` brings it, else these are skipped."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from render_chart import HEAD, MANIFESTS, rendered

helm = pytest.importorskip("helm_python", reason="Helm's SDK is not here; make charts brings it")

VARIANTS: dict[str, dict[str, Any]] = {  # Any: values of a chart
    "named workers and another NATS": {
        "workers": {"urls": ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]},
        "nats": {"enabled": False, "servers": ["nats-0.nats:4222", "nats-1.nats:4222"]},
        "replicas": 1,
    },
    "everything": {
        "image": {"repository": "registry.example/trunkline", "tag": "1"},
        "model": {
            "path": "/models/llama",
            "volume": {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}},
        },
        "settings": {"max_connections": 1_000_000, "log_level": "debug", "strict_fields": True},
        "workers": {"pullPorts": [7000]},
        "networkPolicy": {
            "clients": [{"namespaceSelector": {}}],
            "operators": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}],
        },
        "serviceMonitor": {"enabled": True, "keySecret": "scrapers"},
        "storageClass": "fast",
        "nodeSelector": {"pool": "gateways"},
        "tolerations": [{"operator": "Exists"}],
    },
    "no policies": {"networkPolicy": {"enabled": False}},
}
MISTAKES: dict[str, dict[str, Any]] = {
    "a value that nobody knows": {"replica": 3},
    "no gateway": {"replicas": 0},
    "a setting that the chart makes itself": {"settings": {"admin_host": "0.0.0.0"}},
    "no registry": {"nats": {"enabled": False}},
    "a password in a server's name": {"nats": {"enabled": False, "servers": ["u:p@host:1"]}},
    "a port that is none": {"workers": {"port": 70_000}},
}


def test_the_manifests_are_what_the_chart_renders() -> None:
    assert MANIFESTS.read_text("utf-8") == HEAD + rendered(), "make charts writes them anew"


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS)
def test_the_chart_renders_manifests_that_fit_their_schemas(values: dict[str, Any]) -> None:
    for manifest in yaml.safe_load_all(rendered(values)):
        if manifest["kind"] != "ServiceMonitor":  # of an operator, whose schema is not at hand
            kubernetes_validate.validate(manifest, "1.37", strict=True)


@pytest.mark.parametrize("values", MISTAKES.values(), ids=MISTAKES)
def test_mistakes_in_values_are_refused_by_the_charts_schema(values: dict[str, Any]) -> None:
    with pytest.raises(helm.HelmError):
        rendered(values)


def test_settings_reach_the_gateway_as_text_that_it_reads() -> None:
    (gateway,) = (
        manifest["spec"]["template"]["spec"]["containers"][0]
        for manifest in yaml.safe_load_all(rendered(VARIANTS["everything"]))
        if (manifest["kind"], manifest["metadata"]["name"]) == ("StatefulSet", "trunkline")
    )
    environ = {one["name"]: one.get("value") for one in gateway["env"]}
    assert environ["TRUNKLINE_MAX_CONNECTIONS"] == "1000000"
    assert environ["TRUNKLINE_STRICT_FIELDS"] == "true"
    assert environ["TRUNKLINE_LOG_LEVEL"] == "debug"
    assert "--model-path=/models/llama" in gateway["args"]


@pytest.mark.parametrize(
    ("values", "key"),
    [({}, ("trunkline-keys", "admin-key")), ({"keySecret": "s"}, ("s", "metrics-key"))],
)
def test_prometheus_has_a_key_of_its_own_where_one_is_named(
    values: dict[str, str], key: tuple[str, str]
) -> None:
    text = rendered({"serviceMonitor": {"enabled": True, **values}})
    (monitor,) = (one for one in yaml.safe_load_all(text) if one["kind"] == "ServiceMonitor")
    (endpoint,) = monitor["spec"]["endpoints"]
    found = endpoint["authorization"]["credentials"]
    assert (found["name"], found["key"]) == key
