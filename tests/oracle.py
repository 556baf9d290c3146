"""The oracle: small random checkpoints made with transformers, and its logits for them.

Every tensor matters: norms lie around 1 but are not 1, the router's scales too, and the encoder's
and decoder's `layer_scalar` differ from 1 and from each other. The weights are large enough that
the logits are not flat. Only `DynamicCache` is used: with a static cache transformers 5.24's
decoder differs grossly from its own dynamic cache once the prefix reaches the window.

Not here: bundled or real checkpoints; MLX.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion, DynamicCache

from dgemma.config import ModelConfig

torch.set_num_threads(1)

WINDOW = 12
CANVAS = 16

VISION = {
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
}
TEXT = {
    "vocab_size": 600,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "layer_types": [
        "sliding_attention",
        "sliding_attention",
        "full_attention",
        "sliding_attention",
        "sliding_attention",
        "full_attention",
    ],
    "sliding_window": WINDOW,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
    "max_position_embeddings": 4096,
    "use_bidirectional_attention": "vision",
}


@dataclass(frozen=True, eq=False)
class Oracle:
    """A reference model and what it says."""

    model: Any
    config: Any

    @classmethod
    def build(cls, seed: int, dtype: str = "float32", **text: Any) -> Oracle:
        """A random model of `TEXT` with changes. The same seed gives, in bfloat16, the same weights
        rounded."""
        config = DiffusionGemmaConfig(
            text_config={**TEXT, **text},
            vision_config=VISION,
            canvas_length=CANVAS,
            boi_token_id=17,
            image_token_id=18,
            eoi_token_id=19,
        )
        torch.manual_seed(seed)
        model = DiffusionGemmaForBlockDiffusion(config).eval()
        _randomise(model, seed)
        return cls(model.to(getattr(torch, dtype)), config)

    def widened(self) -> Oracle:
        """The same weights, computed with in float32."""
        return Oracle(copy.deepcopy(self.model).float(), self.config)

    def cache(self) -> DynamicCache:
        return DynamicCache(config=self.config.text_config)

    @torch.no_grad()
    def encode(self, tokens: NDArray[np.int32], cache: DynamicCache) -> NDArray[np.float32]:
        """Appends tokens to the cache; their next-token logits [N, V]."""
        output = self.model.model.encoder(input_ids=_ids(tokens), cache=cache)
        return self._head(output.last_hidden_state)

    @torch.no_grad()
    def denoise(
        self,
        canvas: NDArray[np.int32],
        cache: DynamicCache,
        conditioning: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float32]:
        """Logits [L, V] of a canvas; `conditioning` are the shaped logits of the step before, which
        the reference's sampler casts to the embedding's dtype."""
        given = None
        if conditioning is not None:
            given = torch.from_numpy(conditioning)[None].to(self.model.dtype)
        cache = copy.deepcopy(cache)
        if cache.get_seq_length() == 0:
            self._make_empty(cache)
        output = self.model.model.decoder(
            decoder_input_ids=_ids(canvas),
            cache=cache,
            self_conditioning_logits=given,
        )
        return self._head(output.last_hidden_state)

    @torch.no_grad()
    def soft_embedding(self, shaped: NDArray[np.float32]) -> NDArray[np.float32]:
        """`softmax(shaped) @ E * sqrt(D)` with the reference's roundings."""
        embedding = self.model.model.decoder.embed_tokens
        logits = torch.from_numpy(shaped).to(embedding.weight.dtype)
        probabilities = logits.softmax(dim=-1, dtype=torch.float32).to(embedding.weight.dtype)
        soft = torch.matmul(probabilities, embedding.weight)
        return (soft * embedding.embed_scale.to(soft.dtype)).float().numpy()

    def save(self, folder: Path) -> None:
        """Writes the checkpoint as `save_pretrained` does."""
        self.model.save_pretrained(folder)

    def _make_empty(self, cache: DynamicCache) -> None:
        """Keys and values of no tokens, which the reference's cache does not make by itself."""
        for index, layer in enumerate(cache.layers):
            geometry = self.config.text_config.per_layer_config[index]
            shape = (1, geometry.num_key_value_heads, 0, geometry.head_dim)
            layer.keys = torch.empty(shape, dtype=self.model.dtype)
            layer.values = torch.empty(shape, dtype=self.model.dtype)

    def _head(self, hidden: torch.Tensor) -> NDArray[np.float32]:
        cap = self.config.text_config.final_logit_softcapping
        logits = self.model.lm_head(hidden).float()
        return (torch.tanh(logits / cap) * cap)[0].numpy()


@dataclass(frozen=True)
class Packing:
    """How one module is quantized."""

    group_size: int
    bits: int
    mode: str


@dataclass(eq=False)
class MemoryCheckpoint:
    """A checkpoint that never was a file: as much of `Checkpoint` as is loaded."""

    config: ModelConfig
    arrays: dict[str, tuple[str, NDArray[Any]]]
    quantized: dict[str, Packing] = field(default_factory=dict)

    @dataclass(frozen=True)
    class Info:
        dtype: str
        shape: tuple[int, ...]

    @property
    def tensors(self) -> Mapping[str, Info]:
        return {name: self.Info(dtype, array.shape) for name, (dtype, array) in self.arrays.items()}

    @property
    def quantization(self) -> MemoryCheckpoint:
        return self

    def of(self, module: str) -> Packing | None:
        return self.quantized.get(module)

    def read(self, name: str) -> NDArray[Any]:
        return self.arrays[name][1]


def memory_checkpoint(oracle: Oracle) -> MemoryCheckpoint:
    """The oracle's weights under their canonical names, bfloat16 as uint16."""
    arrays: dict[str, tuple[str, NDArray[Any]]] = {}
    for name, tensor in oracle.model.state_dict().items():
        if name == "lm_head.weight":
            continue
        shared = name.startswith("model.encoder.language_model")
        if shared and not name.endswith(".layer_scalar"):
            continue
        arrays[name] = _numpy(tensor)
    return MemoryCheckpoint(ModelConfig.from_dict(oracle.config.to_dict()), arrays)


def relative_error(found: NDArray[Any], wanted: NDArray[Any]) -> float:
    """RMS(found - wanted) / RMS(wanted); NaN anywhere gives infinity."""
    found64, wanted64 = found.astype(np.float64), wanted.astype(np.float64)
    error = np.sqrt(np.mean((found64 - wanted64) ** 2)) / np.sqrt(np.mean(wanted64**2))
    return float(error) if np.isfinite(error) else float("inf")


def _randomise(model: Any, seed: int) -> None:
    """Draws every parameter and buffer that is stored, so that none may be left out or swapped."""
    generator = torch.Generator().manual_seed(seed)

    def normal(tensor: torch.Tensor, mean: float, std: float) -> None:
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * std + mean)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "vision" in name:
                continue
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                # Scores of unit size: with sharper ones every rounding error grows layer by layer,
                # and two correct float32 implementations would differ by more than the bound.
                size = parameter.shape[-1] ** -0.25
                normal(parameter, size, 0.2 * size)
            elif parameter.ndim == 1:
                normal(parameter, 1.0, 0.2)
            elif "embed_tokens" in name:
                normal(parameter, 0.0, 0.15)
            elif "router.proj" in name:
                normal(parameter, 0.0, 2.0)
            else:
                normal(parameter, 0.0, 1.0 / parameter.shape[-1] ** 0.5)
        for part, low in ((model.model.decoder, 0.5), (model.model.encoder.language_model, 0.75)):
            for layer in part.layers:
                layer.layer_scalar.copy_(torch.rand(1, generator=generator) * 0.2 + low)


def _ids(tokens: NDArray[np.int32]) -> torch.Tensor:
    return torch.from_numpy(np.asarray(tokens, np.int64))[None]


def _numpy(tensor: torch.Tensor) -> tuple[str, NDArray[Any]]:
    if tensor.dtype == torch.bfloat16:
        return "BF16", tensor.view(torch.uint16).numpy()
    return {torch.float32: "F32", torch.float16: "F16"}[tensor.dtype], tensor.numpy()
