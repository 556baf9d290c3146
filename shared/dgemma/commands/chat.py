"""`dgemma chat`: a conversation, turn by turn, with everything said so far as context.

At a terminal Ctrl-C stops a reply, and leaves at the prompt; so does the end of input. Fed from a
pipe, every line is a turn.

Not here: how a reply is shown (`commands/generate.py`), the template (`chat.py` of the package).
"""

from __future__ import annotations

import argparse
import importlib
import sys
from contextlib import closing, suppress
from typing import TYPE_CHECKING

from dgemma.commands.flags import (
    add_decoding_flags,
    add_model_flags,
    check_flags,
    load_model,
    options_of,
)
from dgemma.commands.generate import add_output_flags, report, show
from dgemma.errors import DgemmaError, PromptError
from dgemma.terminal import say, standard

if TYPE_CHECKING:
    from dgemma.model import Model
    from dgemma.options import Options

DESCRIPTION = (
    "Holds a conversation. /reset forgets it, /seed N fixes the seed, /seed alone frees it again, "
    "/exit or the end of input leaves."
)
_COMMANDS = "/reset, /seed N, /seed, /exit"


def add_arguments(parser: argparse.ArgumentParser, backend: str | None) -> None:
    add_model_flags(parser, backend)
    add_decoding_flags(parser)
    add_output_flags(parser)


def run(args: argparse.Namespace) -> int:
    check_flags(args)
    with closing(load_model(args)) as model:
        if args.model is None:
            say("note: the bundled checkpoint was trained on single turns; /reset before the next")
        Conversation(model, args, options_of(args, model.generation)).run()
    return 0


class Conversation:
    """The turns so far, and the loop that adds to them."""

    def __init__(self, model: Model, args: argparse.Namespace, options: Options) -> None:
        self._model = model
        self._args = args
        self._options = options
        self._messages: list[dict[str, str]] = []
        stdin = standard("stdin")
        self._interactive = stdin is not None and stdin.isatty()

    def run(self) -> None:
        """Reads and answers until the input ends or /exit."""
        if self._interactive:
            with suppress(ImportError):  # `input` then edits lines and remembers them
                importlib.import_module("readline")
        while (line := self._read()) is not None:
            if line.startswith("/"):
                if line == "/exit":
                    return
                self._obey(line)
            elif line:
                self._answer(line)

    def _read(self) -> str | None:
        if standard("stdin") is None:
            return None
        try:
            return input(self._prompt()).strip()
        except (EOFError, KeyboardInterrupt) as ending:
            if self._interactive:
                print(file=sys.stderr)  # behind the prompt
            elif isinstance(ending, KeyboardInterrupt):
                raise
            return None
        except UnicodeDecodeError as error:
            raise PromptError(f"standard input is not UTF-8 text (byte {error.start})") from error

    def _prompt(self) -> str:
        """What `input` shows; where that would end up in the text, standard error shows it."""
        if not self._interactive:
            return ""
        stdout = standard("stdout")
        if stdout is not None and stdout.isatty():
            return "> "
        print("> ", end="", file=sys.stderr, flush=True)
        return ""

    def _obey(self, line: str) -> None:
        word, _, argument = line.partition(" ")
        if word == "/reset" and not argument:
            self._messages.clear()
            say("note: the conversation begins anew")
        elif word == "/seed" and not argument:
            self._options["seed"] = None
            say("note: every reply draws its own seed")
        elif word == "/seed" and argument.strip().lstrip("+-").isdecimal():
            self._options["seed"] = int(argument)
            say(f"note: every reply has the seed {int(argument)}")
        elif line == "/help":
            say(f"note: commands: {_COMMANDS}")
        else:
            say(f"note: no such command: {line}; there are {_COMMANDS}")

    def _answer(self, question: str) -> None:
        """One turn. One that fails or is stopped is forgotten, so that the next can be asked."""
        messages = [*self._messages, {"role": "user", "content": question}]
        try:
            events = self._model.stream_chat(messages, **self._options)
            reply = show(events, self._model, self._args, text=True)
        except DgemmaError as error:
            if not self._interactive:
                raise
            say(f"error: {error}")
            return
        except KeyboardInterrupt:
            if not self._interactive:
                raise
            say("interrupted; this turn is forgotten")
            return
        report(reply, quiet=self._args.quiet)
        self._messages = [*messages, {"role": "assistant", "content": reply.text}]
