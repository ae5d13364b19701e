"""Tensors + dimensions -> what the checkpoint is: its prefix, its groups, whether it is complete. Pure.

Every group rule and every completeness rule stands here, because engines check neither: vLLM serves garbage where a
weight is missing, and a group whose parts do not fit fuses into a tensor of a plausible shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fusecheck.config import CONFIG, ModelConfig
from fusecheck.errors import CheckpointError, NoFusedForm
from fusecheck.forms import PLAIN, WEIGHTS
from fusecheck.group import FusedTensor, Group, Known, survey_slot
from fusecheck.header import TensorInfo
from fusecheck.layers import Layers, by_layer, prefix_of, refuse_wrapped
from fusecheck.mapping import HEADS, Experts, Packing, stacked_packings
from fusecheck.slot import Linear, Peek, Slot
from fusecheck.stack import arrange_experts, stacked_tensors

_STACKED = {"gate_up_proj", "down_proj"}
"""Tensors of `mlp.experts` where all experts stand in one: transformers 5's 3-D form, fused already, passed through."""


@dataclass(frozen=True, slots=True)
class LeftSplit:
    """A group that has no lossless fused form and stays as it is: the name it would have had, and why."""

    fused: str
    reason: str


@dataclass(frozen=True, slots=True)
class Model:
    """A complete, consistent checkpoint of a supported family."""

    prefix: str
    split: tuple[Group, ...]
    fused: tuple[FusedTensor, ...]
    stacked: tuple[FusedTensor, ...]
    """Stacks of experts as `--experts stacked` writes them; a stack of another orientation is a tensor like any other."""
    left_split: tuple[LeftSplit, ...]
    head: str | None
    """Name of the output embedding, where the checkpoint stores one."""
    embedding: str | None
    quantised: Mapping[int, tuple[str, ...]]
    """Per layer, the modules stored as qweight."""
    warnings: tuple[str, ...]


def survey(
    tensors: Mapping[str, TensorInfo],
    config: ModelConfig,
    peek: Peek,
    *,
    keep_split: bool = False,
    experts: Experts = "per-expert",
) -> Model:
    """Group and check all tensors. CheckpointError names file, tensor, found and wanted; nothing is repaired.

    `peek` gives the bytes of small tensors, of which one copy has to serve all parts. With `keep_split`, groups without a
    lossless fused form are listed in `left_split` instead of raising NoFusedForm. `experts` decides whether those make a
    group each, two groups together (gate_up and down), or none.
    """
    if not tensors:
        raise CheckpointError("the checkpoint holds no tensor", file=f"model.safetensors, {CONFIG}")
    refuse_wrapped(tensors)
    prefix = prefix_of(tensors)
    layers = by_layer(tensors, prefix, config)
    split: list[Group] = []
    fused: list[FusedTensor] = []
    stacked: list[FusedTensor] = []
    left_split: list[LeftSplit] = []
    warnings: list[str] = []
    known = Known()
    for layer in range(config.num_hidden_layers):
        modules = layers.get(layer, {})
        base = f"{prefix}layers.{layer}."
        for packing in _packings(config, layer, modules):
            slot = Slot(config, base, packing, layer, modules, peek, warnings)
            try:
                groups, whole = survey_slot(slot, known)
            except NoFusedForm as error:
                if not keep_split:
                    raise
                left_split.append(LeftSplit(slot.name(packing.fused), str(error)))
            else:
                split += groups
                fused += whole
        if _is_stacked(config, layer, modules):
            _check_stacks(config, modules)
            stacked += stacked_tensors(tensors, config, base, layer)
        _check_layer(tensors, config, base, layer, modules)
    _require(tensors, f"{prefix}norm.weight", (config.hidden_size,))
    head, embedding = _embeddings(tensors, prefix, config, warnings)
    if config.runs_code:
        warnings.append(f"{CONFIG} names code (auto_map): copied, never run")
    return Model(
        prefix,
        arrange_experts(tuple(split), experts, tensors, config, prefix),
        tuple(fused),
        tuple(stacked),
        tuple(left_split),
        head,
        embedding,
        _quantised(layers),
        tuple(_few(warnings)),
    )


def _packings(config: ModelConfig, layer: int, modules: Mapping[str, Linear]) -> Iterator[Packing]:
    """Of experts that are stacked nothing is left to pack; attention and a shared expert are."""
    stacked = _is_stacked(config, layer, modules)
    return (packing for packing in config.packings(layer) if not (stacked and packing.size == "expert"))


def _is_stacked(config: ModelConfig, layer: int, modules: Mapping[str, Linear]) -> bool:
    return config.is_sparse(layer) and modules.get("mlp.experts", {}).keys() >= _STACKED


def _few(warnings: list[str]) -> Iterator[str]:
    yield from warnings[:5]
    if len(warnings) > 5:
        yield f"... {len(warnings) - 5} more of this kind"


def _quantised(layers: Layers) -> dict[int, tuple[str, ...]]:
    """Module paths, per layer, whose weight is stored as qweight: what GPTQ's list of modules is made from."""
    return {
        layer: tuple(sorted(module for module, linear in modules.items() if "qweight" in linear))
        for layer, modules in sorted(layers.items())
    }


def _check_stacks(config: ModelConfig, modules: Mapping[str, Linear]) -> None:
    """Experts that are stacked, in either orientation: as many, and as large, as the config says."""
    for name, tensor in modules["mlp.experts"].items():
        packing = next(
            (one for one in stacked_packings(config.num_experts) if one.fused == f"mlp.experts.{name}"), None
        )
        if packing is None or tensor.dtype not in PLAIN or len(modules["mlp.experts"]) > len(_STACKED):
            continue
        count, rows, columns = config.stacked_shape(packing)
        if tensor.shape not in {(count, rows, columns), (count, columns, rows)}:
            _check_form(tensor, (count, rows, columns))


def _check_layer(
    tensors: Mapping[str, TensorInfo], config: ModelConfig, base: str, layer: int, modules: Mapping[str, Linear]
) -> None:
    """What a layer needs beside its packed projections."""
    hidden, heads = config.hidden_size, config.num_attention_heads * config.head_dim
    norms = [("input_layernorm", hidden), ("post_attention_layernorm", hidden)]
    norms += [("self_attn.q_norm", config.head_dim), ("self_attn.k_norm", config.head_dim)] * config.family.head_norms
    for module, size in norms:
        _require(tensors, f"{base}{module}.weight", (size,))
    _require_linear(modules, base, "self_attn.o_proj", (hidden, heads))
    if not config.is_sparse(layer):
        _require_linear(modules, base, "mlp.down_proj", (hidden, config.intermediate_size))
        return
    _require_linear(modules, base, "mlp.gate", (config.num_experts, hidden))
    if not _is_stacked(config, layer, modules):
        for expert in range(config.num_experts):
            _require_linear(modules, base, f"mlp.experts.{expert}.down_proj", (hidden, config.moe_intermediate_size))


def _require_linear(modules: Mapping[str, Linear], base: str, module: str, shape: tuple[int, int]) -> None:
    """A Linear that is not packed: stored in any form, but of the config's shape where it is plain."""
    linear = modules.get(module, {})
    kind = next((suffix for suffix in WEIGHTS if suffix in linear), None)
    if kind is None:
        raise CheckpointError(
            "a tensor that the model needs is missing",
            file=CONFIG,
            tensor=f"{base}{module}.weight",
            wanted=f"shape {list(shape)}",
        )
    if linear.keys() <= {"weight", "bias"} and linear["weight"].dtype in PLAIN:
        _check_form(linear["weight"], shape)
    if "bias" in linear:
        _check_form(linear["bias"], shape[:1])


def _require(tensors: Mapping[str, TensorInfo], name: str, shape: tuple[int, ...]) -> TensorInfo:
    tensor = tensors.get(name)
    if tensor is None:
        raise CheckpointError(
            "a tensor that the model needs is missing", file=CONFIG, tensor=name, wanted=f"shape {list(shape)}"
        )
    _check_form(tensor, shape)
    return tensor


def _check_form(tensor: TensorInfo, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise CheckpointError(
            f"shape contradicts {CONFIG}",
            file=tensor.shard,
            tensor=tensor.name,
            found=list(tensor.shape),
            wanted=list(shape),
        )


def _embeddings(
    tensors: Mapping[str, TensorInfo], prefix: str, config: ModelConfig, warnings: list[str]
) -> tuple[str | None, str | None]:
    shape = (config.vocab_size, config.hidden_size)
    embedding = f"{prefix}embed_tokens.weight"
    head = next((name for name in HEADS if name in tensors), None)
    if head is not None:
        _check_form(tensors[head], shape)
    if head is None and not config.tie_word_embeddings:
        warnings.append("lm_head.weight is absent although tie_word_embeddings is false: fit for embedding models only")
    if head is not None and config.tie_word_embeddings and embedding not in tensors:
        warnings.append(f"{embedding} is absent; tied weights are stored as {head} alone, kept as it is")
        return head, None
    _require(tensors, embedding, shape)
    return head, embedding
