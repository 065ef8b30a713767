"""What prompts are read with: a model's tokenizer and template, as its settings name them.

Loading takes seconds for a large vocabulary, and longer from a slow disk: call it off the loop.
Read `gateway/tokenise.py` for who uses them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trunkline.config import ModelConfig
from trunkline.core.records import WallTime
from trunkline.ports.template import ChatTemplate
from trunkline.ports.tokenizer import Tokenizer
from trunkline.rehearsal import OWN_MODEL


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """As loaded."""

    tokenizer: Tokenizer
    template: ChatTemplate
    doubt: str
    """Why engines render this model's chats otherwise than by its template; empty for none."""


def load_texts(model: ModelConfig, wall: Callable[[], WallTime]) -> Texts:
    """Raises ConfigError that names the file."""
    from trunkline.adapters.template import load_template, why_not_by_template
    from trunkline.adapters.tokenizer import load_tokenizer

    folder = _folder(model)
    template_file = Path(model.chat_template) if model.chat_template else None
    return Texts(
        tokenizer=load_tokenizer(Path(model.tokenizer_path) if model.tokenizer_path else folder),
        template=load_template(folder, template_file, wall=wall),
        doubt=why_not_by_template(folder),
    )


def _folder(model: ModelConfig) -> Path:
    """Where its tokenizer is, its template is as well, unless the settings say otherwise."""
    if model.model_path:
        return Path(model.model_path)
    if model.tokenizer_path:
        path = Path(model.tokenizer_path)
        return path if path.is_dir() else path.parent
    return OWN_MODEL
