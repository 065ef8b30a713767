"""The KV library inside an engine's process: what it takes to import it."""

from __future__ import annotations

import subprocess
import sys

ALLOWED = {"trunkline", "msgspec", "xxhash", "blake3"}
PROBE = """
import sys
before = set(sys.modules)
import trunkline.kv, trunkline.kv.store, trunkline.kv.disk
print(*sorted({name.split(".")[0] for name in set(sys.modules) - before}))
"""


def test_importing_the_library_takes_nothing_but_hashes_and_msgspec() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, check=True, timeout=60
    )
    foreign = set(done.stdout.split()) - set(sys.stdlib_module_names) - ALLOWED
    assert foreign == set()
    assert "trunkline" in done.stdout.split()
