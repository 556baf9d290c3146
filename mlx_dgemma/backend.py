"""The MLX backend: what the core hands over is checked, chunked, run on the owner thread.

    extend    every row in chunks of `prefill_chunk` tokens from its own start; chunks of several
              rows share a pass while they fit; then the statistics of what is read
    denoise   all rows in one pass, then their statistics

Not here: the arithmetic (`model.py`, `statistics.py`), the prefix (`cache.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import ParamSpec, TypeVar

import mlx.core as mx
import numpy as np

from dgemma.backend import Backend, Denoise, Extend, Float32, Int32, Prefix, Statistics, Work
from dgemma.checkpoint import Checkpoint
from dgemma.errors import BackendError, ConfigError
from mlx_dgemma import experts
from mlx_dgemma.cache import MlxPrefix
from mlx_dgemma.choices import choices, has_gpu
from mlx_dgemma.model import MlxModel, Row
from mlx_dgemma.statistics import DEFAULT_TILE_BYTES, Head
from mlx_dgemma.weights import load_weights
from mlx_dgemma.worker import Worker

DEFAULT_PREFILL_CHUNK = 512

P = ParamSpec("P")
T = TypeVar("T")


class MlxBackend(Backend):
    """Runs a checkpoint with MLX (`dgemma.backend.Backend`)."""

    name = "mlx"

    def __init__(self, worker: Worker, model: MlxModel, head: Head, prefill_chunk: int) -> None:
        self.config = model.config
        self.prefill_chunk = prefill_chunk
        self._worker = worker
        self._model = model
        self._head = head
        weakref.finalize(self, worker.close)

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: Checkpoint,
        *,
        dtype: str | None = None,
        prefill_chunk: int = DEFAULT_PREFILL_CHUNK,
        logits_tile_bytes: int = DEFAULT_TILE_BYTES,
        native_products: bool | None = None,
    ) -> MlxBackend:
        """Loads the weights and chooses how the products are computed.

        `dtype` converts dense weights; `prefill_chunk` is in tokens; `logits_tile_bytes` bounds the
        float32 logits that exist at once; `native_products` overrides the choice between MLX's own
        products (None: on a GPU) and float32 ones of widened weights. Raises `ConfigError` for
        values that cannot be, `BackendError` where the self-test fails, and what `load_weights`
        raises.
        """
        sizes = {"prefill_chunk": prefill_chunk, "logits_tile_bytes": logits_tile_bytes}
        for key, value in sizes.items():
            if value < 1:
                raise ConfigError(f"{key} is {value}, but must be at least 1")
        worker = Worker("mlx-dgemma")

        def build() -> tuple[MlxModel, Head]:
            native = has_gpu() if native_products is None else native_products
            model = MlxModel(load_weights(checkpoint, dtype=dtype, native=native))
            if native and (fault := _test_experts(model)):
                raise BackendError(f"{fault}; update macOS and mlx, or run on the CPU")
            return model, Head(model, logits_tile_bytes)

        try:
            model, head = worker.run(build)
        except BaseException:
            worker.close()
            raise
        return cls(worker, model, head, prefill_chunk)

    def left_out(self) -> dict[str, int]:
        return asdict(self._model.saved)

    def describe(self) -> dict[str, str]:
        """Device, dtype and chosen implementations, with the reasons."""
        return {
            "device": "gpu" if self._worker.run(has_gpu) else "cpu",
            "dtype": str(self._model.weights.dtype).removeprefix("mlx.core."),
            **choices(native=self._model.weights.native),
        }

    def new_prefix(self) -> MlxPrefix:
        return MlxPrefix(self.config)

    def extend(self, rows: Sequence[Extend]) -> list[Statistics | None]:
        """Runs the causal pass. Raises `ValueError` for an empty row or one prefix in two rows."""
        if not rows:
            return []
        prefixes = [_own_prefix(row.prefix) for row in rows]
        if len({id(prefix) for prefix in prefixes}) < len(prefixes):
            raise ValueError("two rows extend the same prefix; fork it first")
        for row in rows:
            if len(row.tokens) == 0:
                raise ValueError("an Extend needs at least one token")
        return self._worker.run(self._extend, rows, prefixes)

    def denoise(self, rows: Sequence[Denoise]) -> list[Statistics]:
        """Runs the bidirectional pass. Raises `ValueError` for an empty canvas."""
        if not rows:
            return []
        for row in rows:
            if len(row.canvas) == 0:
                raise ValueError("a canvas needs at least one token")
        return self._worker.run(self._denoise, rows)

    def diagnose(self, work: Work) -> str:
        """The first layer, or stage before or after the layers, that gives NaN or infinity."""
        return self._worker.run(self._diagnose, work)

    def peak_memory_bytes(self) -> int | None:
        return mx.get_peak_memory()

    def reset_peak_memory(self) -> None:
        mx.reset_peak_memory()

    def close(self) -> None:
        self._worker.close()

    def logits(self, work: Work) -> Float32:
        """Softcapped logits [R, V] of what `work` reads or of its canvas, at temperature 1.

        For comparisons: everything else wants `extend` and `denoise`, which never hold so much. An
        Extend is appended to its prefix as always.
        """
        return self._worker.run(self._logits, work)

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a function on the owner thread, where conditioning may be computed with."""
        return self._worker.run(function, *args, **kwargs)

    def self_test(self) -> str:
        """What is wrong with the chosen grouped product on this device, in words; "" if nothing."""
        return self._worker.run(_test_experts, self._model)

    def _extend(self, rows: Sequence[Extend], prefixes: list[MlxPrefix]) -> list[Statistics | None]:
        outputs = self._encode(rows, prefixes)
        reading = [number for number, output in enumerate(outputs) if output is not None]
        results: list[Statistics | None] = [None] * len(rows)
        if reading:
            hidden = mx.concatenate([out for out in outputs if out is not None])
            counts = [len(rows[number].read) for number in reading]
            found = self._head.statistics(hidden, [rows[number] for number in reading], counts)
            for number, statistics in zip(reading, found, strict=True):
                results[number] = statistics
        return results

    def _encode(self, rows: Sequence[Extend], prefixes: list[MlxPrefix]) -> list[mx.array | None]:
        """The chunks of all rows; for each row the output [R, D] at `read`, None if it is empty."""
        done = [0] * len(rows)
        outputs: list[list[mx.array]] = [[] for _ in rows]
        while chosen := self._next_chunks(rows, done):
            chunk = [
                Row(
                    prefixes[number],
                    rows[number].tokens[start:stop],
                    _within(rows[number].read, start, stop),
                )
                for number, start, stop in chosen
            ]
            hidden = self._model.encode(chunk)
            used = 0
            for (number, _, stop), row in zip(chosen, chunk, strict=True):
                done[number] = stop
                count = 0 if row.read is None else len(row.read)
                if hidden is not None and count:
                    outputs[number].append(hidden[used : used + count])
                    used += count
        for prefix, row in zip(prefixes, rows, strict=True):
            prefix.last_tokens = row.tokens
        if max(done) > self.prefill_chunk:
            # A long prompt leaves freed buffers of many sizes behind, which nothing else will use.
            mx.clear_cache()
        return [mx.concatenate(parts) if parts else None for parts in outputs]

    def _next_chunks(self, rows: Sequence[Extend], done: list[int]) -> list[tuple[int, int, int]]:
        """The next chunk of as many rows as fit one pass: (row, first token, end).

        A row is cut at multiples of `prefill_chunk` whoever shares the pass, so that its numbers do
        not depend on its company.
        """
        chosen: list[tuple[int, int, int]] = []
        total = 0
        for number, row in enumerate(rows):
            start = done[number]
            stop = min(start + self.prefill_chunk, len(row.tokens))
            if start < stop and (not chosen or total + stop - start <= self.prefill_chunk):
                chosen.append((number, start, stop))
                total += stop - start
        return chosen

    def _denoise(self, rows: Sequence[Denoise]) -> list[Statistics]:
        hidden = self._model.denoise_hidden(
            [Row(_own_prefix(row.prefix), row.canvas) for row in rows],
            [_own_conditioning(row) for row in rows],
        )
        return self._head.statistics(hidden, rows, [len(row.canvas) for row in rows])

    def _logits(self, work: Work) -> Float32:
        prefix = _own_prefix(work.prefix)
        if isinstance(work, Denoise):
            row = Row(prefix, work.canvas)
            hidden = self._model.denoise_hidden([row], [_own_conditioning(work)])
        else:
            (hidden,) = self._encode([work], [prefix])
            if hidden is None:
                return np.empty((0, self.config.vocab_size), np.float32)
        return np.array(self._head.logits(hidden), dtype=np.float32)

    def _diagnose(self, work: Work) -> str:
        prefix = _own_prefix(work.prefix).fork()
        if isinstance(work, Extend) and prefix.last_tokens is work.tokens:
            before = prefix.length - len(work.tokens)
            # Where the prefix no longer goes back that far, the tokens alone have to do.
            if before >= prefix.earliest_rewind:
                prefix.rewind(before)
            else:
                prefix = self.new_prefix()
        try:
            # A prompt is encoded without reading anything, so that its NaN shows a pass later.
            for number, layer in enumerate(prefix.layers):
                if layer.length > layer.start:
                    for array in layer.view(layer.start, layer.length):
                        _check(f"the prefix's {self._model.layer_name(number)}", array)
            if isinstance(work, Denoise):
                hidden = self._model.denoise_hidden(
                    [Row(prefix, work.canvas)], [_own_conditioning(work)], _check
                )
            else:
                output = self._model.encode([Row(prefix, work.tokens)], _check)
                assert output is not None
                hidden = output
            _check("the final norm", hidden)
            for row in range(hidden.shape[0]):
                _check("the logits", self._head.raw_logits(hidden[row : row + 1]))
        except _NotFiniteError as found:
            return str(found)
        return ""


def _test_experts(model: MlxModel) -> str:
    weights = model.weights
    return experts.self_test(weights.layers[0].experts, weights.dtype)


class _NotFiniteError(Exception):
    """Carries the name of the first value that is not finite."""


def _check(name: str, value: mx.array) -> None:
    if not mx.all(mx.isfinite(value)).item():
        raise _NotFiniteError(name)


def _own_prefix(prefix: Prefix) -> MlxPrefix:
    if not isinstance(prefix, MlxPrefix):
        raise ValueError(f"a {type(prefix).__name__} is no prefix of the mlx backend")
    return prefix


def _own_conditioning(row: Denoise) -> mx.array | None:
    given = row.conditioning
    if given is not None and given.shape[0] != len(row.canvas):
        raise ValueError(
            f"conditioning of {given.shape[0]} positions for a canvas of {len(row.canvas)}"
        )
    return given


def _within(read: Int32, start: int, stop: int) -> Int32:
    """The offsets in `read` that lie in a chunk, counted from its start."""
    return read[(read >= start) & (read < stop)] - start
