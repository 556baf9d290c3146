"""Block diffusion: the reference's algorithm, on one screen.

    canvas <- uniform noise; conditioning <- none
      +-> pass over [prefix | canvas]  ->  argmax, candidate, entropy of every position
      |     stop rule content, or last step?  ->  commit the ARGMAX, encode it, next canvas
      |     acceptance mask
      +---- canvas <- candidate where accepted, fresh noise elsewhere

Not here: the strategies (`sampler.py`), temperatures (`schedule.py`).
Source: transformers 5.24, `DiffusionGemmaGenerationMixin.generate`. The last canvas is not encoded.
"""

from __future__ import annotations

from collections.abc import Generator

import numpy as np

from dgemma.backend import Denoise, Extend, Int32, Prefix, Statistics, Work
from dgemma.decoders import Commit, Decoding, Draft, Event, Finish, Request
from dgemma.sampler import mean_entropy, next_canvas
from dgemma.schedule import TemperatureSchedule

NO_POSITIONS = np.empty(0, dtype=np.int32)


def diffusion(request: Request, prefix: Prefix) -> Decoding:
    """Decodes canvas by canvas until an end token, `max_new_tokens`, or the context's end."""
    layout = request.layout
    emitted = 0
    yield Extend(prefix=prefix, tokens=request.prompt, read=NO_POSITIONS, label="the prompt")
    for block in layout.blocks():
        canvas = request.noise.canvas(block, layout.canvas_length)
        last, steps = yield from denoise(request, prefix, block, canvas, request.temperatures)
        cut = layout.cut(last.argmax, emitted)
        emitted += len(cut.tokens)
        yield Commit(
            block=block,
            tokens=cut.tokens,
            end_token=cut.end_token,
            steps=steps,
            passes=steps + (block > 0),
            mean_entropy=mean_entropy(last),
        )
        if cut.finish_reason:
            yield Finish(reason=cut.finish_reason)
            return
        yield Extend(
            prefix=prefix, tokens=last.argmax, read=NO_POSITIONS, label=f"canvas {block}, encoded"
        )


def denoise(
    request: Request,
    prefix: Prefix,
    block: int,
    canvas: Int32,
    temperatures: TemperatureSchedule,
    head: int | None = None,
) -> Generator[Work | Event, Statistics | None, tuple[Statistics, int]]:
    """Refines one canvas; returns the last step's statistics and how many steps it took.

    With `head`, position 0 holds that token throughout (the hybrid decoder knows it already) and is
    left out of the drafts.
    """
    noise, length = request.noise, len(canvas)
    stop = request.stop_rule.start()
    conditioning = None
    shown = slice(0 if head is None else 1, None)
    step = 0
    while True:
        temperature = temperatures(step)
        last = step + 1 == temperatures.steps
        statistics = yield Denoise(
            prefix=prefix,
            canvas=canvas,
            conditioning=conditioning,
            temperature=temperature,
            uniforms=noise.uniforms(block, step, length),
            want_conditioning=not last,
            label=f"step {step} of canvas {block}",
        )
        assert statistics is not None
        accepted = request.acceptance(statistics)
        yield Draft(
            block=block,
            step=step,
            steps=temperatures.steps,
            tokens=statistics.argmax[shown],
            entropy=statistics.entropy[shown],
            accepted=accepted[shown],
            temperature=temperature,
        )
        if stop(statistics, accepted) or last:
            return statistics, step + 1
        canvas = next_canvas(
            accepted, request.acceptance.tokens(statistics), noise.renoise(block, step, length)
        )
        if head is not None:
            canvas[0] = head
        conditioning = statistics.conditioning
        step += 1
