"""Attention of some queries over segments of keys, joined by a running softmax.

    segments    [ own tokens ] [ prefix tile 1 ] [ prefix tile 2 ] ...   with or without a mask
    each        s = K q;  m' = max(m, max s);  p = exp(s - m')
                l = l e^(m - m') + sum p;  o = o e^(m - m') + p V;  at the end o / l

The prefix is read where it lies: keys and values are sliced, never joined with the canvas's, and a
tile's scores are bounded (`SCORE_BYTES`), so memory does not grow with the prefix. Own tokens come
first: every query sees itself, so the running maximum is finite from the start, even where a tile
is masked for some query. Joining the scores of both segments for one softmax copies them and was no
faster (256 queries, 8 heads of 128, prefix 1,024, float32 on mlx 0.32.4's CPU build: 73 ms against
87 ms with OpenBLAS, 350 against 372 without; MLX's fused attention over joined keys 60 and 496).

Scores lie as [K, keys, queries]: both products then have their untransposed operand on the right,
which the CPU's BLAS wants (see `products.py`), and no query head's keys are repeated: the queries
of a group stand side by side.

Not here: projections, rotation, what is visible (`model.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import mlx.core as mx

SCORE_BYTES = 64 << 20
"""Float32 bytes of the scores of one tile."""
MINIMUM_TILE = 256
"""Keys of a tile even where `SCORE_BYTES` would allow fewer."""


@dataclass(frozen=True, eq=False)
class Segment:
    """Keys and values side by side in position, and who sees them."""

    keys: mx.array  # [K, S, d]
    values: mx.array  # [K, S, d]
    visible: mx.array | None = None  # bool [S, N], None: everybody sees everything


def tile_length(heads: int, queries: int) -> int:
    """Keys of one tile, so that its scores stay within `SCORE_BYTES`."""
    return max(MINIMUM_TILE, SCORE_BYTES // (4 * heads * max(queries, 1)))


def attend(queries: mx.array, segments: Iterable[Segment], *, widen: bool) -> mx.array:
    """Attention with a softmax scale of 1: queries [N, H, d] to [N, H * d].

    `widen` computes in float32 whatever the dtype (the CPU); otherwise the products are in the
    dtype of the queries and the softmax in float32.
    """
    count, heads, dim = queries.shape
    columns: mx.array | None = None
    highest = total = result = None
    for segment in segments:
        kv_heads = segment.keys.shape[0]
        group = heads // kv_heads
        if columns is None:
            columns = _columns(queries, kv_heads, widen)
        keys = segment.keys.astype(columns.dtype)
        scores = (keys @ columns).astype(mx.float32)  # [K, S, group * N]
        if segment.visible is not None:
            shape = (kv_heads, keys.shape[1], group, count)
            scores = mx.where(segment.visible[:, None, :], mx.reshape(scores, shape), -mx.inf)
            scores = mx.reshape(scores, (kv_heads, keys.shape[1], group * count))
        own_highest = mx.max(scores, axis=1, keepdims=True)
        if highest is None or total is None or result is None:
            highest = own_highest
            mass = mx.exp(scores - highest)
            total = mx.sum(mass, axis=1, keepdims=True)
            result = _mixed(mass, segment.values, columns.dtype)
            continue
        joint = mx.maximum(highest, own_highest)
        shrink = mx.exp(highest - joint)
        mass = mx.exp(scores - joint)
        total = total * shrink + mx.sum(mass, axis=1, keepdims=True)
        result = result * shrink.swapaxes(1, 2) + _mixed(mass, segment.values, columns.dtype)
        highest = joint
    assert result is not None
    assert total is not None
    kv_heads = result.shape[0]
    joined = (result / total.swapaxes(1, 2)).astype(queries.dtype)
    joined = mx.reshape(joined, (kv_heads, heads // kv_heads, count, dim))
    return mx.reshape(mx.transpose(joined, (2, 0, 1, 3)), (count, heads * dim))


def _columns(queries: mx.array, kv_heads: int, widen: bool) -> mx.array:
    """[N, H, d] to [K, d, group * N]: the queries that share a key/value head, side by side."""
    count, heads, dim = queries.shape
    grouped = mx.reshape(queries, (count, kv_heads, heads // kv_heads, dim))
    grouped = mx.transpose(grouped, (1, 3, 2, 0))
    if widen:
        grouped = grouped.astype(mx.float32)
    return mx.contiguous(mx.reshape(grouped, (kv_heads, dim, -1)))


def _mixed(mass: mx.array, values: mx.array, dtype: mx.Dtype) -> mx.array:
    """[K, S, queries] and [K, S, d] to float32 [K, queries, d]."""
    return (mass.swapaxes(1, 2).astype(dtype) @ values.astype(dtype)).astype(mx.float32)
