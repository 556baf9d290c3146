"""Writes the README's help text anew from the parser: `python tests/regenerate_readme.py`."""

from __future__ import annotations

import os
import re
from pathlib import Path
from unittest import mock

from dgemma.cli import build_parser, command_parser

README = Path(__file__).resolve().parents[1] / "README.md"
_BEGIN, _END = "<!-- generated: help -->", "<!-- end of generated -->"
_COLUMNS = 92


def help_text() -> str:
    """The help of `dgemma` and of `dgemma generate`, as on a wide terminal without colours."""
    with mock.patch.dict(os.environ, {"COLUMNS": str(_COLUMNS), "NO_COLOR": "1"}):
        parsers = [build_parser(), command_parser("generate", backend=None, prog="dgemma generate")]
        parts = [f"$ {parser.prog} --help\n{parser.format_help()}" for parser in parsers]
    return "\n".join(parts).rstrip()


def regenerated(readme: str) -> str:
    """The README with its generated section made anew."""
    section = re.compile(f"{re.escape(_BEGIN)}.*?{re.escape(_END)}", re.DOTALL)
    assert len(section.findall(readme)) == 1, "the README has not exactly one generated section"
    return section.sub(lambda _: f"{_BEGIN}\n```\n{help_text()}\n```\n{_END}", readme)


if __name__ == "__main__":
    README.write_text(regenerated(README.read_text("utf-8")), "utf-8")
