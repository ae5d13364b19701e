"""Tensor names -> prefix, layers, modules and suffixes. Pure."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping

from fusecheck.config import CONFIG, ModelConfig
from fusecheck.errors import CheckpointError, UnsupportedCheckpoint, shown
from fusecheck.header import TensorInfo
from fusecheck.mapping import PREFIXES, WRAPPERS, split_module
from fusecheck.slot import Linear

_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}", re.ASCII)
_ADAPTER_WORDS = ("lora_", "base_layer", "modules_to_save")
_ADAPTER = re.compile(r"(?:^|\.)(?:lora_[A-Za-z_]+|base_layer|modules_to_save)(?:\.|$)")

Layers = Mapping[int, Mapping[str, Linear]]
"""layer -> module path -> suffix -> tensor."""


def refuse_wrapped(tensors: Mapping[str, TensorInfo]) -> None:
    """UnsupportedCheckpoint for the names of a model inside torch.compile, DDP or peft."""
    text = "\n" + "\n".join(tensors)  # one look at all names: hardly a checkpoint has one of these
    if not any(f"\n{wrapper}" in text for wrapper in WRAPPERS) and not any(word in text for word in _ADAPTER_WORDS):
        return
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


def prefix_of(tensors: Mapping[str, TensorInfo]) -> str:
    """What stands before `layers.`, in one way throughout. CheckpointError for none or two."""
    found: dict[str, TensorInfo] = {}
    for name, tensor in tensors.items():
        before, _, after = name.partition("layers.")
        if before not in found and before in PREFIXES and "." in after:
            found[before] = tensor
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


def by_layer(tensors: Mapping[str, TensorInfo], prefix: str, config: ModelConfig) -> Layers:
    """Every tensor of a layer by module and suffix; layer numbers are plain and below num_hidden_layers."""
    layers: dict[int, dict[str, dict[str, TensorInfo]]] = {}
    by_number: dict[str, dict[str, dict[str, TensorInfo]]] = {}
    paths: dict[str, tuple[str, str]] = {}
    for name, tensor in tensors.items():
        before, _, after = name.partition("layers.")
        number, dot, path = after.partition(".")
        if not dot or before != prefix:
            continue
        modules = by_number.get(number)
        if modules is None:
            layer = _layer(number, tensor, config)
            modules = by_number[number] = layers[layer] = {}
        found = paths.get(path)  # the layers of a model are alike
        if found is None:
            module, suffix = split_module(path)
            found = paths[path] = sys.intern(module), sys.intern(suffix)
        module, suffix = found
        linear = modules.get(module)
        if linear is None:
            modules[module] = {suffix: tensor}
        else:
            linear[suffix] = tensor
    return layers


def _layer(number: str, tensor: TensorInfo, config: ModelConfig) -> int:
    if not _NUMBER.fullmatch(number):
        raise CheckpointError(
            f"layer {shown(number, 40)} is no plain layer number", file=tensor.shard, tensor=tensor.name
        )
    layer = int(number)
    if layer >= config.num_hidden_layers:
        raise CheckpointError(
            f"layer {layer} is beyond {CONFIG}",
            file=tensor.shard,
            tensor=tensor.name,
            wanted=f"num_hidden_layers {config.num_hidden_layers}, so layers 0 to {config.num_hidden_layers - 1}",
        )
    return layer
