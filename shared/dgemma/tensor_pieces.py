"""Tensors that are stored in pieces: experts one by one, or gate and up apart.

Canonical experts are packed: gate_up [E, 2 I, D], rows 0 .. I - 1 gate, then up; down [E, D, I].

Not here: which name is a piece of what (`tensors.py`), what the model needs (`checkpoint.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dgemma.errors import CheckpointError
from dgemma.safetensors_file import SafetensorsFile, StoredTensor
from dgemma.tensors import Placement, Shape


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """A tensor under its canonical name; `dtype` as safetensors spells it ("BF16", "U32")."""

    name: str
    dtype: str
    shape: Shape
    nbytes: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """A stored tensor and which part of a canonical one it is."""

    place: Placement
    file: SafetensorsFile
    stored: StoredTensor


def describe(name: str, pieces: tuple[Piece, ...]) -> TensorInfo:
    """Type and shape of a tensor, put together from its pieces."""
    first = pieces[0].stored
    if any(piece.stored.dtype != first.dtype for piece in pieces):
        raise CheckpointError(f"{name} is stored in pieces of different types; convert it again")
    shape = first.shape
    if pieces[0].place.part is not None:
        shapes = [_stacked_shape(name, group) for group in _by_part(name, pieces)]
        shape = shapes[0]
        if any(len(s) != 3 or (s[0], s[2]) != (shape[0], shape[2]) for s in shapes):
            raise CheckpointError(f"{name}: its pieces' shapes do not fit together: {shapes}")
        shape = (shape[0], sum(s[1] for s in shapes), shape[2])
    return TensorInfo(
        name=name,
        dtype=first.dtype,
        shape=shape,
        nbytes=sum(piece.stored.nbytes for piece in pieces),
    )


def _by_part(name: str, pieces: tuple[Piece, ...]) -> list[list[Piece]]:
    """Pieces by expert number within their part; gate rows come before up rows."""
    parts = {piece.place.part for piece in pieces}
    for order in (("gate", "up"), ("gate_up",), ("down",)):
        if parts == set(order):
            return [
                sorted(
                    (piece for piece in pieces if piece.place.part == part),
                    key=lambda piece: piece.place.expert or 0,
                )
                for part in order
            ]
    raise CheckpointError(f"{name} has only the parts {', '.join(sorted(map(str, parts)))}")


def _stacked_shape(name: str, group: list[Piece]) -> Shape:
    """Shape of one part over all experts, [E, rows, columns]."""
    shape = group[0].stored.shape
    if len(group) == 1 and group[0].place.expert is None:
        return shape
    part = group[0].place.part
    for number, piece in enumerate(group):
        if piece.place.expert != number:
            raise CheckpointError(f"{name} lacks the {part} matrix of expert {number}")
        if piece.stored.shape != shape:
            raise CheckpointError(
                f"{piece.stored.name} has shape {list(piece.stored.shape)}, "
                f"but expert 0 has {list(shape)}"
            )
    return (len(group), *shape)


def assemble(name: str, pieces: tuple[Piece, ...]) -> np.ndarray[Any, np.dtype[Any]]:
    """The tensor: as it lies in its file or, from pieces, stacked by expert, gate before up."""
    if pieces[0].place.part is None:
        return pieces[0].file.read(pieces[0].stored.name)
    stacks: list[np.ndarray[Any, np.dtype[Any]]] = []
    for group in _by_part(name, pieces):
        arrays = [piece.file.read(piece.stored.name) for piece in group]
        stacks.append(arrays[0] if group[0].place.expert is None else np.stack(arrays))
    return stacks[0] if len(stacks) == 1 else np.concatenate(stacks, axis=1)
