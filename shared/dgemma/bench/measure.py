"""Times of one backend: prefill, one denoising step, the host's share, whole replies.

A step is timed at the seam: a full canvas, the conditioning of the step before, and everything the
core wants back. Every figure is a list of repeats; nothing is averaged away here.

Not here: two programs side by side (`compare.py`), tables (`report.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from dgemma.backend import Backend, Denoise, Extend, Int32, Statistics
from dgemma.config import GenerationConfig, ModelConfig
from dgemma.decoders import decoder
from dgemma.noise import Noise
from dgemma.options import Options, plan
from dgemma.sampler import Mask, Stop
from dgemma.scheduler import Scheduler
from dgemma.testing import FakeBackend, tiny_config

_NOTHING = np.empty(0, dtype=np.int32)
_TEMPERATURE = 0.8


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measured quantity, repeat by repeat."""

    name: str
    unit: str
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.values)

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "unit": self.unit,
            "median": self.median,
            "min": min(self.values),
            "max": max(self.values),
            "repeats": len(self.values),
        }


@dataclass(frozen=True, kw_only=True)
class NeverStop:
    """A stop rule for fixed work: every canvas takes all its steps."""

    def start(self) -> Stop:
        def stop(statistics: Statistics, accepted: Mask) -> bool:
            return False

        return stop


def random_prompt(config: ModelConfig, length: int, seed: int) -> Int32:
    """Token ids [N]; they stand for work, not for text, so no end-to-end figure uses them."""
    rng = np.random.default_rng(seed)
    return rng.integers(min(32, config.vocab_size - 1), config.vocab_size, length).astype(np.int32)


def prefill(backend: Backend, length: int, repeats: int, seed: int) -> Figure:
    """Prompt tokens a second, encoded into an empty prefix, after one unmeasured run."""
    tokens = random_prompt(backend.config, length, seed)

    def run() -> None:
        prefix = backend.new_prefix()
        backend.extend([Extend(prefix=prefix, tokens=tokens, read=_NOTHING)])

    run()
    seconds = [_seconds(run) for _ in range(repeats)]
    return Figure(
        name=f"prefill of {length}", unit="tokens/s", values=tuple(length / s for s in seconds)
    )


def steps(backend: Backend, prefix_length: int, rows: int, repeats: int, seed: int) -> Figure:
    """Milliseconds of one denoising step of `rows` canvases, with conditioning, behind a prefix."""
    config = backend.config
    length = config.canvas_length
    tokens = random_prompt(config, prefix_length, seed)
    prefixes = [backend.new_prefix() for _ in range(rows)]
    backend.extend([Extend(prefix=prefix, tokens=tokens, read=_NOTHING) for prefix in prefixes])
    noises = [Noise(seed, vocab_size=config.vocab_size, row=row) for row in range(rows)]
    conditioning: list[Any] = [None] * rows

    def step(number: int) -> None:
        results = backend.denoise(
            [
                Denoise(
                    prefix=prefix,
                    canvas=noise.canvas(number, length),
                    conditioning=before,
                    temperature=_TEMPERATURE,
                    uniforms=noise.uniforms(number, 0, length),
                )
                for prefix, noise, before in zip(prefixes, noises, conditioning, strict=True)
            ]
        )
        conditioning[:] = [statistics.conditioning for statistics in results]

    step(0)
    step(1)
    values = [1e3 * _seconds(lambda number=number: step(number + 2)) for number in range(repeats)]
    name = f"step behind {prefix_length}" + (f", {rows} rows" if rows > 1 else "")
    return Figure(name=name, unit="ms", values=tuple(values))


def host(rows: int, repeats: int, canvas: int = 256, vocabulary: int = 262_144) -> Figure:
    """Milliseconds the core and the scheduler take for a step, over a backend that does nothing."""
    backend = _CannedBackend(canvas, vocabulary)
    scheduler = Scheduler(backend)
    for row in range(rows):
        ready = plan(
            np.arange(2, 10, dtype=np.int32),
            Options(seed=row, max_new_tokens=10_000_000),
            config=backend.config,
            generation=GenerationConfig(),
            end_tokens=frozenset(),
        )
        scheduler.add(decoder("diffusion")(ready.request, backend.new_prefix()))
    for _ in range(60):
        scheduler.step()
    values = [1e3 * _seconds(scheduler.step) for _ in range(repeats)]
    name = f"host of a step, {rows} row" + ("s" if rows > 1 else "")
    return Figure(name=name, unit="ms", values=tuple(values))


class _CannedBackend(FakeBackend):
    """Answers at once with statistics made beforehand; the argmax never repeats."""

    def __init__(self, canvas: int, vocabulary: int) -> None:
        super().__init__(
            tiny_config(
                canvas_length=canvas,
                vocab_size=vocabulary,
                max_position_embeddings=100_000_000,
                eos_token_ids=(),
            )
        )
        rng = np.random.default_rng(0)

        def tokens() -> Int32:
            return rng.integers(vocabulary, size=canvas).astype(np.int32)

        def entropy() -> np.ndarray[Any, np.dtype[np.float32]]:
            return rng.gamma(0.3, 1.0, canvas).astype(np.float32)

        self._canned = [
            Statistics(
                argmax=tokens(),
                candidate=tokens(),
                entropy=entropy(),
                argmax_logprob=-entropy(),
                candidate_logprob=-entropy(),
            )
            for _ in range(8)
        ]
        self._turn = 0

    def denoise(self, rows: Sequence[Denoise]) -> list[Statistics]:
        self._turn += 1
        return [self._canned[(self._turn + row) % 8] for row in range(len(rows))]


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
