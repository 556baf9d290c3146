"""Reads safetensors files: a header that is trusted only after checking, and memory-mapped tensors.

    8 bytes little-endian N | N bytes of JSON: name -> {dtype, shape, data_offsets} | raw bytes

A file from the network is untrusted input: before anything is read, the header must fit the file,
every tensor's bytes must match its shape, and together they must tile the file's data exactly, so
that a truncated download is noticed here and not as garbage in a reply.

BF16 comes back as uint16 and the 8-bit floats as uint8, of the same shape: the very bits, since
NumPy has neither type.

Not here: which tensors a model needs (`tensors.py`), folders and shards (`checkpoint.py`), writing.
Source: the format's description in the safetensors repository (README, "Format").
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import numpy as np

from dgemma.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000
"""The limit the reference reader sets; the release's largest header has about 15 KB."""

_MAX_DIMENSIONS = 8
_MAX_EXTENT = 2**40

# Element type -> bits and the NumPy type it is read as; None: known, but not readable here.
_DTYPES: dict[str, tuple[int, str | None]] = {
    "BOOL": (8, "?"),
    "U8": (8, "|u1"),
    "I8": (8, "|i1"),
    "F8_E4M3": (8, "|u1"),
    "F8_E5M2": (8, "|u1"),
    "F8_E8M0": (8, "|u1"),
    "U16": (16, "<u2"),
    "I16": (16, "<i2"),
    "F16": (16, "<f2"),
    "BF16": (16, "<u2"),
    "U32": (32, "<u4"),
    "I32": (32, "<i4"),
    "F32": (32, "<f4"),
    "U64": (64, "<u8"),
    "I64": (64, "<i8"),
    "F64": (64, "<f8"),
    "C64": (64, "<c8"),
    "F4": (4, None),
    "F6_E2M3": (6, None),
    "F6_E3M2": (6, None),
}


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One entry of a header. `start` counts from the beginning of the file, in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


class SafetensorsFile:
    """A checked, memory-mapped safetensors file.

    Raises `CheckpointError`, naming the file, when the header or the file's length is wrong.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        header, data_start, size = _read_header(path)
        metadata = header.pop("__metadata__", None)
        self.metadata: Mapping[str, str] = MappingProxyType(_check_metadata(path, metadata))
        tensors = {
            name: _check_entry(path, name, entry, data_start) for name, entry in header.items()
        }
        _check_tiling(path, tensors, data_start, size)
        self.tensors: Mapping[str, StoredTensor] = MappingProxyType(tensors)
        self._map: mmap.mmap | None = None

    def read(self, name: str) -> np.ndarray[Any, np.dtype[Any]]:
        """The tensor as a read-only array over the mapped file; nothing is copied if aligned."""
        tensor = self.tensors[name]
        numpy_type = _DTYPES[tensor.dtype][1]
        if numpy_type is None:
            raise CheckpointError(
                f"{self.path}: tensor {show(name)} is {tensor.dtype}, which cannot be read; "
                "use a checkpoint in bf16 or in MLX's quantization"
            )
        dtype = np.dtype(numpy_type)
        if tensor.nbytes == 0:
            return np.empty(tensor.shape, dtype)
        if self._map is None:
            with self.path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        flat = np.frombuffer(
            self._map, dtype, count=tensor.nbytes // dtype.itemsize, offset=tensor.start
        )
        # Some consumers read the bytes through a pointer and need them aligned.
        array = np.require(flat.reshape(tensor.shape), requirements="A")
        array.flags.writeable = False
        return array


def show(name: str) -> str:
    """A tensor's name, fit for a terminal: an untrusted name may hold control characters."""
    return name if name.isprintable() and name.isascii() else ascii(name)


def _read_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """The parsed header, where the data starts, and the file's size in bytes."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            prefix = file.read(8)
            if len(prefix) < 8:
                raise CheckpointError(
                    f"{path} is no safetensors file: expected at least 8 bytes, found {size}; "
                    "download it again"
                )
            if prefix == b"version ":
                raise CheckpointError(
                    f"{path} is a Git LFS pointer, not the weights; run `git lfs pull` beside it"
                )
            length = int.from_bytes(prefix, "little")
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{path} is no safetensors file: its header would have {length} bytes "
                    f"(at most {MAX_HEADER_BYTES} are allowed)"
                )
            if 8 + length > size:
                raise CheckpointError(
                    f"{path} is cut short within its header: expected at least {8 + length} "
                    f"bytes, found {size}; download it again"
                )
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} has a broken header: {_first_line(error)}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} has a broken header: it is no JSON object")
    return cast("dict[str, Any]", header), 8 + length, size


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"{show(key)} appears twice")
            seen.add(key)
    return result


def _first_line(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return (str(error).splitlines() or ["unreadable"])[0][:200]


def _check_metadata(path: Path, metadata: Any) -> dict[str, str]:
    if metadata is None:
        return {}
    if isinstance(metadata, dict):
        table = cast("dict[str, Any]", metadata)
        if all(isinstance(value, str) for value in table.values()):
            return cast("dict[str, str]", table)
    raise CheckpointError(f"{path} has a broken header: __metadata__ must map strings to strings")


def _check_entry(path: Path, name: str, entry: Any, data_start: int) -> StoredTensor:
    def fail(reason: str) -> CheckpointError:
        return CheckpointError(f"{path} has a broken header: tensor {show(name)} {reason}")

    if not isinstance(entry, dict) or set(cast("dict[str, Any]", entry)) != {
        "dtype",
        "shape",
        "data_offsets",
    }:
        raise fail("must have dtype, shape and data_offsets")
    table = cast("dict[str, Any]", entry)
    dtype, shape, offsets = table["dtype"], table["shape"], table["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise fail(f"has the unknown dtype {str(dtype)[:40]!r}")
    if not _is_integers(shape) or len(shape) > _MAX_DIMENSIONS:
        raise fail(f"has a shape that is no list of at most {_MAX_DIMENSIONS} sizes")
    # Empty tensors are legal, but their other sizes must still be sane.
    if math.prod(max(size, 1) for size in shape) > _MAX_EXTENT:
        raise fail(f"has an absurd shape, {_short(shape)}")
    if not _is_integers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise fail("has data_offsets that are no ascending pair")
    start, end = cast("list[int]", offsets)
    bits = math.prod(shape) * _DTYPES[dtype][0]
    if bits % 8 or bits // 8 != end - start:
        raise fail(
            f"has {_short(end - start)} bytes, but {dtype} {_short(shape)} needs {bits // 8}"
        )
    return StoredTensor(
        name=name, dtype=dtype, shape=tuple(shape), start=data_start + start, nbytes=end - start
    )


def _short(value: object) -> str:
    """Numbers of a hostile header can be thousands of digits long."""
    try:
        text = str(value)
    except ValueError:
        return "an enormous number"
    return text if len(text) <= 60 else text[:57] + "..."


def _is_integers(value: Any) -> bool:
    return isinstance(value, list) and all(
        type(item) is int and item >= 0 for item in cast("list[Any]", value)
    )


def _check_tiling(
    path: Path, tensors: Mapping[str, StoredTensor], data_start: int, size: int
) -> None:
    """Tensors must follow one another without overlap or gap, up to the end of the file."""
    expected = max((t.start + t.nbytes for t in tensors.values()), default=data_start)
    if expected > size:
        raise CheckpointError(
            f"{path} is cut short: expected {_short(expected)} bytes, found {size}; "
            "download it again"
        )
    position, previous = data_start, "the header"
    for tensor in sorted(tensors.values(), key=lambda t: (t.start, t.nbytes)):
        if tensor.start != position:
            fault = "overlaps" if tensor.start < position else "leaves a gap after"
            raise CheckpointError(
                f"{path} has a broken header: tensor {show(tensor.name)} {fault} {show(previous)}"
            )
        position, previous = tensor.start + tensor.nbytes, tensor.name
    if expected != size:
        raise CheckpointError(
            f"{path} has the wrong length: expected {expected} bytes, found {size}; "
            "download it again"
        )
