"""scripts/deploy, several machines: the commands of the Job and of the Slurm array run as they stand, by processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Spec, write_checkpoint
from memory_store import folder_files

import fusecheck

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "scripts" / "deploy"

yaml: Any = pytest.importorskip("yaml", reason="PyYAML is not installed")


def jobs() -> dict[str, dict[str, Any]]:
    documents = yaml.safe_load_all((DEPLOY / "fuse-parts.yaml").read_text(encoding="utf-8"))
    return {document["metadata"]["name"]: document for document in documents}


def waits(tries: int) -> int:
    """Seconds that a Job controller waits in all: 10, 20, 40, ... at most 6 minutes."""
    return sum(min(10 * 2**number, 360) for number in range(tries))


def container(name: str) -> dict[str, Any]:
    (found,) = jobs()[name]["spec"]["template"]["spec"]["containers"]
    return dict(found)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """SRC, a plan, and programs that stand before the real ones."""
    write_checkpoint(tmp_path / "in", Spec(files=11))
    fusecheck.fuse(tmp_path / "in", tmp_path / "reference")
    (tmp_path / "plan").mkdir()
    (tmp_path / "plan" / "plan.json").write_text(fusecheck.make_plan(tmp_path / "in", tmp_path / "out").text)
    (tmp_path / "bin").mkdir()
    return tmp_path


def program(place: Path, name: str, text: str) -> None:
    (place / "bin" / name).write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    (place / "bin" / name).chmod(0o755)


def environment(place: Path, **more: str) -> dict[str, str]:
    path = os.pathsep.join([str(place / "bin"), os.environ["PATH"]])
    return {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path, **more}


def fusecheck_at(place: Path, arguments: list[str], **more: str) -> subprocess.CompletedProcess[str]:
    words = [f"{place}{word}" if word.startswith("/") else word for word in arguments]
    command = [sys.executable, "-m", "fusecheck", *words]
    return subprocess.run(command, check=False, capture_output=True, text=True, env=environment(place, **more))


def test_the_jobs_say_what_the_text_says() -> None:
    run, finalize = jobs()["fuse-run"]["spec"], jobs()["fuse-finalize"]["spec"]
    assert run["completionMode"] == "Indexed"
    assert container("fuse-run")["args"][-2:] == ["--parts", str(run["completions"])]
    for spec in (run, finalize):
        rules = spec["podFailurePolicy"]["rules"]
        assert [rule["action"] for rule in rules] == ["Ignore", "FailJob"]
        assert rules[1]["onExitCodes"] == {"containerName": "fuse", "operator": "In", "values": [2, 3, 70]}
        assert spec["template"]["spec"]["restartPolicy"] == "Never"
    assert finalize["activeDeadlineSeconds"] > run["activeDeadlineSeconds"]
    assert waits(finalize["backoffLimit"]) > finalize["activeDeadlineSeconds"]
    for name in jobs():
        assert container(name)["name"] == "fuse"
        assert container(name)["securityContext"]["readOnlyRootFilesystem"] is True
        (mount,) = container(name)["volumeMounts"]
        plan = next(word for word in container(name)["args"] if word.startswith("/"))
        assert Path(plan).parent == Path(mount["mountPath"])


def test_the_jobs_run_as_they_stand(place: Path) -> None:
    """finalize comes too early first, as it does when both are applied at once: 4, which its Job tries again."""
    finalize, run = container("fuse-finalize")["args"], container("fuse-run")["args"]
    assert fusecheck_at(place, finalize).returncode == 4
    for index in (5, 0, 7, 1, 6, 2, 4, 3, 0):
        done = fusecheck_at(place, run, JOB_COMPLETION_INDEX=str(index))
        assert done.returncode == 0, done.stderr
    for verdict in ("committed", "already_done"):
        done = fusecheck_at(place, finalize)
        assert (done.returncode, json.loads(done.stdout)["verdict"]) == (0, verdict), done.stderr
    assert folder_files(place / "out") == folder_files(place / "reference")


def sbatch(place: Path, **more: str) -> int:
    bash = shutil.which("bash")
    assert bash
    script = DEPLOY / "fuse-parts.sbatch"
    assert subprocess.run([bash, "-n", script], check=False).returncode == 0
    plan = str(place / "plan" / "plan.json")
    return subprocess.run([bash, script], check=False, env=environment(place, PLAN=plan, **more)).returncode


def test_the_slurm_array_runs_as_it_stands(place: Path) -> None:
    program(place, "fusecheck", f'exec "{sys.executable}" -m fusecheck "$@"')
    for task in (2, 0, 1, 2):
        assert sbatch(place, SLURM_ARRAY_TASK_ID=str(task), SLURM_ARRAY_TASK_COUNT="3") == 0
    assert fusecheck.finalize(place / "plan" / "plan.json").verdict == "committed"
    assert folder_files(place / "out") == folder_files(place / "reference")


def test_one_task_of_the_array_alone(place: Path) -> None:
    program(place, "fusecheck", f'echo "$@" >> {place}/log')
    assert sbatch(place, SLURM_ARRAY_TASK_ID="3", SLURM_ARRAY_TASK_COUNT="1", PARTS="8") == 0
    assert (place / "log").read_text().split()[-2:] == ["--parts", "8"]


@pytest.mark.parametrize(("code", "tries"), [(0, 1), (2, 1), (3, 1), (4, 4)])
def test_the_slurm_task_tries_again_after_4_only(place: Path, code: int, tries: int) -> None:
    program(place, "fusecheck", f"echo tried >> {place}/log; exit {code}")
    program(place, "sleep", "exit 0")
    assert sbatch(place, SLURM_ARRAY_TASK_ID="0") == code
    assert (place / "log").read_text().split() == ["tried"] * tries
