"""Renders the Helm chart with its own values into deploy/kubernetes, for those who have no Helm.

The manifests there are written by this alone; a test compares. Needs the extra `charts`.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
CHART = DEPLOY / "helm" / "trunkline"
MANIFESTS = DEPLOY / "kubernetes" / "trunkline.yaml"
NAME = NAMESPACE = "trunkline"
HEAD = """\
# deploy/helm/trunkline with its own values, written by `make charts`: change it there.
#
#   kubectl create namespace trunkline
#   kubectl -n trunkline apply -f trunkline.yaml     # after its secret was made: docs/deploying.md
"""


def rendered(values: dict[str, Any] | None = None) -> str:
    """All manifests of the chart under these values, in order. Raises HelmError."""
    helm: Any = importlib.import_module("helm_python")  # not in every environment
    with helm.Chart.load(CHART) as chart:
        pages = chart.render(values, name=NAME, namespace=NAMESPACE)
    texts = [text.strip() for name, text in sorted(pages.items()) if name.endswith(".yaml")]
    return "\n---\n".join(text for text in texts if text) + "\n"


def main() -> int:
    MANIFESTS.write_text(HEAD + rendered(), "utf-8")
    sys.stdout.write(f"wrote {MANIFESTS}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
