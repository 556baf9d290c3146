"""The small operations of a layer: norms, activation, rotary embedding, MLP, router.

Roundings follow the reference: norms in float32 with the weight applied before rounding, the
activation in float32 and rounded once, the rotation in the activations' dtype with rounded cosines,
the router's scores rounded and its softmax in float32.
Source: transformers 5.24, `models/diffusion_gemma/modeling_diffusion_gemma.py`.

Not here: attention, experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx

from dgemma.config import LayerConfig
from mlx_dgemma.products import Matrix

_GELU_SCALE = math.sqrt(2.0 / math.pi)
_GELU_CUBIC = 0.044715


def rms_norm(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis, in float32, rounded once."""
    return mx.fast.rms_norm(x.astype(mx.float32), weight, eps).astype(x.dtype)


def gelu(x: mx.array) -> mx.array:
    """The tanh approximation of GELU, in float32, rounded once."""
    wide = x.astype(mx.float32)
    inner = _GELU_SCALE * (wide + _GELU_CUBIC * (wide * wide * wide))
    return (0.5 * wide * (1.0 + mx.tanh(inner))).astype(x.dtype)


def scaled(x: mx.array, factor: float) -> mx.array:
    """`x * factor` with the factor kept in float32: MLX would round it to the dtype of `x`."""
    return (x.astype(mx.float32) * factor).astype(x.dtype)


@dataclass(frozen=True, eq=False)
class Mlp:
    """`down(gelu(gate x) * up x)`."""

    gate: Matrix
    up: Matrix
    down: Matrix

    def __call__(self, x: mx.array) -> mx.array:
        return self.down.apply(gelu(self.gate.apply(x)) * self.up.apply(x))


@dataclass(frozen=True, eq=False)
class Rotation:
    """Cosines and sines of some positions, for one geometry of layers."""

    cos: mx.array  # [N, 1, d / 2]
    sin: mx.array

    @classmethod
    def at(cls, positions: mx.array, layer: LayerConfig, dtype: mx.Dtype) -> Rotation:
        """The rotation of `positions` [N]; pairs of frequency 0 stand still."""
        frequencies = mx.array(layer.rope.inverse_frequencies(layer.head_dim), dtype=mx.float32)
        angles = positions.astype(mx.float32)[:, None, None] * frequencies
        return cls(mx.cos(angles).astype(dtype), mx.sin(angles).astype(dtype))

    def rows(self, kept: mx.array) -> Rotation:
        """The rotation of some of the positions."""
        return Rotation(self.cos[kept], self.sin[kept])

    def __call__(self, x: mx.array) -> mx.array:
        """Rotates x [N, heads, d]; lanes i and i + d/2 are a pair."""
        half = x.shape[-1] // 2
        first, second = x[..., :half], x[..., half:]
        return mx.concatenate(
            [first * self.cos - second * self.sin, second * self.cos + first * self.sin], axis=-1
        )


@dataclass(frozen=True, eq=False)
class Router:
    """Which experts a token goes to, and how much each counts.

    Reads the RAW residual: it has its own norm and scale, and feeding it the normed stream is a
    known fault (stray tokens, no convergence).
    """

    projection: Matrix  # [E, D]
    scale: mx.array  # [D]
    per_expert_scale: mx.array  # [E], float32
    top_k: int
    eps: float

    def __call__(self, residual: mx.array) -> tuple[mx.array, mx.array]:
        """Experts uint32 [N, k] and float32 weights [N, k] of a residual [N, D]."""
        normed = rms_norm(residual, None, self.eps) * self.scale
        scores = self.projection.apply(scaled(normed, residual.shape[-1] ** -0.5))
        probabilities = mx.softmax(scores.astype(mx.float32), axis=-1)
        chosen = mx.argpartition(-probabilities, self.top_k - 1, axis=-1)[:, : self.top_k]
        weights = mx.take_along_axis(probabilities, chosen, axis=-1)
        weights = weights / mx.sum(weights, axis=-1, keepdims=True)
        return chosen, weights * self.per_expert_scale[chosen]
