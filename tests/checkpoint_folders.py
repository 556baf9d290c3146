"""Small checkpoint folders for tests, written without the code under test.

Names and shapes are spelled out here once more, as the release has them, and bytes are random.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

WIDTHS = {"BF16": 2, "F16": 2, "F32": 4, "U32": 4, "U8": 1, "F8_E4M3": 1, "F64": 8, "I64": 8}

HIDDEN, DENSE, EXPERTS, INNER, VOCABULARY, HEADS = 64, 96, 3, 32, 70, 4
SLIDING = {"head_dim": 16, "kv_heads": 2}
FULL = {"head_dim": 32, "kv_heads": 1}
LAYERS = ("sliding_attention", "full_attention", "sliding_attention", "full_attention")


@dataclass(frozen=True)
class Raw:
    """A tensor as its bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def raw(rng: np.random.Generator, dtype: str, *shape: int) -> Raw:
    size = int(np.prod(shape)) * WIDTHS[dtype]
    return Raw(dtype, shape, rng.integers(0, 256, size, dtype=np.uint8).tobytes())


def config_json(**changes: Any) -> dict[str, Any]:
    """A config.json; `changes` go to the top level, those in `text` into text_config."""
    text = {
        "model_type": "diffusion_gemma_text",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": DENSE,
        "num_hidden_layers": len(LAYERS),
        "num_attention_heads": HEADS,
        "layer_types": list(LAYERS),
        "head_dim": SLIDING["head_dim"],
        "num_key_value_heads": SLIDING["kv_heads"],
        "global_head_dim": FULL["head_dim"],
        "num_global_key_value_heads": FULL["kv_heads"],
        "num_experts": EXPERTS,
        "top_k_experts": 2,
        "moe_intermediate_size": INNER,
        "sliding_window": 8,
        "max_position_embeddings": 512,
    }
    text |= changes.pop("text", {})
    return {
        "model_type": "diffusion_gemma",
        "canvas_length": 16,
        "eos_token_id": [1, 6],
        "text_config": text,
    } | changes


def text_shapes() -> dict[str, tuple[int, ...]]:
    """Every text tensor of the release's layout, for the sizes above."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.decoder.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.decoder.norm.weight": (HIDDEN,),
        "model.decoder.self_conditioning.pre_norm.weight": (HIDDEN,),
        "model.decoder.self_conditioning.gate_proj.weight": (DENSE, HIDDEN),
        "model.decoder.self_conditioning.up_proj.weight": (DENSE, HIDDEN),
        "model.decoder.self_conditioning.down_proj.weight": (HIDDEN, DENSE),
    }
    for index, kind in enumerate(LAYERS):
        size = SLIDING if kind == "sliding_attention" else FULL
        queries, keys = HEADS * size["head_dim"], size["kv_heads"] * size["head_dim"]
        layer = f"model.decoder.layers.{index}."
        for norm in (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
            "post_feedforward_layernorm_1",
            "pre_feedforward_layernorm_2",
            "post_feedforward_layernorm_2",
        ):
            shapes[f"{layer}{norm}.weight"] = (HIDDEN,)
        shapes |= {
            f"{layer}layer_scalar": (1,),
            f"{layer}self_attn.q_proj.weight": (queries, HIDDEN),
            f"{layer}self_attn.k_proj.weight": (keys, HIDDEN),
            f"{layer}self_attn.o_proj.weight": (HIDDEN, queries),
            f"{layer}self_attn.q_norm.weight": (size["head_dim"],),
            f"{layer}self_attn.k_norm.weight": (size["head_dim"],),
            f"{layer}mlp.gate_proj.weight": (DENSE, HIDDEN),
            f"{layer}mlp.up_proj.weight": (DENSE, HIDDEN),
            f"{layer}mlp.down_proj.weight": (HIDDEN, DENSE),
            f"{layer}router.proj.weight": (EXPERTS, HIDDEN),
            f"{layer}router.scale": (HIDDEN,),
            f"{layer}router.per_expert_scale": (EXPERTS,),
            f"{layer}experts.gate_up_proj": (EXPERTS, 2 * INNER, HIDDEN),
            f"{layer}experts.down_proj": (EXPERTS, HIDDEN, INNER),
            f"model.encoder.language_model.layers.{index}.layer_scalar": (1,),
        }
        if kind == "sliding_attention":
            shapes[f"{layer}self_attn.v_proj.weight"] = (keys, HIDDEN)
    return shapes


def text_tensors(rng: np.random.Generator, dtype: str = "BF16") -> dict[str, Raw]:
    return {name: raw(rng, dtype, *shape) for name, shape in text_shapes().items()}


def quantize(
    tensors: dict[str, Raw],
    rng: np.random.Generator,
    module: str,
    *,
    group_size: int,
    bits: int,
    mode: str = "affine",
) -> None:
    """Replaces a dense matrix by random packed ones of the shapes MLX would write."""
    dense = tensors.pop(f"{module}.weight", None) or tensors.pop(module)
    *rows, columns = dense.shape
    tensors[f"{module}.weight"] = raw(rng, "U32", *rows, columns * bits // 32)
    kind = "BF16" if mode == "affine" else "U8"
    tensors[f"{module}.scales"] = raw(rng, kind, *rows, columns // group_size)
    if mode == "affine":
        tensors[f"{module}.biases"] = raw(rng, kind, *rows, columns // group_size)


def safetensors_bytes(
    tensors: Mapping[str, Raw], metadata: Mapping[str, str] | None = None
) -> bytes:
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    position = 0
    for name, tensor in tensors.items():
        end = position + len(tensor.data)
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(t.data for t in tensors.values())


def write_folder(
    folder: Path,
    tensors: Mapping[str, Raw],
    *,
    config: Mapping[str, Any] | None = None,
    shards: int = 0,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """A checkpoint folder: one file, or `shards` files with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_json() if config is None else config))
    if not shards:
        (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors, metadata))
        return folder
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        weight_map |= dict.fromkeys(part, file)
        (folder / file).write_bytes(safetensors_bytes(part, metadata))
    write_index(folder, weight_map)
    return folder


def write_index(folder: Path, weight_map: Mapping[str, Any]) -> None:
    index = {"metadata": {"total_size": 1}, "weight_map": dict(weight_map)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def as_array(tensor: Raw) -> np.ndarray[Any, Any]:
    """The bits of a tensor, bf16 as uint16."""
    kind = {"BF16": "<u2", "F16": "<f2", "F32": "<f4", "U32": "<u4", "U8": "u1", "F8_E4M3": "u1"}
    return np.frombuffer(tensor.data, kind[tensor.dtype]).reshape(tensor.shape)
