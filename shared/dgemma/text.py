"""Text as it comes: what of a growing reply is final, and where a stop string ends it.

    tokens -> TextStream -> text that no later token can change -> StopStrings -> text to show

Both hold back what is still open and give it up at `finish`; the pieces joined are the whole.

Not here: tokens (`tokenizer.py`), events (`reply.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from dgemma.errors import PromptError
from dgemma.json_reader import shown
from dgemma.tokenizer import Tokenizer

_BROKEN = "\ufffd"


class TextStream:
    """Decodes tokens piece by piece; the pieces joined equal `decode` of all tokens at once.

    Held back are a run of byte pieces (its bytes are judged together, so that one more can change
    them all) and text that ends in U+FFFD (a character cut in two). A piece is decoded together
    with the piece before it and the difference is taken, because some decoders treat the first
    token of a text differently.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []  # tokens of the last piece given out
        self._open: list[int] = []

    @property
    def holds(self) -> bool:
        """Whether tokens are held back."""
        return bool(self._open)

    def feed(self, tokens: Sequence[int]) -> str:
        """Takes tokens; returns what became final."""
        self._open += self._tokenizer.without_specials(tokens)
        ready = len(self._open)
        while ready and self._tokenizer.is_byte(self._open[ready - 1]):
            ready -= 1
        text = self._decoded(ready)
        return "" if text.endswith(_BROKEN) else self._give(text, ready)

    def finish(self) -> str:
        """The rest, with what is still broken shown as `decode` shows it."""
        return self._give(self._decoded(len(self._open)), len(self._open))

    def _decoded(self, count: int) -> str:
        before = self._tokenizer.decode(self._context)
        return self._tokenizer.decode(self._context + self._open[:count])[len(before) :]

    def _give(self, text: str, count: int) -> str:
        if count:
            self._context, self._open = self._open[:count], self._open[count:]
        return text


class StopStrings:
    """Finds where a growing text completes one of some strings, and lets through what is before it.

    The string that is complete first counts, and of two complete at once the longer, so that the
    pieces in which the text comes make no difference.
    """

    def __init__(
        self, strings: Sequence[str] = (), token_ids: frozenset[int] = frozenset()
    ) -> None:
        self.strings = tuple(strings)
        self.token_ids = token_ids
        """Stop strings that are control tokens: they never show as text."""
        self.found = False
        self._held: str = ""

    @classmethod
    def from_option(cls, option: object, tokenizer: Tokenizer) -> StopStrings:
        """From a string, several, or None; empty strings are ignored.

        Raises `PromptError` for anything that is not text.
        """
        if option is None:
            return cls()
        if not isinstance(option, Sequence) or isinstance(option, bytes):
            raise PromptError(f"stop is {shown(option)}, but must be a string or a list of strings")
        items = cast("Sequence[object]", [option] if isinstance(option, str) else option)
        strings: list[str] = []
        token_ids: set[int] = set()
        for item in items:
            if not isinstance(item, str):
                raise PromptError(f"stop holds {shown(item)}, but may hold strings only")
            token = tokenizer.special_id(item)
            if token is not None:
                token_ids.add(token)
            elif item:
                strings.append(item)
        return cls(strings, frozenset(token_ids))

    def feed(self, text: str) -> str:
        """Takes text; returns what is certainly before any stop string."""
        if self.found:
            return ""
        text = self._held + text
        hits = [
            (place + len(string), place)
            for string in self.strings
            if (place := text.find(string)) >= 0
        ]
        if hits:
            self.found = True
            self._held = ""
            return text[: min(hits)[1]]
        keep = max((_overlap(text, string) for string in self.strings), default=0)
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        """What was held back as the possible beginning of a stop string."""
        held, self._held = self._held, ""
        return held


def tokens_within(tokenizer: Tokenizer, tokens: Sequence[int], text: str) -> list[int]:
    """The longest beginning of `tokens` whose text is a beginning of `text`.

    Lengths alone do not tell: three bytes of a character may show as three, and with the fourth as
    one.
    """
    stream = TextStream(tokenizer)
    certain = length = 0
    open_end = len(tokens)
    for index, token in enumerate(tokens):
        length += len(stream.feed([token]))
        if length > len(text):
            open_end = index
            break
        if not stream.holds:
            certain = index + 1
    # What the stream held back up to here may be text all the same.
    for count in range(open_end, certain, -1):
        if text.startswith(tokenizer.decode(tokens[:count])):
            return list(tokens[:count])
    return list(tokens[:certain])


def _overlap(text: str, string: str) -> int:
    """The length of the longest end of `text` that begins `string`."""
    longest = min(len(text), len(string) - 1)
    return next((n for n in range(longest, 0, -1) if string.startswith(text[-n:])), 0)
