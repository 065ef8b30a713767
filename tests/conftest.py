"""Settings that every test shares: reproducible property tests, and more of them on request.

`HYPOTHESIS_PROFILE=ci` (what `.ci/run` uses) draws the same examples every time; `deep` draws many
more.
"""

from __future__ import annotations

import gc
import os

from hypothesis import HealthCheck, settings

_SLOW_MACHINE = [HealthCheck.too_slow, HealthCheck.data_too_large]

settings.register_profile("dev", deadline=None, suppress_health_check=_SLOW_MACHINE)
settings.register_profile(
    "ci",
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=True,
    suppress_health_check=_SLOW_MACHINE,
)
settings.register_profile(
    "deep", deadline=None, max_examples=2_000, suppress_health_check=_SLOW_MACHINE
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))


def pytest_collection_finish() -> None:
    """Ten thousand tests are half a million objects: collections need not look through them."""
    gc.collect()
    gc.freeze()
