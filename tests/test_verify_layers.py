"""verify_layers: shares of a proof are together what verify says of the projections, and each needs the source."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from checkpoints import Spec, read_checkpoint, write_checkpoint, write_safetensors

from fusecheck import fuse, verify, verify_layers
from fusecheck.errors import SystemFailure, UsageError

SPEC = Spec(num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2, intermediate_size=24, values="normal")
RANKS = {"target": "vllm-sharded", "tp": 2}


def made(root: Path, options: dict[str, object]) -> tuple[Path, Path]:
    write_checkpoint(root / "in", SPEC)
    fuse(root / "in", root / "out", **options)  # type: ignore[arg-type]
    return root / "in", root / "out"


@pytest.mark.parametrize("options", [{}, RANKS], ids=["whole", "ranks"])
@pytest.mark.parametrize("shares", [1, 2, 5])
def test_shares_are_together_the_whole(tmp_path: Path, options: dict[str, object], shares: int) -> None:
    _, out = made(tmp_path, options)
    reports = [verify_layers(out, range(share, 5, shares), device="cpu") for share in range(shares)]
    assert {(report.verdict, report.proved) for report in reports} == {("equal", ("probe", "numeric"))}
    whole = verify(out, layers=range(5), device="cpu")
    found = sorted((check for report in reports for check in report.projections), key=lambda check: check.layer)
    assert tuple(found) == whole.projections
    assert json.loads(json.dumps(asdict(reports[0])))["verdict"] == "equal"


def test_only_the_share_that_holds_the_damage_fails(tmp_path: Path) -> None:
    _, out = made(tmp_path, {})
    content = read_checkpoint(out)
    name = "model.layers.3.self_attn.qkv_proj.weight"
    dtype, shape, data = content[name]
    row = shape[1] * 2
    content[name] = (dtype, shape, data[-row:] + data[row:-row] + data[:row])
    write_safetensors(out / "model.safetensors", content, metadata={"format": "pt"})
    verdicts = [verify_layers(out, [layer], device="cpu").verdict for layer in range(5)]
    assert verdicts == ["equal", "equal", "equal", "not_equal", "equal"]


def test_a_source_of_other_names_proves_nothing(tmp_path: Path) -> None:
    source, out = made(tmp_path, {})
    shutil.rmtree(source)
    write_checkpoint(source, Spec(**{**asdict(SPEC), "prefix": "model.language_model."}))
    report = verify_layers(out, [0], source=source, device="cpu")
    assert (report.verdict, report.proved) == ("not_run", ())


def test_the_source_and_the_layer_and_torch_have_to_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = made(tmp_path, {})
    with pytest.raises(UsageError, match="beyond the model"):
        verify_layers(out, [5])
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SystemFailure, match="torch"):
        verify_layers(out, [0])
    shutil.rmtree(source)
    with pytest.raises(UsageError, match="need the source"):
        verify_layers(out, [0])
