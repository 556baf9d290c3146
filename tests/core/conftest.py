"""Fixtures of the core's tests."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING

import pytest
from command_line import Command, Outcome

if TYPE_CHECKING:
    from scripted_model import ScriptedModel


@pytest.fixture
def dgemma_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `dgemma ...` in this process; without a model, loading one fails the test."""
    monkeypatch.setitem(sys.modules, "mlx_dgemma", None)

    def run(*argv: str, model: ScriptedModel | None = None, stdin: bytes = b"") -> Outcome:
        from scripted_model import install

        from dgemma import cli

        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), "utf-8"))
        if model is not None:
            install(model)
        status = cli.main([*argv, "--backend", "mlx"] if {"generate", "bench"} & {*argv} else argv)
        captured = capsys.readouterr()
        return Outcome(status, captured.out, captured.err)

    return run
