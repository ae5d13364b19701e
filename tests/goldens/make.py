"""Writes the goldens of this version: `python tests/goldens/make.py 0.1.0`. Those of a published release never change.

Names, dtypes and shapes come from the tests' own makers of checkpoints; the bytes from golden.filling.
"""

from __future__ import annotations

import json
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from checkpoints import INDEX, SIDE_FILES, Spec, Tensors, config, serialized, tensors
from goldens.golden import FOLDER, MAX_BYTES, Golden, digest, filling, read_files, write_files
from quantised import Quantised, checkpoint

from fusecheck import __version__
from fusecheck.operations.fuse import fuse

GIVEN = ("g_idx", "weight_shape", "weight_scale_2", "input_scale")
"""Suffixes of tensors whose values have to agree between parts, or with the shapes."""


@dataclass(frozen=True, slots=True)
class Case:
    """What one golden is made of."""

    about: str
    made: Callable[[], tuple[Tensors, dict[str, object]]]
    files: int = 1
    side_files: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


def _dense(**changes: Any) -> Callable[[], tuple[Tensors, dict[str, object]]]:  # noqa: ANN401 - fields of Spec
    spec = Spec(**changes)
    return lambda: (tensors(spec), config(spec))


def _quantised(kind: str, family: str = "qwen3") -> Callable[[], tuple[Tensors, dict[str, object]]]:
    def made() -> tuple[Tensors, dict[str, object]]:
        source: Quantised = checkpoint(kind, family, layers=1)
        return source.tensors, source.config

    return made


def _without_shared_expert() -> tuple[Tensors, dict[str, object]]:
    found, config_value = _quantised("plain", "qwen3_moe")()
    return (
        {name: one for name, one in found.items() if "shared_expert" not in name},
        {key: value for key, value in config_value.items() if "shared_expert" not in key},
    )


CASES: Mapping[str, Case] = {
    "dense-tied": Case("qwen3, BF16, tied, one file", _dense(), side_files=SIDE_FILES[:2]),
    "dense-tied-lm-head-dropped": Case(
        "tied, with an equal lm_head that is dropped",
        _dense(num_hidden_layers=1, lm_head="equal"),
        options={"drop_tied_lm_head": True},
    ),
    "dense-untied": Case(
        "untied, q/k/v and o bias, F32 norms, another prefix, tensors beside the model's",
        _dense(
            tied=False,
            lm_head="own",
            bias=True,
            o_bias=True,
            norm_dtype="F32",
            prefix="model.language_model.",
            extra=("scalar", "empty", "unicode", "f8"),
        ),
        options={"checksums": True},
    ),
    "dense-sharded": Case(
        "three shards, every group over several of them",
        _dense(tied=False, lm_head="own", num_hidden_layers=3),
        files=3,
        side_files=("tokenizer.json", "1_Pooling/config.json"),
    ),
    "moe-per-expert": Case("qwen3_moe, one gate_up_proj an expert", _quantised("plain", "qwen3_moe"), files=2),
    "moe-stacked": Case(
        "qwen3_moe, experts in two 3-D tensors",
        _without_shared_expert,
        files=2,
        options={"experts": "stacked"},
    ),
    "moe-stacked-shared": Case(
        "qwen3_moe, experts in two 3-D tensors, a shared expert beside them",
        _quantised("plain", "qwen3_moe"),
        files=2,
        options={"experts": "stacked"},
    ),
    "fp8-block": Case("FP8, block scales", _quantised("fp8-block"), files=2),
    "fp8-tensor": Case("FP8, one scale a group, kept once", _quantised("fp8-tensor")),
    "awq": Case("AWQ gemm, joined by columns", _quantised("awq"), files=2),
    "gptq": Case("GPTQ with act-order: one g_idx, config.json edited", _quantised("gptq-4-act-order"), files=2),
    "pack-quantized": Case("compressed-tensors, zero points and weight_shape", _quantised("ct-int4-zero"), files=2),
    "nvfp4": Case("compressed-tensors NVFP4, equal global scales", _quantised("ct-nvfp4")),
}


def golden(case: Case, place: Path) -> Golden:
    """Fuse the checkpoint of a case below `place` and describe both."""
    shapes, config_value = case.made()
    given = {name: data for name, (_, shape, data) in shapes.items() if _is_given(name, shape)}
    if "lm_head.weight" in shapes and shapes["lm_head.weight"] == shapes.get("model.embed_tokens.weight"):
        given["lm_head.weight"] = filling("model.embed_tokens.weight", len(shapes["lm_head.weight"][2]))
    content = {
        name: (dtype, shape, given.get(name, filling(name, len(data)))) for name, (dtype, shape, data) in shapes.items()
    }
    source = write_files(place / "source", dict(_source(case, content, config_value)))
    fuse(source, place / "out", **case.options)
    out = read_files(place / "out")
    return Golden(
        version=__version__,
        about=case.about,
        options=case.options,
        given={name: data.hex() for name, data in given.items()},
        joined=dict(_joined(json.loads(out["fusecheck.json"]))),
        source={name: _entry(name, data) for name, data in read_files(source).items()},
        output={name: _entry(name, data) for name, data in out.items()},
    )


def _is_given(name: str, shape: tuple[int, ...]) -> bool:
    scale = name.endswith(("weight_scale", "weight_global_scale", "input_global_scale")) and shape in {(), (1,)}
    return scale or name.endswith(GIVEN)


def _source(case: Case, content: Tensors, config_value: dict[str, object]) -> Iterator[tuple[str, bytes]]:
    """The files of a source in canonical form: every nth tensor in the same shard, so that groups straddle."""
    placed: dict[str, str] = {}
    for number in range(case.files):
        shard = f"model-{number + 1:05d}-of-{case.files:05d}.safetensors" if case.files > 1 else "model.safetensors"
        own = dict(list(content.items())[number :: case.files])
        placed |= dict.fromkeys(own, shard)
        yield shard, serialized(own, metadata={"format": "pt"})
    if case.files > 1:
        total = sum(len(data) for *_, data in content.values())
        index = {"metadata": {"total_size": total}, "weight_map": placed}
        yield INDEX, (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()
    yield "config.json", (json.dumps(config_value, indent=2) + "\n").encode()
    for name in case.side_files:
        yield name, f'{{"side file": "{name}"}}\n'.encode()


def _joined(manifest: dict[str, Any]) -> Iterator[tuple[str, dict[str, object]]]:
    for name, entry in manifest["tensors"].items():
        if "parts" in entry:
            yield name, {"join": entry["join"], "parts": [part["name"] for part in entry["parts"]]}


def _entry(name: str, data: bytes) -> dict[str, object]:
    if not name.endswith(".safetensors"):
        return {"sha256": digest(data), "text": data.decode().splitlines(keepends=True)}
    (length,) = struct.unpack("<Q", data[:8])
    return {"sha256": digest(data), "header": data[8 : 8 + length].decode()}


def main() -> None:
    """Write the goldens of VERSION, which has to be this one."""
    if sys.argv[1:] != [__version__]:
        sys.exit(f"usage: make.py VERSION, and this version is {__version__}")
    folder = FOLDER / __version__
    folder.mkdir(exist_ok=True)
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as place:
            text = json.dumps(asdict(golden(case, Path(place))), indent=1, ensure_ascii=False) + "\n"
        if len(text.encode()) >= MAX_BYTES:
            sys.exit(f"{name}: {len(text.encode())} bytes are too many to read")
        (folder / f"{name}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
