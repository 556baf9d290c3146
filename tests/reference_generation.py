"""The reference's own `generate`, fed our noise: the oracle of whole generations."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import torch
from transformers.models.diffusion_gemma.generation_diffusion_gemma import EntropyBoundSampler

from dgemma.noise import Noise
from dgemma.reference import inverse_cdf


@contextmanager
def our_noise(noise: Noise, canvas_length: int) -> Iterator[None]:
    """Replaces the reference's three draws (canvas, candidate, renoise) by ours, one row."""
    block, step = -1, 0
    plain_renoise = EntropyBoundSampler.renoise_canvas
    renoising = False

    def tensor(tokens: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(tokens.astype(np.int64))[None]

    def initialize_canvas(self, batch_size, device):
        nonlocal block, step
        if renoising:
            return tensor(noise.renoise(block, step, canvas_length))
        block, step = block + 1, 0
        return tensor(noise.canvas(block, canvas_length))

    def renoise_canvas(self, accepted_canvas, cur_step):
        nonlocal renoising, step
        renoising = True
        renoised = plain_renoise(self, accepted_canvas, cur_step)
        renoising = False
        step += 1
        return renoised

    def multinomial(probs, num_samples):
        assert num_samples == 1
        uniforms = noise.uniforms(block, step, canvas_length)
        return torch.from_numpy(inverse_cdf(probs.numpy(), uniforms).astype(np.int64))[:, None]

    with (
        mock.patch.object(EntropyBoundSampler, "initialize_canvas", initialize_canvas),
        mock.patch.object(EntropyBoundSampler, "renoise_canvas", renoise_canvas),
        mock.patch.object(torch, "multinomial", multinomial),
    ):
        yield


def reference_generate(model, prompt: list[int], seed: int, **settings) -> tuple[list[int], float]:
    """New tokens (pads and the end token included) and tokens a forward pass, dynamic cache."""
    noise = Noise(seed, vocab_size=model.config.text_config.vocab_size)
    ids = torch.tensor([prompt])
    with our_noise(noise, model.config.canvas_length):
        output = model.generate(ids, cache_implementation="dynamic", **settings)
    return output.sequences[0, len(prompt) :].tolist(), float(output.tokens_per_forward)
