"""Which Linears are cut for ranks, and their tensors: whole ones of a source by split names, a rank's by the engine's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Self

from torch import Tensor

from fusecheck.checkpoint import Checkpoint
from fusecheck.engines.vllm_sharded import Cut, ShardedLayout
from fusecheck.fused_linear import ShardId
from fusecheck.header import TensorInfo, tensor_bytes
from fusecheck.mapping import NEVER_GROUPED_SUFFIXES, PREFIXES
from fusecheck.shards import RANK_FILE
from fusecheck.split_form import split_names
from fusecheck.tensors import load_slice, load_tensor


@dataclass(frozen=True, slots=True)
class SplitForm:
    """A source by the names of its split form, whatever form it is stored in."""

    checkpoint: Checkpoint
    prefix: str
    """Of `layers.N.`"""
    modules: Mapping[str, Mapping[str, TensorInfo]]
    """Full name of a module -> its tensors by suffix; each names its file and its bytes."""

    @classmethod
    def of(cls, source: Checkpoint) -> Self:
        """Of any source that `fuse` takes."""
        modules: dict[str, dict[str, TensorInfo]] = {}
        for name, tensor in split_names(source.tensors, source.config).items():
            module, _, suffix = name.rpartition(".")
            if suffix not in NEVER_GROUPED_SUFFIXES:
                modules.setdefault(module, {})[suffix] = tensor
        prefix = next(
            (prefix for prefix in PREFIXES if any(name.startswith(f"{prefix}layers.") for name in modules)), ""
        )
        return cls(source, prefix, modules)

    def load(self, module: str) -> dict[str, Tensor]:
        """A whole split Linear by suffix; empty where there is none."""
        return {suffix: self._tensor(tensor) for suffix, tensor in self.modules.get(module, {}).items()}

    def _tensor(self, part: TensorInfo) -> Tensor:
        """Rows of the stored tensor in which its bytes lie; of one expert, where that is a stack."""
        if part.name in self.checkpoint.tensors:
            return load_tensor(self.checkpoint, part.name)
        stored = next(
            tensor
            for tensor in self.checkpoint.tensors.values()
            if tensor.shard == part.shard and tensor.start <= part.start and part.stop <= tensor.stop
        )
        row = tensor_bytes(part.dtype, part.shape[1:]) or 1
        first, rows = (part.start - stored.start) // row, part.shape[0]
        if len(stored.shape) == len(part.shape):
            return load_slice(self.checkpoint, stored.name, slice(first, first + rows))
        expert, first = divmod(first, stored.shape[1])
        return load_slice(self.checkpoint, stored.name, slice(expert, expert + 1), slice(first, first + rows))[0]


@dataclass(frozen=True, slots=True)
class Ranks:
    """What lies on each rank of an output that is cut for `tp` of them."""

    checkpoint: Checkpoint
    tp: int
    numbers: tuple[int, ...]
    """Of the ranks that have to be here."""
    keys: Mapping[int, Mapping[str, str]]
    """Rank -> the engine's name of a tensor -> its key in `checkpoint.tensors`."""

    @classmethod
    def of(cls, out: Checkpoint, tp: int | None, numbers: Iterable[int] | None) -> Self:
        """`tp` and `numbers` as a manifest gives them; None: all that are here."""
        keys: dict[int, dict[str, str]] = {}
        for key, tensor in out.tensors.items():
            if match := RANK_FILE.fullmatch(tensor.shard):
                keys.setdefault(int(match[1]), {})[tensor.name] = key
        size = len(keys) if tp is None else tp
        wanted = keys if numbers is None else numbers
        return cls(out, size, tuple(sorted(rank for rank in wanted if rank < size)), keys)

    def load(self, rank: int, target: str, expert: int | None) -> dict[str, Tensor]:
        """A rank's tensors whose names are `target` and a suffix, by suffix; of a stack that of one expert."""
        found = {}
        for name, key in self.keys.get(rank, {}).items():
            suffix = name.removeprefix(target)
            if suffix == name or "." in suffix:
                continue
            shape = self.checkpoint.tensors[key].shape
            if expert is None:
                found[suffix] = load_tensor(self.checkpoint, key)
            elif len(shape) > 1 and expert < shape[0]:
                found[suffix] = load_slice(self.checkpoint, key, slice(expert, expert + 1))[0]
        return found


@dataclass(frozen=True, slots=True)
class RankLinear:
    """One Linear of the engine: what its names begin with up to the suffix, and the split modules that it is made of."""

    layer: int
    target: str
    parts: tuple[tuple[ShardId, str], ...]
    kind: Literal["qkv", "merged", "row"]
    expert: int | None = None
    """Which, where it is one in a stack."""

    @property
    def name(self) -> str:
        """Of its weight, for people."""
        return f"{self.target}weight" + (f"[{self.expert}]" if self.expert is not None else "")


def linears(layout: ShardedLayout, source: SplitForm, layer: int, experts: list[int]) -> Iterator[RankLinear]:
    """Those of one layer that are cut. Of the layout's rules the kind of Linear is taken, not what a rank holds."""
    base, target = f"{source.prefix}layers.{layer}.", f"model.layers.{layer}."
    for module in layout.layer:
        if f"{base}{module.parts[0][0]}" in source.modules and (kind := _kind(module.parts)):
            yield RankLinear(layer, f"{target}{module.name}.", _numbered(kind, base, module.parts), kind)
    for number in experts:
        for stack in layout.experts:
            if kind := _kind(stack.parts):
                parts = _numbered(kind, f"{base}mlp.experts.{number}.", stack.parts)
                yield RankLinear(layer, f"{target}{stack.module}.{stack.prefix}", parts, kind, number)


def _kind(parts: tuple[tuple[str, Cut], ...]) -> Literal["qkv", "merged", "row"] | None:
    cuts = {cut for _, cut in parts}
    if Cut.KV_ROWS in cuts:
        return "qkv"
    return "row" if Cut.COLUMNS in cuts else "merged" if Cut.ROWS in cuts else None


def _numbered(kind: str, base: str, parts: tuple[tuple[str, Cut], ...]) -> tuple[tuple[ShardId, str], ...]:
    ids: tuple[ShardId, ...] = ("q", "k", "v") if kind == "qkv" else tuple(range(len(parts)))
    return tuple((shard_id, f"{base}{part}") for shard_id, (part, _) in zip(ids, parts, strict=True))
