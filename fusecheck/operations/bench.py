"""bench: what fusing buys on this device. Latency, launches as counted, hidden-state reads, load time; nothing assumed.

Only what fusing changes is measured: q, k, v and gate, up of one layer, apart and fused. A ratio is believed only where
it exceeds what the separate projections show against themselves.
"""

from __future__ import annotations

import importlib.util
import math
import os
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from fusecheck import __version__
from fusecheck.checkpoint import Checkpoint, open_checkpoint
from fusecheck.errors import CheckpointError, FusecheckError, SystemFailure, UnsupportedCheckpoint, UsageError
from fusecheck.hub import resolve
from fusecheck.manifest import Manifest, read_manifest
from fusecheck.mapping import PACKINGS, QKV, Packing, ShardId
from fusecheck.model import survey

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fusecheck.linear import LinearBase

Progress: TypeAlias = Callable[[int, int], None]
"""Called with (steps done, steps in total)."""

Outcome: TypeAlias = Literal["faster", "slower", "no gain"]

CASES = (("decode", 1), ("decode", 4), ("decode", 16), ("decode", 64), ("prefill", 512))
"""Phase and rows of the hidden states."""

ROUNDS = 31
"""Pairs of samples per case; fewer, yet at least MIN_ROUNDS, where one case would take over CASE_SECONDS."""
MIN_ROUNDS = 21
CASE_SECONDS = 1.5
SAMPLE_SECONDS = 1e-3
"""What one sample lasts at least, so that the clock's own cost vanishes: as many calls as that takes."""
LOUD = 0.2
"""Noise beyond which "no gain" only means that nothing can be told."""
LOAD_ROUNDS = 11
LOAD_BYTES = 1 << 30
"""As many layers are loaded as fit."""

METHOD = (
    "separate and fused in turn, A B A B, after a warm-up; a sample is the mean of back-to-back calls",
    "weights may stay in a cache between calls, which in a whole model they often cannot",
    "ratio: median over the rounds of separate / fused, each round by itself",
    "noise: median step from one sample of the separate projections to their next; a ratio within it is no gain",
    "hidden-state reads: one per GEMM, by construction, not by a counter of the device",
)

_GEMMS = frozenset({"mm", "addmm", "mv", "addmv", "bmm", "baddbmm", "dot", "mkldnn_linear", "_addmm_activation"})


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds per call: every sample in the order taken, and their median."""

    median: float
    samples: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Launches:
    """What one forward launches, as torch.profiler counted it: (name, how often) of GEMM operations, or of GPU kernels."""

    separate: tuple[tuple[str, int], ...]
    fused: tuple[tuple[str, int], ...]
    separate_total: int
    fused_total: int


@dataclass(frozen=True, slots=True)
class Case:
    """One size of hidden states [batch, input size] in one mode; `calls` is how many make a sample."""

    phase: str
    batch: int
    mode: Literal["eager", "cuda graph"]
    calls: int
    separate: Timing
    fused: Timing
    ratio: float
    """Separate / fused: above 1 the fused projection is faster."""
    noise: float
    """The separate projections against themselves, as a share of 1."""
    outcome: Outcome
    launches: Launches
    hidden_bytes_separate: int
    hidden_bytes_fused: int


@dataclass(frozen=True, slots=True)
class ProjectionBench:
    """A fused projection against its parts. `parts`: (name, shard_offset, rows)."""

    tensor: str
    dtype: str
    input_size: int
    output_size: int
    parts: tuple[tuple[str, int, int], ...]
    cases: tuple[Case, ...]


@dataclass(frozen=True, slots=True)
class LoadBench:
    """Files -> parameters by safetensors.safe_open and the weight_loaders, for the fused projections of some layers."""

    layers: int
    bytes: int
    split_tensors: int
    fused_tensors: int
    split: Timing
    fused: Timing
    ratio: float
    noise: float
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class BenchReport:
    """All that was measured. `counted` says what a launch is on this device; `summary` is the result in words."""

    verdict: Literal["measured"]
    out: str
    source: str | None
    layer: int
    seed: int
    device: str
    device_note: str
    threads: int
    """Of torch, on the CPU."""
    counted: str
    projections: tuple[ProjectionBench, ...]
    load: LoadBench | None
    summary: tuple[str, ...]
    method: tuple[str, ...]
    versions: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Pair:
    """One projection both ways, on the device: (name, weight, bias) of each part in the fused order, and the fused."""

    tensor: str
    packing: Packing
    parts: tuple[tuple[str, Tensor, Tensor | None], ...]
    weight: Tensor
    bias: Tensor | None

    def separate(self, x: Tensor) -> list[Tensor]:
        """Hidden states [batch, in] through each part."""
        from torch.nn.functional import linear  # noqa: PLC0415

        return [linear(x, weight, bias) for _, weight, bias in self.parts]

    def fused(self, x: Tensor) -> list[Tensor]:
        """Hidden states [batch, in] through the fused weight; to split the output is a view and costs no launch."""
        from torch import split  # noqa: PLC0415
        from torch.nn.functional import linear  # noqa: PLC0415

        out = linear(x, self.weight, self.bias)
        return list(split(out, [len(weight) for _, weight, _ in self.parts], dim=-1))


def bench(
    out: str | Path,
    *,
    source: str | Path | None = None,
    device: str = "auto",
    layer: int = 0,
    seed: int = 0,
    on_progress: Progress | None = None,
) -> BenchReport:
    """Measure what fusing buys for one layer of the fused checkpoint `out` on a device.

    Without the source (given, or recorded in the manifest and still that one) the split weights are cut out of the fused
    ones. UsageError (exit 2) where there is nothing to measure, CheckpointError (3) where OUT or SRC is malformed,
    SystemFailure (4) where torch or the device is missing.
    """
    folder = Path(out)
    if not os.fspath(out) or not folder.is_dir():
        raise UsageError("OUT is no folder", file=str(out))
    if importlib.util.find_spec("torch") is None:
        raise SystemFailure("bench needs torch, which is missing", remedy="pip install torch")
    from fusecheck.device import pick_device, pinned  # noqa: PLC0415 - torch costs seconds and 200 MB

    chosen = pick_device(device)
    with ExitStack() as stack:
        opened = stack.enter_context(open_checkpoint(folder, follow_links=True))
        notes: list[str] = []
        origin = _open_source(folder, source, read_manifest(folder), notes)
        if origin is not None:
            stack.enter_context(origin)
        stack.enter_context(pinned(chosen))
        warnings = _busy()
        steps = _Steps(on_progress)
        prefix = survey(opened.tensors, opened.config, opened.peek, keep_split=True).prefix
        projections = _projections(opened, origin, prefix, layer, chosen, seed, steps, notes)
        load = _load(opened, origin, prefix, chosen, steps, notes)
        for checkpoint in filter(None, (opened, origin)):
            checkpoint.files.check_unchanged()
    return _report(folder, origin, chosen, projections, load, layer=layer, seed=seed, notes=notes, warnings=warnings)


def _report(
    out: Path,
    source: Checkpoint | None,
    device: torch.device,
    projections: tuple[ProjectionBench, ...],
    load: LoadBench | None,
    *,
    layer: int,
    seed: int,
    notes: Sequence[str],
    warnings: Sequence[str],
) -> BenchReport:
    import torch  # noqa: PLC0415

    from fusecheck.device import describe  # noqa: PLC0415

    about = describe(device)
    return BenchReport(
        verdict="measured",
        out=str(out),
        source=str(source.files.root) if source is not None else None,
        layer=layer,
        seed=seed,
        device=about.name,
        device_note=about.note,
        threads=torch.get_num_threads(),
        counted="GPU kernels" if device.type == "cuda" else "GEMM operations (a CPU launches no kernels)",
        projections=projections,
        load=load,
        summary=tuple(_summary(projections, load)),
        method=METHOD,
        versions=_versions(),
        notes=tuple(notes),
        warnings=tuple(warnings),
    )


def _busy() -> list[str]:
    """On shared cores the threads of a GEMM wait for each other for whole time slices, once per launch."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load < cores / 2:
        return []
    return [f"this machine was busy before ({load:.1f} runnable on {cores} cores): gains may be of waiting less"]


class _Steps:
    """Counts what is done; the total is known once the projections are."""

    def __init__(self, on_progress: Progress | None) -> None:
        self._on_progress = on_progress
        self.done = self.total = 0

    def step(self) -> None:
        self.done += 1
        if self._on_progress is not None:
            self._on_progress(self.done, self.total)


def _versions() -> tuple[tuple[str, str], ...]:
    import safetensors  # noqa: PLC0415
    import torch  # noqa: PLC0415

    found = {
        "fusecheck": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "safetensors": safetensors.__version__,
        "CUDA": torch.version.cuda,
    }
    return tuple((name, version) for name, version in found.items() if version)


# --- what is measured ---


def _open_source(
    out: Path, source: str | Path | None, manifest: Manifest | None, notes: list[str]
) -> Checkpoint | None:
    """The source that was named, else the one that the manifest records if it is still that one, else None."""
    if source is not None:
        return open_checkpoint(resolve(os.fspath(source)).folder, follow_links=True)
    gone = "the split weights are cut out of the fused ones, and loading split is not measured"
    if manifest is None or manifest.provenance.folder is None:
        notes.append(f"no source is recorded: {gone}")
        return None
    try:
        opened = open_checkpoint(out / manifest.provenance.folder, follow_links=True)
    except FusecheckError as error:
        notes.append(f"the recorded source cannot be read ({error}): {gone}")
        return None
    found = {shard.name: shard.header_digest for shard in opened.shards if shard.header_digest is not None}
    if found and found != {name: shard.header_digest for name, shard in manifest.source_shards.items()}:
        opened.files.close()
        notes.append(f"what is at {manifest.provenance.folder} is not the recorded source: {gone}")
        return None
    return opened


def _projections(
    out: Checkpoint,
    source: Checkpoint | None,
    prefix: str,
    layer: int,
    device: torch.device,
    seed: int,
    steps: _Steps,
    notes: list[str],
) -> tuple[ProjectionBench, ...]:
    import torch  # noqa: PLC0415

    count = out.config.num_hidden_layers
    if not 0 <= layer < count:
        raise UsageError("--layer is beyond the model", found=layer, wanted=f"0 to {count - 1}")
    prefix = f"{prefix}layers.{layer}."
    packings = [packing for packing in PACKINGS if f"{prefix}{packing.fused}.weight" in out.tensors]
    if not packings:
        raise UsageError(
            "this layer has no fused projection to measure", file=str(out.files.root), found=f"layer {layer}"
        )
    modes = 2 if device.type == "cuda" else 1
    steps.total = len(packings) * len(CASES) * modes + LOAD_ROUNDS
    with (
        torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    ):  # events and graphs go to the current one
        return tuple(_projection(_pair(prefix, p, out, source, device, notes), seed, steps) for p in packings)


def _pair(
    prefix: str, packing: Packing, out: Checkpoint, source: Checkpoint | None, device: torch.device, notes: list[str]
) -> _Pair:
    from fusecheck.bounds import DTYPES  # noqa: PLC0415

    name, bias_name = f"{prefix}{packing.fused}.weight", f"{prefix}{packing.fused}.bias"
    weight = _read(out, name).to(device)
    if weight.dtype not in DTYPES:
        raise UnsupportedCheckpoint("cannot be multiplied by F.linear as it is", tensor=name, found=weight.dtype)
    bias = _read(out, bias_name).to(device) if bias_name in out.tensors else None
    parts = []
    for (_, module), rows in zip(packing.parts, out.config.rows(packing), strict=True):
        own = slice(rows.shard_offset, rows.shard_offset + rows.shard_size)
        split = f"{prefix}{module}"
        if source is not None and f"{split}.weight" in source.tensors:
            part = _read(source, f"{split}.weight").to(device)
            part_bias = _read(source, f"{split}.bias").to(device) if bias is not None else None
            if part.shape != weight[own].shape or part.dtype != weight.dtype:
                raise CheckpointError("is not the source of OUT", tensor=f"{split}.weight", found=list(part.shape))
        else:
            note = "split weights are copies of the fused weight's rows"
            notes += [note] if source is not None and note not in notes else []
            part, part_bias = weight[own].clone(), None if bias is None else bias[own].clone()
        parts.append((module.rpartition(".")[2], part, part_bias))
    return _Pair(name, packing, tuple(parts), weight, bias)


def _read(checkpoint: Checkpoint, name: str) -> Tensor:
    from safetensors import safe_open  # noqa: PLC0415

    with safe_open(checkpoint.files.root / checkpoint.tensors[name].shard, framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor


def _projection(pair: _Pair, seed: int, steps: _Steps) -> ProjectionBench:
    import torch  # noqa: PLC0415

    rows, columns = pair.weight.shape
    generator = torch.Generator().manual_seed(seed)
    cases: list[Case] = []
    for phase, batch in CASES:
        x = torch.randn(batch, columns, generator=generator).to(pair.weight)
        launches = _launches(pair, x)
        modes = (_eager, _graphed) if x.is_cuda else (_eager,)
        for mode in modes:
            cases.append(_case(phase, batch, pair, x, launches, mode))
            steps.step()
    offset, parts = 0, []
    for name, weight, _ in pair.parts:
        parts.append((name, offset, len(weight)))
        offset += len(weight)
    dtype = str(pair.weight.dtype).removeprefix("torch.")
    return ProjectionBench(pair.tensor, dtype, columns, rows, tuple(parts), tuple(cases))


# --- time ---

_Run: TypeAlias = "Callable[[], object]"
_Mode: TypeAlias = "Callable[[_Run, int], _Run]"
"""A call, and how many of them, -> something that runs that many."""


def _eager(call: _Run, calls: int) -> _Run:
    def run() -> None:
        for _ in range(calls):
            call()

    return run


def _graphed(call: _Run, calls: int) -> _Run:
    """The same calls captured once into a CUDA graph, so that a replay is free of Python and of single launches."""
    import torch  # noqa: PLC0415

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return graph.replay


def _case(phase: str, batch: int, pair: _Pair, x: Tensor, launches: Launches, mode: _Mode) -> Case:
    clock = _clock(x.device)
    calls, rounds = _calibrate(lambda: pair.separate(x), clock)
    ways = [mode(lambda: pair.separate(x), calls), mode(lambda: pair.fused(x), calls)]
    for run in ways:
        clock(run)
    taken = [[clock(run) / calls for run in ways] for _ in range(rounds)]
    separate, fused = (tuple(sample) for sample in zip(*taken, strict=True))
    ratio, noise, outcome = judge(separate, fused)
    read = x.numel() * x.element_size()
    return Case(
        phase=phase,
        batch=batch,
        mode="eager" if mode is _eager else "cuda graph",
        calls=calls,
        separate=Timing(statistics.median(separate), separate),
        fused=Timing(statistics.median(fused), fused),
        ratio=ratio,
        noise=noise,
        outcome=outcome,
        launches=launches,
        hidden_bytes_separate=read * len(pair.parts),
        hidden_bytes_fused=read,
    )


def judge(separate: Sequence[float], fused: Sequence[float]) -> tuple[float, float, Outcome]:
    """(ratio, noise, outcome) of samples taken in turn, separate first.

    Noise is the median of |ln(a / next a)|: half of all steps of the separate projections against themselves are
    larger. For equals separate / fused spreads as those steps do, and a median of n such ratios deviates by about
    1.86 / sqrt(n) noises: a third of the noise at 31 rounds, over half of it at 11. So equals hardly ever leave it.
    """
    ratio = statistics.median(a / b for a, b in zip(separate, fused, strict=True))
    steps = [abs(math.log(a / b)) for a, b in pairwise(separate)]
    noise = math.expm1(statistics.median(steps)) if steps else 0.0
    if abs(math.log(ratio)) <= math.log1p(noise):
        return ratio, noise, "no gain"
    return ratio, noise, "faster" if ratio > 1 else "slower"


def _clock(device: torch.device) -> Callable[[_Run], float]:
    """Seconds that a run takes: by CUDA events on a GPU, by perf_counter on a CPU."""
    if device.type != "cuda":
        return _seconds
    import torch  # noqa: PLC0415

    def events(run: _Run) -> float:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(device)
        began.record()
        run()
        ended.record()
        torch.cuda.synchronize(device)
        return float(began.elapsed_time(ended)) / 1e3

    return events


def _seconds(run: _Run) -> float:
    began = time.perf_counter()
    run()
    return max(time.perf_counter() - began, 1e-9)


def _calibrate(call: _Run, clock: Callable[[_Run], float]) -> tuple[int, int]:
    """How many calls make a sample, and how many rounds fit."""
    once = min(clock(call) for _ in range(5))
    calls = max(1, min(1000, math.ceil(SAMPLE_SECONDS / once)))
    return calls, max(MIN_ROUNDS, min(ROUNDS, int(CASE_SECONDS / (2 * calls * once))))


# --- launches ---


def _launches(pair: _Pair, x: Tensor) -> Launches:
    counts = [_count(lambda: pair.separate(x), x.device), _count(lambda: pair.fused(x), x.device)]
    separate, fused = (tuple(sorted(count.items())) for count in counts)
    return Launches(separate, fused, counts[0].total(), counts[1].total())


def _count(call: _Run, device: torch.device) -> Counter[str]:
    import torch  # noqa: PLC0415
    from torch.profiler import ProfilerActivity, profile  # noqa: PLC0415

    on_gpu = device.type == "cuda"
    call()  # libraries load their kernels at the first call
    with (
        _hushed(),
        profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiler,
    ):
        call()
        if on_gpu:
            torch.cuda.synchronize(device)
    names = []
    for event in profiler.events() or ():
        if on_gpu and event.device_type.name == "CUDA":
            names += [] if event.name.startswith(("Memcpy", "Memset")) else [event.name]
        elif not on_gpu and event.name.rpartition(":")[2] in _GEMMS:
            names.append(event.name)
    return Counter(names)


@contextmanager
def _hushed() -> Iterator[None]:
    """The profiler's library writes trace marks to descriptor 2, whatever its log level; nobody asked for them."""
    try:
        kept = os.dup(2)
    except OSError:
        yield
        return
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    os.close(nothing)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


# --- load ---

_Entry: TypeAlias = "tuple[str, str, str, ShardId | None]"
"""Name of a tensor, its shard, the parameter that it fills, its shard_id (None: the whole fused tensor)."""


def _load(
    out: Checkpoint, source: Checkpoint | None, prefix: str, device: torch.device, steps: _Steps, notes: list[str]
) -> LoadBench | None:
    """Load as many layers as fit both ways, in turn, each layer into the same parameters."""
    fused, split, size, layers = _entries(out, source, prefix)
    if source is None or not split:
        notes += [] if source is None else ["loading split is not measured: the source has these projections fused"]
        return None
    modules = _modules(out, [name for name, *_ in fused], device)
    clock = _clock(device)
    ways: list[_Run] = [lambda: _fill(source, split, modules), lambda: _fill(out, fused, modules)]
    for run in ways:
        clock(run)
    taken = []
    for _ in range(LOAD_ROUNDS):
        taken.append([clock(run) for run in ways])
        steps.step()
    one, two = (tuple(sample) for sample in zip(*taken, strict=True))
    ratio, noise, outcome = judge(one, two)
    notes.append("load time: from the page cache, both read once before; what fusing leaves alone is left out")
    return LoadBench(
        layers=layers,
        bytes=size,
        split_tensors=len(split),
        fused_tensors=len(fused),
        split=Timing(statistics.median(one), one),
        fused=Timing(statistics.median(two), two),
        ratio=ratio,
        noise=noise,
        outcome=outcome,
    )


def _entries(out: Checkpoint, source: Checkpoint | None, prefix: str) -> tuple[list[_Entry], list[_Entry], int, int]:
    """What is read fused and split, in bytes and over how many layers; what is not both, or of another dtype, is left out."""
    fused: list[_Entry] = []
    split: list[_Entry] = []
    dtypes: dict[str, str] = {}
    size = layers = 0
    for layer in range(out.config.num_hidden_layers if source is not None else 0):
        before = len(fused)
        for packing, suffix in product(PACKINGS, ("weight", "bias")):
            base, parameter = f"{prefix}layers.{layer}.", f"{packing.fused}.{suffix}"
            whole = out.tensors.get(f"{base}{parameter}")
            parts = (
                [(i, source.tensors.get(f"{base}{module}.{suffix}")) for i, module in packing.parts] if source else []
            )
            found = [(i, part) for i, part in parts if part is not None]
            if whole is None or len(found) < len(parts) or dtypes.setdefault(packing.fused, whole.dtype) != whole.dtype:
                continue
            fused.append((whole.name, whole.shard, parameter, None))
            split += [(part.name, part.shard, parameter, i) for i, part in found]
            size += whole.nbytes
        layers += len(fused) > before
        if size >= LOAD_BYTES:
            break
    return fused, split, size, layers


def _modules(out: Checkpoint, names: Iterable[str], device: torch.device) -> dict[str, LinearBase]:
    """The engine's layers, empty, one of each packing, in the dtype of the first of the named tensors."""
    from fusecheck.linear import MergedColumnParallelLinear, QKVParallelLinear  # noqa: PLC0415

    config, modules = out.config, dict[str, "LinearBase"]()
    for packing in PACKINGS:
        name = next((name for name in names if name.endswith(f"{packing.fused}.weight")), None)
        if name is None:
            continue
        dtype = _read(out, name).dtype
        bias = f"{name.removesuffix('weight')}bias" in out.tensors
        if packing is QKV:
            heads = config.head_dim, config.num_attention_heads, config.num_key_value_heads
            module: LinearBase = QKVParallelLinear(config.hidden_size, *heads, bias, dtype=dtype, device=device)
        else:
            sizes = [rows.shard_size for rows in config.rows(packing)]
            module = MergedColumnParallelLinear(config.hidden_size, sizes, bias, dtype=dtype, device=device)
        modules[packing.fused] = module
    return modules


def _fill(checkpoint: Checkpoint, entries: Sequence[_Entry], modules: Mapping[str, LinearBase]) -> None:
    from safetensors import safe_open  # noqa: PLC0415

    with ExitStack() as stack:
        files = {
            shard: stack.enter_context(safe_open(checkpoint.files.root / shard, framework="pt"))
            for shard in dict.fromkeys(shard for _, shard, _, _ in entries)
        }
        for name, shard, parameter, shard_id in entries:
            module, _, kind = parameter.rpartition(".")
            param = getattr(modules[module], kind)
            param.weight_loader(param, files[shard].get_tensor(name), shard_id)


# --- the result in words ---


def _summary(projections: Sequence[ProjectionBench], load: LoadBench | None) -> Iterator[str]:
    for projection in projections:
        name = projection.tensor.rpartition(".")[0].rpartition(".")[2]
        for mode in dict.fromkeys(case.mode for case in projection.cases):
            cases = [case for case in projection.cases if case.mode == mode]
            yield f"{name}{', CUDA graph' if mode != 'eager' else ''}: {'; '.join(_outcomes(cases))}"
    if load is not None:
        yield f"load: {_in_words(load.outcome, load.ratio, load.noise)}"


def _outcomes(cases: Sequence[Case]) -> Iterator[str]:
    if all(case.outcome == "no gain" for case in cases):
        noise = max(case.noise for case in cases)
        what = "fusing gains nothing here" if noise <= LOUD else "too noisy to tell"
        yield f"{what}, every ratio is within its noise (at most {noise:.1%})"
        return
    for outcome in ("faster", "slower", "no gain"):
        found = [case for case in cases if case.outcome == outcome]
        if not found:
            continue
        rows = ", ".join(str(case.batch) for case in found)
        ratios = [case.ratio for case in found]
        span = f"{min(ratios):.2f} to {max(ratios):.2f} x" if len(found) > 1 else f"{ratios[0]:.2f} x"
        yield f"no gain beyond noise at {rows} rows" if outcome == "no gain" else f"{outcome} at {rows} rows ({span})"


def _in_words(outcome: Outcome, ratio: float, noise: float) -> str:
    if outcome == "no gain":
        what = "fusing gains nothing here" if noise <= LOUD else "too noisy to tell"
        return f"{what} ({ratio:.2f} x, noise {noise:.1%})"
    return f"{outcome} ({ratio:.2f} x, noise {noise:.1%})"
