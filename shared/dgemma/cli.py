"""The command line: `dgemma COMMAND ...`, the same as `python -m dgemma COMMAND ...`.

One place decides how a command ends:

    0    done
    1    failed, with one line on standard error: "dgemma: error: ..."
    2    wrong usage, with one line
    130  interrupted (Ctrl-C); what was final stays printed
    141  whoever read standard output went away

Anything else that goes wrong is a defect and keeps its traceback. Parsing, and so `--help`, imports
no framework and not even NumPy.

Not here: what the commands do (`commands/`, one module each).
"""

from __future__ import annotations

import argparse
import importlib
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from dgemma import __version__
from dgemma.commands.flags import UsageError
from dgemma.errors import DgemmaError
from dgemma.terminal import OutputError, abandon_stdout, flush_stdout, say

COMMANDS = {
    "generate": ("dgemma.commands.generate", "write one reply to a prompt"),
    "chat": ("dgemma.commands.chat", "hold a conversation"),
    "bench": ("dgemma.commands.bench", "measure speed and memory"),
    "doctor": ("dgemma.commands.doctor", "say what is installed and what a checkpoint holds"),
}
"""Name -> (module, summary); see `commands/__init__.py` for what a module has."""

_DONE, _FAILED, _USAGE, _INTERRUPTED, _BROKEN_PIPE = 0, 1, 2, 130, 141


class Parser(argparse.ArgumentParser):
    """A parser without abbreviations, whose errors are one line and know the usual mistakes."""

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("allow_abbrev", False)
        super().__init__(**settings)

    def error(self, message: str) -> NoReturn:
        required = message.startswith("the following arguments are required: prompt")
        unknown = message.startswith("unrecognized arguments: ")
        hint = ""
        if required or (unknown and message.split(": ", 1)[1].startswith("-")):
            hint = "; a prompt that begins with a dash goes behind --, as in: -- '-1 + 3'"
        elif unknown:
            hint = "; quote the prompt, as in: 'Why is the sky blue?'"
        raise UsageError(f"{message}{hint}; see {self.prog} --help")


def build_parser() -> Parser:
    """The parser of `dgemma` with all its commands."""
    parser = Parser(
        prog="dgemma",
        description="DiffusionGemma, a block-diffusion language model, on this machine.",
    )
    _add_version(parser)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=_description(module))
        _fill(command, module, backend=None)
    return parser


def command_parser(name: str, *, backend: str | None, prog: str) -> Parser:
    """The parser of one command alone, on a given backend."""
    module, _ = COMMANDS[name]
    parser = Parser(prog=prog, description=_description(module))
    _add_version(parser)
    _fill(parser, module, backend=backend)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `dgemma`; the exit status."""
    return _run(build_parser(), argv)


def command_main(name: str, *, backend: str, prog: str, argv: Sequence[str] | None = None) -> int:
    """Runs one command alone on a given backend, as `python -m mlx_dgemma.generate` does."""
    return _run(command_parser(name, backend=backend, prog=prog), argv)


def _description(module: str) -> str:
    return importlib.import_module(module).DESCRIPTION


def _fill(parser: argparse.ArgumentParser, module: str, *, backend: str | None) -> None:
    command = importlib.import_module(module)
    command.add_arguments(parser, backend)
    parser.set_defaults(run=command.run)


def _add_version(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--version", action="version", version=f"dgemma {__version__}")


def _run(parser: Parser, argv: Sequence[str] | None) -> int:
    with _one_line_warnings():
        try:
            status = _parse_and_run(parser, argv)
            flush_stdout()
            return status
        except UsageError as error:
            say(f"error: {error}")
            return _USAGE
        except OutputError as error:
            abandon_stdout()
            say(f"error: {error}")
            return _FAILED
        except DgemmaError as error:
            say(f"error: {error}")
            return _FAILED
        except BrokenPipeError:
            abandon_stdout()
            return _BROKEN_PIPE
        except KeyboardInterrupt:
            say("interrupted")
            return _INTERRUPTED


def _parse_and_run(parser: Parser, argv: Sequence[str] | None) -> int:
    try:
        args = parser.parse_args(argv)
    except SystemExit:  # --help or --version, which have printed
        return _DONE
    return args.run(args)


@contextmanager
def _one_line_warnings() -> Generator[None]:
    """Shows warnings as "dgemma: warning: ..." instead of Python's two lines with a file name."""

    def show(message: Warning | str, *_: object, **__: object) -> None:
        say(f"warning: {message}")

    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)
        warnings.showwarning = show
        yield
