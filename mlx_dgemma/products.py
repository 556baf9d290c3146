"""Matrix products with stored weights, dense or quantized, on a GPU or on the CPU.

A `Matrix` is W [O, I] as a checkpoint stores it and can be applied (`x @ W.T`), looked up (rows of
W) and mixed (`p @ W`). How is chosen once, at load:

    GPU   MLX's own products in the weights' dtype: `matmul`, `quantized_matmul`
    CPU   float32 products, a piece of W widened (or dequantized) at a time, W on the left

Why the CPU differs, measured with mlx 0.32.4's Linux build on x86-64 (256 x 512 by 512 x 1024):
bfloat16 and float16 products run outside BLAS (56 and 73 ms; float32 with OpenBLAS preloaded: 4 ms
including the widening); `quantized_matmul` adds up in bfloat16 (4 % off at 128 terms); and the
bundled reference BLAS is 2.3 times slower when the right operand is the transposed one (122 against
53 ms), which W on the left avoids. OpenBLAS does not care.

Not here: the grouped product of the experts (`experts.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

PIECE_BYTES = 2 << 20
"""Float32 bytes of a weight widened at once on the CPU."""


class Stored(Protocol):
    """A weight as it lies in memory: the last two axes are [O, I]."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int: ...

    def piece(self, start: int, stop: int) -> mx.array:
        """Rows `start` to `stop` of axis -2, dense."""
        ...

    def take(self, ids: mx.array) -> mx.array:
        """The rows `ids` of axis 0, dense."""
        ...

    def part(self, start: int, stop: int) -> Stored:
        """Rows `start` to `stop` of axis -2, as stored."""
        ...

    def at(self, index: int) -> Stored:
        """The matrix `index` of a stack [E, O, I]."""
        ...

    def applied_to(self, x: mx.array) -> mx.array:
        """`x @ W.T` by MLX's own product."""
        ...

    def mixed_by(self, p: mx.array) -> mx.array:
        """`p @ W` by MLX's own product."""
        ...


@dataclass(frozen=True, eq=False)
class Dense:
    """A plain array."""

    array: mx.array

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    def piece(self, start: int, stop: int) -> mx.array:
        return self.array[..., start:stop, :]

    def take(self, ids: mx.array) -> mx.array:
        return self.array[ids]

    def part(self, start: int, stop: int) -> Dense:
        return Dense(self.piece(start, stop))

    def at(self, index: int) -> Dense:
        return Dense(self.array[index])

    def applied_to(self, x: mx.array) -> mx.array:
        return x @ self.array.T

    def mixed_by(self, p: mx.array) -> mx.array:
        return p @ self.array


@dataclass(frozen=True, eq=False)
class Quantized:
    """Packed integers with scales for each group of inputs; biases in affine mode only."""

    weight: mx.array  # uint32 [..., O, I * bits / 32]
    scales: mx.array  # [..., O, I / group_size]
    biases: mx.array | None
    group_size: int
    bits: int
    mode: str
    dtype: mx.Dtype
    """What the dense values are given as."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.scales.shape[:-1], self.scales.shape[-1] * self.group_size)

    @property
    def nbytes(self) -> int:
        biases = 0 if self.biases is None else self.biases.nbytes
        return self.weight.nbytes + self.scales.nbytes + biases

    def piece(self, start: int, stop: int) -> mx.array:
        part = self.part(start, stop)
        return self._dense(part.weight, part.scales, part.biases)

    def take(self, ids: mx.array) -> mx.array:
        biases = None if self.biases is None else self.biases[ids]
        return self._dense(self.weight[ids], self.scales[ids], biases)

    def part(self, start: int, stop: int) -> Quantized:
        rows = slice(start, stop)
        return self._with(
            self.weight[..., rows, :],
            self.scales[..., rows, :],
            None if self.biases is None else self.biases[..., rows, :],
        )

    def at(self, index: int) -> Quantized:
        biases = None if self.biases is None else self.biases[index]
        return self._with(self.weight[index], self.scales[index], biases)

    def applied_to(self, x: mx.array) -> mx.array:
        return self._product(x, transpose=True)

    def mixed_by(self, p: mx.array) -> mx.array:
        return self._product(p, transpose=False)

    def gathered(self, x: mx.array, experts: mx.array) -> mx.array:
        """`x[i] @ W[experts[i]].T` for x [N, 1, I] whose experts ascend."""
        return mx.gather_qmm(
            x,
            self.weight,
            self.scales,
            self.biases,
            rhs_indices=experts,
            transpose=True,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
            sorted_indices=True,
        )

    def _with(self, weight: mx.array, scales: mx.array, biases: mx.array | None) -> Quantized:
        return Quantized(weight, scales, biases, self.group_size, self.bits, self.mode, self.dtype)

    def _product(self, x: mx.array, *, transpose: bool) -> mx.array:
        return mx.quantized_matmul(
            x,
            self.weight,
            scales=self.scales,
            biases=self.biases,
            transpose=transpose,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
        )

    def _dense(self, weight: mx.array, scales: mx.array, biases: mx.array | None) -> mx.array:
        return mx.dequantize(
            weight,
            scales,
            biases,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
            dtype=self.dtype,
        )


@dataclass(frozen=True, eq=False)
class Matrix:
    """W [O, I] and the way its products are computed here; results have the dtype `dtype`."""

    stored: Stored
    dtype: mx.Dtype
    widen: bool
    """Float32 products of widened pieces (the CPU) instead of MLX's own (a GPU)."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def rows_per_piece(self) -> int:
        """Rows of W that are widened at once; all of them where nothing is widened."""
        rows, columns = self.shape[-2:]
        return max(1024, PIECE_BYTES // (4 * columns) // 1024 * 1024) if self.widen else rows

    def apply(self, x: mx.array) -> mx.array:
        """`x @ W.T`: [N, I] to [N, O]."""
        if not self.widen:
            return self.stored.applied_to(x)
        columns = transposed32(x)
        parts = [
            (self.stored.piece(start, stop).astype(mx.float32) @ columns).astype(self.dtype)
            for start, stop in pieces(self.shape[-2], self.rows_per_piece)
        ]
        whole = parts[0] if len(parts) == 1 else mx.concatenate(parts)
        return mx.contiguous(whole.T)

    def apply_piece(self, x: mx.array, start: int, stop: int) -> mx.array:
        """`W[start:stop] @ x.T`: [N, I] to [stop - start, N], rounded to `dtype`."""
        if not self.widen:
            return self.stored.part(start, stop).applied_to(x).T
        piece = self.stored.piece(start, stop).astype(mx.float32)
        return (piece @ transposed32(x)).astype(self.dtype)

    def mix_piece(self, p: mx.array, start: int, stop: int) -> mx.array:
        """`p.T @ W[start:stop]` in float32: p [stop - start, N] to [N, I]."""
        if not self.widen:
            rows = p.T.astype(self.dtype)
            return self.stored.part(start, stop).mixed_by(rows).astype(mx.float32)
        return p.T @ self.stored.piece(start, stop).astype(mx.float32)

    def rows(self, ids: mx.array) -> mx.array:
        """W[ids]: [N] to [N, I]."""
        return self.stored.take(ids).astype(self.dtype)


def run(*arrays: mx.array | None) -> None:
    """Evaluates arrays now; None is nothing to do."""
    mx.eval(*[array for array in arrays if array is not None])  # pyright: ignore[reportUnknownMemberType]


def begin(*arrays: mx.array | None) -> None:
    """Starts evaluating arrays without waiting; what is begun later runs later."""
    mx.async_eval(*[array for array in arrays if array is not None])  # pyright: ignore[reportUnknownMemberType]


def transposed32(x: mx.array) -> mx.array:
    """`x.T` in float32, laid out row by row, as the right operand of a product."""
    return mx.contiguous(x.astype(mx.float32).T)


def pieces(total: int, size: int) -> list[tuple[int, int]]:
    """Ranges of at most `size` that cover `total`."""
    return [(start, min(start + size, total)) for start in range(0, total, size)]
