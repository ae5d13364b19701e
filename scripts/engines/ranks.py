"""Models of the engine as each of its ranks builds them, without the engine around them; for programs in vLLM's venv.

One process a rank lives through all models of a run: importing vLLM takes longer than any of them.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import spawn

from .run_vllm import BEYOND, let_choose  # sets the environment that vLLM reads while it is imported

# isort: split
from vllm.config import set_current_vllm_config  # type: ignore[import-not-found]
from vllm.distributed import (  # type: ignore[import-not-found]
    destroy_model_parallel,
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.engine.arg_utils import EngineArgs  # type: ignore[import-not-found]
from vllm.model_executor.model_loader.base_loader import initialize_model  # type: ignore[import-not-found]
from vllm.utils.torch_utils import set_default_torch_dtype  # type: ignore[import-not-found]

MEETING = "FUSECHECK_RANKS_MEET_IN"


def on_ranks(task: Callable[..., object], size: int, *arguments: object) -> list[Any]:
    """What `task(rank, size, *arguments)` gives in a process for each rank: JSON values, by rank."""
    with tempfile.TemporaryDirectory() as shared:
        os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // size))
        spawn(_rank, (task, size, shared, arguments), nprocs=size)  # type: ignore[no-untyped-call]
        return [json.loads(Path(shared, f"{rank}.json").read_text(encoding="utf-8")) for rank in range(size)]


def _rank(rank: int, task: Callable[..., object], size: int, shared: str, arguments: tuple[object, ...]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), MEETING: shared}
    Path(shared, f"{rank}.json").write_text(json.dumps(task(rank, size, *arguments)), encoding="utf-8")


def meeting(number: int) -> str:
    """Where the ranks find each other for the nth time; vLLM also names its shared memory after it."""
    shared = Path(os.environ[MEETING])
    return f"file://{shared}/{shared.name}-{number}"


def engine_config(folder: str, size: int, load_format: str) -> Any:  # noqa: ANN401 - vLLM is not in the dev venv
    """What the engine makes of a folder and the options of run_vllm, for models with which nothing is computed."""
    let_choose(BEYOND)  # the kernels of FP8 ask for instructions that only computing needs
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
    with set_current_vllm_config(config):
        init_distributed_environment(size, rank, meeting(0), rank, backend="gloo")
        ensure_model_parallel_initialized(size, 1)
        with set_default_torch_dtype(torch.bfloat16):
            model = initialize_model(vllm_config=config, model_config=config.model_config)
        found = use(model)
    destroy_model_parallel()  # not every model has all of the groups
    return found
