"""The prefix: keys and values of the tokens encoded so far, per layer.

    full layer      [ 0 ............................ length ) room
    sliding layer             [ start .............. length ) room

Buffers [K, capacity, d] grow by doubling and are written in place by `append` alone. A sliding
layer keeps the `window - 1` tokens a later token can see and a canvas of rewinding before them;
when its buffer is full, what is still wanted moves to the front, once in many appends. MLX arrays
are values, so a fork shares them until one side writes, which then copies that layer's buffer.

Not here: attention; who may see what (`model.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from dgemma.backend import Int32
from dgemma.config import ModelConfig
from mlx_dgemma.products import run

FIRST_CAPACITY = 256


@dataclass(eq=False)
class LayerStore:
    """One layer's keys and values of the positions `start` to `length`."""

    keep: int | None
    """Positions before `length` that must stay; None: all of them."""
    keys: mx.array | None = None  # [K, capacity, d]
    values: mx.array | None = None
    start: int = 0
    length: int = 0

    def view(self, first: int, last: int) -> tuple[mx.array, mx.array]:
        """Keys and values of the positions `first` to `last`, not copied."""
        assert self.keys is not None
        assert self.values is not None
        assert self.start <= first <= last <= self.length
        span = slice(first - self.start, last - self.start)
        return self.keys[:, span], self.values[:, span]

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Writes [K, N, d] behind what is there. The old buffers must not be in use elsewhere, or
        they are copied."""
        count = keys.shape[1]
        if self.keep is not None and count > self.keep:
            keys, values = keys[:, count - self.keep :], values[:, count - self.keep :]
            self.start = self.length = self.length + count - self.keep
            count = self.keep
        self._make_room(count, keys, values)
        offset = mx.array([self.length - self.start])
        assert self.keys is not None
        assert self.values is not None
        self.keys = mx.slice_update(self.keys, keys, offset, axes=(1,))
        self.values = mx.slice_update(self.values, values, offset, axes=(1,))
        self.length += count

    def rewind(self, length: int) -> None:
        self.length = length

    def copy(self) -> LayerStore:
        return LayerStore(self.keep, self.keys, self.values, self.start, self.length)

    @property
    def bytes(self) -> int:
        if self.keys is None or self.values is None:
            return 0
        return self.keys.nbytes + self.values.nbytes

    def _make_room(self, count: int, keys: mx.array, values: mx.array) -> None:
        capacity = 0 if self.keys is None else self.keys.shape[1]
        if self.length - self.start + count <= capacity:
            return
        start = self.start
        if self.keep is not None:
            start = max(start, min(self.length, self.length + count - self.keep))
        needed = self.length - start + count
        wanted = max(FIRST_CAPACITY, capacity)
        while wanted < needed:
            wanted *= 2
        if self.keep is not None:
            # Room of half of `keep` makes moving rare; more would only cost memory.
            wanted = max(needed, min(wanted, self.keep + max(self.keep // 2, 1)))
        span = slice(start - self.start, self.length - self.start)
        self.keys = _moved(self.keys, keys, span, wanted)
        self.values = _moved(self.values, values, span, wanted)
        self.start = start


def _moved(old: mx.array | None, like: mx.array, span: slice, capacity: int) -> mx.array:
    heads, _, dim = like.shape
    fresh = mx.zeros((heads, capacity, dim), dtype=like.dtype)
    if old is None or span.start == span.stop:
        return fresh
    return mx.slice_update(fresh, old[:, span], mx.array([0]), axes=(1,))


class MlxPrefix:
    """Encoded tokens (`dgemma.backend.Prefix`)."""

    def __init__(self, config: ModelConfig) -> None:
        self._reach = config.sliding_window - 1
        keep = self._reach + config.canvas_length
        self.layers = [LayerStore(keep if layer.is_sliding else None) for layer in config.layers]
        self.length = 0
        self.last_tokens: Int32 | None = None
        """The tokens of the last `Extend`, by which a diagnosis knows that it has been run."""

    @property
    def earliest_rewind(self) -> int:
        """The shortest length at which every sliding layer still has what a query would see."""
        starts = [layer.start for layer in self.layers if layer.start > 0]
        return max(starts) + self._reach if starts else 0

    @property
    def bytes(self) -> int:
        """Memory of the buffers, room to grow included; a fork's are counted again."""
        return sum(layer.bytes for layer in self.layers)

    def rewind(self, length: int) -> None:
        """Forgets the tokens from position `length` on; nothing is moved or freed."""
        earliest = self.earliest_rewind
        if not min(earliest, self.length) <= length <= self.length:
            raise ValueError(
                f"cannot rewind to length {length}: this prefix of {self.length} tokens goes back "
                f"to {earliest} at the earliest"
            )
        for layer in self.layers:
            layer.rewind(length)
        self.length = length
        self.last_tokens = None

    def fork(self) -> MlxPrefix:
        """An independent prefix; the buffers are shared until one of the two writes."""
        twin = object.__new__(MlxPrefix)
        twin._reach = self._reach
        twin.layers = [layer.copy() for layer in self.layers]
        twin.length = self.length
        twin.last_tokens = self.last_tokens
        return twin

    def append(self, entries: Sequence[tuple[mx.array, mx.array]]) -> None:
        """Adds the keys and values [K, N, d] of every layer and runs the writes."""
        for layer, (keys, values) in zip(self.layers, entries, strict=True):
            layer.append(keys, values)
        self.length += entries[0][0].shape[1]
        run(*[array for layer in self.layers for array in (layer.keys, layer.values)])
