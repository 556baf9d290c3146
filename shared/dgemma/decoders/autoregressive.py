"""Autoregression: the same weights read causally, one token a pass.

    encode the prompt -> token -> encode it -> token -> ...

The token is the argmax, or with a temperature the candidate at this output position's uniform.

Not here: diffusion. Of the released weights, the technical report (arXiv:2608.00146) gives e.g.
84.2 on AIME 2026 to this way of decoding and 69.1 to diffusion.
"""

from __future__ import annotations

import numpy as np

from dgemma.backend import Extend, Int32, Prefix, Statistics
from dgemma.decoders import Commit, Decoding, Finish, Request


def autoregressive(request: Request, prefix: Prefix) -> Decoding:
    """Decodes token by token until an end token, `max_new_tokens`, or the context's end."""
    tokens = request.prompt
    emitted = 0
    while True:
        statistics = yield causal_pass(
            request,
            prefix,
            tokens,
            read=np.array([len(tokens) - 1], dtype=np.int32),
            first_output=emitted,
            label=f"token {emitted}",
        )
        assert statistics is not None
        tokens = causal_tokens(request, statistics)
        cut = request.layout.cut(tokens, emitted)
        yield Commit(
            block=emitted,
            tokens=cut.tokens,
            end_token=cut.end_token,
            steps=0,
            passes=1,
        )
        if cut.finish_reason:
            yield Finish(reason=cut.finish_reason)
            return
        emitted += 1


def causal_pass(
    request: Request,
    prefix: Prefix,
    tokens: Int32,
    *,
    read: Int32,
    first_output: int,
    label: str,
    targets: Int32 | None = None,
) -> Extend:
    """An `Extend` whose positions read yield the output tokens from number `first_output` on."""
    return Extend(
        prefix=prefix,
        tokens=tokens,
        read=read,
        temperature=request.causal_temperature or 1.0,
        uniforms=request.noise.token_uniforms(first_output, len(read)),
        targets=targets,
        label=label,
    )


def causal_tokens(request: Request, statistics: Statistics) -> Int32:
    """The tokens an autoregressive decoder writes at the positions read, [R]."""
    return statistics.candidate if request.causal_temperature else statistics.argmax
