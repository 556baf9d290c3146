"""Two programs on the same checkpoint, in alternating processes, ratio pair by pair.

    dgemma, peer | peer, dgemma | dgemma, peer | ...     each in a process of its own

Turns alternate who goes first, so that a machine that slows down or warms up hits both alike.

Not here: what one side does (`side.py`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from dgemma.errors import BackendError

METRICS = ("prefill_s", "step_s", "peak_memory_bytes", "resident_bytes")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What both sides measured, pair by pair."""

    peer: str
    pairs: tuple[tuple[dict[str, Any], dict[str, Any]], ...]  # (dgemma, peer)

    def ratios(self, metric: str) -> list[float]:
        """dgemma / peer, pair by pair; below 1 is less than the peer."""
        return [ours[metric] / theirs[metric] for ours, theirs in self.pairs]

    def to_dict(self) -> dict[str, Any]:
        return {
            "peer": self.peer,
            "versions": {side["program"]: side["version"] for side in self.pairs[0]},
            "metrics": {
                metric: {
                    "dgemma": median(ours[metric] for ours, _ in self.pairs),
                    "peer": median(theirs[metric] for _, theirs in self.pairs),
                    "ratio": median(self.ratios(metric)),
                    "ratio_min": min(self.ratios(metric)),
                    "ratio_max": max(self.ratios(metric)),
                }
                for metric in METRICS
            },
            "pairs": len(self.pairs),
        }


def compare(
    folder: Path,
    *,
    peer: str = "mlx-vlm",
    backend: str = "mlx",
    prompt_tokens: int = 1024,
    steps: int = 8,
    pairs: int = 3,
    peer_python: str | None = None,
) -> Comparison:
    """Runs `pairs` pairs; `peer_python` is the interpreter the peer is installed in.

    Raises `BackendError` with the last line a side printed when it fails.
    """
    work = [str(folder), "--prompt-tokens", str(prompt_tokens), "--steps", str(steps)]
    ours = [sys.executable, "-m", "dgemma.bench.side", "dgemma", *work, "--backend", backend]
    theirs = [peer_python or sys.executable, "-m", "dgemma.bench.side", peer, *work]
    found: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for number in range(pairs):
        if number % 2 == 0:
            first = _run(ours)
            found.append((first, _run(theirs)))
        else:
            first = _run(theirs)
            found.append((_run(ours), first))
    return Comparison(peer=peer, pairs=tuple(found))


def _run(command: Sequence[str]) -> dict[str, Any]:
    # The peer's interpreter need not have dgemma installed: it finds it where this one did.
    roots = [str(Path(__file__).parents[2])]
    code = f"import sys; sys.path[:0] = {roots!r}; sys.argv = {list(command[2:])!r}; "
    code += "import runpy; runpy.run_module('dgemma.bench.side', run_name='__main__')"
    done = subprocess.run([command[0], "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise BackendError(f"{command[3]} failed: {lines[-1]}")
    return json.loads(done.stdout.strip().splitlines()[-1])
