"""Bodies of `/v1/messages` and `/v1/responses`, read and rendered here, are byte for byte what the
engine would render.

The golden texts are vLLM's own, by `tools/chat_golden.py`, with the templates of
`test_template_parity.py`.
"""

from __future__ import annotations

import contextlib
import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from trunkline.adapters.template import JinjaTemplate
from trunkline.core.anthropic import fitted
from trunkline.core.records import WallTime
from trunkline.gateway.chat import chat_prompt
from trunkline.gateway.contracts import ChatPrompt
from trunkline.gateway.messages import messages_prompt
from trunkline.gateway.responses import responses_prompt

FOLDER = Path(__file__).parent / "chat_golden"
READ = {"messages": messages_prompt, "responses": responses_prompt}
GOLDEN: dict[str, Any] = {
    kind: json.loads((FOLDER / f"golden_{kind}.json").read_text("utf-8")) for kind in READ
}
FAMILIES: dict[str, dict[str, str]] = json.loads((FOLDER / "families.json").read_text("utf-8"))
REQUESTS: dict[str, list[dict[str, Any]]] = {
    kind: json.loads((FOLDER / f"{kind}.json").read_text("utf-8")) for kind in READ
}
MIDDAY = WallTime(datetime.datetime.fromisoformat(GOLDEN["messages"]["date"]).timestamp())
TEMPLATES = {
    family: JinjaTemplate(
        (FOLDER / f"{family}.jinja").read_text("utf-8"), special, wall=lambda: MIDDAY
    )
    for family, special in FAMILIES.items()
}


def rendered(family: str, prompt: ChatPrompt) -> str | None:
    """None where the template refuses."""
    template = TEMPLATES[family]
    messages, options = prompt.messages, prompt.template_options
    try:
        if prompt.is_anthropic:
            messages, options = fitted(messages, options, template, prompt.thinks_not)
        return template.render(messages, prompt.tools, options)
    except ValueError:
        return None


@pytest.mark.parametrize(
    ("kind", "name", "body"),
    [(kind, one["name"], one["body"]) for kind, all_of in REQUESTS.items() for one in all_of],
    ids=lambda one: one if isinstance(one, str) else "",
)
@pytest.mark.parametrize("family", FAMILIES)
def test_c46_a_body_renders_to_the_text_of_the_engine(
    family: str, kind: str, name: str, body: dict[str, Any]
) -> None:
    prompt = READ[kind](body)
    assert not prompt.unknown
    assert rendered(family, prompt) == GOLDEN[kind]["texts"][family][name]


@pytest.mark.parametrize("kind", READ)
def test_c46_every_body_is_asked_of_every_family_and_most_are_answered(kind: str) -> None:
    names = [one["name"] for one in REQUESTS[kind]]
    assert len(set(names)) == len(names)
    for texts in GOLDEN[kind]["texts"].values():
        assert list(texts) == names
        assert sum(text is not None for text in texts.values()) > len(names) / 2


@pytest.mark.parametrize("kind", READ)
def test_reading_a_body_leaves_it_as_it_was(kind: str) -> None:
    for request in REQUESTS[kind]:
        before = json.dumps(request["body"])
        prompt = READ[kind](request["body"])
        for family in TEMPLATES:
            with contextlib.suppress(ValueError):
                rendered(family, prompt)
        assert json.dumps(request["body"]) == before
        assert prompt == READ[kind](request["body"])


@pytest.mark.parametrize("family", FAMILIES)
def test_c45_a_conversation_is_the_same_text_in_every_dialect(family: str) -> None:
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    chat = chat_prompt({"messages": [{"role": "system", "content": "S"}, *turns]})
    messages = messages_prompt({"system": [{"type": "text", "text": "S"}], "messages": turns})
    responses = responses_prompt({"instructions": "S", "input": turns})
    texts = {rendered(family, prompt) for prompt in (chat, messages, responses)}
    assert len(texts) == 1
