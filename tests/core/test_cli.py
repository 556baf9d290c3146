"""`dgemma generate` as its user meets it: what is printed where, and how it ends."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from scripted_model import ScriptedModel, install

import dgemma
from dgemma import cli
from dgemma.decoders.hybrid import Exact, Typical
from dgemma.errors import BackendError, DgemmaWarning
from dgemma.sampler import AllAccepted, ConfidenceThreshold, EntropyBelow, Plateau
from dgemma.sampler import StableAndConfident as Stable

LONG = "one two three four five six seven eight nine ten " * 3


@dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    err: str


Command = Callable[..., Outcome]


@pytest.fixture
def dgemma_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `dgemma ...` in this process; without a model, loading one fails the test."""

    def run(*argv: str, model: ScriptedModel | None = None, stdin: bytes = b"") -> Outcome:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), "utf-8"))
        monkeypatch.setitem(sys.modules, "mlx_dgemma", None)
        if model is not None:
            install(model)
        status = cli.main([*argv, "--backend", "mlx"] if "generate" in argv else argv)
        captured = capsys.readouterr()
        return Outcome(status, captured.out, captured.err)

    return run


def python(script: str, *argv: str) -> subprocess.Popen[bytes]:
    """A fresh interpreter that runs `script` with this process's import path."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
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


# What is printed where


def test_the_text_alone_goes_to_stdout_with_one_newline(dgemma_command: Command):
    done = dgemma_command("generate", "hello", model=ScriptedModel("four and five"))
    assert (done.status, done.out) == (0, "four and five\n")


def test_a_text_that_ends_in_a_newline_gets_no_second_one(dgemma_command: Command):
    done = dgemma_command("generate", "hello", model=ScriptedModel("four\n"))
    assert done.out == "four\n"


def test_the_summary_is_one_line_on_stderr_and_quiet_drops_it(dgemma_command: Command):
    model = ScriptedModel(LONG)
    done = dgemma_command("generate", "hello", "--seed", "7", model=model)
    assert done.err.count("\n") == 1
    assert "seed 7" in done.err
    assert "finish_reason stop" in done.err
    quiet = dgemma_command("generate", "hello", "--seed", "7", "--quiet", model=model)
    assert (quiet.out, quiet.err) == (done.out, "")


def test_json_is_one_object_and_nothing_else(dgemma_command: Command):
    done = dgemma_command("generate", "hi", "--json", "--seed", "3", model=ScriptedModel(LONG))
    assert done.out.count("\n") == 1
    reply = json.loads(done.out)
    assert list(reply) == ["text", "tokens", "finish_reason", "seed", "model", "mode", "stats"]
    assert reply["text"].strip() == LONG.strip()
    assert (reply["seed"], reply["finish_reason"], reply["mode"]) == (3, "stop", "diffusion")
    assert reply["stats"]["canvases"] == -(-(len(reply["tokens"]) + 1) // 16)


@pytest.mark.parametrize("flags", [[], ["--quiet"], ["--json"]])
def test_an_empty_reply_is_said_to_be_empty(flags: list[str], dgemma_command: Command):
    """B111: success and silence cannot be told from a failure."""
    done = dgemma_command("generate", "hello", *flags, model=ScriptedModel(""))
    assert done.status == 0
    assert "dgemma: note: the reply is empty (finish_reason: stop)" in done.err
    assert done.out == "" or json.loads(done.out)["text"] == ""


def test_warnings_are_one_line_without_file_names(
    dgemma_command: Command, monkeypatch: pytest.MonkeyPatch
):
    import warnings

    model = ScriptedModel("yes")
    plain = model.encode

    def encode(*args: object, **settings: object) -> list[int]:
        warnings.warn("an odd\nkey \x1b[2J", DgemmaWarning, stacklevel=2)
        return plain(*args, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(model, "encode", encode)
    done = dgemma_command("generate", "hello", "--quiet", model=model)
    assert set(done.err.splitlines()) == {"dgemma: warning: an odd key \u241b[2J"}


def test_watching_through_a_pipe_prints_a_line_a_step(dgemma_command: Command):
    done = dgemma_command("generate", "hello", "--watch", "--quiet", model=ScriptedModel("two"))
    assert done.out == "two\n"
    assert done.err.splitlines() == [
        f"canvas 0 step {step}/48 mean entropy 0.00 accepted 16/16" for step in (1, 2)
    ]


def test_the_model_is_closed_whatever_happens(dgemma_command: Command):
    for argv in (["hello"], ["hello", "--max-new-tokens", "3"], ["word " * 5000]):
        model = ScriptedModel("two")
        dgemma_command("generate", *argv, model=model)
        assert model.closed


# Prompts


def test_a_dash_reads_the_prompt_from_stdin(dgemma_command: Command):
    model = ScriptedModel("yes")
    assert dgemma_command("generate", "-", model=model, stdin="zwölf\n".encode()).status == 0
    assert "zwölf" in model.prompts[0]


def test_raw_leaves_the_template_out(dgemma_command: Command):
    model = ScriptedModel("yes")
    dgemma_command("generate", "hello", model=model)
    dgemma_command("generate", "hello", "--raw", model=model)
    assert "<|turn>" in model.prompts[0]
    assert "<|turn>" not in model.prompts[1]


def test_a_prompt_that_begins_with_a_dash_goes_behind_two(dgemma_command: Command, capsys):
    model = ScriptedModel("yes")
    install(model)
    assert cli.main(["generate", "--quiet", "--backend", "mlx", "--", "--seed"]) == 0
    assert "--seed" in model.prompts[0]


# Flags


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", {}),
        ("--max-new-tokens 7 --seed -3", {"max_new_tokens": 7, "seed": -3}),
        ("--mode hybrid --verify exact", {"mode": "hybrid", "verification": Exact()}),
        (
            "--mode hybrid --verify typical --typical-threshold 0.25",
            {"mode": "hybrid", "verification": Typical(threshold=0.25)},
        ),
        ("--temperature 0", {"temperature": 0.0}),
        (
            "--temperature-start 0.9 --temperature-end 0.1 --max-denoising-steps 5",
            {"temperature_start": 0.9, "temperature_end": 0.1, "max_denoising_steps": 5},
        ),
        (
            "--entropy-bound 1 --stability-threshold 0 --confidence-threshold 0.5",
            {"entropy_bound": 1.0, "stability_threshold": 0, "confidence_threshold": 0.5},
        ),
        (
            "--sampler confidence-threshold --confidence 0.8",
            {"acceptance": ConfidenceThreshold(threshold=0.8)},
        ),
        ("--sampler confidence-threshold", {"acceptance": ConfidenceThreshold(threshold=0.9)}),
        ("--stop-rule plateau", {"stop_rule": Plateau()}),
        ("--stop-rule all-accepted", {"stop_rule": AllAccepted()}),
        (
            "--stop-rule entropy --confidence-threshold 0.25",
            {"stop_rule": EntropyBelow(threshold=0.25), "confidence_threshold": 0.25},
        ),
        (
            "--stop-rule stable-and-confident --stability-threshold 2",
            {
                "stop_rule": Stable(stability_threshold=2, confidence_threshold=0.005),
                "stability_threshold": 2,
            },
        ),
        ("--stop a --stop b", {"stop": ["a", "b"]}),
        ("--thinking --raw", {"thinking": True, "raw": True}),
    ],
)
def test_only_what_was_given_is_passed_on(
    flags: str, expected: dict[str, object], dgemma_command: Command
):
    model = ScriptedModel("yes")
    done = dgemma_command("generate", "hello", *flags.split(), model=model)
    assert done.status == 0, done.err
    assert model.options == [expected]
    assert model.loaded_with == {}


def test_loading_settings_reach_the_backend(dgemma_command: Command):
    model = ScriptedModel("yes")
    flags = (
        "--model m --revision r --dtype float32 --prefill-chunk 7 --logits-tile-bytes 99 --strict"
    )
    dgemma_command("generate", "hello", *flags.split(), model=model)
    assert model.loaded_with == {
        "model": "m",
        "revision": "r",
        "dtype": "float32",
        "prefill_chunk": 7,
        "logits_tile_bytes": 99,
        "strict": True,
    }


@pytest.mark.parametrize("mode", ["autoregressive", "hybrid"])
def test_the_other_modes_run(mode: str, dgemma_command: Command):
    flags = ["--mode", mode, "--max-new-tokens", "5", "--json", "--raw"]
    done = dgemma_command("generate", "hello", *flags, model=ScriptedModel("yes"))
    assert done.status == 0, done.err
    assert json.loads(done.out)["mode"] == mode


# Failures


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


# Processes


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
