"""Pieces of text that several reports share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.filesize import decimal

from fusecheck.errors import printable, shown

if TYPE_CHECKING:
    from fusecheck.operations.fuse import FuseReport
    from fusecheck.operations.unfuse import UnfuseReport
    from fusecheck.sidefiles import LeftOut


def files_line(report: FuseReport | UnfuseReport) -> str:
    """What an output is made of, and its size."""
    shards, sides = count(len(report.shards), "shard"), count(len(report.side_files), "side file")
    return f"  {shards}, {decimal(report.output_bytes)}, {sides}"


def left_out_lines(items: tuple[LeftOut, ...], *, verbose: bool) -> Iterator[str]:
    """Files that were not taken along; why, when `verbose`."""
    if items and not verbose:
        some = ", ".join(shown(item.path, 40) for item in items[:3])
        yield f"  left out: {some}{' ...' if len(items) > 3 else ''} (-v says why)"
    for item in items if verbose else ():
        yield f"  left out: {shown(item.path)}: {item.reason}"


def module_of(tensor: str) -> str:
    """The last part of a module path: `qkv_proj` of `model.layers.0.self_attn.qkv_proj.weight`.

    One expert of a stack, `w13_weight[3]`, stays whole.
    """
    if tensor.endswith("]"):
        return printable(tensor.rpartition(".")[2])
    return printable(tensor.rpartition(".")[0].rpartition(".")[2])


def count(number: int, noun: str) -> str:
    """`1 shard`, `2 shards`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
