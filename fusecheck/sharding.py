"""A split checkpoint <-> what each rank of an engine holds of it, as planned tensors. Pure.

The arithmetic is one rule: a share is one of n equal runs along one axis. It holds for weights, for their block scales and
for biases alike, because the runs of a weight that has scales must end where blocks end.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import partial

from fusecheck.config import CONFIG, ModelConfig
from fusecheck.engines.vllm_sharded import Bias, Cut, Module, Stack, When
from fusecheck.engines.vllm_sharded import Constant as Scalar
from fusecheck.errors import UnsupportedCheckpoint
from fusecheck.header import TensorInfo, tensor_bytes
from fusecheck.model import Model
from fusecheck.plan import Block, Constant, OutputTensor, Strip, contiguous
from fusecheck.ranks import Ranks, padded

HEAD = "lm_head"
MAX_PADDING = 64 * 1024 * 1024
"""Bytes of zeros after a vocabulary: of any real model, less than one."""


def share(cut: Cut, config: ModelConfig, rank: int, tp: int) -> tuple[int, int]:
    """(i, n): a rank holds run i of n equal ones. QKVParallelLinear: fewer kv heads than ranks are replicated."""
    if cut is Cut.WHOLE:
        return 0, 1
    heads = config.num_key_value_heads
    if cut is Cut.KV_ROWS and heads < tp:
        return rank * heads // tp, heads
    return rank, tp


def axis_of(cut: Cut, suffix: str) -> int | None:
    """The axis that is cut; None for the bias of a Linear that is cut by columns, and for what is whole."""
    if cut is Cut.COLUMNS:
        return 1 if suffix != "bias" else None
    return None if cut is Cut.WHOLE else 0


# ------------------------------------------------------------------------------------------------ split -> ranks


def rank_tensors(
    view: Mapping[str, TensorInfo], model: Model, config: ModelConfig, ranks: Ranks
) -> list[list[OutputTensor]]:
    """What each wanted rank holds, in one order for all. `view` is the split form (`splitting.split_view`).

    UnsupportedCheckpoint for a tensor that has no place there, or that is absent: the engine would refuse the key set.
    """
    builder = _Builder(view, config, ranks)
    builder.outside(model)
    for layer in range(config.num_hidden_layers):
        builder.layer(f"model.layers.{layer}.", f"{model.prefix}layers.{layer}.", sparse=config.is_sparse(layer))
    spare = model.head if config.tie_word_embeddings else None
    odd = next((name for name in view if name not in builder.used and name != spare), None)
    if odd is not None:
        raise UnsupportedCheckpoint(
            f"has no place in {ranks.layout.engine}'s sharded_state of such a model, and would be an unknown key",
            file=view[odd].shard,
            tensor=odd,
            found=view[odd].form,
            remedy="remove it from the checkpoint if it is no weight of the model",
        )
    return builder.ranks


class _Builder:
    """The tensors of all wanted ranks, as they come."""

    def __init__(self, view: Mapping[str, TensorInfo], config: ModelConfig, ranks: Ranks) -> None:
        self.ranks: list[list[OutputTensor]] = [[] for _ in ranks.numbers]
        self.used: set[str] = set()
        self._view, self._config, self._layout = view, config, ranks.layout
        self._dtype = ""
        self._shares = {cut: [share(cut, config, rank, ranks.tp) for rank in ranks.numbers] for cut in Cut}

    def outside(self, model: Model) -> None:
        """Embedding, head, final norm."""
        tied = self._config.tie_word_embeddings
        head = (model.embedding or model.head) if tied else model.head
        if head is None:
            raise UnsupportedCheckpoint(
                f"lm_head.weight is absent, and {self._layout.engine}'s sharded_state demands it", file=CONFIG
            )
        if not tied and model.embedding is not None:
            self._vocabulary("model.embed_tokens.weight", self._take(model.embedding))
        self._dtype = self._take(head).dtype
        self._vocabulary(f"{HEAD}.weight", self._take(head))
        self._add("model.norm.weight", [(self._take(f"{model.prefix}norm.weight"), Cut.WHOLE)], "weight")

    def layer(self, base: str, source: str, *, sparse: bool) -> None:
        """One decoder layer."""
        for module in self._layout.layer:
            if self._has(module.when, sparse=sparse):
                self._module(base, source, module)
        for stack in self._layout.experts if sparse else ():
            for suffix in self._suffixes(f"{source}mlp.experts.0.{stack.parts[0][0]}"):
                self._stack(base, source, stack, suffix)
        quantised = self._config.quantisation.method == "fp8"
        near = self._view[f"{source}input_layernorm.weight"]
        for scalar in (*self._layout.constants, *(self._layout.fp8_constants if quantised else ())):
            dtype = scalar.dtype or self._dtype
            made = OutputTensor(f"{base}{scalar.name}", dtype, (), near, (Constant(encoded(scalar, dtype)),))
            for tensors in self.ranks:
                tensors.append(made)

    def _has(self, when: When, *, sparse: bool) -> bool:
        config = self._config
        return {
            When.ALWAYS: True,
            When.HEAD_NORMS: config.family.head_norms,
            When.DENSE: not sparse,
            When.SPARSE: sparse,
            When.SHARED: sparse and config.declares_shared_expert,
        }[when]

    def _has_bias(self, bias: Bias) -> bool:
        config = self._config
        return {
            Bias.NEVER: False,
            Bias.QKV: config.qkv_bias,
            Bias.OUTPUT: config.qkv_bias and config.family.model_type in self._layout.o_proj_bias,
            Bias.MLP: config.mlp_bias,
        }[bias]

    def _suffixes(self, linear: str) -> tuple[str, ...]:
        """What a Linear that may be quantised is stored as, by the declaration that the engine goes by."""
        quantisation = self._config.quantisation
        scaled = quantisation.method == "fp8" and not quantisation.ignores(linear)
        return ("weight", "weight_scale_inv") if scaled else ("weight",)

    def _module(self, base: str, source: str, module: Module) -> None:
        suffixes = self._suffixes(f"{source}{module.parts[0][0]}") if module.linear else ("weight",)
        for suffix in (*suffixes, *(("bias",) if self._has_bias(module.bias) else ())):
            parts = [(self._take(f"{source}{part}.{suffix}"), cut) for part, cut in module.parts]
            self._add(f"{base}{module.name}.{suffix}", parts, suffix)

    def _stack(self, base: str, source: str, stack: Stack, suffix: str) -> None:
        parts = [
            (self._take(f"{source}mlp.experts.{number}.{part}.{suffix}"), cut)
            for number in range(self._config.num_experts)
            for part, cut in stack.parts
        ]
        self._add(f"{base}{stack.module}.{stack.prefix}{suffix}", parts, suffix, self._config.num_experts)

    def _take(self, name: str) -> TensorInfo:
        self.used.add(name)
        tensor = self._view.get(name)
        if tensor is None:
            raise UnsupportedCheckpoint(
                f"is absent, and {self._layout.engine} demands it of such a model",
                file=CONFIG,
                tensor=name,
                remedy="let the checkpoint and config.json agree on biases, experts and quantised layers",
            )
        return tensor

    def _add(self, name: str, parts: Sequence[tuple[TensorInfo, Cut]], suffix: str, experts: int | None = None) -> None:
        """The shares of `parts` follow one another along dim 0; of experts, they then are one more dimension."""
        first = parts[0][0]
        shapes = [self._shape(tensor, cut, suffix) for tensor, cut in parts]
        odd = next(
            (t for (t, _), s in zip(parts, shapes, strict=True) if (t.dtype, s[1:]) != (first.dtype, shapes[0][1:])),
            None,
        )
        if odd is not None:
            raise UnsupportedCheckpoint(
                "experts of one layer are not stored alike"
                if experts
                else "cannot stand in one tensor with its neighbours",
                file=odd.shard,
                tensor=odd.name,
                found=odd.form,
                wanted=f"{first.form}, as {first.name}",
            )
        rows = sum(shape[0] for shape in shapes)
        shape = (rows, *shapes[0][1:]) if experts is None else (experts, rows // experts, *shapes[0][1:])
        axes = [axis_of(cut, suffix) for _, cut in parts]
        for number, tensors in enumerate(self.ranks):
            shares = {cut: found[number] for cut, found in self._shares.items()}
            tensors.append(OutputTensor(name, first.dtype, shape, first, partial(_strips, parts, axes, shares)))

    def _shape(self, tensor: TensorInfo, cut: Cut, suffix: str) -> tuple[int, ...]:
        """Shape of one share: whole rows, whole bytes, and where it has scales whole blocks."""
        axis, (_, count) = axis_of(cut, suffix), self._shares[cut][0]
        if axis is None:
            return tensor.shape
        length = tensor.shape[axis] if len(tensor.shape) > axis else 0
        block = self._config.quantisation.block
        scaled = suffix == "weight" and block is not None and f"{tensor.name}_scale_inv" in self._view
        unit = block[axis] if scaled and block is not None and count > 1 else 1
        shape = (*tensor.shape[:axis], length // count, *tensor.shape[axis + 1 :])
        if length % count or length // count % unit or tensor_bytes(tensor.dtype, shape[1:]) is None:
            raise UnsupportedCheckpoint(
                f"cannot be cut into {count} equal runs" + (f" of whole blocks of {unit}" if scaled else ""),
                file=tensor.shard,
                tensor=tensor.name,
                found=f"{length} along dim {axis}",
            )
        return shape

    def _vocabulary(self, name: str, tensor: TensorInfo) -> None:
        total = self._config.vocab_size
        row = tensor.nbytes // total
        for (number, count), tensors in zip(self._shares[Cut.VOCAB], self.ranks, strict=True):
            rows = padded(self._config, self._layout) // count
            start, stop = (min(total, rank * rows) for rank in (number, number + 1))
            strips: list[Strip] = []
            if stop > start:
                strips.append((Block(tensor.shard, tensor.start + start * row, (stop - start) * row, 1, 1),))
            padding = (rows - (stop - start)) * row
            if padding > MAX_PADDING:
                raise UnsupportedCheckpoint(
                    "the padding of the vocabulary is too large",
                    file=tensor.shard,
                    tensor=name,
                    found=f"{padding} bytes",
                )
            if padding:
                strips.append(Constant(bytes(padding)))
            tensors.append(OutputTensor(name, tensor.dtype, (rows, *tensor.shape[1:]), tensor, tuple(strips)))


def _strips(
    parts: Sequence[tuple[TensorInfo, Cut]], axes: Sequence[int | None], shares: Mapping[Cut, tuple[int, int]]
) -> tuple[Strip, ...]:
    """One share of each part, one below the other."""
    return tuple([(_block(tensor, axis, *shares[cut]),) for (tensor, cut), axis in zip(parts, axes, strict=True)])


def _block(tensor: TensorInfo, axis: int | None, number: int, count: int) -> Block:
    """Run `number` of `count` equal ones along an axis."""
    if axis is None:
        return contiguous(tensor)
    if axis == 0:
        size = tensor.nbytes // count
        return Block(tensor.shard, tensor.start + number * size, size, 1, 1)
    stride = tensor.nbytes // tensor.shape[0]
    width = stride // count
    return Block(tensor.shard, tensor.start + number * width, tensor.shape[0], width, stride)


def encoded(scalar: Scalar, dtype: str) -> bytes:
    """The bytes of a scalar. UnsupportedCheckpoint for a dtype that no model has."""
    if dtype == "BF16":
        return struct.pack("<f", scalar.value)[2:]
    code = {"F32": "<f", "F16": "<e", "F64": "<d"}.get(dtype)
    if code is None:
        raise UnsupportedCheckpoint("the model's dtype is none of BF16, F16, F32, F64", file=CONFIG, found=dtype)
    return struct.pack(code, scalar.value)
