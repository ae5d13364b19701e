"""Models of the engine as each of its ranks builds them, without the engine around them; for programs in vLLM's venv.

One process a rank lives through all models of a run: importing vLLM takes longer than any of them.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from run_vllm import BEYOND, let_choose
from torch import multiprocessing


def on_ranks(task: Callable[..., object], size: int, *arguments: object) -> list[Any]:
    """What `task(rank, size, *arguments)` gives in a process for each rank: JSON values, by rank."""
    with tempfile.TemporaryDirectory() as results, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // size))
        multiprocessing.spawn(_rank, (task, size, port, results, arguments), nprocs=size)
        return [json.loads(Path(results, f"{rank}.json").read_text(encoding="utf-8")) for rank in range(size)]


def _rank(
    rank: int, task: Callable[..., object], size: int, port: int, results: str, arguments: tuple[object, ...]
) -> None:
    os.environ.update({"RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    let_choose(BEYOND)  # the kernels of FP8 ask for instructions that only computing needs
    Path(results, f"{rank}.json").write_text(json.dumps(task(rank, size, *arguments)), encoding="utf-8")


def engine_config(folder: str, size: int, load_format: str) -> Any:  # noqa: ANN401 - vLLM is not in the dev venv
    """What the engine makes of a folder and the options of run_vllm."""
    from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415 - the process has set its environment first

    arguments = EngineArgs(
        model=folder,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=128,
        enforce_eager=True,
        load_format=load_format,
        distributed_executor_backend="uni" if size == 1 else "mp",
        tensor_parallel_size=size,
    )
    return arguments.create_engine_config()


def with_model(config: Any, rank: int, size: int, use: Callable[[Any], Any]) -> Any:  # noqa: ANN401 - as above
    """`use(model)` on one rank's empty model, where the engine would be about to load it."""
    from vllm.config import set_current_vllm_config  # noqa: PLC0415
    from vllm.distributed import (  # noqa: PLC0415
        destroy_model_parallel,
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )
    from vllm.model_executor.model_loader.base_loader import initialize_model  # noqa: PLC0415
    from vllm.utils.torch_utils import set_default_torch_dtype  # noqa: PLC0415

    with set_current_vllm_config(config):
        init_distributed_environment(size, rank, "env://", rank, backend="gloo")
        ensure_model_parallel_initialized(size, 1)
        with set_default_torch_dtype(torch.bfloat16):
            model = initialize_model(vllm_config=config, model_config=config.model_config)
        found = use(model)
    destroy_model_parallel()  # not every model has all of the groups
    return found
