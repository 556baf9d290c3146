"""What reaches a terminal: the reply on standard output, one-liners on standard error.

    stdout   the model's text as it is, one newline at its end, and nothing else
    stderr   "dgemma: ..." lines, made printable: no name from a checkpoint can steer the terminal

Not here: the live canvas (`view.py`), what is said (`commands/`).
"""

from __future__ import annotations

import os
import sys
import unicodedata
from collections.abc import Generator
from contextlib import contextmanager
from typing import Literal, TextIO

from dgemma.errors import DgemmaError

_C0_PICTURES = 0x2400
"""Unicode's pictures of the control characters 0 to 31 begin here."""
_UNPRINTABLE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories that move the cursor, reorder text or cannot be encoded."""


class OutputError(DgemmaError, OSError):
    """Standard output that cannot be written."""


def standard(name: Literal["stdin", "stdout", "stderr"]) -> TextIO | None:
    """A standard stream; None where the process was started with it closed."""
    return getattr(sys, name)


def printable(text: str) -> str:
    """The text with every control and format character replaced by a visible one; newlines stay.

    What is left cannot move the cursor, change colours, reorder the line, or fail to encode in
    UTF-8.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(_visible(character) for character in text)


def _visible(character: str) -> str:
    if character == "\n" or character.isprintable():
        return character
    if character == "\t":
        return "    "
    if character < " ":
        return chr(_C0_PICTURES + ord(character))
    return "\ufffd" if unicodedata.category(character) in _UNPRINTABLE else character


def one_line(message: object) -> str:
    """A message on one printable line."""
    return printable(" ".join(str(message).split()))


def say(message: object) -> None:
    """Prints one "dgemma: ..." line on standard error, where there is one."""
    stream = standard("stderr")
    if stream is not None:
        line = f"dgemma: {one_line(message)}"
        encoding = stream.encoding or "utf-8"
        print(line.encode(encoding, "replace").decode(encoding), file=stream, flush=True)


class TextOutput:
    """Standard output of one reply: pieces as they come, a newline at the end if it is missing.

    With `hold`, something else has the terminal until `finish`: pieces meant for it wait, while a
    pipe gets them at once all the same. A character that standard output's encoding lacks is
    written as "?".
    """

    def __init__(self, *, hold: bool = False) -> None:
        stream = standard("stdout")
        self._hold = hold and stream is not None and stream.isatty()
        self._held: list[str] = []
        self._last = ""

    def write(self, piece: str) -> None:
        if self._hold:
            self._held.append(piece)
        else:
            self._write(piece)

    def finish(self) -> None:
        """Writes what was held, and the last newline; the second call does nothing."""
        held, self._held, self._hold = "".join(self._held), [], False
        self._write(held)
        if self._last not in ("", "\n"):
            self._write("\n")

    def _write(self, piece: str) -> None:
        if not piece:
            return
        stream = standard("stdout")
        if stream is None:
            raise OutputError("cannot write to standard output: it is closed")
        encoding = stream.encoding or "utf-8"
        self._last = piece[-1]  # first, because an interrupt may come right behind the writing
        with _failing_as_output_error():
            stream.write(piece.encode(encoding, "replace").decode(encoding))
            stream.flush()


def flush_stdout() -> None:
    """Writes what is buffered. Raises `OutputError`, or `BrokenPipeError` when nobody reads."""
    stream = standard("stdout")
    if stream is not None:
        with _failing_as_output_error():
            stream.flush()


def abandon_stdout() -> None:
    """Points standard output at nothing, so that the interpreter's last flush cannot fail."""
    stream = standard("stdout")
    if stream is not None:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, stream.fileno())
        os.close(nothing)


@contextmanager
def _failing_as_output_error() -> Generator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise OutputError(f"cannot write to standard output: {reason}") from error
