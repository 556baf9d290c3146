"""Flags that several commands share, and how they become a loaded model and `Options`.

Only what was given is passed on: defaults are the checkpoint's, the backend's or `options.py`'s.

Not here: what the numbers mean (`options.py`, `sampler.py`), how errors are shown (`cli.py`).
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dgemma.errors import BackendError

if TYPE_CHECKING:
    from dgemma.config import GenerationConfig
    from dgemma.decoders import Verification
    from dgemma.model import Model
    from dgemma.options import Options
    from dgemma.sampler import Acceptance, StopRule

BACKENDS = ("mlx", "cuda")
_FRAMEWORKS = {"mlx": ("mlx",), "cuda": ("torch", "triton")}

_PLAIN_OPTIONS = (
    "max_new_tokens",
    "max_denoising_steps",
    "seed",
    "mode",
    "temperature",
    "temperature_start",
    "temperature_end",
    "entropy_bound",
    "stability_threshold",
    "confidence_threshold",
    "stop",
)
"""Options that are spelled and passed as their flags are."""
_DENOISING_FLAGS = (
    "--max-denoising-steps",
    "--temperature-start",
    "--temperature-end",
    "--sampler",
    "--entropy-bound",
    "--confidence",
    "--stop-rule",
    "--stability-threshold",
    "--confidence-threshold",
)
_LOAD_SETTINGS = ("model", "revision", "dtype", "prefill_chunk", "logits_tile_bytes")


class UsageError(Exception):
    """Flags or arguments that do not go together; exit status 2."""


def add_model_flags(parser: argparse.ArgumentParser, backend: str | None) -> None:
    """Flags that say what to load and where; `backend` fixes the backend and drops its flag."""
    group = parser.add_argument_group("model")
    add = group.add_argument
    add("--model", metavar="M", help="a folder or a Hub id; default: the bundled checkpoint")
    add("--revision", metavar="R", help="branch, tag or commit of a Hub id")
    if backend is None:
        add(
            "--backend",
            choices=BACKENDS,
            help="default: mlx on a Mac or where MLX is installed, else cuda",
        )
    else:
        parser.set_defaults(backend=backend)
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of weights that are not quantized; default: as stored",
    )
    add("--prefill-chunk", type=at_least(1), metavar="N", help="prompt tokens encoded at a time")
    add(
        "--logits-tile-bytes",
        type=at_least(1),
        metavar="N",
        help="bytes of logits that may exist at once",
    )
    add("--strict", action="store_true", help="refuse a checkpoint with unknown tensors or keys")


def add_decoding_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that say how to decode."""
    add = parser.add_argument_group("decoding").add_argument
    add("--max-new-tokens", type=at_least(1), metavar="N", help="longest reply, exact")
    add("--seed", type=int, metavar="S", help="repeats a reply; default: drawn, and reported")
    add(
        "--mode",
        choices=("diffusion", "autoregressive", "hybrid"),
        help="hybrid: diffusion drafts, the causal pass verifies; default: diffusion",
    )
    add(
        "--temperature",
        type=number(0),
        metavar="T",
        help="both ends of the schedule, or of the causal draws; 0: the most probable token",
    )
    add("--stop", action="append", metavar="TEXT", help="end the reply before TEXT; repeatable")
    add("--thinking", action="store_true", help="let the model think before it answers")

    add = parser.add_argument_group("denoising").add_argument
    add("--max-denoising-steps", type=at_least(1), metavar="N", help="steps of a canvas, at most")
    add("--temperature-start", type=number(0), metavar="T", help="temperature of the first step")
    add("--temperature-end", type=number(0), metavar="T", help="what the temperature falls towards")
    add(
        "--sampler",
        choices=("entropy-bound", "confidence-threshold"),
        help="which positions a step accepts; default: entropy-bound",
    )
    add("--entropy-bound", type=number(0), metavar="H", help="nats the accepted may share")
    add("--confidence", type=probability, metavar="P", help="of the confidence-threshold sampler")
    add(
        "--stop-rule",
        choices=("stable-and-confident", "entropy", "plateau", "all-accepted"),
        help="when a canvas is done; default: stable-and-confident",
    )
    add("--stability-threshold", type=at_least(0), metavar="N", help="steps the draft must repeat")
    add("--confidence-threshold", type=number(0), metavar="H", help="mean entropy to stop below")

    add = parser.add_argument_group("hybrid").add_argument
    add("--verify", choices=("exact", "typical"), help="how a draft is verified; default: exact")
    add(
        "--typical-threshold",
        type=probability,
        metavar="P",
        help="probability that makes a drafted token typical",
    )


def check_flags(args: argparse.Namespace) -> None:
    """Raises `UsageError` for flags that do nothing without another."""
    if args.mode == "autoregressive":
        for flag in _DENOISING_FLAGS:
            if getattr(args, flag.removeprefix("--").replace("-", "_")) is not None:
                raise UsageError(f"{flag} does nothing with --mode autoregressive")
    if args.stability_threshold is not None and args.stop_rule not in (
        None,
        "stable-and-confident",
    ):
        raise UsageError("--stability-threshold belongs to --stop-rule stable-and-confident")
    if args.confidence is not None and args.sampler != "confidence-threshold":
        raise UsageError("--confidence needs --sampler confidence-threshold")
    if args.entropy_bound is not None and args.sampler == "confidence-threshold":
        raise UsageError("--entropy-bound belongs to --sampler entropy-bound")
    if args.verify is not None and args.mode != "hybrid":
        raise UsageError("--verify needs --mode hybrid")
    if args.typical_threshold is not None and args.verify != "typical":
        raise UsageError("--typical-threshold needs --verify typical")


def load_model(args: argparse.Namespace) -> Model:
    """Loads the model on the backend asked for.

    Raises `BackendError` where the backend's framework is missing or broken, and `UsageError`.
    """
    if args.revision is not None and args.model is None:
        raise UsageError("--revision needs --model")
    backend = args.backend or default_backend()
    settings: dict[str, Any] = {
        name: getattr(args, name) for name in _LOAD_SETTINGS if getattr(args, name) is not None
    }
    if args.strict:
        settings["strict"] = True
    try:
        return importlib.import_module(f"{backend}_dgemma").load(**settings)
    except ImportError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in (*_FRAMEWORKS[backend], f"{backend}_dgemma"):
            raise
        raise BackendError(
            f"the {backend} backend cannot be imported ({error}); "
            f"install it with: pip install 'dgemma[{backend}]'"
        ) from error


def default_backend() -> str:
    """The backend to use where none was asked for; imports nothing."""
    found = sys.platform == "darwin" or importlib.util.find_spec("mlx") is not None
    return "mlx" if found else "cuda"


def options_of(args: argparse.Namespace, generation: GenerationConfig) -> Options:
    """The options that the flags ask for; `generation` is the checkpoint's."""
    given: dict[str, Any] = {
        name: getattr(args, name) for name in _PLAIN_OPTIONS if getattr(args, name) is not None
    }
    strategies: dict[str, Any] = {
        "acceptance": _acceptance(args),
        "stop_rule": _stop_rule(args, generation),
        "verification": _verification(args),
    }
    given |= {name: strategy for name, strategy in strategies.items() if strategy is not None}
    if args.thinking:
        given["thinking"] = True
    options: Options = {}
    options.update(given)  # pyright: ignore[reportCallIssue, reportArgumentType]
    return options


def _acceptance(args: argparse.Namespace) -> Acceptance | None:
    from dgemma.sampler import ConfidenceThreshold

    if args.sampler != "confidence-threshold":
        return None
    if args.confidence is None:
        return ConfidenceThreshold()
    return ConfidenceThreshold(threshold=args.confidence)


def _stop_rule(args: argparse.Namespace, generation: GenerationConfig) -> StopRule | None:
    from dgemma.sampler import AllAccepted, EntropyBelow, Plateau, StableAndConfident

    if args.stop_rule is None:
        return None
    if args.stop_rule == "all-accepted":
        return AllAccepted()
    if args.stop_rule == "plateau":
        return Plateau()
    settings = generation.override(
        stability_threshold=args.stability_threshold,
        confidence_threshold=args.confidence_threshold,
    )
    if args.stop_rule == "entropy":
        return EntropyBelow(threshold=settings.confidence_threshold)
    return StableAndConfident(
        stability_threshold=settings.stability_threshold,
        confidence_threshold=settings.confidence_threshold,
    )


def _verification(args: argparse.Namespace) -> Verification | None:
    if args.verify is None:
        return None
    from dgemma.decoders.hybrid import Exact, Typical

    if args.verify == "exact":
        return Exact()
    return (
        Typical() if args.typical_threshold is None else Typical(threshold=args.typical_threshold)
    )


def at_least(minimum: int) -> Callable[[str], int]:
    """An argparse type: an integer of at least `minimum`."""

    def integer(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{text} is not at least {minimum}")
        return value

    return integer


def number(minimum: float) -> Callable[[str], float]:
    """An argparse type: a finite number of at least `minimum`."""

    def number(text: str) -> float:
        value = float(text)
        if not (math.isfinite(value) and value >= minimum):
            raise argparse.ArgumentTypeError(f"{text} is not a number of at least {minimum:g}")
        return value

    return number


def probability(text: str) -> float:
    """An argparse type: a probability above 0."""
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a probability above 0")
    return value
