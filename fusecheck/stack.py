"""All experts of an MLP <-> two 3-D tensors, as transformers 5 and vLLM read them. Pure.

`mlp.experts.gate_up_proj` [E, 2I, H] holds gate and up of expert 0, then of expert 1, and so on; `mlp.experts.down_proj`
[E, H, I] every down. Both are rows of 2-D weights one after another, so their bytes follow one another too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby

from fusecheck.config import ModelConfig
from fusecheck.errors import NoFusedForm, UnsupportedCheckpoint
from fusecheck.forms import Join
from fusecheck.group import FusedTensor, Group
from fusecheck.header import TensorInfo
from fusecheck.mapping import Experts, Packing, stacked_packings


def stacked_tensors(
    tensors: Mapping[str, TensorInfo], config: ModelConfig, base: str, layer: int
) -> Iterator[FusedTensor]:
    """The stacks of one layer that have the shapes written here; other orientations are left alone."""
    for packing in stacked_packings(config.num_experts):
        tensor = tensors.get(f"{base}{packing.fused}")
        if tensor is not None and tensor.shape == config.stacked_shape(packing):
            parts = zip(packing.parts, config.rows(packing), strict=True)
            names = tuple((f"{base}{module}.weight", rows) for (_, module), rows in parts)
            yield FusedTensor(tensor, packing, layer, Join.STACK, names)


def arrange_experts(
    groups: tuple[Group, ...], experts: Experts, tensors: Mapping[str, TensorInfo], config: ModelConfig, prefix: str
) -> tuple[Group, ...]:
    """The groups, with those of single experts kept, dropped or replaced by stacks (UnsupportedCheckpoint if quantised).

    Whoever calls has surveyed the model: every expert is there, and of the config's shape.
    """
    if experts == "per-expert":
        return groups
    kept = [group for group in groups if group.packing.size != "expert"]
    if experts == "split":
        return tuple(kept)
    single = [group for group in groups if group.packing.size == "expert"]
    odd = next((group for group in single if not group.fused.endswith(".weight") or group.join is not Join.ROWS), None)
    if odd is not None:
        raise UnsupportedCheckpoint(
            "stacked experts are for plain weights only",
            file=odd.tensors[0].shard,
            tensor=odd.tensors[0].name,
        )
    packings = stacked_packings(config.num_experts)
    for layer, _ in groupby(single, key=lambda group: group.layer):
        base = f"{prefix}layers.{layer}."
        kept += [_stack(packing, tensors, config, base, layer) for packing in packings]
    return tuple(kept)


def _stack(packing: Packing, tensors: Mapping[str, TensorInfo], config: ModelConfig, base: str, layer: int) -> Group:
    found = [tensors[f"{base}{module}.weight"] for _, module in packing.parts]
    other = next((tensor for tensor in found if tensor.dtype != found[0].dtype), None)
    if other is not None:
        raise NoFusedForm(
            "experts of one stack differ in dtype",
            file=other.shard,
            tensor=other.name,
            found=other.form,
            wanted=f"{found[0].dtype}, as {found[0].name}",
        )
    name, shape = f"{base}{packing.fused}", config.stacked_shape(packing)
    return Group(name, packing, layer, Join.STACK, tuple(found), config.rows(packing), shape)


def halved_wrongly(groups: tuple[Group, ...]) -> Group | None:
    """A group of one expert that vLLM cannot load: it halves every tensor of a fused expert along dim 0."""
    return next((group for group in groups if group.packing.size == "expert" and group.join is not Join.ROWS), None)
