"""For tests, ours and those of a third backend: a backend in NumPy that computes nothing real.

`FakeBackend` takes its logits from two functions, so that a test scripts exactly what a model
"thinks"; everything behind the logits is `reference.py`'s. Shipped, because whoever writes another
backend or decoder needs it too.

Not here: fixtures, checkpoints, anything of pytest's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from dgemma.backend import Backend, Denoise, Extend, Float32, Float64, Int32, Prefix, Statistics
from dgemma.config import FULL, SLIDING, LayerConfig, ModelConfig, Rope
from dgemma.reference import vocabulary_statistics

CausalLogits = Callable[[tuple[int, ...]], Float32]
"""All tokens so far -> logits [V] of the next one."""
CanvasLogits = Callable[[tuple[int, ...], Int32], Float32]
"""(prefix tokens, canvas [L]) -> logits [L, V]."""


def tiny_config(**changes: Any) -> ModelConfig:
    """A configuration small enough to think about; any field of `ModelConfig` can be changed."""
    rope = Rope(theta=1e4, rotated_pairs=2)
    sliding = LayerConfig(kind=SLIDING, head_dim=4, num_key_value_heads=1, rope=rope)
    full = LayerConfig(kind=FULL, head_dim=4, num_key_value_heads=1, rope=rope)
    fields: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_attention_heads": 2,
        "layers": (sliding, full),
        "num_experts": 2,
        "top_k_experts": 1,
        "moe_intermediate_size": 4,
        "sliding_window": 8,
        "canvas_length": 8,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "final_logit_softcapping": 30.0,
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_ids": (1,),
    }
    return ModelConfig(**(fields | changes))


class FakePrefix:
    """A prefix that is nothing but its tokens."""

    def __init__(self, tokens: Sequence[int], slack: int) -> None:
        self.tokens = list(tokens)
        self._slack = slack

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def earliest_rewind(self) -> int:
        return max(0, self.length - self._slack)

    @property
    def bytes(self) -> int:
        return 4 * self.length

    def rewind(self, length: int) -> None:
        if not self.earliest_rewind <= length <= self.length:
            raise ValueError(f"cannot rewind a prefix of {self.length} tokens to {length}")
        del self.tokens[length:]

    def fork(self) -> FakePrefix:
        return FakePrefix(self.tokens, self._slack)


class FakeBackend(Backend):
    """A backend whose logits come from functions; it records the work it was given.

    Without functions it is a small deterministic "model" whose two ways of reading agree often but
    not always, which is what hybrid decoding needs to be interesting.
    """

    name = "fake"

    def __init__(
        self,
        config: ModelConfig | None = None,
        *,
        causal: CausalLogits | None = None,
        canvas: CanvasLogits | None = None,
    ) -> None:
        self.config = config or tiny_config()
        self.causal = causal or self._default_causal
        self.canvas = canvas or self._default_canvas
        self.extends: list[int] = []  # tokens of each Extend
        self.denoises = 0
        self.batches: list[tuple[str, int]] = []  # (kind, rows) of each call

    def new_prefix(self) -> Prefix:
        return FakePrefix([], self.config.canvas_length)

    def extend(self, rows: Sequence[Extend]) -> list[Statistics | None]:
        self.batches.append(("extend", len(rows)))
        results: list[Statistics | None] = []
        for row in rows:
            prefix = cast(FakePrefix, row.prefix)
            start = prefix.length
            prefix.tokens += row.tokens.tolist()
            self.extends.append(len(row.tokens))
            if not len(row.read):
                results.append(None)
                continue
            seen = [tuple(prefix.tokens[: start + int(offset) + 1]) for offset in row.read]
            logits = np.stack([self.causal(tokens) for tokens in seen])
            uniforms = np.full(len(seen), 0.5) if row.uniforms is None else row.uniforms
            results.append(statistics_of(logits, row.temperature, uniforms, row.targets, row.top_k))
        return results

    def denoise(self, rows: Sequence[Denoise]) -> list[Statistics]:
        self.batches.append(("denoise", len(rows)))
        results: list[Statistics] = []
        for row in rows:
            self.denoises += 1
            tokens = tuple(cast(FakePrefix, row.prefix).tokens)
            logits = self.canvas(tokens, row.canvas)
            results.append(statistics_of(logits, row.temperature, row.uniforms, None, row.top_k))
        return results

    def _default_causal(self, tokens: tuple[int, ...]) -> Float32:
        """Logits that depend on the last two tokens, with one clear favourite."""
        rng = np.random.default_rng(abs(hash(tokens[-2:])))
        logits = rng.normal(size=self.config.vocab_size).astype(np.float32)
        logits[rng.integers(self.config.vocab_size)] += 6.0
        return logits

    def _default_canvas(self, prefix: tuple[int, ...], canvas: Int32) -> Float32:
        """Each position takes its left neighbour on the canvas at its word."""
        tokens = (*prefix, *canvas.tolist())
        start = len(prefix)
        return np.stack([self._default_causal(tokens[: start + i]) for i in range(len(canvas))])


def statistics_of(
    logits: Float32,
    temperature: float,
    uniforms: Float64,
    targets: Int32 | None = None,
    top_k: int = 0,
) -> Statistics:
    """The statistics of logits [R, V] by the NumPy reference (no softcap)."""
    temperatures = np.full(len(logits), temperature, dtype=np.float32)
    found = vocabulary_statistics(logits, temperatures, uniforms)
    with np.errstate(divide="ignore"):
        mass = np.exp(found.shaped - found.shaped.max(axis=-1, keepdims=True))
        logprobs = np.log(mass / mass.sum(axis=-1, keepdims=True))
    rows = np.arange(len(logits))
    order = np.argsort(-logprobs, axis=-1, kind="stable")[:, :top_k].astype(np.int32)
    return Statistics(
        argmax=found.argmax,
        candidate=found.candidate,
        entropy=found.entropy,
        argmax_logprob=found.argmax_logprob,
        candidate_logprob=found.candidate_logprob,
        target_logprob=None if targets is None else logprobs[rows, targets].astype(np.float32),
        top_tokens=order if top_k else None,
        top_logprobs=np.take_along_axis(logprobs, order, axis=-1) if top_k else None,
    )


def certain(tokens: Sequence[int], vocab_size: int, margin: float = 60.0) -> Float32:
    """Logits [L, V] that leave no doubt: `margin` at each token, 0 elsewhere."""
    logits = np.zeros((len(tokens), vocab_size), dtype=np.float32)
    logits[np.arange(len(tokens)), list(tokens)] = margin
    return logits


def assert_close(actual: Float32, expected: Float32, bound: float, what: str = "") -> None:
    """RMS(actual - expected) / RMS(expected) <= bound; NaN never passes."""
    a, e = np.asarray(actual, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    assert a.shape == e.shape, f"{what}: shape {a.shape}, expected {e.shape}"
    ratio = float(np.sqrt(np.mean((a - e) ** 2)) / np.sqrt(np.mean(e**2)))
    assert ratio <= bound, f"{what}: RMS ratio {ratio:.3g}, allowed {bound:g}"
