"""Two laws: what is equal never alarms, whatever its bits, dtype, shape and scale; what is not equal always does."""

from __future__ import annotations

import math
import os
import random
import warnings
from types import FunctionType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fusecheck import numeric as module
from fusecheck.bounds import Arithmetic, same_bits, ulp_distance
from fusecheck.device import describe, pick_device, pinned
from fusecheck.errors import SystemFailure, UsageError
from fusecheck.numeric import Projection, numeric, probe
from fusecheck.verdicts import Place

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
DRAWS = int(os.environ.get("FUSECHECK_DRAWS", "1200"))
"""How many random projections each law is tried on; 10,000 before a release, under each ONEDNN_MAX_CPU_ISA."""


def seeded(seed: int | str) -> random.Random:
    return random.Random(seed)  # noqa: S311  # draws, not secrets


def any_bits(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """NaN, inf, subnormal, -0.0 and numbers next to overflow among them."""
    raw = bytearray(rng.randbytes(torch.Size(shape).numel() * dtype.itemsize))
    return torch.frombuffer(raw, dtype=dtype).view(shape)


def finite_bits(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    weight = any_bits(rng, shape, dtype)
    return torch.where(weight.isfinite(), weight, torch.ones((), dtype=dtype))


def draw(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Weights over the dtype's whole range: bits, one scale, a scale per row or per element, from subnormal up."""
    kind = rng.choice(("bits", "finite", "one", "row", "element", "sparse"))
    if kind == "bits":
        return any_bits(rng, shape, dtype)
    if kind == "finite":
        return finite_bits(rng, shape, dtype)
    info = torch.finfo(dtype)
    low, high = math.log2(info.tiny * info.eps), math.log2(info.max)
    if kind == "one" and rng.random() < 0.5:
        low, high = -8.0, 0.0  # what a model has
    scales = {"row": (shape[0], *[1] * (len(shape) - 1)), "element": shape}.get(kind, (1,))
    generator = torch.Generator().manual_seed(rng.randrange(2**32))
    scale = torch.rand(scales, generator=generator, dtype=torch.float64) * (high - low) + low
    weight = torch.randn(shape, generator=generator, dtype=torch.float64) * scale.exp2()
    if kind == "sparse":
        weight *= torch.rand(shape, generator=generator) < 0.1
    return weight.clamp(-info.max, info.max).to(dtype)


def projection(rng: random.Random, dtype: torch.dtype) -> Projection:
    columns = rng.choice((1, 2, 3, 7, 31, 64, 100, 257, 512, 1024))
    sizes = [rng.choice((1, 2, 5, 16, 33, 96)) for _ in range(rng.choice((2, 3)))]
    parts = tuple((name, draw(rng, (n, columns), dtype)) for name, n in zip("qkv", sizes, strict=False))
    fused = torch.cat([part for _, part in parts])
    if rng.random() < 0.5:
        return Projection("drawn", fused, parts)
    biases = tuple(draw(rng, (n,), dtype) for n in sizes)
    return Projection("drawn", fused, parts, torch.cat(biases), biases)


def model_like(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Projection:
    """Two key/value heads of 32 rows, as a model has them."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (("q", 128), ("k", 64), ("v", 64))
    parts = tuple((name, (torch.randn(n, 256, generator=generator) * 0.03).to(dtype)) for name, n in sizes)
    return Projection("qkv_proj", torch.cat([part for _, part in parts]), parts)


def changed(p: Projection, fused: Tensor) -> Projection:
    return Projection(p.name, fused, p.parts, p.fused_bias, p.part_biases)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_equal_never_alarms(dtype: torch.dtype) -> None:
    worst, ran = 0.0, 0
    for number in range(DRAWS // len(DTYPES)):
        rng = seeded(f"{dtype} {number}")
        p = projection(rng, dtype)
        batches = tuple(rng.choice((1, 2, 3, 5, 16, 17, 40)) for _ in range(2))
        result, probed = numeric(p, CPU, number, batches=batches), probe(p, CPU)
        assert result.verdict != "fail", (number, result)
        assert probed.verdict != "fail", (number, probed)
        assert probed.compared + probed.non_finite == probed.total == p.fused.numel()
        assert sum(count for _, count in result.ulps) == result.compared <= result.total
        worst, ran = max(worst, result.worst), ran + (result.verdict == "pass")
    print(f"\n{dtype}: {ran} of {DRAWS // len(DTYPES)} compared, largest error / bound {worst:.3f}")  # noqa: T201
    assert ran > DRAWS // len(DTYPES) * 0.7  # the bound is not kept by comparing nothing
    assert worst <= 1


def swap_rows(w: Tensor) -> Tensor:
    return torch.cat([w[1:2], w[:1], w[2:]])


def swap_heads(w: Tensor) -> Tensor:
    return torch.cat([w[32:64], w[:32], w[64:]])


def swap_k_and_v(w: Tensor) -> Tensor:
    return torch.cat([w[:128], w[192:], w[128:192]])


def shift_one_row(w: Tensor) -> Tensor:
    return w.roll(1, dims=0)


def interleave(w: Tensor) -> Tensor:
    """Megatron's order: per key/value head its queries, its key, its value."""
    return torch.cat([w[:64], w[128:160], w[192:224], w[64:128], w[160:192], w[224:]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("disorder", [swap_rows, swap_heads, swap_k_and_v, shift_one_row, interleave])
def test_rows_in_another_order_fail(disorder: FunctionType, dtype: torch.dtype) -> None:
    p = model_like(dtype)
    broken = changed(p, disorder(p.fused))
    result, probed = numeric(broken, CPU, 0), probe(broken, CPU)
    print(f"\n{disorder.__name__} {dtype}: error / bound {result.worst:.0f}")  # noqa: T201
    assert result.verdict == probed.verdict == "fail"
    assert result.worst > 10
    first = int((p.fused != broken.fused).any(dim=1).to(torch.uint8).argmax())
    part = "q" if first < 128 else "k"
    assert result.first_difference == Place(first, part)
    assert probed.first_difference is not None
    assert (probed.first_difference.row, probed.first_difference.part) == (first, part)


def test_a_bias_in_another_order_fails() -> None:
    p = model_like()
    biases = tuple(torch.arange(float(len(part))).bfloat16() for _, part in p.parts)
    fused = torch.cat(biases)
    assert numeric(Projection("b", p.fused, p.parts, fused, biases), CPU, 0).verdict == "pass"
    assert numeric(Projection("b", p.fused, p.parts, fused.roll(1), biases), CPU, 0).verdict == "fail"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_probe_catches_every_swap_of_two_rows(dtype: torch.dtype) -> None:
    weight = finite_bits(seeded(3), (9, 40), dtype)
    parts = (("gate", weight[:4]), ("up", weight[4:]))
    for i in range(9):
        for j in range(i):
            order = list(range(9))
            order[i], order[j] = j, i
            result = probe(Projection("p", weight[order], parts), CPU)
            assert result.verdict == "fail"
            assert result.first_difference is not None
            assert result.first_difference.row == j
            assert result.first_difference.part == ("gate" if j < 4 else "up")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(deadline=None, max_examples=150)
@given(seed=st.integers(0, 2**32), bit=st.integers(0, 2**20))
def test_the_probe_catches_one_flipped_bit(dtype: torch.dtype, seed: int, bit: int) -> None:
    """In any element of a finite weight, to inf or NaN too. Beyond it: -0.0, and what the CPU flushes."""
    rng = seeded(seed)
    weight = finite_bits(rng, (rng.randrange(2, 40), rng.randrange(1, 300)), dtype)
    fused = weight.clone()
    bit %= weight.numel() * dtype.itemsize * 8
    fused.view(-1).view(torch.uint8)[bit // 8] ^= 1 << bit % 8
    row, column = divmod(bit // 8 // dtype.itemsize, weight.shape[1])
    old, new = float(weight[row, column]), float(fused[row, column])
    result = probe(Projection("p", fused, (("gate", weight[:1]), ("up", weight[1:]))), CPU)
    subnormal = 0 < abs(old) < 2**-126 and 0 < abs(new) < 2**-126 and dtype == torch.bfloat16
    if old == new or subnormal:
        assert result.first_difference in (None, Place(row, "up" if row else "gate", column))
    elif new - new == 0:
        assert result.first_difference == Place(row, "up" if row else "gate", column)
    else:  # inf or NaN spoils the whole row
        assert result.first_difference == Place(row, "up" if row else "gate", 0)


def test_flushed_subnormals_are_counted_not_failed() -> None:
    weight = torch.full((64, 64), 2.0**-130, dtype=torch.bfloat16)
    result = probe(Projection("p", weight, (("gate", weight[:32]), ("up", weight[32:]))), CPU)
    assert result.flushed in {0, weight.numel()}  # as the CPU is
    assert result.verdict == ("not run" if result.flushed else "pass")
    fused = weight.clone()
    fused[40, 7] = 0  # not the CPU's doing: the fused tensor itself holds a zero
    broken = probe(Projection("p", fused, (("gate", weight[:32]), ("up", weight[32:]))), CPU)
    assert broken.first_difference == Place(40, "up", 7)


def test_non_finite_rows_are_left_out_and_counted() -> None:
    p = model_like()
    p.parts[1][1][3, 5] = float("nan")
    p.parts[2][1][0, 0] = float("inf")
    both = changed(p, torch.cat([part for _, part in p.parts]))
    result = probe(both, CPU)
    assert (result.verdict, result.non_finite) == ("pass", 512)
    assert result.compared == p.fused.numel() - 512
    assert numeric(both, CPU, 0).compared == 17 * 254
    assert probe(p, CPU).first_difference == Place(131, "k", 5)  # non-finite in the part only


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_comparable_is_not_run(dtype: torch.dtype, value: float) -> None:
    part = torch.full((4, 8), value, dtype=dtype)
    p = Projection("p", torch.cat([part, part]), (("gate", part), ("up", part)))
    assert probe(p, CPU).verdict == numeric(p, CPU, 0).verdict == "not run"
    assert probe(p, CPU).non_finite == 64
    assert numeric(p, CPU, 0).compared == 0
    assert not numeric(p, CPU, 0).bitwise_equal


@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (2, 2, 2), (3,)])
def test_no_gemm_is_not_run(shape: tuple[int, ...]) -> None:
    part = torch.zeros(shape)
    p = Projection("p", torch.cat([part, part]), (("gate", part), ("up", part)))
    assert probe(p, CPU).verdict == numeric(p, CPU, 0).verdict == "not run"


def test_a_dtype_without_gemm_is_not_run() -> None:
    part = torch.zeros(4, 4, dtype=torch.float8_e4m3fn)
    result = probe(Projection("p", part, (("gate", part),)), CPU)
    assert result.verdict == "not run"
    assert "float8" in result.reason


ZERO = torch.zeros(4, 3)


@pytest.mark.parametrize(
    ("p", "words"),
    [
        (Projection("p", ZERO, (("gate", ZERO[:2]), ("up", ZERO[:1]))), "shapes"),
        (Projection("p", ZERO, (("gate", torch.zeros(4, 2)),)), "shapes"),
        (Projection("p", ZERO, (("gate", torch.zeros(())),)), "shapes"),
        (Projection("p", ZERO, ()), "shapes"),
        (Projection("p", ZERO, (("gate", ZERO.half()),)), "dtypes differ"),
        (Projection("p", ZERO, (("gate", ZERO),), torch.zeros(4)), "biases"),
        (Projection("p", ZERO, (("gate", ZERO),), None, (torch.zeros(4),)), "biases"),
        (Projection("p", ZERO, (("gate", ZERO),), torch.zeros(4), (torch.zeros(3),)), "biases"),
        (Projection("p", ZERO, (("gate", ZERO),), torch.zeros(4), (torch.zeros(4).half(),)), "dtypes differ"),
    ],
)
def test_what_contradicts_itself_fails(p: Projection, words: str) -> None:
    for result in (probe(p, CPU), numeric(p, CPU, 0)):
        assert result.verdict == "fail"
        assert words in result.reason


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_broken_kernel_fails(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Teeth: outputs off by one part in 64, or one term of the sum lost; the float64 reference is left whole."""

    def scaled(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        out = F.linear(x, w, b)
        return out if len(x) == 17 else (out.double() * (1 + 2**-6)).to(dtype)  # 17 rows: the reference

    def short(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return F.linear(x, w, b) if len(x) == 17 else F.linear(x[:, 1:], w[:, 1:], b)

    p = model_like(dtype)
    assert numeric(p, CPU, 0).verdict == "pass"
    for kernel in (scaled, short):
        monkeypatch.setattr(module, "F", SimpleNamespace(linear=kernel))
        result = numeric(p, CPU, 0)
        print(f"\n{kernel.__name__} {dtype}: error / bound {result.worst:.1f}")  # noqa: T201
        assert result.verdict == "fail"
        assert (
            result.bitwise_equal or dtype == torch.float64
        )  # wrong in the same way on both sides: only the reference tells
        assert probe(p, CPU).verdict == "fail"


def test_a_kernel_that_varies_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(10**6))

    def wandering(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        out = F.linear(x, w, b)
        return out if next(calls) % 2 or len(x) != 1 else torch.nextafter(out, out + 1)

    p = model_like(torch.float32)
    assert numeric(p, CPU, 0).deterministic
    monkeypatch.setattr(module, "F", SimpleNamespace(linear=wandering))
    result = numeric(p, CPU, 0, batches=(1,))
    assert not result.deterministic or not result.bitwise_equal
    assert result.verdict == "pass"  # a ULP is reported, not judged


def test_the_same_seed_gives_the_same_result() -> None:
    p = model_like()
    assert numeric(p, CPU, 7) == numeric(p, CPU, 7)
    assert numeric(p, CPU, 7).worst != numeric(p, CPU, 8).worst


def test_the_bf16_kernel_is_named() -> None:
    notes = " ".join(numeric(model_like(), CPU, 0).notes)
    assert "native" in notes or "the bf16 kernel was not tested" in notes
    assert "bf16" not in " ".join(numeric(model_like(torch.float32), CPU, 0).notes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ulp_distance_counts_numbers(dtype: torch.dtype) -> None:
    one, infinity = torch.ones(1, dtype=dtype), torch.full((1,), float("inf"), dtype=dtype)
    following = torch.nextafter(one, infinity)
    tiniest = torch.nextafter(torch.zeros_like(one), infinity)
    assert ulp_distance(one, one).item() == 0
    assert ulp_distance(one, following).item() == ulp_distance(following, one).item() == 1
    assert ulp_distance(-one, -following).item() == 1
    assert ulp_distance(torch.zeros_like(one), -torch.zeros_like(one)).item() == 0
    assert ulp_distance(tiniest, -tiniest).item() == 2
    assert ulp_distance(infinity, -infinity).item() >= ulp_distance(one, -one).item() > 2**13


def test_ulp_distance_saturates() -> None:
    largest = torch.full((1,), torch.finfo(torch.float64).max, dtype=torch.float64)
    assert ulp_distance(largest, -largest).item() == 2**63 - 1


def test_same_bits() -> None:
    nan = torch.tensor([float("nan")])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.zeros(1), -torch.zeros(1))
    assert not same_bits(torch.zeros(1), torch.zeros(1).int())
    assert not same_bits(torch.zeros(1), torch.zeros(1, 1))
    assert same_bits(torch.arange(6.0).view(2, 3).t(), torch.arange(6.0).view(2, 3).t().contiguous())


def test_the_bound_grows_with_what_is_known_to_err() -> None:
    cpu = Arithmetic.of(torch.bfloat16, "cpu", 1024, bias=False)
    cuda = Arithmetic.of(torch.bfloat16, "cuda", 1024, bias=True)
    assert (cpu.terms, cpu.unit, cpu.half_ulp, cpu.floor) == (1024, 2**-24, 2**-8 / 2 * 2, 2**-126)
    assert (cuda.terms, cuda.unit) == (1024 + 1 + 256 + 8, 2**-23)
    assert Arithmetic.of(torch.float32, "cuda", 1024, bias=False).unit == 2**-24
    assert Arithmetic.of(torch.float16, "cpu", 1, bias=False).floor == 2**-25
    assert Arithmetic.of(torch.float64, "cpu", 1, bias=False).slack == 2
    ref, size, nothing = torch.tensor([1.0, 1e38, 1e39], dtype=torch.float64), torch.ones(3).double(), torch.zeros(3)
    limit, comparable = cpu.bound(ref, size, nothing)
    assert comparable.tolist() == [True, True, False]
    assert limit[0] > 2**-9


@pytest.mark.parametrize("requested", ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:01", "CUDA", "cuda:0\n", "mps"])
def test_nonsense_is_no_device(requested: str) -> None:
    with pytest.raises(UsageError):
        pick_device(requested)


def test_a_device_that_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto") == pick_device("cpu") == CPU
    for requested in ("cuda", "cuda:0"):
        with pytest.raises(SystemFailure, match="0 CUDA devices"):
            pick_device(requested)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("auto") == pick_device("cuda") == torch.device("cuda", 0)
    assert pick_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(SystemFailure, match="2 CUDA devices"):
        pick_device("cuda:2")
    assert pick_device("cpu") == CPU


def test_a_driver_that_warns_is_no_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    def old_driver() -> bool:
        warnings.warn("driver too old", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", old_driver)
    assert pick_device("auto") == CPU


def test_describe_says_what_is_pinned() -> None:
    assert describe(CPU).kind == "cpu"
    assert "TF32" in describe(CPU).note


def settings_now() -> tuple[object, ...]:
    matmul = torch.backends.cuda.matmul
    reductions = matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction
    flushes = bool((torch.full((1,), 2.0**-140) * 1).item() == 0)
    return torch.get_float32_matmul_precision(), reductions, matmul.allow_fp16_accumulation, flushes


@pytest.mark.parametrize("flush", [False, True])
def test_settings_are_pinned_and_put_back(flush: bool) -> None:  # noqa: FBT001
    before = settings_now()
    try:
        torch.set_float32_matmul_precision("medium")
        torch.set_flush_denormal(flush)
        chosen = settings_now()
        with pinned(CPU):
            assert settings_now() == ("highest", (False, False), False, False)
        assert settings_now() == chosen
        weight = torch.full((2, 8), 2.0**-140)
        assert probe(Projection("p", weight, (("gate", weight),)), CPU).verdict == "pass"
        with torch.autocast("cpu"):
            assert probe(model_like(torch.float32), CPU).verdict == "pass"
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.set_flush_denormal(False)
    assert settings_now() == before


def test_a_failing_device_is_an_environment_failure() -> None:
    with pytest.raises(SystemFailure, match="the device failed: CUDA out of memory"), pinned(CPU):
        raise torch.OutOfMemoryError("CUDA out of memory\nTried to allocate")
    with pytest.raises(RuntimeError, match="a bug"), pinned(CPU):
        raise RuntimeError("a bug")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_equal_never_alarms_on_a_gpu(dtype: torch.dtype) -> None:
    device = pick_device("cuda")
    for number in range(DRAWS // len(DTYPES)):
        p = projection(seeded(f"{dtype} {number}"), dtype)
        for result in (numeric(p, device, number), probe(p, device)):
            assert result.verdict != "fail", (number, result)
    broken = changed(model_like(dtype), swap_rows(model_like(dtype).fused))
    assert numeric(broken, device, 0).verdict == probe(broken, device).verdict == "fail"
