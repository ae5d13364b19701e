"""The tensors that vLLM's sharded_state loader demands: dump_sharded.py CONFIGS.json TP OUT.json, in vLLM's venv.

CONFIGS.json maps names to configs. Each model is built, empty, by TP processes, one a rank, and what the loader would ask
for is written down: name -> [dtype, shape], the same on every rank or this fails. No weights are needed.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.update({"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"})
os.environ.update({"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"})

import torch
from run_vllm import BEYOND, let_choose
from torch import multiprocessing

DTYPES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3", torch.float16: "F16"}


def demanded(folder: str, rank: int, size: int, port: int) -> dict[str, list[object]]:
    """What one rank's loader asks for."""
    from vllm.config import set_current_vllm_config  # noqa: PLC0415 - a spawned process sets its environment first
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment  # noqa: PLC0415
    from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415
    from vllm.model_executor.model_loader import ShardedStateLoader  # noqa: PLC0415
    from vllm.model_executor.model_loader.base_loader import initialize_model  # noqa: PLC0415
    from vllm.utils.torch_utils import set_default_torch_dtype  # noqa: PLC0415

    let_choose(BEYOND)  # nothing is computed here
    arguments = EngineArgs(
        model=folder,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=128,
        enforce_eager=True,
        load_format="sharded_state",
        distributed_executor_backend="uni" if size == 1 else "mp",
        tensor_parallel_size=size,
    )
    config = arguments.create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(size, rank, f"tcp://127.0.0.1:{port}", rank, backend="gloo")
        ensure_model_parallel_initialized(size, 1)
        with set_default_torch_dtype(torch.bfloat16):
            model = initialize_model(vllm_config=config, model_config=config.model_config)
        kept = ShardedStateLoader._filter_subtensors(model.state_dict())  # noqa: SLF001 - what load_weights itself calls
    return {name: [DTYPES[tensor.dtype], list(tensor.shape)] for name, tensor in sorted(kept.items())}


def _rank(rank: int, folder: str, size: int, port: int, results: str) -> None:
    Path(results, f"{rank}.json").write_text(json.dumps(demanded(folder, rank, size, port)), encoding="utf-8")


def main() -> None:
    """All configs in their order."""
    configs, size, out = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), int(sys.argv[2]), Path(sys.argv[3])
    found: dict[str, object] = {}
    for number, (name, config) in enumerate(configs.items()):
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as results:
            Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
            port = 29600 + 10 * size + number
            multiprocessing.spawn(_rank, (folder, size, port, results), nprocs=size)
            ranks = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path(results).iterdir())]
        if any(rank != ranks[0] for rank in ranks):
            sys.exit(f"{name}: the ranks demand different tensors")
        found[name] = ranks[0]
        print(name, len(ranks[0]), file=sys.stderr, flush=True)
    out.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
