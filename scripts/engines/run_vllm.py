"""Put checkpoints through vLLM, one after another in one process: engines.run_vllm JOBS.json RESULTS.jsonl.

JOBS.json maps names to options of the engine: `model`, a folder, and whatever is to differ. The first line of RESULTS.jsonl
says what ran, each further line what one checkpoint gave; a line is there as soon as its checkpoint is done, so that a
crash of the engine loses no earlier one.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

PROMPT_LENGTHS = (5, 17, 48)
NEW_TOKENS = 24
LOGPROBS = 20  # vLLM's default limit
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine stays in this process
    "TORCHDYNAMO_DISABLE": "1",  # nothing is compiled: a model loads in seconds
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else threads are pinned to cores that others use too
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
os.environ.update(SETTINGS)  # vLLM reads them while it is imported

import torch  # noqa: E402
from vllm import LLM, SamplingParams  # type: ignore[import-not-found] # noqa: E402 - there is no vLLM in the dev venv
from vllm.distributed import cleanup_dist_env_and_memory  # type: ignore[import-not-found] # noqa: E402

BEYOND: dict[str, dict[str, tuple[str, ...]]] = {
    "kernels.linear.scaled_mm.cpu": {"is_supported": ("CPUFp8BlockScaledMMKernel",)},
    "layers.fused_moe.experts.cpu_moe": {"_supports_current_device": ("CPUExpertsFp8", "CPUExpertsInt4")},
}
"""vLLM's own kernels that ask for AMX but are compiled, and right, for AVX512-BF16 too; the test and whose it is."""


def pass_over_amx() -> list[str]:
    """Let vLLM choose the kernels of BEYOND where it asks for AMX in vain; their names."""
    if torch.cpu._is_amx_tile_supported() or not torch.cpu._is_avx512_bf16_supported():  # noqa: SLF001 - as vLLM does
        return []
    let_choose(BEYOND)
    return [kernel for tests in BEYOND.values() for kernels in tests.values() for kernel in kernels]


def let_choose(kernels_by_place: dict[str, dict[str, tuple[str, ...]]]) -> None:
    """Answer the kernels' own tests for them: yes."""
    for place, tests in kernels_by_place.items():
        module = importlib.import_module(f"vllm.model_executor.{place}")
        for test, kernels in tests.items():
            answer = (True, None) if test == "is_supported" else True
            for kernel in kernels:
                setattr(getattr(module, kernel), test, staticmethod(lambda *_, answer=answer: answer))


def prompts(vocabulary: int) -> list[dict[str, list[int]]]:
    """Drawn token ids, the same in every run; no tokenizer is needed."""
    draws = random.Random(0)  # noqa: S311 - for repeating, not for secrets
    return [{"prompt_token_ids": draws.choices(range(vocabulary), k=length)} for length in PROMPT_LENGTHS]


def exactly(position: dict[int, Any] | None) -> list[list[object]]:
    """The logprobs at one position, each as the hexadecimal digits of its float: equal text is equal bits, NaN too."""
    return sorted([token, entry.logprob.hex()] for token, entry in (position or {}).items())


def through_vllm(options: dict[str, Any]) -> dict[str, object]:
    """Load one checkpoint and generate greedily."""
    began = time.perf_counter()
    engine = LLM(
        dtype="bfloat16",
        seed=0,
        max_model_len=128,
        max_num_seqs=len(PROMPT_LENGTHS),
        enforce_eager=True,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        **{"distributed_executor_backend": "uni"} | options,
    )
    loaded = time.perf_counter()
    sampling = SamplingParams(
        temperature=0,
        max_tokens=NEW_TOKENS,
        ignore_eos=True,
        detokenize=False,
        logprobs=LOGPROBS,
        prompt_logprobs=LOGPROBS,
    )
    vocabulary = json.loads(Path(options["model"], "config.json").read_text(encoding="utf-8"))["vocab_size"]
    outputs = engine.generate(prompts(vocabulary), sampling, use_tqdm=False)
    positions = [[*output.prompt_logprobs, *output.outputs[0].logprobs] for output in outputs]
    return {
        "load_seconds": loaded - began,
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "logprobs": [[exactly(position) for position in prompt] for prompt in positions],
    }


def attempt(options: dict[str, Any]) -> dict[str, object]:
    """What the engine gave, or its error: that one checkpoint is refused is a result."""
    try:
        return through_vllm(options)
    except Exception as error:  # noqa: BLE001 - whatever a foreign engine raises
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        gc.collect()
        cleanup_dist_env_and_memory()


def about() -> dict[str, Any]:
    """What runs, and on what."""
    versions = {name: version(name) for name in ("vllm-cpu", "torch", "transformers", "safetensors")}
    return {"versions": versions, "cpu": torch.backends.cpu.get_cpu_capability(), "amx_passed_over": pass_over_amx()}


def main() -> None:
    """All jobs in their order."""
    jobs, results = map(Path, sys.argv[1:])
    with results.open("w", encoding="utf-8") as file:
        file.write(json.dumps(about()) + "\n")
        for name, options in json.loads(jobs.read_text(encoding="utf-8")).items():
            print(f"=== {name}", flush=True)
            file.write(json.dumps({"name": name, **attempt(options)}) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
