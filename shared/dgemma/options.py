"""What a caller may ask of one reply, and how that becomes a checked `Request`.

Defaults come from the checkpoint's generation_config; `None` means "not given" everywhere.

Not here: the command line's flags (`commands/flags.py`), what the numbers mean (`sampler.py`,
`schedule.py`).
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TypedDict, cast, get_args

import numpy as np

from dgemma.backend import Int32
from dgemma.config import GenerationConfig, ModelConfig
from dgemma.decoders import Mode, Request, Verification
from dgemma.errors import ConfigError
from dgemma.json_reader import shown, to_number
from dgemma.layout import BlockLayout
from dgemma.noise import Noise
from dgemma.sampler import (
    Acceptance,
    AllAccepted,
    ConfidenceThreshold,
    EntropyBound,
    Greedy,
    StableAndConfident,
    StopRule,
)
from dgemma.schedule import TemperatureSchedule

DEFAULT_MAX_NEW_TOKENS = 2048
"""Our own limit, cut to the context. The release's generation_config says 256, a single canvas."""

HYBRID_STEPS = 4
"""Denoising steps of a hybrid draft, at most: the causal pass mends what a longer one would.

Bundled checkpoint, 8 held-out prompts a task, tokens a pass with at most 2 / 4 / 6 / 10 steps:
sudoku4 3.64 3.40 3.40 3.40, json 3.16 3.45 3.26 3.23, infill 1.80 1.62 1.57 1.57, edit 1.35 1.16
1.00 0.93, math 0.90 0.76 0.74 0.74 (2026-12-01). The released model, untried, takes about 12 steps.
"""

_LARGEST_NUMBER = 1e9
SEED_BITS = 48
"""Of a drawn seed: few enough to survive JSON readers that keep numbers as doubles."""


class Options(TypedDict, total=False):
    """Keyword arguments of `Model.generate` and its kin."""

    max_new_tokens: int | None
    seed: int | None
    """Any integer, taken modulo 2**64. None: drawn from the OS and reported in the reply."""
    row: int | None
    """Tells apart several replies to one request with one seed."""
    mode: Mode | None
    stop: str | Sequence[str] | None
    """The text ends where one of these strings would begin."""
    raw: bool | None
    """Use the prompt as it is, without the chat template."""
    thinking: bool | None
    max_denoising_steps: int | None
    temperature: float | None
    """Diffusion: both ends of the schedule. Otherwise: of the causal draws. 0: the argmax."""
    temperature_start: float | None
    temperature_end: float | None
    entropy_bound: float | None
    stability_threshold: int | None
    confidence_threshold: float | None
    acceptance: Acceptance | None
    """Replaces the entropy bound, e.g. `ConfidenceThreshold(threshold=0.9)`."""
    stop_rule: StopRule | None
    """Replaces the stable-and-confident rule, e.g. `Plateau()`."""
    verification: Verification | None
    """Of hybrid decoding: `Exact()` by default, or `Typical(threshold=0.3)`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """A request that is ready to run, and what the reply reports of it."""

    request: Request
    mode: Mode
    seed: int


def plan(
    prompt: Int32,
    options: Options,
    *,
    config: ModelConfig,
    generation: GenerationConfig,
    end_tokens: frozenset[int],
) -> Plan:
    """Resolves and checks the options of one reply to `prompt` [N].

    Raises `ConfigError` naming the option, `PromptError` or `ContextLengthError`.
    """
    check_options(options)
    mode = options.get("mode") or "diffusion"
    temperature = _number(options.get("temperature"), "temperature")
    causal = mode != "diffusion"
    steps = options.get("max_denoising_steps")
    settings = generation.override(
        max_denoising_steps=steps
        if steps is not None
        else (min(HYBRID_STEPS, generation.max_denoising_steps) if mode == "hybrid" else None),
        entropy_bound=options.get("entropy_bound"),
        stability_threshold=options.get("stability_threshold"),
        confidence_threshold=options.get("confidence_threshold"),
        **_temperatures(options, None if causal else temperature, generation),
    )
    temperatures = TemperatureSchedule(
        t_max=settings.t_max, t_min=settings.t_min, steps=settings.max_denoising_steps
    )
    acceptance = options.get("acceptance") or EntropyBound(bound=settings.entropy_bound)
    seed = resolve_seed(options)
    layout = BlockLayout(
        prompt_length=len(prompt),
        canvas_length=config.canvas_length,
        context_length=config.max_position_embeddings,
        max_new_tokens=_max_new_tokens(options),
        end_tokens=end_tokens,
        block_length=1 if causal else 0,
    )
    request = Request(
        prompt=prompt,
        layout=layout,
        noise=Noise(seed, vocab_size=config.vocab_size, row=_row(options)),
        temperatures=temperatures,
        acceptance=Greedy(acceptance=acceptance) if temperatures.greedy else acceptance,
        stop_rule=options.get("stop_rule") or _stop_rule(acceptance, settings),
        causal_temperature=temperature or 0.0,
        verification=options.get("verification"),
    )
    return Plan(request=request, mode=mode, seed=seed)


def check_options(options: Options) -> None:
    """Raises `ConfigError` for an option nobody knows, or one of the wrong kind."""
    unknown = sorted(set(options) - set(Options.__annotations__))
    if unknown:
        known = ", ".join(sorted(Options.__annotations__))
        raise ConfigError(f"unknown option {unknown[0]!r}; known are {known}")
    mode = cast("object", options.get("mode"))
    # An array is compared with each mode element by element.
    if mode is not None and not (isinstance(mode, str) and mode in get_args(Mode)):
        raise ConfigError(f"mode is {shown(mode)}; known are {', '.join(get_args(Mode))}")
    for name in ("raw", "thinking"):
        value: object = options.get(name)
        if value is not None and not isinstance(value, (bool, np.bool_)):
            raise ConfigError(f"{name} is {shown(value)}, but must be true or false")
    _row(options)
    for name, methods, example in (
        ("acceptance", ("__call__", "tokens"), "ConfidenceThreshold(threshold=0.9)"),
        ("stop_rule", ("start",), "Plateau()"),
        ("verification", ("__call__",), "Exact()"),
    ):
        value = options.get(name)
        # `Exact` instead of `Exact()` has the methods too, and would fail in the middle of a reply.
        right = all(callable(getattr(value, method, None)) for method in methods)
        if value is not None and (isinstance(value, type) or not right):
            raise ConfigError(f"{name} is {shown(value)}, but must be one like {example}")


def _temperatures(
    options: Options, both: float | None, generation: GenerationConfig
) -> dict[str, float | None]:
    """Start and end of the schedule; a start below the checkpoint's end pulls the end along."""
    start, end = options.get("temperature_start"), options.get("temperature_end")
    start, end = both if start is None else start, both if end is None else end
    start, end = _number(start, "temperature_start"), _number(end, "temperature_end")
    if start is not None and end is None:
        end = min(start, generation.t_min)
    first = generation.t_max if start is None else start
    if end is not None and end > first:
        raise ConfigError(
            f"temperature_end is {end}, but must not exceed temperature_start ({first})"
        )
    return {"t_max": start, "t_min": end}


def resolve_seed(options: Options) -> int:
    """The seed asked for; at temperature 0 a fixed one, so that greedy runs repeat; else a draw."""
    seed = options.get("seed")
    if seed is not None:
        return _integer(seed, "seed")
    start = options.get("temperature_start")
    hottest = options.get("temperature") if start is None else start
    return 0 if hottest == 0 else secrets.randbits(SEED_BITS)


def _stop_rule(acceptance: Acceptance, settings: GenerationConfig) -> StopRule:
    if isinstance(acceptance, ConfidenceThreshold):
        return AllAccepted()
    return StableAndConfident(
        stability_threshold=settings.stability_threshold,
        confidence_threshold=settings.confidence_threshold,
    )


def _max_new_tokens(options: Options) -> int:
    value = options.get("max_new_tokens")
    if value is None:
        return DEFAULT_MAX_NEW_TOKENS
    return _integer(value, "max_new_tokens")


def _row(options: Options) -> int:
    row = options.get("row")
    return 0 if row is None else _integer(row, "row")


def _integer(value: object, name: str) -> int:
    """NumPy's integers are integers too; bools are not."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ConfigError(f"{name} is {shown(value)}, but must be an integer")
    return int(value)


def _number(value: object, name: str) -> float | None:
    if value is None:
        return None
    number = to_number(value, name)
    if not 0 <= number < _LARGEST_NUMBER:
        raise ConfigError(f"{name} is {shown(value)}, but must be a number of at least 0")
    return number
