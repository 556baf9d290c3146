"""What a checkpoint says about itself: one frozen description for every spelling in use.

`ModelConfig` describes the network (config.json), `GenerationConfig` how to decode with it
(generation_config.json). Both read plain dictionaries, accept integers where floats are meant, and
name what is wrong. Keys keep the checkpoint's own spelling here and nowhere else.

Not here: layers (`geometry.py`), typed access to JSON (`json_reader.py`), files
(`checkpoint.py`), tensors (`tensors.py`), quantization (`quantization.py`).
Source: transformers 5.24, `models/diffusion_gemma/configuration_diffusion_gemma.py` and
`generation_diffusion_gemma.py`; defaults are theirs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dgemma.errors import ConfigError
from dgemma.geometry import FULL, SLIDING, LayerConfig, LayerKind, Rope, read_layers
from dgemma.json_reader import JsonReader, require, to_integer, to_number, union, warn_unknown

__all__ = [
    "FULL",
    "MODEL_TYPE",
    "SLIDING",
    "GenerationConfig",
    "LayerConfig",
    "LayerKind",
    "ModelConfig",
    "Rope",
]

MODEL_TYPE = "diffusion_gemma"
_MOST_POSITIONS = 2**31 - 1
"""Positions are int32 everywhere; a window or context meant as "no limit" may not exceed them."""
_LARGEST_SETTING = 1e9
"""Of temperatures and the entropy bound, which are computed with in float32."""
# Keys other tools write and the forward pass does not need; anything else unknown is warned about.
_IGNORED_KEYS = frozenset(
    """_name_or_path architectures attention_dropout attention_k_eq_v auto_map bad_words_ids
    chunk_size_feed_forward dtype enable_moe_block expert_intermediate_size id2label
    initializer_range is_encoder_decoder label2id model_type output_attentions
    output_hidden_states problem_type return_dict text_config tie_encoder_decoder torch_dtype
    transformers_version use_cache vision_config vision_soft_tokens_per_image video_token_id
    generation_config quantization quantization_config audio_config audio_token_id boa_token_id
    eoa_token_id eoa_token_index hidden_size_per_layer_input vocab_size_per_layer_input
    num_kv_shared_layers use_double_wide_mlp experts_implementation""".split()
)
_IGNORED_GENERATION_KEYS = frozenset(
    """_from_model_config bos_token_id cache_config cache_implementation disable_compile do_sample
    max_length max_new_tokens pad_token_id return_dict_in_generate top_k top_p temperature
    transformers_version""".split()
)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The network of a checkpoint, whichever way its config.json spells it."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    layers: tuple[LayerConfig, ...]
    num_experts: int
    top_k_experts: int
    moe_intermediate_size: int
    sliding_window: int
    canvas_length: int
    max_position_embeddings: int
    rms_norm_eps: float
    final_logit_softcapping: float
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    image_token_id: int | None = None
    boi_token_id: int | None = None
    eoi_token_id: int | None = None
    bidirectional_images: bool = False
    """Image-token blocks of the prompt see each other both ways (`use_bidirectional_attention`)."""
    vision: Mapping[str, Any] | None = None
    """The vision tower's own configuration, as stored."""

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_experts",
            "top_k_experts",
            "moe_intermediate_size",
            "canvas_length",
            "max_position_embeddings",
        ):
            require(getattr(self, name) > 0, name, getattr(self, name), "a positive integer")
        for name, right, fix in (
            ("sliding_window", 2 <= self.sliding_window <= _MOST_POSITIONS, "2 to 2**31 - 1"),
            (
                "max_position_embeddings",
                self.max_position_embeddings <= _MOST_POSITIONS,
                "at most 2**31 - 1",
            ),
            ("canvas_length", self.canvas_length <= _MOST_POSITIONS, "at most 2**31 - 1"),
            ("rms_norm_eps", self.rms_norm_eps > 0, "above 0"),
            ("final_logit_softcapping", self.final_logit_softcapping > 0, "above 0"),
            (
                "top_k_experts",
                self.top_k_experts <= self.num_experts,
                f"at most num_experts ({self.num_experts})",
            ),
        ):
            require(right, name, getattr(self, name), fix)
        if not self.layers:
            raise ConfigError("num_hidden_layers is 0, but a model needs at least one layer")
        for index, layer in enumerate(self.layers):
            require(
                layer.head_dim > 0 and layer.head_dim % 2 == 0,
                f"head_dim of layer {index}",
                layer.head_dim,
                "a positive even number",
            )
            require(
                layer.num_key_value_heads > 0
                and self.num_attention_heads % layer.num_key_value_heads == 0,
                f"num_key_value_heads of layer {index}",
                layer.num_key_value_heads,
                f"a divisor of num_attention_heads ({self.num_attention_heads})",
            )

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layers)

    @property
    def has_vision(self) -> bool:
        return self.vision is not None

    def check_tokens(self, tokens: Iterable[int], what: str) -> None:
        """Raises `ConfigError` when an id lies outside the vocabulary."""
        for token in tokens:
            if not 0 <= token < self.vocab_size:
                raise ConfigError(
                    f"{what} holds token id {token}, outside the vocabulary of {self.vocab_size}"
                )

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Reads the dictionary of a config.json.

        Raises `ConfigError` naming the key for anything that cannot be right; warns once, with
        `DgemmaWarning`, about keys it does not know.
        """
        _check_model_type(raw)
        top = JsonReader(raw, "config.json")
        text_raw = top.mapping("text_config")
        if text_raw is None:
            raise ConfigError("config.json has no text_config; it must hold the language model's")
        text = JsonReader(text_raw, "text_config")
        _reject_unsupported(top, text)
        layers = read_layers(text)
        needed = "every DiffusionGemma layer has experts"
        config = cls(
            vocab_size=text.integer("vocab_size", 262_144),
            hidden_size=text.integer("hidden_size", 2304),
            intermediate_size=text.integer("intermediate_size", 9216),
            num_attention_heads=text.integer("num_attention_heads", 8),
            layers=layers,
            num_experts=text.required_integer("num_experts", needed),
            top_k_experts=text.required_integer("top_k_experts", needed),
            moe_intermediate_size=text.required_integer("moe_intermediate_size", needed),
            sliding_window=text.integer("sliding_window", 512),
            canvas_length=top.integer("canvas_length", 256),
            max_position_embeddings=text.integer("max_position_embeddings", 131_072),
            rms_norm_eps=text.number("rms_norm_eps", 1e-6),
            final_logit_softcapping=text.number("final_logit_softcapping", 30.0),
            pad_token_id=_special_token(top, text, "pad_token_id", 0),
            bos_token_id=_special_token(top, text, "bos_token_id", 2),
            eos_token_ids=_end_tokens(top, text),
            image_token_id=top.optional_integer("image_token_id"),
            boi_token_id=top.optional_integer("boi_token_id"),
            eoi_token_id=top.optional_integer("eoi_token_id"),
            bidirectional_images=text.value("use_bidirectional_attention") == "vision",
            vision=top.mapping("vision_config"),
        )
        warn_unknown([*top.unknown(_IGNORED_KEYS), *text.unknown(_IGNORED_KEYS)], "config.json")
        return config


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """How to decode: the sampler's numbers, checked.

    `t_max` is the temperature of the first step and `t_min` the value the schedule tends to;
    entropies and bounds are in nats. Unlike the reference, integers are accepted where floats are
    meant and `t_max == t_min` is allowed; `max_new_tokens` of the file is not read, because the
    release caps it at one canvas.
    """

    max_denoising_steps: int = 48
    t_max: float = 0.8
    t_min: float = 0.4
    entropy_bound: float = 0.1
    stability_threshold: int = 1
    confidence_threshold: float = 0.005
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, right, fix in (
            ("max_denoising_steps", self.max_denoising_steps >= 1, "at least 1"),
            ("t_min", self.t_min >= 0, "at least 0"),
            ("t_max", self.t_max >= self.t_min, f"at least t_min ({self.t_min})"),
            ("t_max", self.t_max <= _LARGEST_SETTING, f"at most {_LARGEST_SETTING:g}"),
            ("entropy_bound", self.entropy_bound > 0, "above 0 (nats)"),
            (
                "entropy_bound",
                self.entropy_bound <= _LARGEST_SETTING,
                f"at most {_LARGEST_SETTING:g}",
            ),
            ("stability_threshold", self.stability_threshold >= 0, "at least 0 (steps)"),
            ("confidence_threshold", self.confidence_threshold > 0, "above 0 (nats)"),
        ):
            require(right, name, getattr(self, name), fix)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any] | None) -> GenerationConfig:
        """Reads a generation_config.json; absent files, absent keys and nulls take the defaults."""
        reader = JsonReader(raw or {}, "generation_config.json")
        sampler = JsonReader(reader.mapping("sampler_config") or {}, "sampler_config")
        class_name = sampler.value("_cls_name")
        if class_name not in (None, "EntropyBoundSamplerConfig"):
            raise ConfigError(
                f"sampler_config names {class_name!r}; only EntropyBoundSamplerConfig is known"
            )
        config = cls(
            max_denoising_steps=reader.integer("max_denoising_steps", cls.max_denoising_steps),
            t_max=reader.number("t_max", cls.t_max),
            t_min=reader.number("t_min", cls.t_min),
            entropy_bound=sampler.number("entropy_bound", cls.entropy_bound),
            stability_threshold=reader.integer("stability_threshold", cls.stability_threshold),
            confidence_threshold=reader.number("confidence_threshold", cls.confidence_threshold),
            eos_token_ids=reader.token_ids("eos_token_id"),
        )
        warn_unknown(
            [*reader.unknown(_IGNORED_GENERATION_KEYS), *sampler.unknown(frozenset())],
            "generation_config.json",
        )
        return config

    def override(self, **changes: Any) -> GenerationConfig:
        """A copy with the changes that are not None, checked again."""
        given = {name: value for name, value in changes.items() if value is not None}
        for name, value in given.items():
            current = getattr(self, name)
            if isinstance(current, float):
                given[name] = to_number(value, name)
            elif isinstance(current, int):
                given[name] = to_integer(value, name)
        return dataclasses.replace(self, **given)


def _special_token(top: JsonReader, text: JsonReader, key: str, default: int) -> int | None:
    """The top level's token before the text model's; absent in both: the default, null: None."""
    value = top.optional_integer(key, text.optional_integer(key))
    absent = key not in top.raw and key not in text.raw
    return default if value is None and absent else value


def _end_tokens(top: JsonReader, text: JsonReader) -> tuple[int, ...]:
    """Both levels' tokens together: each may be an id or a list, and neither hides the other's."""
    key = "eos_token_id"
    absent = key not in top.raw and key not in text.raw
    return (1,) if absent else union(text.token_ids(key), top.token_ids(key))


def _check_model_type(raw: Mapping[str, Any]) -> None:
    found = raw.get("model_type")
    if found == MODEL_TYPE:
        return
    hint = ""
    if isinstance(found, str) and found.startswith("gemma"):
        hint = "; it is an autoregressive Gemma, which mlx-lm or transformers can run"
    shown = "no model_type" if found is None else f"model_type {found!r}"
    raise ConfigError(f"config.json has {shown}; supported is {MODEL_TYPE!r}{hint}")


def _reject_unsupported(top: JsonReader, text: JsonReader) -> None:
    activation = text.value("hidden_activation")
    if activation not in (None, "gelu_pytorch_tanh"):
        raise ConfigError(f"hidden_activation {activation!r} is unknown; known: gelu_pytorch_tanh")
    if text.value("attention_bias"):
        raise ConfigError("attention_bias is true; DiffusionGemma's projections have no biases")
    if top.value("tie_word_embeddings") is False or text.value("tie_word_embeddings") is False:
        raise ConfigError("tie_word_embeddings is false; only tied checkpoints are supported")
    bidirectional = text.value("use_bidirectional_attention")
    if bidirectional not in (None, "vision"):
        raise ConfigError(
            f"use_bidirectional_attention {bidirectional!r} is not supported; use 'vision' or null"
        )
