"""Hybrid: diffusion drafts a canvas, one causal pass verifies it.

    known:  ... prefix | head        head: final, not yet encoded
    draft:             [ head  d1  d2  d3  d4 ... ]      a canvas with head held at position 0
    verify: encode the draft causally; it says  a1  a2  a3  a4 ...  the autoregressive tokens
    commit: d1 .. dk while they agree, then a(k+1), which becomes the next head
    rewind to behind dk; the rest of the draft warms up the next canvas

A block costs its steps plus ONE pass: committing means encoding anyway. With `Exact` verification
the output is the autoregressive decoder's token for token, whatever the draft is worth, because the
draws are indexed by output position; `Typical` keeps drafted tokens that are merely probable.

Not here: denoising (`diffusion.py`), the causal pass (`autoregressive.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import numpy as np

from dgemma.backend import Float32, Int32, Prefix
from dgemma.decoders import Commit, Decoding, Finish, Request
from dgemma.decoders.autoregressive import causal_pass, causal_tokens
from dgemma.decoders.diffusion import denoise
from dgemma.errors import ConfigError
from dgemma.sampler import Mask, mean_entropy


@dataclass(frozen=True, kw_only=True)
class Exact:
    """Agrees where the draft is the very token the causal pass would have written."""

    def __call__(self, drafted: Int32, causal: Int32, logprob: Float32) -> Mask:
        return drafted == causal


@dataclass(frozen=True, kw_only=True)
class Typical:
    """Agrees, beyond that, where the causal pass gives the draft at least this probability."""

    threshold: float = 0.3

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            raise ConfigError(
                f"typical threshold is {self.threshold}, but must be a probability above 0"
            )

    def __call__(self, drafted: Int32, causal: Int32, logprob: Float32) -> Mask:
        return (drafted == causal) | (logprob >= np.float32(np.log(self.threshold)))


def hybrid(request: Request, prefix: Prefix) -> Decoding:
    """Decodes block by block, each as long as the causal pass agrees with the draft."""
    layout = request.layout
    verification = request.verification or Exact()
    statistics = yield causal_pass(
        request,
        prefix,
        request.prompt,
        read=np.array([len(request.prompt) - 1], dtype=np.int32),
        first_output=0,
        label="the prompt",
    )
    assert statistics is not None
    fresh = causal_tokens(request, statistics)
    cut = layout.cut(fresh, 0)
    yield Commit(block=0, tokens=cut.tokens, end_token=cut.end_token, steps=0, passes=1)
    emitted = len(cut.tokens)
    rest = fresh[1:]
    for block in count(1):
        if cut.finish_reason:
            yield Finish(reason=cut.finish_reason)
            return
        head, start = int(fresh[-1]), prefix.length
        length = min(layout.canvas_length, layout.context_length - start)
        canvas = request.noise.canvas(block, length)
        canvas[1 : 1 + len(rest)] = rest[: length - 1]
        canvas[0] = head
        last, steps = yield from denoise(request, prefix, block, canvas, request.temperatures, head)
        drafted = last.argmax.copy()
        drafted[0] = head

        statistics = yield causal_pass(
            request,
            prefix,
            drafted,
            read=np.arange(length, dtype=np.int32),
            first_output=emitted,
            targets=np.append(drafted[1:], drafted[:1]),  # nothing is drafted behind the last
            label=f"the verification of block {block}",
        )
        assert statistics is not None
        assert statistics.target_logprob is not None
        causal = causal_tokens(request, statistics)
        agreed = verification(drafted[1:], causal[:-1], statistics.target_logprob[:-1])
        kept = length - 1 if agreed.all() else int(agreed.argmin())
        prefix.rewind(start + 1 + kept)
        fresh = np.append(drafted[1 : 1 + kept], causal[kept])
        rest = drafted[2 + kept :]

        cut = layout.cut(fresh, emitted)
        emitted += len(cut.tokens)
        yield Commit(
            block=block,
            tokens=cut.tokens,
            end_token=cut.end_token,
            steps=steps,
            passes=steps + 1,
            mean_entropy=mean_entropy(last),
        )
