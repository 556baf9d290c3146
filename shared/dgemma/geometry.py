"""The geometry of each layer: kind, heads, rotary embedding, in every spelling of a config.json.

    sliding   head_dim, num_key_value_heads
    full      global_head_dim, num_global_key_value_heads     as released, or
    layer N   per_layer_config: {"N": {"head_dim": ...}}       as transformers saves it

Not here: the sizes all layers share (`config.py`), typed access to JSON (`json_reader.py`).
Source: transformers 5.24, `models/diffusion_gemma/configuration_diffusion_gemma.py`,
`modeling_rope_utils.py` and `integrations/heterogeneity`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from dgemma.errors import ConfigError, DgemmaWarning
from dgemma.json_reader import JsonReader, require

LayerKind = Literal["sliding_attention", "full_attention"]
SLIDING: LayerKind = "sliding_attention"
FULL: LayerKind = "full_attention"

SLIDING_PATTERN = 6
"""Without `layer_types`, every sixth layer is a full one."""
_MOST_LAYERS = 1000

_PER_LAYER = ("head_dim", "num_key_value_heads")

_DEFAULT_ROPE: dict[LayerKind, dict[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding of one layer kind, split-half.

    Lanes `i` and `i + head_dim / 2` form pair `i`. The first `rotated_pairs` pairs turn by
    `position * theta ** (-2 i / head_dim)`; the rest stand still (frequency 0).
    """

    theta: float
    rotated_pairs: int

    def inverse_frequencies(self, head_dim: int) -> list[float]:
        """Frequencies of all `head_dim / 2` pairs; the exponent's denominator is `head_dim`."""
        return [
            self.theta ** (-2.0 * i / head_dim) if i < self.rotated_pairs else 0.0
            for i in range(head_dim // 2)
        ]


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """Geometry of one layer. Full layers have no `v_proj`: V comes from the raw `k_proj` output."""

    kind: LayerKind
    head_dim: int
    num_key_value_heads: int
    rope: Rope

    @property
    def is_sliding(self) -> bool:
        return self.kind == SLIDING


def read_layers(text: JsonReader) -> tuple[LayerConfig, ...]:
    """The per-layer geometry, from `per_layer_config` or from `global_head_dim` and its kin."""
    kinds = _read_layer_kinds(text)
    head_dim = text.integer("head_dim", 256)
    kv_heads = text.integer("num_key_value_heads", 4)
    global_head_dim = text.integer("global_head_dim", 512)
    global_kv_heads = text.integer("num_global_key_value_heads", kv_heads)
    overrides = _read_overrides(text, len(kinds))
    ropes = _read_ropes(text)
    layers: list[LayerConfig] = []
    for index, kind in enumerate(kinds):
        dim, heads = head_dim, kv_heads
        if overrides is not None:
            own = overrides.get(index, {})
            dim, heads = own.get("head_dim", dim), own.get("num_key_value_heads", heads)
        elif kind == FULL:
            dim, heads = global_head_dim, global_kv_heads
        layers.append(
            LayerConfig(
                kind=kind, head_dim=dim, num_key_value_heads=heads, rope=_rope(ropes[kind], dim)
            )
        )
    return tuple(layers)


def _read_overrides(text: JsonReader, layers: int) -> dict[int, dict[str, int]] | None:
    """Layer -> what differs there; None where the other spelling is used.

    transformers pads the numbers with zeros to equal width ("05"), and takes a null for "none".
    """
    table = text.mapping("per_layer_config")
    if table is None:
        return None if "per_layer_config" not in text.raw else {}
    overrides: dict[int, dict[str, int]] = {}
    for key in table:
        where = f"per_layer_config.{key}"
        reader = JsonReader(table, "per_layer_config")
        own = JsonReader(reader.mapping(key) or {}, where)
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < layers):
            raise ConfigError(f"{where}: {key!r} is no layer; they are 0 to {layers - 1}")
        if int(key) in overrides:
            raise ConfigError(f"{where}: layer {int(key)} is described twice")
        values = {name: own.optional_integer(name) for name in _PER_LAYER}
        if unknown := own.unknown(frozenset()):
            raise ConfigError(f"{where}.{unknown[0]} is not supported; known are {_PER_LAYER}")
        overrides[int(key)] = {name: v for name, v in values.items() if v is not None}
    return overrides


def _read_layer_kinds(text: JsonReader) -> list[LayerKind]:
    count = text.integer("num_hidden_layers", 30)
    require(count <= _MOST_LAYERS, "num_hidden_layers", count, f"at most {_MOST_LAYERS}")
    raw = text.value("layer_types")
    if raw is None:
        kinds: list[Any] = [
            FULL if (i + 1) % SLIDING_PATTERN == 0 else SLIDING for i in range(count)
        ]
    elif isinstance(raw, list):
        kinds = [*cast("list[Any]", raw)]
    else:
        raise ConfigError("text_config.layer_types must be a list with one kind for each layer")
    if len(kinds) != count:
        raise ConfigError(f"layer_types names {len(kinds)} layers, num_hidden_layers says {count}")
    for index, kind in enumerate(kinds):
        if kind not in (SLIDING, FULL):
            raise ConfigError(f"layer_types[{index}] is {kind!r}; known are {SLIDING} and {FULL}")
    if kinds and kinds[-1] != FULL:
        if raw is not None:
            warnings.warn(
                f"the last layer is declared {kinds[-1]}; the model's last layer is always "
                f"{FULL}, so it is read as that",
                DgemmaWarning,
                stacklevel=2,
            )
        kinds[-1] = FULL
    return kinds


def _read_ropes(text: JsonReader) -> dict[LayerKind, Mapping[str, Any]]:
    table = text.mapping("rope_parameters")
    if table is None:
        return {**_DEFAULT_ROPE}
    ropes: dict[LayerKind, Mapping[str, Any]] = {}
    for kind in (SLIDING, FULL):
        entry = table.get(kind)
        if not isinstance(entry, Mapping):
            raise ConfigError(
                f"rope_parameters lacks {kind!r}; it must hold one object for each of "
                f"{SLIDING} and {FULL}"
            )
        ropes[kind] = cast(Mapping[str, Any], entry)
    return ropes


def _rope(raw: Mapping[str, Any], head_dim: int) -> Rope:
    reader = JsonReader(raw, "rope_parameters")
    kind = reader.value("rope_type") or "default"
    theta = reader.number("rope_theta", 1e4)
    factor = reader.number("partial_rotary_factor", 1.0)
    require(theta > 0, "rope_theta", theta, "above 0")
    require(0 < factor <= 1, "partial_rotary_factor", factor, "above 0 and at most 1")
    scaling = reader.number("factor", 1.0)
    require(scaling == 1, "rope_parameters.factor", scaling, "1; scaled positions are unknown here")
    if kind == "default":
        if factor != 1.0:
            raise ConfigError("partial_rotary_factor needs rope_type 'proportional'")
        return Rope(theta=theta, rotated_pairs=head_dim // 2)
    if kind == "proportional":
        return Rope(theta=theta, rotated_pairs=int(factor * head_dim) // 2)
    raise ConfigError(f"rope_type {kind!r} is unknown; known are 'default' and 'proportional'")
