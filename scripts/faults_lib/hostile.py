"""Hostile checkpoints through every command that reads: no traceback, no hang, no death, no control bytes, bounded memory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from checkpoints import Spec, write_checkpoint

from .lab import Fault, Lab, Rules, Run, environment

MAX_SECONDS = 10.0
MAX_BYTES = 200 << 20
"""Resident, of one process; the kernel counts what this script itself held at the fork too, some 70 MiB."""

SINGLE = "model.safetensors"
DRIVING = "\x1b[31m\x9b2J\u202egnp.exe[/][bold]\r"


def header(text: bytes, data: bytes = b"") -> Callable[[Path], None]:
    """A weight file of this header."""
    return lambda folder: _write(folder / SINGLE, len(text).to_bytes(8, "little") + text + data)


def entry(name: str = "a", shape: str = "[2]", offsets: str = "[0,4]", dtype: str = "BF16") -> bytes:
    """A header of one tensor."""
    return f'{{{json.dumps(name)}:{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}'.encode()


def blob(name: str, data: bytes) -> Callable[[Path], None]:
    """A file of these bytes."""
    return lambda folder: _write(folder / name, data)


def special(make: Callable[[Path], None], name: str = SINGLE) -> Callable[[Path], None]:
    """Something that is no regular file, in place of one."""

    def replace(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return replace


def sparse(path: Path) -> None:
    """A terabyte of nothing, behind a sound header."""
    text = entry(shape="[549755813888]", offsets="[0,1099511627776]")
    _write(path, len(text).to_bytes(8, "little") + text)
    os.truncate(path, (1 << 40) + 8 + len(text))


def many(folder: Path) -> None:
    """A header of a hundred thousand empty tensors."""
    parts = [f'"t{n}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for n in range(99_999)]
    header(f"{{{','.join(parts)}}}".encode())(folder)


def names_that_drive(folder: Path) -> None:
    """A name for every place in which one may stand."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    blob("config.json", json.dumps(config | {"model_type": DRIVING}).encode())(folder)
    _write(folder / os.fsdecode(b"side\x1b[2J\xff\n.json"), b"{}")
    blob("fusecheck.json", json.dumps({"schema_version": DRIVING}).encode())(folder)


CASES: dict[str, Callable[[Path], None]] = {
    "sound": lambda _: None,
    "empty weights": blob(SINGLE, b""),
    "cut weights": lambda folder: os.truncate(folder / SINGLE, 3000),
    "header longer than the file": blob(SINGLE, (1 << 62).to_bytes(8, "little") + b"{}"),
    "deep header": header(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "many tensors": many,
    "name that drives the terminal": header(entry(DRIVING), b"1234"),
    "overflowing shape": header(entry(shape="[9223372036854775807,9223372036854775807]"), b"1234"),
    "long number": header(entry(offsets=f"[0,{'9' * 5000}]"), b"1234"),
    "NaN": header(entry(offsets="[0,NaN]"), b"1234"),
    "not UTF-8": header(b'{"\xff\xfe":{}}'),
    "byte order mark": header(b"\xef\xbb\xbf" + entry(), b"1234"),
    "duplicate": header(entry()[:-1] + b"," + entry()[1:], b"1234"),
    "pickle": blob(SINGLE, b"\x80\x02cos\nsystem\n(S'touch canary'\ntR."),
    "zip": blob(SINGLE, b"PK\x03\x04" + bytes(100)),
    "git-lfs": blob(SINGLE, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
    "FIFO": special(os.mkfifo),
    "folder": special(Path.mkdir),
    "dangling link": special(lambda path: path.symlink_to("nowhere")),
    "link to itself": special(lambda path: path.symlink_to(path.name)),
    "endless device": special(lambda path: path.symlink_to("/dev/zero")),
    "endless config": special(lambda path: path.symlink_to("/dev/zero"), "config.json"),
    "terabyte": special(sparse),
    "deep config": blob("config.json", b"[" * 200_000),
    "config of control characters": names_that_drive,
    "huge numbers": blob(
        "config.json", b'{"model_type":"qwen3","num_hidden_layers":1e999,"hidden_size":' + b"9" * 5000 + b"}"
    ),
    "index out of the folder": blob(f"{SINGLE}.index.json", b'{"weight_map":{"a":"../../etc/passwd"}}'),
    "index is a list": blob(f"{SINGLE}.index.json", b"[]"),
    "deep manifest": blob("fusecheck.json", b'{"a":' * 100_000),
    "manifest of nothing": blob("fusecheck.json", b"{}"),
}


def own_set(lab: Lab) -> None:
    """Our own small set: each of `CASES` in a folder of its own."""
    place = lab.work / "hostile"
    chosen = list(CASES)[:: lab.some(5, 1)]
    for number, name in enumerate(chosen):
        folder = place / f"{number:02d} {name}"
        write_checkpoint(folder, Spec(num_hidden_layers=1))
        CASES[name](folder)
        read_one(lab, folder)
    lab.expect("hostile", not list(place.rglob("canary")), "a pickle was run")
    shutil.rmtree(place)


def read_one(lab: Lab, folder: Path, *, every: bool = True) -> None:
    """The commands that read, `every` one or the two that look deepest, on one folder, which nothing may change."""
    with tempfile.TemporaryDirectory(dir=lab.work) as nowhere:
        dry = ["fuse", folder, Path(nowhere) / "out", "--dry-run", "--json"]
        commands: list[list[object]] = [["inspect", folder], ["verify", folder], ["inspect", folder, "--json"], dry]
        for arguments in commands[: None if every else 2]:
            run, seconds, peak = measured(lab, *arguments)
            for why in lab.wrong_words(run, Rules(codes=(0, 1, 2, 3, 4))):
                lab.complain(run.what, why)
            # verify reads all the data of what may be any size; the others read headers
            bounded = arguments[0] != "verify" or run.code > 1
            lab.expect(run.what, not bounded or seconds <= MAX_SECONDS, f"takes {seconds:.1f} s")
            lab.expect(run.what, not bounded or peak <= MAX_BYTES, f"takes {peak >> 20} MiB")
        lab.expect(str(folder), not any(Path(nowhere).iterdir()), "a dry run wrote something")


def measured(lab: Lab, *arguments: object) -> tuple[Run, float, int]:
    """A run, its seconds and its peak of resident bytes."""
    lab.runs += 1
    what = " ".join(map(str, arguments))
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        began = time.monotonic()
        process = subprocess.Popen(
            ["timeout", "-s", "KILL", "60", *lab.command(*arguments)],
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            cwd=lab.work,
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.monotonic() - began
        texts = [_text(stream) for stream in (out, err)]
    return Run(what, process.returncode, *texts), seconds, usage.ru_maxrss * 1024


def _text(stream: object) -> str:
    stream.seek(0)  # type: ignore[attr-defined]
    return bytes(stream.read()).decode("utf-8", "replace")  # type: ignore[attr-defined]


def folders(root: Path) -> Iterator[Path]:
    """The cases of a corpus: every folder below it that holds a file or a link, where it is no part of another one."""
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        inner = [path for path in sorted(folder.iterdir()) if path.is_dir()]
        plain = any(not path.is_dir() or path.is_symlink() for path in folder.iterdir())
        yield from [folder] if plain or not inner else inner


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def corpus_fault(root: Path) -> Fault:
    """The same over somebody else's corpus."""

    def read_all(lab: Lab) -> None:
        for folder in folders(root.resolve()):
            read_one(lab, folder, every=False)

    return Fault(f"corpus {root.name}", read_all, ("timeout",))


FAULTS = (Fault("hostile", own_set, ("timeout",)),)
