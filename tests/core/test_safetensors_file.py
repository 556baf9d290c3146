"""The reader of safetensors files: right bits, and no trust in a header."""

import json
import struct

import numpy as np
import pytest
import safetensors
from checkpoint_folders import Raw, as_array, raw, safetensors_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from dgemma.errors import CheckpointError
from dgemma.safetensors_file import SafetensorsFile


@pytest.fixture
def rng():
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print("seed", seed)
    return np.random.default_rng(seed)


def with_header(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def failure(path, content):
    """The one line a user sees for a file with this content."""
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        SafetensorsFile(path)
    message = str(caught.value)
    assert message.count("\n") == 0
    assert str(path) in message
    assert len(message) < 600
    return message


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "U32", "U8", "F8_E4M3"])
def test_every_bit_comes_back(tmp_path, rng, dtype):
    """B26: bf16 is moved as its very bits, without torch and without a detour through fp16."""
    stored = {
        "odd": raw(rng, "U8", 3),  # what follows lies at an odd offset
        "a": raw(rng, dtype, 3, 5),
        "empty": raw(rng, dtype, 0, 7),
        "scalar": raw(rng, dtype),
    }
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors_bytes(stored, {"format": "pt"}))
    file = SafetensorsFile(path)
    assert file.metadata == {"format": "pt"}
    assert list(file.tensors) == list(stored)
    for name, tensor in stored.items():
        array = file.read(name)
        assert array.shape == tensor.shape
        assert array.tobytes() == tensor.data
        assert array.dtype == as_array(tensor).dtype
        assert array.flags.aligned
        assert array.size == 0 or not array.flags.writeable


def test_bf16_has_the_values_torch_reads(tmp_path, rng):
    """B26, against torch: the 16 bits are the upper half of a float32."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    torch.set_num_threads(1)
    values = torch.from_numpy(rng.standard_normal((7, 3), dtype=np.float32)).bfloat16()
    save_file({"w": values}, tmp_path / "x.safetensors")
    bits = SafetensorsFile(tmp_path / "x.safetensors").read("w")
    assert bits.dtype == np.uint16
    widened = (bits.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(widened, values.float().numpy())


def test_a_file_without_metadata_or_tensors_opens(tmp_path):
    """B25: files saved from MLX carry no format metadata."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors_bytes({}))
    file = SafetensorsFile(path)
    assert dict(file.tensors) == {}
    assert dict(file.metadata) == {}


def test_a_cut_tail_is_named_with_both_lengths(tmp_path, rng):
    """B10."""
    content = safetensors_bytes({"a": raw(rng, "F32", 999), "b": raw(rng, "F32", 3)})
    for lost in (1, 1024):
        message = failure(tmp_path / "x.safetensors", content[:-lost])
        assert f"expected {len(content)} bytes, found {len(content) - lost}" in message


def test_a_cut_within_the_header_is_named_with_both_lengths(tmp_path, rng):
    """B10."""
    content = safetensors_bytes({"a": raw(rng, "F32", 2)})
    header = 8 + int.from_bytes(content[:8], "little")
    for kept in (header - 1, 9, 8):
        message = failure(tmp_path / "x.safetensors", content[:kept])
        assert "header" in message
        assert f"at least {header} bytes, found {kept}" in message
    for kept in (0, 7):
        message = failure(tmp_path / "x.safetensors", content[:kept])
        assert f"at least 8 bytes, found {kept}" in message


def test_bytes_after_the_last_tensor_are_refused(tmp_path, rng):
    content = safetensors_bytes({"a": raw(rng, "F32", 2)})
    message = failure(tmp_path / "x.safetensors", content + b"\0" * 5)
    assert f"expected {len(content)} bytes, found {len(content) + 5}" in message


def test_a_git_lfs_pointer_is_recognised(tmp_path):
    text = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"
    assert "git lfs pull" in failure(tmp_path / "x.safetensors", text)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (with_header(b"{" * 100_000), "header"),
        (with_header(b"[" * 100_000 + b"]" * 100_000), "header"),
        (with_header(b"\xff\xfe"), "header"),
        (with_header(b"[]"), "no JSON object"),
        (with_header(b'{"a": 1, "a": 2}'), "twice"),
        (struct.pack("<Q", 2**63) + b"{}", "header"),
        (with_header({"a": 5}), "dtype, shape and data_offsets"),
        (with_header({"a": {**entry(), "more": 1}}, b"\0" * 8), "dtype, shape and data_offsets"),
        (with_header({"a": entry("F33")}, b"\0" * 8), "unknown dtype"),
        (with_header({"a": entry(["F32"])}, b"\0" * 8), "unknown dtype"),
        (with_header({"a": entry(shape=(-2,))}, b"\0" * 8), "shape"),
        (with_header({"a": entry(shape=(2.0,))}, b"\0" * 8), "shape"),
        (with_header({"a": entry(shape=(True, 2))}, b"\0" * 8), "shape"),
        (with_header({"a": entry(shape=(1,) * 40)}, b"\0" * 8), "shape"),
        (with_header({"a": entry(shape=(2**62, 4), offsets=(0, 0))}), "absurd shape"),
        (with_header({"a": entry(shape=(0, 10**4000), offsets=(0, 0))}), "absurd shape"),
        (with_header({"a": entry(shape=(3,))}, b"\0" * 8), "needs 12"),
        (with_header({"a": entry(offsets=(8, 0))}, b"\0" * 8), "ascending"),
        (with_header({"a": entry(offsets=(-8, 0))}, b"\0" * 8), "ascending"),
        (with_header({"a": entry(offsets=(0, 8, 16))}, b"\0" * 8), "ascending"),
        (with_header({"a": entry(offsets=(10**4200, 10**4200 + 8))}), "cut short"),
        (with_header({"a": entry(), "b": entry(offsets=(4, 12))}, b"\0" * 12), "overlaps"),
        (with_header({"a": entry(), "b": entry(offsets=(12, 20))}, b"\0" * 20), "gap"),
        (with_header({"a": entry(offsets=(4, 12))}, b"\0" * 12), "gap"),
        (with_header({"__metadata__": {"format": 1}}), "__metadata__"),
        (with_header({"__metadata__": "pt"}), "__metadata__"),
    ],
)
def test_a_hostile_header_is_one_line(tmp_path, content, said):
    assert said in failure(tmp_path / "x.safetensors", content)


def test_a_name_cannot_write_control_characters_to_the_terminal(tmp_path):
    content = with_header({"\x1b[31m\nname\ud800": entry("F33")})
    message = failure(tmp_path / "x.safetensors", content)
    assert message.isprintable()
    message.encode()


def test_a_missing_file_and_a_folder_are_one_line(tmp_path):
    for path in (tmp_path / "none.safetensors", tmp_path):
        with pytest.raises(CheckpointError, match="cannot be read"):
            SafetensorsFile(path)


def test_a_dtype_without_an_array_type_is_refused_on_reading(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors_bytes({"w": Raw("F4", (2, 8), b"\0" * 8)}))
    file = SafetensorsFile(path)
    with pytest.raises(CheckpointError, match="F4"):
        file.read("w")


small = st.integers(-1, 20) | st.sampled_from([2**31, 2**63, 2**64, 10**30])
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "U8", "F4", "x"]),
        "shape": st.lists(small, max_size=3),
        "data_offsets": st.lists(small, min_size=2, max_size=2),
    }
)
headers = st.dictionaries(st.sampled_from(["a", "b", "c"]), entries | st.none(), max_size=3)


@settings(max_examples=200, deadline=None)
@given(header=headers, data=st.binary(max_size=40), flip=st.integers(0, 60) | st.none())
def test_what_is_accepted_the_reference_reader_accepts_too(tmp_path_factory, header, data, flip):
    """Any bytes: either one error of ours, or a file the safetensors library opens as well."""
    content = bytearray(with_header(header, data))
    if flip is not None and flip < len(content):
        content[flip] ^= 0x10
    path = tmp_path_factory.getbasetemp() / "hostile.safetensors"
    path.write_bytes(bytes(content))
    try:
        file = SafetensorsFile(path)
    except CheckpointError:
        return
    with safetensors.safe_open(path, framework="numpy") as reference:
        assert sorted(reference.keys()) == sorted(file.tensors)
        for name in file.tensors:
            assert reference.get_slice(name).get_shape() == list(file.tensors[name].shape)


@settings(max_examples=100, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(st.sampled_from(["F32", "BF16", "U8"]), st.lists(st.integers(0, 4), max_size=3)),
        max_size=4,
    ),
    seed=st.integers(0, 2**32),
)
def test_what_the_writer_writes_is_read_back(tmp_path_factory, shapes, seed):
    rng = np.random.default_rng(seed)
    stored = {f"t{i}": raw(rng, dtype, *shape) for i, (dtype, shape) in enumerate(shapes)}
    path = tmp_path_factory.getbasetemp() / "good.safetensors"
    path.write_bytes(safetensors_bytes(stored))
    file = SafetensorsFile(path)
    assert {name: file.read(name).tobytes() for name in file.tensors} == {
        name: tensor.data for name, tensor in stored.items()
    }
