"""DiffusionGemma on MLX: `from mlx_dgemma import load`.

Importing this package imports no MLX; `load` does, and says what to install where that fails.

Not here: the command line (`python -m mlx_dgemma.generate`).
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dgemma.errors import BackendError

if TYPE_CHECKING:
    from dgemma.model import Model

__all__ = ["load", "probe"]


def load(
    model: str | Path | None = None,
    *,
    revision: str | None = None,
    dtype: str | None = None,
    prefill_chunk: int = 512,
    logits_tile_bytes: int = 64 << 20,
    strict: bool = False,
) -> Model:
    """Loads a checkpoint for MLX: a folder, a Hub id, or None for the bundled one.

    `revision` is a branch, tag or commit of a Hub id;
    `dtype` ("float32", "bfloat16", "float16") converts dense weights, None keeps them;
    `prefill_chunk` is in tokens; `logits_tile_bytes` bounds the float32 logits that exist at once;
    `strict` refuses tensors the model does not know. Raises `CheckpointError`, `ConfigError`, and
    `BackendError` where MLX is missing or broken.
    """
    # MLX first: whoever lacks it should hear so before anything is downloaded.
    check_mlx()
    from dgemma.checkpoint import open_checkpoint
    from dgemma.hub import resolve_model
    from dgemma.model import Model
    from mlx_dgemma.backend import MlxBackend

    checkpoint = open_checkpoint(resolve_model(model, revision=revision), strict=strict)
    backend = MlxBackend.from_checkpoint(
        checkpoint,
        dtype=dtype,
        prefill_chunk=prefill_chunk,
        logits_tile_bytes=logits_tile_bytes,
    )
    return Model.from_checkpoint(checkpoint, backend, name="" if model is None else str(model))


def probe() -> dict[str, Any]:
    """What MLX would run on here, and how, for `dgemma doctor`. Raises what `load` raises."""
    check_mlx()
    from mlx_dgemma.probe import probe

    return probe()


def check_mlx() -> None:
    """Raises `BackendError` with the command that helps where MLX cannot be imported."""
    try:
        importlib.import_module("mlx.core")
    except ImportError as error:
        # On Linux the plain `mlx` wheel lacks its library; the extra brings the right one.
        extra = "mlx" if sys.platform in ("darwin", "linux") else None
        fix = f'run: pip install "dgemma[{extra}]"' if extra else "MLX runs on macOS and Linux only"
        reason = str(error).splitlines()[0]
        raise BackendError(f"MLX cannot be imported ({reason}); {fix}") from error
