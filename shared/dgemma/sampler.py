"""One step's decisions: which candidates to keep, what the next canvas is, when to stop.

    statistics ---- acceptance ---> mask ----+
        |                                    v
        +--- candidate, where accepted --> next canvas <-- fresh noise, elsewhere
        |
        +--- stop rule: the canvas is done, its output is the argmax of this step

The mask is rebuilt at every step; nothing is frozen, and what was accepted before can be renoised.
Strategies are frozen, check themselves and are called; one that remembers (a stop rule) is started
anew for each canvas, so that no history leaks from one canvas into the next.

Not here: the loop around this (`decoders/diffusion.py`), random numbers (`noise.py`).
Sources: transformers 5.24, `EntropyBoundSampler` and `StableAndConfidentStoppingCriteria`; the
entropy bound is arXiv:2505.24857's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dgemma.backend import Int32, Statistics
from dgemma.errors import ConfigError

Mask = NDArray[np.bool_]
Stop = Callable[[Statistics, Mask], bool]
"""Called once a step with its statistics and acceptance mask; True ends the canvas."""


class Acceptance(Protocol):
    """Decides which positions of a step are kept, and with which token."""

    def __call__(self, statistics: Statistics) -> Mask:
        """The mask of accepted positions, [L]; at least one is True."""
        ...

    def tokens(self, statistics: Statistics) -> Int32:
        """The token each position would be kept with, [L]."""
        ...


class StopRule(Protocol):
    """Decides when a canvas is done before the last step."""

    def start(self) -> Stop:
        """A fresh stop for one canvas."""
        ...


@dataclass(frozen=True, kw_only=True)
class EntropyBound:
    """Accepts the most certain positions while their joint mutual information stays bounded.

    Positions are taken by ascending entropy H while `cumsum(H) - H <= bound` (nats), so at least
    one is taken. Kept is the candidate. Of equal entropies the lower position goes first; the
    reference leaves that open. Sums run in float64 and round to float32 at each position, as
    torch's CPU cumsum does.
    """

    bound: float = 0.1

    def __post_init__(self) -> None:
        if not self.bound > 0:
            raise ConfigError(f"entropy_bound is {self.bound}, but must be above 0 (nats)")

    def __call__(self, statistics: Statistics) -> Mask:
        entropy = statistics.entropy
        order = entropy.argsort(kind="stable")
        ascending = entropy[order]
        cumulative = np.add.accumulate(ascending, dtype=np.float64).astype(np.float32)
        accepted = np.empty(len(entropy), dtype=np.bool_)
        accepted[order] = cumulative - ascending <= np.float32(self.bound)
        return accepted

    def tokens(self, statistics: Statistics) -> Int32:
        return statistics.candidate


@dataclass(frozen=True, kw_only=True)
class ConfidenceThreshold:
    """Accepts every position whose most probable token has at least probability `threshold`.

    Kept is the argmax; the most confident position is always accepted. Pair it with `AllAccepted`.
    """

    threshold: float = 0.9

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            raise ConfigError(f"confidence is {self.threshold}, but must be a probability above 0")

    def __call__(self, statistics: Statistics) -> Mask:
        logprob = statistics.argmax_logprob
        accepted = logprob >= np.float32(np.log(self.threshold))
        accepted[logprob.argmax()] = True
        return accepted

    def tokens(self, statistics: Statistics) -> Int32:
        return statistics.argmax


@dataclass(frozen=True, kw_only=True)
class Greedy:
    """Another acceptance with the argmax as the token kept: what temperature 0 means."""

    acceptance: Acceptance

    def __call__(self, statistics: Statistics) -> Mask:
        return self.acceptance(statistics)

    def tokens(self, statistics: Statistics) -> Int32:
        return statistics.argmax


def next_canvas(accepted: Mask, tokens: Int32, noise: Int32) -> Int32:
    """The canvas of the next step: kept tokens where accepted, fresh noise elsewhere. All [L]."""
    return np.where(accepted, tokens, noise)


def mean_entropy(statistics: Statistics) -> float:
    """The mean entropy of a canvas, nats, summed in float32 (`ndarray.mean` takes 4 us longer)."""
    return float(np.add.reduce(statistics.entropy)) / len(statistics.entropy)


@dataclass(frozen=True, kw_only=True)
class StableAndConfident:
    """Stops when the argmax canvas repeats and the mean entropy is low: the reference's rule.

    The argmax must equal that of each of the last `stability_threshold` steps, and mean(H) be below
    `confidence_threshold` (nats). With a threshold of 1 the earliest stop is the second step.
    """

    stability_threshold: int = 1
    confidence_threshold: float = 0.005

    def __post_init__(self) -> None:
        if self.stability_threshold < 0:
            raise ConfigError(
                f"stability_threshold is {self.stability_threshold}, but must be at least 0 (steps)"
            )
        _check_entropy(self.confidence_threshold, "confidence_threshold")

    def start(self) -> Stop:
        history: deque[Int32] = deque(maxlen=self.stability_threshold)

        def stop(statistics: Statistics, accepted: Mask) -> bool:
            argmax = statistics.argmax
            stable = len(history) == self.stability_threshold and all(
                (argmax == earlier).all() for earlier in history
            )
            history.append(argmax)
            return stable and mean_entropy(statistics) < self.confidence_threshold

        return stop


@dataclass(frozen=True, kw_only=True)
class EntropyBelow:
    """Stops as soon as the mean entropy falls below `threshold` (nats), stable or not."""

    threshold: float = 0.005

    def __post_init__(self) -> None:
        _check_entropy(self.threshold, "threshold of the entropy stop rule")

    def start(self) -> Stop:
        return lambda statistics, accepted: mean_entropy(statistics) < self.threshold


@dataclass(frozen=True, kw_only=True)
class Plateau:
    """Stops when the mean entropy has not fallen by `improvement` (nats) for `patience` steps.

    For canvases that will not converge: more steps cost time and change little.
    """

    patience: int = 4
    improvement: float = 0.001

    def __post_init__(self) -> None:
        if self.patience < 1:
            raise ConfigError(f"patience is {self.patience}, but must be at least 1 (steps)")
        _check_entropy(self.improvement, "improvement of the plateau stop rule")

    def start(self) -> Stop:
        lowest = np.inf
        waited = 0

        def stop(statistics: Statistics, accepted: Mask) -> bool:
            nonlocal lowest, waited
            mean = mean_entropy(statistics)
            if mean <= lowest - self.improvement:
                lowest, waited = mean, 0
            else:
                waited += 1
            return waited >= self.patience

        return stop


@dataclass(frozen=True, kw_only=True)
class AllAccepted:
    """Stops when every position is accepted: the confidence-threshold sampler's end."""

    def start(self) -> Stop:
        return lambda statistics, accepted: bool(accepted.all())


def _check_entropy(value: float, name: str) -> None:
    if not value > 0:
        raise ConfigError(f"{name} is {value}, but must be above 0 (nats)")
