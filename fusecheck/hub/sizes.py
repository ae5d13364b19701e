"""Tensors -> shards of a limited size, by the hub's own splitter."""

from __future__ import annotations

import re
from collections.abc import Mapping

from fusecheck.errors import UsageError

_SHARD_SIZE = re.compile(r"(?P<number>[0-9]{1,15}(?:\.[0-9]{1,15})?) ?[KMGT]B", re.ASCII | re.IGNORECASE)


def shard_groups(sizes: Mapping[str, int], max_shard_size: str | int) -> list[list[str]]:
    """Names grouped by the hub's own splitter: `sizes` in bytes and in order, `max_shard_size` in bytes or as "5GB".

    A tensor above the limit gets a shard of its own, which then stands before the one that was being filled.
    UsageError for a limit that is none.
    """
    check_shard_size(max_shard_size)
    from huggingface_hub import split_state_dict_into_shards_factory  # noqa: PLC0415 - a folder must not pay for it

    split = split_state_dict_into_shards_factory(
        dict(sizes),
        get_storage_size=lambda size: size,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    return [list(names) for names in split.filename_to_tensors.values()]


def check_shard_size(max_shard_size: str | int) -> None:
    """UsageError unless it is a positive number of bytes or one in the hub's decimal units."""
    if isinstance(max_shard_size, str):
        match = _SHARD_SIZE.fullmatch(max_shard_size.strip())
        valid = match is not None and float(match["number"]) > 0
    else:
        valid = type(max_shard_size) is int and max_shard_size > 0
    if not valid:
        raise UsageError(
            "--max-shard-size is no size",
            found=repr(max_shard_size),
            wanted="a number and KB, MB, GB or TB, such as 5GB",
        )
