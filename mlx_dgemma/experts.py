"""The experts: tokens sorted by expert, two grouped products, a weighted sum.

    sort      the [N, k] choices are flattened and sorted, so that each expert's tokens lie together
    product   gate and up in one product (rows [0, I) gate, [I, 2I) up, as stored), then down
    combine   back in token order, weighted and added in float32

The grouped product comes in two kinds, chosen once at load:

    GatheredExperts  `gather_mm` / `gather_qmm` over the sorted tokens, without a host sync (GPUs)
    LoopedExperts    one product for each expert that is hit, after one host sync (the CPU)

Not here: the choice of experts (`layers.Router`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import numpy as np

from mlx_dgemma.layers import gelu
from mlx_dgemma.products import Dense, Matrix, Quantized


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """The packed stacks of one layer."""

    gate_up: Dense | Quantized  # [E, 2I, D]
    down: Dense | Quantized  # [E, D, I]


class Experts(Protocol):
    """The grouped products of one layer."""

    @property
    def weights(self) -> ExpertWeights: ...

    def __call__(self, x: mx.array, chosen: mx.array, weights: mx.array) -> mx.array:
        """x [N, D], chosen experts [N, k] and their float32 weights [N, k], to [N, D]."""
        ...


@dataclass(frozen=True, eq=False)
class GatheredExperts:
    """One grouped product over all sorted tokens."""

    weights: ExpertWeights

    def __call__(self, x: mx.array, chosen: mx.array, weights: mx.array) -> mx.array:
        order, tokens, experts = _sort(chosen)
        sorted_rows = mx.expand_dims(x[tokens], -2)
        gate, up = mx.split(_gathered(self.weights.gate_up, sorted_rows, experts), 2, axis=-1)
        out = _gathered(self.weights.down, gelu(gate) * up, experts)
        return _combine(out.squeeze(-2), order, weights, x.dtype)


@dataclass(frozen=True, eq=False)
class LoopedExperts:
    """A product for each expert that is hit."""

    weights: ExpertWeights
    widen: bool

    def __call__(self, x: mx.array, chosen: mx.array, weights: mx.array) -> mx.array:
        order, tokens, experts = _sort(chosen)
        hit, firsts = np.unique(np.array(experts, dtype=np.int64), return_index=True)
        bounds = [*firsts.tolist(), experts.size]
        rows = x[tokens]
        parts: list[mx.array] = []
        for index, expert in enumerate(hit.tolist()):
            own = rows[bounds[index] : bounds[index + 1]]
            gate_up = Matrix(self.weights.gate_up.at(expert), x.dtype, self.widen)
            down = Matrix(self.weights.down.at(expert), x.dtype, self.widen)
            gate, up = mx.split(gate_up.apply(own), 2, axis=-1)
            parts.append(down.apply(gelu(gate) * up))
        return _combine(mx.concatenate(parts), order, weights, x.dtype)


def choose_experts(weights: ExpertWeights, *, native: bool) -> Experts:
    """The kind that suits the device (`native`: a GPU); `reason_for` says why."""
    return GatheredExperts(weights) if native else LoopedExperts(weights, widen=True)


def reason_for(*, native: bool) -> str:
    """Which kind of grouped product a device gets, and why, for `doctor`."""
    if native:
        return "grouped products (gather_mm, gather_qmm) over sorted tokens, no host sync"
    return (
        "one product an expert: on the CPU gather_mm takes float32 only and was 2.3 times slower "
        "(8 times with OpenBLAS), gather_qmm adds up in the weights' dtype"
    )


def self_test(kind: Experts, dtype: mx.Dtype) -> str:
    """Compares a layer's grouped products with float32 products of its dense weights.

    Every expert is used. A quantized gather over many experts was seen to be wrong on some GPUs and
    right on others (ml-explore/mlx issue 3393). Returns what is wrong, in words; "" if nothing is.
    """
    count, _, width = kind.weights.gate_up.shape
    rows = 2 * count
    top_k = min(count, 2)
    x = mx.reshape(mx.sin(mx.arange(rows * width)), (rows, width)).astype(dtype)
    chosen = (mx.arange(rows)[:, None] * 7 + mx.arange(top_k)) % count
    weights = mx.full((rows, top_k), 1.0 / top_k)
    plain = LoopedExperts(kind.weights, widen=True)(x.astype(mx.float32), chosen, weights)
    error = kind(x, chosen, weights).astype(mx.float32) - plain
    ratio = mx.sqrt(mx.mean(error * error) / mx.mean(plain * plain)).item()
    bound = 1e-4 if dtype == mx.float32 else 3e-2
    if isinstance(ratio, float) and ratio <= bound:
        return ""
    return f"the grouped product of {count} experts is off by {ratio:.2g} on this device"


def _sort(chosen: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """The order that sorts the flat choices, with the token and the expert of each."""
    flat = chosen.flatten()
    order = mx.argsort(flat)
    return order, order // chosen.shape[-1], flat[order].astype(mx.uint32)


def _gathered(stack: Dense | Quantized, x: mx.array, experts: mx.array) -> mx.array:
    if isinstance(stack, Quantized):
        return stack.gathered(x, experts)
    return mx.gather_mm(x, stack.array.swapaxes(-1, -2), rhs_indices=experts, sorted_indices=True)


def _combine(out: mx.array, order: mx.array, weights: mx.array, dtype: mx.Dtype) -> mx.array:
    """Weighted sum over each token's experts: sorted rows [N * k, D] to [N, D]."""
    by_token = mx.reshape(out[mx.argsort(order)], (*weights.shape, -1))
    return mx.sum(by_token * weights[..., None], axis=1).astype(dtype)
