"""The canvas while it is being denoised, on a screen.

    canvas 0   step 3/48   temperature 0.775   mean entropy 0.41   accepted 97/128
    entropy  0  #  0.01  #  0.1  #  0.5  #  2  #  nats          (the # in the scale's colours)
    what is final so far, and behind it the canvas, every token coloured by its entropy: bold where
    accepted, dim where renoised

`LiveView` redraws in place with rich, on events only and at most 15 times a second, and wipes
itself at the end: the text is printed once, on standard output. `PlainView` prints one line a step,
for pipes, files and terminals that cannot move the cursor. `WaitingView` is for those who did not
ask to watch: nothing but how far the first canvas is.

Token texts come from a model and are made printable first: they cannot steer the terminal.

Not here: what a step decides (`sampler.py`), the final text (`reply.py`, `commands/`).
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Set
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from dgemma.reply import DraftText, StreamEvent, Text
from dgemma.terminal import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text as RichText

    from dgemma.decoders import Draft

REFRESH_S = 1 / 15

ENTROPY_SCALE: tuple[tuple[float, str], ...] = (
    (0.01, "green"),
    (0.1, "cyan"),
    (0.5, "yellow"),
    (2.0, "magenta"),
    (float("inf"), "red"),
)
"""(upper end in nats, colour) of each step of the scale; the colours are a terminal's own."""


class TokenNames(Protocol):
    """What a view needs of a tokenizer."""

    def token_text(self, token: int) -> str:
        """The text of one token; special tokens by their name."""
        ...


class View(AbstractContextManager["View"]):
    """Something that is shown the events of one reply."""

    live = False
    """Whether the terminal belongs to the view until it is closed."""

    def show(self, event: StreamEvent) -> None:
        """Shows one event."""
        raise NotImplementedError

    def __exit__(self, *exception: object) -> None:
        return None


def open_view(tokenizer: TokenNames, end_tokens: Set[int], stream: TextIO) -> View:
    """The best view `stream` can show: live on a terminal, else plain lines."""
    if not can_redraw(stream):
        return PlainView(stream)
    from rich.console import Console

    return LiveView(tokenizer, end_tokens, Console(file=stream, force_terminal=True))


def can_redraw(stream: TextIO) -> bool:
    """Whether `stream` is a terminal that can move the cursor."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")


def status(draft: Draft) -> str:
    """One line about a step; steps are counted from 1 here, for people."""
    return (
        f"canvas {draft.block} step {draft.step + 1}/{draft.steps} "
        f"mean entropy {draft.entropy.mean():.2f} "
        f"accepted {int(draft.accepted.sum())}/{len(draft.tokens)}"
    )


class PlainView(View):
    """One line a step."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def show(self, event: StreamEvent) -> None:
        if isinstance(event, DraftText):
            print(status(event.draft), file=self._stream, flush=True)


class WaitingView(View):
    """One line that says how far the first canvas is, until the first text comes.

    For terminals; the width is asked for at every step. Behind text there is no line to rewrite.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._waiting = True
        self._shown = False

    def show(self, event: StreamEvent) -> None:
        if isinstance(event, DraftText) and self._waiting:
            width = shutil.get_terminal_size().columns - 1
            self._write(f"\r\x1b[2K{status(event.draft)[:width]}")
            self._shown = True
        elif isinstance(event, Text):
            self.__exit__()

    def __exit__(self, *exception: object) -> None:
        if self._shown:
            self._write("\r\x1b[2K")
        self._waiting = self._shown = False

    def _write(self, text: str) -> None:
        print(text, end="", file=self._stream, flush=True)


class LiveView(View):
    """The canvas redrawn in place; clipped to the screen, whatever its size.

    `clock` gives seconds; a step that comes within `REFRESH_S` of the last drawn one is not drawn.
    """

    live = True

    def __init__(
        self,
        tokenizer: TokenNames,
        end_tokens: Set[int],
        console: Console,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from rich.live import Live

        self._tokenizer = tokenizer
        self._end_tokens = end_tokens
        self._console = console
        self._clock = clock
        self._drawn_at = float("-inf")
        self._final = ""
        self._live = Live(
            console=console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        )

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.update("")  # `stop` draws once more before it wipes
        self._live.stop()

    def show(self, event: StreamEvent) -> None:
        if isinstance(event, Text):
            self._final += event.text
        elif not isinstance(event, DraftText):
            return
        if self._clock() - self._drawn_at >= REFRESH_S:
            self._drawn_at = self._clock()
            draft = event.draft if isinstance(event, DraftText) else None
            self._live.update(self._screen(draft), refresh=True)

    def _screen(self, draft: Draft | None) -> RichText:
        """The picture, with a line of the screen to spare; without a draft, the text alone."""
        from rich.text import Text as RichText

        width, height = self._console.size
        room = max(1, height - 1)
        final = RichText(printable(self._final))
        if draft is None:
            return RichText("\n").join(self._wrap(final, width)[-room:])
        head = self._wrap(self._header(draft), width)[: max(1, room // 3)]
        room -= len(head)
        if not room:
            return RichText("\n").join(head)
        canvas = canvas_text(draft, self._tokenizer, self._end_tokens)
        lines = self._wrap(final + canvas, width)
        # The canvas from its first line on; above it what is final, as far as there is room.
        canvas_begins = max(0, len(self._wrap(final, width)) - 1)
        begin = max(0, min(canvas_begins, len(lines) - room))
        shown, below = lines[begin : begin + room], len(lines) - begin - room
        if below > 0:
            shown[-1] = RichText(f"... {below + 1} more lines"[:width], "dim")
        return RichText("\n").join([*head, *shown])

    def _header(self, draft: Draft) -> RichText:
        from rich.text import Text as RichText

        line = RichText(f"{status(draft)} temperature {draft.temperature:.3f}\n", "bold")
        line.append("entropy 0 ", "not bold")
        for bound, colour in ENTROPY_SCALE:
            line.append("\u2588\u2588", f"not bold {colour}")
            line.append(f" {bound:g} " if bound < float("inf") else " nats", "not bold")
        line.append("  accepted", "bold")
        line.append("  renoised", "not bold dim")
        return line

    def _wrap(self, text: RichText, width: int) -> list[RichText]:
        """Lines of at most `width` cells."""
        if not text.plain:
            return []
        return list(text.wrap(self._console, max(1, width), overflow="fold"))


def canvas_text(draft: Draft, tokenizer: TokenNames, end_tokens: Set[int]) -> RichText:
    """A canvas as styled text: up to its first end token, and how much lies behind that."""
    from rich.text import Text as RichText

    text = RichText()
    rows: Any = zip(
        draft.tokens.tolist(), draft.entropy.tolist(), draft.accepted.tolist(), strict=True
    )
    for position, (token, entropy, accepted) in enumerate(rows):
        text.append(
            printable(tokenizer.token_text(token)),
            f"{'bold' if accepted else 'dim'} {colour_of(entropy)}",
        )
        behind = len(draft.tokens) - position - 1
        if token in end_tokens and behind:
            text.append(f" (+{behind} behind the end)", "dim")
            break
    return text


def colour_of(entropy: float) -> str:
    """The colour of an entropy in nats."""
    return next(colour for bound, colour in ENTROPY_SCALE if entropy <= bound)
