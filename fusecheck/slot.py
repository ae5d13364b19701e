"""The stored Linears of one packing in one layer, held against what the config says of them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fusecheck.config import CONFIG, ModelConfig
from fusecheck.errors import CheckpointError, NoFusedForm, UnsupportedCheckpoint
from fusecheck.forms import METHODS, REQUIRED, WEIGHTS
from fusecheck.header import TensorInfo
from fusecheck.mapping import NEVER_GROUPED_SUFFIXES, QKV, Packing

Peek = Callable[[TensorInfo], bytes]
"""Gives the bytes of a small tensor: scales, g_idx and weight_shape are compared before anything is planned."""

Linear = Mapping[str, TensorInfo]
"""The tensors of one stored Linear by suffix, KV-cache scales left out."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One packing of one layer: the stored Linears found there, fused and split, and what the config says of them."""

    config: ModelConfig
    base: str
    """Prefix of every name, such as `model.layers.0.`."""
    packing: Packing
    layer: int
    modules: Mapping[str, Linear]
    """All Linears of the layer by module path."""
    peek: Peek
    warnings: list[str] = field(default_factory=list)

    def name(self, module: str, suffix: str = "weight") -> str:
        """Full name of a tensor."""
        return f"{self.base}{module}.{suffix}"

    @property
    def whole(self) -> Linear:
        """Tensors of the fused form."""
        return _own(self.modules.get(self.packing.fused))

    @property
    def parts(self) -> list[Linear]:
        """Tensors of each split part, in the packing's order; empty where a part is absent."""
        return [_own(self.modules.get(module)) for _, module in self.packing.parts]


def _own(linear: Linear | None) -> Linear:
    if not linear:
        return {}
    if NEVER_GROUPED_SUFFIXES.isdisjoint(linear):
        return linear
    return {suffix: tensor for suffix, tensor in linear.items() if suffix not in NEVER_GROUPED_SUFFIXES}


def check_present(slot: Slot, parts: list[Linear]) -> None:
    """Every part has a weight, and what one part has, all have."""
    found = [tensor for part in parts for tensor in part.values()]
    weights = [next((suffix for suffix in WEIGHTS if suffix in part), None) for part in parts]
    kind = next((weight for weight in weights if weight), "weight")
    for (_, module), part in zip(slot.packing.parts, parts, strict=True):
        if kind not in part:
            raise _missing(slot, slot.name(module, kind), found, part)
    for suffix in sorted({suffix for part in parts for suffix in part} - {"bias"}):
        for (_, module), part in zip(slot.packing.parts, parts, strict=True):
            if suffix not in part:
                raise _missing(slot, slot.name(module, suffix), found, part)


def _missing(slot: Slot, name: str, found: list[TensorInfo], part: Linear) -> CheckpointError:
    """Name the missing tensor, and one that only looks like it, by code points."""
    scope = slot.packing.fused.rpartition(".")[0]
    lookalike = next(
        (m for m in slot.modules if m.startswith(f"{scope}.") and (not m.isascii() or m != m.lower())), None
    )
    other = next(iter(part.values()), None)
    beside = ascii(lookalike) if lookalike else ascii(other.name) if other else None
    return CheckpointError(
        f"layer {slot.layer} is incomplete: a part of {slot.packing.fused} is missing",
        file=found[0].shard if found else CONFIG,
        tensor=name,
        found=f"only {beside}" if beside else ", ".join(tensor.name for tensor in found) or "no part at all",
        wanted=", ".join(module for _, module in slot.packing.parts),
    )


def method_of(slot: Slot, linears: list[Linear], *, ignored: bool) -> str:
    """How these Linears are stored, held against what the config declares of them."""
    quantisation = slot.config.quantisation
    extra = sorted({suffix for linear in linears for suffix in linear} - {"weight", "bias"})
    some = next(iter(linears[0].values()))
    if not extra:
        if quantisation.method == "none" or ignored:
            return "none"
        raise CheckpointError(
            f"{CONFIG} declares {quantisation.method}, yet this is plain and on no ignore list",
            file=some.shard,
            tensor=some.name,
            found=some.form,
        )
    known = METHODS["none" if ignored else quantisation.method]
    unknown = next((suffix for suffix in extra if suffix not in known), None)
    if unknown is None:
        return quantisation.method
    culprit = next(linear[unknown] for linear in linears if unknown in linear)
    says = "has it on the ignore list" if ignored else f"declares {quantisation.method}"
    raise UnsupportedCheckpoint(
        f"a kind of tensor that {CONFIG} does not explain, which {says}",
        file=culprit.shard,
        tensor=culprit.name,
        wanted=", ".join(known),
    )


def is_ignored(slot: Slot) -> bool:
    """Ignore lists keep split names; one that names only some parts of a group contradicts itself."""
    quantisation = slot.config.quantisation
    if quantisation.method == "none" or not (quantisation.ignored or quantisation.targets):
        return False
    modules = [f"{slot.base}{module}" for _, module in slot.packing.parts]
    ignored = [quantisation.ignores(module) for module in modules]
    if any(ignored) and not all(ignored):
        raise CheckpointError(
            f"the quantisation's ignore list names only some parts of {slot.packing.fused} in layer {slot.layer}",
            file=CONFIG,
            tensor=modules[ignored.index(True)],
            wanted=", ".join(modules),
        )
    return all(ignored)


def check_required(slot: Slot, linears: list[Linear], method: str) -> None:
    """A quantised weight without its scales loads, and serves garbage."""
    for wanted in REQUIRED[method]:
        for linear in linears:
            if not wanted & linear.keys():
                some = next(iter(linear.values()))
                raise CheckpointError(
                    f"layer {slot.layer} is incomplete: {method} needs {' or '.join(sorted(wanted))} beside every weight",
                    file=some.shard,
                    tensor=some.name,
                    found=", ".join(sorted(linear)),
                )


def check_bias(slot: Slot, linears: list[Linear], method: str) -> None:
    """attention_bias decides for q, k, v, mlp_bias for gate and up. GPTQ writers leave zeros that engines skip."""
    attention = slot.packing is QKV
    wanted = slot.config.qkv_bias if attention else slot.config.mlp_bias
    key = "attention_bias" if attention else "mlp_bias"
    biases = [linear["bias"] for linear in linears if "bias" in linear]
    if not biases:
        if wanted:
            some = next(iter(linears[0].values()))
            raise CheckpointError(
                f"layer {slot.layer} has no bias on {slot.packing.fused}",
                file=some.shard,
                tensor=slot.name(slot.packing.parts[0][1], "bias"),
                wanted=f"a bias on every part: {key}",
            )
        return
    if not wanted and method != "gptq":
        raise CheckpointError(
            f"a bias that {CONFIG} does not know",
            file=biases[0].shard,
            tensor=biases[0].name,
            wanted=f"{key} true, or no bias",
        )
    if len(biases) != len(linears):
        absent = next(
            module for (_, module), part in zip(slot.packing.parts, linears, strict=True) if "bias" not in part
        )
        raise (CheckpointError if attention else NoFusedForm)(
            f"layer {slot.layer} has a bias on some parts of {slot.packing.fused} only",
            file=biases[0].shard,
            tensor=slot.name(absent, "bias"),
            found=", ".join(bias.name for bias in biases),
            wanted="a bias on every part",
        )
    if not wanted:
        slot.warnings.append(f"{biases[0].name}: a bias that {CONFIG} does not know; engines may skip it")
