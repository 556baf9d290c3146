"""The measuring itself: random checkpoints, records, and fair comparisons."""

import json

import numpy as np
import pytest
import torch
from transformers import DiffusionGemmaForBlockDiffusion

from dgemma.bench import compare, counts, measure
from dgemma.bench.random_checkpoint import SHAPES, bfloat16_bits, write_random_checkpoint
from dgemma.checkpoint import open_checkpoint
from dgemma.cli import main
from dgemma.errors import BackendError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_random_checkpoint(tmp_path_factory.mktemp("random") / "small", SHAPES["small"])


def test_transformers_opens_a_random_checkpoint_with_nothing_missing_or_unknown(folder):
    _, report = DiffusionGemmaForBlockDiffusion.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]


def test_a_random_checkpoint_opens_strictly_and_repeats(folder, tmp_path):
    again = write_random_checkpoint(tmp_path / "again", SHAPES["small"])
    assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    checkpoint = open_checkpoint(folder, strict=True)
    weights = checkpoint.read("model.decoder.embed_tokens.weight")
    assert weights.shape == (2048, 64)


def test_bfloat16_rounding_is_torchs():
    values = np.random.default_rng(0).normal(size=10_000).astype(np.float32)
    values[:4] = [1.0, 1.00390625, 1.01171875, -3.0]  # exact, and ties to even both ways
    expected = torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
    np.testing.assert_array_equal(bfloat16_bits(values), expected)


@pytest.mark.parametrize("rows", [1, 3])
def test_the_host_is_measured_without_any_network(rows):
    figure = measure.host(rows, 3, canvas=32, vocabulary=100)
    assert len(figure.values) == 3
    assert 0 < figure.median < 1000


def test_bench_prints_a_table_and_one_json_object_last(folder, tmp_path, capsys):
    out = tmp_path / "records.jsonl"
    arguments = f"--backend mlx --prompt-tokens 20 --repeats 1 --max-new-tokens 8 --out {out}"
    status = main(["bench", "--model", str(folder), "--mode", "autoregressive", *arguments.split()])
    printed = capsys.readouterr().out.splitlines()
    assert status == 0
    record = json.loads(printed[-1])
    assert json.loads(out.read_text()) == record
    names = [figure["name"] for figure in record["figures"]]
    assert names[:2] == ["prefill of 20", "step behind 20"]
    assert any(line.startswith("step behind 20") for line in printed)
    assert record["peak_memory_bytes"] > 0
    assert record["machine"]["packages"]["mlx"]
    replies = {figure["name"]: figure for figure in record["replies"]["figures"]}
    assert replies["emitted tokens"]["median"] > 0


def test_our_side_of_a_comparison_takes_exactly_its_steps(folder, monkeypatch):
    from dgemma.bench.side import run_dgemma as run_side
    from mlx_dgemma.backend import MlxBackend

    calls = []
    plain = MlxBackend.denoise
    monkeypatch.setattr(
        MlxBackend, "denoise", lambda self, rows: calls.append(1) or plain(self, rows)
    )
    found = run_side(folder, "mlx", 12, 3)
    assert len(calls) == 2 + 3  # the unmeasured canvas, then the measured one
    assert found["canvas_s"] > 0
    assert found["peak_memory_bytes"] > 0


def test_a_comparison_alternates_and_takes_ratios_pair_by_pair(tmp_path, monkeypatch):
    order = []

    def run(command):
        program = command[3]
        order.append(program)
        value = 2.0 if program == "dgemma" else 4.0 * (1 + order.count("mlx-vlm"))
        return {**dict.fromkeys(compare.METRICS, value), "program": program, "version": "1"}

    monkeypatch.setattr(compare, "_run", run)
    found = compare.compare(tmp_path, pairs=3)
    assert order == ["dgemma", "mlx-vlm", "mlx-vlm", "dgemma", "dgemma", "mlx-vlm"]
    assert found.ratios("step_s") == [2 / 8, 2 / 12, 2 / 16]
    assert found.to_dict()["versions"] == {"dgemma": "1", "mlx-vlm": "1"}


def test_a_side_that_fails_is_one_line(tmp_path):
    with pytest.raises(BackendError, match=r"dgemma failed: .*no-such-folder"):
        compare.compare(tmp_path / "no-such-folder", pairs=1)


def test_operations_are_counted_as_transformers_network_multiplies(folder):
    """Every weight matrix a token meets once costs two operations a weight."""
    config = open_checkpoint(folder).config
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(folder)
    for index, layer in enumerate(config.layers):
        weights = 0
        for parameter in model.model.decoder.layers[index].parameters():
            if parameter.ndim == 2:
                weights += parameter.numel()
            elif parameter.ndim == 3:  # a stack of experts, of which a token meets top_k
                weights += parameter[0].numel() * config.top_k_experts
        assert counts.layer_flops(config, layer) == 2 * weights
    signal = model.model.decoder.self_conditioning
    per_row = sum(2 * p.numel() for p in signal.parameters() if p.ndim == 2)
    assert counts.left_out_flops(config, {"signal_rows": 3}) == {"signal_rows": 3 * per_row}
    whole = sum(counts.layer_flops(config, layer) for layer in config.layers) + per_row
    whole += 2 * 2 * model.lm_head.weight.numel()
    assert counts.step_flops(config) == whole * config.canvas_length
