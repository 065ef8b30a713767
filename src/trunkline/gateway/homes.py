"""By which key a request keeps to its homes on the ring: its prompt's beginning, or its session.

The same on every gateway of a fleet, since nothing but the request goes into it. Must never: mix
tenants; both keys are made inside the caller's namespace. Read `core/placement.py` for the ring.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from trunkline.core.keys import CHECKPOINT_TOKENS
from trunkline.gateway.contracts import InferenceRequest
from trunkline.gateway.namespaces import PromptKeys


def home_key(of_size: Mapping[int, PromptKeys], request: InferenceRequest) -> bytes | None:
    """32 bytes; None where neither the prompt nor a session says anything. `of_size` has the
    prompt's keys for each block size in the fleet.
    """
    return _of_prompt(of_size) or _of_session(request)


def _of_prompt(of_size: Mapping[int, PromptKeys]) -> bytes | None:
    """The chain value at the first checkpoint, or at the last full block of a shorter prompt."""
    for block_tokens, known in of_size.items():
        keys = known.private
        if len(keys):
            return keys[min(len(keys), max(1, CHECKPOINT_TOKENS[0] // block_tokens)) - 1]
    return None


def _of_session(request: InferenceRequest) -> bytes | None:
    """Where nothing can be told from the prompt, a session keeps to its own two homes."""
    if request.session is None:
        return None
    named = request.grant.domain + request.session.encode()
    return hashlib.blake2b(named, digest_size=32, person=b"session").digest()
