"""Make a small model that a real engine serves: `ENGINE_PYTHON tools/tiny_model.py FOLDER`.

A Llama with weights from a seeded generator, beside the tokenizer and the chat template of the
simulated model. Nothing is fetched, and two runs write the same bytes, so that two engines hold one
model and their greedy answers can be compared. Runs in the engine's environment, which has torch
and transformers; the product's has neither.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
from pathlib import Path

TOKENIZER_FOLDER = Path(__file__).resolve().parent.parent / "src" / "trunkline" / "worker" / "model"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
INITIALIZER_RANGE = 0.08
"""Four times the usual: random weights then prefer some token clearly, so that greedy text hangs on
the whole prompt and a wrong KV block shows as another text.
"""
MAX_TOKENS = 32_768
HIDDEN, LAYERS, HEADS, KV_HEADS = 512, 8, 8, 4
"""29 million parameters, 16 KiB of KV a token in fp32: a prefill takes long enough to measure."""


def make_model(folder: Path, *, hidden: int, layers: int, seed: int) -> str:
    """Write the folder; the SHA-256 of its weights."""
    import torch  # pyright: ignore[reportMissingImports]  the engine's environment has it
    from transformers import (  # pyright: ignore[reportMissingImports]  as above
        LlamaConfig,
        LlamaForCausalLM,
    )

    folder.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        shutil.copyfile(TOKENIZER_FOLDER / name, folder / name)
    vocabulary = json.loads((folder / "tokenizer.json").read_text("utf-8"))["model"]["vocab"]
    special = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(vocabulary),
            hidden_size=hidden,
            intermediate_size=hidden * 3,
            num_hidden_layers=layers,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            max_position_embeddings=MAX_TOKENS,
            initializer_range=INITIALIZER_RANGE,
            bos_token_id=vocabulary[special["bos_token"]],
            eos_token_id=vocabulary[special["eos_token"]],
            pad_token_id=vocabulary[special["pad_token"]],
            tie_word_embeddings=False,
        )
    )
    model.to(torch.float32).eval().save_pretrained(folder, safe_serialization=True)
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where to write it")
    parser.add_argument("--hidden", type=int, default=HIDDEN, help=f"width ({HIDDEN})")
    parser.add_argument("--layers", type=int, default=LAYERS, help=f"depth ({LAYERS})")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (0)")
    given = parser.parse_args()
    digest = make_model(given.folder, hidden=given.hidden, layers=given.layers, seed=given.seed)
    sys.stdout.write(json.dumps({"folder": str(given.folder), "weights_sha256": digest}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
