"""THE SEAM: what a backend is handed, and what it hands back.

A backend is a deterministic function of its arguments. It owns the weights and the prefixes (keys
and values), and nothing else: no random generator, no schedule, no stop rule, no text. Logits never
cross the seam (256 x 262144 float32 are 268 MB); a few kilobytes of `Statistics` do.

    core                                         backend
    Extend(prefix, tokens, read, ...)   ------>  causal pass; writes the prefix
                                        <------  Statistics of the positions in `read`, or None
    Denoise(prefix, canvas, ...)        ------>  bidirectional pass; reads the prefix, never writes
                                        <------  Statistics of every canvas position

Shapes, here and in every comment of the project:

    B rows of a batch      L canvas length      P prefix length      N tokens of an Extend
    R positions read       V vocabulary         D hidden             k of top-k
    H query heads          K key/value heads    d head dimension     E experts

Words: a canvas is what is being denoised, a step one pass over it (counted 0 upward), a prefix what
is already encoded, a candidate a draw, a draft the argmax; shaped logits are logits / temperature.
Entropies and log-probabilities are in nats.

Not here: what the operations compute (`reference.py`), who calls them (`scheduler.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dgemma.config import ModelConfig

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

Conditioning = Any
"""Feedback of a prediction into the next step: whatever the backend likes, opaque to the core."""


class Prefix(Protocol):
    """Tokens already encoded, with their keys and values in every layer."""

    @property
    def length(self) -> int:
        """Tokens encoded so far (P); the next token's position."""
        ...

    @property
    def earliest_rewind(self) -> int:
        """The shortest length `rewind` can still reach; at most `length - canvas_length` or 0.

        Sliding layers forget what no later token can see, so a prefix does not go back for ever.
        """
        ...

    @property
    def bytes(self) -> int:
        """Memory the keys and values occupy."""
        ...

    def rewind(self, length: int) -> None:
        """Forgets the tokens from position `length` on.

        Raises `ValueError` when `length` is below `earliest_rewind` or above the current length.
        """
        ...

    def fork(self) -> Prefix:
        """An independent prefix with the same content; neither sees the other's later changes."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Extend:
    """Encodes tokens causally behind a prefix: the prompt, a finished canvas, one token, a draft.

    `read` lists offsets into `tokens`, ascending, whose next-token statistics are wanted; the
    statistics at offset i are about the token at i + 1. `uniforms` has one number in [0, 1) for
    each position read; `targets` one token id whose log-probability is wanted as well.
    """

    prefix: Prefix
    tokens: Int32  # [N], N >= 1
    read: Int32  # [R], may be empty
    temperature: float = 1.0
    uniforms: Float64 | None = None  # [R]; None: 0.5 everywhere, the candidate is of no interest
    targets: Int32 | None = None  # [R]
    top_k: int = 0
    label: str = ""  # names this work in error messages


@dataclass(frozen=True, kw_only=True, eq=False)
class Denoise:
    """One bidirectional pass over a canvas behind a prefix.

    The canvas positions continue the prefix. `conditioning` is the one returned by the step
    before, or None at the first step of a canvas (an exact zero signal, not zero logits).
    """

    prefix: Prefix
    canvas: Int32  # [L], L >= 1, need not be the model's canvas_length
    conditioning: Conditioning | None
    temperature: float  # above 0
    uniforms: Float64  # [L], in [0, 1)
    want_conditioning: bool = True  # False at a step known to be the last: saves a [L, V] x [V, D]
    top_k: int = 0
    label: str = ""  # names this work in error messages


Work = Extend | Denoise


@dataclass(frozen=True, kw_only=True, eq=False)
class Statistics:
    """What is known of each position's distribution softmax(logits / temperature).

    Defined by `reference.vocabulary_statistics`; ties go to the lowest token id.
    """

    argmax: Int32  # [R]
    candidate: Int32  # [R], the inverse CDF at the uniform that was handed over
    entropy: Float32  # [R], nats; NaN where a logit, before its softcap, is not finite
    argmax_logprob: Float32  # [R]
    candidate_logprob: Float32  # [R]
    target_logprob: Float32 | None = None  # [R]
    top_tokens: Int32 | None = None  # [R, k], most probable first
    top_logprobs: Float32 | None = None  # [R, k]
    conditioning: Conditioning | None = None  # of a Denoise that wanted it


class Backend(ABC):
    """A machine that runs the network. Rows of one call may have different prefixes and lengths.

    Calls may come from any thread; a backend sees to its own serialisation.
    """

    config: ModelConfig
    name: str  # "mlx", "cuda", "fake"

    @abstractmethod
    def new_prefix(self) -> Prefix:
        """An empty prefix."""

    @abstractmethod
    def extend(self, rows: Sequence[Extend]) -> list[Statistics | None]:
        """Runs the causal pass; one result a row, None where nothing was read."""

    @abstractmethod
    def denoise(self, rows: Sequence[Denoise]) -> list[Statistics]:
        """Runs the bidirectional pass; one result a row. Prefixes are left untouched."""

    def diagnose(self, work: Work) -> str:
        """Where NaN or infinity first appears when `work` is run, in words; "" if unknown.

        Called after non-finite statistics, before the error is raised; may be slow.
        """
        return ""

    def left_out(self) -> Mapping[str, int]:
        """Rows (tokens) of work not done since loading because nothing depends on it, by kind.

        Kinds: `last_layer_rows` (an encoded token nobody reads needs keys and values only),
        `head_rows`, `signal_rows` (an exact zero conditioning), `soft_embedding_rows`.
        """
        return {}

    def peak_memory_bytes(self) -> int | None:
        """Highest memory in use since the last `reset_peak_memory`; None where unknown."""
        return None

    def reset_peak_memory(self) -> None:  # noqa: B027 (a do-nothing default, not forgotten)
        """Starts a new measurement of `peak_memory_bytes`."""

    def close(self) -> None:  # noqa: B027
        """Frees threads and device memory. The backend must not be used afterwards."""
