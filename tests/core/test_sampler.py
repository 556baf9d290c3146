"""Acceptance, renoising and stopping: exactly the reference's, given equal statistics."""

import numpy as np
import pytest
import torch
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    EntropyBoundSampler,
    EntropyBoundSamplerConfig,
    StableAndConfidentStoppingCriteria,
)

from dgemma.backend import Statistics
from dgemma.errors import ConfigError
from dgemma.sampler import (
    AllAccepted,
    ConfidenceThreshold,
    EntropyBelow,
    EntropyBound,
    Greedy,
    Plateau,
    StableAndConfident,
    next_canvas,
)


def statistics(entropy, argmax=None, candidate=None, logprob=None) -> Statistics:
    entropy = np.asarray(entropy, dtype=np.float32)
    tokens = np.arange(len(entropy), dtype=np.int32)
    return Statistics(
        argmax=tokens if argmax is None else np.asarray(argmax, np.int32),
        candidate=tokens + 100 if candidate is None else np.asarray(candidate, np.int32),
        entropy=entropy,
        argmax_logprob=-entropy if logprob is None else np.asarray(logprob, np.float32),
        candidate_logprob=-entropy,
    )


def reference_entropy(logits: torch.Tensor) -> np.ndarray:
    return torch.distributions.Categorical(logits=logits).entropy()[0].numpy()


@pytest.mark.parametrize("bound", [1e-6, 0.1, 1, 50.0])
@pytest.mark.parametrize("length", [1, 2, 63, 255, 257])
def test_acceptance_and_renoising_equal_the_references(bound, length):
    rng = np.random.default_rng(length)
    scale = rng.gamma(1.0, 6.0, size=(1, length, 1))
    logits = torch.from_numpy((rng.normal(size=(1, length, 37)) * scale).astype(np.float32))
    reference = EntropyBoundSampler(EntropyBoundSamplerConfig(float(bound)), length, 37, 48)
    current = torch.from_numpy(rng.integers(37, size=(1, length)))
    candidates = torch.from_numpy(rng.integers(37, size=(1, length)))
    fresh = torch.from_numpy(rng.integers(37, size=(1, length)))
    reference.initialize_canvas = lambda batch_size, device: fresh
    accepted = reference.accept_canvas(current, candidates, logits, 3)
    expected = reference.renoise_canvas(accepted, 3)[0].numpy()

    mine = EntropyBound(bound=bound)
    stats = statistics(reference_entropy(logits), candidate=candidates[0].numpy())
    mask = mine(stats)
    np.testing.assert_array_equal(mask, reference.accepted_token_mask[0].numpy())
    canvas = next_canvas(mask, mine.tokens(stats), fresh[0].numpy().astype(np.int32))
    np.testing.assert_array_equal(canvas, expected)


@pytest.mark.parametrize(
    ("entropy", "count"),
    [
        ([0.0] * 32, 32),
        ([6.2] * 32, 1),
        ([0.049] * 4 + [6.2] * 28, 3),
        ([9.0], 1),
    ],
    ids=["certain", "uniform", "four at 0.049", "one position"],
)
def test_how_many_are_accepted(entropy, count):
    """B44, counts checked against the reference: at least one, and the bound excludes its own H."""
    assert EntropyBound(bound=0.1)(statistics(entropy)).sum() == count


def test_of_equal_entropies_the_lower_position_is_accepted():
    mask = EntropyBound(bound=0.1)(statistics([5.0, 2.0, 5.0, 2.0]))
    assert mask.tolist() == [False, True, False, False]


def test_kept_is_the_candidate_and_noise_goes_elsewhere():
    """B44: never the argmax, and nothing of the old canvas survives."""
    sampler = EntropyBound(bound=0.1)
    stats = statistics([0.2, 3.0, 0.3], candidate=[11, 12, 13])
    canvas = next_canvas(sampler(stats), sampler.tokens(stats), np.array([21, 22, 23], np.int32))
    assert canvas.tolist() == [11, 22, 23]


def test_greedy_keeps_the_argmax_under_the_same_mask():
    stats = statistics([0.0, 3.0], argmax=[1, 2], candidate=[11, 12])
    inner = EntropyBound(bound=0.1)
    greedy = Greedy(acceptance=inner)
    assert greedy(stats).tolist() == inner(stats).tolist()
    assert greedy.tokens(stats).tolist() == [1, 2]


def test_confidence_threshold_accepts_by_probability_and_always_one():
    sampler = ConfidenceThreshold(threshold=0.9)
    logprob = np.log([0.95, 0.5, 0.91, 0.89])
    assert sampler(statistics(np.ones(4), logprob=logprob)).tolist() == [True, False, True, False]
    hopeless = np.log([0.2, 0.4, 0.3])
    assert sampler(statistics(np.ones(3), logprob=hopeless)).tolist() == [False, True, False]


@pytest.mark.parametrize("stability", [0, 1, 2, 3])
def test_stable_and_confident_stops_when_the_reference_does(stability):
    rng = np.random.default_rng(stability)
    outcomes = set()
    for _ in range(40):
        reference = StableAndConfidentStoppingCriteria(stability, 0.05)
        stop = StableAndConfident(stability_threshold=stability, confidence_threshold=0.05).start()
        for _ in range(8):
            argmax = rng.integers(2, size=2)
            logits = np.zeros((1, 2, 5), dtype=np.float32)
            logits[0, np.arange(2), argmax] = rng.choice([3.0, 30.0])
            tensor = torch.from_numpy(logits)
            expected = bool(reference(torch.from_numpy(argmax[None]), tensor)[0])
            stats = statistics(reference_entropy(tensor), argmax=argmax)
            assert stop(stats, np.ones(2, bool)) == expected
            outcomes.add(expected)
    assert outcomes == {True, False}


def test_a_stop_rule_starts_anew_for_each_canvas():
    rule = StableAndConfident()
    certain = statistics([0.0, 0.0])
    first = rule.start()
    assert not first(certain, np.ones(2, bool))
    assert first(certain, np.ones(2, bool))
    assert not rule.start()(certain, np.ones(2, bool))


def test_the_other_stop_rules():
    mask = np.ones(2, bool)
    below = EntropyBelow(threshold=0.1).start()
    assert not below(statistics([0.1, 0.2]), mask)
    assert below(statistics([0.1, 0.05]), mask)
    plateau = Plateau(patience=2, improvement=0.1).start()
    means = [3.0, 2.0, 1.95, 1.5, 1.45, 1.41]
    assert [plateau(statistics([m, m]), mask) for m in means] == [False] * 5 + [True]
    everyone = AllAccepted().start()
    assert not everyone(statistics([1.0, 1.0]), np.array([True, False]))
    assert everyone(statistics([1.0, 1.0]), mask)


@pytest.mark.parametrize(
    "build",
    [
        lambda: EntropyBound(bound=0),
        lambda: EntropyBound(bound=float("nan")),
        lambda: ConfidenceThreshold(threshold=0),
        lambda: ConfidenceThreshold(threshold=1.5),
        lambda: StableAndConfident(stability_threshold=-1),
        lambda: StableAndConfident(confidence_threshold=0),
        lambda: EntropyBelow(threshold=-1),
        lambda: Plateau(patience=0),
    ],
)
def test_impossible_settings_are_refused(build):
    with pytest.raises(ConfigError):
        build()
