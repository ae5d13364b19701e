"""A golden: one small checkpoint and what a release of fusecheck made of it, as text. Standard library only.

    {"version": "0.1.0", "about": ..., "options": {...},        keyword arguments of fuse
     "given": {tensor: hex},                                    source tensors whose bytes mean something
     "joined": {tensor: {"join": ..., "parts": [...]}},         output tensors that the source does not have
     "source": {file: entry}, "output": {file: entry}}          entry: sha256 and either header or text, in lines

The bytes of every other source tensor are SHAKE-256 of its name, so no random generator can change them. The output is
rebuilt from the golden alone, by `join` below; nothing here knows fusecheck.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
MAX_BYTES = 60_000
"""Largest golden: it is read by people, in a diff."""

Entry = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Golden:
    """The values of one file below tests/goldens."""

    version: str
    about: str
    options: Mapping[str, Any]
    given: Mapping[str, str]
    joined: Mapping[str, Entry]
    source: Mapping[str, Entry]
    output: Mapping[str, Entry]

    def source_files(self) -> dict[str, bytes]:
        """The source, rebuilt; ValueError where a digest does not agree."""
        return {file: _rebuilt(file, entry, self._source_tensor) for file, entry in self.source.items()}

    def output_files(self) -> dict[str, bytes]:
        """What the release wrote, rebuilt; ValueError where a digest does not agree."""
        return {file: _rebuilt(file, entry, self._output_tensor) for file, entry in self.output.items()}

    def output_tensors(self) -> Iterator[tuple[str, Entry]]:
        """(name, entry of its header) of every tensor of the output."""
        return _entries(self.output)

    def _source_tensor(self, name: str, entry: Entry) -> bytes:
        if name in self.given:
            return bytes.fromhex(self.given[name])
        return filling(name, entry["data_offsets"][1] - entry["data_offsets"][0])

    def _output_tensor(self, name: str, entry: Entry) -> bytes:
        made = self.joined.get(name)
        if made is None:
            return self._source_tensor(name, entry)
        own = dict(_entries(self.source))
        return join(
            made["join"], [(own[part]["shape"], self._source_tensor(part, own[part])) for part in made["parts"]]
        )


def goldens() -> list[Path]:
    """Every golden of every release."""
    return sorted(FOLDER.glob("*/*.json"))


def load(path: Path) -> Golden:
    """Read one golden."""
    return Golden(**json.loads(path.read_text(encoding="utf-8")))


def write_files(folder: Path, files: Mapping[str, bytes]) -> Path:
    """The files of a checkpoint into a new folder."""
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def read_files(folder: Path) -> dict[str, bytes]:
    """Every file of a folder by its relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def filling(name: str, size: int) -> bytes:
    """The bytes of a source tensor; any bits, NaN among them."""
    return hashlib.shake_256(name.encode()).digest(size)


def join(how: str, parts: list[tuple[list[int], bytes]]) -> bytes:
    """Whole bytes of (shape, bytes) parts: rows one after another, columns side by side, one copy, or a shape anew."""
    if how in {"rows", "stack"}:
        return b"".join(data for _, data in parts)
    if how == "columns":
        rows = parts[0][0][0]
        widths = [len(data) // rows for _, data in parts]
        return b"".join(
            data[row * width : (row + 1) * width]
            for row in range(rows)
            for (_, data), width in zip(parts, widths, strict=True)
        )
    if how == "once":
        return parts[0][1]
    if how == "shape":
        sizes = [struct.unpack("<2q", data) for _, data in parts]
        return struct.pack("<2q", sum(rows for rows, _ in sizes), sizes[0][1])
    raise ValueError(how)


def digest(data: bytes) -> str:
    """SHA-256, which is no digest of fusecheck's own."""
    return hashlib.sha256(data).hexdigest()


def tensor_entries(header: str) -> Iterator[tuple[str, Entry]]:
    """(name, entry) of a header in the order of the data."""
    entries = [item for item in json.loads(header).items() if item[0] != "__metadata__"]
    return iter(sorted(entries, key=lambda item: tuple(item[1]["data_offsets"])))


def _entries(files: Mapping[str, Entry]) -> Iterator[tuple[str, Entry]]:
    for entry in files.values():
        if "header" in entry:
            yield from tensor_entries(entry["header"])


def _rebuilt(file: str, entry: Entry, tensor: Callable[[str, Entry], bytes]) -> bytes:
    if "header" in entry:
        head = str(entry["header"]).encode()
        body = b"".join(tensor(name, one) for name, one in tensor_entries(entry["header"]))
        data = struct.pack("<Q", len(head)) + head + body
    else:
        data = "".join(entry["text"]).encode()
    if digest(data) != entry["sha256"]:
        message = f"{file}: rebuilt, it is not what the golden's digest says"
        raise ValueError(message)
    return data
