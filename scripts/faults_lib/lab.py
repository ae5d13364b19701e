"""The lab: a small checkpoint, one good output of it, and the rules that hold after every fault."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from checkpoints import Spec, write_checkpoint

ROOT = Path(__file__).resolve().parents[2]
TEMPORARY = re.compile(r"\.fusecheck-[0-9a-f]{16}-[0-9a-f]{8}")
MANIFEST = "fusecheck.json"
SIGNAL_EXITS = {signal.SIGHUP: 129, signal.SIGINT: 130, signal.SIGTERM: 143}
TIME_LIMIT = 120
"""Seconds for one run, whatever else the machine does; a run that needs more hangs."""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_CLONE_NEWNS = 0x20000
_PROGRAM = "import sys; sys.modules['torch'] = None; from fusecheck.cli import main; main()"
"""What is asked here needs no torch, whose import would take most of the time."""
_SPEC = Spec(
    files=2,
    num_hidden_layers=4,
    hidden_size=128,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=16,
    intermediate_size=384,
    vocab_size=2048,
    side_files=("tokenizer.json", "1_Pooling/config.json"),
)
"""2 MB in two shards, with groups that straddle them; every kind of file that fuse writes."""

Tree = Mapping[str, tuple[int, str]]
"""Relative path -> (mode, SHA-256) of every file and folder below one."""


class SkippedError(Exception):
    """A fault that cannot be made here; the text says why."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of fault, what it needs of the machine, and the function that makes it and calls the lab's rules."""

    name: str
    make: Callable[[Lab], None]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """One process that ended. A negative code is the signal that it died of."""

    what: str
    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        """Both streams."""
        return self.out + self.err


@dataclass(frozen=True, slots=True)
class Rules:
    """What one fault may lead to, where it differs from a run without one."""

    codes: Collection[int] = (0,)
    names: tuple[str, ...] = ()
    """One of these must be in the error line: the file, and as far as it is known the cause."""
    clean: bool = True
    """No temporary may be left; otherwise only such as the next run removes."""
    rerun: bool = True
    old: Tree | None = None
    """What OUT held before, and may still hold (--force)."""
    source: bool = True
    """The source must be untouched; not asked where the fault itself changes it."""


@dataclass(slots=True)
class Lab:
    """A work folder with `source`, and `box` for OUT, which is always at the same depth, so that outputs are comparable."""

    work: Path
    quick: bool
    runs: int = 0
    bad: list[str] = field(default_factory=list)
    private: bool = False
    """Mounts of this process are its own, and go with it."""
    seconds: float = 0.0
    """How long a run takes."""
    _good: Tree = field(default_factory=dict)
    _source: object = None

    @property
    def source(self) -> Path:
        """The checkpoint."""
        return self.work / "src"

    @property
    def box(self) -> Path:
        """OUT's parent."""
        return self.work / "box"

    @property
    def out(self) -> Path:
        """OUT."""
        return self.box / "out"

    def set_up(self) -> None:
        """Make the checkpoint and the good output, which must be proven equal to it."""
        self.private = _own_mounts()
        self.renew_source()
        self.fresh()
        self.fusecheck("fuse", self.source, self.out)  # compiles what is not compiled yet
        self.fresh()
        began = time.monotonic()
        first = self.fuse()
        self.seconds = time.monotonic() - began
        proof = self.fusecheck("verify", self.out, "--source", self.source)
        if first.code or proof.code:
            text = (first.text + proof.text)[-500:]
            sys.exit(f"the lab cannot begin: fuse exits {first.code}, verify {proof.code}: {text}")
        self._good = tree(self.out)

    def renew_source(self) -> None:
        """Make the checkpoint anew, after a fault that changed it."""
        shutil.rmtree(self.source, ignore_errors=True)
        write_checkpoint(self.source, _SPEC)
        self._source = state(self.source)

    def fresh(self) -> None:
        """Empty the box."""
        shutil.rmtree(self.box, ignore_errors=True)
        self.box.mkdir()

    def shards(self) -> list[Path]:
        """The source's weight files."""
        return sorted(self.source.glob("*.safetensors"))

    def some(self, few: int, many: int) -> int:
        """How often: few times in a quick run."""
        return few if self.quick else many

    # --- running ---

    def command(self, *arguments: object) -> list[str]:
        """The command line of this tree, in this interpreter."""
        return [sys.executable, "-c", _PROGRAM, *map(str, arguments)]

    def fusecheck(self, *arguments: object, before: Sequence[object] = (), env: Mapping[str, str] | None = None) -> Run:
        """Run it to its end, behind the command `before` if one is given."""
        process = self.start(*arguments, before=before, env=env)
        return self.ended(process, " ".join(map(str, (*before, *arguments))))

    def fuse(self, *options: object, before: Sequence[object] = (), env: Mapping[str, str] | None = None) -> Run:
        """`fuse` of the source to OUT."""
        return self.fusecheck("fuse", self.source, self.out, *options, before=before, env=env)

    def start(
        self, *arguments: object, before: Sequence[object] = (), env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start it; `ended` waits for it."""
        return subprocess.Popen(
            [*map(str, before), *self.command(*arguments)],
            env={**environment(), **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            cwd=self.work,
        )

    def ended(self, process: subprocess.Popen[str], what: str) -> Run:
        """Wait for a process. One that hangs is bad, and killed."""
        self.runs += 1
        try:
            out, err = process.communicate(timeout=TIME_LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            self.complain(what, f"hangs for {TIME_LIMIT} s")
        return Run(what.replace(f"{self.work}/", ""), process.returncode, out, err)

    def traced(self, *injections: str, paths: Sequence[Path] = (), log: Path | None = None) -> list[object]:
        """The strace command that injects faults, into calls on `paths` alone where some are given."""
        command: list[object] = ["strace", "-f", "-qq", "-o", log or os.devnull]
        for path in paths:
            command += ["-P", path]
        calls = ",".join(injection.partition(":")[0] for injection in injections)
        command += ["-e", f"trace={calls}"]
        for injection in injections:
            command += ["-e", f"inject={injection}"]
        return command

    # --- judging ---

    def complain(self, what: str, why: str) -> None:
        """Count a broken rule."""
        self.bad.append(f"{what.replace(f'{self.work}/', '')}: {why}")

    def judge(self, run: Run, rules: Rules) -> None:
        """All rules, after one run to OUT."""
        for why in (*self.wrong_words(run, rules), *self._wrong_files(run, rules)):
            self.complain(run.what, why)
        if rules.rerun:
            self.again(run.what, force=rules.old is not None)

    def wrong_words(self, run: Run, rules: Rules) -> Iterator[str]:
        """What is wrong with the exit code and the streams."""
        if run.code not in rules.codes:
            yield f"exit {run.code}, wanted {sorted(rules.codes)}: {run.err[-300:]!r}"
        if "Traceback" in run.text:
            yield f"a traceback: {run.text.strip().splitlines()[-1]!r}"
        if _CONTROL.search(run.text):
            yield "control bytes on a stream"
        lines = [line for line in run.err.splitlines() if line.startswith("error: ")]
        if run.code <= 1:
            return
        if len(lines) != 1:
            yield f"{len(lines)} lines `error: ...` on stderr: {run.err[-300:]!r}"
        elif rules.names and not any(name in lines[0] for name in rules.names):
            yield f"the error names none of {rules.names}: {lines[0]!r}"

    def _wrong_files(self, run: Run, rules: Rules) -> Iterator[str]:
        stands = os.path.lexists(self.out)
        found = tree(self.out) if stands else {}
        if stands and found != self._good and (rules.old is None or found != rules.old):
            yield f"OUT is neither absent nor complete: {sorted(found)}"
        if rules.old is not None and not stands:
            yield "the old OUT is gone"
        if run.code == 0 and found != self._good:
            yield "exit 0, but OUT is not complete"
        left = self.left()
        if rules.clean and left:
            yield f"left behind: {left}"
        elif any(not TEMPORARY.fullmatch(name) for name in left):
            yield f"left behind, and the next run will not know it: {left}"
        if rules.source and state(self.source) != self._source:
            yield "the source was changed"

    def left(self) -> list[str]:
        """What lies in the box beside OUT."""
        return sorted(path.name for path in self.box.iterdir() if path.name not in {"out", "lost+found"})

    def again(self, what: str, *, force: bool = False) -> None:
        """The same command once more, without the fault, must succeed by itself and clear what dead runs left."""
        run = self.fuse(*["--force"] if force else [])
        if run.code or not self.is_complete() or self.left():
            self.complain(what, f"the re-run exits {run.code}, left {self.left()}: {run.err[-300:]!r}")

    def is_complete(self) -> bool:
        """Whether OUT is, byte for byte and mode for mode, the good output."""
        return os.path.lexists(self.out) and tree(self.out) == self._good

    def expect(self, what: str, holds: object, why: str) -> None:
        """A rule of one fault alone."""
        if not holds:
            self.complain(what, why)

    # --- mounts ---

    @contextmanager
    def mounted(self, *arguments: object, at: Path | None = None) -> Iterator[Path]:
        """Mount something for a while, by default over the box, so that OUT keeps its path."""
        if at is None:
            self.fresh()
        with self.mounted_again(*arguments, at=at) as place:
            yield place

    @contextmanager
    def mounted_again(self, *arguments: object, at: Path | None = None) -> Iterator[Path]:
        """The same over a place that stays as it is."""
        place = at or self.box
        place.mkdir(exist_ok=True)
        call("mount", *arguments, place)
        try:
            yield place
        finally:
            call("umount", place)


def call(*command: object) -> None:
    """Run a tool of the system, which must succeed."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SkippedError(
            f"{' '.join(map(str, command[:1]))} fails here: {(done.stderr or done.stdout).strip()[-200:]}"
        )


def environment() -> dict[str, str]:
    """Ours, with this tree's fusecheck first, without what colours or debugs the output or writes byte code."""
    dropped = {"FORCE_COLOR", "NO_COLOR", "CI", "TERM", "COLUMNS", "FUSECHECK_DEBUG", "PYTHONUNBUFFERED"}
    kept = {key: value for key, value in os.environ.items() if key not in dropped}
    return kept | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}


def tree(folder: Path) -> Tree:
    """Modes and digests of all that lies in a folder, itself too."""
    found = {}
    for path in (folder, *folder.rglob("*")):
        data = path.read_bytes() if path.is_file() else b""
        found[path.relative_to(folder).as_posix()] = (path.lstat().st_mode, hashlib.sha256(data).hexdigest())
    return found


def state(folder: Path) -> dict[str, tuple[int, ...]]:
    """What any change to a folder would change."""
    found: dict[str, tuple[int, ...]] = {}
    for path in (folder, *folder.rglob("*")):
        status = path.lstat()
        found[str(path)] = (status.st_ino, status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return found


def missing(need: str, lab: Lab) -> str | None:
    """Why a fault cannot be made here, if so."""
    if need == "root":
        return None if os.geteuid() == 0 else "needs root"
    if need == "mount":
        return None if lab.private else "needs root and a mount namespace of its own"
    return None if shutil.which(need) else f"needs {need}"


def build_shim(lab: Lab) -> Path:
    """Our LD_PRELOAD library, compiled on first use."""
    library = lab.work / "shim.so"
    if not library.exists():
        call("cc", "-shared", "-fPIC", "-O1", "-o", library, Path(__file__).parent / "shim.c", "-ldl")
    return library


def _own_mounts() -> bool:
    """Give this process mounts of its own, so that none outlives it."""
    if os.geteuid():
        return False
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS):
        return False
    private = subprocess.run(["mount", "--make-rprivate", "/"], capture_output=True, check=False)
    return private.returncode == 0
