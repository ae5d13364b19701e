"""What vLLM's loaders put into a model, compared bit for bit: engines.run_states JOBS.json RESULTS.jsonl TP.

JOBS.json maps names to {"split": folder, "sharded": folder}. On each rank of TP, the default loader fills one model and the
sharded_state loader another, whose memory was filled with a pattern before; nothing is computed, so that it needs none
of the kernels. Equal states give equal tokens, whatever the kernel. A line of RESULTS.jsonl for each job.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, TypeAlias

import torch

from .ranks import engine_config, on_ranks, with_model

# isort: split
from vllm.model_executor.model_loader import get_model_loader  # type: ignore[import-not-found]

State: TypeAlias = dict[str, tuple[str, bytes]]
PATTERN = 0x5A


def compared(rank: int, size: int, jobs: dict[str, dict[str, str]]) -> dict[str, dict[str, Any]]:
    """One rank's verdict on each job."""
    return {name: attempt(rank, size, folders) for name, folders in jobs.items()}


def attempt(rank: int, size: int, folders: dict[str, str]) -> dict[str, Any]:
    """How large the states are and which tensors differ, or the error of a loader."""
    try:
        split = state(folders["split"], rank, size, "auto")
        sharded = state(folders["sharded"], rank, size, "sharded_state")
    except Exception as error:  # noqa: BLE001 - whatever a foreign engine raises
        return {"error": f"{type(error).__name__}: {error}"}
    differing = sorted(name for name in split.keys() | sharded.keys() if split.get(name) != sharded.get(name))
    return {"tensors": len(split), "bytes": sum(len(data) for _, data in split.values()), "differing": differing}


def state(folder: str, rank: int, size: int, load_format: str) -> State:
    """All of a model's state, aliases too, after loading and before the engine makes its kernels' layouts of it."""
    config = engine_config(folder, size, load_format)

    def loaded(model: torch.nn.Module) -> State:
        if load_format == "sharded_state":
            for tensor in model.state_dict().values():
                tensor.view(-1).view(torch.uint8).fill_(PATTERN)
        get_model_loader(config.load_config).load_weights(model, config.model_config)
        return {name: (f"{t.dtype}{list(t.shape)}", raw(t)) for name, t in model.state_dict().items()}

    return with_model(config, rank, size, loaded)  # type: ignore[no-any-return]


def raw(tensor: torch.Tensor) -> bytes:
    """The bits."""
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


def main() -> None:
    """All jobs on all ranks."""
    jobs, results, size = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]), int(sys.argv[3])
    ranks = on_ranks(compared, size, jobs)
    lines = [json.dumps({"name": name, "ranks": [rank[name] for rank in ranks]}) for name in jobs]
    results.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
