"""One side of a comparison, alone in its process: a prompt, one canvas, a fixed number of steps.

    python -m dgemma.bench.side PROGRAM FOLDER [--backend mlx] ...

Prints one JSON line: prefill_s, canvas_s, step_s, peak_memory_bytes (the framework's count),
resident_bytes (the process's). Both programs get the same prompt ids and never stop early; one
unmeasured canvas of two steps comes first.

Not here: who takes turns with whom (`compare.py`).
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from pathlib import Path
from typing import Any

from dgemma.bench.machine import package_version, peak_resident_bytes
from dgemma.bench.measure import NeverStop, random_prompt
from dgemma.config import ModelConfig
from dgemma.decoders import Commit, decoder
from dgemma.options import Options, plan
from dgemma.scheduler import Failed, Scheduler


def run_dgemma(folder: Path, backend: str, prompt_tokens: int, steps: int) -> dict[str, Any]:
    """Our side: the diffusion decoder over a backend."""
    model = importlib.import_module(f"{backend}_dgemma").load(folder)
    prompt = random_prompt(model.config, prompt_tokens, seed=0)

    def canvas(count: int) -> tuple[float, float]:
        ready = plan(
            prompt,
            Options(
                seed=0,
                max_new_tokens=model.config.canvas_length,
                max_denoising_steps=count,
                stop_rule=NeverStop(),
            ),
            config=model.config,
            generation=model.generation,
            end_tokens=frozenset(),
        )
        scheduler = Scheduler(model.backend)
        started = time.perf_counter()
        ticket = scheduler.add(decoder("diffusion")(ready.request, model.backend.new_prefix()))
        scheduler.step()
        encoded = time.perf_counter()
        while True:
            for _, event in scheduler.step():
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Commit):
                    finished = time.perf_counter()
                    scheduler.cancel(ticket)
                    return encoded - started, finished - encoded

    canvas(2)
    model.backend.reset_peak_memory()
    prefill_s, canvas_s = canvas(steps)
    return {
        "prefill_s": prefill_s,
        "canvas_s": canvas_s,
        "peak_memory_bytes": model.backend.peak_memory_bytes(),
    }


def run_mlx_vlm(folder: Path, prompt_tokens: int, steps: int) -> dict[str, Any]:
    """mlx-vlm's side: its own generator with the entropy-bound sampler and full canvases."""
    mx = importlib.import_module("mlx.core")
    diffusion = importlib.import_module("mlx_vlm.generate.diffusion")
    model = importlib.import_module("mlx_vlm.utils").load_model(folder)
    config = ModelConfig.from_dict(json.loads((folder / "config.json").read_text()))
    prompt = mx.array(random_prompt(config, prompt_tokens, seed=0))[None]
    tokenizer = _Mute()

    def canvas(count: int) -> tuple[float, float]:
        started = time.perf_counter()
        results = diffusion.stream_diffusion_generate(
            model,
            tokenizer,
            tokenizer,
            prompt,
            None,
            None,
            max_tokens=config.canvas_length,
            skip_special_token_ids=set[int](),
            temperature=1.0,
            max_denoising_steps=count,
            diffusion_full_canvas=True,
            diffusion_sampler="entropy-bound",
        )
        first = next(results)  # the canvas is done; its first token comes out
        total = time.perf_counter() - started
        assert first.diffusion_denoising_steps == count
        encoded = prompt_tokens / first.prompt_tps
        return encoded, total - encoded

    canvas(2)
    mx.reset_peak_memory()
    prefill_s, canvas_s = canvas(steps)
    return {
        "prefill_s": prefill_s,
        "canvas_s": canvas_s,
        "peak_memory_bytes": mx.get_peak_memory(),
    }


class _Mute:
    """A tokenizer for mlx-vlm that never ends a text and decodes everything to nothing."""

    clean_up_tokenization_spaces = False
    all_special_ids: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.stopping_criteria = self
        self.tokenizer = self
        self.detokenizer = self
        self.last_segment = ""

    def __call__(self, token: int) -> bool:
        return False

    def add_eos_token_ids(self, tokens: object) -> None:
        pass

    def add_token(self, token: int, **_: object) -> None:
        pass

    def decode(self, tokens: object, **_: object) -> str:
        return ""

    def reset(self) -> None:
        pass

    def finalize(self) -> None:
        pass


def main() -> None:
    """The command of the module docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("program", choices=("dgemma", "mlx-vlm"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--backend", default="mlx")
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    if args.program == "dgemma":
        found = run_dgemma(args.folder, args.backend, args.prompt_tokens, args.steps)
    else:
        found = run_mlx_vlm(args.folder, args.prompt_tokens, args.steps)
    found |= {"program": args.program, "version": package_version(args.program)}
    found["step_s"] = found["canvas_s"] / args.steps
    found["resident_bytes"] = peak_resident_bytes()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
