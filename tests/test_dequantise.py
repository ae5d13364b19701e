"""dequantise: the weight that a stored Linear stands for, or why that is not known."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from checkpoints import Tensors
from hypothesis import given
from hypothesis import strategies as st
from quantised import GROUP, HIDDEN, KINDS, checkpoint, e2m1, e4m3, joined, stream
from torch import Tensor

from fusecheck.bounds import same_bits
from fusecheck.config import parse_config
from fusecheck.dequantise import AWQ_ORDER, E2M1, NotRun, dequantise, unpack
from fusecheck.quantisation import NONE, Quantisation, declared

TORCH = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
    "U8": torch.uint8,
}
QUANTISED = [kind for kind in KINDS if kind != "plain"]
BY_FORMAT = Quantisation("compressed-tensors", bits=4, group=GROUP)
GPTQ = Quantisation("gptq", bits=4, group=GROUP, layout="gptq")


def opened(tensors: Tensors) -> dict[str, Tensor]:
    return {
        name: torch.frombuffer(bytearray(data), dtype=TORCH[dtype]).reshape(shape)
        for name, (dtype, shape, data) in tensors.items()
    }


def quantisation_of(kind: str) -> Quantisation:
    return declared({"quantization_config": KINDS[kind][0]}, None, file="config.json")


def made(kind: str, rows: int = 32, columns: int = HIDDEN, seed: int = 0) -> tuple[dict[str, Tensor], Tensor]:
    linear = KINDS[kind][1](np.random.default_rng(seed), rows, columns)
    return opened(linear.tensors), torch.from_numpy(linear.weight.copy())


def weight_of(kind: str, tensors: Mapping[str, Tensor], rows: int, columns: int = HIDDEN) -> Tensor:
    found = dequantise(tensors, quantisation_of(kind), rows, columns)
    assert isinstance(found, Tensor), found
    return found


# ------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("kind", QUANTISED)
def test_every_element_is_what_numpy_makes_of_the_codes_that_were_packed(kind: str) -> None:
    tensors, wanted = made(kind)
    found = weight_of(kind, tensors, 32)
    assert found.dtype == torch.float32
    assert same_bits(found, wanted)


@pytest.mark.parametrize("kind", QUANTISED)
def test_a_fused_linear_gives_its_parts_rows_bit_for_bit(kind: str) -> None:
    source = checkpoint(kind, "qwen3_moe", layers=1)
    quantisation = parse_config(json.dumps(source.config).encode()).quantisation
    for _, modules in source.groups():
        parts = [source.linear(module) for module in modules]
        whole = {suffix: joined(suffix, [part[suffix] for part in parts]) for suffix in parts[0]}
        wanted = torch.cat([torch.from_numpy(source.weights[module].copy()) for module in modules])
        found = dequantise(opened(whole), quantisation, len(wanted), HIDDEN)
        assert isinstance(found, Tensor), found
        assert same_bits(found, wanted)


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 40])
def test_blocks_of_rows_may_be_ragged_too(rows: int) -> None:
    tensors, wanted = made("fp8-block", rows, 50)
    assert tensors["weight_scale_inv"].shape == (-(-rows // 16), 3)
    assert same_bits(weight_of("fp8-block", tensors, rows, 50), wanted)


def test_more_rows_than_one_chunk() -> None:
    tensors, wanted = made("gptq-3", 96, 32768)
    assert same_bits(weight_of("gptq-3", tensors, 96, 32768), wanted)


def test_a_last_group_may_be_ragged_where_the_config_gives_its_size() -> None:
    tensors, _ = made("ct-int4", 8, 48)
    tensors = {**tensors, "weight_packed": tensors["weight_packed"][:, :5].contiguous()}
    tensors["weight_shape"] = torch.tensor([8, 40])
    assert isinstance(dequantise(tensors, BY_FORMAT, 8, 40), Tensor)
    unknown = replace(BY_FORMAT, group=None)
    assert dequantise(tensors, unknown, 8, 40) == NotRun("40 columns in 3 groups of a size that nobody declares")


def test_a_float64_scale_makes_a_float64_weight() -> None:
    tensors = {"weight": torch.ones(2, 4).to(torch.float8_e4m3fn), "weight_scale": torch.full((2, 1), 1 / 3).double()}
    found = dequantise(tensors, Quantisation("fp8"), 2, 4)
    assert isinstance(found, Tensor)
    assert found.dtype == torch.float64
    assert found[0, 0] == tensors["weight_scale"][0, 0]


@given(st.integers(1, 8), st.integers(1, 3), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_unpacking_undoes_packing(bits: int, rows: int, words: int, seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, 2**bits, (rows, 32 * words))
    found = unpack(torch.from_numpy(stream(values, bits).copy()), bits)
    assert found.dtype == torch.uint8
    assert found.tolist() == values.tolist()


def test_three_bits_straddle_words_as_autogptq_writes_them() -> None:
    words = [0, 0, 0]
    words[0] |= 0b11 << 30  # element 10: its low two bits end word 0, its high bit begins word 1
    words[1] |= 1
    words[1] |= 1 << 31  # element 21: one bit in word 1, two in word 2
    words[2] |= 0b10
    signed = [word - 2**32 if word >= 2**31 else word for word in words]
    found = unpack(torch.tensor([signed], dtype=torch.int32), 3)[0]
    assert {place: int(found[place]) for place in found.nonzero().flatten().tolist()} == {10: 7, 21: 5}


def test_awq_nibbles_of_one_word() -> None:
    word = sum(column << (4 * nibble) for nibble, column in enumerate(AWQ_ORDER))
    words = torch.tensor([[word]], dtype=torch.int64).to(torch.int32)
    tensors = {
        "qweight": words,
        "qzeros": torch.zeros(1, 1, dtype=torch.int32),
        "scales": torch.ones(1, 8, dtype=torch.float16),
    }
    found = dequantise(tensors, Quantisation("awq", bits=4, group=1), 8, 1)
    assert isinstance(found, Tensor)
    assert found.flatten().tolist() == list(range(8))


def test_gptq_stores_zero_points_less_one_and_gptq_v2_as_they_are() -> None:
    tensors = {
        "qweight": torch.zeros(1, 8, dtype=torch.int32),
        "qzeros": torch.full((1, 1), 0x77777777, dtype=torch.int32),
        "scales": torch.ones(1, 8, dtype=torch.float16),
    }
    for layout, zero in (("gptq", 8), ("gptq_v2", 7)):
        found = dequantise(tensors, replace(GPTQ, group=-1, layout=layout), 8, 8)
        assert isinstance(found, Tensor)
        assert found.flatten().tolist() == [-zero] * 64


def test_g_idx_gives_each_column_its_group() -> None:
    tensors, wanted = made("gptq-4-act-order")
    in_order = {**tensors, "g_idx": torch.arange(HIDDEN, dtype=torch.int32) // GROUP}
    assert same_bits(weight_of("gptq-4", tensors, 32), wanted)
    assert not same_bits(weight_of("gptq-4", in_order, 32), wanted)


def test_an_unset_weight_g_idx_means_columns_in_order() -> None:
    tensors, wanted = made("ct-int4")
    tensors["weight_g_idx"] = torch.full((HIDDEN,), -1, dtype=torch.int32)
    assert same_bits(weight_of("ct-int4", tensors, 32), wanted)


def test_zero_points_that_are_not_packed() -> None:
    tensors, wanted = made("ct-int4")
    zero = torch.full(tuple(tensors["weight_scale"].shape), 3, dtype=torch.int8)
    found = weight_of("ct-int4", {**tensors, "weight_zero_point": zero}, 32)
    scale = tensors["weight_scale"].float().repeat_interleave(GROUP, dim=1)
    assert torch.equal(found, (wanted / scale - 3) * scale)


def test_global_scales_multiply_in_modelopt_and_divide_in_compressed_tensors() -> None:
    packed, scale = torch.full((1, 8), 0x22, dtype=torch.uint8), torch.ones(1, 1).to(torch.float8_e4m3fn)
    found = [
        dequantise(tensors, Quantisation(method), 1, 16)
        for method, tensors in (
            ("modelopt", {"weight": packed, "weight_scale": scale, "weight_scale_2": torch.tensor(4.0)}),
            (
                "compressed-tensors",
                {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": torch.tensor([4.0])},
            ),
        )
    ]
    assert [weight.flatten().tolist() for weight in found if isinstance(weight, Tensor)] == [[4.0] * 16, [0.25] * 16]


def test_tables_of_the_small_floats_are_the_formats_own() -> None:
    assert list(E2M1) == e2m1(np.arange(16, dtype=np.uint8)).tolist()
    assert [math.copysign(1, value) for value in E2M1] == [1.0] * 8 + [-1.0] * 8
    codes = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
    assert torch.from_numpy(codes).view(torch.float8_e4m3fn).float().tolist() == e4m3(codes).tolist()


# ------------------------------------------------------------------------------------------------------- not run


def _without(kind: str, *suffixes: str) -> dict[str, Tensor]:
    return {suffix: one for suffix, one in made(kind)[0].items() if suffix not in suffixes}


def _with(kind: str, **tensors: Tensor) -> dict[str, Tensor]:
    return {**made(kind)[0], **tensors}


UNCLEAR: Iterable[tuple[str, str, dict[str, Tensor], str]] = (
    ("no scales", "fp8-block", _without("fp8-block", "weight_scale_inv"), "without scales"),
    ("two kinds of scales", "fp8-block", _with("fp8-block", weight_scale=torch.ones(1)), "exactly one of"),
    ("no zero points", "awq", _without("awq", "qzeros"), "qzeros is absent"),
    ("no weight", "ct-nvfp4", _without("ct-nvfp4", "weight_packed"), "weight is absent"),
    ("no scale per tensor", "ct-nvfp4", _without("ct-nvfp4", "weight_global_scale"), "a scale per tensor"),
    (
        "a scale per tensor too many",
        "modelopt-fp8",
        _with("modelopt-fp8", weight_scale_2=torch.ones(1)),
        "nothing else",
    ),
    (
        "two scales per tensor",
        "modelopt-nvfp4",
        _with("modelopt-nvfp4", weight_global_scale=torch.ones(1)),
        "not one floating-point number",
    ),
    (
        "whole numbers as scales",
        "ct-nvfp4",
        _with("ct-nvfp4", weight_scale=torch.ones(32, 4, dtype=torch.uint8)),
        "uint8",
    ),
    (
        "scales of another shape",
        "fp8-channel",
        _with("fp8-channel", weight_scale=torch.ones(3, 1)),
        "has no form of fp8",
    ),
    (
        "zero points of another shape",
        "ct-int4",
        _with("ct-int4", weight_zero_point=torch.ones(1, 1).char()),
        "does not fit",
    ),
    ("a column beyond the groups", "gptq-4", _with("gptq-4", g_idx=torch.full((HIDDEN,), 4).int()), "one of 4 groups"),
    ("a column before the groups", "gptq-4", _with("gptq-4", g_idx=torch.full((HIDDEN,), -1).int()), "one of 4 groups"),
    ("a short g_idx", "gptq-4", _with("gptq-4", g_idx=torch.zeros(3).int()), "each of 64 columns"),
    ("uneven groups", "ct-int4", _with("ct-int4", weight_g_idx=torch.zeros(HIDDEN).int()), "evenly"),
    ("another weight_shape", "ct-int4", _with("ct-int4", weight_shape=torch.tensor([31, HIDDEN])), "[31, 64]"),
    ("6 bits of AWQ", "awq", _with("awq", qweight=torch.zeros(HIDDEN, 6).int()), "6 bits"),
    ("a weight of half the rows", "fp8-channel", _with("fp8-channel", weight=torch.ones(16, 64).char()), "[16, 64]"),
    (
        "whole words as weight",
        "ct-int8-plain",
        _with("ct-int8-plain", weight=torch.ones(32, 64).int()),
        "no quantised weight",
    ),
    (
        "bytes that are no pairs",
        "modelopt-nvfp4",
        _with("modelopt-nvfp4", weight=torch.ones(32, 64).byte()),
        "two E2M1",
    ),
)


@pytest.mark.parametrize(
    ("kind", "tensors", "reason"), [case[1:] for case in UNCLEAR], ids=[case[0] for case in UNCLEAR]
)
def test_what_is_not_clear_is_not_guessed(kind: str, tensors: dict[str, Tensor], reason: str) -> None:
    found = dequantise(tensors, quantisation_of(kind), 32, HIDDEN)
    assert isinstance(found, NotRun), found
    assert reason in found.reason


def test_a_plain_weight_is_none_to_be_dequantised() -> None:
    assert dequantise({"weight": torch.ones(2, 2)}, NONE, 2, 2) == NotRun(
        "torch.float32 is no quantised weight that is known"
    )


def test_scales_that_are_exponents_alone() -> None:
    tensors = {
        "weight": torch.full((16, 24), 1.5).to(torch.float8_e4m3fn),
        "weight_scale_inv": torch.full((1, 1), 2.0**-7).to(torch.float8_e8m0fnu),
    }
    found = weight_of("fp8-block", tensors, 16, 24)
    assert found.flatten().tolist() == [1.5 * 2.0**-7] * (16 * 24)
