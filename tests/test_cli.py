"""The command line: exit codes, one error line, documents, and a terminal that nothing foreign can drive."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from checkpoints import PACKINGS, Spec, fused, read_checkpoint, tensors, write_checkpoint, write_safetensors

from fusecheck import __version__, fuse, verify
from fusecheck.operations.inspect import inspect
from fusecheck.operations.verify import VerifyReport
from fusecheck.origin import Traffic
from fusecheck.render.fuse import fuse_lines
from fusecheck.render.inspect import engines_table, inspect_table
from fusecheck.render.terminal import PipeConsole
from fusecheck.render.verify import verify_lines, verify_table
from fusecheck.verdicts import Place

SINGLE = "model.safetensors"
RUN = "from fusecheck.cli import main\nmain()\n"
MAKE = Path(__file__).parent.parent / "scripts" / "make_checkpoint.py"
ENGINES = "engines: loads in vLLM"
HOSTILE = "\x1b[31m\x9b2J\u202egnp.exe[/] [bold]\\ \u200b\u03ba\r\n"
DRIVING = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b\u202e]")

HEAVY = ("torch", "numpy", "transformers", "huggingface_hub")
NO_HEAVY = f"""
import os, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {HEAVY}:
            os.write(2, b"imported " + name.encode())
            os._exit(99)
sys.meta_path.insert(0, Refuse())
"""
NO_TORCH = "import sys\nsys.modules['torch'] = None\n"
SLOW = """
import sys, threading, time
from fusecheck.files import Files
read_into = Files.read_into
def slow(self, file, offset, buffer):
    read_into(self, file, offset, buffer)
    if threading.current_thread() is not threading.main_thread():
        print("copying", file=sys.stderr, flush=True)
        time.sleep(0.05)
Files.read_into = slow
"""


def environment(**changes: str) -> dict[str, str]:
    """Ours without what would colour the output."""
    colours = {"FORCE_COLOR", "NO_COLOR", "CI", "TERM", "COLUMNS", "PYTHONUNBUFFERED", "TTY_COMPATIBLE"}
    return {key: value for key, value in os.environ.items() if key not in colours} | changes


def run(
    *arguments: object, before: str = "", env: Mapping[str, str] | None = None, **options: int
) -> subprocess.CompletedProcess[str]:
    """fusecheck in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", before + RUN, *map(str, arguments)],
        env=environment(**(env or {})),
        encoding="utf-8",
        timeout=60,
        check=False,
        stdout=options.get("stdout", subprocess.PIPE),
        stderr=options.get("stderr", subprocess.PIPE),
    )


Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "src", Spec(num_hidden_layers=1, values="normal", left_out=("pytorch_model.bin",)))
    return tmp_path / "src"


def spoil(source: Path) -> None:
    """The k_proj of layer 0 in another dtype."""
    content = tensors(Spec(num_hidden_layers=1))
    dtype, shape, data = content["model.layers.0.self_attn.k_proj.weight"]
    assert dtype == "BF16"
    content["model.layers.0.self_attn.k_proj.weight"] = ("F16", shape, data)
    write_safetensors(source / SINGLE, content)


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def one_error(stderr: str) -> str:
    """The only line of stderr, which is an error without a traceback."""
    assert "Traceback" not in stderr
    lines = stderr.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    return lines[0]


# -------------------------------------------------------------------------------------------------------- exit codes


def test_0_done(call: Call, source: Path, tmp_path: Path) -> None:
    code, out, err = call("fuse", source, tmp_path / "out")
    assert code == 0
    assert out.splitlines()[0] == f"fused {source} -> {tmp_path / 'out'}"
    assert "  1 layer: 13 tensors in, 10 out (2 fused, 8 copied)" in out
    assert "left out: pytorch_model.bin" in out
    assert [line for line in err.splitlines() if line.startswith(ENGINES)] == err.splitlines()
    assert read_checkpoint(tmp_path / "out") == fused(read_checkpoint(source))
    code, out, _ = call("fuse", source, tmp_path / "out")
    assert (code, out.splitlines()[0]) == (0, f"already done, nothing written: {source} -> {tmp_path / 'out'}")
    code, out, _ = call("fuse", tmp_path / "out", tmp_path / "again")
    assert (code, out.startswith("already fused, copied")) == (0, True)


def test_1_not_equal(call: Call, source: Path, tmp_path: Path) -> None:
    call("fuse", source, tmp_path / "out")
    code, out, _ = call("verify", tmp_path / "out")
    assert (code, out.splitlines()[-1]) == (0, f"EQUAL: {tmp_path / 'out'} (proved: exact, probe, numeric)")
    flip(tmp_path / "out" / SINGLE)
    code, out, err = call("verify", tmp_path / "out")
    assert (code, out.splitlines()[-1]) == (1, f"NOT EQUAL: {tmp_path / 'out'}")
    assert "model.safetensors" in out
    assert "error" not in err
    (tmp_path / "out" / SINGLE).unlink()
    assert call("verify", tmp_path / "out")[0] == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["fuse"],
        ["fuse", "src"],
        ["fuse", "absent", "new"],
        ["fuse", "", "new"],
        ["fuse", "src", ""],
        ["fuse", "src/config.json", "new"],
        ["fuse", "src", "src"],
        ["fuse", "src", "src/config.json"],
        ["fuse", "src", "n" * 300],
        ["fuse", "n" * 300, "new"],
        ["fuse", "src", "new", "more"],
        ["fuse", "src", "new", "--no-such"],
        ["fuse", "src", "new", "--threads=0"],
        ["verify", "absent"],
        ["verify", "src"],
        ["verify", "n" * 300],
        ["verify", "src", "--layer=x"],
        ["verify", "out", "--layer=1"],
        ["verify", "out", "--device=abacus"],
        ["no-such-command"],
        ["--no-such"],
    ],
    ids=lambda arguments: " ".join(arguments)[:40],
)
def test_2_usage(
    call: Call, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert call("fuse", source, "out")[0] == 0
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    one_error(err)
    code, out, err = call(*arguments, "--json")
    one_error(err)
    assert (code, json.loads(out)["verdict"], json.loads(out)["exit_code"]) == (2, "error", 2)


def test_2_nothing_asked_for(call: Call) -> None:
    code, out, err = call()
    assert (code, err) == (2, "")
    assert "Usage: " in out


def test_3_malformed(call: Call, source: Path, tmp_path: Path) -> None:
    spoil(source)
    code, out, err = call("fuse", source, tmp_path / "out")
    assert (code, out) == (3, "")
    line = one_error(err)
    assert line.startswith(f"error: {SINGLE}: model.layers.0.self_attn.k_proj.weight: ")
    assert "found F16 [16, 16]" in line
    assert "wanted BF16" in line
    assert names_in(tmp_path) == ["src"]


def test_4_environment(call: Call, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusecheck.target.free_space", lambda _: 1)
    code, out, err = call("fuse", source, tmp_path / "out")
    assert (code, out) == (4, "")
    assert "not enough free space" in one_error(err)
    assert names_in(tmp_path) == ["src"]


def test_70_a_bug(call: Call, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("by\nzero")

    monkeypatch.setattr("fusecheck.job.survey", fail)
    monkeypatch.delenv("FUSECHECK_DEBUG", raising=False)
    code, _, err = call("fuse", source, tmp_path / "out")
    assert (code, "ZeroDivisionError" in one_error(err)) == (70, True)
    monkeypatch.setenv("FUSECHECK_DEBUG", "1")
    code, _, err = call("fuse", source, tmp_path / "out")
    assert (code, "Traceback" in err) == (70, True)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM])
def test_a_signal_cleans_up(source: Path, tmp_path: Path, number: signal.Signals) -> None:
    for side in range(40):
        (source / f"{side}.txt").write_text("text")
    command = [sys.executable, "-c", SLOW + RUN, "fuse", str(source), str(tmp_path / "new" / "out"), "--json"]
    with subprocess.Popen(command, stdout=-1, stderr=-1, encoding="utf-8", env=environment()) as child:
        assert child.stderr is not None
        assert child.stderr.readline() == "copying\n"
        assert len(list((tmp_path / "new").glob(".fusecheck-*"))) == 1
        child.send_signal(number)
        time.sleep(0.02)
        child.send_signal(number)
        out, err = child.communicate(timeout=30)
    assert child.returncode == 128 + number
    assert err.splitlines()[-1] == f"error: stopped by {number.name} (signal {int(number)})"
    assert json.loads(out)["exit_code"] == 128 + number
    assert names_in(tmp_path) == ["src"]


# --------------------------------------------------------------------------------------------------------- documents


def test_documents(call: Call, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    wanted = [
        (("fuse", source, out, "--dry-run"), 0, "would_fuse"),
        (("fuse", source, out), 0, "fused"),
        (("fuse", source, out), 0, "already_done"),
        (("fuse", source, out, "--dry-run"), 0, "already_done"),
        (("fuse", out, tmp_path / "two"), 0, "copied"),
        (("verify", out), 0, "equal"),
        (("fuse", source, source), 2, "error"),
    ]
    for arguments, code, verdict in wanted:
        found, text, _ = call(*arguments, "--json")
        document = json.loads(text)
        assert (found, document["verdict"], document["schema_version"]) == (code, verdict, 1), arguments
        assert list(document)[:2] == ["schema_version", "verdict"]
    flip(out / SINGLE)
    found, text, _ = call("verify", out, "--json")
    document = json.loads(text)
    assert (found, document["verdict"], document["exact"]["verdict"]) == (1, "not_equal", "fail")
    assert document["exact"]["findings"][0]["file"] == SINGLE


def test_the_document_of_an_error(call: Call, source: Path, tmp_path: Path) -> None:
    spoil(source)
    for more, verdict in (((), "error"), (("--dry-run",), "would_refuse")):
        code, text, err = call("fuse", source, tmp_path / "out", "--json", *more)
        document = json.loads(text)
        assert (code, document["verdict"], document["exit_code"]) == (3, verdict, 3)
        assert document["file"] == SINGLE
        assert document["tensor"] == "model.layers.0.self_attn.k_proj.weight"
        assert one_error(err) == f"error: {document['message']}"
        assert not (tmp_path / "out").exists()


def test_a_fuse_document_says_what_was_done(call: Call, source: Path, tmp_path: Path) -> None:
    document = json.loads(call("fuse", source, tmp_path / "out", "--json")[1])
    assert (document["layers"], document["fused"], document["already_fused"]) == (1, 2, 0)
    assert (document["source_tensors"], document["output_tensors"], document["shards"]) == (13, 10, [SINGLE])
    assert document["left_out"] == [{"path": "pytorch_model.bin", "reason": "a weight file that is not read"}]


# ------------------------------------------------------------------------------------------------------------- flags


def test_quiet_and_verbose(call: Call, source: Path, tmp_path: Path) -> None:
    assert call("fuse", source, tmp_path / "quiet", "-q") == (0, "", "")
    code, out, err = call("verify", tmp_path / "quiet", "--quiet")
    assert (code, out.count("\n"), err) == (0, 1, "")
    assert out.startswith("EQUAL: ")
    _, out, _ = call("fuse", source, tmp_path / "verbose", "-v")
    assert "left out: pytorch_model.bin: a weight file that is not read" in out
    flip(tmp_path / "quiet" / SINGLE)
    code, out, _ = call("verify", tmp_path / "quiet", "-q")
    assert (code, out.splitlines()[-1].startswith("NOT EQUAL: ")) == (1, True)
    assert call("fuse", "absent", "new", "-q")[2] != ""
    assert call("inspect", source, "-q")[:2] == (0, "fuse: would make 2 fused tensors\n")


@pytest.fixture
def failed(source: Path, tmp_path: Path) -> VerifyReport:
    """A report in which nothing but one probe failed."""
    fuse(source, tmp_path / "out")
    report = verify(tmp_path / "out", device="cpu")
    first, *others = report.projections
    probe = replace(first.probe, verdict="fail", reason="no", first_difference=Place(3, "self_attn.q_proj"))
    return replace(report, verdict="not_equal", projections=(replace(first, probe=probe), *others))


def test_quiet_still_says_why_not_equal(failed: VerifyReport) -> None:
    wanted = f"probe    fail: {failed.projections[0].tensor}: no, first at row 3 of self_attn.q_proj"
    assert list(verify_lines(failed, quiet=True)) == [wanted, f"NOT EQUAL: {failed.out}"]
    assert wanted in verify_lines(failed)


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_no_cell_of_a_table_is_ever_cut(failed: VerifyReport, source: Path, width: int) -> None:
    for table in (verify_table(failed), engines_table(inspect(source)), inspect_table(inspect(source))):
        drawn = StringIO()
        PipeConsole(file=drawn, width=width).table(table)
        text = " ".join(drawn.getvalue().split())
        assert "…" not in text
        words = [word for column in table.columns for cell in column.cells for word in str(cell).split()]
        assert [word for word in words if word not in text] == []
        assert width < 80 or max(map(len, drawn.getvalue().splitlines())) <= width


@pytest.mark.parametrize("ranks", [{}, {"target": "vllm-sharded", "tp": 1}])
def test_what_was_read_from_a_store_is_told_of_every_layout(
    source: Path, tmp_path: Path, ranks: Mapping[str, Any]
) -> None:
    report = replace(fuse(source, tmp_path / "out", **ranks), traffic=Traffic(7, 1, 3000))
    assert "  read 3.0 kB in 7 requests, 1 of them again" in fuse_lines(report)


def test_what_passed_is_told_in_full_when_verbose(call: Call, source: Path, tmp_path: Path) -> None:
    call("fuse", source, tmp_path / "out")
    assert "error / bound" not in call("verify", tmp_path / "out")[1]
    assert "bitwise equal; error / bound" in call("verify", tmp_path / "out", "-v")[1]


def test_no_engine_is_named_for_what_has_no_fused_form(call: Call, source: Path) -> None:
    assert "vLLM" in call("inspect", source)[1]
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "model_type": "gemma3"}))
    code, out, _ = call("inspect", source)
    assert (code, "fuse: would refuse: " in out, "vLLM" in out) == (0, True, False)
    assert json.loads(call("inspect", source, "--json")[1])["engines"] == []


def test_torch_needs_no_numpy_and_says_nothing_of_it(source: Path, tmp_path: Path) -> None:
    run("fuse", source, tmp_path / "out")
    done = run("verify", tmp_path / "out", "--no-progress", before="import sys\nsys.modules['numpy'] = None\n")
    assert (done.returncode, done.stderr) == (0, "")


def test_version_and_help(call: Call) -> None:
    assert call("--version") == (0, f"fusecheck {__version__}\n", "")
    for arguments in (["-h"], ["--help"], ["fuse", "-h"], ["verify", "--help"]):
        code, out, err = call(*arguments)
        assert (code, err) == (0, "")
        assert "Usage: " in out
        assert "Exit codes: 0 done or equal; 1 checked and not equal; 2 usage" in " ".join(out.split())


def test_help_of_80_columns_breaks_no_option(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for verb in ("fuse", "unfuse", "verify", "bench", "inspect", "plan", "run", "finalize"):
        out = call(verb, "-h")[1]
        assert not re.search(r"\w-\n", out), out
        [line] = [line for line in call("-h")[1].splitlines() if line.startswith(f"  {verb} ")]
        assert line.endswith("."), line
        assert not line.endswith("...")


def test_progress_lines(source: Path, tmp_path: Path) -> None:
    fast = "import time\nticks = iter(range(9**9))\ntime.monotonic = lambda: next(ticks)\n"
    _, found = (run("fuse", source, tmp_path / name, before=fast).stderr for name in ("a", "b"))
    lines = [line for line in found.splitlines() if line.startswith("fusing: ")]
    assert len(lines) >= 5
    assert all(re.fullmatch(r"fusing: \d+%, [\d.]+ (bytes|kB) of [\d.]+ kB, .+/s", line) for line in lines)
    none = run("fuse", source, tmp_path / "c", "--no-progress", before=fast).stderr
    assert [line for line in none.splitlines() if not line.startswith(ENGINES)] == []


def test_a_bar_on_a_terminal_only(source: Path, tmp_path: Path) -> None:
    def on_terminal(name: str, **env: str) -> str:
        ours, theirs = pty.openpty()
        try:
            assert run("fuse", source, tmp_path / name, env={"TERM": "xterm", **env}, stderr=theirs).returncode == 0
            return os.read(ours, 1 << 16).decode()
        finally:
            os.close(ours)
            os.close(theirs)

    assert "fusing" in on_terminal("bar")
    assert "\x1b[2K\x1b[1A" not in on_terminal("narrow", COLUMNS="40")  # a bar of two lines goes up to draw itself anew
    assert "\x1b[?25l" not in on_terminal("ci", CI="true")
    assert "\x1b[3" not in on_terminal("plain", NO_COLOR="1")


# ----------------------------------------------------------------------------------------------------------- streams


@pytest.mark.parametrize("arguments", [["fuse", "src", "out"], ["fuse", "src", "out", "--json"], ["--version"], ["-h"]])
def test_a_full_stdout_is_a_failure(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert source.is_dir()
    with Path("/dev/full").open("w") as full:
        done = run(*arguments, stdout=full.fileno())
    assert done.returncode == 4
    assert one_error(done.stderr.splitlines()[-1]) == "error: stdout: cannot write: No space left on device"


def test_a_full_stdout_still_gets_its_error_told(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = run("verify", tmp_path / "absent", "--json", stdout=full.fileno())
    assert (done.returncode, "OUT does not exist" in one_error(done.stderr)) == (2, True)


def test_a_full_stderr_is_no_failure(source: Path, tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = run("fuse", source, tmp_path / "out", stderr=full.fileno())
    assert (done.returncode, done.stdout.startswith("fused ")) == (0, True)


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_closed_pipe_is_no_failure(source: Path, tmp_path: Path, stream: str, unbuffered: str) -> None:
    def run_closed(*arguments: object) -> int:
        ours, theirs = os.pipe()
        os.close(ours)
        try:
            env = {"PYTHONUNBUFFERED": unbuffered}
            done = run(*arguments, env=env, before=NO_TORCH, **{stream: theirs})
        finally:
            os.close(theirs)
        assert "error" not in (done.stderr or "")
        return done.returncode

    assert run_closed("fuse", source, tmp_path / "out") == 0
    assert run_closed("verify", tmp_path / "out") == 0
    flip(tmp_path / "out" / SINGLE)
    assert run_closed("verify", tmp_path / "out") == 1
    assert run_closed("--help") == 0


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&- <&-"])
def test_a_stream_that_was_never_open(source: Path, tmp_path: Path, closed: str) -> None:
    fuse = [sys.executable, "-c", RUN, "fuse", str(source), str(tmp_path / "out")]
    command = ["sh", "-c", f'"$@" {closed}', "sh", *fuse]
    assert subprocess.run(command, env=environment(), capture_output=True, check=False).returncode == 0
    assert read_checkpoint(tmp_path / "out") == fused(read_checkpoint(source))


@pytest.mark.parametrize("locale", [{"LC_ALL": "C"}, {"PYTHONIOENCODING": "ascii"}])
def test_any_locale_shows_any_name(source: Path, tmp_path: Path, locale: dict[str, str]) -> None:
    name = source.rename(tmp_path / "s\u00fc\u5f20\U0001d518")
    (name / "n\u00f6tes.txt").write_text("x")
    (name / "w\u00f6.bin").touch()
    done = run("fuse", name, tmp_path / "\u03ba", "-v", env=locale)
    assert (done.returncode, "error" in done.stderr) == (0, False), done.stderr
    assert (tmp_path / "\u03ba" / "n\u00f6tes.txt").exists()
    assert "w" in done.stdout


def test_a_name_that_is_no_text(source: Path, tmp_path: Path) -> None:
    os.rename(os.fsencode(source), os.fsencode(tmp_path) + b"/\xff\n")  # noqa: PTH104 - bytes
    done = run("fuse", os.fsdecode(os.fsencode(tmp_path) + b"/\xff\n"), tmp_path / "out", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["verdict"] == "fused"


@pytest.mark.parametrize("env", [{}, {"TERM": "xterm-256color"}, {"NO_COLOR": "1", "FORCE_COLOR": "1"}, {"CI": "true"}])
def test_piped_output_is_plain(source: Path, tmp_path: Path, env: dict[str, str]) -> None:
    for arguments in (
        ["fuse", source, tmp_path / "out"],
        ["verify", tmp_path / "out"],
        ["fuse", "absent", "new", "--x"],
    ):
        done = run(*arguments, env=env, before=NO_TORCH)
        assert not re.search("[\r\x1b]", done.stdout + done.stderr) or "FORCE_COLOR" in env
        assert not re.search("\r|\x1b\\[3|\x1b\\[\\?", done.stdout + done.stderr)


def test_forced_colour_brings_no_bar(source: Path, tmp_path: Path) -> None:
    done = run("fuse", source, tmp_path / "out", env={"FORCE_COLOR": "1", "TERM": "xterm"})
    assert "\x1b[1mengines" in done.stderr
    assert not re.search("\r|\x1b\\[\\?|\x1b\\[2K", done.stderr)
    done = run("fuse", "absent", "new", "--x", env={"FORCE_COLOR": "1", "TERM": "xterm"})
    assert "\x1b[1;31merror: " in done.stderr


# ----------------------------------------------------------------------------------------------------- foreign text


def hostile(source: Path, kind: str) -> None:
    """One checkpoint for every place from which a name can reach a message."""
    content = tensors(Spec(num_hidden_layers=1))
    if kind == "tensor":
        content[f"x.{HOSTILE}"] = ("U8", (1,), b"\0")
        write_safetensors(source / SINGLE, content)
    elif kind == "metadata":
        first, second = (dict(list(content.items())[part::2]) for part in (0, 1))
        (source / SINGLE).unlink()
        write_safetensors(source / "model-00001-of-00002.safetensors", first, metadata={HOSTILE: "1"})
        write_safetensors(source / "model-00002-of-00002.safetensors", second, metadata={HOSTILE: "2"})
    elif kind == "config":
        changed = {**json.loads((source / "config.json").read_text()), "model_type": HOSTILE}
        (source / "config.json").write_text(json.dumps(changed))
    elif kind == "index":
        text = json.dumps({"weight_map": {"a": HOSTILE, HOSTILE: SINGLE}})
        (source / "model.safetensors.index.json").write_text(text)
    elif kind == "side file":
        (source / HOSTILE.replace("/", "_")).write_text("x")
    elif kind == "weight file":
        (source / f"{HOSTILE.replace('/', '_')}.safetensors").write_text("x")
    elif kind == "markup":
        content["[/] [bold red]x[/bold red] [link=file:///]"] = ("U8", (1,), b"\0")
        write_safetensors(source / SINGLE, content | {"[/].q_proj.lora_A.weight": ("U8", (1,), b"\0")})


@pytest.mark.parametrize("kind", ["tensor", "metadata", "config", "index", "side file", "weight file", "markup"])
def test_foreign_text_drives_nothing(call: Call, source: Path, tmp_path: Path, kind: str) -> None:
    hostile(source, kind)
    for arguments in (["fuse", source, tmp_path / "out", "-v"], ["verify", tmp_path / "out"]):
        for more in ([], ["--json"]):
            code, out, err = call(*arguments, *more)
            assert code != 70
            assert not DRIVING.search(out + err), ascii(out + err)
            if more:
                json.loads(out)
    if kind == "markup":
        assert "[/].q_proj.lora_A.weight" in call("fuse", source, tmp_path / "out")[2]


def test_arguments_are_foreign_too(call: Call) -> None:
    for arguments in (["fuse", HOSTILE, "new"], ["fuse", "absent", HOSTILE], [HOSTILE], ["fuse", f"--{HOSTILE}"]):
        code, _, err = call(*arguments)
        assert code == 2
        assert not DRIVING.search(one_error(err))


# ------------------------------------------------------------------------------------------------- what it costs


def test_fuse_and_help_load_nothing_heavy(source: Path, tmp_path: Path) -> None:
    for arguments in (
        ["--help"],
        ["fuse", "-h"],
        ["--version"],
        ["fuse", source, tmp_path / "out"],
        ["fuse", "a", "/b"],
    ):
        done = run(*arguments, before=NO_HEAVY, env={"HF_HUB_OFFLINE": "1"})
        assert "imported" not in done.stderr, (arguments, done.stderr)
        assert done.returncode in {0, 2}
    assert (tmp_path / "out" / SINGLE).exists()


def test_exact_needs_no_torch(source: Path, tmp_path: Path) -> None:
    assert run("fuse", source, tmp_path / "out").returncode == 0
    done = run("verify", tmp_path / "out", "--json", before=NO_TORCH + NO_HEAVY.replace("'torch', ", ""))
    document = json.loads(done.stdout)
    assert (done.returncode, document["verdict"], document["proved"]) == (0, "equal", ["exact"])
    assert any("torch is not installed" in warning for warning in document["warnings"])
    done = run("verify", tmp_path / "out", "--device", "cpu", before=NO_TORCH)
    assert (done.returncode, "torch" in one_error(done.stderr)) == (4, True)


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    make = [sys.executable, str(MAKE), "Qwen3-0.6B", str(tmp_path / "src"), "--scale=3", "--sparse"]
    subprocess.run(make, check=True, capture_output=True)
    size = (tmp_path / "src" / SINGLE).stat().st_size
    assert 150e6 < size < 250e6
    # a process starts with the peak of the one that forked it; a small one in between keeps ours out of the number
    between = (
        "import resource, subprocess, sys\n"
        "subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    fuse = [sys.executable, "-c", RUN, "fuse", str(tmp_path / "src"), str(tmp_path / "out")]
    command = [sys.executable, "-c", between, *fuse]
    done = subprocess.run(command, env=environment(), capture_output=True, check=True, encoding="utf-8")
    assert int(done.stdout) * 1024 <= 64 << 20
    assert (tmp_path / "out" / SINGLE).stat().st_size > 0.99 * size


def test_the_packings_of_the_tests_are_those_of_the_product() -> None:
    from fusecheck.mapping import packed_modules_mapping  # noqa: PLC0415 - next to its only use

    assert {part: fused for part, (fused, _) in packed_modules_mapping.items()} == {
        part: fused for fused, parts in PACKINGS.items() for part in parts
    }
