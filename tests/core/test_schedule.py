"""Schedules: the reference's temperatures, and noise that corrupts as often as it should."""

import numpy as np
import pytest
import torch
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    LinearTemperatureScheduleLogitsProcessor,
)

from dgemma.errors import ConfigError
from dgemma.schedule import NoiseSchedule, TemperatureSchedule


@pytest.mark.parametrize(
    ("t_max", "t_min", "steps"), [(0.8, 0.4, 48), (1.0, 0.05, 7), (3.0, 0.0, 1)]
)
def test_shaped_logits_equal_the_references_to_the_last_bit(t_max, t_min, steps):
    """B43: step n of N remaining is shaped by t_min + (t_max - t_min) * n / N."""
    process = LinearTemperatureScheduleLogitsProcessor(t_min, t_max, steps)
    schedule = TemperatureSchedule(t_max=t_max, t_min=t_min, steps=steps)
    logits = np.random.default_rng(0).normal(size=200).astype(np.float32) * 20
    for step in range(steps):
        remaining = torch.tensor(steps - step, dtype=torch.int32)
        expected = process(None, torch.from_numpy(logits), cur_step=remaining).numpy()
        np.testing.assert_array_equal(logits / np.float32(schedule(step)), expected)


def test_the_release_cools_from_0_8_to_just_above_0_4():
    schedule = TemperatureSchedule(t_max=0.8, t_min=0.4, steps=48)
    temperatures = [schedule(step) for step in range(48)]
    assert temperatures[0] == pytest.approx(0.8)
    assert temperatures[1] == pytest.approx(0.791667, abs=1e-6)
    assert temperatures[-1] == pytest.approx(0.408333, abs=1e-6)
    assert temperatures == sorted(temperatures, reverse=True)


def test_equal_ends_and_zero_are_allowed_and_stay_above_zero():
    """B58: t_max == t_min is fine, and temperature 0 is greedy without a division by zero."""
    assert TemperatureSchedule(t_max=0.5, t_min=0.5, steps=3)(2) == 0.5
    greedy = TemperatureSchedule(t_max=0, t_min=0, steps=3)
    assert greedy.greedy
    assert greedy(0) > 0
    assert not TemperatureSchedule(t_max=0.1, t_min=0, steps=3).greedy


@pytest.mark.parametrize(
    "bad", [{"t_max": 0.3}, {"t_min": -0.1}, {"steps": 0}, {"t_max": float("nan")}]
)
def test_impossible_temperatures_are_refused(bad):
    with pytest.raises(ConfigError):
        TemperatureSchedule(**{"t_max": 0.8, "t_min": 0.4, "steps": 4, **bad})


def test_steps_outside_the_schedule_are_refused():
    schedule = TemperatureSchedule(t_max=0.8, t_min=0.4, steps=4)
    for step in (-1, 4):
        with pytest.raises(IndexError):
            schedule(step)


@pytest.mark.parametrize("time", [0.0, 0.3, 1.0])
def test_a_token_is_replaced_with_probability_t_by_a_uniform_one(time):
    rng = np.random.default_rng(1)
    vocabulary = 8
    clean = rng.integers(vocabulary, size=(20, 1000)).astype(np.int32)
    noise = rng.integers(vocabulary, size=clean.shape).astype(np.int32)
    noisy, replaced = NoiseSchedule(vocab_size=vocabulary).corrupt(
        clean, time, rng.random(clean.shape), noise
    )
    assert abs(replaced.mean() - time) < 0.01
    np.testing.assert_array_equal(noisy[~replaced], clean[~replaced])
    np.testing.assert_array_equal(noisy[replaced], noise[replaced])
    # A replaced token may by chance be redrawn: P(unchanged) = 1 - t + t / V.
    assert abs((noisy == clean).mean() - (1 - time + time / vocabulary)) < 0.01
    if time < 1:
        kept_given_equal = (~replaced)[noisy == clean].mean()
        posterior = NoiseSchedule(vocab_size=vocabulary).posterior_clean(time)
        assert abs(kept_given_equal - posterior) < 0.01


def test_times_outside_zero_to_one_are_refused():
    for time in (-0.1, 1.1, float("nan")):
        with pytest.raises(ConfigError):
            NoiseSchedule(vocab_size=4).keep_probability(time)
