"""config.json and generation_config.json in every spelling, transformers' classes as the oracle."""

import copy
import json
import math

import numpy as np
import pytest
from checkpoint_folders import config_json

from dgemma import json_reader
from dgemma.checkpoint import bundled_checkpoint
from dgemma.config import FULL, SLIDING, GenerationConfig, ModelConfig, Rope
from dgemma.errors import ConfigError, DgemmaWarning

RELEASE_KINDS = [FULL if index in (5, 11, 17, 23, 29) else SLIDING for index in range(30)]


@pytest.fixture(autouse=True)
def _no_memory_of_warnings(monkeypatch):
    monkeypatch.setattr(json_reader, "_warned", set())


def read(**changes):
    return ModelConfig.from_dict(config_json(**changes))


def failure(**changes):
    with pytest.raises(ConfigError) as caught:
        read(**changes)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 300
    return message


def release(per_layer):
    """The release's configuration, in one of the two spellings in use."""
    text = {
        "model_type": "diffusion_gemma_text",
        "vocab_size": 262144,
        "hidden_size": 2816,
        "num_hidden_layers": 30,
        "num_attention_heads": 16,
        "head_dim": 256,
        "num_key_value_heads": 8,
        "sliding_window": 1024,
        "intermediate_size": 2112,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
        "final_logit_softcapping": 30.0,
        "rms_norm_eps": 1e-6,
        "use_bidirectional_attention": "vision",
        "max_position_embeddings": 262144,
        "layer_types": RELEASE_KINDS,
        "rope_parameters": {
            FULL: {
                "rope_type": "proportional",
                "rope_theta": 1e6,
                "partial_rotary_factor": 0.25,
            },
            SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        },
    }
    if per_layer:
        text["per_layer_config"] = {
            str(i): {"head_dim": 512, "num_key_value_heads": 2} for i in (5, 11, 17, 23, 29)
        }
    else:
        text |= {"global_head_dim": 512, "num_global_key_value_heads": 2}
    return {
        "model_type": "diffusion_gemma",
        "canvas_length": 256,
        "tie_word_embeddings": True,
        "eos_token_id": [1, 106],
        "pad_token_id": 0,
        "bos_token_id": 2,
        "boi_token_id": 255999,
        "image_token_id": 258880,
        "eoi_token_id": 258882,
        "text_config": text,
        "vision_config": {"model_type": "gemma4_vision", "hidden_size": 1152},
    }


# Geometry


def test_both_spellings_of_the_release_are_equal():
    one, other = (ModelConfig.from_dict(release(per_layer)) for per_layer in (True, False))
    assert one == other
    assert one.num_hidden_layers == 30
    assert one.bidirectional_images
    assert one.has_vision
    assert [layer.kind for layer in one.layers] == RELEASE_KINDS
    for layer in one.layers:
        assert (layer.head_dim, layer.num_key_value_heads) == (
            (256, 8) if layer.is_sliding else (512, 2)
        )
    assert one.layers[0].rope == Rope(theta=1e4, rotated_pairs=128)
    assert one.layers[5].rope == Rope(theta=1e6, rotated_pairs=64)


def test_the_bundled_checkpoint_reads_without_a_warning():
    raw = json.loads((bundled_checkpoint() / "config.json").read_text())
    config = ModelConfig.from_dict(raw)
    assert [layer.head_dim for layer in config.layers] == [32, 32, 64, 32, 32, 64]
    assert [layer.num_key_value_heads for layer in config.layers] == [2, 2, 1, 2, 2, 1]
    assert config.sliding_window == 128


def oracle(raw):
    transformers = pytest.importorskip("transformers")
    return transformers.DiffusionGemmaConfig(**copy.deepcopy(raw))


def agree(ours, theirs):
    text = theirs.text_config
    for name in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_experts",
        "top_k_experts",
        "moe_intermediate_size",
        "sliding_window",
        "max_position_embeddings",
        "rms_norm_eps",
        "final_logit_softcapping",
    ):
        assert getattr(ours, name) == getattr(text, name), name
    assert ours.canvas_length == theirs.canvas_length
    assert [layer.kind for layer in ours.layers] == list(text.layer_types)
    for index, layer in enumerate(ours.layers):
        their_layer = text.per_layer_config[index]
        assert layer.head_dim == their_layer.head_dim
        assert layer.num_key_value_heads == their_layer.num_key_value_heads
        rope = text.rope_parameters[layer.kind]
        assert layer.rope.theta == rope["rope_theta"]


@pytest.mark.parametrize(
    "raw",
    [
        release(per_layer=True),
        release(per_layer=False),
        config_json(),
        config_json(text={"layer_types": None, "num_hidden_layers": 13}),
        config_json(text={"per_layer_config": {"1": {"head_dim": 64}}}),
        config_json(text={"per_layer_config": {}}),
        config_json(text={"per_layer_config": None}),
        config_json(text={"num_global_key_value_heads": None}),
        config_json(text={"rope_parameters": None, "sliding_window": 9}),
    ],
    ids=range(9),
)
def test_transformers_reads_the_same_geometry(raw):
    agree(ModelConfig.from_dict(raw), oracle(raw))


def test_what_transformers_saves_is_read_as_what_it_was_given(tmp_path):
    """`save_pretrained` writes `per_layer_config`, numbers padded with zeros to equal width."""
    for raw in (release(per_layer=False), config_json()):
        oracle(raw).save_pretrained(tmp_path)
        saved = json.loads((tmp_path / "config.json").read_text())
        one, other = ModelConfig.from_dict(saved), ModelConfig.from_dict(raw)
        assert one.layers == other.layers
        agree(one, oracle(raw))


@pytest.mark.parametrize("head_dim", [2, 10, 32, 36, 512])
@pytest.mark.parametrize("factor", [0.25, 0.5, 0.3, 1.0])
def test_inverse_frequencies_are_those_of_transformers(head_dim, factor):
    """B13: the exponent's denominator is head_dim; pairs that do not turn have frequency 0."""
    torch = pytest.importorskip("torch")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": factor}
    ropes = {FULL: rope, SLIDING: {"rope_type": "default", "rope_theta": 1e4}}
    raw = config_json(text={"global_head_dim": head_dim, "rope_parameters": ropes})
    layer = ModelConfig.from_dict(raw).layers[-1]
    text = oracle(raw).text_config
    theirs, scale = ROPE_INIT_FUNCTIONS["proportional"](text, torch.device("cpu"), layer_type=FULL)
    ours = layer.rope.inverse_frequencies(head_dim)
    assert scale == 1
    assert len(ours) == head_dim // 2
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-6, atol=0)
    turning = int(factor * head_dim) // 2
    assert all(ours[:turning])
    assert not any(ours[turning:])


def test_absent_rope_parameters_are_the_defaults():
    """B14."""
    spelled = {
        SLIDING: {"rope_type": "default", "rope_theta": 10_000},
        FULL: {
            "rope_type": "proportional",
            "rope_theta": 1_000_000,
            "partial_rotary_factor": 0.25,
        },
    }
    assert read() == read(text={"rope_parameters": None}) == read(text={"rope_parameters": spelled})


def test_nested_rope_parameters_are_used():
    """B14."""
    ropes = {
        SLIDING: {"rope_type": "default", "rope_theta": 123},
        FULL: {"rope_type": "proportional", "rope_theta": 7e5, "partial_rotary_factor": 0.5},
    }
    config = read(text={"rope_parameters": ropes})
    assert config.layers[0].rope == Rope(theta=123.0, rotated_pairs=8)
    assert config.layers[1].rope == Rope(theta=7e5, rotated_pairs=8)


@pytest.mark.parametrize(
    ("ropes", "said"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, FULL),  # B14: flat, of older transformers
        ({SLIDING: {"rope_theta": 1e4}}, FULL),
        ({FULL: {"rope_theta": 1e4}, SLIDING: 5}, SLIDING),
        ([1], "rope_parameters"),
    ],
)
def test_rope_parameters_of_another_shape_name_what_is_missing(ropes, said):
    """B14."""
    assert said in failure(text={"rope_parameters": ropes})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rope_type": "yarn"}, "yarn"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_theta": "1e6"}, "rope_theta"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ({"partial_rotary_factor": -0.5}, "partial_rotary_factor"),
        ({"factor": 8.0}, "factor"),
        ({"rope_type": "default"}, "proportional"),
    ],
)
def test_a_rope_we_do_not_compute_is_refused(change, said):
    full = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    ropes = {SLIDING: {"rope_theta": 1e4}, FULL: full | change}
    assert said in failure(text={"rope_parameters": ropes})


def test_a_last_layer_declared_sliding_is_full():
    """As the reference does, with a warning."""
    kinds = [FULL, SLIDING, SLIDING]
    text = {"layer_types": kinds, "num_hidden_layers": 3}
    with pytest.warns(DgemmaWarning, match="last layer"):
        config = read(text=text)
    assert [layer.kind for layer in config.layers] == [FULL, SLIDING, FULL]
    assert config.layers[-1].head_dim == 32
    assert kinds == [FULL, SLIDING, SLIDING]  # the caller's list is left alone
    agree(config, oracle(config_json(text=text)))


# Values


def test_integers_are_accepted_where_floats_are_meant_and_the_other_way_round():
    config = read(
        canvas_length=16.0,
        text={"rms_norm_eps": 1, "final_logit_softcapping": 30, "hidden_size": 64.0},
    )
    assert config.rms_norm_eps == 1.0
    assert isinstance(config.final_logit_softcapping, float)
    assert config.hidden_size == 64
    assert isinstance(config.hidden_size, int)
    assert isinstance(config.canvas_length, int)


@pytest.mark.parametrize(
    "key", ["canvas_length", "rms_norm_eps", "final_logit_softcapping", "sliding_window"]
)
def test_a_null_is_the_default(key):
    changes = {key: None} if key == "canvas_length" else {"text": {key: None}}
    raw = config_json(**changes)
    table = raw if key == "canvas_length" else raw["text_config"]
    nulled = ModelConfig.from_dict(raw)
    del table[key]
    assert nulled == ModelConfig.from_dict(raw)


NUMBERS = [
    "canvas_length",
    "hidden_size",
    "vocab_size",
    "num_experts",
    "num_hidden_layers",
    "head_dim",
    "global_head_dim",
    "sliding_window",
    "rms_norm_eps",
    "final_logit_softcapping",
]


@pytest.mark.parametrize("key", NUMBERS)
@pytest.mark.parametrize(
    "value", ["64", True, [64], {}, -1, 0, math.nan, math.inf, 10**400], ids=str
)
def test_a_wrong_value_is_named(key, value):
    if key == "canvas_length":
        message = failure(canvas_length=value)
    else:
        message = failure(text={"layer_types": None, key: value})
    assert key.removeprefix("global_") in message


@pytest.mark.parametrize("key", [key for key in NUMBERS if "_eps" not in key and "cap" not in key])
def test_a_fraction_is_no_integer(key):
    changes = {key: 2.5} if key == "canvas_length" else {"text": {key: 2.5}}
    assert f"{key} is 2.5" in failure(**changes)


@pytest.mark.parametrize("key", ["num_experts", "top_k_experts", "moe_intermediate_size"])
def test_experts_are_required(key):
    assert key in failure(text={key: None})
    raw = config_json()
    del raw["text_config"][key]
    with pytest.raises(ConfigError, match=key):
        ModelConfig.from_dict(raw)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ({"top_k_experts": 4}, "top_k_experts"),
        ({"num_attention_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim of layer 0"),
        ({"num_hidden_layers": 0, "layer_types": []}, "num_hidden_layers"),
        ({"num_hidden_layers": 5}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9, "layer_types": None}, "num_hidden_layers"),
        ({"layer_types": [SLIDING, "linear_attention", SLIDING, FULL]}, "layer_types[1]"),
        ({"layer_types": [SLIDING, ["x"], SLIDING, FULL]}, "layer_types[1]"),
        ({"layer_types": "full"}, "layer_types"),
        ({"layer_types": 4}, "layer_types"),
        ({"per_layer_config": [1]}, "per_layer_config"),
        ({"per_layer_config": {"1": 5}}, "per_layer_config"),
        ({"per_layer_config": {"4": {"head_dim": 8}}}, "per_layer_config.4"),
        ({"per_layer_config": {"-1": {"head_dim": 8}}}, "per_layer_config.-1"),
        ({"per_layer_config": {"x": {"head_dim": 8}}}, "per_layer_config.x"),
        ({"per_layer_config": {"1": {}, "01": {}}}, "twice"),
        ({"per_layer_config": {"1": {"skip": ["mlp"]}}}, "per_layer_config.1.skip"),
        ({"per_layer_config": {"1": {"head_dim": "x"}}}, "per_layer_config.1.head_dim"),
        ({"hidden_activation": "silu"}, "silu"),
        ({"attention_bias": True}, "attention_bias"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings"),
        ({"use_bidirectional_attention": "all"}, "all"),
        ({"sliding_window": 1}, "sliding_window"),
        ({"sliding_window": 2**31}, "sliding_window"),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings"),
    ],
)
def test_a_network_we_cannot_run_is_named(text, said):
    assert said in failure(text=text)


def test_the_text_config_must_be_an_object():
    for value in (None, [], "x", 5):
        raw = config_json()
        raw["text_config"] = value
        with pytest.raises(ConfigError, match="text_config"):
            ModelConfig.from_dict(raw)
    assert "vision_config" in failure(vision_config=[1])


def test_unknown_keys_are_warned_about_once():
    changes = {"surprise": 1, "text": {"another": 2}}
    with pytest.warns(DgemmaWarning, match="2 unknown key.*another, surprise") as caught:
        read(**copy.deepcopy(changes))
    assert len(caught) == 1
    read(**copy.deepcopy(changes))  # a second warning would be an error here
    with pytest.warns(DgemmaWarning, match="third"):
        read(third=1)


def test_the_keys_transformers_writes_are_all_known():
    for raw in (release(per_layer=True), config_json()):
        ModelConfig.from_dict(json.loads(oracle(raw).to_json_string(use_diff=False)))


@pytest.mark.parametrize(
    ("top", "text", "expected"),
    [
        (1, None, (1,)),
        ([1, 106, 50], None, (1, 106, 50)),
        ([106], 1, (1, 106)),
        ([1, 1, 6], [6, 7], (6, 7, 1)),
        (None, None, ()),
        (1.0, None, (1,)),
        ([], None, ()),
    ],
)
def test_end_tokens_may_be_an_id_or_a_list_at_either_level(top, text, expected):
    """B37: one source never hides another."""
    assert read(eos_token_id=top, text={"eos_token_id": text}).eos_token_ids == expected


@pytest.mark.parametrize("value", ["1", [1, None], [[1]], {"id": 1}, True])
def test_an_end_token_that_is_no_id_is_named(value):
    assert "eos_token_id" in failure(eos_token_id=value)


def test_absent_special_tokens_are_the_reference_defaults():
    raw = config_json()
    del raw["eos_token_id"]
    config = ModelConfig.from_dict(raw)
    theirs = oracle(raw).text_config
    assert config.pad_token_id == theirs.pad_token_id
    assert config.bos_token_id == theirs.bos_token_id
    assert config.eos_token_ids == (theirs.eos_token_id,)
    assert read(pad_token_id=None).pad_token_id is None
    assert read(text={"pad_token_id": 9}).pad_token_id == 9


def test_ids_outside_the_vocabulary_are_named():
    config = read()
    config.check_tokens([0, 69], "the prompt")
    for token in (-1, 70):
        with pytest.raises(ConfigError, match=f"prompt.*{token}.*70"):
            config.check_tokens([0, token], "the prompt")


# generation_config.json


def test_the_generation_config_of_the_release():
    """B32 (a): max_new_tokens 256 caps nothing; B37: the third end token."""
    config = GenerationConfig.from_dict(
        {
            "max_denoising_steps": 48,
            "t_max": 0.8,
            "t_min": 0.4,
            "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0.1},
            "stability_threshold": 1,
            "confidence_threshold": 0.005,
            "max_new_tokens": 256,
            "eos_token_id": [1, 106, 50],
            "transformers_version": "5.11.0",
        }
    )
    assert config == GenerationConfig(eos_token_ids=(1, 106, 50))


def test_nulls_and_absence_are_the_reference_defaults():
    """B32 (b) and (c)."""
    pytest.importorskip("transformers")
    from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
        DiffusionGemmaGenerationConfig,
    )

    nulls = dict.fromkeys(
        "max_denoising_steps t_max t_min sampler_config stability_threshold "
        "confidence_threshold max_new_tokens eos_token_id".split()
    )
    ours = GenerationConfig.from_dict(nulls)
    assert ours == GenerationConfig.from_dict({}) == GenerationConfig.from_dict(None)
    assert ours == GenerationConfig.from_dict({"sampler_config": {"entropy_bound": None}})
    theirs = DiffusionGemmaGenerationConfig._get_default_generation_params()
    for name in ("max_denoising_steps", "t_max", "t_min", "stability_threshold"):
        assert theirs[name] == getattr(ours, name)
    assert theirs["confidence_threshold"] == ours.confidence_threshold
    assert theirs["sampler_config"].entropy_bound == ours.entropy_bound


def test_integers_and_a_constant_temperature_are_allowed():
    config = GenerationConfig.from_dict(
        {"t_max": 1, "t_min": 1, "sampler_config": {"entropy_bound": 2}, "stability_threshold": 0}
    )
    assert (config.t_max, config.t_min, config.entropy_bound) == (1.0, 1.0, 2.0)
    assert isinstance(config.entropy_bound, float)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"max_denoising_steps": 0}, "max_denoising_steps"),
        ({"max_denoising_steps": 4.5}, "max_denoising_steps"),
        ({"max_denoising_steps": "48"}, "max_denoising_steps"),
        ({"t_min": 0.9}, "t_max"),
        ({"t_min": -0.1}, "t_min"),
        ({"t_max": math.nan}, "t_max"),
        ({"t_max": 1e300}, "t_max"),
        ({"sampler_config": {"entropy_bound": 1e39}}, "entropy_bound"),
        ({"confidence_threshold": 0}, "confidence_threshold"),
        ({"stability_threshold": -1}, "stability_threshold"),
        ({"sampler_config": {"entropy_bound": 0}}, "entropy_bound"),
        ({"sampler_config": {"_cls_name": "Other"}}, "Other"),
        ({"sampler_config": [1]}, "sampler_config"),
        ({"eos_token_id": ["x"]}, "eos_token_id"),
    ],
)
def test_a_wrong_generation_setting_is_named(raw, said):
    with pytest.raises(ConfigError, match=said) as caught:
        GenerationConfig.from_dict(raw)
    assert "\n" not in str(caught.value)


def test_overrides_are_checked_again():
    config = GenerationConfig().override(t_max=1, max_denoising_steps=3, t_min=None)
    assert (config.t_max, config.max_denoising_steps, config.t_min) == (1.0, 3, 0.4)
    for change in ({"t_max": 0.1}, {"t_max": "x"}, {"max_denoising_steps": 1.5}):
        with pytest.raises(ConfigError):
            GenerationConfig().override(**change)


def test_unknown_generation_keys_are_warned_about():
    with pytest.warns(DgemmaWarning, match="surprise"):
        GenerationConfig.from_dict({"surprise": 1})
