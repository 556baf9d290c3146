"""Decoders: coroutines over one request.

A decoder is a generator. It yields work (`Extend`, `Denoise`) and is sent the statistics; it yields
events (`Draft`, `Commit`, `Finish`) and is sent None. It knows no backend, no batch and no text.

    diffusion        denoise a canvas, commit its argmax, encode it, go on
    autoregressive   one token a pass, by the same weights read causally
    hybrid           diffusion drafts, the causal pass verifies

Not here: who runs them (`scheduler.py`), what a user calls (`model.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Literal

from dgemma.backend import Float32, Int32, Prefix, Statistics, Work
from dgemma.layout import BlockLayout, FinishReason
from dgemma.noise import Noise
from dgemma.sampler import Acceptance, Mask, StopRule
from dgemma.schedule import TemperatureSchedule

Mode = Literal["diffusion", "autoregressive", "hybrid"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Draft:
    """A canvas after one step: the argmax, how certain it is, and what was accepted."""

    block: int
    step: int
    steps: int  # at most
    tokens: Int32  # [L], the argmax canvas
    entropy: Float32  # [L], nats
    accepted: Mask  # [L]
    temperature: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Commit:
    """Tokens that are final, and what they cost."""

    block: int
    tokens: Int32  # content: no end token
    end_token: int | None  # the end token met behind them
    steps: int  # denoising steps spent on them
    passes: int  # forward passes spent on them; the prompt's counts where it yields a token
    mean_entropy: float | None = None  # of the last step, nats; None without a canvas


@dataclass(frozen=True, kw_only=True)
class Finish:
    """The last event of a request."""

    reason: FinishReason


Event = Draft | Commit | Finish
Decoding = Generator[Work | Event, Statistics | None, None]
"""A running decoder. Events are answered with None, work with its statistics."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """Everything a decoder needs to know, resolved and checked (see `options.py`)."""

    prompt: Int32  # [N], N >= 1
    layout: BlockLayout
    noise: Noise
    temperatures: TemperatureSchedule
    acceptance: Acceptance
    stop_rule: StopRule
    causal_temperature: float = 0.0  # of autoregressive and hybrid decoding; 0: the argmax
    verification: Verification | None = None  # of hybrid decoding


Verification = Callable[[Int32, Int32, Float32], Mask]
"""(drafted tokens, causal tokens, log-probabilities of the drafted) -> agreed; all [n]."""

Decoder = Callable[[Request, Prefix], Decoding]


def decoder(mode: Mode) -> Decoder:
    """The decoder of a mode. Raises `KeyError` for another word."""
    from dgemma.decoders.autoregressive import autoregressive
    from dgemma.decoders.diffusion import diffusion
    from dgemma.decoders.hybrid import hybrid

    return {"diffusion": diffusion, "autoregressive": autoregressive, "hybrid": hybrid}[mode]
