"""NumPy reference of every fused operation: slow, obvious, the oracle of the backends' kernels.

Arrays are float32 unless said otherwise. A backend's results may differ by an RMS of 1e-5 of the
reference's in float32; integers are equal away from ties.

Not here: anything a backend imports in a hot path.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dgemma.backend import Float32, Float64, Int32

CDF_TILE = 1024
"""Tokens in one tile of the two-level inverse CDF; part of the definition, not a tuning knob."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RowStatistics:
    """`Statistics` of plain rows, with the shaped logits they came from."""

    argmax: Int32  # [R]
    candidate: Int32  # [R]
    entropy: Float32  # [R]
    argmax_logprob: Float32  # [R]
    candidate_logprob: Float32  # [R]
    shaped: Float32  # [R, V]


def softcap(logits: Float32, cap: float) -> Float32:
    """`cap * tanh(logits / cap)`, in float32."""
    return (np.float32(cap) * np.tanh(logits / np.float32(cap))).astype(np.float32)


def vocabulary_statistics(
    logits: Float32, temperatures: Float32, uniforms: Float64, cap: float | None = None
) -> RowStatistics:
    """Everything a step wants to know of its logits.

    `logits` [R, V] (before the softcap when `cap` is given), `temperatures` [R], `uniforms` [R].
    Source: transformers 5.24, `generation_diffusion_gemma.py` (`_denoising_step`); the candidate is
    drawn by inverse CDF instead of `torch.multinomial`.
    """
    capped = logits.astype(np.float32) if cap is None else softcap(logits, cap)
    shaped = capped / temperatures[:, None].astype(np.float32)
    highest = shaped.max(axis=-1, keepdims=True)
    mass = np.exp(shaped - highest)
    total = mass.sum(axis=-1, keepdims=True, dtype=np.float64)
    log_total = highest.astype(np.float64) + np.log(total)
    logprobs = shaped - log_total
    # A token of probability 0 (a logit of -inf) adds nothing, where 0 * -inf would be NaN.
    terms = np.where(mass == 0, 0.0, mass / total * np.where(mass == 0, 0.0, logprobs))
    argmax = shaped.argmax(axis=-1).astype(np.int32)
    candidate = inverse_cdf(mass, uniforms)
    rows = np.arange(len(shaped))
    return RowStatistics(
        argmax=argmax,
        candidate=candidate,
        entropy=(-terms.sum(axis=-1)).astype(np.float32),
        argmax_logprob=logprobs[rows, argmax].astype(np.float32),
        candidate_logprob=logprobs[rows, candidate].astype(np.float32),
        shaped=shaped,
    )


def inverse_cdf(mass: Float32, uniforms: Float64) -> Int32:
    """The token at quantile `uniforms` of unnormalised `mass` [R, V], in two levels.

    Level one: the mass of each tile of `CDF_TILE` tokens in float32, summed up in float64; the tile
    is the first whose running sum exceeds `u * total`. Level two: the running float64 sum inside
    that tile, against what is left of `u * total`. Rounding may leave the target a hair beyond the
    last token of the tile; the last token with mass is taken then. Never returns a token of mass 0;
    a row of NaN gives some token of the vocabulary, and its entropy tells.
    """
    rows, vocabulary = mass.shape
    tiles = -(-vocabulary // CDF_TILE)
    padded = np.zeros((rows, tiles * CDF_TILE), dtype=np.float32)
    padded[:, :vocabulary] = mass
    tiled = padded.reshape(rows, tiles, CDF_TILE)
    tile_mass = tiled.sum(axis=-1, dtype=np.float32)
    tile, left = select_tile(tile_mass, uniforms)
    inside = tiled[np.arange(rows), tile]
    return np.minimum(tile * CDF_TILE + select_in_tile(inside, left), np.int32(vocabulary - 1))


def select_tile(tile_mass: Float32, uniforms: Float64) -> tuple[Int32, Float64]:
    """Level one of `inverse_cdf`: the tile of each row, and the mass left to find inside it."""
    running = np.cumsum(tile_mass, axis=-1, dtype=np.float64)
    target = uniforms * running[:, -1]
    tile = _first_above(running, target, tile_mass)
    before = np.where(tile > 0, running[np.arange(len(tile)), np.maximum(tile - 1, 0)], 0.0)
    return tile, target - before


def select_in_tile(inside: Float32, left: Float64) -> Int32:
    """Level two of `inverse_cdf`: the offset inside the chosen tile [R, CDF_TILE]."""
    return _first_above(np.cumsum(inside, axis=-1, dtype=np.float64), left, inside)


def _first_above(running: Float64, target: Float64, mass: Float32) -> Int32:
    """The first column whose running sum exceeds the target, else the last one with mass."""
    above = (running > target[:, None]) & (mass > 0)
    last = mass.shape[-1] - 1 - np.argmax(mass[:, ::-1] > 0, axis=-1)
    first: Int32 = above.argmax(axis=-1).astype(np.int32)
    return np.where(above.any(axis=-1), first, last.astype(np.int32))


def soft_embedding(shaped: Float32, embedding: Float32) -> Float32:
    """`softmax(shaped) @ embedding * sqrt(D)`: [R, V] and [V, D] to [R, D].

    The reference rounds `shaped` and the probabilities to the embedding's dtype on the way; a
    caller who compares in bfloat16 rounds before calling.
    """
    mass = np.exp(shaped - shaped.max(axis=-1, keepdims=True))
    probabilities = mass / mass.sum(axis=-1, keepdims=True)
    scale = np.float32(embedding.shape[-1] ** 0.5)
    return np.multiply(np.matmul(probabilities, embedding), scale, dtype=np.float32)
