"""The hot pure functions, compiled where a compiler was there at install, in Python otherwise.

`IMPLEMENTATION` says which ones run; results are equal (`tests/model/test_native_twins.py`,
`test_head_twins.py`). `STALE_CORE` says why a compiled core that is there was left alone. Set
`TRUNKLINE_PURE=1` before the first import to force the Python versions.
"""

from trunkline.native._choice import (
    IMPLEMENTATION,
    STALE_CORE,
    BlockIndex,
    chain_keys,
    split_answer,
    split_request,
)
from trunkline.native._heads import DROPPED, REPORTED, fields_of
from trunkline.native._rows import ROW_BYTES
from trunkline.native.codes import CONFLICT, FULL, RETIRED, UNKNOWN_PARENT

__all__ = [
    "CONFLICT",
    "DROPPED",
    "FULL",
    "IMPLEMENTATION",
    "REPORTED",
    "RETIRED",
    "ROW_BYTES",
    "STALE_CORE",
    "UNKNOWN_PARENT",
    "BlockIndex",
    "chain_keys",
    "fields_of",
    "split_answer",
    "split_request",
]
