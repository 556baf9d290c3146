"""The command line in tests: run in this process by the fixture, or in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

LONG = "one two three four five six seven eight nine ten " * 3


@dataclass(frozen=True)
class Outcome:
    """How a command ended, and all it printed."""

    status: int
    out: str
    err: str


Command = Callable[..., Outcome]
"""`command(*argv, model=None, stdin=b"")`: the fixture `dgemma_command`."""


def python(script: str, *argv: str) -> subprocess.Popen[bytes]:
    """A fresh interpreter that runs `script` with this process's import path."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    # Where tests run in the background of a shell, interrupts are ignored, and that is inherited.
    script = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n" + script
    return subprocess.Popen(
        [sys.executable, "-c", script, *argv],
        bufsize=0,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def script(model: str) -> str:
    return (
        "import sys\n"
        "from scripted_model import ScriptedModel, install\n"
        "from dgemma.cli import main\n"
        f"install({model})\n"
        "sys.exit(main(['generate', '--backend', 'mlx', *sys.argv[1:]]))"
    )
