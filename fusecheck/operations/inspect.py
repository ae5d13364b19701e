"""inspect: what is there, what `fuse` would do or why not, by headers alone."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from fusecheck.beside import declared_tp
from fusecheck.checkpoint import Checkpoint, open_folder, open_stored
from fusecheck.collector import collector_paused
from fusecheck.config import CONFIG
from fusecheck.engines.table import ENGINES, Engine, ranks_engines
from fusecheck.errors import CheckpointError, UnsupportedCheckpoint
from fusecheck.header import MAX_HEADER_BYTES, TensorInfo
from fusecheck.hub import resolve
from fusecheck.json_text import strict_json
from fusecheck.mapping import HEADS, PACKINGS, PREFIXES, Packing
from fusecheck.model import survey
from fusecheck.shards import by_rank, cut_already
from fusecheck.sidefiles import LeftOut
from fusecheck.stores import is_remote, open_source

_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}", re.ASCII)
_WEIGHTS = ("weight", "qweight", "weight_packed")
"""What the weight of a projection is called, quantised or not."""


@dataclass(frozen=True, slots=True)
class ProjectionForm:
    """One packing in a layer: `split`, `fused`, `mixed` or `absent`, rows of each tensor found, and in_features."""

    name: str
    form: str
    rows: tuple[int, ...]
    in_features: int | None


@dataclass(frozen=True, slots=True)
class LayerRange:
    """Layers first to last, all alike: same tensors, dtypes and shapes. `bytes` and `tensors` are of one layer."""

    first: int
    last: int
    projections: tuple[ProjectionForm, ...]
    experts: int
    dtypes: tuple[str, ...]
    tensors: int
    bytes: int


@dataclass(frozen=True, slots=True)
class DtypeShare:
    """How much of the checkpoint has one dtype."""

    dtype: str
    tensors: int
    bytes: int


@dataclass(frozen=True, slots=True)
class InspectReport:
    """What is there. Sizes are bytes of tensor data, but for `shards`, which are whole files."""

    verdict: str
    path: str
    model_type: str | None
    architectures: tuple[str, ...]
    quantisation: str | None
    would_fuse: bool
    reason: str | None
    """Why `fuse` would refuse, or None."""
    split_groups: int
    fused_tensors: int
    straddling: tuple[str, ...]
    """Fused names of groups whose parts lie in several shards."""
    layers: tuple[LayerRange, ...]
    tensors: int
    bytes: int
    dtypes: tuple[DtypeShare, ...]
    shards: tuple[tuple[str, int], ...]
    tied: bool | None
    stored_head: str | None
    side_files: tuple[str, ...]
    left_out: tuple[LeftOut, ...]
    engines: tuple[Engine, ...]
    """Which engines load the fused form; empty where there is none."""
    warnings: tuple[str, ...]


def inspect(path: str | Path, *, follow_links: bool = False, max_header_bytes: int = MAX_HEADER_BYTES) -> InspectReport:
    """Describe the checkpoint at `path`, a folder, hub id or URL.

    Unsupported but sound is a report; malformed raises CheckpointError (exit 3).
    """
    place = os.fspath(path)
    if is_remote(place):
        opened = open_stored(open_source(place), place, max_header_bytes=max_header_bytes, ranked=True)
    else:
        opened = open_folder(
            resolve(place).folder, follow_links=follow_links, max_header_bytes=max_header_bytes, ranked=True
        )
    with opened as checkpoint, collector_paused():
        return _report(checkpoint, str(path))


def _report(checkpoint: Checkpoint, path: str) -> InspectReport:
    config = strict_json(checkpoint.config_text, file=CONFIG, constants=True)
    if not isinstance(config, dict):
        raise CheckpointError("is not a JSON object", file=CONFIG, found=type(config).__name__)
    reason, warnings, groups, fused = None, list(checkpoint.warnings), [], 0
    tied: bool | None = None
    first, tp = _first_rank(checkpoint)
    try:
        if tp is not None:
            raise cut_already(checkpoint.shards[0].name)
        model = survey(checkpoint.tensors, checkpoint.config, checkpoint.peek)
        groups, fused, tied = list(model.split), len(model.fused), checkpoint.config.tie_word_embeddings
        warnings += model.warnings
    except UnsupportedCheckpoint as error:
        reason = str(error)
    layers = tuple(_fold(_by_layer(first)))
    return InspectReport(
        verdict="sound",
        path=path,
        model_type=_text(config.get("model_type")),
        architectures=tuple(filter(None, map(_text, _list(config.get("architectures"))))),
        quantisation=_quantisation(config),
        would_fuse=reason is None,
        reason=reason,
        split_groups=len(groups) if reason is None else _count(layers, "split"),
        fused_tensors=fused if reason is None else _count(layers, "fused"),
        straddling=tuple(g.fused for g in groups if len({tensor.shard for tensor in g.tensors}) > 1),
        layers=layers,
        tensors=len(checkpoint.tensors),
        bytes=sum(tensor.nbytes for tensor in checkpoint.tensors.values()),
        dtypes=_dtypes(checkpoint.tensors.values()),
        shards=tuple((shard.name, shard.size) for shard in checkpoint.shards),
        tied=tied,
        stored_head=next((name for name in HEADS if name in first), None),
        side_files=tuple(side.path for side in checkpoint.side_files),
        left_out=checkpoint.left_out,
        engines=ranks_engines(tp) if tp is not None else ENGINES if reason is None else (),
        warnings=tuple(warnings),
    )


def _first_rank(checkpoint: Checkpoint) -> tuple[Mapping[str, TensorInfo], int | None]:
    """The tensors by name, of one rank where it is cut for several; and for how many."""
    if not checkpoint.ranked:
        return checkpoint.tensors, None
    ranks = by_rank(checkpoint.tensors.values())
    first = next(iter(ranks.values()), [])
    return {tensor.name: tensor for tensor in first}, declared_tp(checkpoint) or len(ranks)


def _by_layer(tensors: Mapping[str, TensorInfo]) -> dict[int, list[tuple[str, TensorInfo]]]:
    layers: dict[int, list[tuple[str, TensorInfo]]] = {}
    for name, tensor in tensors.items():
        before, _, after = name.partition("layers.")
        number, dot, path = after.partition(".")
        if dot and before in PREFIXES and _NUMBER.fullmatch(number):
            layers.setdefault(int(number), []).append((path, tensor))
    return layers


def _fold(layers: Mapping[int, list[tuple[str, TensorInfo]]]) -> Iterable[LayerRange]:
    """Runs of consecutive layers that are alike become one row."""
    described = [_describe(number, tensors) for number, tensors in sorted(layers.items())]
    for _, run in groupby(enumerate(described), key=lambda pair: (pair[1][0], pair[1][1].first - pair[0])):
        rows = [row for _, (_, row) in run]
        yield replace(rows[0], last=rows[-1].last)


def _describe(number: int, tensors: list[tuple[str, TensorInfo]]) -> tuple[int, LayerRange]:
    """A fingerprint of everything in the layer, and its row."""
    forms = dict(tensors)
    within = {path.split(".")[2]: tensor for path, tensor in forms.items() if path.startswith("mlp.experts.")}
    experts = sum(name.isdecimal() for name in within)
    stacked = [tensor.shape[0] for tensor in within.values() if len(tensor.shape) == 3]
    row = LayerRange(
        number,
        number,
        tuple(_projection(packing, forms) for packing in PACKINGS),
        experts or max(stacked, default=0),
        tuple(sorted({tensor.dtype for tensor in forms.values()})),
        len(forms),
        sum(tensor.nbytes for tensor in forms.values()),
    )
    fingerprint = hash(frozenset((path, tensor.dtype, tensor.shape) for path, tensor in forms.items()))
    return fingerprint, row


def _projection(packing: Packing, forms: Mapping[str, TensorInfo]) -> ProjectionForm:
    def stored(module: str) -> TensorInfo | None:
        return next((forms[f"{module}.{suffix}"] for suffix in _WEIGHTS if f"{module}.{suffix}" in forms), None)

    whole = stored(packing.fused)
    parts = [tensor for _, module in packing.parts if (tensor := stored(module)) is not None]
    form = {(True, True): "mixed", (True, False): "fused", (False, True): "split"}.get((whole is not None, bool(parts)))
    found = [whole] if whole is not None else parts
    rows = tuple(tensor.shape[0] for tensor in found if tensor.shape)
    columns = found[0].shape[-1] if found and len(found[0].shape) > 1 else None
    return ProjectionForm(packing.fused.rpartition(".")[2], form or "absent", rows, columns)


def _count(layers: Iterable[LayerRange], form: str) -> int:
    return sum((r.last - r.first + 1) * sum(p.form == form for p in r.projections) for r in layers)


def _dtypes(tensors: Iterable[TensorInfo]) -> tuple[DtypeShare, ...]:
    shares: dict[str, tuple[int, int]] = {}
    for tensor in tensors:
        count, size = shares.get(tensor.dtype, (0, 0))
        shares[tensor.dtype] = (count + 1, size + tensor.nbytes)
    return tuple(DtypeShare(dtype, *share) for dtype, share in sorted(shares.items(), key=lambda item: -item[1][1]))


def _quantisation(config: Mapping[str, object]) -> str | None:
    for key in ("quantization_config", "quantization", "compression_config"):
        value = config.get(key)
        if isinstance(value, dict):
            return _text(value.get("quant_method")) or _text(value.get("quant_algo")) or json.dumps(value)[:80]
    return None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []
