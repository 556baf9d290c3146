"""Opening a checkpoint folder: everything needed is there, and what is wrong is one line."""

import json
import warnings

import numpy as np
import pytest
from checkpoint_folders import (
    DENSE,
    EXPERTS,
    HIDDEN,
    INNER,
    LAYERS,
    as_array,
    config_json,
    quantize,
    raw,
    safetensors_bytes,
    text_shapes,
    text_tensors,
    write_folder,
    write_index,
)

from dgemma.checkpoint import bundled_checkpoint, open_checkpoint
from dgemma.config import ModelConfig
from dgemma.errors import CheckpointError, ConfigError, DgemmaError, DgemmaWarning
from dgemma.tensors import expected_tensors, tensor_class

EMBEDDING = "model.decoder.embed_tokens.weight"


@pytest.fixture
def rng():
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print("seed", seed)
    return np.random.default_rng(seed)


@pytest.fixture
def tensors(rng):
    return text_tensors(rng)


def failure(folder, kind=CheckpointError, **options):
    with pytest.raises(kind) as caught:
        open_checkpoint(folder, **options)
    message = str(caught.value)
    assert isinstance(caught.value, DgemmaError)
    assert "\n" not in message
    return message


def renamed(tensors, rename):
    return {rename(name): tensor for name, tensor in tensors.items()}


# The model's tensors


def test_the_expected_tensors_are_the_layout_of_the_release():
    assert expected_tensors(ModelConfig.from_dict(config_json())) == text_shapes()


def test_the_expected_tensors_are_what_transformers_saves(tmp_path):
    """The oracle: a model built from the same config.json, saved by its own `save_pretrained`."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)
    vision = {
        "model_type": "gemma4_vision",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "patch_size": 4,
        "position_embedding_size": 8,
        "standardize": True,
    }
    ids = {"boi_token_id": 17, "image_token_id": 18, "eoi_token_id": 19}
    config = transformers.DiffusionGemmaConfig(**config_json(vision_config=vision, **ids))
    model = transformers.DiffusionGemmaForBlockDiffusion(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path, strict=True)
    # transformers does not write its class attribute of the same value.
    assert checkpoint.config.final_logit_softcapping == 30.0
    text = {
        name: info.shape
        for name, info in checkpoint.tensors.items()
        if tensor_class(name) != "vision"
    }
    assert text == text_shapes()
    state = model.state_dict()
    for name, info in checkpoint.tensors.items():
        expected = state[name].view(torch.int16).numpy().view(np.uint16)
        assert info.dtype == "BF16"
        np.testing.assert_array_equal(checkpoint.read(name), expected)
    assert checkpoint.has_vision_weights


def test_the_bundled_checkpoint_opens_without_a_warning():
    checkpoint = open_checkpoint(bundled_checkpoint(), strict=True)
    path = bundled_checkpoint() / "model.safetensors"
    header_bytes = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    assert checkpoint.format == "hf"
    assert checkpoint.weight_bytes == path.stat().st_size - header_bytes
    assert checkpoint.generation.eos_token_ids == (1, 6)
    assert checkpoint.config.canvas_length == 128


def test_every_file_of_a_shipped_checkpoint_is_there():
    """B71: tokenizer and template travel with the weights."""
    names = {path.name for path in bundled_checkpoint().iterdir()}
    assert {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "chat_template.jinja",
    } < names


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("shards", [0, 3])
def test_tensors_are_read_bit_by_bit(tmp_path, rng, dtype, shards):
    """B26."""
    tensors = text_tensors(rng, dtype)
    checkpoint = open_checkpoint(write_folder(tmp_path, tensors, shards=shards))
    assert set(checkpoint.tensors) == set(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(
            checkpoint.read(name).view(np.uint8), as_array(tensor).view(np.uint8)
        )
        info = checkpoint.tensors[name]
        assert (info.name, info.dtype, info.shape, info.nbytes) == (
            name,
            dtype,
            tensor.shape,
            len(tensor.data),
        )
    assert checkpoint.weight_bytes == sum(len(tensor.data) for tensor in tensors.values())


def test_a_layer_scalar_per_direction_is_kept(tmp_path, tensors):
    """B02's loading half: encoder and decoder scalars are different tensors, never merged."""
    checkpoint = open_checkpoint(write_folder(tmp_path, tensors))
    for index in range(len(LAYERS)):
        for name in (
            f"model.decoder.layers.{index}.layer_scalar",
            f"model.encoder.language_model.layers.{index}.layer_scalar",
        ):
            assert checkpoint.read(name) == as_array(tensors[name])


# Names


PREFIXES = {
    "bare": lambda name: name.removeprefix("model."),
    "language_model.model": lambda name: name.replace("model.", "language_model.model.", 1),
    "model.language_model": lambda name: name.replace("model.", "model.language_model.", 1),
    "wrapped twice": lambda name: f"module._orig_mod.{name}",
    "no decoder": lambda name: name.replace("model.decoder.", "language_model.model.", 1),
    "encoder without language_model": lambda name: name.replace(
        "model.encoder.language_model.", "encoder.", 1
    ),
}


@pytest.mark.parametrize("spelling", PREFIXES)
def test_known_prefixes_are_mapped(tmp_path, tensors, spelling):
    """B11."""
    folder = write_folder(tmp_path, renamed(tensors, PREFIXES[spelling]))
    checkpoint = open_checkpoint(folder, strict=True)
    assert set(checkpoint.tensors) == set(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(checkpoint.read(name), as_array(tensor))


def test_an_unknown_tensor_is_warned_about_once(tmp_path, rng, tensors):
    """B11: one warning with the count and the first names."""
    for name in ("junk.weight", "model.decoder.layers.0.junk", "model.decoder.layers.99.mlp.x"):
        tensors[name] = raw(rng, "BF16", 2)
    folder = write_folder(tmp_path, tensors)
    with pytest.warns(DgemmaWarning, match="3 tensor.*junk.weight") as caught:
        checkpoint = open_checkpoint(folder)
    assert len(caught) == 1
    assert "junk.weight" not in checkpoint.tensors


def test_an_unknown_tensor_is_an_error_when_strict(tmp_path, rng, tensors):
    """B11."""
    folder = write_folder(tmp_path, tensors | {"junk.weight": raw(rng, "BF16", 2)})
    assert "junk.weight" in failure(folder, strict=True)


@pytest.mark.parametrize("name", sorted(text_shapes()))
def test_a_missing_tensor_is_always_an_error(tmp_path, tensors, name):
    """B11, and B02's trap: a missing encoder layer_scalar must not load as anything."""
    del tensors[name]
    message = failure(write_folder(tmp_path, tensors))
    assert "lacks 1 tensor" in message
    assert name in message


def test_many_missing_tensors_are_counted(tmp_path, tensors):
    kept = {name: tensor for name, tensor in tensors.items() if "layers.1." not in name}
    message = failure(write_folder(tmp_path, kept))
    assert f"lacks {len(tensors) - len(kept)} tensor(s)" in message
    assert len(message) < 400


def test_the_head_never_becomes_the_embedding(tmp_path, tensors):
    """B08."""
    tensors["lm_head.weight"] = tensors.pop(EMBEDDING)
    message = failure(write_folder(tmp_path, tensors))
    assert EMBEDDING in message
    assert "lm_head" in message


def test_a_stored_copy_of_the_head_is_ignored(tmp_path, rng, tensors):
    tensors["lm_head.weight"] = raw(rng, "BF16", *tensors[EMBEDDING].shape)
    checkpoint = open_checkpoint(write_folder(tmp_path, tensors), strict=True)
    assert "lm_head.weight" not in checkpoint.tensors
    np.testing.assert_array_equal(checkpoint.read(EMBEDDING), as_array(tensors[EMBEDDING]))


def test_a_head_of_another_shape_is_refused(tmp_path, rng, tensors):
    tensors["lm_head.weight"] = raw(rng, "BF16", 3, HIDDEN)
    assert "lm_head.weight" in failure(write_folder(tmp_path, tensors))


def test_copies_of_encoder_text_weights_are_ignored_with_one_warning(tmp_path, rng, tensors):
    copies = {
        name.replace("model.decoder.", "model.encoder.language_model."): raw(
            rng, "BF16", *tensor.shape
        )
        for name, tensor in tensors.items()
        if "mlp" in name or "embed_tokens" in name
    }
    folder = write_folder(tmp_path, copies | tensors)
    with pytest.warns(DgemmaWarning, match=f"{len(copies)} encoder text tensor") as caught:
        checkpoint = open_checkpoint(folder, strict=True)
    assert len(caught) == 1
    assert set(checkpoint.tensors) == set(tensors)


def test_only_copies_of_known_tensors_count_as_copies(tmp_path, rng, tensors):
    name = "model.encoder.language_model.layers.0.junk.weight"
    folder = write_folder(tmp_path, tensors | {name: raw(rng, "BF16", 2)})
    assert name in failure(folder, strict=True)


def test_derived_buffers_are_ignored_without_noise(tmp_path, rng, tensors):
    tensors["model.decoder.rotary_emb.full_attention_inv_freq"] = raw(rng, "F32", 4)
    tensors["model.decoder.embed_tokens.embed_scale"] = raw(rng, "F32")
    open_checkpoint(write_folder(tmp_path, tensors), strict=True)


@pytest.mark.parametrize("wrapper", ["model.encoder.", "", "model."])
def test_vision_tensors_are_kept_without_noise(tmp_path, rng, tensors, wrapper):
    """B30 and B31: standardization and clipping tensors belong to the tower, flag on or off."""
    tower = {
        "vision_tower.std_bias": raw(rng, "BF16", 8),
        "vision_tower.std_scale": raw(rng, "BF16", 8),
        "vision_tower.encoder.layers.0.mlp.up_proj.input_min": raw(rng, "BF16"),
        "vision_tower.encoder.layers.0.mlp.up_proj.output_max": raw(rng, "BF16"),
        "vision_tower.patch_embedder.input_proj.weight": raw(rng, "BF16", 8, 12),
        "embed_vision.embedding_projection.weight": raw(rng, "BF16", HIDDEN, 8),
    }
    stored = {f"{wrapper}{name}": tensor for name, tensor in tower.items()}
    checkpoint = open_checkpoint(write_folder(tmp_path, tensors | stored), strict=True)
    assert checkpoint.has_vision_weights
    for name, tensor in tower.items():
        canonical = f"model.encoder.{name}"
        assert tensor_class(canonical) == "vision"
        np.testing.assert_array_equal(checkpoint.read(canonical), as_array(tensor))


def test_a_checkpoint_without_a_tower_opens(tmp_path, tensors):
    assert not open_checkpoint(write_folder(tmp_path, tensors)).has_vision_weights


def test_two_spellings_of_one_tensor_are_refused(tmp_path, tensors):
    tensors["decoder.norm.weight"] = tensors["model.decoder.norm.weight"]
    message = failure(write_folder(tmp_path, tensors))
    assert "decoder.norm.weight" in message


# Shapes and types


def test_a_wrong_shape_names_tensor_found_and_expected(tmp_path, rng, tensors):
    name = "model.decoder.layers.1.self_attn.q_proj.weight"
    tensors[name] = raw(rng, "BF16", HIDDEN, 96)
    message = failure(write_folder(tmp_path, tensors))
    assert name in message
    assert f"[{HIDDEN}, 96]" in message
    assert f"[128, {HIDDEN}]" in message


def test_a_value_projection_in_a_full_layer_is_unknown(tmp_path, rng, tensors):
    """Full layers take V from the raw k_proj output; a stored v_proj would change the result."""
    tensors["model.decoder.layers.1.self_attn.v_proj.weight"] = raw(rng, "BF16", 32, HIDDEN)
    assert "v_proj" in failure(write_folder(tmp_path, tensors), strict=True)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F64", "U8", "I64"])
def test_a_dense_tensor_of_another_type_is_refused(tmp_path, rng, tensors, dtype):
    name = "model.decoder.layers.0.mlp.up_proj.weight"
    tensors[name] = raw(rng, dtype, DENSE, HIDDEN)
    message = failure(write_folder(tmp_path, tensors))
    assert name in message
    assert dtype in message


# Experts


def unpack(tensors, stem, *, per_expert, wrapper=""):
    """Splits packed experts into gate, up and down, one by one or stacked over experts."""
    gate_up = as_array(tensors.pop(f"{stem}.gate_up_proj"))
    down = as_array(tensors.pop(f"{stem}.down_proj"))
    parts = {"gate": gate_up[:, :INNER], "up": gate_up[:, INNER:], "down": down}
    kind = type(next(iter(tensors.values())))
    for part, stack in parts.items():
        if per_expert:
            for expert, matrix in enumerate(stack):
                tensors[f"{stem}.{expert}.{part}_proj.weight"] = kind(
                    "BF16", matrix.shape, matrix.tobytes()
                )
        else:
            tensors[f"{stem}.{wrapper}{part}_proj.weight"] = kind(
                "BF16", stack.shape, stack.tobytes()
            )


@pytest.mark.parametrize("shards", [0, 4])
@pytest.mark.parametrize("layout", ["one by one", "stacked", "switch_glu"])
def test_unpacked_experts_come_out_packed_gate_first(tmp_path, tensors, layout, shards):
    """B05: rows [0, I) gate, [I, 2I) up, expert by expert, to the bit."""
    packed = dict(tensors)
    for index in range(len(LAYERS)):
        unpack(
            tensors,
            f"model.decoder.layers.{index}.experts",
            per_expert=layout == "one by one",
            wrapper="switch_glu." if layout == "switch_glu" else "",
        )
    # Written expert 2 before expert 0: order in the file must not matter.
    folder = write_folder(tmp_path, dict(reversed(tensors.items())), shards=shards)
    checkpoint = open_checkpoint(folder, strict=True)
    assert set(checkpoint.tensors) == set(packed)
    for name, tensor in packed.items():
        assert checkpoint.tensors[name].shape == tensor.shape
        assert checkpoint.tensors[name].nbytes == len(tensor.data)
        np.testing.assert_array_equal(checkpoint.read(name), as_array(tensor))


def test_more_than_ten_experts_are_stacked_by_number(tmp_path, rng):
    """10 sorts before 2 as text."""
    tensors = text_tensors(rng)
    count = 12
    expected = {}
    for index in range(len(LAYERS)):
        layer = f"model.decoder.layers.{index}"
        tensors[f"{layer}.router.proj.weight"] = raw(rng, "BF16", count, HIDDEN)
        tensors[f"{layer}.router.per_expert_scale"] = raw(rng, "BF16", count)
        for name, shape in (
            ("gate_up_proj", (count, 2 * INNER, HIDDEN)),
            ("down_proj", (count, HIDDEN, INNER)),
        ):
            tensors[f"{layer}.experts.{name}"] = raw(rng, "BF16", *shape)
            expected[f"{layer}.experts.{name}"] = as_array(tensors[f"{layer}.experts.{name}"])
        unpack(tensors, f"{layer}.experts", per_expert=True)
    config = config_json(text={"num_experts": count})
    checkpoint = open_checkpoint(write_folder(tmp_path, tensors, config=config))
    for name, array in expected.items():
        np.testing.assert_array_equal(checkpoint.read(name), array)


def test_mlx_experts_with_a_weight_suffix_are_the_same(tmp_path, tensors):
    stored = renamed(tensors, lambda name: name + ".weight" if ".experts." in name else name)
    checkpoint = open_checkpoint(write_folder(tmp_path, stored), strict=True)
    assert set(checkpoint.tensors) == set(tensors)


@pytest.mark.parametrize("lost", ["1.up_proj", "0.gate_proj", f"{EXPERTS - 1}.down_proj"])
def test_a_missing_expert_is_named(tmp_path, tensors, lost):
    stem = "model.decoder.layers.2.experts"
    unpack(tensors, stem, per_expert=True)
    del tensors[f"{stem}.{lost}.weight"]
    message = failure(write_folder(tmp_path, tensors))
    assert stem in message
    expert, part = lost.split(".")
    assert f"expert {expert}" in message or "shape" in message
    assert part.removesuffix("_proj") in message


def test_an_expert_of_another_shape_is_named(tmp_path, rng, tensors):
    stem = "model.decoder.layers.0.experts"
    unpack(tensors, stem, per_expert=True)
    tensors[f"{stem}.1.up_proj.weight"] = raw(rng, "BF16", INNER, HIDDEN - 1)
    assert f"{stem}.1.up_proj.weight" in failure(write_folder(tmp_path, tensors))


def test_an_expert_of_another_type_is_refused(tmp_path, rng, tensors):
    """Stacked with the others, its bits would be read as another type's."""
    stem = "model.decoder.layers.0.experts"
    unpack(tensors, stem, per_expert=True)
    tensors[f"{stem}.1.up_proj.weight"] = raw(rng, "F16", INNER, HIDDEN)
    assert "different types" in failure(write_folder(tmp_path, tensors))


def test_experts_packed_and_one_by_one_at_once_are_refused(tmp_path, tensors):
    stem = "model.decoder.layers.0.experts"
    both = dict(tensors)
    unpack(both, stem, per_expert=True)
    assert stem in failure(write_folder(tmp_path, tensors | both))


# Shards and index


def test_a_missing_shard_is_named(tmp_path, tensors):
    """B09."""
    folder = write_folder(tmp_path, tensors, shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    message = failure(folder)
    assert "model-00002-of-00003.safetensors" in message
    assert "incomplete" in message


def test_a_missing_shard_is_named_without_an_index_too(tmp_path, tensors):
    """B09: the numbering of the files that are there tells of those that are not."""
    folder = write_folder(tmp_path, tensors, shards=3)
    (folder / "model.safetensors.index.json").unlink()
    open_checkpoint(folder, strict=True)
    (folder / "model-00003-of-00003.safetensors").unlink()
    assert "model-00003-of-00003.safetensors" in failure(folder)


@pytest.mark.parametrize(
    ("shards", "lost"), [(0, "model.safetensors"), (2, "model-00001-of-00002.safetensors")]
)
@pytest.mark.parametrize("index", [True, False])
def test_a_link_to_nothing_is_a_missing_file(tmp_path, tensors, shards, lost, index):
    """B09: the Hub's cache is made of links, and its blobs can be deleted apart from them."""
    folder = write_folder(tmp_path, tensors, shards=shards)
    if not index:
        (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    (folder / lost).rename(tmp_path / "blob")
    (folder / lost).symlink_to(tmp_path / "blob")
    open_checkpoint(folder, strict=True)
    (tmp_path / "blob").unlink()
    message = failure(folder)
    assert f"lacks 1 weight file(s): {lost}" in message
    assert "incomplete" in message


def test_a_missing_shard_of_single_experts_is_named(tmp_path, tensors):
    """B09: every packed name still has some piece left, and yet the folder is incomplete."""
    for index in range(len(LAYERS)):
        unpack(tensors, f"model.decoder.layers.{index}.experts", per_expert=True)
    names = list(tensors)
    lost = [name for name in names if ".1.up_proj" in name]
    folder = write_folder(tmp_path, {name: tensors[name] for name in names if name not in lost})
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    weight_map = {
        name: f"model-0000{2 if name in lost else 1}-of-00002.safetensors" for name in names
    }
    write_index(folder, weight_map)
    assert "model-00002-of-00002.safetensors" in failure(folder)


def test_a_stale_index_is_followed_no_further_than_it_holds(tmp_path, tensors):
    """B09's variant: the index names other files, but everything needed is there."""
    folder = write_folder(tmp_path, tensors, shards=2)
    write_index(
        folder,
        {name: f"model-{i % 30 + 1:05d}-of-00030.safetensors" for i, name in enumerate(tensors)},
    )
    with pytest.warns(DgemmaWarning, match="stale") as caught:
        checkpoint = open_checkpoint(folder)
    assert len(caught) == 1
    assert set(checkpoint.tensors) == set(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(checkpoint.read(name), as_array(tensor))


def test_a_stale_index_beside_too_few_files_is_an_error(tmp_path, tensors):
    """B09's variant, where something needed is nowhere."""
    del tensors["model.decoder.norm.weight"]
    folder = write_folder(tmp_path, tensors, shards=2)
    write_index(folder, dict.fromkeys(tensors, "model-00001-of-00030.safetensors"))
    assert "model-00001-of-00030.safetensors" in failure(folder)


def test_an_index_that_misplaces_tensors_is_stale(tmp_path, tensors):
    folder = write_folder(tmp_path, tensors, shards=2)
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    weight_map = {name: files[i % 2] for i, name in enumerate(tensors)}
    weight_map[EMBEDDING] = files[1] if weight_map[EMBEDDING] == files[0] else files[0]
    write_index(folder, weight_map)
    with pytest.warns(DgemmaWarning, match="stale"):
        open_checkpoint(folder)


def test_weight_files_that_the_index_does_not_name_are_left_alone(tmp_path, rng, tensors):
    folder = write_folder(tmp_path, tensors, shards=2)
    other = {name: raw(rng, "BF16", 5) for name in tensors}
    (folder / "consolidated.safetensors").write_bytes(safetensors_bytes(other))
    open_checkpoint(folder, strict=True)


def test_a_tensor_in_two_shards_is_refused(tmp_path, tensors):
    folder = write_folder(tmp_path, tensors, shards=2)
    (folder / "model.safetensors.index.json").unlink()
    twice = {EMBEDDING: tensors[EMBEDDING]}
    (folder / "zz.safetensors").write_bytes(safetensors_bytes(twice))
    message = failure(folder)
    assert EMBEDDING in message
    assert "zz.safetensors" in message


@pytest.mark.parametrize(
    "file",
    [
        "../x.safetensors",
        "/etc/x.safetensors",
        "a/b.safetensors",
        "..\\x.safetensors",
        "model.bin",
        "..",
        "",
        5,
        None,
    ],
)
def test_an_index_cannot_lead_out_of_the_folder(tmp_path, tensors, file):
    folder = write_folder(tmp_path / "model", tensors)
    (tmp_path / "x.safetensors").write_bytes(safetensors_bytes(tensors))
    write_index(folder, dict.fromkeys(tensors, file))
    assert "model.safetensors.index.json" in failure(folder)


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 5}', '{"weight_map": {}}', "{}"])
def test_a_broken_index_is_one_line(tmp_path, tensors, content):
    folder = write_folder(tmp_path, tensors)
    (folder / "model.safetensors.index.json").write_text(content)
    assert "model.safetensors.index.json" in failure(folder)


@pytest.mark.parametrize("where", ["tail", "header"])
def test_a_truncated_shard_is_named_with_both_lengths(tmp_path, tensors, where):
    """B10, both cuts."""
    folder = write_folder(tmp_path, tensors, shards=3)
    shard = folder / "model-00002-of-00003.safetensors"
    content = shard.read_bytes()
    kept = len(content) - 1024 if where == "tail" else 100
    shard.write_bytes(content[:kept])
    message = failure(folder)
    assert "model-00002-of-00003.safetensors" in message
    assert f"found {kept}" in message
    if where == "tail":
        assert f"expected {len(content)} bytes" in message


# Folders that are none


def test_what_is_no_checkpoint_is_said_in_one_line(tmp_path, tensors):
    assert "does not exist" in failure(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    assert "empty" in failure(tmp_path / "empty")
    folder = write_folder(tmp_path / "a", tensors)
    assert "no folder" in failure(folder / "config.json")
    (folder / "config.json").unlink()
    assert "no config.json" in failure(folder)
    folder = write_folder(tmp_path / "b", tensors)
    (folder / "model.safetensors").unlink()
    assert "no weights" in failure(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickles_are_refused(tmp_path, tensors, name):
    folder = write_folder(tmp_path, tensors)
    (folder / "model.safetensors").rename(folder / name)
    message = failure(folder)
    assert name in message
    assert "safetensors" in message


def test_gguf_is_recognised(tmp_path, tensors):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for path in (tmp_path, tmp_path / "model.gguf"):
        message = failure(path)
        assert "GGUF" in message
        assert "dgemma convert" in message


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_broken_json_is_named_with_line_and_column(tmp_path, tensors, file):
    folder = write_folder(tmp_path, tensors)
    (folder / file).write_text('{\n  "a": 1,\n  "b" 2\n}')
    message = failure(folder)
    assert file in message
    assert "line 3, column 7" in message
    (folder / file).write_bytes(b'{"a": "\xff"}')
    assert file in failure(folder)
    (folder / file).write_text("[1]")
    assert file in failure(folder)
    (folder / file).write_text("[" * 100_000)
    assert file in failure(folder)


@pytest.mark.parametrize("model_type", ["foo", None, "gemma4", "gemma3_text", 5])
def test_another_model_type_is_named(tmp_path, tensors, model_type):
    """B100."""
    config = config_json(model_type=model_type)
    if model_type is None:
        del config["model_type"]
    message = failure(write_folder(tmp_path, tensors, config=config), ConfigError)
    assert "diffusion_gemma" in message
    if model_type is not None:
        assert repr(model_type) in message
    assert ("autoregressive" in message) == str(model_type).startswith("gemma")


# What the folder says beside its weights


def test_generation_config_comes_from_its_file_then_from_config_json(tmp_path, tensors):
    """mlx derivatives keep it inside config.json; the diffusers scheduler's file is another's."""
    inner = {"max_denoising_steps": 7, "t_min": 0.25, "eos_token_id": 3}
    folder = write_folder(tmp_path, tensors, config=config_json(generation_config=inner))
    scheduler = {"num_inference_steps": 32, "block_length": 32, "max_denoising_steps": 32}
    (folder / "scheduler_config.json").write_text(json.dumps(scheduler))
    generation = open_checkpoint(folder).generation
    assert (generation.max_denoising_steps, generation.t_min) == (7, 0.25)
    assert generation.eos_token_ids == (3,)
    (folder / "generation_config.json").write_text('{"max_denoising_steps": 9}')
    assert open_checkpoint(folder).generation.max_denoising_steps == 9
    assert open_checkpoint(folder).generation.t_min == 0.4


@pytest.mark.parametrize("content", [None, '{"max_new_tokens": 256}', '{"t_max": null}', "{}"])
def test_an_absent_or_empty_generation_config_takes_the_defaults(tmp_path, tensors, content):
    """B32."""
    folder = write_folder(tmp_path, tensors)
    if content is not None:
        (folder / "generation_config.json").write_text(content)
    generation = open_checkpoint(folder).generation
    assert (generation.max_denoising_steps, generation.t_max, generation.t_min) == (48, 0.8, 0.4)
    assert generation.entropy_bound == 0.1
    assert generation.stability_threshold == 1
    assert generation.confidence_threshold == 0.005


@pytest.mark.parametrize(
    ("front", "licence", "base"),
    [
        ("license: apache-2.0\nbase_model: google/x", "apache-2.0", "google/x"),
        ("license: 'mit'\nbase_model:\n  - a/b\n  - c/d", "mit", "a/b"),
        ("license: other\nlicense_name: gemma\nbase_model: [a/b, c/d]", "gemma", "a/b"),
        ("tags:\n- license: no\n", None, None),
        ("", None, None),
    ],
)
def test_licence_and_origin_are_read_from_the_model_card(tmp_path, tensors, front, licence, base):
    folder = write_folder(tmp_path, tensors)
    (folder / "README.md").write_text(f"---\n{front}\n---\n# Title\nlicense: not this\n")
    checkpoint = open_checkpoint(folder)
    assert (checkpoint.licence, checkpoint.source) == (licence, base)


def test_a_readme_without_front_matter_says_nothing(tmp_path, tensors):
    folder = write_folder(tmp_path, tensors)
    for text in ("license: mit\n", "---\nlicense: mit\n", ""):
        (folder / "README.md").write_text(text)
        assert open_checkpoint(folder).licence is None


def test_the_format_is_told_by_tensors_and_metadata(tmp_path, rng, tensors):
    """B25: 'pt' and no metadata at all are both Hugging Face's layout."""
    assert open_checkpoint(write_folder(tmp_path / "a", tensors)).format == "hf"
    pt = write_folder(tmp_path / "b", tensors, metadata={"format": "pt"})
    assert open_checkpoint(pt).format == "hf"
    mlx = write_folder(tmp_path / "c", tensors, metadata={"format": "mlx"})
    assert open_checkpoint(mlx).format == "mlx"
    quantize(tensors, rng, "model.decoder.embed_tokens", group_size=32, bits=8)
    config = config_json(quantization={"group_size": 32, "bits": 8})
    assert open_checkpoint(write_folder(tmp_path / "d", tensors, config=config)).format == "mlx"


def test_opening_reads_no_weights(tmp_path, tensors):
    """A NaN in the weights is none of the loader's business: nothing but headers is read."""
    folder = write_folder(tmp_path, tensors)
    checkpoint = open_checkpoint(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert checkpoint.read(EMBEDDING).shape == tensors[EMBEDDING].shape
    with pytest.raises(KeyError):
        checkpoint.read("lm_head.weight")
