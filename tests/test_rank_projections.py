"""probe and numeric of an output that is cut for ranks: sound ones pass, damage is found whatever exact says of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from checkpoints import Spec, write_checkpoint
from memory_store import MemorySource
from quantised import checkpoint
from rich.console import Console
from safetensors.torch import load_file, save_file
from test_html import Page
from test_numeric import draw, seeded

from fusecheck import fuse, verify
from fusecheck.bounds import Arithmetic
from fusecheck.checkpoint import Checkpoint, open_checkpoint, open_stored
from fusecheck.html.verify import verify_html
from fusecheck.numeric import Projection, numeric
from fusecheck.operations.verify import VerifyReport
from fusecheck.rank_projections import check_rank_projections
from fusecheck.render.verify import verify_table
from fusecheck.row_parallel import Piece, numeric_sum, probe_ranks
from fusecheck.verdicts import Place, ProjectionCheck, Verdict, fold

CPU = torch.device("cpu")
TARGET = "vllm-sharded"
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
SMALL = Spec(
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=24,
    vocab_size=70,
    values="normal",
    bias=True,
)
LAYER = "model.layers.0."
QKV, O_PROJ = f"{LAYER}self_attn.qkv_proj.weight", f"{LAYER}self_attn.o_proj.weight"
GATE_UP, DOWN = f"{LAYER}mlp.gate_up_proj.weight", f"{LAYER}mlp.down_proj.weight"
ROUTED = f"{LAYER}mlp.experts.routed_experts."


def cut(folder: Path, size: int, spec: Spec = SMALL, **options: object) -> Path:
    write_checkpoint(folder / "in", spec)
    fuse(folder / "in", folder / "out", target=TARGET, tp=size, **options)  # type: ignore[arg-type]
    return folder / "out"


def verdicts(check: ProjectionCheck) -> tuple[Verdict, Verdict, Verdict]:
    return check.built, check.probe.verdict, check.numeric.verdict


def by_name(report: VerifyReport) -> dict[tuple[str, tuple[int, ...]], ProjectionCheck]:
    return {(check.tensor, check.ranks): check for check in report.projections}


# ----------------------------------------------------------------------------------------------- sound outputs pass


@pytest.mark.parametrize(("size", "kv_heads"), [(1, 2), (2, 2), (4, 2), (4, 1), (4, 4)])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_a_sound_output_passes(tmp_path: Path, size: int, kv_heads: int, dtype: str) -> None:
    spec = replace(SMALL, dtype=dtype, num_key_value_heads=kv_heads)
    report = verify(cut(tmp_path, size, spec))
    assert report.proved == ("exact", "probe", "numeric")
    found = by_name(report)
    q, kv = 32 // size, max(8, 8 * kv_heads // size)
    ranks = tuple(range(size))
    for rank in ranks:
        check = found.pop((QKV, (rank,)))
        assert check.shard_offsets == (("q", 0), ("k", q), ("v", q + kv))
        assert (check.input_size, check.output_size, check.axis) == (16, q + 2 * kv, "rows")
        check = found.pop((GATE_UP, (rank,)))
        assert check.shard_offsets == (("0", 0), ("1", 24 // size))
        assert (check.input_size, check.output_size) == (16, 48 // size)
    for name, columns in ((O_PROJ, 32), (DOWN, 24)):
        check = found.pop((name, ranks))
        assert check.shard_offsets == tuple((f"rank {rank}", rank * columns // size) for rank in ranks)
        assert (check.input_size, check.output_size, check.axis) == (columns, 16, "columns")
        assert check.probe.compared == check.probe.total == 16 * columns
    assert not found
    assert {verdicts(check) for check in report.projections} == {("pass", "pass", "pass")}


KINDS = (
    ("plain", "qwen3_moe"),
    ("fp8-square", "qwen3"),
    ("fp8-square", "qwen3_moe"),
    ("plain", "qwen2"),
    ("plain", "llama"),
)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("kind", "family"), KINDS)
def test_families_from_every_form(tmp_path: Path, kind: str, family: str, size: int) -> None:
    checkpoint(kind, family, layers=1).write(tmp_path / "in")
    fuse(tmp_path / "in", tmp_path / "out", target=TARGET, tp=size)
    sources = {"split": tmp_path / "in", "fused": tmp_path / "fused"}
    fuse(tmp_path / "in", tmp_path / "fused")
    if (kind, family) == ("plain", "qwen3_moe"):
        sources["stacked"] = tmp_path / "stacked"
        fuse(tmp_path / "in", tmp_path / "stacked", experts="stacked")
    reports = {form: verify(tmp_path / "out", source=source) for form, source in sources.items()}
    for report in reports.values():
        assert report.proved == ("exact", "probe", "numeric")
        assert {verdicts(check) for check in report.projections} == {("pass", "pass", "pass")}
        assert report.projections == reports["split"].projections
    names = {check.tensor.removeprefix(LAYER) for check in report.projections}
    assert {"self_attn.qkv_proj.weight", "self_attn.o_proj.weight"} < names
    if family == "qwen3_moe":
        assert {f"mlp.experts._shared_experts._layer.{name}_proj.weight" for name in ("gate_up", "down")} < names
        assert sum(".routed_experts.w13_weight[" in name for name in names) == 4
        assert sum(".routed_experts.w2_weight[" in name for name in names) == 4
        assert any("of 6: first, middle, last" in note for note in report.notes)
        every = verify(tmp_path / "out", all_experts=True, device="cpu")
        assert sum(".w2_weight[" in check.tensor for check in every.projections) == 6
    weights = {check.weights for check in report.projections}
    assert weights == ({"stored"} if kind == "plain" else {"dequantised to float32 (fp8)"})


@pytest.mark.parametrize("form", ["split", "fused", "stacked"])
def test_a_store_is_read_as_a_folder(tmp_path: Path, form: str) -> None:
    """A source whose experts are stacked too: one expert's rows of it, from a few bytes on."""
    made = checkpoint("plain", "qwen3_moe", layers=1).write(tmp_path / "in")
    sources = {"split": made, "fused": tmp_path / "fused", "stacked": tmp_path / "stacked"}
    if form != "split":
        fuse(made, sources[form], experts="stacked" if form == "stacked" else "per-expert")
    fuse(made, tmp_path / "out", target=TARGET, tp=2)
    found = []
    for opener in (open_checkpoint, stored):
        with opener(tmp_path / "out", ranked=True) as out, opener(sources[form]) as source:
            checks = check_rank_projections(out, source, None, (0,), CPU, 0)
        assert {verdicts(check) for check in checks.projections} == {("pass", "pass", "pass")}
        found.append(checks)
    assert found[0] == found[1]


def stored(folder: Path, *, ranked: bool = False) -> Checkpoint:
    return open_stored(MemorySource.of(folder), "s3://bucket/prefix", ranked=ranked)


def test_a_few_ranks_alone_are_probed_but_not_summed(tmp_path: Path) -> None:
    report = verify(cut(tmp_path, 4, ranks="1,3"))
    assert report.verdict == "equal"
    for check in report.projections:
        if check.axis == "rows":
            assert check.ranks in {(1,), (3,)}
            assert verdicts(check) == ("pass", "pass", "pass")
        else:
            assert check.ranks == (1, 3)
            assert [offset for _, offset in check.shard_offsets] == [r * check.input_size // 4 for r in range(4)]
            assert verdicts(check) == ("pass", "pass", "not run")
            assert check.numeric.reason == "2 of 4 ranks are here, and their sum needs all"
            assert check.probe.total == check.input_size * check.output_size // 2


def test_without_a_source_nothing_is_run(tmp_path: Path) -> None:
    out = cut(tmp_path, 2)
    (tmp_path / "in").rename(tmp_path / "elsewhere")
    report = verify(out)
    assert (report.verdict, report.proved, report.projections) == ("equal", ("exact",), ())
    assert any("the source is gone" in note for note in report.notes)
    (out / "fusecheck.json").unlink()
    assert verify(out, source=tmp_path / "elsewhere").proved == ("exact", "probe", "numeric")


# -------------------------------------------------------------------------------------------------- damage is found

Rank = dict[str, torch.Tensor]


def path_of(out: Path, rank: int) -> Path:
    return out / f"model-rank-{rank}-part-0.safetensors"


def both(change: Callable[[Rank, Rank], None]) -> Callable[[Path], None]:
    """Change what ranks 0 and 1 hold."""

    def damage(out: Path) -> None:
        ranks = [load_file(path_of(out, rank)) for rank in (0, 1)]
        change(*ranks)
        for rank, held in enumerate(ranks):
            save_file({name: one.contiguous() for name, one in held.items()}, path_of(out, rank), {"format": "pt"})

    return damage


def swap(name: str, *at: slice) -> Callable[[Rank, Rank], None]:
    def change(a: Rank, b: Rank) -> None:
        a[name][at], b[name][at] = b[name][at].clone(), a[name][at].clone()

    return change


def reorder(name: str, *order: tuple[int, int]) -> Callable[[Rank, Rank], None]:
    """Of rank 1, by runs of rows."""

    def change(_: Rank, b: Rank) -> None:
        b[name] = torch.cat([b[name][start:stop] for start, stop in order])

    return change


def off_by_one(name: str) -> Callable[[Rank, Rank], None]:
    """Both ranks' columns begin one later, and the first of all comes last."""

    def change(a: Rank, b: Rank) -> None:
        whole = torch.cat([a[name], b[name]], dim=1).roll(-1, dims=1)
        a[name], b[name] = whole.chunk(2, dim=1)

    return change


def edit(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Rank, Rank], None]:
    def changed(_: Rank, b: Rank) -> None:
        b[name] = change(b[name])

    return changed


def lose(name: str) -> Callable[[Rank, Rank], None]:
    def change(_: Rank, b: Rank) -> None:
        del b[name]

    return change


# of SMALL at T = 2 a rank holds 16 q rows, 8 of k, 8 of v; 12 of gate, 12 of up
FOUND_BY_ALL: Mapping[str, tuple[str, tuple[int, ...], Callable[[Path], None]]] = {
    "rows of two ranks swapped": (QKV, (0,), both(swap(QKV, slice(3, 4)))),
    "k of two ranks swapped": (QKV, (1,), both(swap(QKV, slice(16, 24)))),
    "k and v swapped": (QKV, (1,), both(reorder(QKV, (0, 16), (24, 32), (16, 24)))),
    "gate and up swapped": (GATE_UP, (1,), both(reorder(GATE_UP, (12, 24), (0, 12)))),
    "gate and up interleaved": (GATE_UP, (1,), both(reorder(GATE_UP, (0, 6), (12, 18), (6, 12), (18, 24)))),
    "columns off by one": (O_PROJ, (0, 1), both(off_by_one(O_PROJ))),
    "columns of two ranks swapped": (DOWN, (0, 1), both(swap(DOWN))),
    "a partial that is nothing": (DOWN, (0, 1), both(edit(DOWN, torch.zeros_like))),
    "a partial that is missing": (O_PROJ, (0, 1), both(lose(O_PROJ))),
    "a rank that is missing": (O_PROJ, (0, 1), lambda out: path_of(out, 1).unlink()),
    "a rank's qkv that is missing": (QKV, (1,), both(lose(QKV))),
    "a bias that is missing": (QKV, (1,), both(lose(QKV.replace("weight", "bias")))),
    "a row too few": (QKV, (1,), both(edit(QKV, lambda w: w[:-1]))),
    "a column too few": (DOWN, (0, 1), both(edit(DOWN, lambda w: w[:, 1:]))),
    "another dtype": (GATE_UP, (1,), both(edit(GATE_UP, lambda w: w.half()))),
    "three dimensions": (O_PROJ, (0, 1), both(edit(O_PROJ, lambda w: w[None]))),
}


@pytest.mark.parametrize("name", FOUND_BY_ALL)
def test_damage_is_found_by_each_alone(tmp_path: Path, name: str) -> None:
    """By the weight_loader, by probe and by numeric; and of what is not damaged nothing is said."""
    tensor, ranks, damage = FOUND_BY_ALL[name]
    out = cut(tmp_path, 2)
    damage(out)
    report = verify(out)
    assert report.verdict == "not_equal"
    found = by_name(report)
    built, probed, summed = verdicts(found[tensor, ranks])
    assert built == "fail"
    assert (probed, summed) == ("fail", "fail")
    if "missing" not in name:
        whole = {key for key, check in found.items() if "fail" not in verdicts(check)}
        assert len(whole) >= len(found) - 2
    Page(verify_html(report))
    Console(file=StringIO()).print(verify_table(report))


def test_what_cannot_be_this_output_at_all_fails_without_a_crash(tmp_path: Path) -> None:
    """Three files of four without a manifest; the source of another model; no rank of the manifest's."""
    out = cut(tmp_path, 4)
    write_checkpoint(tmp_path / "other", replace(SMALL, num_attention_heads=8, intermediate_size=12, bias=False))
    for source in (tmp_path / "other", tmp_path / "in"):
        report = verify(out, source=source)
        seen = {check.probe.verdict for check in report.projections}
        assert seen == ({"pass"} if source.name == "in" else {"fail"})
        Page(verify_html(report))
    path_of(out, 3).unlink()
    (out / "fusecheck.json").unlink()
    report = verify(out, source=tmp_path / "in")
    assert {check.built for check in report.projections} == {"fail"}
    assert "cannot be divided by tp_size: found 4 / 3" in report.projections[0].built_reason
    Page(verify_html(report))


@pytest.mark.parametrize("shape", [(), (4,), (1, 4, 4)])
def test_scales_of_any_shape_are_read_without_a_crash(tmp_path: Path, shape: tuple[int, ...]) -> None:
    checkpoint("fp8-square", "qwen3", layers=1).write(tmp_path / "in")
    fuse(tmp_path / "in", tmp_path / "out", target=TARGET, tp=1)
    held = load_file(path_of(tmp_path / "out", 0))
    held[f"{QKV}_scale_inv"] = torch.ones(shape)
    held[O_PROJ] = torch.ones(shape).to(torch.float8_e4m3fn)
    save_file(held, path_of(tmp_path / "out", 0), {"format": "pt"})
    found = by_name(verify(tmp_path / "out"))
    assert [verdicts(found[name, (0,)]) for name in (QKV, O_PROJ)] == [("fail", "fail", "fail")] * 2
    assert verdicts(found[DOWN, (0,)]) == ("pass", "pass", "pass")


def test_a_failure_names_its_rank(tmp_path: Path) -> None:
    out = cut(tmp_path, 2)
    both(edit(O_PROJ, lambda w: w.index_fill(1, torch.tensor([5]), 1.0)))(out)
    check = by_name(verify(out))[O_PROJ, (0, 1)]
    assert check.built_reason.startswith("rank 1, weight: ")
    assert check.probe.reason.startswith("rank 1: ")
    assert check.probe.first_difference == Place(0, "rank 1", 16 + 5)
    both(swap(QKV, slice(19, 20)))(out)
    assert by_name(verify(out))[QKV, (0,)].probe.first_difference == Place(19, "self_attn.k_proj", 0)


def test_a_bias_in_another_order_is_found(tmp_path: Path) -> None:
    """probe knows no bias; numeric does."""
    name = QKV.replace("weight", "bias")
    out = cut(tmp_path, 2)
    both(edit(name, lambda b: b.flip(0)))(out)
    assert verdicts(by_name(verify(out))[QKV, (1,)]) == ("fail", "pass", "fail")


def test_the_bias_of_a_row_parallel_linear_is_added_once(tmp_path: Path) -> None:
    """It is whole on every rank; the weight_loader tells that one is wrong, the sum only where it is rank 0's."""
    made = checkpoint("plain", "llama", layers=1)
    made.config["attention_bias"] = True
    for part, rows in (("q", 64), ("k", 32), ("v", 32), ("o", 64)):
        bias = torch.randn(rows, generator=torch.Generator().manual_seed(rows)).bfloat16()
        made.tensors[f"{LAYER}self_attn.{part}_proj.bias"] = ("BF16", (rows,), bias.view(torch.uint8).numpy().tobytes())
    made.write(tmp_path / "in")
    fuse(tmp_path / "in", tmp_path / "out", target=TARGET, tp=2)
    assert verify(tmp_path / "out").proved == ("exact", "probe", "numeric")
    name = O_PROJ.replace("weight", "bias")
    both(edit(name, torch.zeros_like))(tmp_path / "out")
    assert verdicts(by_name(verify(tmp_path / "out"))[O_PROJ, (0, 1)]) == ("fail", "pass", "pass")
    both(swap(name))(tmp_path / "out")
    assert verdicts(by_name(verify(tmp_path / "out"))[O_PROJ, (0, 1)]) == ("fail", "pass", "fail")


def test_a_key_head_of_another_rank_is_found(tmp_path: Path) -> None:
    """Of 2 heads on 4 ranks, r % 2 instead of r // 2: as if kv heads were dealt out."""
    out = cut(tmp_path, 4)
    both(swap(QKV, slice(8, 24)))(out)  # ranks 0 and 1 share a head: no damage
    assert {verdicts(check) for check in verify(out).projections} == {("pass", "pass", "pass")}
    held = {rank: load_file(path_of(out, rank)) for rank in (1, 2)}
    swap(QKV, slice(8, 24))(held[1], held[2])
    for rank, tensors in held.items():
        save_file(tensors, path_of(out, rank), {"format": "pt"})
    found = by_name(verify(out))
    assert [verdicts(found[QKV, (rank,)]) for rank in (1, 2)] == [("fail", "fail", "fail")] * 2
    assert [verdicts(found[QKV, (rank,)]) for rank in (0, 3)] == [("pass", "pass", "pass")] * 2


EXPERTS: Mapping[str, tuple[str, tuple[int, ...], Callable[[Rank, Rank], None]]] = {
    "two experts swapped": ("w13_weight[0]", (1,), edit(f"{ROUTED}w13_weight", lambda w: w[[2, 1, 0, 3, 4, 5]])),
    "gate and up of one expert": (
        "w13_weight[5]",
        (1,),
        edit(f"{ROUTED}w13_weight", lambda w: torch.cat([w[:5], w[5:].roll(16, dims=1)])),
    ),
    "columns of one expert": ("w2_weight[5]", (0, 1), swap(f"{ROUTED}w2_weight", slice(5, 6))),
    "an expert too few": ("w2_weight[5]", (0, 1), edit(f"{ROUTED}w2_weight", lambda w: w[:5])),
}


@pytest.mark.parametrize("kind", ["plain", "fp8-square"])
@pytest.mark.parametrize("name", EXPERTS)
def test_damage_of_experts_is_found(tmp_path: Path, name: str, kind: str) -> None:
    tensor, ranks, change = EXPERTS[name]
    checkpoint(kind, "qwen3_moe", layers=1).write(tmp_path / "in")
    fuse(tmp_path / "in", tmp_path / "out", target=TARGET, tp=2)
    both(change)(tmp_path / "out")
    found = by_name(verify(tmp_path / "out"))
    assert verdicts(found[f"{ROUTED}{tensor}", ranks]) == ("fail", "fail", "fail")
    assert verdicts(found[QKV, (1,)]) == ("pass", "pass", "pass")


@pytest.mark.parametrize(("module", "ranks"), [(QKV, (1,)), (DOWN, (0, 1))])
def test_damage_of_scales_is_found(tmp_path: Path, module: str, ranks: tuple[int, ...]) -> None:
    """The weight_loader is asked for weights and biases alone: here it is the device that tells."""
    checkpoint("fp8-square", "qwen3", layers=1).write(tmp_path / "in")
    fuse(tmp_path / "in", tmp_path / "out", target=TARGET, tp=2)
    both(edit(f"{module}_scale_inv", lambda scale: scale.flip(0)))(tmp_path / "out")
    assert verdicts(by_name(verify(tmp_path / "out"))[module, ranks]) == ("pass", "fail", "fail")


# --------------------------------------------------------------------------------------------------------- the bound


def pieces_of(weight: torch.Tensor, size: int, bias: torch.Tensor | None) -> list[Piece]:
    width = weight.shape[1] // size
    made = []
    for rank in range(size):
        share = weight[:, rank * width : (rank + 1) * width]
        own = (bias, (bias,)) if bias is not None and not rank else (None, None)
        made.append(Piece(rank, rank * width, Projection("o", share.clone(), ((f"rank {rank}", share),), *own)))
    return made


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sound_sum_never_alarms_and_one_without_a_partial_does(dtype: torch.dtype) -> None:
    worst, missed, told = 0.0, 0, 0
    for number in range(75):
        rng = seeded(f"{dtype} {number}")
        size = rng.choice((1, 2, 3, 4, 8, 16))
        rows, columns = rng.choice((1, 5, 33)), size * rng.choice((1, 2, 7, 32, 65))
        weight = draw(rng, (rows, columns), dtype)
        bias = draw(rng, (rows,), dtype) if rng.random() < 0.3 else None
        pieces = pieces_of(weight, size, bias)
        result = numeric_sum(weight, bias, pieces, CPU, number, batches=(1, 3))
        assert result.verdict != "fail", (number, result)
        assert probe_ranks(pieces, CPU).verdict != "fail"
        worst = max(worst, result.worst)
        if size == 1:
            same = numeric(
                Projection("o", weight, (("o", weight),), *pieces_of_bias(bias)), CPU, number, batches=(1, 3)
            )
            assert (same.worst, same.compared, same.verdict) == (result.worst, result.compared, result.verdict)
        lost = pieces[-1].projection
        torch.nn.init.zeros_(lost.fused)
        if result.verdict == "pass" and lost.parts[0][1].isfinite().all() and lost.parts[0][1].abs().max() > 0:
            told += 1
            missed += numeric_sum(weight, bias, pieces, CPU, number, batches=(1, 3)).verdict != "fail"
    print(f"\n{dtype}: error / bound {worst:.3f}, {missed} of {told} lost partials missed")  # noqa: T201
    assert told > 30
    assert missed * 4 < told  # where one scale of many drowns a partial, it is below the bound


def pieces_of_bias(bias: torch.Tensor | None) -> tuple[torch.Tensor | None, tuple[torch.Tensor, ...] | None]:
    return (bias, (bias,)) if bias is not None else (None, None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [2, 3, 4, 8, 16])
def test_one_lost_partial_of_a_model_is_found(dtype: torch.dtype, size: int) -> None:
    weight = (torch.randn(64, 240 * size // 4, generator=torch.Generator().manual_seed(size)) * 0.02).to(dtype)
    for rank in range(size):
        pieces = pieces_of(weight, size, None)
        torch.nn.init.zeros_(pieces[rank].projection.fused)
        result = numeric_sum(weight, None, pieces, CPU, 0)
        assert result.verdict == "fail"
        assert result.first_difference is not None
        assert result.first_difference.part == f"sum of {size} ranks"
        twice = pieces_of(weight, size, None)
        twice[rank].projection.fused.mul_(2)
        assert numeric_sum(weight, None, twice, CPU, 0).verdict == "fail"
    gap = pieces_of(weight, size, None)[1:]
    assert numeric_sum(weight, None, gap, CPU, 0).verdict == "fail"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_partials_may_be_added_in_any_order(dtype: torch.dtype) -> None:
    """Rings and trees too: whatever is added to whatever next, in the output's dtype."""
    arithmetic = Arithmetic.of(dtype, "cpu", 64, bias=False)
    worst = 0.0
    for number in range(300):
        rng = seeded(f"order {dtype} {number}")
        partials = list(draw(rng, (rng.choice((2, 3, 5, 8, 16)), 40), dtype))
        partials = [torch.where(one.isfinite(), one, 0).to(dtype) for one in partials]
        refs = [one.double() for one in partials]
        limit, comparable = arithmetic.bound_of_sum(refs, [torch.zeros_like(ref) for ref in refs])
        wanted = torch.stack(refs).sum(dim=0)
        while len(partials) > 1:
            rng.shuffle(partials)
            partials.append(partials.pop() + partials.pop())
        error = (partials[0].double() - wanted).abs()[comparable]
        assert (error <= limit[comparable]).all()
        worst = max([worst, *(error / limit[comparable]).tolist()])
    assert worst > 0.2  # it is no bound for anything


def test_the_bound_of_one_is_its_own() -> None:
    arithmetic = Arithmetic.of(torch.bfloat16, "cpu", 64, bias=False)
    ref, limit = torch.randn(9, dtype=torch.float64), torch.rand(9, dtype=torch.float64)
    found, comparable = arithmetic.bound_of_sum([ref], [limit])
    assert torch.equal(found, limit)
    assert comparable.all()
    several, _ = arithmetic.bound_of_sum([ref, ref], [limit, limit])
    assert (several > 2 * limit + 2.0**-8 * 2 * ref.abs()).all()
    beyond = torch.full((1,), 2e38, dtype=torch.float64)
    assert not arithmetic.bound_of_sum([beyond, -beyond], [beyond * 0, beyond * 0])[1].any()


# --------------------------------------------------------------------------------------------------------- reporting


def test_ranks_alike_are_one_row_and_others_stay_apart(tmp_path: Path) -> None:
    out = cut(tmp_path, 4)
    report = verify(out)
    assert len(report.projections) == 10
    rows = fold(report.projections)
    assert [(row.tensor, row.ranks) for row in rows] == [(name, (0, 1, 2, 3)) for name in (QKV, O_PROJ, GATE_UP, DOWN)]
    qkv = [check for check in report.projections if check.tensor == QKV]
    assert rows[0].probe.total == sum(check.probe.total for check in qkv)
    assert rows[0].numeric.worst == max(check.numeric.worst for check in qkv)
    assert sum(count for _, count in rows[0].numeric.ulps) == rows[0].numeric.compared
    both(edit(QKV, lambda w: w.flip(0)))(out)
    apart = [row for row in fold(verify(out).projections) if row.tensor == QKV]
    assert [row.ranks for row in apart] == [(0, 2, 3), (1,)]
    page = verify_html(verify(out))
    assert "ranks 0,2,3 model.layers.0.self_attn.qkv_proj.weight" in Page(page).text()
    assert "sum of the ranks against the whole product" in page


def test_the_command_shows_ranks(tmp_path: Path) -> None:
    out = cut(tmp_path, 2)
    run = [sys.executable, "-m", "fusecheck", "verify", str(out), "-v", "--report", str(tmp_path / "page.html")]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    rows = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "0 qkv_proj 0,1 16 -> 32 q 0, k 16, v 24 pass pass pass" in rows
    assert "0 o_proj 0,1 32 -> 16 16 columns each pass pass pass" in rows
    assert any(row.startswith(f"numeric ranks 0,1 {O_PROJ}: sum against whole product") for row in rows)
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "so does the sum of what all ranks make" in Page(page).text()
    document = json.loads(subprocess.run([*run[:-2], "--json"], capture_output=True, text=True, check=True).stdout)
    assert [(each["ranks"], each["axis"]) for each in document["projections"]] == [
        ([0], "rows"),
        ([1], "rows"),
        ([0, 1], "columns"),
    ] * 2
    assert document["proved"] == ["exact", "probe", "numeric"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sound_sum_never_alarms_on_a_gpu(dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    for number in range(100):
        rng = seeded(f"gpu {dtype} {number}")
        size = rng.choice((1, 2, 4, 8, 16))
        weight = draw(rng, (rng.choice((1, 33, 256)), size * rng.choice((1, 8, 65, 128))), dtype)
        assert numeric_sum(weight, None, pieces_of(weight, size, None), device, number).verdict != "fail"
    weight = (torch.randn(64, 1024, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype)
    pieces = pieces_of(weight, 4, None)
    assert numeric_sum(weight, None, pieces, device, 0).verdict == probe_ranks(pieces, device).verdict == "pass"
    torch.nn.init.zeros_(pieces[2].projection.fused)
    assert numeric_sum(weight, None, pieces, device, 0).verdict == probe_ranks(pieces, device).verdict == "fail"
