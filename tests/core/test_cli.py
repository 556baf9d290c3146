"""`dgemma generate` as its user meets it: what is printed where, and what flags do."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
from command_line import LONG, Command
from scripted_model import ScriptedModel, install

import dgemma
from dgemma import cli
from dgemma.decoders.hybrid import Exact, Typical
from dgemma.errors import DgemmaWarning
from dgemma.sampler import AllAccepted, ConfidenceThreshold, EntropyBelow, Plateau
from dgemma.sampler import StableAndConfident as Stable


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
    model = ScriptedModel("yes", context=64)
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


def test_the_backend_takes_every_loading_flag():
    import mlx_dgemma

    flags = {"model", "revision", "dtype", "prefill_chunk", "logits_tile_bytes", "strict"}
    assert set(inspect.signature(mlx_dgemma.load).parameters) == flags


@pytest.mark.parametrize("mode", ["autoregressive", "hybrid"])
def test_the_other_modes_run(mode: str, dgemma_command: Command):
    flags = ["--mode", mode, "--max-new-tokens", "5", "--json", "--raw"]
    done = dgemma_command("generate", "hello", *flags, model=ScriptedModel("yes"))
    assert done.status == 0, done.err
    assert json.loads(done.out)["mode"] == mode


def test_bench_prints_a_table_and_one_json_object_last(dgemma_command: Command, tmp_path: Path):
    flags = ["--repeats", "1", "--prompt-tokens", "5", "--out", str(tmp_path / "out.jsonl")]
    done = dgemma_command("bench", *flags, model=ScriptedModel("yes"))
    assert done.status == 0, done.err
    *table, last = done.out.splitlines()
    record = json.loads(last)
    for figure in [*record["figures"], *record["replies"]["figures"]]:
        assert any(line.startswith(figure["name"]) for line in table)
    assert (tmp_path / "out.jsonl").read_text("utf-8") == f"{last}\n"


def test_doctor_reports_the_bundled_checkpoint_as_text_and_as_json(dgemma_command: Command):
    text = dgemma_command("doctor")
    assert (text.status, text.err) == (0, "")
    assert dgemma.__version__ in text.out
    found = json.loads(dgemma_command("doctor", "--json").out)
    assert found["checkpoint"]["layers"] == 6
    assert found["checkpoint"]["canvas_length"] == 128


def test_doctor_reports_and_fails_where_there_is_no_checkpoint(
    dgemma_command: Command, tmp_path: Path
):
    done = dgemma_command("doctor", "--model", str(tmp_path), "--json")
    assert done.status == 1
    assert "error" in json.loads(done.out)["checkpoint"]
    assert done.err.startswith("dgemma: error: ")
    assert done.err.count("\n") == 1
