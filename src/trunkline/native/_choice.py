"""Picks the compiled twins, or the Python ones. The only place that knows there are two."""

# The extension has no stubs; the fallback gives both their type.
# pyright: reportMissingImports=false, reportUnknownVariableType=false
# pyright: reportConstantRedefinition=false, reportAttributeAccessIssue=false

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

from trunkline.native._fallback import BlockIndex, chain_keys
from trunkline.native._heads import split_answer, split_request

CORE_VERSION = 2
"""Of what is asked of the compiled core, and of how it answers. Raise it here and in
`cpp/module.cpp` with each change of either: an editable install keeps the core that it once built.
"""

IMPLEMENTATION: Literal["compiled", "pure"] = "pure"
STALE_CORE = ""
"""Why a compiled core that is there is not used."""

if not TYPE_CHECKING and os.environ.get("TRUNKLINE_PURE") != "1":
    try:
        from trunkline.native import _core
    except ImportError:
        _core = None
    if _core is not None and (found := getattr(_core, "VERSION", 0)) != CORE_VERSION:
        STALE_CORE = f"the compiled core is version {found}, and this source needs {CORE_VERSION}"
    elif _core is not None:
        IMPLEMENTATION = "compiled"
        BlockIndex, chain_keys = _core.BlockIndex, _core.chain_keys
        split_answer, split_request = _core.split_answer, _core.split_request

__all__ = [
    "CORE_VERSION",
    "IMPLEMENTATION",
    "STALE_CORE",
    "BlockIndex",
    "chain_keys",
    "split_answer",
    "split_request",
]
