"""What this machine is: versions, memory, and which frameworks and backends import.

Frameworks are tried in a process of their own, so that a broken installation shows as one line
and cannot take the caller down (libraries that abort instead of raising, B107).

Not here: checkpoints and the report (`doctor.py`).
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from typing import Any, cast

PACKAGES = (
    "dgemma",
    "numpy",
    "mlx",
    "torch",
    "triton",
    "tokenizers",
    "jinja2",
    "huggingface_hub",
    "transformers",
)

_PROBE_TIMEOUT_S = 60.0

BACKENDS = {"mlx": "mlx_dgemma", "cuda": "cuda_dgemma"}
"""Name -> package; each has a `probe()` that says what it would run on, or raises."""


def versions() -> dict[str, str | None]:
    """Python, the system, and every package of interest; None where one is not installed."""
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    if found["dgemma"] is None:  # run from a source tree
        from dgemma import __version__

        found["dgemma"] = f"{__version__} (not installed)"
    return found


def backends() -> dict[str, dict[str, Any]]:
    """Name -> {"usable", "reason" where it is not, else what its `probe` says} of every backend."""
    return {name: _backend(package) for name, package in BACKENDS.items()}


def total_memory_bytes() -> int | None:
    """Physical memory; None where the system does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return _sysctl("hw.memsize")


def available_memory_bytes() -> int | None:
    """Memory that a new process could use now; None where the system does not tell (macOS)."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return None


def _backend(package: str) -> dict[str, Any]:
    result = _probe(f"import json, {package}; print(json.dumps({package}.probe()))")
    return {"usable": "reason" not in result, **result}


def _probe(code: str) -> dict[str, Any]:
    """Runs code in a fresh interpreter: the JSON object it prints, or {"reason": one line}."""
    paths = os.pathsep.join(path for path in sys.path if path)
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROBE_TIMEOUT_S,
            env={**os.environ, "PYTHONPATH": paths},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"reason": f"did not finish importing within {_PROBE_TIMEOUT_S:.0f} s"}
    except OSError as error:
        return {"reason": f"no second Python process can be started ({error})"}
    lines = done.stderr.strip().splitlines()
    if done.returncode < 0:
        return {"reason": f"the process was killed by signal {-done.returncode}"}
    if done.returncode != 0:
        # "dgemma.errors.BackendError: why" -> "why"
        last = re.sub(r"^[\w.]+Error: ", "", lines[-1]) if lines else ""
        return {"reason": last[:300] or f"exit code {done.returncode}"}
    try:
        result = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return {"reason": "the probe printed nothing that could be read"}
    return cast("dict[str, Any]", result) if isinstance(result, dict) else {}


def _sysctl(name: str) -> int | None:
    try:
        done = subprocess.run(
            ["sysctl", "-n", name], capture_output=True, text=True, timeout=5, check=True
        )
        return int(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
