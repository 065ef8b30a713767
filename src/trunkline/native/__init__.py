"""The two hot pure functions, compiled where a compiler was there at install, in Python otherwise.

`IMPLEMENTATION` says which one runs; results are equal (`tests/model/test_native_twins.py`).
Set `TRUNKLINE_PURE=1` before the first import to force the Python versions.
"""

from trunkline.native._choice import IMPLEMENTATION, BlockIndex, chain_keys
from trunkline.native.codes import CONFLICT, FULL, UNKNOWN_PARENT

__all__ = ["CONFLICT", "FULL", "IMPLEMENTATION", "UNKNOWN_PARENT", "BlockIndex", "chain_keys"]
