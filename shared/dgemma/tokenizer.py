"""Tokens to text and back, through the `tokenizers` library.

User text never becomes a control token: "<turn|>" in a question is eight characters, not the end of
a turn. Only prompts taken as they are (`encode_prompt`) and a chat template's own text are parsed
for control tokens.

Not here: stop strings and streaming (`text.py`), conversations (`chat.py`).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from dgemma.errors import CheckpointError, DgemmaWarning

if TYPE_CHECKING:
    import tokenizers

_END_KEYS = ("eos_token", "eot_token", "end_of_turn_token")
"""Where a tokenizer_config.json names tokens that end a text."""


class Tokenizer:
    """A checkpoint's tokenizer. Stateless, so that threads may share it."""

    def __init__(
        self,
        parsing: tokenizers.Tokenizer,
        plain: tokenizers.Tokenizer,
        named_tokens: dict[str, str],
    ) -> None:
        # Whether control tokens are parsed is a switch on the library's object: two objects, each
        # with its own setting, leave nothing to be switched while another thread encodes.
        self._parsing = parsing
        self._plain = plain
        self.named_tokens = named_tokens
        """`bos_token`, `eos_token`, ... as tokenizer_config.json spells them."""
        added = cast("dict[int, Any]", parsing.get_added_tokens_decoder())
        self.special_tokens = {token.content: i for i, token in added.items() if token.special}
        self._special_ids = frozenset(self.special_tokens.values())
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
        return cls.from_text(
            text, named_tokens(read_json_object(folder / "tokenizer_config.json")), str(path)
        )

    @classmethod
    def from_text(
        cls, text: str, named_tokens: dict[str, str] | None = None, where: str = "tokenizer.json"
    ) -> Tokenizer:
        """Builds a tokenizer from the content of a tokenizer.json."""
        import tokenizers

        try:
            parsing, plain = (tokenizers.Tokenizer.from_str(text) for _ in range(2))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{where} is no tokenizer: {one_line(error)}") from error
        for made in (parsing, plain):
            made.no_truncation()
            made.no_padding()
        plain.encode_special_tokens = True
        return cls(parsing, plain, named_tokens or {})

    @property
    def vocab_size(self) -> int:
        return self._parsing.get_vocab_size()

    def encode(self, text: str, *, specials: bool = False) -> list[int]:
        """Token ids of a text; control tokens spelled in it are parsed only with `specials`."""
        encoder = self._parsing if specials else self._plain
        return encoder.encode(text, add_special_tokens=False).ids

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
        return self._parsing.decode(self.without_specials(tokens), skip_special_tokens=True)

    def raw_decode(self, tokens: Iterable[int]) -> str:
        """Text with control tokens spelled out."""
        return self._parsing.decode(list(tokens), skip_special_tokens=False)

    def without_specials(self, tokens: Iterable[int]) -> list[int]:
        """The tokens that are text."""
        return [token for token in tokens if token not in self._special_ids]

    def token_text(self, token: int) -> str:
        """One token on its own, for display: a byte piece shows as its name, e.g. <0xE2>."""
        piece = self._parsing.id_to_token(token)
        if piece is None or self.is_byte(token):
            return piece or f"<{token}>"
        return self.raw_decode([token])

    def is_byte(self, token: int) -> bool:
        """True for a byte-fallback piece, which is text only together with its neighbours."""
        piece = self._parsing.id_to_token(token)
        return piece is not None and len(piece) == 6 and piece[:3] == "<0x" and piece[-1] == ">"

    def special_id(self, text: str) -> int | None:
        """The id of a text that is exactly one control token."""
        return self.special_tokens.get(text)

    def _named_id(self, key: str) -> int | None:
        spelled = self.named_tokens.get(key)
        if spelled is None:
            return None
        token = self._parsing.token_to_id(spelled)
        if token is None:
            warnings.warn(
                f"tokenizer_config.json names {spelled!r} as {key}, which tokenizer.json does not "
                "have; it is ignored",
                DgemmaWarning,
                stacklevel=2,
            )
        return token


def end_tokens(
    config: Iterable[int], generation: Iterable[int], tokenizer: Tokenizer
) -> tuple[int, ...]:
    """Every token that ends a text: those of both configs and of the tokenizer, never pad."""
    ends = dict.fromkeys((*generation, *config, *tokenizer.end_ids))
    return tuple(token for token in ends if token != tokenizer.pad_id)


def read_json_object(path: Path) -> dict[str, Any]:
    """The object a JSON file holds; empty where there is no such file.

    Raises `CheckpointError` naming the file when it holds anything else.
    """
    if not path.is_file():
        return {}
    try:
        raw: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {one_line(error)}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return cast("dict[str, Any]", raw)


def named_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """The `..._token` entries of a tokenizer_config.json, plain strings or {"content": ...}."""
    named: dict[str, str] = {}
    for key, value in tokenizer_config.items():
        if isinstance(value, Mapping):
            value = cast("Mapping[str, Any]", value).get("content")
        if key.endswith("_token") and isinstance(value, str):
            named[key] = value
    return named


def one_line(error: Exception) -> str:
    """An error's message on one line; its kind where it has none."""
    return " ".join(str(error).split()) or type(error).__name__
