"""Where OUT lies, who else writes there, what the file system cannot do, and the order on the way to the disk."""

from __future__ import annotations

import os
import re
import shutil
import signal
import stat
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from .lab import TEMPORARY, Fault, Lab, Rules, Run, call, tree

UNSUPPORTED = (
    *("copy_file_range:error=EXDEV", "copy_file_range:error=EOPNOTSUPP", "copy_file_range:error=ENOSYS"),
    *("sendfile:error=EINVAL", "fallocate:error=EOPNOTSUPP", "statfs,fstatfs:error=ENOSYS"),
    *("flock:error=ENOLCK", "flock:error=EOPNOTSUPP", "chmod,fchmod,fchmodat:error=EPERM"),
)


def refused(lab: Lab, what: str, rules: Rules, out: Path, *options: object) -> None:
    """A fuse to `out` that must fail and change nothing below the box."""
    before = _listing(lab.box)
    run = lab.fusecheck("fuse", lab.source, out, *options)
    for why in lab.wrong_words(run, rules):
        lab.complain(what, why)
    lab.expect(what, _listing(lab.box) == before, "something was made or changed")


def works(lab: Lab, what: str, out: Path, *options: object) -> None:
    """A fuse to `out` that must succeed, by the word of verify, and leave nothing beside it."""
    run = lab.fusecheck("fuse", lab.source, out, *options)
    proof = lab.fusecheck("verify", out, "--source", lab.source)
    lab.expect(what, run.code == 0 and proof.code == 0, f"exit {run.code}, verify {proof.code}: {run.err[-300:]!r}")
    lab.expect(what, not _temporaries(lab.box), "a temporary is left")


def _listing(folder: Path) -> list[tuple[str, int, int]]:
    return sorted((str(path), path.lstat().st_ino, path.lstat().st_mtime_ns) for path in folder.rglob("*"))


def _temporaries(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if TEMPORARY.fullmatch(path.name)]


def mounts(lab: Lab) -> None:
    """OUT on a mount point is refused, below one it works; bind mounts, tmpfs and a read-only file system."""
    at_point = Rules(codes=(2,), names=("mount point",))
    with lab.mounted("-t", "tmpfs", "tmpfs"):
        refused(lab, "OUT is a tmpfs", at_point, lab.box)
        refused(lab, "OUT is a tmpfs, --force", at_point, lab.box, "--force")
        works(lab, "OUT below a tmpfs", lab.box / "model")
        lab.out.mkdir(exist_ok=True)
        with lab.mounted("--bind", lab.work / "old-bind", at=lab.out) if _made(lab.work / "old-bind") else ExitStack():
            refused(lab, "OUT is a bind mount", at_point, lab.out, "--force")
            works(lab, "OUT below a bind mount", lab.out / "a/model")
        call("mount", "-o", "remount,ro", lab.box)
        for options in ([], ["--force"]):
            refused(
                lab, "a read-only file system", Rules(codes=(2, 4), names=("read-only", "not empty")), lab.out, *options
            )
        refused(lab, "a read-only parent", Rules(codes=(4,), names=("read-only",)), lab.box / "new/model")


def _made(folder: Path) -> bool:
    folder.mkdir(exist_ok=True)
    return True


def overlay(lab: Lab) -> None:
    """The file system of containers; also with an old OUT that lies in the lower layer."""
    with lab.mounted("-t", "tmpfs", "tmpfs", at=lab.work / "layers") as layers:
        for name in ("lower/box/out", "lower/box/empty", "upper", "work", "merged"):
            (layers / name).mkdir(parents=True)
        (layers / "lower/box/out/old").touch()
        options = f"lowerdir={layers}/lower,upperdir={layers}/upper,workdir={layers}/work"
        with lab.mounted("-t", "overlay", "-o", options, "overlay", at=layers / "merged") as merged:
            works(lab, "OUT on overlayfs", merged / "box/new")
            works(lab, "OUT on overlayfs, again", merged / "box/new")
            works(lab, "OUT on overlayfs, an empty folder of the lower layer", merged / "box/empty")
            works(lab, "OUT on overlayfs, --force", merged / "box/new", "--force")
            rules = Rules(codes=(4,), names=("write to a new folder",))
            run = lab.fusecheck("fuse", lab.source, merged / "box/out", "--force")
            if run.code:  # the kernel may refuse to exchange a folder of the lower layer; then all stays as it was
                for why in lab.wrong_words(run, rules):
                    lab.complain("--force over a lower layer", why)
                lab.expect("--force over a lower layer", (merged / "box/out/old").exists(), "the old OUT is gone")
            lab.expect("overlay", not _temporaries(merged), f"left {_temporaries(merged)}")


def parents(lab: Lab) -> None:
    """Missing parents are made, and go again where the run fails."""
    lab.fresh()
    works(lab, "OUT in missing parents", lab.box / "a/b/c/out")
    lab.fresh()
    run = lab.fusecheck("fuse", lab.source, lab.box / "a/b/out", before=["sh", "-c", 'ulimit -f 100; exec "$@"', "sh"])
    lab.expect("parents after a failure", run.code == 4, f"exit {run.code}")
    lab.expect("parents after a failure", not any(lab.box.iterdir()), "parents were left")
    (lab.box / "file").touch()
    refused(lab, "a parent that is a file", Rules(codes=(2,), names=("not a folder",)), lab.box / "file/out")
    (lab.box / "link").symlink_to(lab.box / "nowhere")
    refused(lab, "OUT is a link", Rules(codes=(2,), names=("link",)), lab.box / "link")
    for out in (lab.source, lab.source / "out", lab.work):
        refused(lab, "OUT in SRC or around it", Rules(codes=(2,), names=("SRC", "current folder")), out, "--force")


def permissions(lab: Lab) -> None:
    """Root without its powers is like any user: a parent and a source that forbid."""
    weak = ["setpriv", "--bounding-set=-dac_override,-dac_read_search,-fowner"]
    lab.fresh()
    for path, mode, word in ((lab.box, 0o555, "may not be written"), (lab.shards()[0], 0o000, lab.shards()[0].name)):
        before = stat.S_IMODE(path.stat().st_mode)
        path.chmod(mode)
        run = lab.fuse(before=weak)
        path.chmod(before)
        lab.judge(run, Rules(codes=(4,), names=(word,), rerun=False, source=False))
    lab.renew_source()


def umasks(lab: Lab) -> None:
    """Modes are 0666 and 0777 masked, whatever the source's are."""
    lab.shards()[0].chmod(0o600)
    for mask in (0o077, 0o027, 0o022, 0o002):
        lab.fresh()
        run = lab.fuse(before=["sh", "-c", f'umask {mask:o}; exec "$@"', "sh"])
        modes = {(stat.S_ISDIR(mode), stat.S_IMODE(mode)) for mode, _ in tree(lab.out).values()}
        wanted = {(True, 0o777 & ~mask), (False, 0o666 & ~mask)}
        lab.expect(f"umask {mask:03o}", run.code == 0 and modes == wanted, f"exit {run.code}, modes {modes}")
    lab.renew_source()


def four_at_once(lab: Lab) -> None:
    """One wins; the others say 4, or 0 where they find this very result; OUT is complete and nothing is left."""
    for turn in range(lab.some(1, 8)):
        lab.fresh()
        started = [lab.start("fuse", lab.source, lab.out) for _ in range(4)]
        for number, process in enumerate(started):
            run = lab.ended(process, f"run {number} of four, turn {turn}")
            for why in lab.wrong_words(run, Rules(codes=(0, 4), names=("out",))):
                lab.complain(run.what, why)
        codes = sorted(process.returncode for process in started)
        lab.expect(f"turn {turn}", codes[0] == 0 and lab.is_complete(), f"codes {codes}, complete {lab.is_complete()}")
        lab.expect(f"turn {turn}", not lab.left(), f"left {lab.left()}")


def second_run(lab: Lab) -> None:
    """Exit 0, "already done", and not one byte or time changed; any change in OUT is exit 2, and --force mends it."""
    lab.fresh()
    lab.fuse()
    before = _listing(lab.box)
    run = lab.fuse("--json")
    lab.judge(run, Rules())
    lab.expect(run.what, '"already_done"' in run.out and _listing(lab.box) == before, "it was written anew")
    (lab.out / "stray").touch()
    refused(lab, "a stray file in OUT", Rules(codes=(2,), names=("not empty",)), lab.out)
    lab.judge(lab.fuse("--force"), Rules())


def orphans(lab: Lab) -> None:
    """What a killed run left is cleared by any run into that parent; a run that lives is left alone."""
    lab.fresh()
    slow = lab.traced("pwrite64:delay_enter=300000")
    dead, alive = (lab.start("fuse", lab.source, lab.box / name, before=slow) for name in ("dead", "alive"))
    for _ in range(3000):
        if len(_temporaries(lab.box)) == 2:
            break
        time.sleep(0.01)
    inner = _child(dead.pid)
    killed = [path for path in _temporaries(lab.box) if _owner(inner) == path.name]
    os.kill(inner, signal.SIGKILL)
    dead.communicate()
    lab.expect("orphans", len(killed) == 1 and killed[0].exists(), "the killed run left nothing to clear")
    run = lab.fuse()
    lab.expect(run.what, run.code == 0 and lab.is_complete(), f"exit {run.code}")
    lab.expect(run.what, not any(path.exists() for path in killed), "the orphan is still there")
    lab.expect(run.what, len(_temporaries(lab.box)) == 1, "the living run lost its folder")
    last = lab.ended(alive, "the run that lived through it")
    lab.expect(last.what, last.code == 0 and not _temporaries(lab.box), f"exit {last.code}: {last.err[-200:]!r}")


def _child(pid: int) -> int:
    """What strace started."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()[0])


def _owner(pid: int) -> str | None:
    """The name of the temp folder that a process holds."""
    links = (os.path.realpath(link) for link in Path(f"/proc/{pid}/fd").iterdir())
    return next((Path(link).name for link in links if TEMPORARY.fullmatch(Path(link).name)), None)


def unsupported(lab: Lab) -> None:
    """What a file system may refuse without being wrong; folders that cannot be fsynced, exchanges that are not there."""
    first = first_folder_sync(_log(lab, lab.out))
    allowed = (*UNSUPPORTED, f"fsync:error=EINVAL:when={first}+")
    for injection in allowed[:: lab.some(4, 1)]:
        lab.fresh()
        run = lab.fuse(before=lab.traced(injection))
        lab.judge(Run(f"{run.what}", run.code, run.out, run.err), Rules(rerun=False))
    for error in ("EINVAL", "ENOSYS"):
        lab.fresh()
        lab.out.mkdir()
        (lab.out / "old").touch()
        old = tree(lab.out)
        run = lab.fuse("--force", before=lab.traced(f"renameat2:error={error}"))
        lab.judge(run, Rules(codes=(4,), names=("cannot exchange",), old=old, rerun=False))
        lab.expect(run.what, tree(lab.out) == old, "the old OUT was touched")
        shutil.rmtree(lab.out)


def order(lab: Lab) -> None:
    """Every file and folder is fsynced after its last change and before the rename; the parents after it; then exit 0."""
    for out in (lab.out, lab.box / "a/b/out"):
        for why in wrong_order(_log(lab, out), lab.box, out):
            lab.complain(f"order of {out.name}", why)


def _log(lab: Lab, out: Path) -> list[str]:
    lab.fresh()
    log = lab.work / "order.log"
    calls = "fsync,fdatasync,rename,renameat,renameat2,mkdir,mkdirat,openat,write,pwrite64,ftruncate"
    before = ["strace", "-f", "-y", "-qq", "-s", "0", "-o", log, "-e", f"trace={calls}"]
    lab.fusecheck("fuse", "-q", lab.source, out, before=before)
    return log.read_text(encoding="utf-8", errors="replace").splitlines()


_CALL = re.compile(r"(\d+) +(?:<\.\.\. )?(\w+)(\(| resumed>)(.*)")
_PATH = re.compile(r'^\d+<([^>]*)>|^(?:AT_FDCWD<[^>]*>, )?"([^"]*)"')


def events(lines: Iterable[str]) -> list[tuple[str, str]]:
    """(call, path) of each call as it ended, in order; writes as they began."""
    began: dict[str, str] = {}
    found = []
    for line in lines:
        match = _CALL.match(line)
        if match is None:
            continue
        thread, call_name, opening, rest = match.groups()
        path = _PATH.match(rest)
        name = (path[1] or path[2]) if path and opening == "(" else began.get(thread, "")
        began[thread] = name
        if "<unfinished" in rest and "sync" in call_name:
            continue
        if opening == "(" or "sync" in call_name:
            created = call_name == "openat" and "O_CREAT" in rest
            found.append(("create" if created else call_name, name))
    return found


def first_folder_sync(lines: Iterable[str]) -> int:
    """Which fsync of a run is the first one of a folder."""
    begun = [line for line in lines if " fsync(" in line]
    numbers = [n for n, line in enumerate(begun, 1) if re.search(r"\.fusecheck-[0-9a-f-]+(/1_Pooling)?>", line)]
    return numbers[0]


def wrong_order(lines: Iterable[str], box: Path, out: Path) -> list[str]:
    """What could be lost in a power cut although the run says that all is done."""
    log = events(lines)
    renames = [n for n, (name, path) in enumerate(log) if name.startswith("rename") and TEMPORARY.search(path)]
    if len(renames) != 1:
        return [f"{len(renames)} renames"]
    at = renames[0]
    synced = {path: n for n, (name, path) in enumerate(log) if "sync" in name}
    changed = {path: n for n, (name, path) in enumerate(log) if name in {"create", "write", "pwrite64", "ftruncate"}}
    made = {path: n for n, (name, path) in enumerate(log) if name == "create" or name.startswith("mkdir")}
    wrong = []
    inside = [path for path in {**changed, **made} if TEMPORARY.search(path)]
    for path in inside:
        last = max(
            changed.get(path, 0), max((n for other, n in made.items() if str(Path(other).parent) == path), default=0)
        )
        if not last <= synced.get(path, -1) < at:
            wrong.append(f"{path} is not fsynced between its last change and the rename")
    if len(inside) < 8:
        wrong.append(f"only {len(inside)} files and folders were seen")
    above = out.parent
    while above != box.parent:
        if synced.get(str(above), -1) < at and (
            above == out.parent or str(above / out.relative_to(above).parts[0]) in made
        ):
            wrong.append(f"{above} is not fsynced after the rename")
        above = above.parent
    return wrong


FAULTS = (
    Fault("mounts", mounts, ("mount",)),
    Fault("overlay", overlay, ("mount",)),
    Fault("parents", parents),
    Fault("permissions", permissions, ("root", "setpriv")),
    Fault("umasks", umasks),
    Fault("four-at-once", four_at_once),
    Fault("second-run", second_run),
    Fault("orphans", orphans, ("strace",)),
    Fault("unsupported", unsupported, ("strace",)),
    Fault("order", order, ("strace",)),
)
