"""The settings of one of several models, each in a table of its own.

A part of `config.py`, which says how settings are made. Read `model_tables.py` for how the tables
are read.
"""

from __future__ import annotations

from dataclasses import dataclass

from trunkline.setting import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTable:
    """One of several models, each in a table of its own; only in the file."""

    name: str = setting("", "The model, as its workers list it in `/v1/models`. Needed.")
    served_names: tuple[str, ...] = setting((), "Further names that its workers answer to.")
    worker_urls: tuple[str, ...] = setting((), "Its workers; others join what they serve.")
    model_path: str = setting("", "Folder with tokenizer.json and tokenizer_config.json.")
    tokenizer_path: str = setting("", "tokenizer.json, where it lies apart from the model folder.")
    chat_template: str = setting("", "Chat template file; empty: of the tokenizer's config.")
    block_size: int = setting(
        0, "Where a worker does not say; 0: as `[model]` has it.", unit="tokens", low=0, high=65_536
    )
    max_model_len: int = setting(
        0, "Prompt plus answer; 0: as `[model]` has it.", unit="tokens", low=0, high=1 << 24
    )
    profile: str = setting("", "Latency profile; empty takes that of `[routing]`.")
