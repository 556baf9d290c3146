"""Which way noise goes: corrupting a clean canvas (forward) and cooling while denoising (reverse).

This is the one place that knows which way steps count. In this project a step is counted 0 upward;
the reference counts n = N .. 1, "steps remaining".

    forward   q(x_t | x_0):  each token stays with probability 1 - t, else is uniform over V
    reverse   T(step) = t_min + (t_max - t_min) * (N - step) / N      0.8 first, never quite t_min

Not here: who accepts what (`sampler.py`), where random numbers come from (`noise.py`).
Sources: arXiv:2608.00146 (uniform-state block diffusion); transformers 5.24,
`LinearTemperatureScheduleLogitsProcessor`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dgemma.backend import Float64, Int32
from dgemma.errors import ConfigError

GREEDY_TEMPERATURE = 1e-4
"""What a backend is handed for temperature 0: shaped logits stay finite, all mass on the argmax."""


@dataclass(frozen=True, kw_only=True)
class NoiseSchedule:
    """The forward process: a clean canvas corrupted at time t in [0, 1] (0 clean, 1 noise)."""

    vocab_size: int

    def __post_init__(self) -> None:
        if self.vocab_size < 1:
            raise ConfigError(f"vocab_size is {self.vocab_size}, but must be at least 1")

    def keep_probability(self, time: float) -> float:
        """The probability that a token is left as it is (it may also be redrawn unchanged)."""
        _check_time(time)
        return 1.0 - time

    def posterior_clean(self, time: float) -> float:
        """The probability that a token equal to a given clean token was not replaced.

        By Bayes with a uniform prior: (1 - t) / (1 - t + t / V).
        """
        keep = self.keep_probability(time)
        return keep / (keep + time / self.vocab_size) if keep else 0.0

    def corrupt(
        self, clean: Int32, time: float, uniforms: Float64, noise: Int32
    ) -> tuple[Int32, NDArray[np.bool_]]:
        """The noisy canvas and the mask of replaced positions.

        `clean`, `uniforms` in [0, 1) and `noise` (uniform token ids) have one shape, any [..., L].
        A position is replaced when its uniform is below `time`.
        """
        _check_time(time)
        replaced = uniforms < time
        return np.where(replaced, noise, clean).astype(np.int32), replaced


@dataclass(frozen=True, kw_only=True)
class TemperatureSchedule:
    """The reverse process's temperature, a function of the step (0 upward).

    Computed in float32 in the reference's order of operations, so that both shape logits alike.
    Unlike the reference, `t_max == t_min` is allowed, and `t_max == 0` means greedy decoding.
    """

    t_max: float
    t_min: float
    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"max_denoising_steps is {self.steps}, but must be at least 1")
        if not 0 <= self.t_min <= self.t_max:
            raise ConfigError(
                f"temperatures are {self.t_max} to {self.t_min}, but must not rise nor be negative"
            )

    @property
    def greedy(self) -> bool:
        """All steps at temperature 0: the argmax takes the place of the candidate."""
        return self.t_max == 0

    def __call__(self, step: int) -> float:
        """The temperature of a step, above 0. Raises `IndexError` outside 0 .. steps - 1."""
        if not 0 <= step < self.steps:
            raise IndexError(f"step {step} of {self.steps}")
        share = np.float32(self.steps - step) / np.float32(self.steps)
        cooled = np.float32(self.t_min) + np.float32(self.t_max - self.t_min) * share
        return max(float(cooled), GREEDY_TEMPERATURE)


def _check_time(time: float) -> None:
    if not 0 <= time <= 1:
        raise ConfigError(f"time is {time}, but must lie between 0 (clean) and 1 (noise)")
