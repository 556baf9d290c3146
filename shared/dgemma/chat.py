"""Conversations: a checkpoint's chat template, and tokens that no message can forge.

A template is untrusted input: it runs in jinja2's sandbox, its output is bounded, and what goes
wrong is one line. Messages are untrusted too: control tokens spelled in them stay text. Where a
message spells one, a placeholder nobody can guess takes its place while the template is rendered;
all else is encoded as one string, so that ordinary messages get the very tokens of the reference.

Not here: what the words mean (thoughts, tools, images come later), tokens (`tokenizer.py`).
"""

from __future__ import annotations

import datetime
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

from dgemma.errors import CheckpointError, PromptError
from dgemma.tokenizer import Tokenizer, named_tokens, one_line, read_json_object

MAX_RENDERED = 1 << 26
"""Characters a template may produce: far above any context, far below what would hurt."""

ROLES = ("system", "developer", "user", "assistant", "model", "tool")
_ASSISTANT = ("assistant", "model")
_THOUGHT_MARKERS = ("<|channel>", "<channel|>")
"""Left in an assistant's message: templates look for them to drop earlier thoughts."""


class ChatTemplate:
    """A chat template, compiled."""

    def __init__(
        self, source: str, named_tokens: Mapping[str, str] | None = None, where: str = "template"
    ) -> None:
        """Raises `CheckpointError` naming `where` for a template that does not compile."""
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        helpers: dict[str, Any] = {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
        environment.globals.update(helpers)
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise CheckpointError(
                f"{where} is no valid chat template: {one_line(error)}"
            ) from error
        self._where = where
        self._named_tokens = dict(named_tokens or {})

    @classmethod
    def from_folder(cls, folder: Path) -> ChatTemplate | None:
        """The template of a checkpoint: chat_template.jinja, chat_template.json, or the one inside
        tokenizer_config.json; None where there is none."""
        config = read_json_object(folder / "tokenizer_config.json")
        named = named_tokens(config)
        jinja = folder / "chat_template.jinja"
        if jinja.is_file():
            try:
                return cls(jinja.read_text(encoding="utf-8"), named, str(jinja))
            except (OSError, UnicodeDecodeError) as error:
                raise CheckpointError(f"{jinja} cannot be read: {one_line(error)}") from error
        for path, raw in (
            (folder / "chat_template.json", read_json_object(folder / "chat_template.json")),
            (folder / "tokenizer_config.json", config),
        ):
            source = _default_template(raw.get("chat_template"))
            if source is not None:
                return cls(source, named, str(path))
        return None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        thinking: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt as text. Raises `PromptError` for messages that are wrong or refused."""
        checked = check_messages(messages)
        pieces: list[str] = []
        length = 0
        try:
            for piece in self._template.generate(
                **self._named_tokens,
                messages=checked,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                enable_thinking=thinking,
            ):
                pieces.append(piece)
                length += len(piece)
                if length > MAX_RENDERED:
                    raise PromptError(
                        f"{self._where} makes over {MAX_RENDERED:,} characters of these messages"
                    )
        except PromptError:
            raise
        except Exception as error:  # a template can raise anything at all
            raise PromptError(f"{self._where} refuses these messages: {one_line(error)}") from error
        return "".join(pieces)


def encode_chat(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    thinking: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[int]:
    """The token ids of a conversation, up to where the model's turn begins; exactly one BOS.

    Raises `PromptError` like `ChatTemplate.render`.
    """
    safe, spelled = _with_placeholders(check_messages(messages), tokenizer)
    rendered = template.render(safe, thinking=thinking, tools=tools)
    tokens: list[int] = []
    if not spelled:
        tokens = tokenizer.encode(rendered, specials=True)
    else:
        for part in re.split(f"({'|'.join(map(re.escape, spelled))})", rendered):
            if part in spelled:
                tokens += tokenizer.encode(spelled[part])
            elif part:
                tokens += tokenizer.encode(part, specials=True)
    return tokenizer.with_bos(tokens)


def check_messages(messages: object) -> list[dict[str, Any]]:
    """The messages with their content as one string each.

    Raises `PromptError` naming the message and the field.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise PromptError("messages must be a list of objects with a role and a content")
    items = cast("Sequence[Any]", messages)
    if not items:
        raise PromptError("messages is empty; it must hold at least one message")
    return [_check_message(message, f"messages[{index}]") for index, message in enumerate(items)]


def _check_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise PromptError(f"{where} is {message!r}, but must be an object")
    fields = cast("Mapping[str, Any]", message)
    role = fields.get("role")
    if role not in ROLES:
        raise PromptError(f"{where}.role is {role!r}; known are {', '.join(ROLES)}")
    return {**fields, "role": role, "content": _content(fields.get("content"), f"{where}.content")}


def _content(content: Any, where: str) -> str:
    """A string, or the text parts of a list joined in order."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise PromptError(f"{where} is {content!r}, but must be a string or a list of parts")
    texts: list[str] = []
    for index, part in enumerate(cast("Sequence[Any]", content)):
        fields = cast("Mapping[str, Any]", part if isinstance(part, Mapping) else {})
        if fields.get("type") != "text":
            raise PromptError(
                f"{where}[{index}] is of type {fields.get('type')!r}; only text is supported"
            )
        text = fields.get("text")
        if not isinstance(text, str):
            raise PromptError(f"{where}[{index}].text is {text!r}, but must be a string")
        texts.append(text)
    return "".join(texts)


def _with_placeholders(
    messages: list[dict[str, Any]], tokenizer: Tokenizer
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Replaces control tokens spelled in messages; returns what each placeholder stands for."""
    nonce = secrets.token_hex(8)
    spelled: dict[str, str] = {}
    safe: list[dict[str, Any]] = []
    for message in messages:
        kept = _THOUGHT_MARKERS if message["role"] in _ASSISTANT else ()
        forbidden = [token for token in tokenizer.special_tokens if token not in kept]
        # Longest first, as the tokenizer matches.
        pattern = "|".join(re.escape(token) for token in sorted(forbidden, key=len, reverse=True))

        def replace(match: re.Match[str]) -> str:
            placeholder = f"[{nonce}-{len(spelled)}]"
            spelled[placeholder] = match.group()
            return placeholder

        text = re.sub(pattern, replace, message["content"]) if pattern else message["content"]
        safe.append({**message, "content": text})
    return safe, spelled


def _default_template(raw: Any) -> str | None:
    """A template given as a string, or as a list of named ones of which "default" counts."""
    if isinstance(raw, str):
        return raw
    if isinstance(raw, Mapping):
        return _default_template(cast("Mapping[str, Any]", raw).get("default"))
    if isinstance(raw, list):
        for entry in cast("list[Any]", raw):
            if isinstance(entry, Mapping):
                fields = cast("Mapping[str, Any]", entry)
                if fields.get("name") == "default":
                    return _default_template(fields.get("template"))
    return None


def _to_json(value: Any, indent: int | None = None) -> str:
    """`tojson` without HTML escapes, as chat templates expect it."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise PromptError(f"the chat template refuses these messages: {message}")


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
