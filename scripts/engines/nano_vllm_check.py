#!/usr/bin/env python3
"""Fill nano-vllm's real Qwen3 by its own loader and by fusecheck's, from split and from fused, and compare every bit.

    scripts/engine-check nano-vllm CHECKOUT        a clone of GeeeekExplorer/nano-vllm

The model, its layers and its loader are the checkout's. What needs a GPU and is no part of loading (flash attention,
triton) is replaced by stand-ins; the TP ranks are processes of this machine that talk gloo. Before each load every
parameter is filled with another value, so that nothing is right by chance. Exit 0: equal everywhere; 1: not.
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fusecheck

ROOT = Path(__file__).resolve().parent.parent.parent
ROUNDS = 5  # loads of each kind that are timed, in turn; the first is not counted
TIME_LIMIT = 900


@dataclass(frozen=True, slots=True)
class Check:
    """A checkpoint, as make_checkpoint.py takes it."""

    name: str
    arguments: tuple[str, ...]
    timed: bool = False


CHECKS = (
    Check("0.6B, full size: tied, lm_head", ("Qwen3-0.6B",), timed=True),
    Check("4B / 16: tied, no lm_head, shards", ("Qwen3-4B", "--scale", "16")),
    Check("8B / 16: untied, shards", ("Qwen3-8B", "--scale", "16")),
    Check("0.6B / 4: untied, any bits", ("Qwen3-0.6B", "--scale", "4", "--tied", "no", "--fill", "bits")),
)
WORLD_SIZES = (1, 2)


def main(checkout: Path) -> int:
    """Make, fuse, load and compare every checkpoint at every world size; print what ran. 0 when all is as expected."""
    print(f"nano-vllm {version_of(checkout)}, fusecheck {fusecheck.__version__}, torch {torch.__version__}, ", end="")
    print(f"Python {platform.python_version()}, {torch.get_num_threads()} threads, {dt.datetime.now(dt.UTC).date()}")
    wrong = 0
    for check in CHECKS:
        with tempfile.TemporaryDirectory(prefix="nano-vllm-check-") as work:
            split, fused = Path(work, "split"), Path(work, "fused")
            model, *rest = check.arguments
            script = str(ROOT / "scripts" / "make_checkpoint.py")
            run([sys.executable, script, model, str(split), *rest])
            fusecheck_fuse(split, fused)
            for size in WORLD_SIZES:
                timed = check.timed and size == 1
                ranks = run_ranks(checkout, split, fused, size, timed=timed)
                wrong += report(check, len(list(split.glob("*.safetensors"))), ranks)
    print("all as expected" if not wrong else f"{wrong} NOT AS EXPECTED")
    return 1 if wrong else 0


def version_of(checkout: Path) -> str:
    """From its pyproject.toml, and the commit where git knows one."""
    text = (checkout / "pyproject.toml").read_text(encoding="utf-8")
    version = next(line.split('"')[1] for line in text.splitlines() if line.startswith("version"))
    command = ["git", "-C", str(checkout), "log", "-1", "--format=%h of %cs"]
    commit = subprocess.run(command, check=False, capture_output=True, text=True).stdout.strip()
    return f"{version} ({commit})" if commit and (checkout / ".git").exists() else version


def fusecheck_fuse(split: Path, fused: Path) -> None:
    """As a user runs it."""
    code = "import sys; from fusecheck.cli import main; sys.exit(main())"
    run([sys.executable, "-c", code, "fuse", "-q", str(split), str(fused)])


def run(command: Sequence[str]) -> None:
    """A step that must succeed."""
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def run_ranks(checkout: Path, split: Path, fused: Path, size: int, *, timed: bool) -> list[dict[str, Any]]:
    """One process per TP rank; what each found."""
    with tempfile.TemporaryDirectory(prefix="nano-vllm-ranks-") as meeting:
        paths = [str(path.resolve()) for path in (checkout, split, fused)]
        rest = [str(size), f"file://{meeting}/store", str(int(timed))]
        command = [sys.executable, str(Path(__file__).resolve()), *paths, "--rank"]
        ranks = [
            subprocess.Popen([*command, str(rank), *rest], stdout=subprocess.PIPE, text=True) for rank in range(size)
        ]
        try:
            texts = [rank.communicate(timeout=TIME_LIMIT)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    return [
        json.loads(text.splitlines()[-1]) if not rank.returncode else {"failed": rank.returncode}
        for rank, text in zip(ranks, texts, strict=True)
    ]


def report(check: Check, shards: int, ranks: Sequence[dict[str, Any]]) -> int:
    """Print a line for each rank; how many are not as expected."""
    wrong = 0
    for number, found in enumerate(ranks):
        own = found.get("own_loader_on_fused", "")
        good = found.get("split") == found.get("fused") == [] and "gate_gate_up_proj" in own
        wrong += not good
        words = f"{found.get('parameters')} parameters bit-equal from split and fused" if good else f"WRONG: {found}"
        print(f"{check.name:36}{shards} shards  rank {number} of {len(ranks)}  {words}")
    if "seconds" in ranks[0]:
        for kind, seconds in ranks[0]["seconds"].items():
            print(f"    load, {kind:30} median {statistics.median(seconds):.3f} s   all {seconds}")
    return wrong


# ------------------------------------------------------------------------------------------------- inside one TP rank


def stand_ins(checkout: Path) -> None:
    """Let the checkout's model be imported without a GPU: what it decorates and calls there is never run here."""

    def never(*_: object, **__: object) -> None:
        raise NotImplementedError

    def as_it_is(function: Callable[..., object]) -> Callable[..., object]:
        return function

    package = types.ModuleType("nanovllm")
    package.__path__ = [str(checkout / "nanovllm")]  # its __init__ would import the engine
    flash = types.ModuleType("flash_attn")
    flash.__dict__.update(flash_attn_varlen_func=never, flash_attn_with_kvcache=never)
    language = types.ModuleType("triton.language")
    language.__dict__.update(constexpr=int)
    triton = types.ModuleType("triton")
    triton.__dict__.update(jit=as_it_is, language=language)
    transformers = types.ModuleType("transformers")
    transformers.__dict__.update(Qwen3Config=types.SimpleNamespace)  # named in annotations only
    for module in (package, flash, language, triton, transformers):
        sys.modules[module.__name__] = module
    torch.compile = as_it_is  # type: ignore[assignment]  # decorates forward functions


@contextmanager
def group(rank: int, size: int, store: str) -> Iterator[None]:
    """What nano-vllm's ModelRunner sets up, on gloo."""
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        dist.destroy_process_group()


def marked(model: torch.nn.Module, value: float) -> torch.nn.Module:
    """The model with `value` in every parameter."""
    for parameter in model.parameters():
        parameter.data.fill_(value)
    return model


def differences(one: torch.nn.Module, other: torch.nn.Module) -> list[str]:
    """Names of parameters whose bits differ."""
    theirs = dict(other.named_parameters())
    bits = torch.int16
    return [
        name
        for name, parameter in one.named_parameters()
        if not torch.equal(parameter.data.view(bits), theirs[name].data.view(bits))
    ]


def timings(model: torch.nn.Module, loads: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Seconds of each load, in turn, warm."""
    seconds: dict[str, list[float]] = {name: [] for name in loads}
    for number in range(ROUNDS + 1):
        for name, load in loads.items():
            marked(model, number)
            began = time.perf_counter()
            load()
            if number:
                seconds[name].append(round(time.perf_counter() - began, 3))
    return seconds


def rank_main(arguments: argparse.Namespace) -> dict[str, Any]:
    """Load and compare; the findings as JSON."""
    checkout: Path = arguments.checkout
    split: Path = arguments.folders[0]
    fused: Path = arguments.folders[1]
    rank, size, store, timed = arguments.rank
    stand_ins(checkout)
    own_load: Callable[[torch.nn.Module, str], None] = importlib.import_module("nanovllm.utils.loader").load_model
    qwen3 = importlib.import_module("nanovllm.models.qwen3").Qwen3ForCausalLM
    config = types.SimpleNamespace(**json.loads((split / "config.json").read_text(encoding="utf-8")))
    with group(int(rank), int(size), store):
        own, ours = marked(qwen3(config), -1), qwen3(config)
        own_load(own, str(split))
        found: dict[str, Any] = {"parameters": len(list(own.named_parameters()))}
        for value, (name, folder) in enumerate({"split": split, "fused": fused}.items()):
            fusecheck.load_model(marked(ours, value), str(folder))
            found[name] = differences(own, ours)
        if timed == "1":
            found["seconds"] = timings(
                ours,
                {
                    "nano-vllm, split": lambda: own_load(ours, str(split)),
                    "fusecheck.load_model, split": lambda: fusecheck.load_model(ours, str(split)),
                    "fusecheck.load_model, fused": lambda: fusecheck.load_model(ours, str(fused)),
                },
            )
        try:
            own_load(own, str(fused))
            found["own_loader_on_fused"] = "loads"
        except AttributeError as error:
            found["own_loader_on_fused"] = str(error)
    return found


def parse() -> argparse.Namespace:
    """The command line; --rank is how the ranks are started."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT")
    parser.add_argument("folders", type=Path, nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    options = parse()
    if options.rank:
        print(json.dumps(rank_main(options)))
        sys.exit()
    sys.exit(main(options.checkout))
