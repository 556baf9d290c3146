"""Opens a checkpoint folder: everything is checked before a single weight is read.

    folder -> config.json -> what the model needs (`tensors.py`)
           -> *.safetensors headers -> what is stored -> canonical names -> shapes compared
    read(name) -> NumPy array over the mapped file

Shards, the spellings of other tools, experts stored one by one and MLX's quantized modules all
come out the same: canonical names, packed experts.

Not here: downloads (`hub.py`), the headers (`safetensors_file.py`), files of the tokenizer.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, cast

import numpy as np

from dgemma import checkpoint_files, tensors
from dgemma.checkpoint_files import WeightFiles, read_json
from dgemma.config import GenerationConfig, ModelConfig
from dgemma.errors import CheckpointError, DgemmaWarning
from dgemma.model_card import ModelCard, read_model_card
from dgemma.quantization import Quantization, Quantized, unsupported_format
from dgemma.safetensors_file import show
from dgemma.tensor_pieces import Piece, TensorInfo, assemble, describe
from dgemma.tensors import Shape

_FLOATS = ("BF16", "F16", "F32")


@dataclass(frozen=True, kw_only=True, eq=False)
class _Found:
    """What the weight files hold, checked."""

    pieces: dict[str, tuple[Piece, ...]]
    infos: dict[str, TensorInfo]
    quantized: dict[str, Quantized | None]
    unknown: list[str]
    copies: int
    formats: set[str]


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """A checked checkpoint folder. Weights stay on disk until `read`."""

    folder: Path
    config: ModelConfig
    generation: GenerationConfig
    format: Literal["hf", "mlx"]
    tensors: Mapping[str, TensorInfo]
    """Canonical name -> what is stored: the text model's tensors, then the vision tower's.

    Experts are `x.experts.gate_up_proj` when dense, as in the release; every quantized module `m`,
    experts included, is `m.weight`, `m.scales` and, in affine mode, `m.biases`.
    """
    quantization: Quantization
    """The packing of the modules that really are packed: those whose `.scales` are stored."""
    card: ModelCard
    _pieces: Mapping[str, tuple[Piece, ...]]

    @property
    def licence(self) -> str | None:
        """As the README's front matter names it."""
        return self.card.licence

    @property
    def source(self) -> str | None:
        """The model this one was made from, as the README's front matter names it."""
        return self.card.base_model

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors in `tensors`."""
        return sum(info.nbytes for info in self.tensors.values())

    @property
    def has_vision_weights(self) -> bool:
        return any(map(tensors.is_vision, self.tensors))

    def read(self, name: str) -> np.ndarray[Any, np.dtype[Any]]:
        """The tensor as stored: BF16 as uint16, 8-bit floats as uint8, everything else natively.

        Read-only and memory-mapped, except that experts stored one by one are copied together.
        Raises `KeyError` for a name that is not in `tensors`.
        """
        return assemble(name, self._pieces[name])


def bundled_checkpoint() -> Path:
    """The folder of the small checkpoint that comes with the package."""
    return Path(__file__).parent / "tiny"


def open_checkpoint(folder: str | Path, *, strict: bool = False) -> Checkpoint:
    """Opens a checkpoint folder in Hugging Face or MLX layout.

    Raises `CheckpointError` or `ConfigError`, one line, when anything needed is missing, cut
    short, stored twice or of the wrong shape. Tensors the model does not know are warned about
    once, or refused if `strict`.
    """
    folder = Path(folder).expanduser()
    checkpoint_files.check_folder(folder)
    raw = read_json(folder / "config.json")
    meant = Quantization.from_config(raw)
    config = ModelConfig.from_dict(raw)
    if (folder / "hf_quant_config.json").is_file() and meant.is_empty:
        raise unsupported_format("ModelOpt")
    found = _find(folder, tensors.expected_tensors(config), meant)
    _report_oddities(found, strict=strict)
    meant.warn_unmatched({tensors.module_of(name) for name in found.infos})
    is_mlx = bool(found.quantized) or "mlx" in found.formats
    return Checkpoint(
        folder=folder,
        config=config,
        generation=_read_generation(folder, raw),
        format="mlx" if is_mlx else "hf",
        tensors=MappingProxyType(found.infos),
        quantization=Quantization(overrides=MappingProxyType(found.quantized)),
        card=read_model_card(folder),
        _pieces=MappingProxyType(found.pieces),
    )


def _read_generation(folder: Path, raw: Mapping[str, Any]) -> GenerationConfig:
    """Never the scheduler_config.json beside it, which belongs to another pipeline."""
    path = folder / "generation_config.json"
    if path.exists():
        return GenerationConfig.from_dict(read_json(path))
    inner = raw.get("generation_config")
    if inner is not None and not isinstance(inner, Mapping):
        raise CheckpointError(f"{folder / 'config.json'}: generation_config must be an object")
    return GenerationConfig.from_dict(cast("Mapping[str, Any] | None", inner))


def _find(folder: Path, expected: Mapping[str, Shape], meant: Quantization) -> _Found:
    """Everything the model needs, following the index where it holds true."""
    weights = checkpoint_files.find_weights(folder)
    try:
        found = _match(weights, expected, meant)
    except CheckpointError as error:
        # Files the index does not know may hold what those it names do not.
        if weights.unread:
            paths = sorted([file.path for file in weights.files] + list(weights.unread))
            try:
                found = _match(checkpoint_files.open_weights(paths), expected, meant)
            except CheckpointError:
                pass
            else:
                checkpoint_files.warn_stale(folder, weights.missing)
                return found
        if weights.missing:
            raise checkpoint_files.incomplete(folder, weights.missing) from error
        raise
    if weights.stale:
        checkpoint_files.warn_stale(folder, weights.missing)
    return found


def _match(weights: WeightFiles, expected: Mapping[str, Shape], meant: Quantization) -> _Found:
    """What a set of files holds, in canonical names, compared with what the model needs."""
    pieces, unknown, copies = _arrange(weights, expected)
    infos, quantized = _check(expected, pieces, weights, meant)
    for name in [name for name in pieces if name in quantized]:
        pieces[f"{name}.weight"] = pieces.pop(name)
    return _Found(
        pieces=pieces,
        infos=infos,
        quantized=quantized,
        unknown=unknown,
        copies=copies,
        formats={file.metadata.get("format", "") for file in weights.files},
    )


def _arrange(
    weights: WeightFiles, expected: Mapping[str, Shape]
) -> tuple[dict[str, tuple[Piece, ...]], list[str], int]:
    """Stored tensors under canonical names, the unknown names, and the count of encoder copies."""
    known = _known_names(expected)
    grouped: dict[str, list[Piece]] = {}
    unknown: list[str] = []
    copies = 0
    for name, (file, stored) in weights.tensors.items():
        place = tensors.place(name)
        canonical = "" if place is None else place.name
        if place is not None and (canonical in known or tensors.is_vision(canonical)):
            pieces = grouped.setdefault(canonical, [])
            for other in pieces:
                if other.place == place or other.place.part is None or place.part is None:
                    raise CheckpointError(
                        f"{show(name)} and {show(other.stored.name)} are both {show(canonical)}; "
                        "only one of them may be stored"
                    )
            pieces.append(Piece(place=place, file=file, stored=stored))
        elif tensors.decoder_twin(canonical) in known:
            copies += 1
        elif not canonical.startswith("lm_head.") and not tensors.is_derived(name):
            unknown.append(name)
    return {name: tuple(pieces) for name, pieces in grouped.items()}, unknown, copies


def _known_names(expected: Mapping[str, Shape]) -> set[str]:
    """Names of the text model, with what MLX stores beside a packed matrix."""
    modules = [tensors.module_of(name) for name, shape in expected.items() if len(shape) > 1]
    return set(expected).union(f"{m}.{part}" for m in modules for part in tensors.QUANTIZED_PARTS)


def _report_oddities(found: _Found, *, strict: bool) -> None:
    """Warns of what was left unread, or refuses it where it is unknown and `strict`."""
    if found.copies:
        _warn(
            f"{found.copies} encoder text tensor(s) are stored although the encoder shares the "
            "decoder's, which are used"
        )
    unknown = found.unknown
    if not unknown:
        return
    shown = ", ".join(map(show, unknown[:3])) + (", ..." if len(unknown) > 3 else "")
    message = f"{len(unknown)} tensor(s) of the checkpoint are unknown: {shown}"
    if strict:
        raise CheckpointError(f"{message}; open it without strict to ignore them")
    _warn(f"{message}; they are ignored")


def _check(
    expected: Mapping[str, Shape],
    pieces: Mapping[str, tuple[Piece, ...]],
    weights: WeightFiles,
    quantization: Quantization,
) -> tuple[dict[str, TensorInfo], dict[str, Quantized | None]]:
    """Compares what is stored with what the model needs, shapes and types included."""
    _check_missing(expected, pieces, weights)
    stored = {name: describe(name, parts) for name, parts in pieces.items()}
    infos: dict[str, TensorInfo] = {}
    quantized: dict[str, Quantized | None] = {}
    for name, shape in expected.items():
        module = tensors.module_of(name)
        if len(shape) > 1 and f"{module}.scales" in stored:
            packing = quantization.of(module)
            if packing is None:
                raise CheckpointError(
                    f"{module} is stored quantized, but config.json says it is not; "
                    "its `quantization` must say how"
                )
            weight, *others = _check_packed(module, stored, name, shape, packing)
            infos[f"{module}.weight"] = replace(weight, name=f"{module}.weight")
            infos.update((info.name, info) for info in others)
            quantized[module] = packing
        else:
            infos[name] = _check_dense(stored[name], shape)
    for name, info in stored.items():
        if tensors.is_vision(name):
            infos[name] = info
            module = tensors.module_of(name)
            packing = quantization.of(module)
            if name.endswith(".scales") and packing is not None:
                quantized[module] = packing
    return infos, quantized


def _check_missing(
    expected: Mapping[str, Shape], pieces: Mapping[str, tuple[Piece, ...]], weights: WeightFiles
) -> None:
    missing = [name for name in expected if name not in pieces]
    head = weights.tensors.get("lm_head.weight")
    if missing:
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        note = ""
        if tensors.EMBEDDING in missing and head is not None:
            note = "; lm_head.weight is there, but never stands in for the embedding"
        elif all(name.startswith(tensors.ENCODER_TEXT) for name in missing):
            note = "; the encoder's layer_scalars are its own and have no substitute"
        raise CheckpointError(f"the checkpoint lacks {len(missing)} tensor(s): {shown}{note}")
    if head is not None:
        embedding = pieces[tensors.EMBEDDING][0].stored
        if head[1].shape != embedding.shape:
            raise CheckpointError(
                f"lm_head.weight has shape {list(head[1].shape)}, but the embedding it is tied to "
                f"has {list(embedding.shape)}; only tied checkpoints are supported"
            )


def _check_dense(info: TensorInfo, shape: Shape) -> TensorInfo:
    if info.dtype == "U32" and len(shape) > 1:
        raise CheckpointError(
            f"{info.name} is packed (U32), but {tensors.module_of(info.name)}.scales is missing"
        )
    _check_shape(info, shape)
    if info.dtype not in _FLOATS:
        raise CheckpointError(
            f"{info.name} is stored as {info.dtype}; supported are {', '.join(_FLOATS)}, and "
            "MLX's packed integers"
        )
    return info


def _check_packed(
    module: str, stored: Mapping[str, TensorInfo], name: str, shape: Shape, packing: Quantized
) -> list[TensorInfo]:
    """The tensors of a quantized module, each compared with what its packing implies."""
    if not packing.fits(shape):
        raise CheckpointError(
            f"{module} has rows of {shape[-1]}, which {packing.mode} with group_size "
            f"{packing.group_size} and {packing.bits} bits cannot pack"
        )
    said = f" ({packing.mode}, group_size {packing.group_size}, {packing.bits} bits)"
    weight, scales = stored[name], stored[f"{module}.scales"]
    biases = stored.get(f"{module}.biases")
    if weight.dtype != "U32":
        raise CheckpointError(f"{name} has scales, but is {weight.dtype} instead of packed U32")
    _check_shape(weight, packing.packed_shape(shape), said)
    _check_shape(scales, packing.scales_shape(shape), said)
    scale_types = _FLOATS if packing.has_biases else ("U8",)
    if scales.dtype not in scale_types:
        raise CheckpointError(
            f"{scales.name} is {scales.dtype}, but mode {packing.mode} has "
            f"{', '.join(scale_types)}; the mode in config.json may be wrong"
        )
    if not packing.has_biases:
        if biases is not None:
            raise CheckpointError(
                f"{biases.name} is stored, but mode {packing.mode} has none; "
                "the mode in config.json may be wrong"
            )
        return [weight, scales]
    if biases is None:
        raise CheckpointError(f"{module}.biases is missing; mode affine needs it")
    _check_shape(biases, packing.scales_shape(shape), said)
    if biases.dtype not in _FLOATS:
        raise CheckpointError(f"{biases.name} is {biases.dtype}, but must be a float type")
    return [weight, scales, biases]


def _check_shape(info: TensorInfo, shape: Shape, said: str = "") -> None:
    if info.shape != shape:
        raise CheckpointError(
            f"{info.name} has shape {list(info.shape)}, but config.json implies {list(shape)}{said}"
        )


def _warn(message: str) -> None:
    warnings.warn(message, DgemmaWarning, stacklevel=4)
