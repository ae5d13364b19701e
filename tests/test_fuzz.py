"""A few thousand bent files with fixed seeds; `scripts/fuzz` runs as many as one likes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import INDEX, Spec, config, read_checkpoint, write_checkpoint
from fuzz_headers import Judge, Library, draw, draw_json, inputs, minimal, reasons

from fusecheck.checkpoint import open_checkpoint
from fusecheck.config import parse_config
from fusecheck.errors import CheckpointError, invisible
from fusecheck.json_text import strict_json

SHARDED = Spec(files=3, num_hidden_layers=1, hidden_size=2, head_dim=2, intermediate_size=2, vocab_size=2)


@pytest.fixture(scope="module")
def library() -> Iterator[Library]:
    with Library() as library:
        yield library


@pytest.mark.parametrize("seed", range(4))
def test_never_laxer_than_the_library_and_stricter_only_for_a_reason(
    seed: int, library: Library, tmp_path: Path
) -> None:
    judge = Judge(tmp_path, library)
    failures = {number: found for number, blob in inputs(seed, range(1000)) if (found := judge.complaint(blob))}
    assert not failures
    assert judge.counts["both accept"] > 100
    assert judge.counts["both refuse"] > 100


def test_the_library_comes_back_after_its_death(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")
    os.mkfifo(tmp_path / "hangs")
    with Library(seconds=0.2) as mortal:
        assert mortal.read(tmp_path / "hangs") == "the library died or hung"
        mortal.seconds = 20
        assert mortal.read(tmp_path / "a.safetensors") == ({}, [])
        assert mortal.deaths == 1


def test_the_law_is_not_empty(library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = Judge(tmp_path, library)
    hole = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}'
    file = bytes([len(hole), *bytes(7)]) + hole + b"ab"
    assert judge.complaint(file) is None
    monkeypatch.setattr("fuzz_headers.read_by_us", lambda _: ({}, []))
    assert str(judge.complaint(file)).startswith("laxer: ")
    assert str(judge.complaint(minimal(file, judge))).startswith("laxer: ")
    assert len(minimal(file, judge)) < len(file)
    assert reasons(file) == set()


def test_a_number_always_draws_the_same_file() -> None:
    assert draw(1, 2) == draw(1, 2) != draw(1, 3)


def _is_one_plain_line(error: CheckpointError) -> None:
    assert not any(map(invisible, str(error)))


def _raises_nothing_else(blob: bytes) -> bool:
    """strict_json reads what Python's json reads, or refuses by CheckpointError; True where it reads."""
    try:
        value = strict_json(blob, file="x.json", constants=True)
    except CheckpointError as error:
        _is_one_plain_line(error)
        return False
    assert repr(value) == repr(json.loads(blob.decode()))
    return True


def test_bent_json_is_read_as_python_reads_it_or_refused() -> None:
    text = json.dumps(config(SHARDED) | {"n": [float("nan"), float("-inf"), 1e-6], "s": "\u00e9\ud83d\ude00"})
    read = sum(_raises_nothing_else(draw_json(text, 0, number)) for number in range(2000))
    assert 100 < read < 1900


PLAIN = {**config(SHARDED), "architectures": None}
CONFIGS: dict[str, dict[str, object]] = {
    "nested": PLAIN | {"text_config": {"hidden_size": 2}},
    "gptq": PLAIN | {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {}}},
    "fp8": PLAIN | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
    "ignore": PLAIN
    | {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "ignore": ["lm_head", "re:.*mlp[.]gate$", "*.q_proj"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel"}}},
        }
    },
    "experts": PLAIN
    | {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "moe_intermediate_size": 2,
        "mlp_only_layers": [0],
        "decoder_sparse_step": 1,
    },
    "vision": {"model_type": "qwen3_vl", "text_config": PLAIN | {"model_type": "qwen3_vl_text"}},
}


@pytest.mark.parametrize("whole", CONFIGS.values(), ids=CONFIGS.keys())
def test_a_bent_config_is_read_or_refused(whole: dict[str, object]) -> None:
    text, read = json.dumps(whole), 0
    assert parse_config(text.encode())
    for number in range(1000):
        try:
            read += parse_config(draw_json(text, 1, number)).hidden_size > 0
        except CheckpointError as error:
            _is_one_plain_line(error)
    assert 20 < read < 980


def test_a_bent_index_changes_no_tensor_or_is_refused(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path, SHARDED)
    text, read = (tmp_path / INDEX).read_text(encoding="utf-8"), 0
    for number in range(400):
        (tmp_path / INDEX).write_bytes(draw_json(text, 2, number))
        try:
            with open_checkpoint(tmp_path) as checkpoint:
                assert checkpoint.tensors.keys() == source.keys() == read_checkpoint(tmp_path).keys()
                read += 1
        except CheckpointError as error:
            _is_one_plain_line(error)
    assert read > 5
