"""The quick part of scripts/faults, and the rules of its lab themselves: they must find what is bad."""

from __future__ import annotations

import importlib
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from checkpoints import Spec, write_checkpoint

from fusecheck import cli
from fusecheck.checkpoint import Checkpoint
from fusecheck.config import ModelConfig
from fusecheck.errors import FusecheckError, Interrupted
from fusecheck.operations.fuse import fuse
from fusecheck.operations.verify import verify
from fusecheck.render import Screen

SCRIPTS = Path(__file__).parent.parent / "scripts"
QUICK = {
    "signals": ("signals-random", "signals-twice"),
    "calls": ("signals-every-call",),
    "disks": ("small-disk", "disk-fills"),
    "transfers": ("short-transfers", "source-changes"),
    "targets": ("mounts", "parents", "permissions"),
    "others": ("four-at-once", "second-run", "order"),
}
"""What a test runs in one process, since each makes a lab first; 45 s of CPU time together."""


@pytest.mark.parametrize("group", QUICK)
def test_faults(group: str, tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "faults"), "--quick", "--folder", str(tmp_path), "--only", *QUICK[group]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode in {0, 2}, done.stdout + done.stderr
    skipped = re.findall(r"^(\S+) .*skipped: (.*)$", done.stdout, re.MULTILINE)
    if skipped and done.returncode == 2:
        pytest.skip("; ".join(f"{name}: {reason}" for name, reason in skipped))
    assert not list(tmp_path.iterdir())


def test_every_name_is_known() -> None:
    listed = subprocess.run(
        [sys.executable, str(SCRIPTS / "faults"), "--list"], capture_output=True, text=True, check=True
    )
    names = listed.stdout.split()
    assert len(names) == len(set(names)) > 25
    assert {name for group in QUICK.values() for name in group} <= set(names)


# --- signals at moments that no other process can hit for sure ---


def test_a_signal_is_never_taken_for_a_source_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "src", Spec(num_hidden_layers=1))
    fuse(tmp_path / "src", tmp_path / "out")

    read: Callable[[Checkpoint], ModelConfig] = vars(Checkpoint)["config"].func

    def stopped(checkpoint: Checkpoint) -> ModelConfig:
        if checkpoint.folder.name == "src":
            raise Interrupted(signal.SIGTERM)
        return read(checkpoint)

    monkeypatch.setattr(Checkpoint, "config", property(stopped))
    with pytest.raises(Interrupted):
        verify(tmp_path / "out", layers=())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_an_error_is_told(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Screen, "error", lambda *_: signal.raise_signal(number))
    monkeypatch.setattr(sys, "argv", ["fusecheck", "inspect", "/absent"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 128 + number


def test_a_second_signal_while_the_first_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tell = Screen.error

    def told(self: Screen, error: FusecheckError) -> None:
        signal.raise_signal(signal.SIGINT)
        tell(self, error)

    def stopped(*_: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Screen, "error", told)
    monkeypatch.setattr(Screen, "progress", stopped)
    monkeypatch.setattr(sys, "argv", ["fusecheck", "fuse", "/absent", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 143
    assert capsys.readouterr().err == "error: stopped by SIGTERM (signal 15)\n"


# --- the lab has teeth ---


@pytest.fixture(scope="module")
def tools() -> ModuleType:
    sys.path.insert(0, str(SCRIPTS))
    try:
        return importlib.import_module("faults_lib.lab")
    finally:
        sys.path.remove(str(SCRIPTS))


@pytest.fixture
def lab(tools: ModuleType, tmp_path: Path) -> Any:  # noqa: ANN401 - scripts are no package that mypy can import here
    made = tools.Lab(tmp_path, quick=True)
    made.renew_source()
    made.fresh()
    fuse(made.source, made.out)
    made._good = tools.tree(made.out)  # noqa: SLF001
    return made


def half(lab: Any) -> None:  # noqa: ANN401
    (lab.out / "config.json").unlink()


def flipped(lab: Any) -> None:  # noqa: ANN401
    path = lab.out / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\0")


def closed(lab: Any) -> None:  # noqa: ANN401
    (lab.out / "config.json").chmod(0o600)


def gone(lab: Any) -> None:  # noqa: ANN401
    lab.out.rename(lab.work / "elsewhere")


def orphan(lab: Any) -> None:  # noqa: ANN401
    (lab.box / ".fusecheck-0123456789abcdef-01234567").mkdir()


def touched(lab: Any) -> None:  # noqa: ANN401
    (lab.source / "config.json").touch()


@pytest.mark.parametrize("damage", [half, flipped, closed, gone, orphan, touched])
def test_the_lab_sees_what_a_run_left(lab: Any, tools: ModuleType, damage: Callable[[Any], None]) -> None:  # noqa: ANN401
    sound = tools.Run("a run", 0, "", "")
    lab.judge(sound, tools.Rules(rerun=False))
    assert lab.bad == []
    damage(lab)
    lab.judge(sound, tools.Rules(rerun=False))
    assert lab.bad != []


@pytest.mark.parametrize(
    ("code", "err"),
    [
        (-signal.SIGBUS, ""),
        (1, "Traceback (most recent call last):\n"),
        (70, "error: a bug\n"),
        (4, ""),
        (4, "error: model.safetensors: cannot write\nerror: twice\n"),
        (4, "error: something\n"),
        (4, "error: model.safetensors: \x1b[31m\n"),
    ],
)
def test_the_lab_sees_what_a_run_said(lab: Any, tools: ModuleType, code: int, err: str) -> None:  # noqa: ANN401
    rules = tools.Rules(codes=(4,), names=("model.safetensors",))
    assert list(lab.wrong_words(tools.Run("a run", 4, "", "error: model.safetensors: cannot write\n"), rules)) == []
    assert list(lab.wrong_words(tools.Run("a run", code, "", err), rules))


LOG = """\
1 mkdir("/box/.fusecheck-0123456789abcdef-01234567", 0777) = 0
2 openat(AT_FDCWD</w>, "/box/.fusecheck-0123456789abcdef-01234567/{n}", O_WRONLY|O_CREAT|O_EXCL, 0666) = 9</x>
2 pwrite64(9</box/.fusecheck-0123456789abcdef-01234567/{n}>, ""..., 9, 0) = 9
2 fsync(9</box/.fusecheck-0123456789abcdef-01234567/{n}> <unfinished ...>
2 <... fsync resumed>) = 0
1 fsync(7</box/.fusecheck-0123456789abcdef-01234567>) = 0
1 rename("/box/.fusecheck-0123456789abcdef-01234567", "/box/out") = 0
1 fsync(7</box>) = 0
"""


def test_the_order_is_seen(tools: ModuleType) -> None:
    targets = importlib.import_module(f"{tools.__package__}.targets")
    head, *each, folder, rename, parent = LOG.splitlines()
    files = [line.format(n=number) for number in range(8) for line in each]

    def wrong(*lines: str) -> list[str]:
        found: list[str] = targets.wrong_order(lines, Path("/box"), Path("/box/out"))
        return found

    assert wrong(head, *files, folder, rename, parent) == []
    assert wrong(head, *files[:-2], folder, rename, parent)  # a file without fsync
    assert wrong(head, *files[:-2], folder, rename, *files[-2:], parent)  # its fsync after the rename
    assert wrong(head, *files, rename, folder, parent)
    assert wrong(head, *files, folder, rename)
    assert wrong(head, *files, folder, parent, rename)
