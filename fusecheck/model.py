"""Tensors + dimensions -> what the checkpoint is: its prefix, its groups, whether it is complete. Pure.

Every group rule and every completeness rule stands here, because engines check neither: vLLM serves garbage where a
weight is missing, and a group whose parts do not fit fuses into a tensor of a plausible shape.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fusecheck.config import CONFIG, ModelConfig
from fusecheck.errors import CheckpointError, NoFusedForm, UnsupportedCheckpoint
from fusecheck.header import TensorInfo, tensor_bytes
from fusecheck.mapping import (
    FLOAT_DTYPES,
    GROUPED_SUFFIXES,
    HEADS,
    NEVER_GROUPED_SUFFIXES,
    PACKINGS,
    PREFIXES,
    QKV,
    WRAPPERS,
    Packing,
    ShardRows,
)

_LAYER = re.compile(r"(.*?)layers\.([^.]*)\.(.*)", re.DOTALL)
_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}", re.ASCII)
_ADAPTER = re.compile(r"(?:^|\.)(?:lora_[A-Za-z_]+|base_layer|modules_to_save)(?:\.|$)")


@dataclass(frozen=True, slots=True)
class Part:
    """One split tensor of a group and the rows of the fused tensor that it fills."""

    tensor: TensorInfo
    rows: ShardRows


@dataclass(frozen=True, slots=True)
class Group:
    """Split tensors that become one: the weights, or the biases, of one packing in one layer."""

    fused: str
    """Full name of the fused tensor."""
    packing: Packing
    layer: int
    parts: tuple[Part, ...]

    @property
    def dtype(self) -> str:
        """The parts' one dtype."""
        return self.parts[0].tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows of all parts together, then the parts' common in_features (none for a bias)."""
        return (sum(part.rows.shard_size for part in self.parts), *self.parts[0].tensor.shape[1:])


@dataclass(frozen=True, slots=True)
class FusedTensor:
    """A tensor of the checkpoint that is fused already, and the rows of its parts."""

    tensor: TensorInfo
    packing: Packing
    layer: int
    parts: tuple[tuple[str, ShardRows], ...]
    """(name that the split tensor would have, its rows)."""


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
    left_split: tuple[LeftSplit, ...]
    head: str | None
    """Name of the output embedding, where the checkpoint stores one."""
    embedding: str | None
    warnings: tuple[str, ...]


def survey(tensors: Mapping[str, TensorInfo], config: ModelConfig, *, keep_split: bool = False) -> Model:
    """Group and check all tensors. CheckpointError names file, tensor, found and wanted; nothing is repaired.

    With `keep_split`, groups without a lossless fused form are listed in `left_split` instead of raising NoFusedForm.
    """
    if not tensors:
        raise CheckpointError("the checkpoint holds no tensor", file=f"model.safetensors, {CONFIG}")
    _refuse_wrapped(tensors)
    prefix = _prefix(tensors)
    _check_layer_tensors(tensors, prefix, config)
    split: list[Group] = []
    fused: list[FusedTensor] = []
    left_split: list[LeftSplit] = []
    for layer in range(config.num_hidden_layers):
        for packing in PACKINGS:
            slot = _Slot(tensors, config, f"{prefix}layers.{layer}.", packing, layer)
            try:
                _survey_packing(slot, split, fused)
            except NoFusedForm as error:
                if not keep_split:
                    raise
                left_split.append(LeftSplit(slot.fused_name("weight"), str(error)))
        for name, shape in _layer_tensors(config, f"{prefix}layers.{layer}."):
            _require(tensors, name, shape)
        _optional(tensors, f"{prefix}layers.{layer}.self_attn.o_proj.bias", (config.hidden_size,))
    _require(tensors, f"{prefix}norm.weight", (config.hidden_size,))
    head, embedding, warnings = _embeddings(tensors, prefix, config)
    if config.runs_code:
        warnings.append(f"{CONFIG} names code (auto_map): copied, never run")
    return Model(prefix, tuple(split), tuple(fused), tuple(left_split), head, embedding, tuple(warnings))


def _refuse_wrapped(tensors: Mapping[str, TensorInfo]) -> None:
    for name, tensor in tensors.items():
        for wrapper, remedy in WRAPPERS.items():
            if name.startswith(wrapper):
                raise UnsupportedCheckpoint(
                    f"names carry the wrapper prefix {wrapper!r}", file=tensor.shard, tensor=name, remedy=remedy
                )
        if _ADAPTER.search(name):
            raise UnsupportedCheckpoint(
                "unmerged LoRA adapter tensors", file=tensor.shard, tensor=name, remedy=WRAPPERS["base_model.model."]
            )


def _prefix(tensors: Mapping[str, TensorInfo]) -> str:
    found: dict[str, TensorInfo] = {}
    for name, tensor in tensors.items():
        match = _LAYER.fullmatch(name)
        if match and match[1] in PREFIXES:
            found.setdefault(match[1], tensor)
    if not found:
        some = next(iter(tensors.values()))
        raise CheckpointError(
            "no `layers.N.` tensors under a known prefix",
            file=some.shard,
            found=some.name,
            wanted=" or ".join(f"{prefix}layers.0.self_attn.q_proj.weight" for prefix in PREFIXES[:2]),
        )
    if len(found) > 1:
        first, second = list(found.values())[:2]
        raise CheckpointError(
            f"two prefixes at once, {' and '.join(map(repr, found))}",
            file=second.shard,
            tensor=second.name,
            found=f"beside {first.name}",
        )
    return next(iter(found))


def _check_layer_tensors(tensors: Mapping[str, TensorInfo], prefix: str, config: ModelConfig) -> None:
    """Layer numbers are plain and below num_hidden_layers; packed projections carry known kinds of tensors only."""
    packed = {module for packing in PACKINGS for module in (packing.fused, *(part for _, part in packing.parts))}
    for name, tensor in tensors.items():
        match = _LAYER.fullmatch(name)
        if not match or match[1] != prefix:
            continue
        if not _NUMBER.fullmatch(match[2]):
            raise CheckpointError(f"layer {match[2]} is no plain layer number", file=tensor.shard, tensor=name)
        if int(match[2]) >= config.num_hidden_layers:
            raise CheckpointError(
                f"layer {match[2]} is beyond {CONFIG}",
                file=tensor.shard,
                tensor=name,
                wanted=f"num_hidden_layers {config.num_hidden_layers}, so layers 0 to {config.num_hidden_layers - 1}",
            )
        module, _, suffix = _split_module(match[3])
        if module in packed and suffix not in (*GROUPED_SUFFIXES, *NEVER_GROUPED_SUFFIXES):
            raise UnsupportedCheckpoint(
                "unknown kind of tensor on a packed projection; quantised checkpoints are not supported",
                file=tensor.shard,
                tensor=name,
                wanted=f"{module}.weight or {module}.bias",
            )


def _split_module(path: str) -> tuple[str, str, str]:
    """`self_attn.q_proj.weight` -> (`self_attn.q_proj`, `.`, `weight`): module paths below a layer have two components."""
    first, _, rest = path.partition(".")
    second, dot, suffix = rest.partition(".")
    return f"{first}.{second}", dot, suffix


@dataclass(frozen=True, slots=True)
class _Slot:
    """One packing of one layer: where a group, or a fused tensor, has to be."""

    tensors: Mapping[str, TensorInfo]
    config: ModelConfig
    base: str
    packing: Packing
    layer: int

    def fused_name(self, suffix: str) -> str:
        return f"{self.base}{self.packing.fused}.{suffix}"

    def part_names(self, suffix: str) -> list[str]:
        return [f"{self.base}{module}.{suffix}" for _, module in self.packing.parts]

    def present(self, names: list[str]) -> list[TensorInfo]:
        return [self.tensors[name] for name in names if name in self.tensors]


def _survey_packing(slot: _Slot, split: list[Group], fused: list[FusedTensor]) -> None:
    whole = slot.present([slot.fused_name(suffix) for suffix in GROUPED_SUFFIXES])
    parts = [part for suffix in GROUPED_SUFFIXES for part in slot.present(slot.part_names(suffix))]
    if whole and parts:
        raise CheckpointError(
            "both forms of one projection, fused and split",
            file=whole[0].shard,
            tensor=whole[0].name,
            found=f"beside {parts[0].name}",
        )
    _check_bias(slot, whole or parts)
    if whole:
        fused += [
            _fused_tensor(slot, s) for s in GROUPED_SUFFIXES if s == "weight" or slot.fused_name(s) in slot.tensors
        ]
    else:  # all suffixes of a projection, or none of them
        split += [_group(slot, s) for s in GROUPED_SUFFIXES if s == "weight" or slot.present(slot.part_names(s))]


def _check_bias(slot: _Slot, found: list[TensorInfo]) -> None:
    """attention_bias decides for q, k, v; gate and up have none in this family."""
    wanted = slot.packing is QKV and slot.config.attention_bias
    biases = [tensor for tensor in found if tensor.name.endswith(".bias")]
    key = "attention_bias" if slot.packing is QKV else "mlp_bias"
    if biases and not wanted:
        raise CheckpointError(
            f"a bias that {CONFIG} does not know",
            file=biases[0].shard,
            tensor=biases[0].name,
            wanted=f"no bias: {key} is false",
        )
    if wanted and found and not biases:
        raise CheckpointError(
            f"layer {slot.layer} has no bias on {slot.packing.fused}",
            file=found[0].shard,
            tensor=slot.part_names("bias")[0],
            wanted=f"q, k and v bias: {key} is true",
        )


def _group(slot: _Slot, suffix: str) -> Group:
    names = slot.part_names(suffix)
    found = slot.present(names)
    for name in names:
        if name not in slot.tensors:
            raise _missing(slot, name, found)
    in_features = (slot.config.hidden_size,) if suffix == "weight" else ()
    parts = []
    for tensor, rows in zip(found, slot.config.rows(slot.packing), strict=True):
        _check_form(tensor, (rows.shard_size, *in_features), f"weight_loader rows for shard_id {rows.shard_id!r}")
        _check_weight_dtype(tensor)
        parts.append(Part(tensor, rows))
    _check_one_dtype(found)
    return Group(slot.fused_name(suffix), slot.packing, slot.layer, tuple(parts))


def _missing(slot: _Slot, name: str, found: list[TensorInfo]) -> CheckpointError:
    strangers = [
        other for other in slot.tensors if other.startswith(f"{slot.base}{slot.packing.fused.partition('.')[0]}.")
    ]
    near = [other for other in strangers if not other.isascii() or other.lower() == name.lower()]
    return CheckpointError(
        f"layer {slot.layer} is incomplete: a part of {slot.packing.fused} is missing",
        file=found[0].shard if found else CONFIG,
        tensor=name,
        found=f"only {near[0]!a}" if near else ", ".join(tensor.name for tensor in found) or "no part at all",
        wanted=", ".join(module for _, module in slot.packing.parts),
    )


def _fused_tensor(slot: _Slot, suffix: str) -> FusedTensor:
    name = slot.fused_name(suffix)
    rows = slot.config.rows(slot.packing)
    in_features = (slot.config.hidden_size,) if suffix == "weight" else ()
    shape = (sum(part.shard_size for part in rows), *in_features)
    tensor = _require(slot.tensors, name, shape)
    _check_weight_dtype(tensor)
    return FusedTensor(tensor, slot.packing, slot.layer, tuple(zip(slot.part_names(suffix), rows, strict=True)))


def _check_weight_dtype(tensor: TensorInfo) -> None:
    if tensor.dtype not in FLOAT_DTYPES:
        raise UnsupportedCheckpoint(
            "a packed projection that is not floating-point", file=tensor.shard, tensor=tensor.name, found=tensor.dtype
        )
    if tensor_bytes(tensor.dtype, tensor.shape[1:]) is None:
        raise CheckpointError("rows are no whole bytes", file=tensor.shard, tensor=tensor.name, found=tensor.form)


def _check_one_dtype(parts: list[TensorInfo]) -> None:
    first = parts[0]
    for other in parts[1:]:
        if other.dtype != first.dtype:
            raise NoFusedForm(
                "parts of one group differ in dtype",
                file=other.shard,
                tensor=other.name,
                found=other.form,
                wanted=f"{first.dtype}, as {first.name}",
                remedy="store the group in one dtype, or pass --keep-split to leave it split",
            )


def _layer_tensors(config: ModelConfig, base: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = config.hidden_size
    yield f"{base}input_layernorm.weight", (hidden,)
    yield f"{base}post_attention_layernorm.weight", (hidden,)
    if config.family.head_norms:
        yield f"{base}self_attn.q_norm.weight", (config.head_dim,)
        yield f"{base}self_attn.k_norm.weight", (config.head_dim,)
    yield f"{base}self_attn.o_proj.weight", (hidden, config.num_attention_heads * config.head_dim)
    yield f"{base}mlp.down_proj.weight", (hidden, config.intermediate_size)


def _require(tensors: Mapping[str, TensorInfo], name: str, shape: tuple[int, ...]) -> TensorInfo:
    tensor = tensors.get(name)
    if tensor is None:
        raise CheckpointError(
            "a tensor that the model needs is missing", file=CONFIG, tensor=name, wanted=f"shape {list(shape)}"
        )
    _check_form(tensor, shape, CONFIG)
    return tensor


def _optional(tensors: Mapping[str, TensorInfo], name: str, shape: tuple[int, ...]) -> None:
    if name in tensors:
        _check_form(tensors[name], shape, CONFIG)


def _check_form(tensor: TensorInfo, shape: tuple[int, ...], by: str) -> None:
    if tensor.shape != shape:
        raise CheckpointError(
            f"shape contradicts {CONFIG}",
            file=tensor.shard,
            tensor=tensor.name,
            found=list(tensor.shape),
            wanted=f"{list(shape)} ({by})" if by != CONFIG else list(shape),
        )


def _embeddings(
    tensors: Mapping[str, TensorInfo], prefix: str, config: ModelConfig
) -> tuple[str | None, str | None, list[str]]:
    shape = (config.vocab_size, config.hidden_size)
    embedding = f"{prefix}embed_tokens.weight"
    head = next((name for name in HEADS if name in tensors), None)
    warnings = []
    if head is not None:
        _check_form(tensors[head], shape, CONFIG)
    if head is None and not config.tie_word_embeddings:
        warnings.append("lm_head.weight is absent although tie_word_embeddings is false: fit for embedding models only")
    if head is not None and config.tie_word_embeddings and embedding not in tensors:
        warnings.append(f"{embedding} is absent; tied weights are stored as {head} alone, kept as it is")
        return head, None, warnings
    _require(tensors, embedding, shape)
    return head, embedding, warnings
