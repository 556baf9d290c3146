"""What the tests of the MLX backend share: one oracle with its backend, and inputs."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from oracle import CANVAS, Oracle, memory_checkpoint

from dgemma.backend import Denoise, Extend, Statistics
from mlx_dgemma.backend import MlxBackend
from mlx_dgemma.cache import MlxPrefix

NOBODY = np.array([], np.int32)


@dataclass(frozen=True, eq=False)
class Pair:
    """A reference model and our backend over the same weights."""

    oracle: Oracle
    backend: MlxBackend

    @property
    def vocabulary(self) -> int:
        return self.backend.config.vocab_size

    def tokens(self, rng: np.random.Generator, count: int = CANVAS) -> NDArray[np.int32]:
        return rng.integers(0, self.vocabulary, count).astype(np.int32)

    def prefix(self, tokens: NDArray[np.int32]) -> MlxPrefix:
        """A prefix that holds tokens, nothing read."""
        prefix = self.backend.new_prefix()
        if len(tokens):
            self.backend.extend([Extend(prefix=prefix, tokens=tokens, read=NOBODY)])
        return prefix


@cache
def pair(seed: int = 0, dtype: str = "float32", chunk: int = 512, **text: Any) -> Pair:
    """Built once and shared; tests must not change it."""
    oracle = Oracle.build(seed, dtype, **text)
    backend = MlxBackend.from_checkpoint(memory_checkpoint(oracle), prefill_chunk=chunk)
    return Pair(oracle, backend)


def read_all(prefix: MlxPrefix, tokens: NDArray[np.int32]) -> Extend:
    return Extend(prefix=prefix, tokens=tokens, read=np.arange(len(tokens), dtype=np.int32))


def step(prefix: MlxPrefix, canvas: NDArray[np.int32], **changes: Any) -> Denoise:
    """A denoising step with unremarkable settings."""
    defaults: dict[str, Any] = {
        "conditioning": None,
        "temperature": 0.8,
        "uniforms": np.full(len(canvas), 0.5),
    }
    return Denoise(prefix=prefix, canvas=canvas, **{**defaults, **changes})


def fresh_rng() -> np.random.Generator:
    """Random inputs of a new seed, printed for whoever has to repeat a failure."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def assert_same_statistics(found: Statistics, wanted: Statistics, tolerance: float = 1e-4) -> None:
    """Equal tokens, and numbers (nats) within a tolerance."""
    assert np.array_equal(found.argmax, wanted.argmax)
    assert np.array_equal(found.candidate, wanted.candidate)
    for name in ("entropy", "argmax_logprob", "candidate_logprob"):
        np.testing.assert_allclose(
            getattr(found, name), getattr(wanted, name), atol=tolerance, rtol=0
        )
