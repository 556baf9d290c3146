"""The forward passes, encoder and decoder, over one copy of the weights.

    rows of a batch     [ row 0 tokens | row 1 tokens | ... ]      packed, no padding
    dense parts         one product over all packed tokens
    attention           row by row, over the row's own tokens and the prefix it continues
    positions           a row's tokens continue its prefix, each row from its own length

Who sees whom:

    encoder, full       itself and every token before it
    encoder, sliding    itself and the `window - 1` tokens before it
    decoder, full       the whole prefix and the whole canvas
    decoder, sliding    the last `window - 1` tokens of the prefix, the same for every position, and
                        the whole canvas

The encoder's last layer computes keys and values for every token and the rest only for tokens whose
prediction is read. Source: transformers 5.24, `modeling_diffusion_gemma.py`.

Not here: logits (`statistics.py`), splitting a prompt into chunks, threads (`backend.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from dgemma.backend import Int32
from dgemma.config import LayerConfig
from mlx_dgemma.attention import Segment, attend, tile_length
from mlx_dgemma.cache import LayerStore, MlxPrefix
from mlx_dgemma.layers import Rotation, rms_norm
from mlx_dgemma.products import pieces, run
from mlx_dgemma.weights import LayerWeights, Weights

Observer = Callable[[str, mx.array], None]
"""Called with a name and a value at each stage of a pass; for diagnosis."""


@dataclass(frozen=True, eq=False)
class Row:
    """Tokens of one request in a pass, behind a prefix that does not hold them yet."""

    prefix: MlxPrefix
    tokens: Int32  # [N]
    read: Int32 | None = None
    """Offsets whose output is wanted, ascending; None: all of them."""


@dataclass(eq=False)
class SavedWork:
    """What was left out because no result depends on it, in rows (tokens), since loading."""

    last_layer_rows: int = 0
    """Tokens for which the encoder's last layer stopped at keys and values."""
    signal_rows: int = 0
    """Canvas tokens whose conditioning was an exact zero, so that its block was skipped."""
    head_rows: int = 0
    """Encoded tokens whose logits nobody reads."""
    soft_embedding_rows: int = 0
    """Canvas tokens whose soft embedding was not wanted."""


@dataclass(frozen=True, eq=False)
class _Packed:
    """The rows of one pass, with what all layers share."""

    rows: Sequence[Row]
    spans: list[tuple[int, int]]
    positions: mx.array  # [sum N]
    causal: bool
    rotations: dict[tuple[float, int, int], Rotation] = field(
        default_factory=dict[tuple[float, int, int], Rotation]
    )
    masks: dict[tuple[int, bool], tuple[mx.array, mx.array | None]] = field(
        default_factory=dict[tuple[int, bool], "tuple[mx.array, mx.array | None]"]
    )

    @classmethod
    def of(cls, rows: Sequence[Row], *, causal: bool) -> _Packed:
        ends = np.cumsum([len(row.tokens) for row in rows]).tolist()
        spans = list(zip([0, *ends[:-1]], ends, strict=True))
        positions = np.concatenate(
            [np.arange(len(row.tokens)) + row.prefix.length for row in rows]
        ).astype(np.int32)
        return cls(rows, spans, mx.array(positions), causal)

    def rotation(self, layer: LayerConfig, dtype: mx.Dtype) -> Rotation:
        key = (layer.rope.theta, layer.rope.rotated_pairs, layer.head_dim)
        if key not in self.rotations:
            self.rotations[key] = Rotation.at(self.positions, layer, dtype)
        return self.rotations[key]


class MlxModel:
    """The network; every method must be called on the thread that loaded the weights."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.config = weights.config
        self.saved = SavedWork()
        # The reference rounds the embedding's scale to the dtype before multiplying.
        self._embed_scale = mx.array(self.config.hidden_size**0.5, dtype=weights.dtype)

    def encode(self, rows: Sequence[Row], observe: Observer | None = None) -> mx.array | None:
        """Runs the causal pass and appends to the prefixes.

        Returns the normed output [sum of R, D] of the tokens in `read`, None if there are none.
        """
        packed = _Packed.of(rows, causal=True)
        read = _read_positions(rows, packed.spans)
        total = packed.spans[-1][1]
        self.saved.last_layer_rows += total - len(read)
        self.saved.head_rows += total - len(read)
        hidden = self._embed(rows, observe)
        entries: list[list[tuple[mx.array, mx.array]]] = [[] for _ in rows]
        last = len(self.weights.layers) - 1
        output: mx.array | None = hidden
        for index, layer in enumerate(self.weights.layers):
            kept = read if index == last and len(read) < total else None
            assert output is not None
            output, own = self._layer(index, layer, output, packed, kept, layer.encoder_scalar)
            for entry, pair in zip(entries, own, strict=True):
                entry.append(pair)
            if observe is not None and output is not None:
                observe(self.layer_name(index), output)
        if output is not None:
            output = rms_norm(output, self.weights.final_norm, self.config.rms_norm_eps)
        # Evaluated before the prefix is written: a pending read of its buffers would force a copy.
        run(output, *[array for entry in entries for pair in entry for array in pair])
        for row, entry in zip(rows, entries, strict=True):
            row.prefix.append(entry)
        return output

    def denoise_hidden(
        self,
        rows: Sequence[Row],
        conditioning: Sequence[mx.array | None],
        observe: Observer | None = None,
    ) -> mx.array:
        """Runs the bidirectional pass; the normed output [sum of L, D]. Prefixes are only read."""
        packed = _Packed.of(rows, causal=False)
        hidden = self._conditioned(self._embed(rows, observe), packed, conditioning)
        if observe is not None:
            observe("the conditioned input", hidden)
        for index, layer in enumerate(self.weights.layers):
            output, _ = self._layer(index, layer, hidden, packed, None, layer.decoder_scalar)
            assert output is not None
            hidden = output
            if observe is not None:
                observe(self.layer_name(index), hidden)
        return rms_norm(hidden, self.weights.final_norm, self.config.rms_norm_eps)

    def layer_name(self, index: int) -> str:
        """What messages call a layer."""
        return f"layer {index} ({self.config.layers[index].kind})"

    def soft_embedding(self, mixed: mx.array) -> mx.array:
        """Rounds `softmax @ E` [N, D] and scales it as the reference does."""
        return mixed.astype(self.weights.dtype) * self._embed_scale

    def _embed(self, rows: Sequence[Row], observe: Observer | None) -> mx.array:
        tokens = np.concatenate([row.tokens for row in rows]).astype(np.int32)
        hidden = self.weights.embedding.rows(mx.array(tokens)) * self._embed_scale
        if observe is not None:
            for offset, token in enumerate(tokens.tolist()):
                observe(f"the embedding of token {token}", hidden[offset])
        return hidden

    def _conditioned(
        self, hidden: mx.array, packed: _Packed, conditioning: Sequence[mx.array | None]
    ) -> mx.array:
        """Adds the signal of the step before, then the norm that the decoder's input gets.

        Without conditioning the reference runs the block on zeros. It has no biases, so that its
        output is exactly zero: it is skipped, the norm is not.
        """
        given = [soft for soft in conditioning if soft is not None]
        eps = self.config.rms_norm_eps
        self.saved.signal_rows += hidden.shape[0] - sum(soft.shape[0] for soft in given)
        if given:
            soft = given[0] if len(given) == 1 else mx.concatenate(given)
            signal = self.weights.signal(rms_norm(soft, self.weights.signal_norm, eps))
            parts: list[mx.array] = []
            used = 0
            for (start, stop), row_soft in zip(packed.spans, conditioning, strict=True):
                part = hidden[start:stop]
                if row_soft is not None:
                    part = part + signal[used : used + stop - start]
                    used += stop - start
                parts.append(part)
            hidden = parts[0] if len(parts) == 1 else mx.concatenate(parts)
        return rms_norm(hidden, None, eps)

    def _layer(
        self,
        index: int,
        layer: LayerWeights,
        hidden: mx.array,
        packed: _Packed,
        kept: list[int] | None,
        scalar: mx.array,
    ) -> tuple[mx.array | None, list[tuple[mx.array, mx.array]]]:
        """One layer: the output, of the `kept` tokens alone if given, and each row's K and V."""
        eps = self.config.rms_norm_eps
        normed = rms_norm(hidden, layer.input_norm, eps)
        rotation = packed.rotation(layer.config, hidden.dtype)
        entries = self._keys_and_values(layer, normed, rotation, packed.spans)
        if kept is not None:
            if not kept:
                return None, entries
            chosen = mx.array(kept)
            hidden, normed, rotation = hidden[chosen], normed[chosen], rotation.rows(chosen)
        attention = self._attention(index, layer, normed, rotation, packed, kept, entries)
        residual = hidden + rms_norm(attention, layer.post_attention_norm, eps)
        dense = rms_norm(
            layer.mlp(rms_norm(residual, layer.pre_mlp_norm, eps)), layer.post_mlp_norm, eps
        )
        chosen_experts, weights = layer.router(residual)
        mixture = layer.experts(
            rms_norm(residual, layer.pre_experts_norm, eps), chosen_experts, weights
        )
        combined = dense + rms_norm(mixture, layer.post_experts_norm, eps)
        combined = rms_norm(combined, layer.post_feedforward_norm, eps)
        return (residual + combined) * scalar, entries

    def _keys_and_values(
        self,
        layer: LayerWeights,
        normed: mx.array,
        rotation: Rotation,
        spans: list[tuple[int, int]],
    ) -> list[tuple[mx.array, mx.array]]:
        eps = self.config.rms_norm_eps
        shape = (-1, layer.config.num_key_value_heads, layer.config.head_dim)
        raw = mx.reshape(layer.key.apply(normed), shape)
        raw_values = raw if layer.value is None else mx.reshape(layer.value.apply(normed), shape)
        keys = rotation(rms_norm(raw, layer.key_norm, eps)).swapaxes(0, 1)
        values = rms_norm(raw_values, None, eps).swapaxes(0, 1)
        return [
            (mx.contiguous(keys[:, start:stop]), mx.contiguous(values[:, start:stop]))
            for start, stop in spans
        ]

    def _attention(
        self,
        index: int,
        layer: LayerWeights,
        normed: mx.array,
        rotation: Rotation,
        packed: _Packed,
        kept: list[int] | None,
        entries: list[tuple[mx.array, mx.array]],
    ) -> mx.array:
        config = layer.config
        shape = (-1, self.config.num_attention_heads, config.head_dim)
        queries = mx.reshape(layer.query.apply(normed), shape)
        queries = rotation(rms_norm(queries, layer.query_norm, self.config.rms_norm_eps))
        outputs: list[mx.array] = []
        used = 0
        for number, (row, (start, stop)) in enumerate(zip(packed.rows, packed.spans, strict=True)):
            offsets = None
            count = stop - start
            if kept is not None:
                offsets = [position - start for position in kept if start <= position < stop]
                count = len(offsets)
                if count == 0:
                    continue
            own_queries = queries[used : used + count]
            used += count
            segments = self._segments(index, config, row, number, packed, offsets, entries[number])
            outputs.append(attend(own_queries, segments, widen=not self.weights.native))
        joined = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
        return layer.output.apply(joined)

    def _segments(
        self,
        index: int,
        layer: LayerConfig,
        row: Row,
        number: int,
        packed: _Packed,
        offsets: list[int] | None,
        own: tuple[mx.array, mx.array],
    ) -> list[Segment]:
        """The row's own tokens first, then what its queries see of the prefix, in tiles."""
        length = row.prefix.length
        first = max(0, length - self.config.sliding_window + 1) if layer.is_sliding else 0
        own_mask = prefix_mask = None
        if packed.causal:
            own_mask, prefix_mask = self._masks(layer.is_sliding, first, number, packed)
            if offsets is not None:
                chosen = mx.array(offsets)
                own_mask = own_mask[:, chosen]
                prefix_mask = None if prefix_mask is None else prefix_mask[:, chosen]
        segments = [Segment(*own, visible=own_mask)]
        store: LayerStore = row.prefix.layers[index]
        queries = len(row.tokens) if offsets is None else len(offsets)
        tile = tile_length(self.config.num_attention_heads, queries)
        for start, stop in pieces(length - first, tile):
            visible = None if prefix_mask is None else prefix_mask[start:stop]
            segments.append(Segment(*store.view(first + start, first + stop), visible=visible))
        return segments

    def _masks(
        self, sliding: bool, first: int, number: int, packed: _Packed
    ) -> tuple[mx.array, mx.array | None]:
        """Which of a row's own N tokens see each other, and which see the prefix from `first` on.

        Bool [N, N] and [S, N]; one pair for each layer kind. The second is None where everybody
        sees all of it: in full layers, and in sliding ones while the window holds everything.
        """
        key = (number, sliding)
        if key not in packed.masks:
            row = packed.rows[number]
            length, window = row.prefix.length, self.config.sliding_window
            queries = mx.arange(length, length + len(row.tokens))
            own = queries[:, None]
            own_mask = own <= queries
            prefix_mask = None
            if sliding:
                own_mask = own_mask & (own > queries - window)
                if first <= length + len(row.tokens) - 1 - window:
                    prefix_mask = mx.arange(first, length)[:, None] > queries - window
            packed.masks[key] = own_mask, prefix_mask
        return packed.masks[key]


def _read_positions(rows: Sequence[Row], spans: list[tuple[int, int]]) -> list[int]:
    positions: list[int] = []
    for row, (start, stop) in zip(rows, spans, strict=True):
        offsets = range(stop - start) if row.read is None else row.read.tolist()
        positions.extend(start + offset for offset in offsets)
    return positions
