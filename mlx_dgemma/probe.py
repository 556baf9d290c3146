"""What MLX would run on here, and which implementations that means: for `dgemma doctor`.

Not here: the choosing itself (`backend.py`, `experts.py`).
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mlx_dgemma import experts


def has_gpu() -> bool:
    """True where MLX's default device is a GPU."""
    return mx.default_device().type == mx.DeviceType.gpu


def choices(*, native: bool) -> dict[str, str]:
    """Part of the network -> what computes it, and why; `native` means MLX's own products."""
    own = "MLX's own, in the weights' dtype"
    widened = (
        "in float32, weights widened a piece at a time: MLX's CPU products of other dtypes "
        "run outside BLAS"
    )
    return {"products": own if native else widened, "experts": experts.reason_for(native=native)}


def probe() -> dict[str, Any]:
    """The device, its name and memory in bytes (None where unknown), and the choices made."""
    info = mx.device_info() if hasattr(mx, "device_info") else {}
    return {
        "device": str(mx.default_device()),
        "metal": mx.metal.is_available(),
        "name": str(info.get("device_name", "unknown")),
        "memory_bytes": info.get("max_recommended_working_set_size"),
        "choices": choices(native=has_gpu()),
    }
