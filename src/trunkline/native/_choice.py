"""Picks the compiled twins, or the Python ones. The only place that knows there are two."""

# The extension has no stubs; the fallback gives both their type.
# pyright: reportMissingImports=false, reportUnknownVariableType=false
# pyright: reportConstantRedefinition=false

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

IMPLEMENTATION: Literal["compiled", "pure"]

if TYPE_CHECKING or os.environ.get("TRUNKLINE_PURE") == "1":
    from trunkline.native._fallback import BlockIndex, chain_keys
    from trunkline.native._heads import split_answer, split_request

    IMPLEMENTATION = "pure"
else:
    try:
        from trunkline.native._core import BlockIndex, chain_keys, split_answer, split_request

        IMPLEMENTATION = "compiled"
    except ImportError:
        from trunkline.native._fallback import BlockIndex, chain_keys
        from trunkline.native._heads import split_answer, split_request

        IMPLEMENTATION = "pure"

__all__ = ["IMPLEMENTATION", "BlockIndex", "chain_keys", "split_answer", "split_request"]
