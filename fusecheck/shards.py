"""Which weight files a folder is made of, or why that is not certain: the index, and the rules where there is none."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fusecheck.errors import CheckpointError, UnsupportedCheckpoint
from fusecheck.files import MAX_JSON_BYTES
from fusecheck.header import TensorInfo
from fusecheck.json_text import strict_json
from fusecheck.listing import CheckpointFiles
from fusecheck.sidefiles import ADAPTER_FILES, WEIGHT_SUFFIXES

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_INDEXED = 1_000_000
"""Most tensors that an index names."""

SHARD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.safetensors", re.ASCII)
"""A shard is a plain file name: nothing in an index leads out of the folder."""

RANK_FILE = re.compile(r"model-rank-(0|[1-9][0-9]{0,4})-part-(0|[1-9][0-9]{0,4})\.safetensors", re.ASCII)
"""A file of one rank, as vLLM's sharded_state names it."""

_OTHER_WEIGHTS = tuple(suffix for suffix in WEIGHT_SUFFIXES if suffix != ".safetensors")
_NUMBERED = re.compile(r"(.+)-([0-9]{1,9})-of-([0-9]{1,9})\.safetensors", re.ASCII)


@dataclass(frozen=True, slots=True)
class Index:
    """A model.safetensors.index.json: its metadata ({} where it has none) and tensor name -> shard.

    Whoever reads the shards strikes off what is found.
    """

    metadata: Mapping[str, object]
    weight_map: dict[str, str]


def read_index(files: CheckpointFiles) -> Index:
    """Read and check the index; CheckpointError where it is malformed or names anything but plain shard names."""
    files.add(INDEX)
    value = strict_json(files.read(INDEX, MAX_JSON_BYTES), file=INDEX, members=MAX_INDEXED)
    weight_map = value.get("weight_map") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError("has no weight_map object with entries", file=INDEX)
    metadata = value.get("metadata")
    if metadata is not None and not isinstance(metadata, dict):
        raise CheckpointError("metadata is no object", file=INDEX, found=type(metadata).__name__)
    plain = {shard for shard in weight_map.values() if isinstance(shard, str)}
    plain = {sys.intern(shard) for shard in plain if SHARD_NAME.fullmatch(shard)}
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or shard not in plain:
            raise CheckpointError(
                "names a shard that is no plain safetensors file name",
                file=INDEX,
                tensor=tensor,
                found=shard,
                wanted="a file beside the index, such as model-00001-of-00002.safetensors",
            )
        weight_map[tensor] = sys.intern(shard)
    return Index(metadata or {}, weight_map)


def natural_key(name: str) -> tuple[tuple[int, str], ...]:
    """Sort key that counts: shard 2 before shard 10."""
    pieces = re.split(r"([0-9]+)", name)
    return tuple((int(piece[:4000]), piece) if piece.isdecimal() else (-1, piece) for piece in pieces)


def choose_shards(
    files: CheckpointFiles, names: frozenset[str], weight_map: Mapping[str, str] | None, warnings: list[str]
) -> list[str]:
    """Which weight files the checkpoint is made of, or why that is not certain."""
    present = {name for name in names if name.endswith(".safetensors") and not files.is_folder(name)}
    numbered = {name: match for name in present if (match := _NUMBERED.fullmatch(name)) and match[1] == "model"}
    if weight_map is not None:
        chosen = set(weight_map.values())
        if SINGLE in present and SINGLE not in chosen:
            raise CheckpointError(
                f"stands beside an {INDEX} that does not name it: two readers would load two models",
                file=SINGLE,
                remedy="remove the one that is stale",
            )
        _check_listed(chosen, names)
    elif SINGLE in names:
        if numbered:
            raise CheckpointError(
                "stands beside numbered shards: two readers would load two models",
                file=SINGLE,
                found=f"beside {min(numbered)}",
                remedy="remove the ones that are stale",
            )
        chosen = {SINGLE}
    elif numbered:
        chosen = _complete_set(numbered)
        warnings.append(f"{INDEX} is absent; the {len(chosen)} numbered shards are a complete set, an index is made")
    else:
        raise _no_weights(names, present)
    ignored = sorted(present - chosen - ADAPTER_FILES)
    if ignored:
        warnings.append(f"other weight files are ignored, neither read nor copied: {', '.join(ignored)}")
    return sorted(chosen, key=natural_key)


def cut_already(name: str) -> UnsupportedCheckpoint:
    """Why a folder of rank files, such as `name`, cannot be fused."""
    return UnsupportedCheckpoint(
        "holds one rank's share: this folder is cut for tensor parallelism already",
        file=name,
        remedy="name the checkpoint that it was made from, or unfuse it first",
    )


def by_rank(tensors: Iterable[TensorInfo]) -> dict[int, list[TensorInfo]]:
    """The tensors of each rank, whatever parts they lie in; the ranks in order."""
    found: dict[int, list[TensorInfo]] = {}
    for tensor in tensors:
        match = RANK_FILE.fullmatch(tensor.shard)
        found.setdefault(int(match[1]) if match else -1, []).append(tensor)
    return dict(sorted(found.items()))


def lane_name(path: str) -> str:
    """What files that are cut out of the same tensors have in common: `model-rank-3-part-0.safetensors` is of part 0."""
    match = RANK_FILE.fullmatch(path)
    return path if match is None else f"part {match[2]}"


def choose_rank_files(names: frozenset[str]) -> list[str]:
    """The files of a folder that is cut for ranks, by rank and part; empty where it is none."""
    if INDEX in names or SINGLE in names:
        return []
    return sorted(filter(RANK_FILE.fullmatch, names), key=natural_key)


def _check_listed(chosen: set[str], names: frozenset[str]) -> None:
    missing = sorted(chosen - names, key=natural_key)
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise CheckpointError(
            f"names shards that are missing: {', '.join(missing[:3])}{more}", file=INDEX, remedy="complete the download"
        )
    sets = {(match[1], match[3]) for name in chosen if (match := _NUMBERED.fullmatch(name))}
    for name in sorted(names - chosen):
        match = _NUMBERED.fullmatch(name)
        if match and (match[1], match[3]) in sets:
            raise CheckpointError(f"belongs to the numbered set, yet {INDEX} does not name it", file=name)


def _complete_set(numbered: Mapping[str, re.Match[str]]) -> set[str]:
    totals = {match[3] for match in numbered.values()}
    if len(totals) > 1:
        raise CheckpointError(
            "several numbered sets and no index to choose by",
            file=min(numbered),
            found=f"-of-{' and -of-'.join(sorted(totals))}",
        )
    (total,) = totals
    by_number = {int(match[2]): name for name, match in numbered.items()}
    absent = next((number for number in range(1, int(total) + 1) if number not in by_number), None)
    if absent is not None or len(by_number) != len(numbered) or len(by_number) != int(total):
        what = (
            f"shard {absent} of {int(total)} is missing"
            if absent is not None
            else "shard numbers repeat or pass the total"
        )
        raise CheckpointError(
            f"{what}, and there is no index", file=f"model-*-of-{total}.safetensors", remedy="complete the download"
        )
    return set(numbered)


def _no_weights(names: Iterable[str], present: set[str]) -> CheckpointError:
    others = sorted(name for name in names if name.lower().endswith(_OTHER_WEIGHTS))
    if present & ADAPTER_FILES:
        return CheckpointError(
            "this folder holds an adapter only",
            file=min(present & ADAPTER_FILES),
            remedy="merge it into its base model first",
        )
    ranked = sorted(filter(RANK_FILE.fullmatch, present))
    if ranked:
        return cut_already(ranked[0])
    if present:
        return CheckpointError(
            f"has a name that no engine looks for, and there is no {INDEX}",
            file=", ".join(sorted(present)),
            remedy=f"rename it to {SINGLE} if it is the whole model",
        )
    if others:
        return CheckpointError(
            "no safetensors weights; other formats are never read",
            file=others[0],
            wanted=SINGLE,
            remedy="convert the checkpoint to safetensors",
        )
    return CheckpointError(
        "no weights in this folder",
        file=SINGLE,
        wanted=f"{SINGLE}, or shards and {INDEX}",
        remedy="name the folder that they lie in",
    )


def merge_tensors(tensors: dict[str, TensorInfo], found: Iterable[TensorInfo], listed: dict[str, str] | None) -> None:
    """Add the tensors of one shard, and strike them off what the index lists (None: there is no index).

    CheckpointError where one is there already, or the index says otherwise.
    """
    for tensor in found:
        name, shard = tensor.name, tensor.shard
        twin = tensors.get(name)
        if twin is not None:
            raise CheckpointError(
                "the same tensor stands in two shards", file=shard, tensor=name, found=f"also in {twin.shard}"
            )
        home = shard if listed is None else listed.pop(name, None)
        if home is None:
            raise CheckpointError(f"holds a tensor that {INDEX} does not name", file=shard, tensor=name)
        if home != shard:
            raise CheckpointError("the index names another shard", file=INDEX, tensor=name, found=home, wanted=shard)
        tensors[name] = tensor


def check_covered(listed: Mapping[str, str]) -> None:
    """CheckpointError where the index names a tensor that no shard holds: one that was not struck off."""
    for name, shard in listed.items():
        raise CheckpointError("the index names a tensor that its shard lacks", file=INDEX, tensor=name, found=shard)
