"""Quantized checkpoints on the MLX backend: packed products against the dequantized weights."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_support import Pair, read_all, step
from numpy.typing import NDArray
from oracle import (
    CANVAS,
    WINDOW,
    MemoryCheckpoint,
    Oracle,
    Packing,
    memory_checkpoint,
    relative_error,
)

from mlx_dgemma import experts
from mlx_dgemma.backend import MlxBackend
from mlx_dgemma.experts import ExpertWeights, GatheredExperts, LoopedExperts
from mlx_dgemma.products import Dense, Matrix, Quantized

SHAPES = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64}
AFFINE = [Packing(32, bits, "affine") for bits in (2, 3, 4, 5, 6, 8)]
OTHERS = [Packing(32, 4, "mxfp4"), Packing(32, 8, "mxfp8"), Packing(16, 4, "nvfp4")]
MODES = [*AFFINE, *OTHERS]


def name_of(packing: Packing | None) -> str:
    return "dense" if packing is None else f"{packing.mode}-{packing.bits}"


def packed(array: mx.array, packing: Packing) -> Quantized:
    """An array quantized by MLX."""
    parts = mx.quantize(array, group_size=packing.group_size, bits=packing.bits, mode=packing.mode)
    biases = parts[2] if len(parts) == 3 else None
    assert (biases is None) == (packing.mode != "affine")  # B16
    return Quantized(
        parts[0], parts[1], biases, packing.group_size, packing.bits, packing.mode, array.dtype
    )


def quantize(source: MemoryCheckpoint, packings: dict[str, Packing]) -> MemoryCheckpoint:
    """The checkpoint as MLX's quantizer would store it; modules without a packing stay dense."""
    arrays: dict[str, tuple[str, NDArray[Any]]] = {}
    for name, (dtype, array) in source.arrays.items():
        module = name.removesuffix(".weight")
        if module not in packings:
            arrays[name] = dtype, array
            continue
        whole = packed(mx.array(array), packings[module])
        arrays[f"{module}.weight"] = "U32", np.array(whole.weight)
        scales = "U8" if whole.scales.dtype == mx.uint8 else "F32"
        arrays[f"{module}.scales"] = scales, np.array(whole.scales)
        if whole.biases is not None:
            arrays[f"{module}.biases"] = "F32", np.array(whole.biases)
    return MemoryCheckpoint(source.config, arrays, packings)


def dequantize(source: MemoryCheckpoint, packings: dict[str, Packing]) -> MemoryCheckpoint:
    """The same values, dense."""
    arrays = dict(source.arrays)
    for name, (dtype, array) in source.arrays.items():
        if (module := name.removesuffix(".weight")) in packings:
            whole = packed(mx.array(array), packings[module])
            arrays[name] = dtype, np.array(whole.piece(0, array.shape[-2]).astype(mx.float32))
    return MemoryCheckpoint(source.config, arrays)


def modules(source: MemoryCheckpoint) -> list[str]:
    """Everything that may be quantized: matrices and packed experts of the text model."""
    return [
        name.removesuffix(".weight")
        for name, (_, array) in source.arrays.items()
        if array.ndim >= 2 and "vision" not in name
    ]


def assert_equal_passes(one: MemoryCheckpoint, other: MemoryCheckpoint, bound: float) -> None:
    rng = np.random.default_rng(40)
    tokens, canvas = (rng.integers(0, 600, n).astype(np.int32) for n in (2 * WINDOW + 1, CANVAS))
    results: list[list[Any]] = []
    for source in (one, other):
        backend = MlxBackend.from_checkpoint(source)
        prefix = backend.new_prefix()
        encoded = backend.logits(read_all(prefix, tokens))
        (first,) = backend.denoise([step(prefix, canvas)])
        second = step(prefix, canvas, conditioning=first.conditioning)
        results.append([encoded, backend.logits(step(prefix, canvas)), backend.logits(second)])
        backend.close()
    for found, wanted in zip(*results, strict=True):
        assert relative_error(found, wanted) <= bound


@pytest.mark.parametrize("packing", MODES, ids=name_of)
def test_a_packed_checkpoint_equals_its_dequantized_weights(packing: Packing) -> None:
    """Every module of the model packed, the embedding and the router among them."""
    source = memory_checkpoint(Oracle.build(40, **SHAPES))
    packings = dict.fromkeys(modules(source), packing)
    assert_equal_passes(quantize(source, packings), dequantize(source, packings), 1e-5)


def test_overrides_apply_to_exactly_their_modules() -> None:
    """B15: experts mxfp4, attention and embedding affine, one layer's MLP nvfp4, router dense."""
    source = memory_checkpoint(Oracle.build(41, **SHAPES))
    packings: dict[str, Packing] = {}
    for module in modules(source):
        if ".experts." in module:
            packings[module] = Packing(32, 4, "mxfp4")
        elif ".self_attn." in module or "embed_tokens" in module:
            packings[module] = Packing(64, 8, "affine")
        elif "layers.1.mlp." in module:
            packings[module] = Packing(16, 4, "nvfp4")
    assert_equal_passes(quantize(source, packings), dequantize(source, packings), 1e-5)


def grouped_inputs(rng: np.random.Generator, count: int) -> tuple[mx.array, mx.array, mx.array]:
    rows = 37
    x = mx.array(rng.standard_normal((rows, 64)).astype(np.float32))
    chosen = mx.array(np.stack([rng.permutation(count)[:8] for _ in range(rows)]).astype(np.uint32))
    weights = mx.array(rng.random((rows, 8)).astype(np.float32))
    return x, chosen, weights


def plain_experts(
    gate_up: NDArray[np.float32],
    down: NDArray[np.float32],
    x: NDArray[np.float32],
    chosen: NDArray[np.uint32],
    weights: NDArray[np.float32],
) -> NDArray[np.float64]:
    """Token by token, expert by expert, in float64."""
    result = np.zeros(x.shape)
    for row, (own, shares) in enumerate(zip(chosen, weights, strict=True)):
        for expert, share in zip(own, shares, strict=True):
            both = gate_up[expert].astype(np.float64) @ x[row]
            gate, up = np.split(both, 2)
            inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
            hidden = 0.5 * gate * (1 + np.tanh(inner)) * up
            result[row] += share * (down[expert].astype(np.float64) @ hidden)
    return result


@pytest.mark.parametrize("packing", [None, *MODES], ids=name_of)
def test_gathered_and_looped_experts_equal_a_plain_loop(packing: Packing | None) -> None:
    """B05, B112, B113: 128 experts, top-8, gate rows first, both kinds of grouped product."""
    rng = np.random.default_rng(42)
    count, inner = 128, 32
    stacks = [
        mx.array((rng.standard_normal(shape) / 8).astype(np.float32))
        for shape in ((count, 2 * inner, 64), (count, 64, inner))
    ]
    stored: list[Dense | Quantized] = [
        Dense(stack) if packing is None else packed(stack, packing) for stack in stacks
    ]
    weights = ExpertWeights(gate_up=stored[0], down=stored[1])
    inputs = grouped_inputs(rng, count)
    dense = [np.array(stack.piece(0, stack.shape[-2])) for stack in stored]
    wanted = plain_experts(dense[0], dense[1], *(np.array(value) for value in inputs))
    for kind in (GatheredExperts(weights), LoopedExperts(weights, widen=True)):
        assert relative_error(np.array(kind(*inputs)), wanted) <= 1e-5
        assert experts.self_test(kind, mx.float32) == ""


def test_the_self_test_sees_a_wrong_grouped_product() -> None:
    """B112: what a faulty gather would give is not taken for right."""
    rng = np.random.default_rng(43)
    stacks = [
        Dense(mx.array(rng.standard_normal(shape).astype(np.float32)))
        for shape in ((4, 16, 8), (4, 8, 8))
    ]
    weights = ExpertWeights(gate_up=stacks[0], down=stacks[1])

    class Faulty(GatheredExperts):
        def __call__(self, x: mx.array, chosen: mx.array, weights: mx.array) -> mx.array:
            return super().__call__(x, (chosen + (chosen == 3)) % 4, weights)

    assert "4 experts" in experts.self_test(Faulty(weights), mx.float32)


@pytest.mark.parametrize("packing", [None, *MODES], ids=name_of)
@pytest.mark.parametrize("widen", [True, False], ids=["cpu", "gpu"])
def test_products_of_a_matrix_equal_the_dense_ones(packing: Packing | None, widen: bool) -> None:
    """Both ways of computing; the GPU's run on the CPU too, in float32."""
    rng = np.random.default_rng(44)
    array = mx.array(rng.standard_normal((2080, 64)).astype(np.float32))
    stored = Dense(array) if packing is None else packed(array, packing)
    dense = np.array(stored.piece(0, 2080), dtype=np.float64)
    matrix = Matrix(stored, mx.float32, widen)
    x = rng.standard_normal((3, 64)).astype(np.float32)
    p = rng.random((2080, 3)).astype(np.float32)
    assert relative_error(np.array(matrix.apply(mx.array(x))), x @ dense.T) <= 1e-5
    for start, stop in ((0, 2080), (1024, 2048), (2048, 2080)):
        found = matrix.apply_piece(mx.array(x), start, stop)
        assert relative_error(np.array(found), dense[start:stop] @ x.T) <= 1e-5
        found = matrix.mix_piece(mx.array(p[start:stop]), start, stop)
        assert relative_error(np.array(found), p[start:stop].T @ dense[start:stop]) <= 1e-5
    ids = np.array([2079, 0, 5, 5])
    assert relative_error(np.array(matrix.rows(mx.array(ids))), dense[ids]) <= 1e-6


def test_packed_weights_stay_packed_in_memory() -> None:
    source = memory_checkpoint(Oracle.build(45, **SHAPES))
    packings = dict.fromkeys(modules(source), Packing(32, 4, "affine"))
    held: list[int] = []
    for checkpoint in (source, quantize(source, packings)):
        before = mx.get_active_memory()
        pair_ = Pair(Oracle.build(45, **SHAPES), MlxBackend.from_checkpoint(checkpoint))
        held.append(mx.get_active_memory() - before)
        pair_.backend.close()
    # 4 bits and 64 bits of scale and bias for 32 weights: 6 bits a weight instead of 32.
    assert held[1] < 0.25 * held[0]
