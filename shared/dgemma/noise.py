"""Every random number of a request, counter-based: Philox4x64 keyed by (seed, row).

    key      (seed, row)
    counter  (index, block, step, purpose)

A request's numbers depend on nothing else: not on batch size or order, the backend, the process,
or what was generated before. So the same seed means the same noise everywhere, and any step can be
repeated without the ones before it. Equal tokens near ties are not promised across backends.

Only raw 64-bit words are taken from NumPy (their stream is promised to be stable); the mapping to
numbers and tokens is ours: u = (word >> 11) * 2^-53, token = floor(u * V).

Not here: what the numbers decide (`sampler.py`, `reference.inverse_cdf`).
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from dgemma.backend import Float64, Int32

_WORD = 2**64
_TOKEN_CHUNK = 256
_UNUSED_BITS = np.uint64(11)  # 53 of 64 make a float64 in [0, 1)


class Purpose(IntEnum):
    """The last counter word; one number each, so that no two uses share a draw."""

    CANVAS = 0
    CANDIDATE = 1
    RENOISE = 2
    TOKEN = 3


class Noise:
    """The random numbers of one request. Not thread-safe; make one per request.

    A seed may be any integer; it is taken modulo 2**64, and so is `row` (which tells apart several
    replies to one request).
    """

    def __init__(self, seed: int, *, vocab_size: int, row: int = 0) -> None:
        self.seed = seed
        self.row = row
        self.vocab_size = vocab_size
        key = np.array([seed % _WORD, row % _WORD], dtype=np.uint64)  # a list would become float64
        self._philox = np.random.Philox(key=key)
        # Setting the state costs a tenth of making a generator, and a step wants two of them.
        self._state = self._philox.state
        self._counter = self._state["state"]["counter"]
        self._chunk_index = -1
        self._chunk: Float64 = np.empty(0)

    def canvas(self, block: int, length: int) -> Int32:
        """The uniform tokens a canvas starts from, [L]."""
        return self._tokens(block, 0, Purpose.CANVAS, length)

    def uniforms(self, block: int, step: int, length: int) -> Float64:
        """One number in [0, 1) a position, for the candidates of a step, [L]."""
        return self._uniforms(block, step, Purpose.CANDIDATE, length)

    def renoise(self, block: int, step: int, length: int) -> Int32:
        """The uniform tokens that replace what a step did not accept, [L]."""
        return self._tokens(block, step, Purpose.RENOISE, length)

    def token_uniforms(self, start: int, count: int) -> Float64:
        """Numbers for the output tokens `start .. start + count` of a causal decoder, [count].

        Indexed by output position, so that a hybrid decoder, which reads many at once, draws what
        an autoregressive one draws.
        """
        pieces: list[Float64] = []
        while count > 0:
            index, offset = divmod(start, _TOKEN_CHUNK)
            if index != self._chunk_index:
                self._chunk = self._uniforms(index, 0, Purpose.TOKEN, _TOKEN_CHUNK)
                self._chunk_index = index
            piece = self._chunk[offset : offset + count]
            pieces.append(piece)
            start, count = start + len(piece), count - len(piece)
        return np.concatenate(pieces) if pieces else np.empty(0)

    def _tokens(self, block: int, step: int, purpose: Purpose, length: int) -> Int32:
        uniforms = self._uniforms(block, step, purpose, length)
        return (uniforms * self.vocab_size).astype(np.int32)

    def _uniforms(self, block: int, step: int, purpose: Purpose, length: int) -> Float64:
        self._counter[:] = (0, block, step, purpose)
        self._state["buffer_pos"] = 4  # nothing buffered
        self._philox.state = self._state
        words = self._philox.random_raw(length)
        return np.multiply(words >> _UNUSED_BITS, 2.0**-53)
