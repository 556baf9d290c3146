"""Conversations: a checkpoint's chat template, and tokens that no message can forge.

A template is untrusted input: it runs in a sandbox with a budget (`template_sandbox.py`), its
output is bounded, and what goes wrong is one line. Messages are untrusted too: control tokens come
from the template's own text, never from a message. To tell the two apart in what was rendered,
the characters that begin or end a control token's spelling get stand-ins wherever a message (or
a tool) has them:

    message "is <turn|> odd?"  ->  "is ⁅turn|⁆ odd?"      ⁅ and ⁆: characters used nowhere else
    rendered                       ...user\nis ⁅turn|⁆ odd?<turn|>\n...
                                                          ^^^^^^^ a control token; cut here
    encoded                        the pieces between the cuts, stand-ins undone, as plain text

A stand-in is one character for one, so lengths, trimming and the like stay what they were. Pieces
are cut at control tokens only, so an ordinary message gets the very tokens of the reference.

Not here: what the words mean (tools and images come later), tokens (`tokenizer.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

from dgemma.errors import CheckpointError, PromptError
from dgemma.json_reader import shown
from dgemma.tokenizer import Span, Tokenizer, one_line, read_json_object, read_named_tokens

MAX_RENDERED = 1 << 25
"""Characters a template may produce: far above any context, far below what would hurt."""

ROLES = ("system", "developer", "user", "assistant", "model", "tool")
_TEMPLATE_ROLES = {"developer": "system", "model": "assistant"}
"""What templates call the roles that have two names."""

_THOUGHT_BEGIN, _THOUGHT_END = "<|channel>", "<channel|>"
_MAX_DEPTH = 64
_STAND_INS = (*range(0xFDD0, 0xFDF0), *range(0xE000, 0xF900))
"""Code points without a meaning of their own: noncharacters, then private use."""


class ChatTemplate:
    """A chat template, compiled."""

    def __init__(
        self, source: str, named_tokens: Mapping[str, str] | None = None, where: str = "template"
    ) -> None:
        """Raises `CheckpointError` naming `where` for a template that does not compile."""
        from dgemma.template_sandbox import BoundedEnvironment

        self._environment = BoundedEnvironment()
        try:
            self._template = self._environment.compile_template(source)
        except Exception as error:  # jinja2's, and Python's own for what it compiles to
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
        named = read_named_tokens(folder)
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
        """The prompt as text. Raises `PromptError` for messages that are wrong or refused.

        Encoding this text with control tokens parsed lets messages forge them; see `encode_chat`.
        """
        checked, tools = check_messages(messages), check_tools(tools)
        pieces: list[str] = []
        length = 0
        try:
            with self._environment.budget():
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
                        raise ValueError(f"over {MAX_RENDERED:,} characters")
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

    Thoughts spelled out in earlier assistant messages are dropped, whatever the template does.
    Raises `PromptError` like `ChatTemplate.render`.
    """
    checked = check_messages(messages)
    if {_THOUGHT_BEGIN, _THOUGHT_END} <= tokenizer.special_tokens.keys():
        checked = [
            {**message, "content": _without_thoughts(message["content"])}
            if message["role"] == "assistant"
            else message
            for message in checked
        ]
    text, spans = _render_guarded(template, tokenizer, checked, check_tools(tools), thinking)
    if not text.strip():
        raise PromptError("the chat template makes no text of these messages")
    return tokenizer.with_bos(tokenizer.encode_around(text, spans))


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


def check_tools(tools: object) -> list[dict[str, Any]] | None:
    """The tools of a request, or None. Raises `PromptError` unless they are a list of objects."""
    if tools is None:
        return None
    if not isinstance(tools, (list, tuple)):
        raise PromptError(f"tools is of type {type(tools).__name__}, but must be a list of objects")
    for index, tool in enumerate(cast("Sequence[object]", tools)):
        if not isinstance(tool, Mapping):
            raise PromptError(f"tools[{index}] is {shown(tool)}, but must be an object")
    return [_copied(tool, _same, f"tools[{i}]") for i, tool in enumerate(cast("Any", tools))]


def _check_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise PromptError(f"{where} is {shown(message)}, but must be an object")
    fields = cast("Mapping[str, Any]", message)
    role = fields.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise PromptError(f"{where}.role is {shown(role)}; known are {', '.join(ROLES)}")
    content = fields.get("content")
    if content is None and role in ("assistant", "model") and fields.get("tool_calls"):
        content = ""
    rest = {key: value for key, value in fields.items() if key not in ("role", "content")}
    return {
        "role": _TEMPLATE_ROLES.get(role, role),
        "content": _content(content, f"{where}.content"),
        **_copied(rest, _same, where),
    }


def _content(content: Any, where: str) -> str:
    """A string, or the text parts of a list joined in order."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise PromptError(f"{where} is {shown(content)}, but must be a string or a list of parts")
    texts: list[str] = []
    for index, part in enumerate(cast("Sequence[Any]", content)):
        fields = cast("Mapping[str, Any]", part if isinstance(part, Mapping) else {})
        if fields.get("type") != "text":
            raise PromptError(
                f"{where}[{index}] is of type {shown(fields.get('type'))}; only text is supported"
            )
        text = fields.get("text")
        if not isinstance(text, str):
            raise PromptError(f"{where}[{index}].text is {shown(text)}, but must be a string")
        texts.append(text)
    return "".join(texts)


def _without_thoughts(text: str) -> str:
    """The text without thoughts; one that was never closed reaches to the end."""
    return "".join(part.split(_THOUGHT_BEGIN)[0] for part in text.split(_THOUGHT_END))


def _render_guarded(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    thinking: bool,
) -> tuple[str, list[Span]]:
    """The rendered conversation, and the control tokens in it that are the template's own."""
    plain = template.render(messages, tools=tools, thinking=thinking)
    strings = [text for message in messages for text in _strings(_fields(message))]
    strings += _strings(tools)
    edges = {end for token in tokenizer.special_tokens for end in (token[0], token[-1])}
    insides = [token[1:-1] for token in tokenizer.special_tokens]

    def is_inside(text: str) -> bool:
        """A template that writes "<" and ">" itself needs no more than this for a token."""
        middle = text.strip()
        return bool(middle) and any(middle in inside for inside in insides)

    risky = edges.intersection("".join(strings))
    risky |= {character for text in strings if is_inside(text) for character in text.strip()}
    if not risky:
        return plain, tokenizer.find_specials(plain)
    taken = {*plain, *"".join(strings)}
    free = (
        chr(code)
        for code in _STAND_INS
        if chr(code) not in taken
        and not any(form in plain for form in (_json_escape(chr(code)), quote(chr(code))))
    )
    stand_ins = dict(zip(sorted(risky), free, strict=False))
    if len(stand_ins) < len(risky):
        raise PromptError("the messages use every private character there is; leave some out")
    everywhere = str.maketrans({c: s for c, s in stand_ins.items() if c in edges})
    inside_only = str.maketrans(stand_ins)

    def guard(text: str) -> str:
        return text.translate(inside_only if is_inside(text) else everywhere)

    guarded = template.render(
        [{"role": m["role"], **_copied(_fields(m), guard, "message")} for m in messages],
        tools=_copied(tools, guard, "tools"),
        thinking=thinking,
    )
    for character, stand_in in stand_ins.items():  # a template may ask for ASCII-only JSON, or URLs
        guarded = guarded.replace(_json_escape(stand_in), stand_in)
        guarded = guarded.replace(quote(stand_in), quote(character))
    spans = tokenizer.find_specials(guarded)
    text = guarded.translate(str.maketrans({s: c for c, s in stand_ins.items()}))
    if text != plain and not any(map(tokenizer.find_specials, strings)):
        # The template looked at a character we changed, as for "<think>" in an answer. Where no
        # message spells a control token and none was put together, what it meant is right.
        meant = tokenizer.find_specials(plain)
        if [token for *_, token in meant] == [token for *_, token in spans]:
            return plain, meant
    return text, spans


def _json_escape(character: str) -> str:
    return f"\\u{ord(character):04x}"


def _fields(message: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != "role"}


def _strings(value: Any) -> Iterator[str]:
    """Every text in a JSON value that a template could show."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in cast("dict[str, Any]", value).items():
            if not key.isidentifier():
                yield key
            yield from _strings(item)
    elif isinstance(value, list):
        for item in cast("list[Any]", value):
            yield from _strings(item)


def _same(text: str) -> str:
    return text


def _copied(value: Any, change: Callable[[str], str], where: str, depth: int = 0) -> Any:
    """A JSON value with its texts changed; identifiers as keys stay, templates ask for them.

    Raises `PromptError` naming `where` for what is no JSON: a template must not hold live objects.
    """
    if depth > _MAX_DEPTH:
        raise PromptError(f"{where} is nested more than {_MAX_DEPTH} deep")
    if isinstance(value, str):
        return change(str(value))
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Mapping):
        copy: dict[str, Any] = {}
        for key, item in cast("Mapping[Any, Any]", value).items():
            if not isinstance(key, str):
                raise PromptError(f"{where} has the key {shown(key)}, but keys must be strings")
            new = key if key.isidentifier() else change(key)
            copy[new] = _copied(item, change, where, depth + 1)
        return copy
    if isinstance(value, (list, tuple)):
        return [_copied(item, change, where, depth + 1) for item in cast("Sequence[Any]", value)]
    raise PromptError(f"{where} holds a {type(value).__name__}, but may hold JSON only")


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
