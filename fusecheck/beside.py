"""What lies beside the tensors of an output: config.json, side files, stray weight files, the layout that it declares."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from fusecheck.checkpoint import Checkpoint
from fusecheck.config import CONFIG
from fusecheck.errors import CheckpointError, shown
from fusecheck.exact import Finding
from fusecheck.files import same_bytes
from fusecheck.header import TensorInfo
from fusecheck.json_text import strict_json
from fusecheck.mapping import OWN_KEY
from fusecheck.quantisation import MODULES
from fusecheck.shards import INDEX
from fusecheck.sidefiles import ADAPTER, CHECKSUMS, MANIFEST, OWN, WEIGHTS

"""Key of `__metadata__` that declares layout and version."""


def check_alone(out: Checkpoint, layout: str) -> Iterator[Finding]:
    """What is wrong with OUT whatever it was made from; `layout` is what it may declare."""
    for item in out.left_out:
        if item.reason in {WEIGHTS, ADAPTER}:
            yield Finding("a stray weight file, which an engine may load", item.path)
    for shard in out.shards:
        own = (shard.metadata or {}).get(OWN_KEY)
        if own is not None and declaration(own).get("layout") != layout:
            yield Finding(f"__metadata__ declares another layout, {shown(own)}, wanted {layout}", shard.name)


def declaration(text: str) -> dict[str, object]:
    """The value of our key of `__metadata__`: layout and version. Empty where it is none."""
    try:
        value = strict_json(text.encode(), file=OWN_KEY)
    except (CheckpointError, UnicodeEncodeError):
        return {}
    return value if isinstance(value, dict) else {}


def declared_tp(out: Checkpoint) -> int | None:
    """How many ranks the files of OUT declare to be cut for, where all say the same."""
    said = {str(declaration((shard.metadata or {}).get(OWN_KEY, "")).get("layout")) for shard in out.shards}
    found = re.search(r" tp=([1-9][0-9]{0,3})$", said.pop()) if len(said) == 1 else None
    return int(found[1]) if found else None


def check_config(out: Checkpoint, source: Checkpoint | None, original: str | None) -> Iterator[Finding]:
    """config.json is the source's byte for byte, or gained one list, and then the manifest keeps the `original`."""
    if original is None:
        if source is not None and out.config_text != source.config_text:
            yield Finding("differs from the source's", CONFIG)
    elif source is not None and original != source.config_text.decode(errors="replace"):
        yield Finding("the original that the manifest keeps is not the source's", CONFIG)
    elif not _only_gained_modules(out.config_text, original):
        yield Finding("differs from the original that the manifest keeps by more than GPTQ's list of modules", CONFIG)


def _only_gained_modules(text: bytes, original: str) -> bool:
    """Whether config.json differs by GPTQ's list of quantised modules alone."""
    try:
        ours, theirs = (strict_json(blob, file=CONFIG, constants=True) for blob in (text, original.encode()))
    except (CheckpointError, UnicodeEncodeError):
        return False
    declared = ours.get("quantization_config") if isinstance(ours, dict) else None
    if not isinstance(declared, dict) or declared.pop(MODULES, None) is None:
        return False
    return repr(ours) == repr(theirs)  # which tells 1 from true, and lets NaN equal itself


def check_side_files(out: Checkpoint, source: Checkpoint) -> Iterator[Finding]:
    """Every side file of the source is in OUT, byte for byte. More than those may be there."""
    present = {side.path: side.size for side in out.side_files}
    for side in source.side_files:
        here = (side.path, 0)
        if side.path not in present:
            yield Finding("side file is missing", side.path)
        elif present[side.path] != side.size or not same_bytes(out.files, here, source.files, here, side.size):
            yield Finding("side file differs from the source's", side.path)


def totals(tensors: Mapping[str, TensorInfo]) -> dict[str, int]:
    """What an index may say of all tensors together: bytes, and elements."""
    return {
        "total_size": sum(tensor.nbytes for tensor in tensors.values()),
        "total_parameters": sum(math.prod(tensor.shape) for tensor in tensors.values()),
    }


def notes(out: Checkpoint, known: set[str] | None, *, ours: bool) -> list[str]:
    """What is worth saying and no defect. `known`: the side files of the source, where anything says which they are."""
    found = []
    if not ours:
        compared = "; its bytes are compared with the source" if known is not None else ""
        found.append(f"no manifest can be read, so OUT may be another writer's{compared}")
        given = out.index_metadata or {}
        wrong = [f"{key} {given[key]}" for key, right in totals(out.tensors).items() if given.get(key, right) != right]
        if wrong:
            found.append(f"{INDEX} gives wrong totals, which no engine reads: {shown(', '.join(wrong))}")
        if len(out.shards) > 1 and out.index_metadata is None and not out.ranked:
            found.append(f"{INDEX} is absent beside {len(out.shards)} shards")
    elif len(out.shards) == 1 and out.index_metadata is not None:
        found.append(f"{INDEX} stands beside the one weight file, and the manifest does not speak of it")
    extra = [side.path for side in out.side_files if side.path not in (known or ())]
    extra += [
        i.path for i in out.left_out if i.reason not in {WEIGHTS, ADAPTER} and i.path not in {MANIFEST, CHECKSUMS, OWN}
    ]
    if extra and known is not None:
        more = f" and {len(extra) - 3} more" if len(extra) > 3 else ""
        found.append(f"files that the source has not: {', '.join(map(shown, extra[:3]))}{more}")
    if any(item.path == CHECKSUMS for item in out.left_out):
        found.append(f"{CHECKSUMS} is not checked here: sha256sum -c reads it")
    return found
