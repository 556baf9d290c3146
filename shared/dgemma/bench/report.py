"""Runs the measurements and prints them: a table for people, one JSON object as the last line.

Not here: how anything is measured (`measure.py`, `compare.py`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack

from dgemma.bench import machine, measure
from dgemma.bench.compare import METRICS, Comparison
from dgemma.bench.counts import left_out_flops, step_flops
from dgemma.bench.measure import Figure
from dgemma.model import Model
from dgemma.options import Options
from dgemma.reply import Reply

_PROMPTS = (
    "Why is the sky blue?",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "List three differences between a lake and a river.",
)
_TINY_PROMPTS = (
    "Solve this 4x4 sudoku:\n..14\n4...\n.241\n1.32",
    "Write JSON with keys name, city for this text: Ada lives in Paris.",
    "Sort these numbers: 7 3 9 1",
)


def run_backend(
    model: Model,
    *,
    prompt_tokens: int,
    rows: Sequence[int],
    repeats: int,
    seed: int,
) -> dict[str, Any]:
    """Prefill, steps and the host, with the memory they took."""
    backend = model.backend
    backend.reset_peak_memory()
    figures = [measure.prefill(backend, prompt_tokens, repeats, seed)]
    figures += [measure.steps(backend, prompt_tokens, count, repeats, seed) for count in rows]
    peak = backend.peak_memory_bytes()
    figures += [measure.host(count, 200) for count in (1, 32)]
    left_out = left_out_flops(backend.config, backend.left_out())
    return {
        "figures": [figure.to_dict() for figure in figures],
        "step_flops": step_flops(backend.config),
        "left_out_flops": left_out,
        "peak_memory_bytes": peak,
        "resident_bytes": machine.peak_resident_bytes(),
    }


def run_replies(
    model: Model, prompts: Sequence[str], repeats: int, **options: Unpack[Options]
) -> dict[str, Any]:
    """Whole replies to real prompts: emitted tokens a second, steps a canvas, first text."""
    options.setdefault("seed", 0)
    model.generate(prompts[0], **options)
    replies = [model.generate(prompt, **options) for _ in range(repeats) for prompt in prompts]

    def figure(name: str, unit: str, values: Sequence[float]) -> Figure:
        return Figure(name=name, unit=unit, values=tuple(values))

    def per_canvas(reply: Reply) -> float:
        return reply.stats.steps / max(1, reply.stats.canvases)

    figures = [
        figure("emitted tokens", "tokens/s", [r.stats.tokens_per_second for r in replies]),
        figure("steps a canvas", "steps", [per_canvas(r) for r in replies]),
        figure("tokens per forward", "tokens", [r.stats.tokens_per_forward for r in replies]),
        figure("first text", "ms", [1e3 * (r.stats.first_text_s or 0.0) for r in replies]),
        figure("whole reply", "ms", [1e3 * r.stats.total_s for r in replies]),
    ]
    return {
        "figures": [item.to_dict() for item in figures],
        "mode": replies[0].mode,
        "prompts": len(prompts),
        "tokens": [len(reply.tokens) for reply in replies[: len(prompts)]],
    }


def default_prompts(model: Model) -> tuple[str, ...]:
    """A few real questions; for the bundled checkpoint, of the kind it was trained on."""
    return _TINY_PROMPTS if model.config.vocab_size < 10_000 else _PROMPTS


def table(figures: Sequence[dict[str, Any]]) -> str:
    """Lines of name, median, range and unit."""
    width = max(len(figure["name"]) for figure in figures)
    return "\n".join(
        f"{figure['name']:<{width}}  {figure['median']:>10.3f} {figure['unit']:<9} "
        f"({figure['min']:.3f} to {figure['max']:.3f}, {figure['repeats']} repeats)"
        for figure in figures
    )


def comparison_table(found: Comparison) -> str:
    """One line a metric: both medians and the ratio with its range."""
    metrics = found.to_dict()["metrics"]
    lines = [f"{'':<20}{'dgemma':>16}{found.peer:>16}   ratio (range over pairs)"]
    for name in METRICS:
        row = metrics[name]
        scale, unit = (1e-6, "MB") if name.endswith("bytes") else (1e3, "ms")
        lines.append(
            f"{name:<20}{row['dgemma'] * scale:>13.1f} {unit}{row['peer'] * scale:>13.1f} {unit}"
            f"   {row['ratio']:.2f} ({row['ratio_min']:.2f} to {row['ratio_max']:.2f})"
        )
    return "\n".join(lines)


def finish(record: dict[str, Any], out: Path | None) -> str:
    """The record with its machine as one JSON line; appended to `out` too when given."""
    line = json.dumps({**record, "machine": machine.describe()})
    if out is not None:
        with out.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    return line
