"""Tokens to text and back, through the `tokenizers` library.

User text never becomes a control token: "<turn|>" in a question is seven characters, not the end of
a turn. Only prompts taken as they are (`encode_prompt`) and a chat template's own text are parsed
for control tokens. They are cut out here, before the library sees the text: its own switch is a
property of the whole tokenizer, which threads share.

Not here: stop strings and streaming (`text.py`), conversations (`chat.py`).
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from dgemma.errors import CheckpointError, DgemmaWarning, PromptError

if TYPE_CHECKING:
    import tokenizers

_END_KEYS = ("eos_token", "eot_token", "end_of_turn_token")
"""Where a tokenizer_config.json names tokens that end a text."""
_USUAL_NAMES = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
"""For a folder that names no such token, where tokenizer.json has one of this spelling."""
_MAX_ID = 1 << 32
_MAX_LINE = 300

Span = tuple[int, int, int]
"""Where a text spells a control token: start, end, id."""


class Tokenizer:
    """A checkpoint's tokenizer. Nothing changes once it is made, so that threads may share it."""

    def __init__(self, library: tokenizers.Tokenizer, named_tokens: dict[str, str]) -> None:
        """Takes over `library`; `named_tokens` says which token is `bos_token`, and so on."""
        library.no_truncation()
        library.no_padding()
        library.encode_special_tokens = True  # the library encodes text, and only text
        # Named tokens are control tokens whether or not they are marked, as in transformers.
        named = [text for text in named_tokens.values() if library.token_to_id(text) is not None]
        cast(Any, library).add_special_tokens(named)
        self._library = library
        added = cast("dict[int, Any]", library.get_added_tokens_decoder())
        specials = [token for token in added.values() if token.special]
        self.special_tokens = {token.content: i for i, token in added.items() if token.special}
        self._special_ids = frozenset(self.special_tokens.values())
        self._flags = {token.content: token for token in specials}
        # Longest first, as the library matches.
        spelled = sorted(self.special_tokens, key=len, reverse=True)
        self._spelling = re.compile("|".join(map(re.escape, spelled))) if spelled else None
        usual = {k: text for k, text in _USUAL_NAMES.items() if text in self.special_tokens}
        self.named_tokens = {**usual, **named_tokens}
        """`bos_token`, `eos_token`, ... as the tokenizer's files spell them."""
        # What the library writes for text it has no piece for is no forgery.
        unknown = self.special_tokens.get(self.named_tokens.get("unk_token", "<unk>"))
        self._forbidden = self._special_ids - {unknown}
        self.bos_id = self._named_id("bos_token")
        self.pad_id = self._named_id("pad_token")
        ends = [self._named_id(key) for key in _END_KEYS]
        self.end_ids = tuple(dict.fromkeys(token for token in ends if token is not None))
        """End tokens the tokenizer's own files declare."""

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Reads tokenizer.json and, where there is one, tokenizer_config.json.

        Raises `CheckpointError` naming the file that is missing or cannot be read.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(
                f"{folder} has no tokenizer.json; copy it from the original checkpoint"
            )
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        return cls.from_text(text, read_named_tokens(folder), str(path))

    @classmethod
    def from_text(
        cls, text: str, named_tokens: dict[str, str] | None = None, where: str = "tokenizer.json"
    ) -> Tokenizer:
        """Builds a tokenizer from the content of a tokenizer.json."""
        import tokenizers

        try:
            library = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{where} is no tokenizer: {one_line(error)}") from error
        return cls(library, named_tokens or {})

    @property
    def vocab_size(self) -> int:
        """Tokens it knows, control tokens included; the model's own table may be larger."""
        return self._library.get_vocab_size()

    def encode(self, text: str, *, specials: bool = False) -> list[int]:
        """Token ids of a text, nothing added; control tokens spelled in it only with `specials`.

        Raises `PromptError` for text that is not valid Unicode.
        """
        return self.encode_around(text, self.find_specials(text) if specials else ())

    def find_specials(self, text: str) -> list[Span]:
        """Where `text` spells control tokens, in order, as the library would find them."""
        spans: list[Span] = []
        start = 0
        for match in self._spelling.finditer(text) if self._spelling else ():
            flags = self._flags[match.group()]
            begin, end = match.span()
            if flags.single_word and not _stands_alone(text, begin, end):
                continue
            if flags.lstrip:
                begin = max(start, len(text[:begin].rstrip()))
            if flags.rstrip:
                end = len(text) - len(text[end:].lstrip())
            spans.append((begin, end, self.special_tokens[match.group()]))
            start = end
        return spans

    def encode_around(self, text: str, spans: Iterable[Span]) -> list[int]:
        """Token ids of a text in which `spans` are control tokens and all else is only text."""
        tokens: list[int] = []
        start = 0
        for begin, end, token in spans:
            tokens += self._encode_plain(text[start:begin])
            tokens.append(token)
            start = end
        return tokens + self._encode_plain(text[start:])

    def encode_prompt(self, text: str) -> list[int]:
        """A prompt taken as it is: control tokens parsed, one BOS in front, written or not."""
        return self.with_bos(self.encode(text, specials=True))

    def with_bos(self, tokens: Sequence[int]) -> list[int]:
        """The tokens with exactly one BOS in front (none where the tokenizer has no BOS)."""
        if self.bos_id is None:
            return list(tokens)
        first = 0
        while first < len(tokens) and tokens[first] == self.bos_id:
            first += 1
        return [self.bos_id, *tokens[first:]]

    def decode(self, tokens: Iterable[int]) -> str:
        """Text without control tokens; byte pieces joined, broken ones shown as U+FFFD."""
        return self._library.decode(self.without_specials(tokens), skip_special_tokens=True)

    def raw_decode(self, tokens: Iterable[int]) -> str:
        """Text with control tokens spelled out."""
        return self._library.decode(
            [token for token in tokens if 0 <= token < _MAX_ID], skip_special_tokens=False
        )

    def without_specials(self, tokens: Iterable[int]) -> list[int]:
        """The tokens that are text; ids the tokenizer does not have are none either."""
        return [
            token
            for token in tokens
            if token not in self._special_ids and self._piece(token) is not None
        ]

    def token_text(self, token: int) -> str:
        """One token on its own, for display: a byte piece shows as its name, e.g. <0xE2>."""
        piece = self._piece(token)
        if piece is None or self.is_byte(token):
            return piece or f"<{token}>"
        return self.raw_decode([token])

    def is_byte(self, token: int) -> bool:
        """True for a byte-fallback piece, which is text only together with its neighbours."""
        piece = self._piece(token)
        return piece is not None and len(piece) == 6 and piece[:3] == "<0x" and piece[-1] == ">"

    def special_id(self, text: str) -> int | None:
        """The id of a text that is exactly one control token."""
        return self.special_tokens.get(text)

    def _piece(self, token: int) -> str | None:
        return self._library.id_to_token(token) if 0 <= token < _MAX_ID else None

    def _encode_plain(self, text: str) -> list[int]:
        if not text:
            return []
        try:
            encoding = self._library.encode(text, add_special_tokens=False)
        except TypeError:  # what the library says of a text that is not valid Unicode
            raise PromptError(
                "the text holds half of a surrogate pair, which is not valid Unicode"
            ) from None
        tokens = encoding.ids
        if self._forbidden.isdisjoint(tokens):
            return tokens
        # A model that looks whole words up, without merges, finds a control token as a word.
        for token, (begin, end) in zip(tokens, encoding.offsets, strict=True):
            cut = begin + 1 if end - begin > 1 else begin
            if token in self._forbidden and 0 < cut < len(text):
                return self._encode_plain(text[:cut]) + self._encode_plain(text[cut:])
        return [token for token in tokens if token not in self._forbidden]

    def _named_id(self, key: str) -> int | None:
        spelled = self.named_tokens.get(key)
        if spelled is None:
            return None
        token = self._library.token_to_id(spelled)
        if token is None:
            warnings.warn(
                f"the tokenizer's files name {spelled!r} as {key}, which tokenizer.json does not "
                "have; it is ignored",
                DgemmaWarning,
                stacklevel=2,
            )
        return token


def end_tokens(
    config: Iterable[int], generation: Iterable[int], tokenizer: Tokenizer
) -> tuple[int, ...]:
    """Every token that ends a text: those of both configs and of the tokenizer.

    Pad is one of them only where a file says so: many a checkpoint pads with its end token.
    """
    return tuple(dict.fromkeys((*generation, *config, *tokenizer.end_ids)))


def read_json_object(path: Path) -> dict[str, Any]:
    """The object a JSON file holds; empty where there is no such file.

    Raises `CheckpointError` naming the file when it holds anything else.
    """
    if not path.is_file():
        return {}
    try:
        raw: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {one_line(error)}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return cast("dict[str, Any]", raw)


def read_named_tokens(folder: Path) -> dict[str, str]:
    """Which token is `bos_token`, ...: tokenizer_config.json, else special_tokens_map.json."""
    return {
        **named_tokens(read_json_object(folder / "special_tokens_map.json")),
        **named_tokens(read_json_object(folder / "tokenizer_config.json")),
    }


def named_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """The `..._token` entries of a tokenizer_config.json, plain strings or {"content": ...}."""
    nested = tokenizer_config.get("model_specific_special_tokens")
    named = named_tokens(cast("Mapping[str, Any]", nested)) if isinstance(nested, Mapping) else {}
    for key, value in tokenizer_config.items():
        if isinstance(value, Mapping):
            value = cast("Mapping[str, Any]", value).get("content")
        if key.endswith("_token") and isinstance(value, str):
            named[key] = value
    return named


_WORD = re.compile(r"\w")


def _stands_alone(text: str, begin: int, end: int) -> bool:
    before, after = text[begin - 1 : begin], text[end : end + 1]
    return not (_WORD.match(before) or _WORD.match(after))


def one_line(error: Exception) -> str:
    """An error's message on one line of readable length; its kind where it has none."""
    line = " ".join(str(error).split()) or type(error).__name__
    return line if len(line) <= _MAX_LINE else line[: _MAX_LINE - 3] + "..."
