"""Arithmetic of the network by part, in floating-point operations a row (a token).

A multiply-add counts as two; norms, activations and attention scores are left out (attention
depends on the prefix). With these, rows a backend left out become operations left out.

Not here: bytes and dispatches, rooflines.
"""

from __future__ import annotations

from collections.abc import Mapping

from dgemma.config import LayerConfig, ModelConfig


def left_out_flops(config: ModelConfig, rows: Mapping[str, int]) -> dict[str, int]:
    """Operations behind `Backend.left_out`, by its kinds of rows."""
    each = {
        "last_layer_rows": layer_flops(config, config.layers[-1]) - key_value_flops(config),
        "signal_rows": 6 * config.hidden_size * config.intermediate_size,
        "head_rows": 2 * config.hidden_size * config.vocab_size,
        "soft_embedding_rows": 2 * config.hidden_size * config.vocab_size,
    }
    return {kind: count * each[kind] for kind, count in rows.items()}


def layer_flops(config: ModelConfig, layer: LayerConfig) -> int:
    """Products of one layer for one token, attention's own two left out."""
    hidden = config.hidden_size
    queries = config.num_attention_heads * layer.head_dim
    projections = 2 * queries * hidden + _key_value_columns(layer) * hidden
    dense = 3 * hidden * config.intermediate_size
    router = hidden * config.num_experts
    experts = config.top_k_experts * 3 * hidden * config.moe_intermediate_size
    return 2 * (projections + dense + router + experts)


def key_value_flops(config: ModelConfig) -> int:
    """Keys and values of the last layer for one token: what an encoded token cannot do without."""
    return 2 * _key_value_columns(config.layers[-1]) * config.hidden_size


def step_flops(config: ModelConfig) -> int:
    """One denoising step of a whole canvas with conditioning, attention's own products left out."""
    row = sum(layer_flops(config, layer) for layer in config.layers)
    row += 6 * config.hidden_size * config.intermediate_size  # the signal
    row += 4 * config.hidden_size * config.vocab_size  # the head and the soft embedding
    return row * config.canvas_length


def _key_value_columns(layer: LayerConfig) -> int:
    """Full layers use one projection for both."""
    return (2 if layer.is_sliding else 1) * layer.num_key_value_heads * layer.head_dim
