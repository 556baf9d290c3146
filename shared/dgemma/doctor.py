"""`dgemma doctor`: what is installed, what a checkpoint holds, whether it fits, what was fetched.

A part that cannot be found out shows one line saying why; the rest of the report still comes.

Not here: the command line around it (`commands/doctor.py`), the machine itself (`machine.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from dgemma import hub, machine, tensors
from dgemma.chat import ChatTemplate
from dgemma.checkpoint import Checkpoint, bundled_checkpoint, open_checkpoint
from dgemma.config import ModelConfig
from dgemma.errors import DgemmaError
from dgemma.tokenizer import Tokenizer

LOGITS_TILE_BYTES = 64 << 20
"""Default bound on float32 logits alive at once; see the backends' `logits_tile_bytes`."""
_CACHE_BYTES_PER_NUMBER = 2  # keys and values in bfloat16
_SLIDING_ROOM = 3  # halves: a window and a canvas to rewind over, and half as much to move rarely
_WIDE = 18


def report(model: str | Path | None = None, *, revision: str | None = None) -> dict[str, Any]:
    """Everything as JSON-ready data. A failed part is {"error": one line}; nothing is fetched."""
    result: dict[str, Any] = {
        "versions": _guarded(machine.versions),
        "backends": _guarded(machine.backends),
        "memory": _guarded(
            lambda: {
                "total_bytes": machine.total_memory_bytes(),
                "available_bytes": machine.available_memory_bytes(),
            }
        ),
    }
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            checkpoint = open_checkpoint(hub.resolve_cached(model, revision=revision))
    except (DgemmaError, OSError) as error:
        result["checkpoint"] = result["need"] = {"error": _line(error)}
        result["fits"] = {"error": "not known without a checkpoint"}
    else:
        result["checkpoint"] = _guarded(lambda: describe_checkpoint(checkpoint))
        result["checkpoint"]["text"] = _text_files(checkpoint.folder)
        result["checkpoint"]["warnings"] = [str(item.message) for item in caught]
        result["need"] = _guarded(lambda: memory_need(checkpoint))
        result["fits"] = _guarded(lambda: _fits(result))
    result["fetched"] = _guarded(lambda: {"from_hub": [_fetched(f) for f in hub.network_history()]})
    return result


def describe_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    """What a checkpoint folder holds: format, sizes, and the precision of each class of tensor."""
    config = checkpoint.config
    came_from = hub.origin(checkpoint.folder)
    bundled = checkpoint.folder == bundled_checkpoint()
    return {
        "folder": str(checkpoint.folder),
        "format": checkpoint.format,
        "canvas_length": config.canvas_length,
        "layers": config.num_hidden_layers,
        "full_layers": sum(not layer.is_sliding for layer in config.layers),
        "vocabulary": config.vocab_size,
        "context": config.max_position_embeddings,
        "vision": checkpoint.has_vision_weights,
        "parameters": sum(tensors.parameters(config).values()),
        "bytes": checkpoint.weight_bytes,
        "classes": tensor_classes(checkpoint),
        "bundled": bundled,
        "licence": checkpoint.licence or ("Apache-2.0, as dgemma" if bundled else None),
        "base_model": checkpoint.source,
        "fetched": None if came_from is None else _fetched(came_from),
    }


def _text_files(folder: Path) -> str:
    """What turns text into tokens here, or why nothing does: the weights alone write no reply."""
    try:
        size = Tokenizer.from_folder(folder).vocab_size
        template = ChatTemplate.from_folder(folder)
    except Exception as error:
        return f"not usable: {_line(error)}"
    return f"{size:,} tokens, {'no' if template is None else 'a'} chat template"


def tensor_classes(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    """Class -> {"bytes", "bits" a parameter, "stored" as what}; scales count as their matrix's."""
    count = _parameter_counts(checkpoint)
    table: dict[str, dict[str, Any]] = {}
    for name, info in checkpoint.tensors.items():
        kind = tensors.tensor_class(name)
        row = table.setdefault(kind, {"parameters": 0, "bytes": 0, "stored": []})
        row["parameters"] += count.get(name, 0)
        row["bytes"] += info.nbytes
        packing = checkpoint.quantization.of(tensors.module_of(name))
        stored = (
            info.dtype
            if packing is None
            else f"{packing.mode} {packing.bits} bit, group {packing.group_size}"
        )
        if stored not in row["stored"]:
            row["stored"].append(stored)
    for row in table.values():
        row["bits"] = round(8 * row["bytes"] / row["parameters"], 2) if row["parameters"] else None
    return table


def memory_need(checkpoint: Checkpoint) -> dict[str, Any]:
    """Bytes a reply needs: the weights as stored, the prefix by length, one tile of logits."""
    config = checkpoint.config
    return {
        "weights_bytes": checkpoint.weight_bytes,
        "prefix_bytes_per_1000_tokens": 1000 * _prefix_bytes_per_token(config, sliding=False),
        "prefix_bytes_sliding_layers": _SLIDING_ROOM
        * (config.sliding_window + config.canvas_length)
        * _prefix_bytes_per_token(config, sliding=True)
        // 2,
        "logits_tile_bytes": LOGITS_TILE_BYTES,
    }


def _fits(result: Mapping[str, Any]) -> dict[str, Any]:
    """Where the model fits: the machine's memory, and that of each usable backend's device."""
    need, memory = result["need"], result["memory"]
    least = need["weights_bytes"] + need["prefix_bytes_sliding_layers"] + need["logits_tile_bytes"]
    rooms: dict[str, int | None] = {"memory": memory["available_bytes"] or memory["total_bytes"]}
    for name, state in result["backends"].items():
        if isinstance(state, Mapping):
            rooms[name] = cast("Mapping[str, Any]", state).get("memory_bytes")
    places = {name: least <= room for name, room in rooms.items() if room is not None}
    return {"least_bytes": least, "places": places}


def render(data: Mapping[str, Any]) -> str:
    """The report as text, without a trailing newline."""
    lines: list[str] = []
    _section(lines, "Versions", data["versions"], lambda part: _render_versions(lines, part))
    _section(lines, "Backends", data["backends"], lambda part: _render_backends(lines, part))
    _section(lines, "Checkpoint", data["checkpoint"], lambda part: _render_checkpoint(lines, part))
    _section(
        lines,
        "Memory",
        data["need"] if "error" in data["need"] else data["memory"],
        lambda part: _render_memory(lines, data, part),
    )
    _section(lines, "Network", data["fetched"], lambda part: _render_fetched(lines, part))
    return "\n".join(lines)


def _parameter_counts(checkpoint: Checkpoint) -> dict[str, int]:
    """Parameters by tensor name: packed matrices count unpacked, scales and biases not at all."""
    counts = tensors.parameters(checkpoint.config)
    # Dense experts are named without ".weight", packed ones with it.
    counts |= {f"{name}.weight": size for name, size in counts.items() if ".experts." in name}
    for name, info in checkpoint.tensors.items():
        if name in counts or not tensors.is_vision(name):
            continue
        packing = checkpoint.quantization.of(tensors.module_of(name))
        size = info.nbytes * 8 // _bits(info.dtype)
        if packing is None:
            counts[name] = size
        elif name.endswith(".weight"):
            counts[name] = size * 32 // packing.bits
    return counts


def _bits(dtype: str) -> int:
    return {"BF16": 16, "F16": 16, "F32": 32, "U32": 32, "I32": 32, "F64": 64, "I64": 64}.get(
        dtype, 8
    )


def _prefix_bytes_per_token(config: ModelConfig, *, sliding: bool) -> int:
    return sum(
        2 * layer.num_key_value_heads * layer.head_dim * _CACHE_BYTES_PER_NUMBER
        for layer in config.layers
        if layer.is_sliding == sliding
    )


def _fetched(item: hub.Fetched) -> dict[str, Any]:
    return {
        "repository": item.repository,
        "revision": item.revision,
        "names": list(item.names),
        "folder": str(item.folder),
    }


def _guarded(part: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """One part of the report; whatever goes wrong in it must not cost the others."""
    try:
        return dict(part())
    except Exception as error:
        return {"error": _line(error)}


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, DgemmaError) else f"{type(error).__name__}: {text}"[:300]


def _section(
    lines: list[str], title: str, part: Mapping[str, Any], write: Callable[[Any], None]
) -> None:
    lines.extend(([""] if lines else []) + [title])
    if "error" in part:
        lines.append(f"  {part['error']}")
    else:
        write(part)


def _row(lines: list[str], name: str, value: object) -> None:
    lines.append(f"  {name:<{_WIDE}}{value}")


def _render_versions(lines: list[str], part: Mapping[str, Any]) -> None:
    for name, version in part.items():
        _row(lines, name, version or "not installed")


def _render_backends(lines: list[str], part: Mapping[str, Any]) -> None:
    for name, state in part.items():
        if not state["usable"]:
            _row(lines, name, f"not usable: {state['reason']}")
            continue
        memory = state.get("memory_bytes")
        room = f", {_size(memory)}" if memory else ""
        _row(lines, name, f"usable on {state['name']} ({state['device']}{room})")
        for what, how in state.get("choices", {}).items():
            _row(lines, f"  {what}", how)


def _render_checkpoint(lines: list[str], part: Mapping[str, Any]) -> None:
    _row(lines, "folder", part["folder"])
    _row(lines, "format", part["format"])
    _row(
        lines,
        "model",
        f"{part['parameters'] / 1e6:,.2f} M parameters, {part['layers']} layers "
        f"({part['full_layers']} full), canvas {part['canvas_length']}, "
        f"vocabulary {part['vocabulary']:,}, context {part['context']:,}",
    )
    _row(lines, "text", part["text"])
    _row(lines, "licence", part["licence"] or "not stated")
    _row(lines, "made from", part["base_model"] or "not stated")
    fetched = part["fetched"]
    here = "bundled with dgemma" if part["bundled"] else "a folder of this machine"
    _row(lines, "source", here if fetched is None else _from(fetched))
    for name, row in part["classes"].items():
        bits = "" if row["bits"] is None else f"{row['bits']:g} bits a weight: "
        stored = ", ".join(cast("list[str]", row["stored"]))
        _row(lines, name, f"{_size(row['bytes']):>10}  {bits}{stored}")
    for message in part["warnings"]:
        _row(lines, "warning", message)


def _render_memory(lines: list[str], data: Mapping[str, Any], there: Mapping[str, Any]) -> None:
    need, fits = data["need"], data["fits"]
    _row(lines, "weights", _size(need["weights_bytes"]))
    _row(
        lines,
        "prefix",
        f"{_size(need['prefix_bytes_per_1000_tokens'])} per 1,000 tokens, and at most "
        f"{_size(need['prefix_bytes_sliding_layers'])} in sliding layers",
    )
    _row(lines, "logits", f"{_size(need['logits_tile_bytes'])} at once")
    total, available = there["total_bytes"], there["available_bytes"]
    _row(lines, "this machine", "unknown" if total is None else f"{_size(total)} in all")
    if available is not None:
        _row(lines, "", f"{_size(available)} available now")
    if "error" in fits:
        _row(lines, "fits", fits["error"])
    for place, right in fits.get("places", {}).items():
        answer = "fits" if right else f"too large, needs {_size(fits['least_bytes'])}"
        _row(lines, f"in {place}", answer)


def _render_fetched(lines: list[str], part: Mapping[str, Any]) -> None:
    if not part["from_hub"]:
        lines.append("  no DiffusionGemma checkpoint in the Hub cache: nothing was fetched")
    for item in part["from_hub"]:
        lines.append(f"  {_from(item)}")


def _from(item: Mapping[str, Any]) -> str:
    names = f" ({', '.join(item['names'])})" if item["names"] else ""
    return f"the Hub: {item['repository']}, revision {item['revision'][:12]}{names}"


def _size(count: int) -> str:
    """Bytes in decimal units, as disks and model cards count."""
    value = float(count)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.2f} GB"
