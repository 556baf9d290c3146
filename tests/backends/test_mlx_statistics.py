"""Statistics of the MLX backend against the reference operations, on the same logits."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_support import Pair, assert_same_statistics, fresh_rng, pair, step
from numpy.typing import NDArray
from oracle import CANVAS, Oracle, memory_checkpoint, relative_error

from dgemma import reference
from dgemma.backend import Extend, Statistics
from mlx_dgemma.backend import MlxBackend
from mlx_dgemma.statistics import Head

VOCABULARIES = [600, 1024, 2500, 3072]


def shaped_logits(both: Pair, work: Any, temperature: float) -> NDArray[np.float32]:
    return (both.backend.logits(work) / np.float32(temperature)).astype(np.float32)


def assert_matches_reference(
    found: Statistics, shaped: NDArray[np.float32], uniforms: NDArray[np.float64]
) -> None:
    """Equal integers away from ties, close numbers, a candidate at the right quantile."""
    wanted = reference.vocabulary_statistics(shaped, np.ones(len(shaped), np.float32), uniforms)
    assert np.array_equal(found.argmax, wanted.argmax)
    np.testing.assert_allclose(found.entropy, wanted.entropy, atol=2e-5)
    np.testing.assert_allclose(found.argmax_logprob, wanted.argmax_logprob, atol=2e-5)
    probabilities = np.exp(shaped.astype(np.float64) - shaped.max(-1, keepdims=True))
    probabilities /= probabilities.sum(-1, keepdims=True)
    below = np.cumsum(probabilities, axis=-1)
    rows = np.arange(len(shaped))
    own = probabilities[rows, found.candidate]
    upper = below[rows, found.candidate]
    # Float32 sums over a vocabulary: the quantile may be off by a few of their roundings.
    assert (upper - own - 1e-5 <= uniforms).all()
    assert (uniforms <= upper + 1e-5).all()
    np.testing.assert_allclose(found.candidate_logprob, np.log(own), atol=2e-5)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_statistics_of_a_canvas_match_the_reference(vocabulary: int) -> None:
    """Vocabularies below, at and above a tile of the inverse CDF, and no multiple of it."""
    both, rng = pair(30, vocab_size=vocabulary), fresh_rng()
    prefix, canvas = both.prefix(both.tokens(rng, 5)), both.tokens(rng)
    temperature, uniforms = float(rng.uniform(0.3, 1.5)), rng.random(CANVAS)
    work = step(prefix, canvas, temperature=temperature, uniforms=uniforms)
    (found,) = both.backend.denoise([work])
    assert_matches_reference(found, shaped_logits(both, work, temperature), uniforms)
    assert found.target_logprob is None
    assert found.top_tokens is None


def test_statistics_of_read_positions_match_the_reference() -> None:
    both, rng = pair(30, vocab_size=2500), fresh_rng()
    tokens = both.tokens(rng, 23)
    read = np.array([0, 3, 4, 17, 22], np.int32)
    targets, uniforms = both.tokens(rng, 5), rng.random(5)
    everything = both.backend.logits(
        Extend(prefix=both.backend.new_prefix(), tokens=tokens, read=np.arange(23, dtype=np.int32))
    )
    (found,) = both.backend.extend(
        [
            Extend(
                prefix=both.backend.new_prefix(),
                tokens=tokens,
                read=read,
                temperature=0.7,
                uniforms=uniforms,
                targets=targets,
                top_k=7,
            )
        ]
    )
    assert found is not None
    shaped = (everything[read] / np.float32(0.7)).astype(np.float32)
    assert_matches_reference(found, shaped, uniforms)
    logprobs = shaped - np.log(np.exp(shaped.astype(np.float64)).sum(-1, keepdims=True))
    assert found.target_logprob is not None
    np.testing.assert_allclose(found.target_logprob, logprobs[np.arange(5), targets], atol=3e-5)
    assert found.top_tokens is not None
    assert found.top_logprobs is not None
    assert found.top_tokens.shape == found.top_logprobs.shape == (5, 7)
    best = np.argsort(-logprobs, axis=-1, kind="stable")[:, :7]
    np.testing.assert_allclose(
        found.top_logprobs, np.take_along_axis(logprobs, best, axis=-1), atol=3e-5
    )
    assert np.array_equal(found.top_tokens[:, 0], found.argmax)
    assert found.conditioning is None


def test_extreme_uniforms_give_tokens_that_have_probability() -> None:
    both, rng = pair(30, vocab_size=2500), fresh_rng()
    prefix, canvas = both.prefix(both.tokens(rng, 5)), both.tokens(rng, 4)
    uniforms = np.array([0.0, np.nextafter(1.0, 0.0), 1e-300, 1 - 1e-12])
    work = step(prefix, canvas, temperature=0.02, uniforms=uniforms)
    (found,) = both.backend.denoise([work])
    assert np.isfinite(found.candidate_logprob).all()
    assert_matches_reference(found, shaped_logits(both, work, 0.02), uniforms)


class GivenLogits(Head):
    """The head of a model whose logits are these [R, V]; the rest is the head's own."""

    def __init__(self, both: Pair, logits: NDArray[np.float32]) -> None:
        super().__init__(both.backend._model)
        self.given = logits

    def _raw(self, hidden: mx.array, start: int, stop: int) -> mx.array:
        return mx.array(np.ascontiguousarray(self.given[:, start:stop].T))

    def _capped(self, raw: mx.array) -> mx.array:
        return raw


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_ties_go_to_the_lowest_token(vocabulary: int) -> None:
    """Hundreds of equal logits within tiles of 1,024 tokens and across them; no product that may
    round equal rows differently comes between."""
    both, rng = pair(31, vocab_size=vocabulary), fresh_rng()
    logits = rng.integers(0, 4, (30, vocabulary)).astype(np.float32)
    logits[:10, : vocabulary - 3] = 0
    prefix, uniforms = both.backend.new_prefix(), rng.random(30)
    work = step(prefix, both.tokens(rng, 30), temperature=1.0, uniforms=uniforms, top_k=5)
    hidden = np.zeros((30, both.backend.config.hidden_size), np.float32)
    head = GivenLogits(both, logits)
    (found,) = both.backend.run(lambda: head.statistics(mx.array(hidden), [work], [30]))
    wanted = np.argsort(-logits, axis=-1, kind="stable")[:, :5]
    assert found.top_tokens is not None
    assert np.array_equal(found.top_tokens, wanted)
    assert np.array_equal(found.argmax, wanted[:, 0])
    assert_matches_reference(found, logits, uniforms)


@pytest.mark.parametrize("rows", [1, 5])
def test_tiles_of_few_rows_equal_one_tile(rows: int) -> None:
    """B55: the same ids whatever the tile."""
    both, rng = pair(32, vocab_size=2500), fresh_rng()
    tiled = MlxBackend.from_checkpoint(
        memory_checkpoint(both.oracle), logits_tile_bytes=4 * 2500 * rows
    )
    tokens = [both.tokens(rng, count) for count in (3, 21)]
    canvases = [both.tokens(rng, count) for count in (CANVAS, 7)]
    results: list[list[Statistics]] = []
    uniforms = rng.random(CANVAS)
    for backend in (both.backend, tiled):
        own = Pair(both.oracle, backend)
        works = [
            step(own.prefix(prefix), canvas, uniforms=uniforms[: len(canvas)], top_k=3)
            for prefix, canvas in zip(tokens, canvases, strict=True)
        ]
        results.append(backend.denoise(works))
    for one, other in zip(*results, strict=True):
        assert_same_statistics(other, one, 1e-5)
        assert np.array_equal(one.top_tokens, other.top_tokens)  # type: ignore[arg-type]
        assert relative_error(array(tiled, other), array(both.backend, one)) <= 1e-5


def test_logits_alive_are_bounded_by_the_tile() -> None:
    """B55: four canvases over a vocabulary of 65,536 have 17 MB of float32 logits."""
    oracle = Oracle.build(
        33, vocab_size=65_536, num_hidden_layers=1, layer_types=["full_attention"]
    )
    rng = fresh_rng()
    canvases = [rng.integers(0, 65_536, CANVAS).astype(np.int32) for _ in range(4)]
    needed: list[int] = []
    for tile_bytes in (1 << 20, 64 << 20):
        backend = MlxBackend.from_checkpoint(
            memory_checkpoint(oracle), logits_tile_bytes=tile_bytes
        )
        works = [step(backend.new_prefix(), canvas) for canvas in canvases]
        held = mx.get_active_memory()
        backend.reset_peak_memory()
        backend.denoise(works)
        peak = backend.peak_memory_bytes()
        assert peak is not None
        needed.append(peak - held)
        backend.close()
    logits = 4 * CANVAS * 65_536 * 4
    # The tile's shaped logits, and passing values of a piece of the vocabulary beside them.
    assert needed[0] < 5 << 20
    assert logits < needed[1] < 3 * logits


def array(backend: MlxBackend, statistics: Statistics) -> NDArray[np.float32]:
    """The soft embedding that is this backend's conditioning."""
    return backend.run(lambda: np.array(statistics.conditioning.astype(mx.float32)))


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 5e-3)])
def test_conditioning_is_the_reference_soft_embedding(dtype: str, bound: float) -> None:
    both, rng = pair(34, dtype, vocab_size=2500), fresh_rng()
    prefix, canvas = both.prefix(both.tokens(rng, 9)), both.tokens(rng)
    for temperature in (0.8, 0.4):
        work = step(prefix, canvas, temperature=temperature)
        (found,) = both.backend.denoise([work])
        wanted = both.oracle.soft_embedding(shaped_logits(both, work, temperature))
        assert relative_error(array(both.backend, found), wanted) <= bound


def test_conditioning_is_left_out_where_it_is_not_wanted() -> None:
    both, rng = pair(34, vocab_size=2500), fresh_rng()
    prefix = both.prefix(both.tokens(rng, 9))
    canvases = [both.tokens(rng, count) for count in (5, 6, 7)]
    wanted = (True, False, True)
    found = both.backend.denoise(
        [
            step(prefix, canvas, want_conditioning=want)
            for canvas, want in zip(canvases, wanted, strict=True)
        ]
    )
    assert found[1].conditioning is None
    for index in (0, 2):
        (alone,) = both.backend.denoise([step(prefix, canvases[index])])
        error = relative_error(array(both.backend, found[index]), array(both.backend, alone))
        assert error <= 1e-5
