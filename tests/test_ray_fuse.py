"""scripts/deploy/ray_fuse.py with a Ray that runs each task at once; scripts/ray_check.py has the real one."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, TypeAlias

import pytest
from checkpoints import Spec, write_checkpoint
from memory_store import folder_files

import fusecheck

SCRIPT = Path(__file__).parent.parent / "scripts" / "deploy" / "ray_fuse.py"
SPEC = Spec(files=4, num_hidden_layers=3)
Loaded: TypeAlias = Any
"""A module that is loaded by its path, or what it or Ray's decorators return."""


class LostError(Exception):
    """As Ray's own errors: a worker or node that died too often."""


class TaskError(LostError):
    """As Ray raises what a task has raised."""

    def __init__(self, cause: Exception) -> None:
        self.cause = cause


class InlineRay(ModuleType):
    """The few names that the script calls; what depends on a failed task fails as it did."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.exceptions = SimpleNamespace(RayTaskError=TaskError, RayError=LostError)
        self.options: list[tuple[str, dict[str, object]]] = []

    def init(self, **_: object) -> None:
        """There is no cluster."""

    def remote(self, **options: object) -> Callable[[Callable[..., Loaded]], Any]:
        def decorate(function: Callable[..., Loaded]) -> Loaded:
            def run(*arguments: Loaded) -> Loaded:
                self.options.append((function.__name__, options))
                failed = next((one for one in arguments if isinstance(one, LostError)), None)
                if failed is not None:
                    return failed
                try:
                    return function(*arguments)
                except Exception as error:  # noqa: BLE001 - as Ray does
                    return error if isinstance(error, LostError) else TaskError(error)

            return SimpleNamespace(remote=run)

        return decorate

    def get(self, results: Loaded) -> Loaded:
        for result in results if isinstance(results, list) else [results]:
            if isinstance(result, LostError):
                raise result
        return results


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> InlineRay:
    ray = InlineRay()
    monkeypatch.setitem(sys.modules, "ray", ray)
    return ray


@pytest.fixture
def script(inline: InlineRay, monkeypatch: pytest.MonkeyPatch) -> Loaded:
    del inline
    spec = importlib.util.spec_from_file_location("ray_fuse", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "ray_fuse", module)
    spec.loader.exec_module(module)
    return module


def run(script: Loaded, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["ray_fuse.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_a_fleet_is_fused_and_proved(
    script: Loaded,
    inline: InlineRay,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in "ab":
        write_checkpoint(tmp_path / name, SPEC)
        fusecheck.fuse(tmp_path / name, tmp_path / f"{name}-reference")
    places = [tmp_path / name for name in ("a", "a-out", "b", "b-out")]
    assert run(script, monkeypatch, "--parts", 2, "--verify", "--gpus", 1, *places) == 0
    for name in "ab":
        assert folder_files(tmp_path / f"{name}-out") == folder_files(tmp_path / f"{name}-reference")
    words = "committed, proof: equal, every byte and every layer's projections"
    told = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[2] for line in told] == [words, words]
    gpus = {name: options.get("num_gpus", 0) for name, options in inline.options}
    assert gpus == {"run_part": 0, "finish": 0, "prove_bytes": 0, "prove_layers": 1}


def test_one_that_fails_stops_no_other(
    script: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in "ab":
        write_checkpoint(tmp_path / name, SPEC)
    planned = script.Pair.planned

    def then_lost(source: str, out: str) -> Loaded:
        pair = planned(source, out)
        if source.endswith("/a"):
            next(Path(source).glob("*.safetensors")).unlink()
        return pair

    monkeypatch.setattr(script.Pair, "planned", then_lost)
    places = [tmp_path / name for name in ("a", "a-out", "absent", "c-out", "b", "b-out")]
    assert run(script, monkeypatch, "--parts", 3, *places) == 3
    told = dict(line.partition(" -> ")[::2] for line in capsys.readouterr().out.splitlines())
    assert "error: " in told[str(tmp_path / "a")]
    assert "error: " in told[str(tmp_path / "absent")]
    assert told[str(tmp_path / "b")].endswith("committed, proof: not run")
    assert not (tmp_path / "a-out" / "fusecheck.json").exists()


@pytest.mark.parametrize(("error", "code"), [(LostError("gone"), 4), (ValueError("a bug"), 70)])
def test_what_ray_gives_up_may_be_tried_again(
    script: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
) -> None:
    write_checkpoint(tmp_path / "a", SPEC)

    def fails(*_: object) -> str:
        raise error

    monkeypatch.setattr(script, "run_part", fails)
    assert run(script, monkeypatch, tmp_path / "a", tmp_path / "out") == code


def test_damage_after_the_commit_is_exit_1(
    script: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(tmp_path / "a", SPEC)
    finish = script.finish

    def then_damaged(plan: str, *done: str) -> str:
        verdict = finish(plan, *done)
        shard = next((tmp_path / "out").glob("*.safetensors"))
        shard.write_bytes(shard.read_bytes()[:-1] + b"\x7f")
        return str(verdict)

    monkeypatch.setattr(script, "finish", then_damaged)
    assert run(script, monkeypatch, "--verify", tmp_path / "a", tmp_path / "out") == 1
    assert "proof: bytes not_equal" in capsys.readouterr().out


def test_a_branch_that_moved_is_proved_as_it_was_planned(script: Loaded) -> None:
    plan = '{"provenance": {"commit": "abc"}, "source": "hf://own/er@main"}'
    assert script.Pair("hf://own/er@main", "out", plan, 1).frozen_source == "hf://own/er@abc"
    assert script.Pair("s3://b/k@2", "out", '{"provenance": {}}', 1).frozen_source == "s3://b/k@2"
