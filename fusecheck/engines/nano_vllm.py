"""A drop-in for nano-vllm's `load_model(model, path)` that reads split and fused checkpoints alike.

    from fusecheck import load_model      # instead of nanovllm.utils.loader

nano-vllm's own replaces substrings: `up_proj` is in `gate_up_proj`, so a fused name becomes `gate_gate_up_proj`. Here a
fused tensor is cut into its parts, at the offsets of the weight_loaders, and each part goes the way that the split tensor
would go: to the parameter's own `weight_loader`, with its shard_id. So one rule serves both forms, and tensor parallelism
stays the engine's. Which tensor fills what is decided from the headers, before the first byte is copied.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from fusecheck.checkpoint import Checkpoint, open_checkpoint
from fusecheck.config import CONFIG, ModelConfig
from fusecheck.errors import CheckpointError, FusecheckError, SystemFailure, UsageError, shown
from fusecheck.header import TensorInfo
from fusecheck.mapping import PACKINGS, SHARED_EXPERT, Packing, ShardRows, expert_packing, packed_modules_mapping

PackedModules: TypeAlias = Mapping[str, tuple[str, int | str]]
"""part -> (fused, shard_id), as nano-vllm's models carry it."""

_BY_MODULE: dict[str, Packing] = {packing.fused: packing for packing in (*PACKINGS, SHARED_EXPERT)}
_FUSED = re.compile(
    rf"((?:.*\.)?layers\.[0-9]+\.)({'|'.join(map(re.escape, _BY_MODULE))}|mlp\.experts\.([0-9]{{1,9}})\.gate_up_proj)"
    r"\.(weight|bias)",
    re.ASCII | re.DOTALL,
)
"""Before the module, the module, the expert's number, the suffix."""

LISTED = 8
"""Names that one message lists of each kind; the error's fields hold them all."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What `load_model` did."""

    parameters: int
    """Parameters of the model; each was filled once."""
    tensors: int
    """Tensors that were read."""
    fused: int
    """Those among them that are fused, and were cut into their parts."""
    tied: tuple[str, ...]
    """Tensors that were not read, since another one fills the same memory (lm_head.weight of a tied model)."""
    ignored: tuple[str, ...]
    """Rotary buffers of the checkpoint, which engines compute themselves."""


class LoadMismatch(CheckpointError):
    """The checkpoint does not fill the model exactly once. Nothing was copied; names are those of a split checkpoint."""

    def __init__(self, folder: Path, *, missing: list[str], twice: list[str], unexpected: list[str]) -> None:
        self.missing = tuple(missing)
        """Parameters, or parts of fused ones, that no tensor fills."""
        self.twice = tuple(twice)
        """Those that two tensors fill."""
        self.unexpected = tuple(unexpected)
        """Tensors that no parameter takes."""
        kinds = (("missing", missing), ("filled twice", twice), ("unexpected", unexpected))
        told = [f"{kind}: {_listed(names)}" for kind, names in kinds if names]
        super().__init__(f"does not fill the model: {'; '.join(told)}", file=str(folder))


@dataclass(frozen=True, slots=True)
class _Source:
    """A tensor of the checkpoint, or the rows of a fused one that are a part."""

    tensor: TensorInfo
    rows: ShardRows | None = None


@dataclass(frozen=True, slots=True)
class _Target:
    """A parameter, or the part of a fused one that `shard_id` names."""

    name: str
    parameter: nn.Parameter
    shard_id: int | str | None = None

    @property
    def memory(self) -> tuple[object, ...]:
        """Equal for tied parameters: nano-vllm lets `lm_head.weight.data` be the embedding's."""
        data = self.parameter.data
        place = (data.device, data.data_ptr()) if data.numel() else (id(self.parameter),)
        return (*place, tuple(data.shape), data.stride(), self.shard_id)


def load_model(model: nn.Module, path: str | os.PathLike[str]) -> LoadReport:
    """Fill every parameter of `model`, each exactly once, from the split or fused checkpoint in the folder `path`.

    Parts are recognised by the model's `packed_modules_mapping`, or ours where it has none. Of tied parameters the first
    (the embedding) decides. LoadMismatch, before anything is copied, where names do not fit; CheckpointError where the
    folder is malformed or a tensor has the wrong shape; UsageError for a model that cannot be filled. An error of the
    engine's own weight_loader passes through, with a note that names the tensor. Files are mapped, never written.
    """
    folder = Path(path)
    targets = _targets(model)
    with open_checkpoint(folder) as checkpoint:
        sources, twice = _sources(checkpoint, targets)
        chosen, tied, missing = _choose(targets, sources)
        strangers = list(dict.fromkeys(sources[name].tensor.name for name in sources if name not in targets))
        ignored = [name for name in strangers if _is_rotary_buffer(name)]
        unexpected = [name for name in strangers if not _is_rotary_buffer(name)]
        if missing or twice or unexpected:
            raise LoadMismatch(folder, missing=missing, twice=twice, unexpected=unexpected)
        read = _copy(folder, [(sources[name], target) for name, target in chosen.items()])
        checkpoint.files.check_unchanged()
    return LoadReport(
        parameters=len({id(target.parameter) for target in targets.values()}),
        tensors=len(read),
        fused=sum(read.values()),
        tied=tuple(tied),
        ignored=tuple(ignored),
    )


def default_weight_loader(param: nn.Parameter, loaded_weight: Tensor) -> None:
    """Copy a whole tensor; CheckpointError for another shape (copy_ would broadcast) or dtype (it would convert)."""
    if loaded_weight.shape != param.shape:
        raise CheckpointError("wrong shape", found=list(loaded_weight.shape), wanted=list(param.shape))
    if loaded_weight.dtype != param.dtype:
        raise CheckpointError("wrong dtype", found=loaded_weight.dtype, wanted=param.dtype)
    param.data.copy_(loaded_weight)


def _targets(model: nn.Module) -> dict[str, _Target]:
    """Name that the tensor has in a split checkpoint -> what it fills."""
    parts: dict[str, list[tuple[str, int | str]]] = {}
    for part, (fused, shard_id) in _packed_modules(model).items():
        parts.setdefault(fused, []).append((part, shard_id))
    found: dict[str, _Target] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.is_meta:
            raise UsageError("a parameter on the meta device cannot be filled", tensor=name)
        before, module, suffix = _cut_name(name)
        packed = parts.get(module, [])
        if packed and not hasattr(parameter, "weight_loader"):
            raise UsageError("a fused parameter has no weight_loader that could take a shard_id", tensor=name)
        aims = {f"{before}{part}{suffix}": _Target(name, parameter, shard_id) for part, shard_id in packed}
        for split_name, target in (aims or {name: _Target(name, parameter)}).items():
            if split_name in found:
                problem = f"two parameters are filled by {shown(split_name)}"
                raise UsageError(problem, tensor=name, found=f"beside {found[split_name].name}")
            found[split_name] = target
    return found


def _packed_modules(model: nn.Module) -> PackedModules:
    mapping = getattr(model, "packed_modules_mapping", packed_modules_mapping)
    pairs = mapping.values() if isinstance(mapping, Mapping) else [mapping]
    if not all(isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs):
        problem = "packed_modules_mapping is not in nano-vllm's form"
        raise UsageError(problem, found=mapping, wanted="part -> (fused, shard_id)")
    return mapping


def _cut_name(name: str) -> tuple[str, str, str]:
    """`a.b.q_proj.weight` as `a.b.`, `q_proj`, `.weight`."""
    stem, dot, leaf = name.rpartition(".")
    before, inner, module = stem.rpartition(".")
    return before + inner, module, dot + leaf


def _sources(checkpoint: Checkpoint, targets: Mapping[str, _Target]) -> tuple[dict[str, _Source], list[str]]:
    """Split name -> where its values are; and the names that stand in the checkpoint in both forms."""
    found: dict[str, _Source] = {}
    twice: list[str] = []
    for name, tensor in checkpoint.tensors.items():
        whole = {name: _Source(tensor)}
        # a model may hold a parameter of the fused name that its mapping does not pack
        parts = whole if name in targets else dict(_parts(tensor, checkpoint.config)) or whole
        twice += [part for part in parts if part in found]
        found |= parts
    return found, twice


def _parts(tensor: TensorInfo, config: ModelConfig) -> Iterator[tuple[str, _Source]]:
    """The parts of a fused weight or bias, by the config's rows; of any other tensor none."""
    match = _FUSED.fullmatch(tensor.name)
    if match is None:
        return
    before, module, expert, suffix = match.groups()
    packing = expert_packing(int(expert)) if expert else _BY_MODULE[module]
    rows = config.rows(packing)
    total = sum(part.shard_size for part in rows)
    if not tensor.shape or tensor.shape[0] != total:
        raise CheckpointError(
            f"rows contradict {CONFIG}",
            file=tensor.shard,
            tensor=tensor.name,
            found=list(tensor.shape),
            wanted=f"{total} rows",
        )
    for (_, part), part_rows in zip(packing.parts, rows, strict=True):
        yield f"{before}{part}.{suffix}", _Source(tensor, part_rows)


def _choose(
    targets: Mapping[str, _Target], sources: Mapping[str, _Source]
) -> tuple[dict[str, _Target], list[str], list[str]]:
    """One source for each memory: what is filled, which tied tensors are left out, which names are missing."""
    together: dict[tuple[object, ...], list[str]] = {}
    for name, target in targets.items():
        together.setdefault(target.memory, []).append(name)
    chosen: dict[str, _Target] = {}
    tied: list[str] = []
    missing: list[str] = []
    for names in together.values():
        present = [name for name in names if name in sources]
        if present:
            chosen[present[0]] = targets[present[0]]
            tied += present[1:]
        else:
            missing.append(names[0])
    return chosen, tied, missing


def _is_rotary_buffer(name: str) -> bool:
    return name.split(".")[-2:] == ["rotary_emb", "inv_freq"]


def _copy(folder: Path, jobs: Iterable[tuple[_Source, _Target]]) -> dict[str, bool]:
    """Read each shard once, in the order of its data. Names that were read, and whether each was fused."""
    read: dict[str, bool] = {}
    shards: dict[str, list[tuple[_Source, _Target]]] = {}
    for job in jobs:
        shards.setdefault(job[0].tensor.shard, []).append(job)
    for shard, its_jobs in shards.items():
        try:
            with safe_open(folder / shard, framework="pt", device="cpu") as file:
                for source, target in sorted(its_jobs, key=lambda job: job[0].tensor.start):
                    _fill(target, source, file.get_tensor(source.tensor.name))
                    read[source.tensor.name] = source.rows is not None
        except SafetensorError as error:
            raise CheckpointError(f"the safetensors library refuses it: {error}", file=shard) from error
        except OSError as error:
            raise SystemFailure.from_os(error, shard, "open") from error
    return read


def _fill(target: _Target, source: _Source, loaded: Tensor) -> None:
    """By the parameter's own weight_loader: it knows the TP rank, and takes the whole part."""
    if source.rows is not None:
        loaded = loaded.narrow(0, source.rows.shard_offset, source.rows.shard_size)
    loader: Callable[..., None] = getattr(target.parameter, "weight_loader", default_weight_loader)
    shard_id = () if target.shard_id is None else (target.shard_id,)
    try:
        loader(target.parameter, loaded, *shard_id)
    except FusecheckError as error:
        error.file, error.tensor = error.file or source.tensor.shard, error.tensor or source.tensor.name
        raise
    except Exception as error:
        error.add_note(f"while {target.name} was filled from {shown(source.tensor.name)} of {source.tensor.shard}")
        raise


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"{', '.join(shown(name) for name in names[:LISTED])}{more}"
