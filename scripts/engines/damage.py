"""Ways to break a checkpoint so that every file stays well formed, and all agree; of the fused form no engine notices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
GATE_UP = "model.layers.1.mlp.gate_up_proj.weight"


def drop_gate_up(folder: Path) -> None:
    """Take one gate_up_proj out of its shard and out of the index: consistent files, a tensor less."""
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    index["metadata"]["total_size"] -= drop_tensor(folder / index["weight_map"].pop(GATE_UP), GATE_UP)
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def drop_of_rank(folder: Path) -> None:
    """Take the same one out of what rank 0 is to load."""
    drop_tensor(folder / "model-rank-0-part-0.safetensors", GATE_UP)


def drop_tensor(path: Path, name: str) -> int:
    """Rewrite a small shard without one of its tensors; how many bytes of data that took."""
    header, data = read_shard(path)
    kept, pieces, end = {}, [], 0
    for other, entry in header.items():
        if other == "__metadata__":
            kept[other] = entry
        elif other != name:
            start, stop = entry["data_offsets"]
            pieces.append(data[start:stop])
            kept[other] = entry | {"data_offsets": [end, end := end + stop - start]}
    text = json.dumps(kept, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(pieces))
    return len(data) - end


def swap_k_and_v(folder: Path) -> None:
    """Exchange the rows of k and v in every qkv_proj: same names, shapes, sizes and values, in another order."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    for path in folder.glob("*.safetensors"):
        header, data = read_shard(path)
        changed = bytearray(data)
        for name, entry in header.items():
            if name.endswith(".qkv_proj.weight"):
                start, stop = entry["data_offsets"]
                each = (stop - start) // (heads + 2 * kv_heads) * kv_heads
                changed[stop - 2 * each : stop] = data[stop - each : stop] + data[stop - 2 * each : stop - each]
        path.write_bytes(path.read_bytes()[: -len(data)] + changed)


def read_shard(path: Path) -> tuple[dict[str, Any], bytes]:
    """Header and data of a small shard."""
    blob = path.read_bytes()
    start = 8 + int.from_bytes(blob[:8], "little")
    return json.loads(blob[8:start]), blob[start:]
