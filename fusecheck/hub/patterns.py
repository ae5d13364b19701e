"""Files of a snapshot that are not downloaded, or not at first."""

from __future__ import annotations

from fnmatch import fnmatchcase

from fusecheck.sidefiles import WEIGHT_SUFFIXES

UNREAD = tuple(f"*{suffix}" for suffix in WEIGHT_SUFFIXES if suffix != ".safetensors")
"""Patterns of weight kinds that are never read: not downloaded."""

SPARED = ("consolidated.safetensors", "consolidated-[0-9]*-of-[0-9]*.safetensors", "original/*.safetensors")
"""Second copies of the weights in another layout: downloaded only where the index or modules.json may ask for them."""


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """As the hub itself matches its patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
