"""Every way a command ends: wrong usage, failures, interrupts, closed pipes, and success."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import LONG, Command, Outcome, python, script
from scripted_model import ScriptedModel, install

import dgemma
from dgemma import cli
from dgemma.errors import BackendError


def assert_failed(done: Outcome, status: int) -> None:
    assert done.status == status
    assert done.out == ""
    assert done.err.startswith("dgemma: error: ")
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        ([], "COMMAND"),
        (["dance"], "dance"),
        (["generate"], "prompt"),
        (["generate", "-x"], "--"),
        (["generate", "why", "is"], "quote the prompt"),
        (["generate", "hi", "--max-new-tokens", "0"], "0 is not at least 1"),
        (["generate", "hi", "--max-new-tokens", "many"], "many"),
        (["generate", "hi", "--max-denoising-steps", "0"], "--max-denoising-steps"),
        (["generate", "hi", "--temperature", "-1"], "--temperature"),
        (["generate", "hi", "--temperature", "nan"], "nan"),
        (["generate", "hi", "--seed", "1.5"], "1.5"),
        (["generate", "hi", "--mode", "magic"], "magic"),
        (["generate", "hi", "--max", "3"], "--max"),
        (["generate", "hi", "--confidence", "0.5"], "--sampler confidence-threshold"),
        (["generate", "hi", "--verify", "exact"], "--mode hybrid"),
        (["generate", "hi", "--typical-threshold", "0.5"], "--verify typical"),
        (["generate", "hi", "--revision", "main"], "--revision needs --model"),
        (["chat", "--json"], "--json"),
        (["bench", "--prompts", "/no/such/file"], "/no/such/file"),
        (["bench", "--out", "/no/such/folder/out"], "/no/such/folder/out"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(argv: list[str], names: str, dgemma_command: Command):
    done = dgemma_command(*argv)
    assert_failed(done, 2)
    assert names in done.err


@pytest.mark.parametrize(
    ("argv", "stdin", "names"),
    [
        ([""], b"", "the prompt is empty"),
        (["  \n"], b"", "the prompt is empty"),
        (["-"], b"", "standard input is empty"),
        (["-"], b"ab\xff", "not UTF-8 text (byte 2)"),
        (["caf\udce9"], b"", "not UTF-8"),
        (["-"], b"word " * 20000, "context"),
        (["hi", "--temperature-start", "0.1", "--temperature-end", "0.9"], b"", "temperature_end"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_status_1(
    argv: list[str], stdin: bytes, names: str, dgemma_command: Command
):
    done = dgemma_command("generate", *argv, model=ScriptedModel("yes"), stdin=stdin)
    assert_failed(done, 1)
    assert names in done.err


def test_broken_numbers_end_in_one_line(dgemma_command: Command):
    """B29: NaN is said, not decoded."""
    assert_failed(dgemma_command("generate", "hi", model=ScriptedModel("yes", fail_at=0)), 1)


def test_what_was_final_before_a_failure_stays_printed(dgemma_command: Command):
    done = dgemma_command("generate", "hi", model=ScriptedModel(LONG, fail_at=1))
    assert done.status == 1
    assert done.out.strip()
    assert LONG.startswith(done.out.removesuffix("\n"))


def test_a_missing_framework_is_named_with_what_to_install(
    dgemma_command: Command, monkeypatch: pytest.MonkeyPatch
):
    """B107."""
    done = dgemma_command("generate", "hi")
    assert_failed(done, 1)
    assert "pip install 'dgemma[mlx]'" in done.err


def test_a_backend_that_refuses_is_quoted(dgemma_command: Command):
    model = ScriptedModel("yes")
    install(model)

    def load(**settings: object) -> ScriptedModel:
        raise BackendError("no device here")

    sys.modules["mlx_dgemma"].load = load  # type: ignore[attr-defined]
    assert cli.main(["generate", "hi", "--backend", "mlx"]) == 1


def test_the_cuda_backend_says_that_it_is_not_there(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["generate", "hi", "--backend", "cuda"]) == 1
    captured = capsys.readouterr()
    assert_failed(Outcome(1, captured.out, captured.err), 1)
    assert "not built yet" in captured.err


def test_a_defect_keeps_its_traceback(dgemma_command: Command, monkeypatch: pytest.MonkeyPatch):
    model = ScriptedModel("yes")
    monkeypatch.setattr(model, "stream", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        dgemma_command("generate", "hi", model=model)


def test_a_closed_pipe_ends_quietly():
    with python(script(f"ScriptedModel({LONG * 9!r}, delay_s=0.05)"), "hi", "--quiet") as process:
        assert process.stdout
        assert process.stderr
        process.stdout.read(4)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_line():
    with Path("/dev/full").open("wb") as full:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", script("ScriptedModel('yes')"), "hi", "--quiet"],
            env=environment,
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.startswith(b"dgemma: error: cannot write to standard output")
    assert done.stderr.count(b"\n") == 1


@pytest.mark.skipif(os.name == "nt", reason="needs a POSIX shell")
@pytest.mark.parametrize("closed", ["1", "2"])
def test_closed_streams_are_no_defect(closed: str):
    command = f'"$0" -c "$1" hi --watch {closed}>&-'
    done = subprocess.run(
        ["/bin/sh", "-c", command, sys.executable, script("ScriptedModel('yes')")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        check=False,
    )
    if closed == "1":
        assert (done.returncode, done.stdout) == (1, b"")
        assert done.stderr.splitlines()[-1].endswith(b"it is closed")
        assert b"Traceback" not in done.stderr
    else:
        assert (done.returncode, done.stdout, done.stderr) == (0, b"yes\n", b"")


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
def test_an_interrupt_keeps_what_is_final():
    with python(script(f"ScriptedModel({LONG * 9!r}, delay_s=0.2)"), "hi", "--quiet") as process:
        assert process.stdout
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == b"dgemma: interrupted\n"
    text = (first + rest).decode()
    assert text.endswith("\n")
    assert (LONG * 9).startswith(text.removesuffix("\n"))
    assert len(text) < len(LONG * 9)


@pytest.mark.parametrize(
    "argv", [["--help"], ["generate", "--help"], ["chat", "--help"], ["--version"]]
)
def test_help_and_version_import_nothing_heavy(argv: list[str]):
    blocker = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        heavy = 'numpy mlx torch tokenizers jinja2 rich huggingface_hub transformers'\n"
        "        if name.partition('.')[0] in heavy.split(): raise AssertionError(name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "from dgemma.cli import main\n"
        f"sys.exit(main({argv!r}))"
    )
    process = python(blocker)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert (dgemma.__version__ if "--version" in argv else "usage:") in out.decode()


@pytest.mark.parametrize("module", ["mlx_dgemma.generate", "cuda_dgemma.generate"])
def test_the_backends_command_is_generate_without_backend(module: str):
    process = python(
        "import runpy, sys\n"
        "sys.argv[1:] = ['--help']\n"
        f"runpy.run_module({module!r}, run_name='__main__')"
    )
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, b"")
    parser = cli.command_parser("generate", backend=module.partition("_")[0], prog="x")
    flags = {flag for action in parser._actions for flag in action.option_strings}
    full = cli.command_parser("generate", backend=None, prog="x")
    assert {f for a in full._actions for f in a.option_strings} - flags == {"--backend"}
    assert all(flag in out.decode() for flag in flags)
