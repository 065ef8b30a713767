"""Chat templates are rendered as the engines render them, within bounds, and say what they
object to."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from trunkline.adapters.template import JinjaTemplate, load_template
from trunkline.adapters.tokenizer import load_tokenizer
from trunkline.core.identity import ModelIdentity, Scope, ScopeKind, derive_namespace
from trunkline.core.keys import chain
from trunkline.core.records import WallTime
from trunkline.errors import ConfigError
from trunkline.ports.template import ChatTemplate

MODEL_FOLDER = Path(__file__).resolve().parents[2] / "src" / "trunkline" / "worker" / "model"
SHIPPED = load_template(MODEL_FOLDER)
TOKENIZER = load_tokenizer(MODEL_FOLDER)
USER: dict[str, Any] = {"role": "user", "content": "Hi"}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look", "description": "Über <b> & 'x'", "parameters": {"b": 1, "a": 2}},
}


def _render(
    template: ChatTemplate,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    **options: Any,  # template options are any JSON
) -> str:
    return template.render(messages, tools, options)


def _own(text: str, **special: str) -> JinjaTemplate:
    return JinjaTemplate(text, special)


def test_c46_a_conversation_of_all_roles_renders_to_the_golden_text() -> None:
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "é"}}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "你"}, {"type": "text", "text": "好 "}],
        },
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "  ok\n"},
    ]
    assert _render(SHIPPED, messages, [TOOL]) == (
        "<|bos|><|im_start|>system\nBe brief.\n\n<tools>\n"
        '{"type": "function", "function": {"name": "look", "description": "Über <b> & \'x\'", '
        '"parameters": {"b": 1, "a": 2}}}\n</tools>\n'
        'To call one, answer <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>\n'
        "<|im_start|>user\n你好 <|im_end|>\n"
        '<|im_start|>assistant\n\n<tool_call>{"name": "look", "arguments": {"at": "é"}}</tool_call>'
        "<|im_end|>\n"
        "<|im_start|>tool\n  ok\n<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_c47_a_rendered_prompt_has_exactly_one_bos() -> None:
    text = _render(SHIPPED, [USER])
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    bos = TOKENIZER.encode("", add_special_tokens=True)
    assert len(bos) == 1
    assert ids.count(bos[0]) == 1
    assert ids[0] == bos[0]


def test_a_completion_of_the_same_text_gets_the_same_ids() -> None:
    text = _render(SHIPPED, [USER])
    without_bos = text.removeprefix("<|bos|>")
    assert TOKENIZER.encode(without_bos, add_special_tokens=True) == TOKENIZER.encode(
        text, add_special_tokens=False
    )


def test_c48_changing_one_tool_description_changes_the_text() -> None:
    other = copy.deepcopy(TOOL)
    other["function"]["description"] = "Other"
    texts = {_render(SHIPPED, [USER], tools) for tools in (None, [TOOL], [other])}
    assert len(texts) == 3


def test_c48_other_tools_make_another_key_from_the_block_where_they_differ() -> None:
    other = copy.deepcopy(TOOL)
    other["function"]["description"] = TOOL["function"]["description"] + " and more"
    scope = Scope(kind=ScopeKind.TENANT, org="o", tenant="t")
    namespace = derive_namespace(bytes(32), scope, ModelIdentity(model_id="m", block_tokens=4))
    system = {"role": "system", "content": "Be brief. " * 8}
    prompts = [
        TOKENIZER.encode(_render(SHIPPED, [system, USER], [tool]), add_special_tokens=False)
        for tool in (TOOL, other)
    ]
    differ_at = next(n for n, (a, b) in enumerate(zip(*prompts, strict=False)) if a != b) // 4
    one, two = (chain(namespace, ids).packed for ids in prompts)
    assert 0 < differ_at < len(one) // 32 - 1
    assert one[: 32 * differ_at] == two[: 32 * differ_at]
    for block in range(differ_at, min(len(one), len(two)) // 32):
        assert one[32 * block : 32 * (block + 1)] != two[32 * block : 32 * (block + 1)]


def test_an_empty_list_of_tools_reaches_the_template_as_such() -> None:
    template = _own("{{ tools is none }}")
    assert _render(template, [USER], []) == "False"
    assert _render(template, [USER]) == "True"
    assert _render(SHIPPED, [USER], []) == _render(SHIPPED, [USER])


def test_without_a_generation_prompt_the_text_ends_with_the_last_message() -> None:
    text = _render(SHIPPED, [USER], add_generation_prompt=False)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n")


@pytest.mark.parametrize("content", ["Once upon ", [{"type": "text", "text": "Once upon "}]])
def test_a_continued_message_stays_open_with_its_trailing_space(content: Any) -> None:
    messages = [USER, {"role": "assistant", "content": content}]
    text = _render(SHIPPED, messages, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nOnce upon ")


def test_a_continued_message_that_the_template_strips_is_cut_at_its_text() -> None:
    template = _own("{% for m in messages %}[{{ m.content | trim }}]{% endfor %}")
    assert _render(template, [{"content": " a "}], continue_final_message=True) == "[a"


def test_continuing_and_opening_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="excludes add_generation_prompt"):
        _render(SHIPPED, [USER], continue_final_message=True, add_generation_prompt=True)


def test_an_unknown_role_is_refused_with_the_words_of_the_template() -> None:
    with pytest.raises(ValueError, match="refused: role wizard is not one of system, user"):
        _render(SHIPPED, [{"role": "wizard", "content": "x"}])


def test_an_image_part_is_refused_with_the_words_of_the_template() -> None:
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    with pytest.raises(ValueError, match="part of type image_url is not supported"):
        _render(SHIPPED, [image])


def test_c46_blocks_are_trimmed_as_the_engines_trim_them() -> None:
    template = _own(
        "{% for m in messages %}\n    {% if m.role %}\n{{ m.role }}\n{% endif %}\n{% endfor %}\n"
    )
    assert _render(template, [USER, USER]) == "user\nuser\n"


def test_c46_json_is_printed_plain_in_the_order_given() -> None:
    template = _own("{{ tools | tojson }}|{{ tools | tojson(indent=1) }}")
    text = _render(template, [USER], [TOOL])
    assert text == json.dumps([TOOL], ensure_ascii=False) + "|" + json.dumps(
        [TOOL], ensure_ascii=False, indent=1
    )


def test_loop_controls_and_generation_blocks_are_understood() -> None:
    template = _own(
        "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    assert _render(template, [USER, USER]) == "Hi"


def test_parts_are_joined_for_a_template_that_wants_one_text() -> None:
    parts = {
        "role": "user",
        "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
    }
    template = _own("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    assert _render(template, [parts]) == "a\nb"


def test_special_tokens_and_options_are_in_scope_and_cannot_be_replaced() -> None:
    template = _own("{{ bos_token }}{{ mood }}", bos_token="<s>")
    assert _render(template, [USER], mood="!") == "<s>!"
    with pytest.raises(ValueError, match="option bos_token cannot be set"):
        _render(template, [USER], bos_token="x")
    with pytest.raises(ValueError, match="option messages cannot be set"):
        template.render([USER], None, {"messages": []})


def test_printing_without_end_is_stopped_at_the_cap() -> None:
    template = JinjaTemplate(
        "{% for i in range(90000) %}0123456789{% endfor %}", {}, output_max_characters=1_000
    )
    with pytest.raises(ValueError, match="more than 1000 characters"):
        _render(template, [USER])
    within = JinjaTemplate("{{ 'x' * 1000 }}", {}, output_max_characters=1_000)
    assert len(_render(within, [USER])) == 1_000


@pytest.mark.parametrize(
    "text",
    ["{{ messages[0].nothing.at_all }}", "{{ 1 / 0 }}", "{{ 'Hi' + 1 }}", "{{ range(10**9) }}"],
)
def test_a_failing_expression_is_a_value_error_without_prompt_text(text: str) -> None:
    secret = {"role": "user", "content": "my secret"}
    with pytest.raises(ValueError, match="chat template failed") as caught:
        _render(_own(text), [secret])
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ cycler.__init__ }}"]
)
def test_templates_cannot_leave_the_sandbox_or_change_messages(text: str) -> None:
    messages = [USER]
    try:
        rendered = _render(_own(text), messages)
    except ValueError:
        rendered = ""
    assert "class" not in rendered
    assert messages == [USER]


def test_a_template_that_does_not_compile_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{% if %}"}')
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: line 1"):
        load_template(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"neither chat_template\.jinja nor a chat_template"):
        load_template(tmp_path)


def test_a_file_of_its_own_takes_the_place_of_the_configured_template(tmp_path: Path) -> None:
    config = {
        "bos_token": {"content": "<s>"},
        "chat_template": [{"name": "default", "template": "{{ bos_token }}1"}],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert _render(load_template(tmp_path), [USER]) == "<s>1"
    other = tmp_path / "other.jinja"
    other.write_text("{{ bos_token }}2")
    assert _render(load_template(tmp_path, other), [USER]) == "<s>2"


def test_a_model_may_have_a_template_of_its_own_for_tools(tmp_path: Path) -> None:
    entry = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools: {{ tools | length }}"},
        {"name": "rag", "template": "{% if %}"},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": entry}))
    template = load_template(tmp_path)
    assert _render(template, [USER]) == "plain"
    assert _render(template, [USER], [TOOL]) == "tools: 1"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": entry[:1]}))
    assert load_template(tmp_path).digest != template.digest


def test_tokens_that_a_model_has_of_its_own_are_in_scope(tmp_path: Path) -> None:
    config = {
        "chat_template": "{{ image_token }}{{ audio_token }}{{ add_bos_token }}",
        "image_token": "<i>", "extra_special_tokens": {"audio_token": {"content": "<a>"}},
        "add_bos_token": True,
    }  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert _render(load_template(tmp_path), [USER]) == "<i><a>"


def test_the_digest_covers_the_text_and_the_special_tokens() -> None:
    digests = {
        _own("{{ bos_token }}", bos_token="a").digest,
        _own("{{ bos_token }}", bos_token="b").digest,
        _own("{{ bos_token }} ", bos_token="a").digest,
    }
    assert len(digests) == 3


def test_the_date_is_known_only_where_a_clock_is_given() -> None:
    text = "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% else %}none{% endif %}"
    assert _render(_own(text), [USER]) == "none"
    dated = JinjaTemplate(text, {}, wall=lambda: WallTime(86_400.0 * 365 * 30))
    assert _render(dated, [USER]) == "1999"
