"""Which files of a checkpoint folder hold its weights, and its JSON files, read with care.

Not here: what the tensors mean (`tensors.py`, `checkpoint.py`), downloads (`hub.py`).
"""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from dgemma.errors import CheckpointError, DgemmaWarning
from dgemma.quantization import unsupported_format
from dgemma.safetensors_file import SafetensorsFile, StoredTensor, show

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<count>\d+)\.safetensors")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightFiles:
    """Open files and where each stored tensor lies. `others` were left alone at first."""

    files: tuple[SafetensorsFile, ...]
    tensors: dict[str, tuple[SafetensorsFile, StoredTensor]]
    missing: tuple[str, ...] = ()
    """Files the index names (or the shard numbering implies) that are not there."""
    unread: tuple[Path, ...] = ()
    """Weight files of the folder that the index does not name."""
    stale: bool = False
    """The index and the files disagree about what is stored where."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises `CheckpointError` naming the file, and line and column of a fault."""
    try:
        value = json.loads(path.read_bytes().decode("utf-8-sig"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except json.JSONDecodeError as error:
        raise CheckpointError(
            f"{path} is no valid JSON: {error.msg} (line {error.lineno}, column {error.colno})"
        ) from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is no UTF-8 text (byte {error.start})") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no valid JSON: {str(error)[:100]}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return cast("dict[str, Any]", value)


def check_folder(folder: Path) -> None:
    """Raises `CheckpointError` unless `folder` has a config.json and safetensors files."""
    if folder.suffix == ".gguf" and folder.is_file():
        raise unsupported_format("GGUF")
    if not folder.exists():
        raise CheckpointError(f"{folder} does not exist; give a checkpoint folder or a Hub id")
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder; give the folder that holds config.json")
    names = sorted(entry.name for entry in folder.iterdir())
    weights = [name for name in names if name.endswith(".safetensors")]
    if not weights and any(name.endswith(".gguf") for name in names):
        raise unsupported_format("GGUF")
    if not names:
        raise CheckpointError(f"{folder} is empty; a checkpoint has config.json and *.safetensors")
    if not weights and INDEX not in names:
        pickles = [name for name in names if name.endswith(_PICKLES)]
        if pickles:
            raise CheckpointError(
                f"{folder} holds its weights as pickles only ({pickles[0]}), which can run code "
                "when opened and are not read; use safetensors"
            )
        raise CheckpointError(f"{folder} has no *.safetensors file, so no weights")
    if "config.json" not in names:
        raise CheckpointError(f"{folder} has no config.json, so it cannot be read as a checkpoint")


def find_weights(folder: Path) -> WeightFiles:
    """The files the index names or, without one, model.safetensors, the shards, or all there are.

    Missing files are reported in the result, since other files may hold what is needed.
    """
    found_paths = sorted(folder.glob("*.safetensors"))
    present = [path for path in found_paths if path.is_file()]
    names = [path.name for path in present]
    # The Hub's cache is made of links, which outlive what they point to.
    broken = tuple(path.name for path in found_paths if not path.exists())
    index = folder / INDEX
    if index.is_file():
        weight_map = _read_index(index)
        wanted = sorted(set(weight_map.values()))
        missing = [name for name in wanted if name not in names]
        found = open_weights([folder / name for name in wanted if name in names])
        stale = bool(missing) or any(
            found.tensors[name][0].path.name != file if name in found.tensors else True
            for name, file in weight_map.items()
        )
        unread = tuple(path for path in present if path.name not in wanted)
        return WeightFiles(
            files=found.files,
            tensors=found.tensors,
            missing=tuple(missing),
            unread=unread,
            stale=stale,
        )
    if SINGLE in names:
        return open_weights([folder / SINGLE])
    found = open_weights(present)
    gaps = tuple(name for name in _numbering_gaps(names) if name not in broken)
    return WeightFiles(files=found.files, tensors=found.tensors, missing=broken + gaps)


def open_weights(paths: list[Path]) -> WeightFiles:
    """Opens and checks files. Raises `CheckpointError` when two of them store the same name."""
    files = tuple(SafetensorsFile(path) for path in paths)
    tensors: dict[str, tuple[SafetensorsFile, StoredTensor]] = {}
    for file in files:
        for name, tensor in file.tensors.items():
            if name in tensors:
                raise CheckpointError(
                    f"tensor {show(name)} is stored twice, in {tensors[name][0].path.name} and "
                    f"{file.path.name}; keep one of the files"
                )
            tensors[name] = (file, tensor)
    return WeightFiles(files=files, tensors=tensors)


def incomplete(folder: Path, missing: tuple[str, ...]) -> CheckpointError:
    """The error for files that should be there."""
    shown = ", ".join(show(name) for name in missing[:3]) + (", ..." if len(missing) > 3 else "")
    return CheckpointError(
        f"{folder} lacks {len(missing)} weight file(s): {shown}; "
        "the download is incomplete, run it again"
    )


def warn_stale(folder: Path, missing: tuple[str, ...]) -> None:
    """Says that the index was not followed, although everything needed was found."""
    fault = f"names {len(missing)} file(s) that are not there" if missing else "misplaces tensors"
    warnings.warn(
        f"{folder / INDEX} is stale: it {fault}; the files that are there hold what the text model "
        "needs and were used",
        DgemmaWarning,
        stacklevel=4,
    )


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map, the table of tensors and files")
    for name, file in cast("dict[str, Any]", weight_map).items():
        if not isinstance(file, str) or not file.endswith(".safetensors"):
            raise CheckpointError(f"{path} places {show(name)} in {file!r}, no safetensors file")
        # An index is untrusted: it must not lead out of the folder.
        if Path(file).name != file or "/" in file or "\\" in file or "\0" in file:
            raise CheckpointError(
                f"{path} places {show(name)} in {show(file)}, outside its folder; "
                "only plain file names are allowed"
            )
    return cast("dict[str, str]", weight_map)


def _numbering_gaps(names: list[str]) -> tuple[str, ...]:
    """Shards that "-of-N" in the others' names says should be there."""
    gaps: list[str] = []
    for match in filter(None, map(_SHARD.fullmatch, names)):
        width, count = len(match["number"]), int(match["count"])
        # The file named so is the only evidence of the count, so keep the list bounded.
        for number in range(1, min(count, 9999) + 1):
            name = f"{match['stem']}-{number:0{width}d}-of-{match['count']}.safetensors"
            if name not in names and name not in gaps:
                gaps.append(name)
    return tuple(gaps)


def missing_files(folder: Path) -> list[str]:
    """Files a usable checkpoint folder has and this one lacks; [] where it looks complete.

    Looks at names only: contents are checked on opening.
    """
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    missing = [name for name in ("config.json", "tokenizer.json") if name not in names]
    if INDEX in names:
        wanted = sorted(set(_read_index(folder / INDEX).values()))
        return missing + [name for name in wanted if name not in names]
    if any(name.endswith(".safetensors") for name in names):
        return missing + list(_numbering_gaps(names) if SINGLE not in names else ())
    return [*missing, SINGLE]
