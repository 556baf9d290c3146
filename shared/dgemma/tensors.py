"""Which tensors a model consists of, and how others spell their names.

Canonical names are those of the Hugging Face release (`model.decoder.layers.0.mlp.up_proj.weight`,
experts without ".weight"). One table says what a `ModelConfig` needs; one function maps every
known spelling to the canonical one.

Not here: reading tensors (`checkpoint.py`), quantization (`quantization.py`), the inside of the
vision tower: its tensors are recognised by their prefix and kept.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from dgemma.config import ModelConfig

Shape = tuple[int, ...]

DECODER = "model.decoder."
ENCODER_TEXT = "model.encoder.language_model."
VISION_PREFIXES = ("model.encoder.vision_tower.", "model.encoder.embed_vision.")
EMBEDDING = "model.decoder.embed_tokens.weight"
QUANTIZED_PARTS = ("scales", "biases")
"""What MLX stores beside the packed `weight` of a quantized module."""

TensorClass = Literal[
    "embedding",
    "attention",
    "dense MLP",
    "experts",
    "router",
    "norms and scalars",
    "conditioning",
    "vision",
]

# Wrappers that tools put around the model, in any order and number.
_WRAPPERS = ("model.", "language_model.", "module.", "_orig_mod.")
_DECODER_STARTS = ("layers.", "embed_tokens.", "norm.", "self_conditioning.")
_VISION_STARTS = ("vision_tower.", "embed_vision.")

_EXPERT = re.compile(
    r"(?P<stem>.*\.experts)\.(?:switch_glu\.)?(?:(?P<expert>\d+)\.)?"
    r"(?P<part>gate_up_proj|gate_proj|up_proj|down_proj)"
    r"(?:\.(?P<suffix>weight|scales|biases))?"
)
# Buffers some tools store although they follow from the configuration.
_DERIVED = re.compile(r"(?:.*\.)?(?:rotary_emb\..*|inv_freq|embed_scale|position_ids)")

ExpertPart = Literal["gate_up", "gate", "up", "down"]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where a stored tensor belongs.

    `name` is canonical. A tensor that is only a piece of it has the `part` of the experts it holds
    and, where experts are stored one by one, the `expert`'s number.
    """

    name: str
    part: ExpertPart | None = None
    expert: int | None = None


def expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor the text model needs and its shape, [rows out, columns in] for matrices.

    Encoder and decoder share all of them but `layer_scalar`, of which each has its own.
    """
    hidden, dense = config.hidden_size, config.intermediate_size
    tensors: dict[str, Shape] = {
        EMBEDDING: (config.vocab_size, hidden),
        f"{DECODER}norm.weight": (hidden,),
        f"{DECODER}self_conditioning.pre_norm.weight": (hidden,),
        f"{DECODER}self_conditioning.gate_proj.weight": (dense, hidden),
        f"{DECODER}self_conditioning.up_proj.weight": (dense, hidden),
        f"{DECODER}self_conditioning.down_proj.weight": (hidden, dense),
    }
    for index in range(config.num_hidden_layers):
        for name, shape in _layer_tensors(config, index).items():
            tensors[f"{DECODER}layers.{index}.{name}"] = shape
        tensors[f"{ENCODER_TEXT}layers.{index}.layer_scalar"] = (1,)
    return tensors


def _layer_tensors(config: ModelConfig, index: int) -> dict[str, Shape]:
    layer = config.layers[index]
    hidden, dense = config.hidden_size, config.intermediate_size
    experts, inner = config.num_experts, config.moe_intermediate_size
    queries = config.num_attention_heads * layer.head_dim
    keys = layer.num_key_value_heads * layer.head_dim
    # Full layers take their values from the key projection and store none of their own.
    values: dict[str, Shape] = (
        {"self_attn.v_proj.weight": (keys, hidden)} if layer.is_sliding else {}
    )
    return {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "pre_feedforward_layernorm.weight": (hidden,),
        "post_feedforward_layernorm.weight": (hidden,),
        "post_feedforward_layernorm_1.weight": (hidden,),
        "pre_feedforward_layernorm_2.weight": (hidden,),
        "post_feedforward_layernorm_2.weight": (hidden,),
        "layer_scalar": (1,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        **values,
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (layer.head_dim,),
        "self_attn.k_norm.weight": (layer.head_dim,),
        "mlp.gate_proj.weight": (dense, hidden),
        "mlp.up_proj.weight": (dense, hidden),
        "mlp.down_proj.weight": (hidden, dense),
        "router.proj.weight": (experts, hidden),
        "router.scale": (hidden,),
        "router.per_expert_scale": (experts,),
        "experts.gate_up_proj": (experts, 2 * inner, hidden),  # rows: all gate, then all up
        "experts.down_proj": (experts, hidden, inner),
    }


def parameters(config: ModelConfig) -> dict[str, int]:
    """Numbers in each tensor the text model needs, whatever they are packed into."""
    return {name: math.prod(shape) for name, shape in expected_tensors(config).items()}


def place(stored: str) -> Placement | None:
    """The canonical place of a stored name; None when the name is unknown to every spelling.

    Prefixes that are understood: none, `model.`, `language_model.`, `language_model.model.`,
    `model.language_model.` and further mixtures of wrappers. Without a `decoder.` or `encoder.`, a
    text tensor is the decoder's.
    """
    name = _canonical_prefix(stored)
    if name is None:
        return None
    match = _EXPERT.fullmatch(name)
    if match is None:
        return Placement(name=name)
    part = match["part"]
    packed = "down_proj" if part == "down_proj" else "gate_up_proj"
    # The release's experts have no ".weight"; MLX adds it so that scales can stand beside it.
    suffix = "" if match["suffix"] in (None, "weight") else f".{match['suffix']}"
    name = f"{match['stem']}.{packed}{suffix}"
    expert = None if match["expert"] is None else int(match["expert"])
    if expert is None and part in ("gate_up_proj", "down_proj"):
        return Placement(name=name)
    parts: dict[str, ExpertPart] = {
        "gate_up_proj": "gate_up",
        "gate_proj": "gate",
        "up_proj": "up",
        "down_proj": "down",
    }
    return Placement(name=name, part=parts[part], expert=expert)


def place_module(path: str) -> str:
    """The canonical path of a module, however its wrappers are spelled; unknown ones stay."""
    placed = place(f"{path}.weight")
    return path if placed is None else module_of(placed.name)


def module_of(name: str) -> str:
    """The module a tensor belongs to: `x.weight`, `x.scales`, `x.biases` and expert `x` -> `x`."""
    for suffix in (".weight", ".scales", ".biases"):
        if name.endswith(suffix):
            return name.removesuffix(suffix)
    return name


def is_vision(name: str) -> bool:
    """Whether a canonical name belongs to the vision tower or its projection."""
    return name.startswith(VISION_PREFIXES)


def decoder_twin(name: str) -> str | None:
    """The decoder tensor that an encoder's text weight is tied to; None where there is no tie."""
    if name.startswith(ENCODER_TEXT) and not name.endswith(".layer_scalar"):
        return DECODER + name.removeprefix(ENCODER_TEXT)
    return None


def is_derived(name: str) -> bool:
    """Whether a stored tensor follows from the configuration and can be left unread."""
    return _DERIVED.fullmatch(name) is not None


def tensor_class(name: str) -> TensorClass:
    """The kind of a canonical tensor, by which precision is usually chosen."""
    if is_vision(name):
        return "vision"
    if name.startswith(f"{DECODER}embed_tokens."):
        return "embedding"
    if "norm" in name or name.endswith("layer_scalar"):
        return "norms and scalars"
    if name.startswith(f"{DECODER}self_conditioning."):
        return "conditioning"
    if ".self_attn." in name:
        return "attention"
    if ".experts." in name:
        return "experts"
    if ".router." in name:
        return "router"
    return "dense MLP"


def _canonical_prefix(stored: str) -> str | None:
    rest = _strip(stored, _WRAPPERS)
    if rest.startswith("decoder."):
        return DECODER + _strip(rest.removeprefix("decoder."), _WRAPPERS)
    if rest.startswith("encoder."):
        rest = _strip(rest.removeprefix("encoder."), _WRAPPERS)
        if rest.startswith(_VISION_STARTS):
            return f"model.encoder.{rest}"
        return ENCODER_TEXT + rest
    if rest.startswith(_VISION_STARTS):
        return f"model.encoder.{rest}"
    if rest.startswith(_DECODER_STARTS):
        return DECODER + rest
    return rest if rest.startswith("lm_head.") else None


def _strip(name: str, prefixes: tuple[str, ...]) -> str:
    while True:
        for prefix in prefixes:
            if name.startswith(prefix):
                name = name.removeprefix(prefix)
                break
        else:
            return name
