"""A model's Jinja chat template as a `ChatTemplate`, rendered as the engines render it.

Rendering parity is what makes gateway keys equal engine keys: same block trimming, same `tojson`,
same names in scope, same cut for a continued message. Templates run in Jinja's sandbox with a cap
on what they print; they come from the operator, and a client can never set one.

Must never: print prompt text in an error. Read `conversation.py` for what a template is given.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import msgspec

from trunkline.adapters.content_format import takes_parts
from trunkline.adapters.conversation import (
    as_engines_see,
    options_as_engines_see,
    tools_as_engines_see,
)
from trunkline.core.anthropic import EFFORTS, NO_EFFORT
from trunkline.core.records import WallTime
from trunkline.errors import ConfigError
from trunkline.ports.template import ChatTemplate

OUTPUT_MAX_CHARACTERS = 64 << 20  # eight times the largest request body by default
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
_RESERVED_OPTIONS = frozenset(
    {"messages", "tools", "documents", "raise_exception", "strftime_now", *_SPECIAL_NAMES}
)
_OWN_TOKENIZERS = {"mistral-common": "tekken.json", "mistral-common (v3)": "tokenizer.model.v*"}
_OWN_RENDERERS = frozenset({
    "gpt_oss", "MoonshotKimiaForCausalLM", "KimiK3ForConditionalGeneration",
    "DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM", "DeepseekV4ForConditionalGeneration",
    "DeepseekV41ForCausalLM", "InklingForCausalLM", "InklingForConditionalGeneration",
})  # fmt: skip
"""Model types and architectures whose prompts vLLM 0.32 makes without a template."""
_RAISED_IN_EXPRESSIONS = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError)
_CONTINUES_HERE = "CONTINUE_FINAL_MESSAGE_TAG "
"""Put behind a message that is to be continued, as transformers does: the prompt ends there."""


class _ModelConfig(msgspec.Struct):
    model_type: str = ""
    architectures: list[str] | None = None


_HI = {"role": "user", "content": "Hi"}
_SYSTEM_IN_BETWEEN = [
    {"role": role, "content": "t"} for role in ("system", "user", "system", "user")
]


class TemplateRefusal(ValueError):
    """The template itself objects, by `raise_exception`; its message is the operator's text."""


def load_template(
    folder: Path,
    template_file: Path | None = None,
    wall: Callable[[], WallTime] | None = None,
) -> ChatTemplate:
    """Read a model folder: `tokenizer_config.json`, and `chat_template.jinja` or the config's own.

    `template_file` takes the template's place. `wall` is the clock behind `strftime_now`; without
    one the name is not defined, and templates that ask for the date fall back to the one written
    in them. Raises ConfigError that names the file.
    """
    config_path = folder / "tokenizer_config.json"
    try:
        config = msgspec.json.decode(config_path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise ConfigError(f"{config_path} cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{config_path} is not a JSON object: {error}") from error
    path = template_file or folder / "chat_template.jinja"
    if template_file is not None or path.exists():
        try:
            text: Any = path.read_text("utf-8")  # or what the config holds
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"chat template {path} cannot be read: {error}") from error
    else:
        path = config_path
        text = config.get("chat_template")
    texts = _texts_by_name(text)
    if "default" not in texts:
        raise ConfigError(f"{folder} has neither chat_template.jinja nor a chat_template entry")
    special = special_tokens(config)
    try:
        plain = JinjaTemplate(texts["default"], special, wall=wall)
        if "tool_use" not in texts:
            return plain
        return _ByTools(plain, JinjaTemplate(texts["tool_use"], special, wall=wall))
    except ValueError as error:
        raise ConfigError(f"chat template {path}: {error}") from error


def why_not_by_template(folder: Path) -> str:
    """Why vLLM renders chats of this model otherwise than by its template; empty where it does not.

    What the folder does not tell counts for nothing.
    """
    for name, pattern in _OWN_TOKENIZERS.items():
        if any(folder.glob(pattern)) and any(folder.glob("consolidated*.safetensors")):
            return f"engines render its chats by {name}, not by its template"
    try:
        config = msgspec.json.decode((folder / "config.json").read_bytes(), type=_ModelConfig)
    except (OSError, msgspec.DecodeError):
        return ""
    kind = config.model_type
    if kind in _OWN_RENDERERS or not _OWN_RENDERERS.isdisjoint(config.architectures or ()):
        return f"engines render chats of {kind or 'this model'} by code of their own"
    return ""


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and its like of a tokenizer's config, which gives them as text or as an
    object; also those that a model has of its own, under any name that ends in `_token`."""
    own: Any = config.get("extra_special_tokens")
    extra = dict(cast("Mapping[str, Any]", own)) if isinstance(own, Mapping) else {}
    named = {name: value for name, value in config.items() if name.endswith("_token")}
    found: dict[str, str] = {}
    for name, value in {**named, **extra}.items():
        if isinstance(value, Mapping):
            value = cast("Mapping[str, Any]", value).get("content")
        if isinstance(value, str):
            found[name] = value
    return found


class JinjaTemplate:
    """One compiled template. Raises ValueError when the text does not compile."""

    def __init__(
        self,
        text: str,
        special_tokens: Mapping[str, str],
        *,
        wall: Callable[[], WallTime] | None = None,
        output_max_characters: int = OUTPUT_MAX_CHARACTERS,
    ) -> None:
        environment = _environment(wall)
        try:
            tree = environment.parse(text)
            self._template = environment.from_string(text)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"line {error.lineno}: {error.message}") from error
        self._special_tokens = dict(special_tokens)
        self._reserved = _RESERVED_OPTIONS.union(special_tokens)
        self.takes_parts = takes_parts(tree)
        self.wants_system_first = _refuses_late_systems(text)
        self._effort = ""
        self._knows_developer = '"developer"' in text or "'developer'" in text
        self._output_max_characters = output_max_characters
        described = json.dumps([text, sorted(self._special_tokens.items())])
        self.digest = hashlib.sha256(described.encode("utf-8", "surrogatepass")).hexdigest()

    @property
    def effort_without_thinking(self) -> str:
        """`none`, or `low` where the template knows none, or takes it for a thinking effort."""
        if not self._effort:
            without = self._probed(NO_EFFORT)
            is_known = without is not None and without not in map(self._probed, EFFORTS)
            self._effort = NO_EFFORT if is_known else "low"
        return self._effort

    def _probed(self, effort: str) -> str | None:
        try:
            return self.render([_HI], None, {"reasoning_effort": effort})
        except ValueError:
            return None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> str:
        given = options_as_engines_see(options)
        reserved = self._reserved.intersection(given)
        if reserved:
            raise ValueError(f"template option {min(reserved)} cannot be set")
        is_continuing = bool(given.pop("continue_final_message", False))
        is_opening = bool(given.pop("add_generation_prompt", not is_continuing))
        if is_continuing and (is_opening or not messages):
            problem = "excludes add_generation_prompt" if is_opening else "needs a message"
            raise ValueError(f"continue_final_message {problem}")
        shown = as_engines_see(
            messages,
            takes_parts=self.takes_parts,
            knows_developer=self._knows_developer,
            calls_as_given=bool(given.pop("calls_as_given", False)),
        )
        last_text = _mark_end(shown[-1]) if is_continuing else ""
        rendered = self._bounded_output(
            {
                **self._special_tokens,
                **given,
                "messages": shown,
                "tools": tools_as_engines_see(tools),
                "documents": None,
                "add_generation_prompt": is_opening,
            }
        )
        return _cut_at_mark(rendered, last_text) if is_continuing else rendered

    def _bounded_output(self, variables: dict[str, Any]) -> str:
        parts: list[str] = []
        characters = 0
        try:
            for part in self._template.generate(variables):
                characters += len(part)
                if characters > self._output_max_characters:
                    break
                parts.append(part)
        except TemplateRefusal:
            raise
        except jinja2.TemplateError as error:
            raise ValueError(f"chat template failed: {error.message}") from error
        except _RAISED_IN_EXPRESSIONS as error:
            # What Python raises inside an expression may quote a message, so only its kind is told.
            raise ValueError(f"chat template failed: {type(error).__name__}") from error
        except RecursionError as error:
            raise ValueError("chat template failed: nested too deeply") from error
        if characters > self._output_max_characters:
            limit = self._output_max_characters
            raise ValueError(f"chat template printed more than {limit} characters")
        return "".join(parts)


class _ByTools:
    """A model with a template of its own for requests that bring tools."""

    def __init__(self, plain: JinjaTemplate, with_tools: JinjaTemplate) -> None:
        self._plain = plain
        self._with_tools = with_tools
        both = plain.digest + with_tools.digest
        self.digest = hashlib.sha256(both.encode("ascii")).hexdigest()
        self.takes_parts = plain.takes_parts and with_tools.takes_parts
        self.wants_system_first = plain.wants_system_first or with_tools.wants_system_first

    @property
    def effort_without_thinking(self) -> str:
        return self._plain.effort_without_thinking

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> str:
        chosen = self._plain if tools is None else self._with_tools
        return chosen.render(messages, tools, options)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what the assistant said; it prints its
    body, in a scope of its own as the engines have it."""

    tags = {"generation"}  # noqa: RUF012  the base class declares a plain set

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        block = jinja2.nodes.CallBlock(self.call_method("_printed"), [], [], body)
        return block.set_lineno(line)

    def _printed(self, caller: Callable[[], str]) -> str:
        return caller()


def _refuses_late_systems(text: str) -> bool:
    """As vLLM finds it out: in an environment with less in it than the one that renders, where what
    is missing counts as a refusal.
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    variables: dict[str, Any] = {"messages": _SYSTEM_IN_BETWEEN, "add_generation_prompt": False}
    try:
        environment.from_string(text).render(variables)
    except (jinja2.TemplateError, *_RAISED_IN_EXPRESSIONS, RecursionError):
        return True
    return False


def _environment(
    wall: Callable[[], WallTime] | None,
) -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    names: dict[str, Callable[..., Any]] = {"raise_exception": _refuse}
    if wall is not None:
        names["strftime_now"] = _Today(wall)
    # Jinja leaves the values of both tables untyped.
    environment.globals.update(names)  # pyright: ignore[reportUnknownMemberType]
    environment.filters["tojson"] = _to_json  # pyright: ignore[reportUnknownMemberType]
    return environment


class _Today:
    """`strftime_now(pattern)`, in local time as the engines have it."""

    def __init__(self, wall: Callable[[], WallTime]) -> None:
        self._wall = wall

    def __call__(self, pattern: str) -> str:
        return datetime.datetime.fromtimestamp(self._wall()).strftime(pattern)


def _refuse(message: str) -> NoReturn:
    raise TemplateRefusal(f"chat template refused: {message}")


def _to_json(
    value: Any,  # whatever JSON the client sent
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML and sorts keys, which no engine's rendering does."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _texts_by_name(entry: Any) -> dict[str, str]:
    """One text, or a list of {"name", "template"} objects, as a tokenizer's config has it."""
    if isinstance(entry, str):
        return {"default": entry} if entry else {}
    found: dict[str, str] = {}
    for one in cast("list[Any]", entry) if isinstance(entry, list) else []:
        match one:
            case {"name": str(name), "template": str(text)}:
                found[name] = text
            case _:
                pass  # of no use to an engine either
    return found


def _mark_end(message: dict[str, Any]) -> str:
    """Mark where the last message's text ends; the text."""
    content: Any = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _CONTINUES_HERE
        return content
    for part in reversed(cast("list[dict[str, Any]]", content)):
        if "text" in part:
            text: str = part["text"]
            part["text"] = text + _CONTINUES_HERE
            return text
    raise ValueError("continue_final_message needs text in the last message")


def _cut_at_mark(rendered: str, last_text: str) -> str:
    """End the prompt inside the last message, so that the engine goes on writing it."""
    mark = _CONTINUES_HERE.strip()
    end = rendered.rfind(mark)
    if end < 0 or last_text.strip() not in rendered:
        raise ValueError("continue_final_message: the template changes the last message's text")
    kept = rendered[:end]
    # A template that strips messages has also stripped the white space that the content ends with.
    return kept if rendered.startswith(_CONTINUES_HERE, end) else kept.rstrip()
