"""DiffusionGemma on MLX: `from mlx_dgemma import load`.

Importing this package imports no MLX; `load` does, and says what to install where that fails.

Not here: the command line (`python -m mlx_dgemma.generate`).
"""

from __future__ import annotations

from typing import Any

__all__ = ["load"]


def load(
    model: str | None = None,
    *,
    dtype: str | None = None,
    prefill_chunk: int = 512,
    logits_tile_bytes: int = 64 << 20,
    strict: bool = False,
) -> Any:
    raise NotImplementedError
