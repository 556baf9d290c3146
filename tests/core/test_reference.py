"""The NumPy reference against torch: what every backend's kernels are later held to."""

import numpy as np
import pytest
import torch

from dgemma.reference import (
    CDF_TILE,
    inverse_cdf,
    soft_embedding,
    softcap,
    vocabulary_statistics,
)

SIZES = [1, 2, 63, 1023, 1024, 1025, 2048, 5000]


def logits_of(rng, rows: int, vocabulary: int) -> np.ndarray:
    scale = rng.choice([0.1, 3.0, 30.0], size=(rows, 1))
    return (rng.normal(size=(rows, vocabulary)) * scale).astype(np.float32)


@pytest.mark.parametrize("vocabulary", SIZES)
def test_statistics_equal_torchs(vocabulary):
    rng = np.random.default_rng(vocabulary)
    logits = logits_of(rng, 9, vocabulary)
    temperatures = rng.uniform(0.3, 1.2, size=9).astype(np.float32)
    found = vocabulary_statistics(logits, temperatures, rng.random(9), cap=30.0)
    z = 30.0 * torch.tanh(torch.from_numpy(logits) / 30.0) / torch.from_numpy(temperatures)[:, None]
    distribution = torch.distributions.Categorical(logits=z.double())
    np.testing.assert_allclose(found.entropy, distribution.entropy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(found.argmax, z.argmax(-1))
    logprobs = z.double().log_softmax(-1)
    rows = torch.arange(9)
    for tokens, values in (
        (found.argmax, found.argmax_logprob),
        (found.candidate, found.candidate_logprob),
    ):
        expected = logprobs[rows, torch.from_numpy(tokens).long()]
        np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-5)


def test_softcap_is_the_references():
    x = np.linspace(-300, 300, 1001).astype(np.float32)
    expected = torch.tanh(torch.from_numpy(x) / 30.0) * 30.0
    np.testing.assert_allclose(softcap(x, 30.0), expected, rtol=1e-6)


def test_masked_tokens_have_no_probability_and_no_nan():
    logits = np.full((2, 1500), -np.inf, dtype=np.float32)
    logits[0, [3, 1200]] = [1.0, 1.0]
    logits[1, 1499] = -5.0
    found = vocabulary_statistics(logits, np.ones(2, np.float32), np.array([0.75, 0.0]))
    np.testing.assert_allclose(found.entropy, [np.log(2), 0.0], atol=1e-6)
    assert found.candidate.tolist() == [1200, 1499]
    assert found.argmax.tolist() == [3, 1499]


def test_nan_logits_show_in_the_entropy():
    logits = np.zeros((2, 10), dtype=np.float32)
    logits[1, 4] = np.nan
    with np.errstate(invalid="ignore"):
        found = vocabulary_statistics(logits, np.ones(2, np.float32), np.full(2, 0.5))
    assert np.isfinite(found.entropy).tolist() == [True, False]


@pytest.mark.parametrize("vocabulary", SIZES)
def test_the_inverse_cdf_inverts_the_cdf(vocabulary):
    """Exact on integer masses, where no rounding can blur the definition."""
    rng = np.random.default_rng(vocabulary)
    mass = rng.integers(0, 4, size=(50, vocabulary)).astype(np.float32)
    mass[:, rng.integers(vocabulary)] += 1  # no row is empty
    uniforms = rng.random(50)
    cumulative = mass.astype(np.float64).cumsum(-1)
    expected = [
        int(np.flatnonzero(row > u * row[-1])[0])
        for row, u in zip(cumulative, uniforms, strict=True)
    ]
    assert inverse_cdf(mass, uniforms).tolist() == expected


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2.0**-53])
def test_a_token_without_mass_is_never_drawn(uniform):
    for position in (0, 1, CDF_TILE - 1, CDF_TILE, 3 * CDF_TILE + 7):
        mass = np.zeros((1, 4 * CDF_TILE), dtype=np.float32)
        mass[0, position] = 1e-30
        assert inverse_cdf(mass, np.array([uniform])).tolist() == [position]


def test_draws_follow_the_distribution():
    rng = np.random.default_rng(0)
    mass = rng.gamma(0.5, size=3000).astype(np.float32)
    count = 20_000
    uniforms = (np.arange(count) + 0.5) / count  # a grid: the histogram is nearly deterministic
    drawn = np.concatenate(
        [inverse_cdf(np.tile(mass, (200, 1)), part) for part in np.split(uniforms, 100)]
    )
    histogram = np.bincount(drawn, minlength=3000) / count
    assert np.abs(histogram - mass / mass.sum()).max() < 1.5 / count


def test_soft_embedding_is_the_expected_embedding():
    rng = np.random.default_rng(2)
    shaped = logits_of(rng, 5, 257)
    table = rng.normal(size=(257, 16)).astype(np.float32)
    expected = torch.from_numpy(shaped).softmax(-1) @ torch.from_numpy(table) * 4.0
    np.testing.assert_allclose(soft_embedding(shaped, table), expected, rtol=1e-4, atol=1e-5)
