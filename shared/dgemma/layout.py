"""Where everything lies: prompt, canvases, the context limit, and the end of the text.

    position   0 ........ P-1 | P ....... P+L-1 | P+L ...... P+2L-1 |
               prompt         | canvas 0        | canvas 1          |  ... up to context_length

Canvases follow the prompt without a gap. A canvas is always denoised whole; what is emitted of it
is cut at the first end token and at `max_new_tokens`.

Not here: what is on a canvas (`decoders/`), keys and values (a backend's `cache.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dgemma.backend import Int32
from dgemma.config import SLIDING, LayerKind
from dgemma.errors import ConfigError, ContextLengthError, PromptError

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Cut:
    """What is emitted of freshly decoded tokens."""

    tokens: Int32  # content alone: no end token, nothing behind it
    end_token: int | None  # the end token that was met, itself not content
    finish_reason: FinishReason | None  # None: the text goes on


@dataclass(frozen=True, kw_only=True)
class BlockLayout:
    """The geometry of one request.

    `prompt_length` counts the tokens before the first canvas. `block_length` is what one turn of
    the decoder needs room for: the canvas for diffusion, 1 for autoregression. Raises
    `ContextLengthError` when not even one block fits; a `max_new_tokens` beyond the context is cut
    to what fits, and the reply then ends with "length".
    """

    prompt_length: int
    canvas_length: int
    context_length: int
    max_new_tokens: int
    end_tokens: frozenset[int]
    block_length: int = 0  # 0: the canvas length

    def __post_init__(self) -> None:
        if self.prompt_length < 1:
            raise PromptError("the prompt is empty; it must hold at least one token")
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens is {self.max_new_tokens}, but must be at least 1")
        if self.capacity < 1:
            raise ContextLengthError(
                f"a prompt of {self.prompt_length} tokens leaves no room in the context of "
                f"{self.context_length}: a reply needs at least {self._block} more"
            )

    @property
    def _block(self) -> int:
        return self.block_length or self.canvas_length

    @property
    def capacity(self) -> int:
        """New tokens the context has room for, in whole blocks."""
        return max(0, self.context_length - self.prompt_length) // self._block * self._block

    @property
    def new_tokens(self) -> int:
        """The most tokens this request emits."""
        return min(self.max_new_tokens, self.capacity)

    @property
    def num_blocks(self) -> int:
        """Canvases at most, when each commits `canvas_length` tokens."""
        return -(-self.new_tokens // self.canvas_length)

    def blocks(self) -> Iterator[int]:
        return iter(range(self.num_blocks))

    def span(self, block: int) -> range:
        """The positions of a canvas."""
        start = self.prompt_length + block * self.canvas_length
        return range(start, start + self.canvas_length)

    def cut(self, tokens: Int32, emitted: int) -> Cut:
        """Cuts fresh tokens at the first end token and at the length limit.

        `emitted` counts the content tokens of this request so far. The end token takes a place of
        `max_new_tokens`, as in an autoregressive decoder, which would not look further either.
        """
        ends = np.flatnonzero(np.isin(tokens, list(self.end_tokens)))
        room = self.new_tokens - emitted
        if len(ends) and ends[0] < room:
            end = int(ends[0])
            return Cut(tokens=tokens[:end], end_token=int(tokens[end]), finish_reason="stop")
        finished: FinishReason | None = "length" if len(tokens) >= room else None
        return Cut(tokens=tokens[:room], end_token=None, finish_reason=finished)


def prefix_tail(kind: LayerKind, prefix_length: int, sliding_window: int) -> int:
    """How many of the last prefix tokens every canvas position sees in a layer of this kind.

    Full layers see all; sliding layers the same last `sliding_window - 1` for the whole canvas,
    beside the whole canvas itself. Source: transformers 5.24, `DynamicSlidingWindowLayer`.
    """
    return min(prefix_length, sliding_window - 1) if kind == SLIDING else prefix_length
