"""The core drives transformers' network to transformers' own tokens: float32, token for token."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from reference_generation import reference_generate
from tokenizers import Tokenizer
from torch_backend import TorchBackend
from transformers import DiffusionGemmaForBlockDiffusion

from dgemma.config import GenerationConfig, ModelConfig
from dgemma.decoders import Commit, decoder
from dgemma.options import Options, plan
from dgemma.scheduler import Scheduler

TINY = Path(__file__).parents[2] / "shared" / "dgemma" / "tiny"


@pytest.fixture(scope="module")
def oracle():
    torch.set_num_threads(1)
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(TINY, dtype=torch.float32)
    config = ModelConfig.from_dict(json.loads((TINY / "config.json").read_text()))
    return model, TorchBackend(model, config)


def prompt_of(task: str, which: int) -> list[int]:
    lines = (TINY / "heldout.jsonl").read_text().splitlines()
    texts = [row["prompt"] for row in map(json.loads, lines) if row["task"] == task]
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    return tokenizer.encode(f"<bos><|turn>user\n{texts[which]}<turn|>\n<|turn>model\n").ids


@pytest.mark.parametrize("task", ["sudoku9", "json", "edit", "story"])
@pytest.mark.parametrize("steps", [3, 48])
def test_a_whole_generation_is_the_references(oracle, task, steps):
    compare(oracle, prompt_of(task, 1), seed=steps, steps=steps, ends=[1, 6])


@pytest.mark.parametrize("seed", [0, 1])
def test_second_and_third_canvases_are_the_references(oracle, seed):
    """Without end tokens the text runs on over the window of 128 and into later canvases."""
    compare(oracle, prompt_of("story", seed), seed=seed, steps=6, ends=[])


def compare(oracle, prompt: list[int], *, seed: int, steps: int, ends: list[int]) -> None:
    model, backend = oracle
    ready = plan(
        np.array(prompt, dtype=np.int32),
        Options(seed=seed, max_new_tokens=384),
        config=backend.config,
        generation=GenerationConfig(max_denoising_steps=steps),
        end_tokens=frozenset(ends),
    )
    events = Scheduler(backend).run(decoder("diffusion")(ready.request, backend.new_prefix()))
    commits = [event for event in events if isinstance(event, Commit)]
    settings = {"eos_token_id": ends} if ends else {"eos_token_id": 1023, "pad_token_id": None}
    expected, tokens_per_forward = reference_generate(
        model, prompt, seed, max_new_tokens=384, max_denoising_steps=steps, **settings
    )
    mine = [t for c in commits for t in c.tokens.tolist()]
    mine += [c.end_token for c in commits if c.end_token is not None]
    assert len(mine) > 5
    assert mine == expected[: len(mine)]
    assert set(expected[len(mine) :]) <= {0}
    counted = len(expected) if not ends else sum(token != 0 for token in expected)
    assert sum(c.steps for c in commits) == pytest.approx(counted / tokens_per_forward)
