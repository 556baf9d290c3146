"""What this machine is: goes into every record, because a figure without it says little.

Not here: a checkpoint's needs and the backends' state (`doctor.py`).
"""

from __future__ import annotations

import os
import platform
import resource
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from dgemma import __version__

_PACKAGES = ("mlx", "torch", "triton", "numpy", "mlx-vlm", "transformers")


def describe() -> dict[str, Any]:
    """Processor, cores, OS and versions."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "dgemma": __version__,
        "packages": {name: version for name in _PACKAGES if (version := package_version(name))},
    }


def peak_resident_bytes() -> int:
    """The most physical memory this process has held so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def package_version(package: str) -> str | None:
    """The version of an installed package, of dgemma also where it is run from its sources."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return __version__ if package == "dgemma" else None
