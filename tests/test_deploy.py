"""scripts/deploy: the files parse, their commands run as they stand, and an init container may run twice."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Spec, fused, read_checkpoint, write_checkpoint
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "scripts" / "deploy"
LEFT_OUT = {"torch", "safetensors", "huggingface-hub"}
"""Requirements of fusecheck that the image does without."""
NOBODY = 65534
AS_NOBODY = (
    *("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"),
    *("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"),  # to read a Python that lies below /root
)
"""Writes as nobody does."""

yaml: Any = pytest.importorskip("yaml", reason="PyYAML is not installed")


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text(encoding="utf-8")))


def pods() -> Iterator[dict[str, Any]]:
    for document in documents("initcontainer.yaml"):
        yield document["spec"]["template"]["spec"]


def fuse_containers() -> list[dict[str, Any]]:
    found = [
        container
        for pod in pods()
        for container in (*pod.get("initContainers", []), *pod["containers"])
        if "fusecheck" in container["image"]
    ]
    assert len(found) == 2
    return found


def dockerfile() -> str:
    return (DEPLOY / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")


@pytest.fixture
def volume() -> Iterator[Path]:
    """A folder that any user can reach; tmp_path is root's alone."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def run(arguments: list[str], *, unprivileged: bool = False) -> subprocess.CompletedProcess[str]:
    """The entrypoint, as a process of its own."""
    code = "import sys; from fusecheck.cli import main; sys.exit(main())"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "HOME": "/"}
    command = [*(AS_NOBODY if unprivileged else ()), sys.executable, "-c", code, *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd="/", env=environment)


def at(place: Path, arguments: list[str]) -> list[str]:
    """The container's paths below `place`."""
    return [f"{place}{word}" if word.startswith("/") else word for word in arguments]


# ----------------------------------------------------------------------------------------------------- what they say


def test_the_manifests_say_what_the_text_says() -> None:
    deployment, job = documents("initcontainer.yaml")
    assert (deployment["kind"], job["kind"]) == ("Deployment", "Job")
    rules = {rule["action"]: rule for rule in job["spec"]["podFailurePolicy"]["rules"]}
    assert rules["FailJob"]["onExitCodes"] == {"containerName": "fuse", "operator": "In", "values": [2, 3, 70]}
    assert job["spec"]["template"]["spec"]["restartPolicy"] == "Never"
    assert next(iter(rules)) == "Ignore"
    for container in fuse_containers():
        assert container["name"] == "fuse"
        assert container["resources"]["limits"]["memory"] == "128Mi"
        assert container["securityContext"]["readOnlyRootFilesystem"] is True


def test_out_lies_below_a_mounted_volume() -> None:
    for container in fuse_containers():
        mounts = {mount["mountPath"]: mount.get("readOnly", False) for mount in container["volumeMounts"]}
        source, out = (Path(word) for word in container["args"] if word.startswith("/"))
        assert str(source.parent) in mounts
        assert str(out) not in mounts
        assert mounts[str(out.parent)] is False


def test_the_server_reads_what_was_written() -> None:
    deployment, _ = pods()
    (server,) = deployment["containers"]
    assert server["args"][-1] == deployment["initContainers"][0]["args"][-1]


def test_the_image_is_not_root_and_holds_all_but_torch() -> None:
    """What fusecheck requires, and what that requires, at the versions of the constraints."""
    text = dockerfile()
    assert re.search(r"^USER (\d+):\1$", text, re.MULTILINE)
    assert re.search(r'^ENTRYPOINT \["fusecheck"\]$', text, re.MULTILINE)
    words = next(line for line in text.splitlines() if "--constraint" in line).split("/wheels")[-1].split()
    named = {canonicalize_name(word) for word in words}
    wanted, todo = set[str](), {"fusecheck"}
    while todo:
        for line in requires(todo.pop()) or []:
            requirement = Requirement(line)
            name = canonicalize_name(requirement.name)
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if applies and name not in wanted | LEFT_OUT | {"colorama"}:
                wanted.add(name)
                todo.add(name)
    assert named == wanted
    pins = (ROOT / "scripts" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert named <= {canonicalize_name(pin.partition("==")[0]) for pin in pins if "==" in pin}


# -------------------------------------------------------------------------------------------------------- they do run


@pytest.mark.parametrize("number", [0, 1], ids=["init container", "job"])
def test_the_container_runs_twice(number: int, volume: Path) -> None:
    """As another user than root; the second run, as after a restart of the pod, finds its own result."""
    arguments = at(volume, fuse_containers()[number]["args"])
    source, out = (Path(word) for word in arguments if word.startswith("/"))
    content = write_checkpoint(source, Spec(files=2))
    out.parent.mkdir()
    root = os.geteuid() == 0
    if root:
        os.chown(out.parent, NOBODY, NOBODY)
        if not shutil.which("setpriv") or run(["--version"], unprivileged=True).returncode:
            pytest.skip("this Python cannot be run by another user")
    words = [word for word in arguments if word != "--json"]
    first = run([*words, "--json"], unprivileged=root)
    assert (first.returncode, json.loads(first.stdout)["verdict"]) == (0, "fused"), first.stderr
    before = {path: path.stat() for path in out.rglob("*")}
    second = run([*words, "--json"], unprivileged=root)
    assert (second.returncode, json.loads(second.stdout)["verdict"]) == (0, "already_done"), second.stderr
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == {p: s.st_mtime_ns for p, s in before.items()}
    assert [path.name for path in out.parent.iterdir()] == [out.name]  # no temporary folder is left
    assert all(status.st_mode & 0o044 == 0o044 for path, status in before.items() if path.is_file())
    assert {status.st_uid for status in before.values()} == {NOBODY if root else os.geteuid()}
    assert read_checkpoint(out) == fused(content)


def test_a_malformed_source_is_no_reason_to_try_again(volume: Path) -> None:
    arguments = at(volume, fuse_containers()[0]["args"])
    source, out = (Path(word) for word in arguments if word.startswith("/"))
    write_checkpoint(source, Spec())
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    done = run(arguments)
    assert done.returncode == 3
    assert done.stderr.count("error:") == 1
    assert not out.exists()


def test_the_ci_job_runs_as_it_stands(volume: Path) -> None:
    """Every step's script, by bash, with the job's environment moved below a folder, and without torch as in the image."""
    (job,) = (job for document in documents("ci-job.yml") for job in document["jobs"].values())
    places = {name: f"{volume}{value}" for name, value in job["env"].items()}
    write_checkpoint(Path(places["SRC"]), Spec(files=3))
    (volume / "bin").mkdir()
    program = volume / "bin" / "fusecheck"
    code = "import sys; sys.modules['torch'] = None; from fusecheck.cli import main; sys.exit(main())"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c "{code}" "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    environment = {**os.environ, **places, "PATH": f"{program.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    bash = shutil.which("bash")
    assert bash
    for step in job["steps"]:
        assert step["shell"] == "bash"
        command = [bash, "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]  # as GitHub calls it
        done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=volume, env=environment)
        assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["verdict"], document["proved"]) == ("equal", ["exact"])


@pytest.mark.parametrize(("code", "tries"), [(0, 1), (2, 1), (3, 1), (4, 3), (70, 1)])
def test_the_ci_job_tries_again_after_4_only(code: int, tries: int, volume: Path) -> None:
    (job,) = (job for document in documents("ci-job.yml") for job in document["jobs"].values())
    log = volume / "log"
    for name, text in (("fusecheck", f"echo tried >> {log}; exit {code}"), ("sleep", "exit 0")):
        program = volume / name
        program.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        program.chmod(0o755)
    environment = {**os.environ, **job["env"], "PATH": f"{volume}:{os.environ['PATH']}"}
    command = ["bash", "-eo", "pipefail", "-c", job["steps"][0]["run"]]
    assert subprocess.run(command, check=False, env=environment).returncode == code
    assert log.read_text(encoding="utf-8").split() == ["tried"] * tries
