"""How config.json describes packed weights, and that the stored tensors agree with it."""

import numpy as np
import pytest
from checkpoint_folders import (
    EXPERTS,
    HIDDEN,
    INNER,
    as_array,
    config_json,
    quantize,
    raw,
    text_tensors,
    write_folder,
)

from dgemma.checkpoint import open_checkpoint
from dgemma.errors import CheckpointError, ConfigError, DgemmaError, DgemmaWarning
from dgemma.quantization import MODES, Quantization, Quantized

LEGAL = [
    *(("affine", group, bits) for group in (32, 64, 128) for bits in (2, 3, 4, 5, 6, 8)),
    ("mxfp4", 32, 4),
    ("mxfp8", 32, 8),
    ("nvfp4", 16, 4),
]
Q_PROJ = "model.decoder.layers.1.self_attn.q_proj"
ROUTER = "model.decoder.layers.1.router.proj"
GATE_UP = "model.decoder.layers.2.experts.gate_up_proj"
EMBEDDING = "model.decoder.embed_tokens"


@pytest.fixture
def rng():
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print("seed", seed)
    return np.random.default_rng(seed)


def read(**settings):
    return Quantization.from_config({"quantization": settings})


def failure(call, kind):
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert isinstance(caught.value, DgemmaError)
    assert "\n" not in message
    return message


# The description


def test_no_description_means_dense():
    for raw_config in ({}, {"quantization": None}, {"quantization": {}}):
        quantization = Quantization.from_config(raw_config)
        assert quantization.is_empty
        assert quantization.of(Q_PROJ) is None


def test_each_override_applies_to_exactly_its_module():
    """B15, the reported configuration: one path with and one without the wrapper prefix."""
    quantization = read(
        group_size=32,
        bits=4,
        mode="mxfp4",
        **{
            f"language_model.{Q_PROJ}": {"group_size": 64, "bits": 8, "mode": "affine"},
            ROUTER.removeprefix("model."): False,
            EMBEDDING: True,
        },
    )
    default = Quantized(group_size=32, bits=4, mode="mxfp4")
    assert quantization.of(Q_PROJ) == Quantized(group_size=64, bits=8, mode="affine")
    assert quantization.of(ROUTER) is None
    assert quantization.of(EMBEDDING) == default
    assert quantization.of(GATE_UP) == default
    # A neighbour whose path merely contains or extends another's is not meant.
    assert quantization.of(Q_PROJ.replace("layers.1", "layers.11")) == default
    assert quantization.of(ROUTER.replace("layers.1", "layers.0")) == default


@pytest.mark.parametrize("prefix", ["", "model.", "language_model.model.", "model.language_model."])
def test_paths_are_asked_for_in_any_spelling(prefix):
    """B15's prefix twin."""
    quantization = read(group_size=64, bits=4, **{Q_PROJ: {"bits": 8, "group_size": 32}})
    asked = prefix + Q_PROJ.removeprefix("model.")
    assert quantization.of(asked) == Quantized(group_size=32, bits=8)


def test_overrides_alone_leave_everything_else_dense():
    quantization = read(**{EMBEDDING: {"group_size": 64, "bits": 8}})
    assert quantization.default is None
    assert not quantization.is_empty
    assert quantization.of(EMBEDDING) == Quantized(group_size=64, bits=8)
    assert quantization.of(Q_PROJ) is None


def test_the_mode_is_affine_where_it_is_not_given():
    """As in MLX, an override inherits nothing from the default."""
    quantization = read(mode="nvfp4", group_size=16, bits=4, **{Q_PROJ: {"bits": 8}})
    assert quantization.of(Q_PROJ) == Quantized(group_size=64, bits=8, mode="affine")
    assert read(bits=6).default == Quantized(group_size=64, bits=6, mode="affine")
    assert read(mode="mxfp8").default == Quantized(group_size=32, bits=8, mode="mxfp8")


@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_both_keys_of_mlx_tools_are_read(key):
    expected = Quantized(group_size=64, bits=4)
    table = {"group_size": 64, "bits": 4}
    assert Quantization.from_config({key: table}).default == expected
    assert Quantization.from_config({"text_config": {key: table}}).default == expected
    both = {"quantization": table, "quantization_config": table}
    assert Quantization.from_config(both).default == expected


def test_an_unknown_setting_is_warned_about():
    with pytest.warns(DgemmaWarning, match="colour"):
        read(group_size=64, bits=4, colour="blue")


@pytest.mark.parametrize(("mode", "group", "bits"), LEGAL)
def test_every_combination_of_mlx_is_legal(mode, group, bits):
    assert read(mode=mode, group_size=group, bits=bits).default == Quantized(
        group_size=group, bits=bits, mode=mode
    )
    assert read(mode=mode, group_size=float(group), bits=float(bits)).default is not None


@pytest.mark.parametrize("mode", MODES)
def test_every_other_combination_is_named(mode):
    for group in (0, 8, 16, 32, 48, 64, 128, 256):
        for bits in (0, 1, 2, 3, 4, 5, 6, 7, 8, 16):
            if (mode, group, bits) not in LEGAL:
                message = failure(
                    lambda g=group, b=bits: read(mode=mode, group_size=g, bits=b), ConfigError
                )
                assert mode in message


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"mode": "int4"}, "int4"),
        ({"mode": ["affine"]}, "affine"),
        ({"bits": "4"}, "'4'"),
        ({"bits": True}, "True"),
        ({"bits": 4.5}, "4.5"),
        ({"bits": float("nan")}, "nan"),
        ({"bits": float("inf")}, "inf"),
        ({"bits": 10**400}, "bits"),
        ({"group_size": [64]}, "[64]"),
        ({"group_size": 64, "bits": 4, Q_PROJ: {"bits": 9}}, "q_proj"),
    ],
)
def test_a_value_no_mode_allows_is_named(settings, said):
    assert said in failure(lambda: read(**settings), ConfigError)


def test_two_spellings_of_a_path_must_agree():
    one, other = Q_PROJ, f"language_model.{Q_PROJ}"
    same = read(group_size=64, bits=4, **{one: False, other: False})
    assert same.of(Q_PROJ) is None
    assert "q_proj" in failure(lambda: read(bits=4, **{one: False, other: True}), ConfigError)


def test_a_description_that_is_no_object_is_named():
    assert "quantization" in failure(
        lambda: Quantization.from_config({"quantization": 4}), ConfigError
    )


@pytest.mark.parametrize(
    ("table", "name"),
    [
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "compressed-tensors"),
        ({"config_groups": {}, "format": "float-quantized"}, "compressed-tensors"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "ModelOpt"),
        ({"quant_algo": "NVFP4"}, "ModelOpt"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "GPTQ"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "AWQ"),
        ({"quant_method": "fp8"}, "FP8"),
        ({"quant_method": "something-new"}, "something-new"),
    ],
)
def test_other_quantizers_are_named(table, name):
    message = failure(
        lambda: Quantization.from_config({"quantization_config": table}), CheckpointError
    )
    assert name in message
    assert "dgemma convert" in message


def test_a_modelopt_folder_without_a_config_entry_is_named(tmp_path, rng):
    folder = write_folder(tmp_path, text_tensors(rng))
    (folder / "hf_quant_config.json").write_text("{}")
    assert "ModelOpt" in failure(lambda: open_checkpoint(folder), CheckpointError)


# Shapes, with MLX as the oracle


@pytest.mark.parametrize(("mode", "group", "bits"), LEGAL)
def test_packed_shapes_are_those_mlx_writes(mode, group, bits, rng):
    """B16: three arrays in affine mode, two otherwise."""
    mx = pytest.importorskip("mlx.core")
    shape = (3, 5, 384)
    weight = mx.array(rng.standard_normal(shape, dtype=np.float32))
    packed, *others = mx.quantize(weight, group_size=group, bits=bits, mode=mode)
    spec = Quantized(group_size=group, bits=bits, mode=mode)
    assert spec.fits(shape)
    assert tuple(packed.shape) == spec.packed_shape(shape)
    assert all(tuple(array.shape) == spec.scales_shape(shape) for array in others)
    assert len(others) == (2 if spec.has_biases else 1)
    scale_bytes = sum(array.size for array in others) * (2 if mode == "affine" else 1)
    stored_bits = 8 * (4 * packed.size + scale_bytes)
    assert spec.bits_per_weight == stored_bits / weight.size


# The stored tensors


def packed_folder(tmp_path, rng, *, mode="affine", group_size=32, bits=4, spoil=None, config=None):
    """A checkpoint whose query, gate-up experts and embedding are packed, and nothing else."""
    tensors = text_tensors(rng)
    for module in (Q_PROJ, GATE_UP, EMBEDDING):
        quantize(tensors, rng, module, group_size=group_size, bits=bits, mode=mode)
    if spoil is not None:
        spoil(tensors)
    if config is None:
        settings = {"group_size": group_size, "bits": bits, "mode": mode}
        config = config_json(quantization=settings)
    return write_folder(tmp_path, tensors, config=config, metadata={"format": "mlx"}), tensors


@pytest.mark.parametrize(
    ("mode", "group", "bits"), [case for case in LEGAL if case[1] <= HIDDEN and case[1] <= 64]
)
def test_every_packing_opens_and_reads_back(tmp_path, rng, mode, group, bits):
    """B16: biases are asked for in affine mode only."""
    folder, tensors = packed_folder(tmp_path, rng, mode=mode, group_size=group, bits=bits)
    checkpoint = open_checkpoint(folder, strict=True)
    assert checkpoint.format == "mlx"
    spec = Quantized(group_size=group, bits=bits, mode=mode)
    for module in (Q_PROJ, GATE_UP, EMBEDDING):
        assert checkpoint.quantization.of(module) == spec
        parts = ("weight", "scales", "biases") if mode == "affine" else ("weight", "scales")
        for part in parts:
            name = f"{module}.{part}"
            assert checkpoint.tensors[name].name == name
            np.testing.assert_array_equal(checkpoint.read(name), as_array(tensors[name]))
    assert set(checkpoint.tensors) == set(tensors)
    # Whatever has no scales is dense, whatever the default says.
    assert checkpoint.quantization.of(ROUTER) is None
    assert checkpoint.weight_bytes == sum(len(tensor.data) for tensor in tensors.values())


def test_a_mixed_checkpoint_opens(tmp_path, rng):
    """B15: experts in one mode, attention in another, the router dense."""
    tensors = text_tensors(rng)
    quantize(tensors, rng, GATE_UP, group_size=32, bits=4, mode="mxfp4")
    quantize(tensors, rng, Q_PROJ, group_size=64, bits=8)
    settings = {
        "group_size": 32,
        "bits": 4,
        "mode": "mxfp4",
        f"language_model.{Q_PROJ}": {"group_size": 64, "bits": 8, "mode": "affine"},
        ROUTER: False,
    }
    config = config_json(quantization=settings, quantization_config=settings)
    checkpoint = open_checkpoint(write_folder(tmp_path, tensors, config=config), strict=True)
    assert checkpoint.quantization.of(GATE_UP).mode == "mxfp4"
    assert checkpoint.quantization.of(Q_PROJ) == Quantized(group_size=64, bits=8)
    assert checkpoint.quantization.of(ROUTER) is None


@pytest.mark.parametrize("path", ["model.decoder.layers.9.mlp.up_proj", "nonsense", "lm_head"])
def test_an_override_that_matches_nothing_is_warned_about(tmp_path, rng, path):
    """B15."""
    config = config_json(quantization={"group_size": 32, "bits": 4, path: {"bits": 8}})
    folder, _ = packed_folder(tmp_path, rng, config=config)
    with pytest.warns(DgemmaWarning, match=f"1 override.*{path}") as caught:
        open_checkpoint(folder)
    assert len(caught) == 1


def test_packed_experts_stored_one_by_one_are_stacked(tmp_path, rng):
    """Gate before up in weights, scales and biases alike."""
    folder, tensors = packed_folder(tmp_path / "packed", rng, group_size=32, bits=8)
    stem = GATE_UP.removesuffix(".gate_up_proj")
    kind = type(tensors[f"{GATE_UP}.weight"])
    apart = dict(tensors)
    for part in ("weight", "scales", "biases"):
        stack = as_array(apart.pop(f"{GATE_UP}.{part}"))
        dtype = tensors[f"{GATE_UP}.{part}"].dtype
        for expert in range(EXPERTS):
            for half, rows in (("gate", slice(0, INNER)), ("up", slice(INNER, None))):
                matrix = np.ascontiguousarray(stack[expert, rows])
                apart[f"{stem}.{expert}.{half}_proj.{part}"] = kind(
                    dtype, matrix.shape, matrix.tobytes()
                )
    config = config_json(quantization={"group_size": 32, "bits": 8})
    one, other = (
        open_checkpoint(folder, strict=True),
        open_checkpoint(write_folder(tmp_path / "apart", apart, config=config), strict=True),
    )
    assert one.tensors == other.tensors
    for name in one.tensors:
        np.testing.assert_array_equal(one.read(name), other.read(name))


def lose(name):
    return lambda tensors: tensors.pop(name)


def replace(name, dtype, *shape):
    rng = np.random.default_rng(0)
    return lambda tensors: tensors.update({name: raw(rng, dtype, *shape)})


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lose(f"{Q_PROJ}.scales"), f"{Q_PROJ}.scales is missing"),
        (lose(f"{Q_PROJ}.biases"), f"{Q_PROJ}.biases is missing"),
        (lose(f"{GATE_UP}.scales"), f"{GATE_UP}.scales is missing"),
        (replace(f"{Q_PROJ}.weight", "U32", 128, 9), "[128, 8]"),
        (replace(f"{Q_PROJ}.weight", "BF16", 128, 8), "BF16"),
        (replace(f"{Q_PROJ}.scales", "BF16", 128, 1), "[128, 2]"),
        (replace(f"{Q_PROJ}.scales", "U8", 128, 2), "U8"),
        (replace(f"{Q_PROJ}.biases", "BF16", 64, 2), "[128, 2]"),
        (replace(f"{Q_PROJ}.biases", "U32", 128, 2), "U32"),
        (replace(f"{GATE_UP}.scales", "BF16", EXPERTS, 2 * INNER, 4), "gate_up_proj.scales"),
    ],
)
def test_packed_tensors_that_do_not_fit_are_named(tmp_path, rng, spoil, said):
    folder, _ = packed_folder(tmp_path, rng, spoil=spoil)
    assert said in failure(lambda: open_checkpoint(folder), CheckpointError)


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "nvfp4"])
def test_biases_in_a_mode_without_them_are_refused(tmp_path, rng, mode):
    """B15: affine tensors under a global mode that has no biases."""
    bits, group = (8, 32) if mode == "mxfp8" else (4, 16 if mode == "nvfp4" else 32)
    folder, _ = packed_folder(
        tmp_path,
        rng,
        mode=mode,
        bits=bits,
        group_size=group,
        spoil=replace(f"{Q_PROJ}.biases", "U8", 128, HIDDEN // group),
    )
    assert f"{Q_PROJ}.biases" in failure(lambda: open_checkpoint(folder), CheckpointError)


@pytest.mark.parametrize("quantization", [None, {"group_size": 32, "bits": 4, Q_PROJ: False}])
def test_scales_that_the_config_does_not_explain_are_refused(tmp_path, rng, quantization):
    config = config_json(quantization=quantization)
    folder, _ = packed_folder(tmp_path, rng, config=config)
    message = failure(lambda: open_checkpoint(folder), CheckpointError)
    assert "config.json" in message
    assert Q_PROJ in message or EMBEDDING in message


def test_rows_that_no_group_divides_are_named(tmp_path, rng):
    """B17's loading half: 64 columns in groups of 128."""
    config = config_json(quantization={"group_size": 128, "bits": 4})
    folder, _ = packed_folder(tmp_path, rng, config=config)
    message = failure(lambda: open_checkpoint(folder), CheckpointError)
    assert "64" in message
    assert "128" in message


def test_a_folder_written_by_mlx_opens(tmp_path, rng):
    """The real thing: packed and saved by MLX itself, dequantized back to what it was."""
    mx = pytest.importorskip("mlx.core")
    tensors = text_tensors(rng)
    dense = mx.array(rng.standard_normal((128, HIDDEN), dtype=np.float32))
    arrays = dict(zip(("weight", "scales", "biases"), mx.quantize(dense, 32, 4), strict=True))
    del tensors[f"{Q_PROJ}.weight"]
    config = config_json(quantization={"group_size": 32, "bits": 4})
    folder = write_folder(tmp_path, tensors, config=config)
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    mx.save_safetensors(
        str(folder / "b.safetensors"),
        {f"{Q_PROJ}.{part}": array for part, array in arrays.items()},
        {"format": "mlx"},
    )
    checkpoint = open_checkpoint(folder, strict=True)
    read_back = [mx.array(checkpoint.read(f"{Q_PROJ}.{part}")) for part in arrays]
    spec = checkpoint.quantization.of(Q_PROJ)
    restored = mx.dequantize(*read_back, group_size=spec.group_size, bits=spec.bits)
    expected = mx.dequantize(*arrays.values(), group_size=32, bits=4)
    assert mx.array_equal(restored, expected).item()
