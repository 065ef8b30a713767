"""A digest of what a model's weights are, from its files: workers of two models exchange nothing.

A name proves nothing: one name may stand for two checkpoints. Files up to `WHOLE_BYTES` are read
whole, of longer ones the head (where the names and shapes are), the tail and samples in between, so
that a start does not read hundreds of gigabytes. Who needs more gives a digest of their own.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import BinaryIO

from trunkline.errors import ConfigError

WHOLE_BYTES = 64 << 20
SAMPLES = 64
SAMPLE_BYTES = 64 << 10
EDGE_BYTES = 1 << 20
_KINDS = ("*.safetensors", "*.bin", "*.gguf", "*.pt")


def weights_digest(folder: Path) -> str:
    """Hex; of all files of the first kind that is there. Raises ConfigError where there is none."""
    for kind in _KINDS:
        paths = sorted(folder.glob(kind))
        if paths:
            break
    else:
        raise ConfigError(f"{folder} holds no weights; say model_digest in the extra config")
    state = hashlib.blake2b(digest_size=32, person=b"tl-weights")
    for path in paths:
        size = path.stat().st_size
        state.update(len(path.name).to_bytes(4, "big") + path.name.encode())
        state.update(size.to_bytes(8, "big"))
        with path.open("rb") as file:
            _add(state, file, size)
    return state.hexdigest()


def _add(state: hashlib.blake2b, file: BinaryIO, size: int) -> None:
    if size <= WHOLE_BYTES:
        while part := file.read(EDGE_BYTES):
            state.update(part)
        return
    state.update(file.read(EDGE_BYTES))
    step = size // (SAMPLES + 1)
    for number in range(1, SAMPLES + 1):
        file.seek(number * step)
        state.update(file.read(SAMPLE_BYTES))
    file.seek(size - EDGE_BYTES)
    state.update(file.read(EDGE_BYTES))
