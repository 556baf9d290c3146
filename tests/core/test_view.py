"""The live canvas: what the screen shows, that it fits, and that no token steers the terminal."""

from __future__ import annotations

import io
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from dgemma.decoders import Draft
from dgemma.reply import DraftText, Text
from dgemma.terminal import one_line, printable
from dgemma.view import (
    ENTROPY_SCALE,
    LiveView,
    PlainView,
    WaitingView,
    canvas_text,
    colour_of,
    open_view,
)

END = 1
OWN = re.compile(r"\x1b\[(?:[0-9;]*m|\?25[lh])")
"""What rich writes beside moving up and wiping lines: styles, and the cursor hidden and shown."""


class Names:
    """Token i is the i-th text; END ends."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts

    def token_text(self, token: int) -> str:
        return self.texts[token]


class Clock:
    """Seconds that pass only when told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def draft(
    tokens: list[int],
    *,
    entropy: list[float] | None = None,
    accepted: list[bool] | None = None,
    step: int = 2,
) -> DraftText:
    found = Draft(
        block=0,
        step=step,
        steps=48,
        tokens=np.array(tokens, dtype=np.int32),
        entropy=np.array(entropy or [0.5] * len(tokens), dtype=np.float32),
        accepted=np.array(accepted or [True] * len(tokens)),
        temperature=0.775,
    )
    return DraftText(text="", draft=found)


def live(
    names: Names, width: int = 80, height: int = 24, **console: object
) -> tuple[LiveView, io.StringIO, Clock]:
    screen, clock = io.StringIO(), Clock()
    made = Console(file=screen, force_terminal=True, width=width, height=height, **console)  # type: ignore[arg-type]
    return LiveView(names, {END}, made, clock=clock), screen, clock


def replay(output: str) -> tuple[list[str], int]:
    """What a terminal shows after `output`, and the row its cursor is in; styles are dropped."""
    lines, row, column = [""], 0, 0
    for part in re.split(r"(\x1b\[[?0-9;]*[A-Za-z]|\r|\n)", output):
        if part == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif part == "\r":
            column = 0
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part.startswith("\x1b[") and part.endswith("A"):
            row -= int(part[2:-1])
            assert row >= 0, "the cursor left the view"
        elif part.startswith("\x1b["):
            assert OWN.fullmatch(part), f"{part!r} steers the terminal"
        else:
            lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + len(part) :]
            column += len(part)
    return lines, row


def frame(names: Names, *events: DraftText | Text, width: int = 80, height: int = 24) -> list[str]:
    """The lines a terminal shows after `events`."""
    view, screen, clock = live(names, width, height)
    with view:
        for event in events:
            clock.now += 1
            view.show(event)
        return replay(screen.getvalue())[0]


def test_a_step_says_how_far_it_is():
    names = Names("a", "<end>", "b")
    shown = "\n".join(frame(names, draft([0, 2, 0], accepted=[True, False, True])))
    for part in ("canvas 0", "step 3/48", "temperature 0.775", "mean entropy 0.50", "accepted 2/3"):
        assert part in shown
    assert "entropy" in shown.splitlines()[1]
    assert "aba" in shown


def test_a_plain_view_prints_one_line_a_step_and_no_escape():
    stream = io.StringIO()
    with PlainView(stream) as view:
        view.show(draft([0, 0, 0], entropy=[0.41] * 3, accepted=[True, True, False]))
        view.show(Text(text="final"))
        view.show(draft([0, 0, 0], step=3))
    assert stream.getvalue() == (
        "canvas 0 step 3/48 mean entropy 0.41 accepted 2/3\n"
        "canvas 0 step 4/48 mean entropy 0.50 accepted 3/3\n"
    )


def test_a_waiting_view_keeps_to_one_line_and_wipes_it_before_the_text():
    stream = io.StringIO()
    with WaitingView(stream) as view:
        view.show(draft([0, 0, 0]))
        view.show(draft([0, 0, 0], step=3))
        lines, row = replay(stream.getvalue())
        assert (row, lines) == (0, ["canvas 0 step 4/48 mean entropy 0.50 accepted 3/3"])
        view.show(Text(text="final"))
        assert replay(stream.getvalue()) == ([""], 0)
        view.show(draft([0, 0, 0]))
    assert replay(stream.getvalue()) == ([""], 0)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "term", "kind"),
    [
        (io.StringIO(), "xterm-256color", PlainView),
        (Terminal(), "dumb", PlainView),
        (Terminal(), "xterm-256color", LiveView),
    ],
)
def test_only_a_terminal_that_can_gets_a_live_view(
    stream: io.StringIO, term: str, kind: type, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("FORCE_COLOR", "1")  # would make rich believe in any pipe
    view = open_view(Names("a"), {END}, stream)
    assert type(view) is kind
    assert view.live == (kind is LiveView)


def test_colour_is_the_entropy_and_weight_is_the_acceptance():
    text = canvas_text(
        draft([0, 2], entropy=[0.001, 3.0], accepted=[True, False]).draft,
        Names("sure", "<end>", "unsure"),
        {END},
    )
    styles = {text.plain[span.start : span.end]: str(span.style) for span in text.spans}
    assert styles == {"sure": "bold green", "unsure": "dim red"}


def test_the_colours_of_the_scale_differ_and_cover_everything():
    colours = [colour for _, colour in ENTROPY_SCALE]
    assert len(set(colours)) == len(colours)
    assert [colour_of(bound) for bound, _ in ENTROPY_SCALE] == colours
    assert colour_of(0.0) == colours[0]


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch):
    names = Names("word")
    coloured = re.compile(r"\x1b\[[0-9;]*\b3[1-6]m")
    for setting, expected in ((None, True), ("1", False)):
        monkeypatch.delenv("NO_COLOR", raising=False)
        if setting:
            monkeypatch.setenv("NO_COLOR", setting)
        view, screen, _ = live(names, color_system="standard")
        with view:
            view.show(draft([0]))
        assert bool(coloured.search(screen.getvalue())) == expected


def test_newlines_are_laid_out_as_text():
    names = Names("1 2", "<end>", "\n", "3 4")
    lines = frame(names, draft([0, 2, 3]))
    assert [line.strip() for line in lines[-2:]] == ["1 2", "3 4"]


def test_what_lies_behind_the_end_is_counted_not_shown():
    names = Names("a", "<end>", "junk")
    shown = "\n".join(frame(names, draft([0, 1, 2, 2, 2])))
    assert "a<end> (+3 behind the end)" in shown
    assert "junk" not in shown


def test_the_canvas_goes_on_where_the_final_text_ends():
    lines = frame(Names("canvas"), Text(text="final\ntext, "), draft([0]))
    assert [line.strip() for line in lines[-2:]] == ["final", "text, canvas"]


def test_a_canvas_that_is_too_tall_begins_at_its_first_line_and_says_how_much_is_below():
    names = Names("x\n", "<end>")
    lines = frame(names, Text(text="final\n" * 30), draft([0] * 40), height=12)
    assert lines[2] == "x"
    assert lines[-1].startswith("... ")
    hidden = int(re.findall(r"\d+", lines[-1])[0])
    assert lines.count("x") + hidden in (40, 41)  # the newline at the end may count as a line


def test_final_text_scrolls_away_above_a_canvas_that_fits():
    lines = frame(Names("canvas"), Text(text="old\n" * 30 + "new\n"), draft([0]), height=8)
    assert [line.strip() for line in lines[2:]] == ["old", "old", "old", "new", "canvas"]


def test_text_without_drafts_is_shown_as_it_comes():
    """Autoregressive decoding has no canvas to show."""
    assert frame(Names(), Text(text="one "), Text(text="two"))[-1].strip() == "one two"


def test_a_live_view_leaves_the_screen_as_it_was():
    view, screen, clock = live(Names("canvas", "<end>", "\n"))
    with view:
        for tokens in ([0, 2, 0, 2, 0], [0], [0, 2, 0]):
            clock.now += 1
            view.show(draft(tokens))
        assert "canvas" in "\n".join(replay(screen.getvalue())[0])
    lines, row = replay(screen.getvalue())
    assert "".join(lines) == ""
    assert row == 0
    assert screen.getvalue().rfind("\x1b[?25h") > screen.getvalue().rfind("\x1b[?25l")


def test_refreshes_come_at_most_fifteen_times_a_second():
    view, screen, clock = live(Names("x"))
    drawn = 0
    with view:
        for step in range(100):
            before = screen.tell()
            view.show(draft([0], step=step))
            drawn += screen.tell() > before
            clock.now += 0.01
    assert 12 <= drawn <= 15


HOSTILE = [
    "\x1b[2J",
    "\x1b]0;owned\x07",
    "\x9b31m",
    "\r",
    "\x08",
    "\x00",
    "\u202e",
    "\u2066",
    "\x7f",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_no_token_can_steer_the_terminal(text: str):
    shown = "\n".join(frame(Names(f"a{text}b"), Text(text=f"c{text}d\n"), draft([0]), width=60))
    for character in text:
        if not character.isprintable():
            assert character not in shown
    assert "a" in shown
    assert "d" in shown


def test_markup_is_text():
    assert "[bold red]x[/]" in "\n".join(frame(Names("[bold red]x[/]"), draft([0])))


@given(st.text())
def test_printable_text_has_no_control_characters_and_encodes(text: str):
    shown = printable(text)
    shown.encode()
    assert all(character == "\n" or ord(character) >= 0x20 for character in shown)
    assert not any(0x7F <= ord(character) < 0xA0 for character in shown)
    assert one_line(text).count("\n") == 0


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.text(min_size=1, max_size=12), min_size=2, max_size=6),
    tokens=st.lists(st.integers(0, 1000), min_size=1, max_size=300),
    committed=st.text(max_size=400),
    width=st.integers(1, 130),
    height=st.integers(1, 50),
)
def test_any_canvas_fits_any_screen(
    texts: list[str], tokens: list[int], committed: str, width: int, height: int
):
    """A wide character cannot be cut in half, so the narrowest screens may lose one cell."""
    events = (Text(text=committed), draft([token % len(texts) for token in tokens]))
    lines = frame(Names(*texts), *events, width=width, height=height)
    assert len(lines) <= height
    assert max(cell_len(line) for line in lines) <= max(width, 2)
