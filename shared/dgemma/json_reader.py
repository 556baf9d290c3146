"""Typed, forgiving access to JSON that others wrote: the value or one line naming the key.

Integers are accepted where floats are meant and the other way round (`1.0`), nulls count as absent,
and a reader remembers which keys were asked for, so that the rest can be warned about.

Not here: what the keys mean (`config.py`), files (`checkpoint_files.py`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, cast

from dgemma.errors import ConfigError, DgemmaWarning

_LARGEST = 2**63 - 1
_SHOWN = 60
"""Characters of a wrong value that a message repeats."""


class JsonReader:
    """Typed access to one JSON object that remembers which keys were asked for.

    Every method raises `ConfigError` naming `where` and the key when the value has another type.
    """

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where
        self.asked: set[str] = set()

    def value(self, key: str) -> Any:
        self.asked.add(key)
        return self.raw.get(key)

    def integer(self, key: str, default: int) -> int:
        value = self.value(key)
        return default if value is None else to_integer(value, f"{self.where}.{key}")

    def required_integer(self, key: str, why: str) -> int:
        value = self.value(key)
        if value is None:
            raise ConfigError(f"{self.where} lacks {key}; {why}")
        return to_integer(value, f"{self.where}.{key}")

    def optional_integer(self, key: str, default: int | None = None) -> int | None:
        value = self.value(key)
        return default if value is None else to_integer(value, f"{self.where}.{key}")

    def number(self, key: str, default: float) -> float:
        value = self.value(key)
        return default if value is None else to_number(value, f"{self.where}.{key}")

    def mapping(self, key: str) -> Mapping[str, Any] | None:
        """An object, or None where there is none."""
        value = self.value(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise ConfigError(f"{self.where}.{key} is {shown(value)}, but must be an object")
        return cast("Mapping[str, Any]", value)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """An id, a list of ids, or nothing."""
        value = self.value(key)
        if value is None:
            return ()
        items = cast("list[Any]", value) if isinstance(value, list) else [value]
        return union(tuple(to_integer(item, f"{self.where}.{key}") for item in items))

    def unknown(self, ignored: frozenset[str]) -> list[str]:
        """Keys that nobody asked for and that are not known to be harmless."""
        return [key for key in self.raw if key not in self.asked and key not in ignored]


def to_integer(value: Any, name: str) -> int:
    """An integer, or a float that is one; raises `ConfigError` otherwise."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, bool) and isinstance(value, Integral) and abs(int(value)) <= _LARGEST:
        return int(value)
    raise ConfigError(f"{name} is {shown(value)}, but must be an integer")


def to_number(value: Any, name: str) -> float:
    """A finite number as a float; raises `ConfigError` otherwise."""
    if not isinstance(value, bool) and isinstance(value, Real):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    raise ConfigError(f"{name} is {shown(value)}, but must be a finite number")


def require(condition: bool, name: str, value: object, fix: str) -> None:
    """Raises `ConfigError` unless `condition`: `name` is `value`, but must be `fix`."""
    if not condition:
        raise ConfigError(f"{name} is {shown(value)}, but must be {fix}")


def union(*groups: tuple[int, ...]) -> tuple[int, ...]:
    """All ids once, in the order they first come."""
    return tuple(dict.fromkeys(token for group in groups for token in group))


_warned: set[tuple[str, tuple[str, ...]]] = set()


def warn_unknown(keys: list[str], where: str) -> None:
    """One warning for all unknown keys of a file, once a process."""
    mark = (where, tuple(sorted(keys)))
    if keys and mark not in _warned:
        _warned.add(mark)
        warnings.warn(
            f"{where} has {len(keys)} unknown key(s), ignored: {', '.join(sorted(keys)[:5])}",
            DgemmaWarning,
            stacklevel=3,
        )


def shown(value: object) -> str:
    """A wrong value as a message repeats it: on one line, and cut where it is long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
