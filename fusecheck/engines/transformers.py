"""The weight conversion with which transformers 5.x loads every tensor of a fused folder. `register()` once, then load.

    from fusecheck.engines.transformers import register
    register()
    model = AutoModelForCausalLM.from_pretrained("./out")

Without it transformers loads a fused folder too, says so in a table, and serves random q, k, v, gate and up projections.

Why not its own `Chunk` or `Split`: the one cuts equal pieces only, the other is not in every 5.x; and under tensor
parallelism, where an operation is given a rank's slice of the fused tensor, `Chunk` hands out rows of another projection.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from fusecheck.errors import CheckpointError, SystemFailure
from fusecheck.mapping import FAMILIES, PACKINGS, SHARED_EXPERT, Packing

_lacking: ImportError | None = None
try:
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )
    from transformers.core_model_loading import ConversionOps, WeightConverter
except ImportError as error:  # absent, or of a version that cannot convert; register() says so
    _lacking = error
    ConversionOps = object  # type: ignore[misc, assignment]


def register() -> None:
    """Make `from_pretrained` load fused folders, in this process. Split folders load as before; twice is harmless.

    `save_pretrained` writes the split form, whichever was loaded. SystemFailure where transformers is absent or has no
    weight conversion (before 5.0).
    """
    if _lacking is not None:
        raise SystemFailure(
            "this transformers has no weight conversion to register with",
            found=_lacking,
            wanted="transformers >= 5.0",
            remedy="pip install 'fusecheck[transformers]'",
        )
    for family in FAMILIES.values():
        model_type = family.text_type or family.model_type
        known = get_checkpoint_conversion_mapping(model_type) or []  # type: ignore[no-untyped-call]
        if not any(isinstance(op, SplitRows) for transform in known for op in getattr(transform, "operations", ())):
            ours = [_converter(packing) for packing in (*PACKINGS, SHARED_EXPERT)]
            ours += [_expert_converter()] * family.experts
            # first: of two that could write a name when saving, transformers takes the later
            register_checkpoint_conversion_mapping(model_type, [*ours, *known], overwrite=True)


def _converter(packing: Packing) -> WeightConverter:
    """Weight and bias alike: what stands before and after the dotted module path is kept."""
    return WeightConverter(
        source_patterns=re.escape(f".{packing.fused}."),
        target_patterns=[f".{part}." for _, part in packing.parts],
        operations=[SplitRows()],
    )


def _expert_converter() -> WeightConverter:
    """All experts stand in one tensor there, [experts, rows, columns], gate above up: ours, stacked."""
    return WeightConverter(
        source_patterns=r"\.mlp\.experts\.[0-9]+\.gate_up_proj\.weight",  # globs changed their meaning within 5.x
        target_patterns=".mlp.experts.gate_up_proj",
        operations=[StackExperts()],
    )


class SplitRows(ConversionOps):
    """A fused tensor -> its parts, one below the other, of as many rows as the model's parameters have."""

    def convert(  # called by keyword, with more keywords in every release
        self,
        input_dict: dict[str, Tensor | list[Tensor]],
        source_patterns: list[str],  # noqa: ARG002
        target_patterns: list[str],
        **context: Any,  # noqa: ANN401 - of many kinds, in the base class too
    ) -> dict[str, list[Tensor]]:
        """Cut; a copy each, so that a part neither keeps the fused tensor alive nor lies unaligned in it."""
        (found,) = input_dict.values()
        fused, first = _one(found), target_patterns[0]
        name: str = context["full_layer_name"]
        names = [name.replace(first, target, 1) for target in target_patterns]
        rows = [context["model"].get_parameter(name).shape[0] for name in names]
        if not fused.dim() or fused.shape[0] != sum(rows):
            raise CheckpointError(
                "a fused tensor cannot be split into these rows",
                tensor=name,
                found=list(fused.shape),
                wanted=" + ".join(map(str, rows)),
                remedy="with tp_plan, load the split checkpoint: a rank is given a slice of the fused tensor",
            )
        return {target: [part.clone()] for target, part in zip(target_patterns, torch.split(fused, rows), strict=True)}

    @property
    def reverse_op(self) -> KeepSplit:
        """What `save_pretrained` does with the parts."""
        return KeepSplit()


class KeepSplit(ConversionOps):
    """The parts under their own names: what is saved loads everywhere, with and without `register()`."""

    def convert(
        self,
        input_dict: dict[str, Tensor | list[Tensor]],
        source_patterns: list[str],  # noqa: ARG002
        target_patterns: list[str],
        **context: Any,  # noqa: ANN401 - as above
    ) -> dict[str, list[Tensor]]:
        """Give full names back, which the caller then leaves alone; the fused name is what it had collected under."""
        (fused,) = target_patterns
        name: str = context["full_layer_name"]
        return {name.replace(fused, part, 1): [_one(found)] for part, found in input_dict.items()}


class StackExperts(ConversionOps):
    """`experts.N.gate_up_proj.weight` of all N -> `experts.gate_up_proj`; they come in the order of their numbers."""

    def convert(
        self,
        input_dict: dict[str, Tensor | list[Tensor]],
        source_patterns: list[str],  # noqa: ARG002
        target_patterns: list[str],
        **context: Any,  # noqa: ANN401 - as above
    ) -> dict[str, list[Tensor]]:
        """Stack; what a rank of tensor or expert parallelism is given has another shape than the model's parameter."""
        (found,) = input_dict.values()
        name: str = context["full_layer_name"]
        stacked, wanted = torch.stack(list(found)), context["model"].get_parameter(name).shape
        if stacked.shape != wanted:
            raise CheckpointError("wrong shape", tensor=name, found=list(stacked.shape), wanted=list(wanted))
        return {target_patterns[0]: [stacked]}

    @property
    def reverse_op(self) -> SplitExperts:
        """What `save_pretrained` does with the stack."""
        return SplitExperts()


class SplitExperts(ConversionOps):
    """The stack -> gate and up of every expert, under the names of a published checkpoint."""

    def convert(
        self,
        input_dict: dict[str, Tensor | list[Tensor]],
        source_patterns: list[str],  # noqa: ARG002
        target_patterns: list[str],
        **context: Any,  # noqa: ANN401 - as above
    ) -> dict[str, list[Tensor]]:
        """Full names, as KeepSplit gives them."""
        (found,) = input_dict.values()
        base = str(context["full_layer_name"]).partition(target_patterns[0])[0]
        return {
            f"{base}.mlp.experts.{number}.{part}.weight": [rows.contiguous()]
            for number, expert in enumerate(_one(found))
            for part, rows in zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True)
        }


def _one(found: Tensor | list[Tensor]) -> Tensor:
    return found[0] if isinstance(found, list) else found
