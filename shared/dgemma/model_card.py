"""What the README of a checkpoint says about it: licence and origin, from its front matter.

    ---
    license: apache-2.0
    base_model:
      - google/diffusiongemma-26B-A4B-it
    ---

Only this much of YAML is read: `key: value` and lists of plain strings, at the top level.

Not here: the text of the README, the licence file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_MAX_LINES = 400


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """None: the README does not say, or there is none."""

    licence: str | None = None
    base_model: str | None = None


def read_model_card(folder: Path) -> ModelCard:
    """Reads README.md; never fails, since nothing depends on it."""
    try:
        lines = (folder / "README.md").read_text("utf-8-sig", errors="replace").splitlines()
    except OSError:
        return ModelCard()
    table = _front_matter(lines)
    name = _first(table, "license_name")
    licence = _first(table, "license")
    return ModelCard(
        licence=name if licence in (None, "other") and name else licence,
        base_model=_first(table, "base_model"),
    )


def _front_matter(lines: list[str]) -> dict[str, list[str]]:
    if not lines or lines[0].strip() != "---":
        return {}
    table: dict[str, list[str]] = {}
    key = None
    for line in lines[1:_MAX_LINES]:
        text = line.strip()
        if text == "---":
            return table
        if text.startswith("- ") and key is not None:
            table[key].append(_plain(text[2:]))
        elif line[:1].strip() and ":" in text:
            key, _, value = text.partition(":")
            values = value.strip().strip("[]").split(",") if value.strip() else []
            table[key] = [_plain(item) for item in values]
    return {}  # never closed, so not front matter


def _plain(text: str) -> str:
    return text.strip().strip("\"'")


def _first(table: dict[str, list[str]], key: str) -> str | None:
    return next((value for value in table.get(key, []) if value), None)
