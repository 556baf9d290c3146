"""From hidden states to `Statistics`, a tile of rows at a time, without keeping logits.

    tile of rows    as many as fit `logits_tile_bytes` of float32 logits
      pieces        the vocabulary in ranges: product, softcap, temperature -> shaped logits
                    per 1,024 tokens: highest value, mass, mass-weighted logit
                    while the piece is at hand: its share of the next step's soft embedding
      host          float64: total, entropy, the 1,024-token tile of the inverse CDF
      gather        the few 1,024-token tiles that hold argmax, candidate and top-k; the rest there

Nothing of the size of a tile's logits exists but the shaped logits themselves; two host syncs a tile.
A tile is finished before the next begins. Arrays lie [vocabulary, rows], as the product of a piece
of the embedding with the hidden states gives them.

The k most probable tokens lie in the k 1,024-token tiles with the highest maxima (ties by number):
whatever lies in another is preceded by k tokens. So top-k, and argmax as top-1, is exact, ties to
the lowest id, without sorting a vocabulary.

Source of the quantities: `dgemma.reference`. Not here: the soft embedding's way into the next step
(`model.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from dgemma.backend import Denoise, Float32, Float64, Int32, Statistics, Work
from dgemma.reference import CDF_TILE, select_in_tile, select_tile
from mlx_dgemma.model import MlxModel
from mlx_dgemma.products import pieces

DEFAULT_TILE_BYTES = 64 << 20


@dataclass(frozen=True, eq=False)
class _Wanted:
    """What is asked of R packed rows, one entry a row."""

    temperatures: Float32
    uniforms: Float64
    targets: Int32  # -1: none
    top_k: Int32
    conditioning: np.ndarray[tuple[int], np.dtype[np.bool_]]

    @classmethod
    def of(cls, works: Sequence[Work], counts: Sequence[int]) -> _Wanted:
        parts = list(zip(works, counts, strict=True))
        return cls(
            temperatures=_spread([work.temperature for work in works], counts, np.float32),
            uniforms=np.concatenate(
                [np.full(n, 0.5) if w.uniforms is None else np.asarray(w.uniforms) for w, n in parts]
            ),
            targets=np.concatenate(
                [np.full(n, -1) if (t := _targets(w)) is None else t for w, n in parts]
            ).astype(np.int32),
            top_k=_spread([work.top_k for work in works], counts, np.int32),
            conditioning=_spread([_wants_conditioning(w) for w in works], counts, np.bool_),
        )

    def rows(self, start: int, stop: int) -> _Wanted:
        span = slice(start, stop)
        return _Wanted(
            self.temperatures[span],
            self.uniforms[span],
            self.targets[span],
            self.top_k[span],
            self.conditioning[span],
        )


@dataclass(frozen=True, eq=False)
class _Tile:
    """The statistics of a tile of rows, in NumPy but for the soft embedding."""

    argmax: Int32
    candidate: Int32
    entropy: Float32
    argmax_logprob: Float32
    candidate_logprob: Float32
    target_logprob: Float32
    top_tokens: list[tuple[Int32, Float32]]
    soft: mx.array | None  # [wanted rows, D]


class Head:
    """The tied head with everything that is wanted of its logits."""

    def __init__(self, model: MlxModel, tile_bytes: int = DEFAULT_TILE_BYTES) -> None:
        self.model = model
        self.cap = model.config.final_logit_softcapping
        self.vocabulary = model.config.vocab_size
        self.tile_rows = max(1, tile_bytes // (4 * self.vocabulary))
        embedding = model.weights.embedding
        size = -(-embedding.rows_per_piece // CDF_TILE) * CDF_TILE
        self.pieces = pieces(self.vocabulary, size)

    def logits(self, hidden: mx.array) -> mx.array:
        """Softcapped float32 logits [R, V], all at once: for comparisons, not for decoding."""
        parts = [self._capped(hidden, start, stop) for start, stop in self.pieces]
        return mx.concatenate(parts).T

    def statistics(
        self, hidden: mx.array, works: Sequence[Work], counts: Sequence[int]
    ) -> list[Statistics]:
        """One result for each work item, whose `counts` rows lie packed in `hidden` [sum, D]."""
        wanted = _Wanted.of(works, counts)
        self.model.saved.soft_embedding_rows += sum(
            n for w, n in zip(works, counts, strict=True)
            if isinstance(w, Denoise) and not w.want_conditioning
        )
        tiles = [
            self._tile(hidden[start:stop], wanted.rows(start, stop))
            for start, stop in pieces(hidden.shape[0], self.tile_rows)
        ]
        return _distribute(tiles, works, counts, wanted)

    def _capped(self, hidden: mx.array, start: int, stop: int) -> mx.array:
        """Softcapped logits of a range of the vocabulary: float32 [stop - start, R]."""
        raw = self.model.weights.embedding.apply_piece(hidden, start, stop).astype(mx.float32)
        return self.cap * mx.tanh(raw / self.cap)

    def _tile(self, hidden: mx.array, wanted: _Wanted) -> _Tile:
        temperatures = mx.array(wanted.temperatures)
        shaped = [self._capped(hidden, *span) / temperatures for span in self.pieces]
        maxima = mx.concatenate([_per_tile(part, mx.max) for part in shaped])  # [T, R]
        highest = mx.max(maxima, axis=0)
        masses: list[mx.array] = []
        weighted: list[mx.array] = []
        soft = _SoftEmbedding(self.model, wanted.conditioning, highest)
        for part, (start, stop) in zip(shaped, self.pieces, strict=True):
            relative = part - highest
            mass = mx.exp(relative)
            masses.append(_per_tile(mass, mx.sum))
            weighted.append(_per_tile(mass * relative, mx.sum))
            soft.add(part, mass, start, stop)
        sums = [maxima, mx.concatenate(masses), mx.concatenate(weighted)]
        target = self._at(shaped, wanted.targets)
        embedding = soft.result()
        mx.eval(sums, target, shaped, [] if embedding is None else embedding)
        per_tile = [np.array(array).T for array in sums]
        return self._finish(shaped, *per_tile, np.array(target), wanted, embedding)

    def _finish(
        self,
        shaped: list[mx.array],
        maxima: Float32,  # [R, T]
        mass: Float32,
        weighted: Float32,
        target: Float32,
        wanted: _Wanted,
        soft: mx.array | None,
    ) -> _Tile:
        """The host's part, in float64 from the sums over 1,024 tokens."""
        highest = maxima.max(axis=-1).astype(np.float64)
        total = mass.sum(axis=-1, dtype=np.float64)
        log_total = highest + np.log(total)
        entropy = np.log(total) - weighted.sum(axis=-1, dtype=np.float64) / total
        chosen, left = select_tile(mass, wanted.uniforms)
        order = np.argsort(-maxima, axis=-1, kind="stable")
        per_row = [
            [int(tile), *order[row, : max(1, int(k))].tolist()]
            for row, (tile, k) in enumerate(zip(chosen, wanted.top_k, strict=True))
        ]
        inside = self._gather(shaped, per_row)
        candidate = np.empty(len(per_row), np.int32)
        argmax = np.empty(len(per_row), np.int32)
        values = np.empty((2, len(per_row)), np.float64)
        top: list[tuple[Int32, Float32]] = []
        for row, tiles in enumerate(per_row):
            own = inside[row][0]
            relative = np.exp(own - np.float32(highest[row])).astype(np.float32)
            offset = int(select_in_tile(relative[None], left[row : row + 1])[0])
            candidate[row] = tiles[0] * CDF_TILE + offset
            values[0, row] = own[offset]
            tokens, logits = _most_probable(inside[row][1:], tiles[1:], max(1, int(wanted.top_k[row])))
            argmax[row] = tokens[0]
            values[1, row] = logits[0]
            top.append((tokens, (logits - log_total[row]).astype(np.float32)))
        return _Tile(
            argmax=argmax,
            candidate=candidate,
            entropy=entropy.astype(np.float32),
            argmax_logprob=(values[1] - log_total).astype(np.float32),
            candidate_logprob=(values[0] - log_total).astype(np.float32),
            target_logprob=(target - log_total).astype(np.float32),
            top_tokens=top,
            soft=soft,
        )

    def _at(self, shaped: list[mx.array], targets: Int32) -> mx.array:
        """The shaped logit of one token a row [R]; token 0 where none is wanted."""
        rows = mx.arange(len(targets))
        result = mx.zeros(len(targets))
        if (targets < 0).all():
            return result
        ids = mx.array(np.maximum(targets, 0))
        for part, (start, stop) in zip(shaped, self.pieces, strict=True):
            here = (ids >= start) & (ids < stop)
            value = part[mx.clip(ids - start, 0, stop - start - 1), rows]
            result = mx.where(here, value, result)
        return result

    def _gather(self, shaped: list[mx.array], tiles: list[list[int]]) -> list[list[Float32]]:
        """The shaped logits of some 1,024-token tiles of each row, -inf past the vocabulary."""
        found: list[list[Float32]] = [[np.empty(0, np.float32)] * len(own) for own in tiles]
        jobs: list[tuple[int, list[tuple[int, int, int]]]] = []
        for number, (start, stop) in enumerate(self.pieces):
            here = [
                (row, slot, tile * CDF_TILE - start)
                for row, own in enumerate(tiles)
                for slot, tile in enumerate(own)
                if start <= tile * CDF_TILE < stop
            ]
            if here:
                jobs.append((number, here))
        taken: list[mx.array] = []
        for number, here in jobs:
            part = shaped[number]
            firsts = np.array([first for _, _, first in here])[:, None]
            ids = mx.array(np.minimum(firsts + np.arange(CDF_TILE), part.shape[0] - 1))
            taken.append(part[ids, mx.array([row for row, _, _ in here])[:, None]])
        mx.eval(taken)
        for (number, here), values in zip(jobs, taken, strict=True):
            length = shaped[number].shape[0]
            for (row, slot, first), own in zip(here, np.array(values), strict=True):
                own[max(0, length - first) :] = -np.inf
                found[row][slot] = own
        return found


class _SoftEmbedding:
    """Adds up `softmax(shaped) @ E`, a piece of the vocabulary at a time, for the rows that want it.

    The reference rounds the shaped logits to the embedding's dtype before its softmax, which
    matters (a bfloat16 of 50 is off by up to 0.125), and so do we; in float32 the statistics' own
    masses serve. The sum is divided by the total at the end rather than every probability.
    """

    def __init__(
        self,
        model: MlxModel,
        wanted: np.ndarray[tuple[int], np.dtype[np.bool_]],
        highest: mx.array,
    ) -> None:
        self.model = model
        self.dtype = model.weights.dtype
        self.none = not wanted.any()
        self.rows = None if wanted.all() else mx.array(np.flatnonzero(wanted))
        self.highest = self._own(highest).astype(self.dtype).astype(mx.float32)
        self.sum: mx.array | None = None
        self.total: mx.array | None = None

    def add(self, shaped: mx.array, mass: mx.array, start: int, stop: int) -> None:
        if self.none:
            return
        if self.dtype == mx.float32:
            own = self._own(mass)
        else:
            own = mx.exp(self._own(shaped).astype(self.dtype).astype(mx.float32) - self.highest)
        mixed = self.model.weights.embedding.mix_piece(own, start, stop)
        total = mx.sum(own, axis=0)
        self.sum = mixed if self.sum is None else self.sum + mixed
        self.total = total if self.total is None else self.total + total

    def result(self) -> mx.array | None:
        if self.sum is None or self.total is None:
            return None
        return self.model.soft_embedding(self.sum / self.total[:, None])

    def _own(self, array: mx.array) -> mx.array:
        return array if self.rows is None else array[..., self.rows]


def _per_tile(part: mx.array, reduce: object) -> mx.array:
    """Reduces [n, R] over every 1,024 tokens, the last ones fewer: [ceil(n / 1024), R]."""
    assert callable(reduce)
    whole = part.shape[0] // CDF_TILE * CDF_TILE
    results: list[mx.array] = []
    if whole:
        results.append(reduce(part[:whole].reshape(-1, CDF_TILE, part.shape[1]), axis=1))
    if whole < part.shape[0]:
        results.append(reduce(part[whole:], axis=0, keepdims=True))
    return results[0] if len(results) == 1 else mx.concatenate(results)


def _most_probable(
    inside: list[Float32], tiles: list[int], count: int
) -> tuple[Int32, Float32]:
    """The `count` highest of some tiles of a row, ties to the lowest token."""
    by_number = sorted(zip(tiles, inside, strict=True), key=lambda pair: pair[0])
    tokens = np.concatenate([tile * CDF_TILE + np.arange(CDF_TILE) for tile, _ in by_number])
    values = np.concatenate([values for _, values in by_number])
    best = np.argsort(-values, kind="stable")[:count]
    return tokens[best].astype(np.int32), values[best]


def _distribute(
    tiles: list[_Tile], works: Sequence[Work], counts: Sequence[int], wanted: _Wanted
) -> list[Statistics]:
    """Cuts the packed results at the borders of the work items."""
    softs = [tile.soft for tile in tiles if tile.soft is not None]
    soft = None if not softs else softs[0] if len(softs) == 1 else mx.concatenate(softs)
    top = [pair for tile in tiles for pair in tile.top_tokens]
    results: list[Statistics] = []
    row = soft_row = 0
    for work, count in zip(works, counts, strict=True):
        span = slice(row, row + count)
        row += count
        conditioning = None
        if _wants_conditioning(work) and soft is not None:
            conditioning = soft[soft_row : soft_row + count]
            soft_row += count
            mx.eval(conditioning)
        own_top = top[span] if work.top_k else []
        results.append(
            Statistics(
                argmax=_joined([tile.argmax for tile in tiles], span),
                candidate=_joined([tile.candidate for tile in tiles], span),
                entropy=_joined([tile.entropy for tile in tiles], span),
                argmax_logprob=_joined([tile.argmax_logprob for tile in tiles], span),
                candidate_logprob=_joined([tile.candidate_logprob for tile in tiles], span),
                target_logprob=None
                if _targets(work) is None
                else _joined([tile.target_logprob for tile in tiles], span),
                top_tokens=np.stack([tokens for tokens, _ in own_top]) if own_top else None,
                top_logprobs=np.stack([values for _, values in own_top]) if own_top else None,
                conditioning=conditioning,
            )
        )
    return results


def _joined(parts: list[np.ndarray], span: slice) -> np.ndarray:
    return np.concatenate(parts)[span]


def _spread(values: Sequence[float], counts: Sequence[int], dtype: type) -> np.ndarray:
    return np.repeat(np.asarray(values, dtype), counts)


def _targets(work: Work) -> Int32 | None:
    return None if isinstance(work, Denoise) else work.targets


def _wants_conditioning(work: Work) -> bool:
    return isinstance(work, Denoise) and work.want_conditioning
