"""How the weights of an MLX checkpoint are packed, module by module.

    "quantization": {"group_size": 64, "bits": 4, "mode": "affine",      the default
                     "model.decoder.layers.0.router.proj": false,        stays dense
                     "model.decoder.embed_tokens": {"group_size": 64, "bits": 8}}

A quantized matrix [..., out, in] is stored as `weight` (uint32 words, in * bits / 32 a row),
`scales` (in / group_size a row) and, in affine mode only, `biases` of the scales' shape. As in
MLX, an override inherits nothing from the default: what it leaves out takes its mode's default.

Not here: the arithmetic of (de)quantization (`reference.py` and the backends), other quantizers'
layouts, which are recognised only to say so.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, cast, get_args

from dgemma.errors import CheckpointError, ConfigError, DgemmaWarning
from dgemma.json_reader import JsonReader, require
from dgemma.safetensors_file import show
from dgemma.tensors import Shape, place_module

Mode = Literal["affine", "mxfp4", "mxfp8", "nvfp4"]
MODES: tuple[Mode, ...] = get_args(Mode)

# Mode -> legal group sizes and bits, the default first. Source: mlx.core.quantize of MLX 0.32.
_LEGAL: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "affine": ((64, 32, 128), (4, 2, 3, 5, 6, 8)),
    "mxfp4": ((32,), (4,)),
    "mxfp8": ((32,), (8,)),
    "nvfp4": ((16,), (4,)),
}
_SETTINGS = ("group_size", "bits", "mode")
# Written beside the settings by some tools; they change nothing about the stored bytes.
_HARMLESS = frozenset({"quant_method", "quantize_input", "linear_class", "quantization_mode"})
_FOREIGN_NAMES = {
    "compressed-tensors": "compressed-tensors",
    "modelopt": "ModelOpt",
    "bitsandbytes": "bitsandbytes",
    "gptq": "GPTQ",
    "awq": "AWQ",
    "fp8": "FP8",
    "gguf": "GGUF",
}


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """The packing of one module: `bits` a weight, one scale for `group_size` weights of a row."""

    group_size: int
    bits: int
    mode: Mode = "affine"

    def __post_init__(self) -> None:
        if self.mode not in _LEGAL:
            raise ConfigError(
                f"quantization mode {self.mode!r} is unknown; known are {', '.join(MODES)}"
            )
        groups, bits = _LEGAL[self.mode]
        for name, value, legal in (
            ("group_size", self.group_size, groups),
            ("bits", self.bits, bits),
        ):
            allowed = ", ".join(map(str, sorted(legal)))
            require(value in legal, name, value, f"{allowed} in mode {self.mode}")

    @property
    def has_biases(self) -> bool:
        """Only affine groups have an offset."""
        return self.mode == "affine"

    @property
    def bits_per_weight(self) -> float:
        """Stored bits a weight with its share of the scales (16-bit affine, 8-bit otherwise)."""
        return self.bits + (32 if self.has_biases else 8) / self.group_size

    def packed_shape(self, shape: Shape) -> Shape:
        """Shape of the packed `weight` (uint32 words) of a matrix [..., out, in]."""
        return (*shape[:-1], shape[-1] * self.bits // 32)

    def scales_shape(self, shape: Shape) -> Shape:
        """Shape of `scales`, and of `biases` where there are any, of a matrix [..., out, in]."""
        return (*shape[:-1], shape[-1] // self.group_size)

    def fits(self, shape: Shape) -> bool:
        """Whether rows of this length can be packed: whole groups, whole words."""
        return shape[-1] % self.group_size == 0 and shape[-1] * self.bits % 32 == 0


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """What config.json says about packing; which modules really are packed, their tensors say."""

    default: Quantized | None = None
    overrides: Mapping[str, Quantized | None] = field(
        default_factory=lambda: MappingProxyType(cast("dict[str, Quantized | None]", {}))
    )
    """Canonical module path -> its packing; None keeps the module dense."""

    @classmethod
    def from_config(cls, raw: Mapping[str, Any]) -> Quantization:
        """Reads `quantization`, or `quantization_config`, of a config.json.

        Raises `ConfigError` for values no mode allows and `CheckpointError` for the formats of
        other quantizers.
        """
        table = _find_table(raw)
        if table is None:
            return cls()
        settings = {key: table[key] for key in _SETTINGS if table.get(key) is not None}
        default = _read_spec(settings, "quantization") if settings else None
        overrides: dict[str, Quantized | None] = {}
        odd: list[str] = []
        for path, value in table.items():
            if path in _SETTINGS or path in _HARMLESS or value is None:
                continue
            module = place_module(path)
            if isinstance(value, bool):
                spec = default if value else None
            elif isinstance(value, Mapping):
                spec = _read_spec(cast("Mapping[str, Any]", value), f"quantization of {show(path)}")
            else:
                odd.append(path)
                continue
            if overrides.setdefault(module, spec) != spec:
                raise ConfigError(f"config.json gives {show(module)} two different quantizations")
        if odd:
            _warn(f"quantization has {len(odd)} unknown setting(s), ignored: {_names(odd)}")
        return cls(default=default, overrides=MappingProxyType(overrides))

    @property
    def is_empty(self) -> bool:
        return self.default is None and not any(self.overrides.values())

    def of(self, module: str) -> Quantized | None:
        """The packing meant for a module, in any spelling of its path; None: dense."""
        path = place_module(module)
        return self.overrides.get(path, self.default)

    def warn_unmatched(self, modules: Iterable[str]) -> None:
        """Warns once about overrides that name none of the canonical `modules`."""
        known = set(modules)
        unmatched = [path for path in self.overrides if path not in known]
        if unmatched:
            _warn(
                f"quantization has {len(unmatched)} override(s) that match no module, ignored: "
                f"{_names(unmatched)}"
            )


def _find_table(raw: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """MLX's settings under either key; raises for another tool's."""
    text = raw.get("text_config")
    places = [raw, cast("Mapping[str, Any]", text)] if isinstance(text, Mapping) else [raw]
    for place in places:
        for key in ("quantization", "quantization_config"):
            value = place.get(key)
            if value is None:
                continue
            if not isinstance(value, Mapping):
                raise ConfigError(f"config.json has {key} {value!r}, but it must be an object")
            table = cast("Mapping[str, Any]", value)
            _reject_foreign(table)
            return table
    return None


def _reject_foreign(table: Mapping[str, Any]) -> None:
    method = table.get("quant_method")
    if method is None and "bits" in table:
        return
    if method is None and ("quant_algo" in table or "config_groups" in table):
        method = "modelopt" if "quant_algo" in table else "compressed-tensors"
    if isinstance(method, str) and not method.startswith("mlx"):
        raise unsupported_format(_FOREIGN_NAMES.get(method.split("_")[0].lower(), method))


def unsupported_format(name: str) -> CheckpointError:
    """The error for a checkpoint in a format that is recognised but not read."""
    return CheckpointError(
        f"the checkpoint is in {name} format, which this version cannot read; use the bf16 release "
        "or an MLX-quantized one (`dgemma convert` is to read it in a later version)"
    )


def _read_spec(raw: Mapping[str, Any], where: str) -> Quantized:
    reader = JsonReader(raw, where)
    mode = reader.value("mode")
    mode = "affine" if mode is None else mode
    if not isinstance(mode, str) or mode not in _LEGAL:
        raise ConfigError(f"{where} has mode {mode!r}; known are {', '.join(MODES)}")
    groups, bits = _LEGAL[mode]
    group_size = reader.integer("group_size", groups[0])
    width = reader.integer("bits", bits[0])
    try:
        return Quantized(group_size=group_size, bits=width, mode=cast(Mode, mode))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _names(names: list[str]) -> str:
    return ", ".join(show(name) for name in sorted(names)[:3]) + (", ..." if len(names) > 3 else "")


def _warn(message: str) -> None:
    warnings.warn(message, DgemmaWarning, stacklevel=3)
