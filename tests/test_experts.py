"""`--experts`: one gate_up_proj for each expert, all in two 3-D tensors, or untouched; each proven, and taken apart again."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from checkpoints import Tensors, read_checkpoint, read_header, write_safetensors
from quantised import EXPERTS, Quantised, checkpoint

from fusecheck import fuse, inspect, unfuse, verify
from fusecheck.errors import UnsupportedCheckpoint, UsageError

EXPERT = re.compile(r"(.*\.mlp\.experts\.)(\d+)\.(gate|up|down)_proj\.weight")


def stacked(source: Quantised) -> Tensors:
    """What `stacked` has to give, by whole arrays: the experts of a layer by numpy.stack, all else as fused one by one."""
    found = {name: one for name, one in source.fused().items() if ".mlp.experts." not in name}
    for scope in sorted({match[1] for name in source.tensors if (match := EXPERT.fullmatch(name))}):

        def array(expert: int, part: str, scope: str = scope) -> np.ndarray[tuple[int, ...], np.dtype[np.uint16]]:
            _, shape, data = source.tensors[f"{scope}{expert}.{part}_proj.weight"]
            return np.frombuffer(data, "<u2").reshape(shape)

        up = np.stack([np.concatenate([array(e, "gate"), array(e, "up")]) for e in range(EXPERTS)])
        down = np.stack([array(e, "down") for e in range(EXPERTS)])
        for name, whole in (("gate_up_proj", up), ("down_proj", down)):
            found[f"{scope}{name}"] = ("BF16", whole.shape, whole.tobytes())
    return found


def test_stacked_experts_are_what_numpy_stacks(tmp_path: Path) -> None:
    source = checkpoint("plain", "qwen3_moe")
    source.write(tmp_path / "in")
    report = fuse(tmp_path / "in", tmp_path / "out", experts="stacked")
    assert report.verdict == "fused"
    assert read_checkpoint(tmp_path / "out") == stacked(source)
    assert inspect(tmp_path / "out").would_fuse
    assert verify(tmp_path / "out", exact_only=True).verdict == "equal"
    (tmp_path / "out" / "fusecheck.json").unlink()
    assert verify(tmp_path / "out", source=tmp_path / "in", exact_only=True).verdict == "equal"


@pytest.mark.parametrize("form", ["per-expert", "stacked", "split"])
def test_every_form_is_taken_apart_again(tmp_path: Path, form: str) -> None:
    source = checkpoint("plain", "qwen3_moe")
    source.write(tmp_path / "in")
    fuse(tmp_path / "in", tmp_path / "out", experts=form)  # type: ignore[arg-type]
    unfuse(tmp_path / "out", tmp_path / "back")
    assert read_checkpoint(tmp_path / "back") == source.tensors


def test_split_leaves_the_experts_alone(tmp_path: Path) -> None:
    source = checkpoint("awq", "qwen3_moe")
    source.write(tmp_path / "in")
    report = fuse(tmp_path / "in", tmp_path / "out", experts="split")
    assert not any("experts" in warning for warning in report.warnings)
    kept = {name: one for name, one in source.tensors.items() if ".mlp.experts." in name}
    others = {name: one for name, one in source.fused().items() if ".mlp.experts." not in name}
    assert read_checkpoint(tmp_path / "out") == kept | others
    assert verify(tmp_path / "out", exact_only=True).verdict == "equal"


def test_what_an_engine_halves_wrongly_is_said(tmp_path: Path) -> None:
    checkpoint("awq", "qwen3_moe").write(tmp_path / "in")
    warnings = fuse(tmp_path / "in", tmp_path / "out").warnings
    assert any("--experts split" in warning and "vLLM" in warning for warning in warnings)


def test_quantised_experts_are_not_stacked(tmp_path: Path) -> None:
    checkpoint("fp8-block", "qwen3_moe").write(tmp_path / "in")
    with pytest.raises(UnsupportedCheckpoint, match="plain weights only"):
        fuse(tmp_path / "in", tmp_path / "out", experts="stacked")
    with pytest.raises(UsageError, match="no such form"):
        fuse(tmp_path / "in", tmp_path / "out", experts="heaped")  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("defect", ["bit", "swapped", "form"])
def test_a_defect_in_a_stack_is_found_and_named(tmp_path: Path, defect: str) -> None:
    source = checkpoint("plain", "qwen3_moe")
    source.write(tmp_path / "in")
    fuse(tmp_path / "in", tmp_path / "out", experts="stacked", max_shard_size="1GB")
    path = tmp_path / "out" / "model.safetensors"
    content = read_checkpoint(tmp_path / "out")
    name = next(name for name in content if name.endswith("experts.gate_up_proj"))
    dtype, shape, data = content[name]
    one = len(data) // EXPERTS
    content[name] = {
        "bit": (dtype, shape, data[:one] + bytes([data[one] ^ 1]) + data[one + 1 :]),
        "swapped": (dtype, shape, data[one : 2 * one] + data[:one] + data[2 * one :]),
        "form": (dtype, (shape[0] * shape[1], shape[2]), data),
    }[defect]
    write_safetensors(path, content, metadata=read_header(path)["__metadata__"])
    report = verify(tmp_path / "out", source=tmp_path / "in", exact_only=True)
    assert report.verdict == "not_equal"
    found = [finding for finding in report.exact.findings if finding.tensor == name]
    assert found
    if defect == "bit":
        assert any(
            finding.part and ".experts.1.gate_proj." in finding.part and finding.part_row == 0 for finding in found
        )
