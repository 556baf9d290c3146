"""`dgemma chat` fed from a pipe and at a terminal."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable

import pytest
from scripted_model import ScriptedModel, install

from dgemma import cli

Chat = Callable[..., tuple[int, str, str]]


class Keyboard(io.TextIOWrapper):
    """Standard input that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Chat:
    """Holds a conversation of the given lines; returns status, standard output and error."""

    def run(
        model: ScriptedModel, *lines: str, flags: tuple[str, ...] = (), terminal: bool = False
    ) -> tuple[int, str, str]:
        kind = Keyboard if terminal else io.TextIOWrapper
        typed = io.BytesIO(
            "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape")
        )
        monkeypatch.setattr(sys, "stdin", kind(typed, "utf-8"))
        monkeypatch.setitem(sys.modules, "mlx_dgemma", None)
        install(model)
        status = cli.main(["chat", "--backend", "mlx", "--quiet", "--model", "m", *flags])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_each_line_is_a_turn_and_the_end_of_input_leaves(chat: Chat):
    model = ScriptedModel("four")
    assert chat(model, "one", "", "two") == (0, "four\nfour\n", "")
    assert model.closed


def test_what_was_said_is_context_until_reset(chat: Chat):
    model = ScriptedModel("four")
    chat(model, "one", "two", "/reset", "three")
    first, second, third = model.prompts
    assert "one" in second
    assert "four" in second
    assert second.index("one") < second.index("four") < second.index("two")
    assert third == first.replace("one", "three")


def test_exit_leaves_at_once(chat: Chat):
    model = ScriptedModel("four")
    assert chat(model, "/exit", "two")[:2] == (0, "")
    assert model.prompts == []


def test_a_seed_holds_until_it_is_freed(chat: Chat):
    model = ScriptedModel("four")
    chat(model, "a", "/seed 7", "b", "c", "/seed", "d", flags=("--seed", "3"))
    assert [options["seed"] for options in model.options] == [3, 7, 7, None]


@pytest.mark.parametrize("line", ["/dance", "/seed many", "/reset now"])
def test_an_unknown_command_is_a_note_and_no_turn(line: str, chat: Chat):
    model = ScriptedModel("four")
    status, out, err = chat(model, line)
    assert (status, out, model.prompts) == (0, "", [])
    assert err.startswith(f"dgemma: note: no such command: {line};")


def test_a_turn_that_fails_is_forgotten_at_a_terminal(chat: Chat):
    model = ScriptedModel("four", context=96)
    status, out, err = chat(model, "one", "word " * 200, "two", terminal=True)
    assert (status, out) == (0, "four\nfour\n")
    assert err.startswith("> > dgemma: error: ")
    assert err.endswith("\n> > \n")
    assert err.count("\n") == 2
    assert "word" not in model.prompts[-1]


def test_a_turn_that_fails_ends_a_script(chat: Chat):
    model = ScriptedModel("four", context=96)
    status, out, err = chat(model, "one", "word " * 200, "two")
    assert (status, out) == (1, "four\n")
    assert err.count("\n") == 1


def interrupt_at(turn: int, model: ScriptedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = model.stream

    def stream(*args: object, **options: object) -> object:
        if len(model.prompts) == turn:
            model.prompts.append("interrupted")
            raise KeyboardInterrupt
        return plain(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(model, "stream", stream)


def test_an_interrupted_reply_is_forgotten_at_a_terminal(
    chat: Chat, monkeypatch: pytest.MonkeyPatch
):
    model = ScriptedModel("four")
    interrupt_at(1, model, monkeypatch)
    status, out, err = chat(model, "one", "stopped", "two", terminal=True)
    assert (status, out) == (0, "four\nfour\n")
    assert err == "> > dgemma: interrupted; this turn is forgotten\n> > \n"
    assert "stopped" not in model.prompts[-1]


def test_an_interrupt_ends_a_script(chat: Chat, monkeypatch: pytest.MonkeyPatch):
    model = ScriptedModel("four")
    interrupt_at(0, model, monkeypatch)
    assert chat(model, "one", "two") == (130, "", "dgemma: interrupted\n")


def test_an_interrupt_at_the_prompt_leaves_cleanly(chat: Chat, monkeypatch: pytest.MonkeyPatch):
    def interrupted(prompt: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupted)
    assert chat(ScriptedModel("four"), terminal=True)[:2] == (0, "")


def test_input_that_is_no_text_is_one_line(chat: Chat):
    status, out, err = chat(ScriptedModel("four"), "caf\udce9")
    assert (status, out) == (1, "")
    assert err == "dgemma: error: standard input is not UTF-8 text (byte 3)\n"


def test_the_bundled_checkpoint_comes_with_a_note(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "stdin", io.StringIO("/exit\n"))
    monkeypatch.setitem(sys.modules, "mlx_dgemma", None)
    install(ScriptedModel("four"))
    assert cli.main(["chat", "--backend", "mlx"]) == 0
    assert "single turns" in capsys.readouterr().err
