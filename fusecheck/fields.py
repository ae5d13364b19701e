"""Fields of a JSON object, each as the type that it has to be. Pure.

KeyError for one that is absent, TypeError or ValueError for another type; whoever reads the whole names the file.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def checked(value: object, kind: type[T]) -> T:
    """A value of exactly this type: true is no number."""
    if type(value) is not kind:
        raise TypeError(kind.__name__)
    return value


def text(row: dict[str, object], key: str) -> str:
    """A string."""
    value = row[key]
    if not isinstance(value, str):
        raise TypeError(key)
    return value


def texts(row: dict[str, object]) -> dict[str, str]:
    """An object of strings."""
    return {key: text(row, key) for key in row}


def count(row: dict[str, object], key: str) -> int:
    """A whole number that is not negative."""
    value = row[key]
    if type(value) is not int or value < 0:
        raise TypeError(key)
    return value


def digest(row: dict[str, object], key: str) -> str:
    """32 bytes in hex."""
    value = text(row, key)
    if len(bytes.fromhex(value)) != 32:
        raise ValueError(key)
    return value


def table(row: dict[str, object], key: str) -> dict[str, object]:
    """An object."""
    value = row[key]
    if not isinstance(value, dict):
        raise TypeError(key)
    return value


def rows(row: dict[str, object], key: str) -> Iterable[tuple[str, dict[str, object]]]:
    """An object of objects."""
    found = table(row, key)
    return ((name, table(found, name)) for name in found)
