"""From hidden states to `Statistics`, a tile of rows at a time, without keeping logits.

    tile of rows    as many as fit `logits_tile_bytes` of float32 logits
      pieces        the vocabulary in ranges: product, softcap, temperature -> shaped logits
                    per 1,024 tokens: highest value, mass, mass-weighted logit
                    while the piece is at hand: its share of the next step's soft embedding
      host          float64: total, entropy, the 1,024-token tile of the inverse CDF
      gather        the few 1,024-token tiles that hold argmax, candidate and top-k; the rest there

Nothing of the size of a tile's logits exists but the shaped logits themselves; two host syncs a
tile, and one is finished before the next begins. Arrays lie [vocabulary, rows], as the product of a
piece of the embedding with the hidden states gives them.

The k most probable tokens lie in the k 1,024-token tiles with the highest maxima (ties by number):
whatever lies in another is preceded by k tokens. So top-k, and argmax as top-1, is exact, ties to
the lowest id, without sorting a vocabulary.

Source of the quantities: `dgemma.reference`. Not here: the soft embedding's way into the next step
(`model.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from dgemma.backend import Denoise, Float32, Float64, Int32, Statistics, Work
from dgemma.reference import CDF_TILE, select_in_tile, select_tile
from mlx_dgemma.model import MlxModel
from mlx_dgemma.products import begin, pieces, run

DEFAULT_TILE_BYTES = 64 << 20
PIECES_PER_TILE = 16
"""Passing values of a piece are this much smaller than a tile, and several exist at once."""

_GROUP = 32

Scalar = TypeVar("Scalar", bound=np.generic)
IntArray = NDArray[np.integer[Any]]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class _Wanted:
    """What is asked of R packed rows, one entry a row."""

    temperatures: Float32
    uniforms: Float64
    targets: Int32  # -1: none
    top_k: Int32
    conditioning: Flags

    @classmethod
    def of(cls, works: Sequence[Work], counts: Sequence[int]) -> _Wanted:
        uniforms: list[Float64] = []
        targets: list[Int32] = []
        for work, count in zip(works, counts, strict=True):
            own, given = _targets(work), work.uniforms
            uniforms.append(np.full(count, 0.5) if given is None else given)
            targets.append(np.full(count, -1, np.int32) if own is None else own)
        return cls(
            temperatures=np.repeat(np.array([w.temperature for w in works], np.float32), counts),
            uniforms=np.concatenate(uniforms).astype(np.float64),
            targets=np.concatenate(targets).astype(np.int32),
            top_k=np.repeat(np.array([w.top_k for w in works], np.int32), counts),
            conditioning=np.repeat([_wants_conditioning(w) for w in works], counts),
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
    top: list[tuple[Int32, Float32]]  # [k] and [k] for each row
    soft: mx.array | None  # [wanted rows, D]


@dataclass(frozen=True, eq=False)
class _PerTile:
    """Of every 1,024 tokens: float32 [R, T]."""

    maximum: Float32
    """Highest shaped logit."""
    mass: Float32
    """Sum of exp(shaped - row's highest)."""
    weighted: Float32
    """Sum of that mass times (shaped - row's highest)."""


class Head:
    """The tied head with everything that is wanted of its logits."""

    def __init__(self, model: MlxModel, tile_bytes: int = DEFAULT_TILE_BYTES) -> None:
        self.model = model
        self.cap = model.config.final_logit_softcapping
        self.vocabulary = model.config.vocab_size
        self.tile_rows = max(1, tile_bytes // (4 * self.vocabulary))
        # A piece's passing values stay small beside the tile.
        fitting = tile_bytes // PIECES_PER_TILE // (4 * self.tile_rows)
        size = min(fitting, model.weights.embedding.rows_per_piece)
        self.pieces = pieces(self.vocabulary, max(1, size // CDF_TILE) * CDF_TILE)

    def logits(self, hidden: mx.array) -> mx.array:
        """Softcapped float32 logits [R, V], all at once: for comparisons, not for decoding."""
        parts = [self._capped(self._raw(hidden, start, stop)) for start, stop in self.pieces]
        return mx.concatenate(parts).T

    def raw_logits(self, hidden: mx.array) -> mx.array:
        """Float32 logits [R, V] before the softcap, which hides infinity; for diagnosis."""
        return mx.concatenate([self._raw(hidden, start, stop) for start, stop in self.pieces]).T

    def statistics(
        self, hidden: mx.array, works: Sequence[Work], counts: Sequence[int]
    ) -> list[Statistics]:
        """One result for each work item, whose `counts` rows lie packed in `hidden` [sum, D]."""
        wanted = _Wanted.of(works, counts)
        self.model.saved.soft_embedding_rows += sum(
            n
            for w, n in zip(works, counts, strict=True)
            if isinstance(w, Denoise) and not w.want_conditioning
        )
        tiles = [
            self._tile(hidden[start:stop], wanted.rows(start, stop))
            for start, stop in pieces(hidden.shape[0], self.tile_rows)
        ]
        return _distribute(tiles, works, counts, wanted)

    def _raw(self, hidden: mx.array, start: int, stop: int) -> mx.array:
        """Logits of a range of the vocabulary before the softcap: float32 [stop - start, R]."""
        return self.model.weights.embedding.apply_piece(hidden, start, stop).astype(mx.float32)

    def _capped(self, raw: mx.array) -> mx.array:
        return self.cap * mx.tanh(raw / self.cap)

    def _tile(self, hidden: mx.array, wanted: _Wanted) -> _Tile:
        temperatures = mx.array(wanted.temperatures)
        shaped: list[mx.array] = []
        peaks: list[mx.array] = []
        # The softcap makes 30 of infinity, which looks like any logit. It comes from a hidden state
        # or from the embedding; the latter shows in every row, so that one of them is enough.
        finite = mx.all(mx.isfinite(hidden), axis=-1)
        for span in self.pieces:
            raw = self._raw(hidden, *span)
            finite = finite & mx.all(mx.isfinite(raw[:, 0]))
            shaped.append(self._capped(raw) / temperatures)
            peaks.append(_per_tile(shaped[-1], mx.max))
            begin(shaped[-1], peaks[-1], finite)
        maxima = mx.concatenate(peaks)  # [T, R]
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
            # Begun piece by piece: MLX might otherwise hold the masses of all pieces at once.
            begin(masses[-1], weighted[-1], soft.sum, soft.total)
        sums = (maxima, mx.concatenate(masses), mx.concatenate(weighted))
        target = self._at(shaped, wanted.targets)
        embedding = soft.result()
        run(*sums, target, finite, *shaped, embedding)
        maximum, total, product = (_float32(array).T for array in sums)
        product[~np.array(finite)] = np.nan
        return self._finish(
            shaped, _PerTile(maximum, total, product), _float32(target), wanted, embedding
        )

    def _finish(
        self,
        shaped: list[mx.array],
        per_tile: _PerTile,
        target: Float32,
        wanted: _Wanted,
        soft: mx.array | None,
    ) -> _Tile:
        """The host's part, in float64 from the sums over 1,024 tokens."""
        rows = np.arange(len(target))
        highest = per_tile.maximum.max(axis=-1)
        total = per_tile.mass.sum(axis=-1, dtype=np.float64)
        log_total = highest.astype(np.float64) + np.log(total)
        entropy = np.log(total) - per_tile.weighted.sum(axis=-1, dtype=np.float64) / total
        drawn, left = select_tile(per_tile.mass, wanted.uniforms)
        best = per_tile.maximum.argmax(axis=-1)
        top_rows, top_tiles = _top_tiles(per_tile.maximum, wanted.top_k)
        inside = self._gather(
            shaped,
            np.concatenate([rows, rows, top_rows]),
            np.concatenate([drawn, best, top_tiles]),
        )
        of_candidate, of_argmax = inside[: len(rows)], inside[len(rows) : 2 * len(rows)]
        offset = select_in_tile(np.exp(of_candidate - highest[:, None]), left)
        top = _top_tokens(inside[2 * len(rows) :], top_rows, top_tiles, wanted.top_k)
        argmax = best * CDF_TILE + of_argmax.argmax(axis=-1)
        return _Tile(
            argmax=argmax.astype(np.int32),
            candidate=(drawn * CDF_TILE + offset).astype(np.int32),
            entropy=entropy.astype(np.float32),
            argmax_logprob=(highest - log_total).astype(np.float32),
            candidate_logprob=(of_candidate[rows, offset] - log_total).astype(np.float32),
            target_logprob=(target - log_total).astype(np.float32),
            top=[
                (tokens, (values - log_total[row]).astype(np.float32))
                for row, (tokens, values) in enumerate(top)
            ],
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

    def _gather(self, shaped: list[mx.array], rows: IntArray, tiles: IntArray) -> Float32:
        """The shaped logits [n, 1024] of tile `tiles[i]` of row `rows[i]`; -inf past the end."""
        inside = np.full((len(rows), CDF_TILE), -np.inf, np.float32)
        firsts = tiles.astype(np.int64) * CDF_TILE
        taken: list[tuple[IntArray, int, mx.array]] = []
        for part, (start, stop) in zip(shaped, self.pieces, strict=True):
            here = np.flatnonzero((firsts >= start) & (firsts < stop))
            # The vocabulary's last tile may be short; it is fetched apart from the whole ones.
            short = firsts[here] + CDF_TILE > stop
            for group, length in ((here[~short], CDF_TILE), (here[short], stop % CDF_TILE)):
                if len(group):
                    tokens = firsts[group][:, None] - start + np.arange(length)
                    found = part[mx.array(tokens), mx.array(rows[group][:, None])]
                    taken.append((group, length, found))
        run(*[found for _, _, found in taken])
        for group, length, found in taken:
            inside[group, :length] = _float32(found)
        return inside


class _SoftEmbedding:
    """Adds up `softmax(shaped) @ E` over pieces of the vocabulary, for the rows that want it.

    The reference rounds the shaped logits to the embedding's dtype before its softmax, which
    matters (a bfloat16 of 50 is off by up to 0.125), and so do we; in float32 the statistics' own
    masses serve. The sum is divided by the total at the end rather than every probability.
    """

    def __init__(
        self,
        model: MlxModel,
        wanted: Flags,
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


def _per_tile(part: mx.array, reduce: Callable[..., mx.array]) -> mx.array:
    """Reduces [n, R] over every 1,024 tokens, the last ones fewer: [ceil(n / 1024), R].

    In two rounds of 32: a float32 sum of 1,024 equal masses one by one is off by up to 4e-6.
    """
    whole = part.shape[0] // CDF_TILE * CDF_TILE
    results: list[mx.array] = []
    if whole:
        shape = (whole // CDF_TILE, _GROUP, CDF_TILE // _GROUP, part.shape[1])
        results.append(reduce(reduce(mx.reshape(part[:whole], shape), axis=2), axis=1))
    if whole < part.shape[0]:
        results.append(reduce(part[whole:], axis=0, keepdims=True))
    return results[0] if len(results) == 1 else mx.concatenate(results)


def _top_tiles(maximum: Float32, top_k: Int32) -> tuple[IntArray, IntArray]:
    """For every row that wants k tokens, the k tiles they lie in: rows and tiles, side by side."""
    rows: list[IntArray] = [np.empty(0, np.int64)]
    tiles: list[IntArray] = [np.empty(0, np.int64)]
    for row in np.flatnonzero(top_k):
        best = np.argsort(-maximum[row], kind="stable")[: top_k[row]]
        tiles.append(np.sort(best))
        rows.append(np.full(len(best), row))
    return np.concatenate(rows), np.concatenate(tiles)


def _top_tokens(
    inside: Float32, rows: IntArray, tiles: IntArray, top_k: Int32
) -> list[tuple[Int32, Float32]]:
    """The k most probable tokens of each row with their shaped logits, ties to the lowest token."""
    found: list[tuple[Int32, Float32]] = []
    for row, k in enumerate(top_k):
        mine = rows == row
        tokens = (tiles[mine][:, None] * CDF_TILE + np.arange(CDF_TILE)).ravel()
        values = inside[mine].ravel()
        best = np.argsort(-values, kind="stable")[:k]
        found.append((tokens[best].astype(np.int32), values[best]))
    return found


def _distribute(
    tiles: list[_Tile], works: Sequence[Work], counts: Sequence[int], wanted: _Wanted
) -> list[Statistics]:
    """Cuts the packed results at the borders of the work items."""
    softs = [tile.soft for tile in tiles if tile.soft is not None]
    soft = None if not softs else softs[0] if len(softs) == 1 else mx.concatenate(softs)
    top = [pair for tile in tiles for pair in tile.top]
    results: list[Statistics] = []
    row = soft_row = 0
    for work, count in zip(works, counts, strict=True):
        span = slice(row, row + count)
        row += count
        conditioning = None
        if _wants_conditioning(work) and soft is not None:
            conditioning = soft[soft_row : soft_row + count]
            soft_row += count
            run(conditioning)
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


def _joined(parts: list[NDArray[Scalar]], span: slice) -> NDArray[Scalar]:
    return np.concatenate(parts)[span]


def _float32(array: mx.array) -> Float32:
    return np.array(array, dtype=np.float32)


def _targets(work: Work) -> Int32 | None:
    return None if isinstance(work, Denoise) else work.targets


def _wants_conditioning(work: Work) -> bool:
    return isinstance(work, Denoise) and work.want_conditioning
