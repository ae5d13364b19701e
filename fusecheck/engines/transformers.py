"""The weight conversion with which transformers 5.x loads every tensor of a fused folder. `register()` once, then load.

    from fusecheck.engines.transformers import register
    register()
    model = AutoModelForCausalLM.from_pretrained("./out")

Without it transformers loads a fused folder too, says so in a table, and serves random q, k, v, gate and up projections.

Why not its own `Chunk` or `Split`: the one cuts equal pieces only; neither compares the rows with the config, and under
tensor parallelism, where an op sees a rank's slice of the fused tensor, both hand out rows of another projection.
"""

from __future__ import annotations

import re
from typing import Any, Protocol

from torch import Tensor

from fusecheck.errors import CheckpointError, SystemFailure
from fusecheck.mapping import FAMILIES, PACKINGS, Packing, ShardRows, shard_rows

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


class _Dimensions(Protocol):
    """What is read of a transformers config."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int | None
    head_dim: int | None

    def get_text_config(self) -> _Dimensions: ...


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
    for model_type in FAMILIES:
        known = get_checkpoint_conversion_mapping(model_type) or []  # type: ignore[no-untyped-call]
        if not any(isinstance(op, SplitRows) for transform in known for op in getattr(transform, "operations", ())):
            ours = [_converter(packing) for packing in PACKINGS]
            register_checkpoint_conversion_mapping(model_type, [*known, *ours], overwrite=True)


def _converter(packing: Packing) -> WeightConverter:
    """Weight and bias alike: what stands before and after the dotted module path is kept."""
    return WeightConverter(
        source_patterns=re.escape(f".{packing.fused}."),
        target_patterns=[f".{part}." for _, part in packing.parts],
        operations=[SplitRows(packing)],
    )


class SplitRows(ConversionOps):
    """A fused tensor -> its parts, rows [shard_offset, shard_offset + shard_size) each, as the weight_loaders have them."""

    def __init__(self, packing: Packing) -> None:
        self.packing = packing

    def convert(  # called by keyword, with more keywords in every release
        self,
        input_dict: dict[str, Tensor | list[Tensor]],
        source_patterns: list[str],  # noqa: ARG002
        target_patterns: list[str],
        **context: Any,  # noqa: ANN401 - of many kinds, in the base class too
    ) -> dict[str, list[Tensor]]:
        """Cut; a copy each, so that a part neither keeps the fused tensor alive nor lies unaligned in it."""
        (found,) = input_dict.values()
        fused = _one(found)
        config: _Dimensions = context["config"]
        rows = _rows(self.packing, config.get_text_config())
        wanted = sum(part.shard_size for part in rows)
        if not fused.dim() or fused.shape[0] != wanted:
            raise CheckpointError(
                f"{self.packing.fused} cannot be split at the rows of the config",
                tensor=context.get("full_layer_name"),
                found=list(fused.shape),
                wanted=f"{wanted} rows",
                remedy="with tp_plan, load the split checkpoint: a rank is given a slice of the fused tensor",
            )
        return {
            pattern: [fused.narrow(0, part.shard_offset, part.shard_size).clone()]
            for pattern, part in zip(target_patterns, rows, strict=True)
        }

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


def _one(found: Tensor | list[Tensor]) -> Tensor:
    return found[0] if isinstance(found, list) else found


def _rows(packing: Packing, config: _Dimensions) -> tuple[ShardRows, ...]:
    heads = config.num_attention_heads
    return shard_rows(
        packing,
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        intermediate_size=config.intermediate_size,
    )
