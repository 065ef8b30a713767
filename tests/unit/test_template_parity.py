"""What a client sends, read and rendered here, is byte for byte what the engine would render.

The golden texts are vLLM's own, by `tools/chat_golden.py`; the templates are built of what those of
the model families are built of.
"""

from __future__ import annotations

import contextlib
import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from trunkline.adapters.template import JinjaTemplate
from trunkline.core.records import WallTime
from trunkline.gateway.contracts import ChatPrompt, Route
from trunkline.gateway.counters import Counters
from trunkline.gateway.head import RequestHead
from trunkline.gateway.intake import Intake

FOLDER = Path(__file__).parent / "chat_golden"
GOLDEN: dict[str, Any] = json.loads((FOLDER / "golden.json").read_text("utf-8"))
FAMILIES: dict[str, dict[str, str]] = json.loads((FOLDER / "families.json").read_text("utf-8"))
REQUESTS: list[dict[str, Any]] = json.loads((FOLDER / "requests.json").read_text("utf-8"))
MIDDAY = WallTime(datetime.datetime.fromisoformat(GOLDEN["date"]).timestamp())
TEMPLATES = {
    family: JinjaTemplate(
        (FOLDER / f"{family}.jinja").read_text("utf-8"), special, wall=lambda: MIDDAY
    )
    for family, special in FAMILIES.items()
}
HEAD = RequestHead(
    method="POST", target=b"/v1/chat/completions", minor=1, headers={}, content_length=0,
    is_chunked=False, keeps_alive=True,
)  # fmt: skip


def _read(body: dict[str, Any]) -> ChatPrompt:
    intake = Intake(
        max_json_depth=64, strict_fields=False, max_model_len=1 << 20, counters=Counters()
    )
    prompt = intake.request(HEAD, Route.CHAT, json.dumps(body).encode(), "r").prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def _rendered(family: str, body: dict[str, Any]) -> str | None:
    """None where the template refuses."""
    prompt = _read(body)
    try:
        return TEMPLATES[family].render(prompt.messages, prompt.tools, prompt.template_options)
    except ValueError:
        return None


@pytest.mark.parametrize("request_of", REQUESTS, ids=lambda one: one["name"])
@pytest.mark.parametrize("family", FAMILIES)
def test_c46_a_request_renders_to_the_text_of_the_engine(
    family: str, request_of: dict[str, Any]
) -> None:
    assert _rendered(family, request_of["body"]) == GOLDEN["texts"][family][request_of["name"]]


def test_c46_every_request_is_asked_of_every_family_and_most_are_answered() -> None:
    names = [one["name"] for one in REQUESTS]
    assert len(set(names)) == len(names)
    for texts in GOLDEN["texts"].values():
        assert list(texts) == names
        assert sum(text is not None for text in texts.values()) > len(names) / 2


def test_c46_rendering_leaves_what_the_client_sent_as_it_was() -> None:
    for request in REQUESTS:
        prompt, same = _read(request["body"]), _read(request["body"])
        for template in TEMPLATES.values():
            with contextlib.suppress(ValueError):  # refused, as the golden file says
                template.render(prompt.messages, prompt.tools, prompt.template_options)
        assert prompt == same
