"""Writes a checkpoint of any shape with random weights, tensor by tensor, with NumPy alone.

    python -m dgemma.bench.random_checkpoint FOLDER [--shape small|bench] [--seed 0]

For speed and memory: the numbers mean nothing, but they are spread like a trained model's, so that
no shortcut for zeros or infinities is measured. Memory in use is that of the largest tensor.

Not here: quantized checkpoints, the release's full shapes (26 GB in 4 bit).
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dgemma.checkpoint import bundled_checkpoint
from dgemma.config import ModelConfig
from dgemma.tensors import expected_tensors

_COPIED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

_ROPE = {
    "full_attention": {
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e6,
        "rope_type": "proportional",
    },
    "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
}

SHAPES: dict[str, dict[str, Any]] = {
    # The shape the project's speed goals on a CPU are stated for.
    "bench": {
        "vocab_size": 65_536,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "global_head_dim": 128,
        "num_global_key_value_heads": 2,
        "num_experts": 32,
        "top_k_experts": 8,
        "moe_intermediate_size": 256,
        "sliding_window": 512,
        "canvas_length": 256,
        "max_position_embeddings": 131_072,
    },
    # A few seconds of anything, for trying the programs themselves.
    "small": {
        "vocab_size": 2048,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
        "sliding_window": 32,
        "canvas_length": 64,
        "max_position_embeddings": 4096,
    },
}
_VISION: dict[str, Any] = {
    "model_type": "gemma4_vision",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "patch_size": 4,
    "pooling_kernel_size": 3,
    "position_embedding_size": 64,
    "rms_norm_eps": 1e-6,
    "standardize": False,
    "use_clipped_linears": False,
    "rope_parameters": {"rope_theta": 100.0, "rope_type": "axial"},
}
"""The smallest tower there is: peers will not load a checkpoint without one."""


def write_random_checkpoint(
    folder: Path, shape: Mapping[str, Any], *, dtype: str = "bfloat16", seed: int = 0
) -> Path:
    """Writes `folder` in Hugging Face layout; returns it.

    `shape` holds text_config keys and `canvas_length`; `dtype` is bfloat16 or float32.
    """
    folder.mkdir(parents=True, exist_ok=True)
    raw = _config(shape, dtype)
    (folder / "config.json").write_text(json.dumps(raw, indent=2))
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [1, 6], "confidence_threshold": 1e-9})
    )
    for name in _COPIED:
        shutil.copyfile(bundled_checkpoint() / name, folder / name)
    shapes = expected_tensors(ModelConfig.from_dict(raw)) | _vision_tensors(shape["hidden_size"])
    _write_tensors(folder / "model.safetensors", shapes, dtype, seed)
    return folder


def _config(shape: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    text = {key: value for key, value in shape.items() if key != "canvas_length"}
    text |= {
        "model_type": "diffusion_gemma_text",
        "rope_parameters": _ROPE,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "final_logit_softcapping": 30.0,
        "layer_types": [
            "full_attention" if (i + 1) % 6 == 0 else "sliding_attention"
            for i in range(shape["num_hidden_layers"])
        ],
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "dtype": dtype,
    }
    return {
        "architectures": ["DiffusionGemmaForBlockDiffusion"],
        "model_type": "diffusion_gemma",
        "canvas_length": shape["canvas_length"],
        "text_config": text,
        "vision_config": _VISION,
        "tie_word_embeddings": True,
        "dtype": dtype,
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "image_token_id": 18,
        "boi_token_id": 17,
        "eoi_token_id": 19,
    }


def _vision_tensors(hidden: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tower above, as transformers 5.24 stores it."""
    width: int = _VISION["hidden_size"]
    layer = "model.encoder.vision_tower.encoder.layers.0."
    norms = ("input_layernorm", "post_attention_layernorm")
    norms += ("pre_feedforward_layernorm", "post_feedforward_layernorm")
    square = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    square += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    patches = "model.encoder.vision_tower.patch_embedder."
    return {
        "model.encoder.embed_vision.embedding_projection.weight": (hidden, width),
        f"{patches}input_proj.weight": (width, 3 * _VISION["patch_size"] ** 2),
        f"{patches}position_embedding_table": (2, _VISION["position_embedding_size"], width),
        **{f"{layer}{name}.weight": (width,) for name in norms},
        **{f"{layer}{name}.linear.weight": (width, width) for name in square},
        **{f"{layer}self_attn.{name}.weight": (width,) for name in ("q_norm", "k_norm")},
    }


def _write_tensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str, seed: int
) -> None:
    item = 2 if dtype == "bfloat16" else 4
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        size = int(np.prod(shape)) * item
        header[name] = {
            "dtype": "BF16" if dtype == "bfloat16" else "F32",
            "shape": list(shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    rng = np.random.default_rng(seed)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for name, shape in shapes.items():
            values = _values(rng, name, shape)
            file.write((bfloat16_bits(values) if dtype == "bfloat16" else values).tobytes())


def _values(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Norms near 1, embeddings of unit rows, matrices that keep the size of what they multiply."""
    if "layer_scalar" in name:
        return np.full(shape, 0.9, dtype=np.float32)
    if "norm" in name or name.endswith("scale"):
        return 1 + 0.1 * rng.standard_normal(shape, dtype=np.float32)
    scale = np.float32(shape[-1] ** -0.5)
    return scale * rng.standard_normal(shape, dtype=np.float32)


def bfloat16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Float32 rounded to the nearest bfloat16 (ties to even), as its 16 bits. No NaN handling."""
    bits = values.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype(np.uint16)


def main() -> None:
    """The command of the module docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="bench")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write_random_checkpoint(args.folder, SHAPES[args.shape], dtype=args.dtype, seed=args.seed)


if __name__ == "__main__":
    main()
