"""bench: what it counts is what ran, what it times is what it says, and equals are never called a gain."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import Spec, write_checkpoint

from fusecheck.checkpoint import open_checkpoint
from fusecheck.errors import CheckpointError, SystemFailure, UsageError
from fusecheck.mapping import PACKINGS
from fusecheck.measure import load, timing, words
from fusecheck.measure.projection import CASES, read_pair
from fusecheck.measure.timing import clock_of, judge
from fusecheck.operations.bench import BenchReport, bench
from fusecheck.operations.fuse import fuse
from fusecheck.render import to_json

RUN = "from fusecheck.cli import main\nmain()\n"
NO_TORCH = "import sys\nsys.modules['torch'] = None\n"
SPEC = Spec(num_hidden_layers=2, values="normal")


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ROUNDS", 5), ("MIN_ROUNDS", 3), ("SAMPLE_SECONDS", 1e-5)):
        monkeypatch.setattr(timing, name, value)
    monkeypatch.setattr(load, "LOAD_ROUNDS", 3)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """One thread: on shared cores several wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make(tmp_path_factory.mktemp("bench"), SPEC)


def make(folder: Path, spec: Spec) -> tuple[Path, Path]:
    write_checkpoint(folder / "in", spec)
    fuse(folder / "in", folder / "out")
    return folder / "in", folder / "out"


def command(*arguments: object, before: str = "") -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-c", before + RUN, *map(str, arguments)]
    return subprocess.run(
        line, capture_output=True, text=True, check=False, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )


@pytest.fixture(scope="module")
def report(pair: tuple[Path, Path]) -> BenchReport:
    with pytest.MonkeyPatch.context() as patch:
        hurry(patch)
        return bench(pair[1], device="cpu", layer=1, seed=3)


def test_three_launches_become_one_and_two_become_one(report: BenchReport) -> None:
    counts = {
        (
            projection.tensor.rpartition(".")[0].rpartition(".")[2],
            case.launches.separate_total,
            case.launches.fused_total,
        )
        for projection in report.projections
        for case in projection.cases
    }
    assert counts == {("qkv_proj", 3, 1), ("gate_up_proj", 2, 1)}
    assert "GEMM" in report.counted


def test_every_case_is_measured_and_its_median_lies_within_its_samples(report: BenchReport) -> None:
    for projection in report.projections:
        assert [(case.phase, case.batch) for case in projection.cases] == list(CASES)
        for case in projection.cases:
            assert len(case.separate.samples) == len(case.fused.samples) >= timing.MIN_ROUNDS
            assert case.calls >= 1
            for timed in (case.separate, case.fused):
                assert 0 < min(timed.samples) <= timed.median <= max(timed.samples) < math.inf
            assert case.ratio > 0
            assert case.noise >= 0


def test_each_projection_reads_the_hidden_states_once(report: BenchReport) -> None:
    for projection in report.projections:
        for case in projection.cases:
            assert case.hidden_bytes_fused == case.batch * projection.input_size * 2
            assert case.hidden_bytes_separate == len(projection.parts) * case.hidden_bytes_fused


def test_parts_fill_the_rows(report: BenchReport) -> None:
    assert [(name, offset, rows) for name, offset, rows in report.projections[0].parts] == [
        ("q_proj", 0, 32),
        ("k_proj", 32, 16),
        ("v_proj", 48, 16),
    ]
    for projection in report.projections:
        assert sum(rows for _, _, rows in projection.parts) == projection.output_size


def test_loading_reads_all_layers_both_ways(report: BenchReport) -> None:
    assert report.load is not None
    assert (report.load.layers, report.load.split_tensors, report.load.fused_tensors) == (2, 10, 4)
    assert report.load.bytes == 2 * (64 + 48) * 16 * 2
    assert report.load.split.median > 0 < report.load.fused.median


def test_the_report_names_what_ran(report: BenchReport) -> None:
    assert (report.verdict, report.layer, report.seed) == ("measured", 1, 3)
    assert dict(report.versions)["torch"] == torch.__version__
    assert report.threads == torch.get_num_threads()
    assert len(report.summary) == 3


def test_the_document_is_strict_json(report: BenchReport) -> None:
    document = json.loads(to_json(report.verdict, report), parse_constant=pytest.fail)
    assert document["verdict"] == "measured"
    assert document["projections"][0]["cases"][0]["launches"]["separate_total"] == 3


def test_both_ways_multiply_alike(pair: tuple[Path, Path]) -> None:
    cpu, x = torch.device("cpu"), torch.randn(4, SPEC.hidden_size).bfloat16()
    with open_checkpoint(pair[1]) as out, open_checkpoint(pair[0]) as source:
        for packing in PACKINGS:
            for origin in (source, None):
                both = read_pair("model.layers.1.", packing, out, origin, cpu, [])
                for one, two in zip(both.separate(x), both.fused(x), strict=True):
                    torch.testing.assert_close(one, two)
                assert all(weight.is_contiguous() for _, weight, _ in both.parts)
                own = {weight.untyped_storage().data_ptr() for _, weight, _ in both.parts}
                assert len(own | {both.weight.untyped_storage().data_ptr()}) == len(both.parts) + 1


@pytest.mark.parametrize("bias", [False, True])
def test_without_the_source_the_split_weights_are_cut_out(tmp_path: Path, *, bias: bool) -> None:
    source, out = make(tmp_path, Spec(num_hidden_layers=1, bias=bias))
    shutil.rmtree(source)
    found = bench(out, device="cpu")
    assert found.source is None
    assert found.load is None
    assert any("cut out of the fused ones" in note for note in found.notes)
    assert {case.launches.separate_total for p in found.projections for case in p.cases} == {2, 3}


def test_a_named_source_is_used(pair: tuple[Path, Path], tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere" / "out"
    shutil.copytree(pair[1], moved)
    assert bench(moved, device="cpu").source is None
    assert bench(moved, source=pair[0], device="cpu").source == str(pair[0])


def test_another_models_weights_are_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "other", Spec(num_hidden_layers=2, hidden_size=24))
    with pytest.raises(CheckpointError, match="not the source"):
        bench(pair[1], source=tmp_path / "other", device="cpu")


def test_steps_are_counted_to_their_end(pair: tuple[Path, Path]) -> None:
    seen: list[tuple[int, int]] = []
    bench(pair[1], device="cpu", on_progress=lambda done, total: seen.append((done, total)))
    total = 2 * len(CASES) + load.LOAD_ROUNDS
    assert seen == [(done, total) for done in range(1, total + 1)]


def test_what_cannot_be_measured(pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no folder"):
        bench(tmp_path / "absent")
    with pytest.raises(UsageError, match="beyond the model"):
        bench(pair[1], layer=2)
    with pytest.raises(UsageError, match="no fused projection"):
        bench(pair[0])
    with pytest.raises(UsageError, match="unknown device"):
        bench(pair[1], device="tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemFailure, match="no such device"):
        bench(pair[1], device="cuda")


def test_a_malformed_out_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(pair[1], out)
    with (out / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    with pytest.raises(CheckpointError):
        bench(out)


def test_equals_are_hardly_ever_a_gain_and_a_clear_one_always() -> None:
    rng = random.Random(7)  # noqa: S311
    alarms = 0
    for _ in range(2000):
        samples = [rng.lognormvariate(0, 0.2) for _ in range(62)]
        alarms += judge(samples[::2], samples[1::2])[2] != "no gain"
    assert alarms < 20
    separate = [1 + rng.random() / 50 for _ in range(31)]
    assert judge(separate, [1 / 1.2] * 31)[2] == "faster"
    assert judge(separate, [1.2] * 31)[2] == "slower"
    assert judge([1.0] * 9, [1.0] * 9) == (1.0, 0.0, "no gain")


def test_the_words_say_so_when_nothing_is_gained_or_can_be_told(report: BenchReport) -> None:
    case = report.projections[0].cases[0]
    quiet, loud, gain = (
        replace(case, outcome="no gain", noise=0.01),
        replace(case, outcome="no gain", noise=0.9),
        replace(case, outcome="faster", ratio=1.5),
    )
    assert "gains nothing here" in " ".join(words._outcomes([quiet, quiet]))  # noqa: SLF001
    assert "too noisy to tell" in " ".join(words._outcomes([quiet, loud]))  # noqa: SLF001
    said = list(words._outcomes([quiet, gain]))  # noqa: SLF001
    assert said == ["faster at 1 rows (1.50 x)", "no gain beyond noise at 1 rows"]


def test_drift_is_no_gain() -> None:
    drifting = [1.02**n for n in range(62)]
    ratio, noise, outcome = judge(drifting[::2], drifting[1::2])
    assert outcome == "no gain"
    assert ratio == pytest.approx(1 / 1.02)
    assert noise == pytest.approx(1.02**2 - 1)


def test_the_clock_measures() -> None:
    assert 0.02 <= clock_of(torch.device("cpu"))(lambda: time.sleep(0.02)) < 5


def test_the_profilers_marks_do_not_reach_the_terminal(
    pair: tuple[Path, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    bench(pair[1], device="cpu")
    assert capfd.readouterr() == ("", "")
    os.write(2, b"open again")
    assert capfd.readouterr().err == "open again"


def test_the_command(pair: tuple[Path, Path], tmp_path: Path) -> None:
    page = tmp_path / "bench.html"
    done = command("bench", pair[1], "--device", "cpu", "--json", "--report", page, "-q")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["verdict"] == "measured"
    assert page.read_text().startswith("<!DOCTYPE html>")


def test_the_command_without_torch_or_device(pair: tuple[Path, Path]) -> None:
    for before, arguments in ((NO_TORCH, ()), ("", ("--device", "cuda:9"))):
        done = command("bench", pair[1], *arguments, before=before)
        assert done.returncode == 4
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_kernels_are_counted_and_graphs_replayed(pair: tuple[Path, Path]) -> None:
    found = bench(pair[1], device="cuda")
    assert found.counted == "GPU kernels"
    for projection in found.projections:
        assert {case.mode for case in projection.cases} == {"eager", "cuda graph"}
        for case in projection.cases:
            assert case.launches.separate_total > case.launches.fused_total >= 1
            assert case.fused.median == statistics.median(case.fused.samples) > 0
