"""The Linear family: a parameter is what its parts are, row by row, whatever the TP size and the order of loading."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fusecheck.errors import CheckpointError, FusecheckError, UsageError
from fusecheck.fused_linear import MergedColumnParallelLinear, QKVParallelLinear, build_fused
from fusecheck.linear import ColumnParallelLinear, LinearBase, ReplicatedLinear, RowParallelLinear

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
HIDDEN, HEAD, HEADS, KV_HEADS, INTERMEDIATE = 1024, 128, 16, 8, 3072  # Qwen3-0.6B


def load(layer: LinearBase, *arguments: object) -> Tensor:
    layer.weight.weight_loader(layer.weight, *arguments)
    return layer.weight


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_qkv_of_qwen3() -> None:
    layer = QKVParallelLinear(HIDDEN, HEAD, HEADS, KV_HEADS, dtype=torch.bfloat16)
    assert tuple(layer.weight.shape) == (4096, 1024)
    assert layer.bias is None
    for shard_id, rows, value in (("v", 1024, 3), ("q", 2048, 1), ("k", 1024, 2)):  # any order
        load(layer, torch.full((rows, HIDDEN), value, dtype=torch.bfloat16), shard_id)
    for value, start, stop in ((1, 0, 2048), (2, 2048, 3072), (3, 3072, 4096)):
        assert (layer.weight[start:stop] == value).all()


def test_gate_up_of_qwen3() -> None:
    layer = MergedColumnParallelLinear(HIDDEN, [INTERMEDIATE] * 2)
    assert tuple(layer.weight.shape) == (6144, 1024)
    for shard_id in (1, 0):
        load(layer, torch.full((INTERMEDIATE, HIDDEN), float(shard_id)), shard_id)
    assert (layer.weight[:3072] == 0).all()
    assert (layer.weight[3072:] == 1).all()


def test_one_qwen3_layer_in_order() -> None:
    layers: list[LinearBase] = [
        QKVParallelLinear(HIDDEN, HEAD, HEADS, KV_HEADS),
        RowParallelLinear(HEADS * HEAD, HIDDEN),
        MergedColumnParallelLinear(HIDDEN, [INTERMEDIATE] * 2),
        RowParallelLinear(INTERMEDIATE, HIDDEN),
    ]
    sizes = [(layer.input_size, layer.output_size) for layer in layers]
    assert sizes == [(1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024)]
    assert [tuple(reversed(layer.weight.shape)) for layer in layers] == sizes
    assert not any(layer.weight.requires_grad for layer in layers)


@pytest.mark.parametrize("bias", [False, True])
def test_one_merged_gemm_is_three_separate_ones(bias: bool) -> None:  # noqa: FBT001
    parts = {"q": normal(64, 32, seed=1), "k": normal(32, 32, seed=2), "v": normal(32, 32, seed=3)}
    biases = {name: normal(len(part), seed=9) for name, part in parts.items()}
    layer = QKVParallelLinear(32, 16, 4, 2, bias)
    for name, part in parts.items():
        load(layer, part, name)
        if layer.bias is not None:
            layer.bias.weight_loader(layer.bias, biases[name], name)
    x = normal(2, 5, 32, seed=4)
    out = torch.split(layer(x), [64, 32, 32], dim=-1)
    for got, name in zip(out, parts, strict=True):
        torch.testing.assert_close(got, F.linear(x, parts[name], biases[name] if bias else None))


def test_one_merged_gemm_is_two_separate_ones() -> None:
    gate, up, x = normal(48, 32, seed=1), normal(48, 32, seed=2), normal(7, 32, seed=3)
    layer = MergedColumnParallelLinear(32, [48, 48])
    load(layer, gate, 0)
    load(layer, up, 1)
    for got, part in zip(layer(x).chunk(2, dim=-1), (gate, up), strict=True):
        torch.testing.assert_close(got, F.linear(x, part))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_tensor_parallel_slices(tp_size: int, dtype: torch.dtype) -> None:
    q, k, v = (normal(rows, 8, seed=rows, dtype=dtype) for rows in (8 * 4, 2 * 4, 2 * 4))
    gate, up = normal(16, 8, seed=5, dtype=dtype), normal(16, 8, seed=6, dtype=dtype)
    wide = normal(6, 16, seed=7, dtype=dtype)
    for rank in range(tp_size):
        qkv = QKVParallelLinear(8, 4, 8, 2, tp_rank=rank, tp_size=tp_size, dtype=dtype)
        for name, part in (("q", q), ("k", k), ("v", v)):
            load(qkv, part, name)
        copies = max(1, tp_size // 2)  # of each of the two kv heads
        k_rank, v_rank = (t.repeat(1, 1).chunk(tp_size // copies)[rank // copies] for t in (k, v))
        assert torch.equal(qkv.weight, torch.cat([q.chunk(tp_size)[rank], k_rank, v_rank]))

        merged = MergedColumnParallelLinear(8, [16, 16], tp_rank=rank, tp_size=tp_size, dtype=dtype)
        load(merged, torch.cat([gate, up]))  # without a shard_id: a fused tensor
        assert torch.equal(merged.weight, torch.cat([gate.chunk(tp_size)[rank], up.chunk(tp_size)[rank]]))

        column = ColumnParallelLinear(8, 16, tp_rank=rank, tp_size=tp_size, dtype=dtype)
        assert torch.equal(load(column, gate), gate.chunk(tp_size)[rank])
        row = RowParallelLinear(16, 6, tp_rank=rank, tp_size=tp_size, dtype=dtype)
        assert torch.equal(load(row, wide), wide.chunk(tp_size, dim=1)[rank])
        whole = ReplicatedLinear(8, 16, tp_rank=rank, tp_size=tp_size, dtype=dtype)
        assert torch.equal(load(whole, gate), gate)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_row_parallel_ranks_add_up_to_the_layer(tp_size: int) -> None:
    weight, bias, x = normal(6, 16, seed=1), normal(6, seed=2), normal(3, 16, seed=3)
    total = torch.zeros(3, 6)
    for rank in range(tp_size):
        layer = RowParallelLinear(16, 6, bias=True, tp_rank=rank, tp_size=tp_size)
        load(layer, weight)
        if layer.bias is not None:
            layer.bias.weight_loader(layer.bias, bias)
            assert torch.equal(layer.bias, bias)
        total += layer(x.chunk(tp_size, dim=1)[rank])
    torch.testing.assert_close(total, F.linear(x, weight, bias))


def test_sliced_biases() -> None:
    bias = torch.arange(8.0)
    column = ColumnParallelLinear(4, 8, bias=True, tp_rank=1, tp_size=2)
    qkv = QKVParallelLinear(4, 2, 4, 2, bias=True, tp_rank=1, tp_size=2)
    assert column.bias is not None
    assert qkv.bias is not None
    column.bias.weight_loader(column.bias, bias)
    assert column.bias.tolist() == [4, 5, 6, 7]
    for name, part in (("q", bias), ("k", bias[:4] + 10), ("v", bias[:4] + 20)):
        qkv.bias.weight_loader(qkv.bias, part, name)
    assert qkv.bias.tolist() == [4, 5, 6, 7, 12, 13, 22, 23]


Refusal: TypeAlias = type[FusecheckError]
QKV = QKVParallelLinear(8, 4, 2, 1, dtype=torch.bfloat16)
GATE_UP = MergedColumnParallelLinear(8, [6, 6], dtype=torch.bfloat16)
ROW = RowParallelLinear(8, 4, tp_rank=1, tp_size=2, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("layer", "shape", "dtype", "shard_id", "error", "words"),
    [
        (QKV, (7, 8), torch.bfloat16, "q", CheckpointError, "found [7, 8], wanted [8, 8]"),
        (QKV, (8, 8), torch.bfloat16, "k", CheckpointError, "found [8, 8], wanted [4, 8]"),
        (QKV, (4, 9), torch.bfloat16, "v", CheckpointError, "found [4, 9], wanted [4, 8]"),
        (QKV, (4,), torch.bfloat16, "v", CheckpointError, "found [4], wanted [4, 8]"),
        (QKV, (), torch.bfloat16, "v", CheckpointError, "found [], wanted [4, 8]"),
        (QKV, (8, 8), torch.float16, "q", CheckpointError, "found torch.float16, wanted torch.bfloat16"),
        (QKV, (8, 8), torch.bfloat16, "o", UsageError, "found 'o', wanted ['q', 'k', 'v']"),
        (QKV, (8, 8), torch.bfloat16, 0, UsageError, "found 0, wanted ['q', 'k', 'v']"),
        (QKV, (15, 8), torch.bfloat16, None, CheckpointError, "found [15, 8], wanted [16, 8]"),
        (GATE_UP, (6, 8), torch.bfloat16, 2, UsageError, "found 2, wanted [0, 1]"),
        (GATE_UP, (6, 8), torch.bfloat16, -1, UsageError, "found -1, wanted [0, 1]"),
        (GATE_UP, (6, 8), torch.bfloat16, True, UsageError, "found True, wanted [0, 1]"),
        (GATE_UP, (6, 8), torch.bfloat16, "0", UsageError, "found '0', wanted [0, 1]"),
        (GATE_UP, (6, 8), torch.bfloat16, [0], UsageError, "found [0], wanted [0, 1]"),
        (GATE_UP, (5, 8), torch.bfloat16, 1, CheckpointError, "found [5, 8], wanted [6, 8]"),
        (GATE_UP, (6, 8), torch.float32, 1, CheckpointError, "found torch.float32, wanted torch.bfloat16"),
    ],
)
def test_a_wrong_part_is_refused_by_name(
    *, layer: LinearBase, shape: tuple[int, ...], dtype: torch.dtype, shard_id: object, error: Refusal, words: str
) -> None:
    before = layer.weight.clone()
    with pytest.raises(error) as caught:
        load(layer, torch.zeros(shape, dtype=dtype), shard_id)
    assert words in str(caught.value)
    assert type(layer).__name__ in str(caught.value)
    assert torch.equal(layer.weight.view(torch.int16), before.view(torch.int16))  # uninitialised: may hold NaN


def test_a_slice_already_cut_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"found \[4, 4\], wanted \[4, 8\]"):
        load(ROW, torch.zeros(4, 4, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("kind", "sizes", "tp_rank", "tp_size"),
    [
        (ColumnParallelLinear, (4, 6), 0, 4),
        (RowParallelLinear, (6, 4), 0, 4),
        (MergedColumnParallelLinear, (4, (8, 6)), 0, 4),
        (QKVParallelLinear, (8, 4, 6, 2), 0, 4),
        (QKVParallelLinear, (8, 4, 12, 8), 0, 3),
        (QKVParallelLinear, (8, 4, 6, 4), 0, 6),
        (LinearBase, (4, 4), 2, 2),
        (LinearBase, (4, 4), -1, 2),
        (LinearBase, (4, 4), 0, 0),
        (ColumnParallelLinear, (4, 4), 0, 0),
        (LinearBase, (4, -4), 0, 1),
    ],
)
def test_sizes_that_cannot_be_are_refused(
    kind: Callable[..., LinearBase], sizes: tuple[int, ...], tp_rank: int, tp_size: int
) -> None:
    with pytest.raises(UsageError):
        kind(*sizes, tp_rank=tp_rank, tp_size=tp_size)


def test_dtype_and_device_are_the_callers() -> None:
    layer = QKVParallelLinear(5120, 128, 64, 8, True, dtype=torch.float8_e4m3fn, device="meta")  # noqa: FBT003
    assert layer.weight.is_meta
    assert layer.weight.dtype == torch.float8_e4m3fn
    assert LinearBase(2, 2).weight.dtype == torch.get_default_dtype()


heads = st.integers(1, 4)


@given(heads, heads, st.integers(1, 5), st.integers(1, 9), st.sampled_from(DTYPES), st.integers(0, 2**32))
@settings(deadline=None)
def test_fused_is_cat_in_the_fused_order(
    kv_heads: int, group: int, head_size: int, columns: int, dtype: torch.dtype, seed: int
) -> None:
    """Any bits, NaN too, weights and biases, whatever the order of loading."""
    rows = {"q": kv_heads * group * head_size, "k": kv_heads * head_size, "v": kv_heads * head_size}
    for tail in ((columns,), ()):
        parts = {name: any_bits((n, *tail), dtype, seed + n) for name, n in rows.items()}
        shuffled = list(parts)
        random.Random(seed).shuffle(shuffled)  # noqa: S311  # a draw, not a secret
        got = build_fused({name: parts[name] for name in shuffled}, head_size=head_size)
        assert got.dtype == dtype
        assert torch.equal(got.view(torch.uint8), torch.cat(list(parts.values())).view(torch.uint8))


@given(st.lists(st.integers(0, 6), min_size=1, max_size=4), st.integers(1, 5), st.sampled_from(DTYPES))
@settings(deadline=None)
def test_merged_is_cat_of_any_number_of_parts(sizes: list[int], columns: int, dtype: torch.dtype) -> None:
    parts = [any_bits((rows, columns), dtype, rows) for rows in sizes]
    got = build_fused(dict(enumerate(parts)))
    assert torch.equal(got.view(torch.uint8), torch.cat(parts).view(torch.uint8))


@given(heads, st.integers(1, 3), st.integers(0, 4), st.integers(1, 4))
@settings(deadline=None)
def test_the_ranks_hold_every_row(kv_heads: int, group: int, log_tp: int, head_size: int) -> None:
    """Where T divides: q rows exactly once; each kv row on T / K ranks, or on one."""
    tp_size = 2**log_tp
    query_heads = kv_heads * group * tp_size // math.gcd(kv_heads * group, tp_size)
    if kv_heads % tp_size and tp_size % kv_heads:
        with pytest.raises(UsageError):
            QKVParallelLinear(1, head_size, query_heads, kv_heads, tp_size=tp_size)
        return
    q = torch.arange(float(query_heads * head_size)).unsqueeze(1)
    kv = torch.arange(float(kv_heads * head_size)).unsqueeze(1)
    seen_q, seen_kv = [], []
    for rank in range(tp_size):
        layer = QKVParallelLinear(1, head_size, query_heads, kv_heads, tp_rank=rank, tp_size=tp_size)
        for name, part in (("q", q), ("k", kv), ("v", -kv)):
            load(layer, part, name)
        own = [layer.num_heads * head_size, layer.num_kv_heads * head_size, layer.num_kv_heads * head_size]
        q_rows, k_rows, v_rows = torch.split(layer.weight, own)
        assert torch.equal(k_rows, -v_rows)
        seen_q.append(q_rows)
        seen_kv.append(k_rows)
    assert torch.equal(torch.cat(seen_q), q)
    copies = max(1, tp_size // kv_heads)
    assert torch.equal(torch.cat(seen_kv[::copies]), kv)
    assert all(torch.equal(seen_kv[r], seen_kv[r // copies * copies]) for r in range(tp_size))


@pytest.mark.parametrize(
    ("parts", "head_size"),
    [
        ({}, None),
        ({"q": torch.zeros(4, 2), "k": torch.zeros(4, 2)}, 2),
        ({"q": torch.zeros(4, 2), "k": torch.zeros(4, 2), "v": torch.zeros(4, 2)}, None),
        ({"q": torch.zeros(4, 2), "k": torch.zeros(4, 2), "v": torch.zeros(2, 2)}, 2),
        ({"q": torch.zeros(4, 2), "k": torch.zeros(3, 2), "v": torch.zeros(3, 2)}, 2),
        ({0: torch.zeros(4, 2), 2: torch.zeros(4, 2)}, None),
        ({0: torch.zeros(4, 2), 1: torch.zeros(4, 3)}, None),
        ({0: torch.zeros(4, 2), 1: torch.zeros(4)}, None),
        ({0: torch.zeros(4, 2), 1: torch.zeros(4, 2).half()}, None),
        ({0: torch.zeros(4, 2, 2)}, None),
        ({0: torch.zeros(4), 1: torch.zeros(())}, None),
        ({0: torch.zeros(())}, None),
    ],
)
def test_parts_that_do_not_fit_are_refused(parts: dict[int | str, Tensor], head_size: int | None) -> None:
    with pytest.raises((CheckpointError, UsageError)):
        build_fused(parts, head_size=head_size)


def any_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    size = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return raw.view(dtype).view(shape)
