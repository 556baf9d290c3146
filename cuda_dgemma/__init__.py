"""The CUDA backend of dgemma: PyTorch and Triton on an NVIDIA GPU. It is not built yet."""

from __future__ import annotations

from typing import Any, NoReturn

from dgemma.errors import BackendError

_NOT_BUILT = "the CUDA backend is not built yet; use the MLX backend (--backend mlx)"


def load(model: str | None = None, **settings: Any) -> NoReturn:
    """Raises `BackendError`: there is nothing here to load with yet."""
    raise BackendError(_NOT_BUILT)


def probe() -> NoReturn:
    """Raises `BackendError`, as `load` does."""
    raise BackendError(_NOT_BUILT)
